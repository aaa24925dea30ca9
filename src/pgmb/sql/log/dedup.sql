-- Deduplication: a key names one event of a stream for a while. It is written with the publisher's own rights
-- (pgmb.dedup has the policy that pgmb.delayed has) and in the publisher's transaction: a publish that is rolled
-- back leaves no key.

-- Takes a key for an event: null if the key was free, otherwise the id of the event that has it. Waits for the
-- end of another transaction that is about to take the same key. Called by pgmb.publish and the HTTP server. Errors: MB005
-- not a key or not a duration. Support.
create or replace function pgmb.claim_key(stream text, key text, id uuid, dedup_for interval)
returns uuid
language plpgsql
as $$
declare
  earlier uuid;
begin
  if pg_catalog.length(claim_key.key) not between 1 and 500 then
    raise exception 'a deduplication key must have 1 to 500 characters, got %', pg_catalog.length(claim_key.key)
      using errcode = 'MB005', hint = 'Use a digest of longer keys.';
  end if;
  -- The policy of pgmb.dedup has the same limit.
  if not coalesce(claim_key.dedup_for > interval '0' and claim_key.dedup_for <= interval '366 days', false) then
    raise exception 'dedup_for is more than zero and at most 366 days, got %', coalesce(claim_key.dedup_for::text, 'null')
      using errcode = 'MB005', hint = 'It is a duration, such as ''1 day''.';
  end if;
  loop
    insert into pgmb.dedup (stream, key, id, expires_at)
    values (claim_key.stream, claim_key.key, claim_key.id, pg_catalog.clock_timestamp() + claim_key.dedup_for)
    on conflict do nothing;
    if found then
      return null;
    end if;
    -- Null if it has expired meanwhile, or a concurrent maintain() removed it: then the key is free.
    earlier := pgmb.holder_of_key(claim_key.stream, claim_key.key);
    if earlier is not null then
      return earlier;
    end if;
  end loop;
end $$;

-- The id of the event that has a key. Frees a key that has expired, and returns null. Gives away nothing to one who
-- does not know the key. Called by pgmb.claim_key. Support.
create or replace function pgmb.holder_of_key(stream text, key text)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  holder pgmb.dedup;
  now timestamptz := clock_timestamp();
begin
  select * into holder from pgmb.dedup d
  where d.stream = holder_of_key.stream and d.key = holder_of_key.key;
  -- Taken while the clock was ahead, or it is behind now: the key has lasted at least since it went back.
  if holder.expires_at <= now
    or holder.taken_at > now + interval '1 second' and holder.expires_at - holder.taken_at
      <= pgmb_internal.passed_since(holder.taken_at, now, pgmb_internal.read_clock())
  then
    delete from pgmb.dedup d
    where d.stream = holder_of_key.stream and d.key = holder_of_key.key and d.expires_at = holder.expires_at;
    return null;
  end if;
  return holder.id;
end $$;

-- Deletes keys that have expired, at most `max`, and returns how many. Those that a publisher holds wait for the
-- next time.
create or replace function pgmb.clear_keys(max integer default 10000)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  cleared bigint;
  -- A variable: an index is not used to compare with a volatile function.
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  delete from pgmb.dedup d
  where d.ctid = any (array(
    select old.ctid from pgmb.dedup old where old.expires_at <= now
    order by old.expires_at limit clear_keys.max for update skip locked));
  get diagnostics cleared = row_count;
  return cleared;
end $$;
