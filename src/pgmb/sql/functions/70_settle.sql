-- Settling: ack, retry, bury and extend what a lease holds. Every call names the lease; a lease that was
-- lost (expired and taken over, superseded, sought past) changes nothing and raises MB011.

-- Raises that a lease no longer holds. Internal.
create or replace function pgmb.raise_lost(lease uuid)
returns void
language plpgsql
as $$
begin
  raise exception 'lease % is lost', lease using errcode = 'MB011',
    hint = 'It expired and its events were delivered again, or the queue was moved. Roll back; extend() long work in time.';
end $$;

-- The claim of a lease, its row locked so that no takeover can pass while this transaction settles: by
-- KEY SHARE, which lets other transactions settle other events of the lease at once. Null if it was settled
-- before. Errors: MB011 lost. Internal.
create or replace function pgmb.hold_claim(lease uuid)
returns pgmb.claim
language plpgsql
as $$
declare
  held pgmb.claim;
begin
  select * into held from pgmb.claim c
  where c.queue = pgmb.lease_queue(lease) and c.id = pgmb.lease_claim(lease) and c.token = pgmb.lease_token(lease)
  for key share skip locked;
  if not found then
    -- Locked, gone, or never there. A takeover locks only what has expired: that is lost. Another
    -- transaction settling the whole lease is waited for.
    select * into held from pgmb.claim c
    where c.queue = pgmb.lease_queue(lease) and c.id = pgmb.lease_claim(lease) and c.token = pgmb.lease_token(lease);
    if not found or held.expires_at <= clock_timestamp() then
      perform pgmb.raise_lost(lease);
    end if;
    select * into held from pgmb.claim c
    where c.queue = pgmb.lease_queue(lease) and c.id = pgmb.lease_claim(lease) and c.token = pgmb.lease_token(lease)
    for key share;
  end if;
  if held.state = 's' then
    return null;
  end if;
  if held.state not in ('l', 'o') or pgmb.may_be_void(held.queue, held.id) then
    perform pgmb.raise_lost(lease);
  end if;
  if held.xid = pg_current_xact_id() then
    perform pgmb.recheck_at_commit(held.queue, held.id);
  end if;
  return held;
end $$;

-- Ends a claim, or settles some events of it. Returns how many events that settled now. Internal.
create or replace function pgmb.settle_claim(claim pgmb.claim, seqs bigint[])
returns bigint[]
language plpgsql
as $$
#variable_conflict use_variable
declare
  settled bigint[];
begin
  with fresh as (
    insert into pgmb.settlement (queue, claim, seq)
    select distinct (settle_claim.claim).queue, (settle_claim.claim).id, one
    from unnest(seqs) one
    where one > (settle_claim.claim).lo and one <= (settle_claim.claim).hi
    on conflict do nothing
    returning settlement.seq
  )
  select array_agg(fresh.seq) into settled from fresh;
  return coalesce(settled, '{}');
end $$;

-- Deletes retried events of a lease, which settles them. Returns how many. Internal.
create or replace function pgmb.ack_retried(lease uuid, seqs bigint[])
returns bigint
language plpgsql
as $$
declare
  acked record;
begin
  with gone as (
    delete from pgmb.retry r
    where r.lease = ack_retried.lease and (seqs is null or r.seq = any (seqs))
    returning r.key, r.ordered
  )
  select count(*) events, array_agg(distinct gone.key) filter (where gone.ordered and gone.key is not null) keys
  into acked from gone;
  if acked.keys is not null then
    perform pgmb.wake_keys(pgmb.lease_queue(lease), acked.keys);
  end if;
  return acked.events;
end $$;

-- Settles a whole lease as done. Returns how many events it held, settled one by one or not. Internal.
create or replace function pgmb.ack_lease(lease uuid)
returns bigint
language plpgsql
as $$
declare
  acked record;
  held pgmb.claim;
begin
  perform pgmb.assert_consumer(pgmb.lease_queue(lease), null);
  -- The common way: not expired, so no takeover is at it.
  update pgmb.claim c set state = 's'
  where c.queue = pgmb.lease_queue(lease) and c.id = pgmb.lease_claim(lease) and c.token = pgmb.lease_token(lease)
    and c.state in ('l', 'o') and c.expires_at > clock_timestamp()
  returning c.events, c.queue, c.id, c.xid = pg_current_xact_id() own,
    c.at < clock_timestamp() - interval '900 milliseconds' old
  into acked;
  if acked.id is not null then
    if acked.own then
      perform pgmb.recheck_at_commit(acked.queue, acked.id);
    end if;
    -- Only a transaction that stayed open for a second can have been superseded.
    if acked.old and pgmb.may_be_void(acked.queue, acked.id) then
      perform pgmb.raise_lost(lease);
    end if;
    return acked.events;
  end if;
  if pgmb.is_retry_lease(lease) then
    held.events := pgmb.ack_retried(lease, null);
    if held.events = 0 then
      perform pgmb.raise_lost(lease);
    end if;
    return held.events;
  end if;
  held := pgmb.hold_claim(lease);
  if held.id is null then
    return 0;
  end if;
  update pgmb.claim c set state = 's' where c.queue = held.queue and c.id = held.id;
  return held.events;
end $$;

-- Has pgmb.refuse_void look at a claim again when this transaction, which made it, commits. Internal.
create or replace function pgmb.recheck_at_commit(queue integer, claim bigint)
returns void
language sql
as $$
  update pgmb.claim c set xid = c.xid where c.queue = recheck_at_commit.queue and c.id = recheck_at_commit.claim
$$;

-- Settles a lease's events as done: all of them, or those named by seq. Returns how many; repeating an ack
-- changes nothing and returns 0 (for retried events, which leave no trace, it raises MB011). Atomic with the caller's transaction. Writes one row for a whole lease,
-- one an event otherwise. Errors: MB011 the lease is lost, 42501.
create or replace function pgmb.ack(lease uuid, seqs bigint[] default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  held pgmb.claim;
  settled bigint;
begin
  if ack.seqs is null then
    settled := pgmb.ack_lease(ack.lease);
    if settled > 0 then
      settled := settled - count(*) from pgmb.settlement s where s.queue = pgmb.lease_queue(ack.lease) and s.claim = pgmb.lease_claim(ack.lease);
    end if;
    return settled;
  end if;
  perform pgmb.assert_consumer(pgmb.lease_queue(lease), null);
  if pgmb.is_retry_lease(lease) then
    settled := pgmb.ack_retried(ack.lease, ack.seqs);
    if settled = 0 and not exists (select from pgmb.retry r where r.lease = ack.lease) then
      perform pgmb.raise_lost(ack.lease);
    end if;
    return settled;
  end if;
  held := pgmb.hold_claim(ack.lease);
  if held.id is null then
    return 0;
  end if;
  return cardinality(pgmb.settle_claim(held, ack.seqs));
end $$;

-- Sends events of a lease (all that are left, or those named) to be tried again `after` that time, by
-- default the queue's backoff; past the queue's max_attempts they become dead letters with this error. In an
-- ordered queue, what the lease holds behind them of the same keys goes back too, untried. together => true has
-- these events, and no others, come together again: the same set. Returns how many of those asked for. Errors: MB011
-- the lease is lost, 42501.
create or replace function pgmb.retry(
  lease uuid, seqs bigint[] default null, after interval default null, error text default null,
  together boolean default false
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb.settle_as_failed(retry.lease, retry.seqs, retry.after, retry.error, 'retry',
    case when retry.together then nextval('pgmb.retry_id_seq') end);
end $$;

-- Sends events of a lease (all that are left, or those named) to the queue's dead letters with the error.
-- Returns how many. Errors: MB011 the lease is lost, 42501.
create or replace function pgmb.bury(lease uuid, seqs bigint[] default null, error text default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb.settle_as_failed(bury.lease, bury.seqs, null, bury.error, 'bury');
end $$;

-- Gives events of a lease (all that are left, or those named) back untried: they are due at once and the
-- attempt does not count. Returns how many. Errors: MB011 the lease is lost, 42501.
create or replace function pgmb.release(lease uuid, seqs bigint[] default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb.settle_as_failed(release.lease, release.seqs, interval '0', null, 'release');
end $$;

-- What retry, bury and release share. Internal.
create or replace function pgmb.settle_as_failed(
  lease uuid, seqs bigint[], after interval, error text, manner text, together bigint default null
)
returns bigint
language plpgsql
as $$
#variable_conflict use_variable
declare
  q pgmb.queue;
  held pgmb.claim;
  failing pgmb.event[];
  behind pgmb.event[] := '{}';
  settled bigint[];
  failed bigint;
  now timestamptz := clock_timestamp();
begin
  perform pgmb.assert_consumer(pgmb.lease_queue(lease), null);
  select * into q from pgmb.queue where id = pgmb.lease_queue(lease);
  if pgmb.is_retry_lease(lease) then
    failed := pgmb.fail_retried(q, lease, seqs, after, error, manner, together);
    if failed = 0 and not exists (select from pgmb.retry r where r.lease = settle_as_failed.lease) then
      perform pgmb.raise_lost(lease);
    end if;
    return failed;
  end if;
  held := pgmb.hold_claim(lease);
  if held.id is null then
    return 0;
  end if;
  if seqs is null then
    update pgmb.claim c set state = 's'
    where c.queue = held.queue and c.id = held.id and c.state in ('l', 'o');
    if not found then
      return 0;
    end if;
    failing := array(select e from pgmb.claim_events(held) e);
  else
    failing := array(select e from pgmb.claim_events(held) e where e.seq = any (seqs));
    if q.ordered and manner <> 'bury' then
      behind := array(
        select e from pgmb.claim_events(held) e
        where e.seq <> all (seqs)
          and e.key in (select f.key from unnest(failing) f where f.seq < e.seq));
    end if;
    settled := pgmb.settle_claim(held, array(select f.seq from unnest(failing || behind) f));
  end if;
  if together is not null then
    -- One time for the whole set.
    after := coalesce(after, pgmb.backoff(q, 1));
  end if;
  perform pgmb.fail_event(q, f, held.id, case manner when 'release' then 0 else 1 end,
    now + coalesce(after, pgmb.backoff(q, 1)), error, manner = 'bury', together => together)
  from unnest(failing) f
  where seqs is null or f.seq = any (settled);
  get diagnostics failed = row_count;
  perform pgmb.fail_event(q, f, held.id, 0, now, null) from unnest(behind) f where f.seq = any (settled);
  return failed;
end $$;

-- The same for retried events, which have rows of their own. Internal.
create or replace function pgmb.fail_retried(
  queue pgmb.queue, lease uuid, seqs bigint[], after interval, error text, manner text, together bigint
)
returns bigint
language plpgsql
as $$
#variable_conflict use_variable
declare
  dead bigint;
  failed bigint;
  keys text[];
  now timestamptz := clock_timestamp();
begin
  with spent as (
    delete from pgmb.retry r
    where r.lease = fail_retried.lease and (seqs is null or r.seq = any (seqs))
      and (manner = 'bury' or (manner = 'retry' and r.attempt >= (queue).max_attempts))
    returning r.*
  ), buried as (
    insert into pgmb.dead (queue, attempt, error, seq, event_id, topic, key, payload, headers, published_at)
    select s.queue, s.attempt, coalesce(fail_retried.error, s.error), s.seq, s.event_id, s.topic, s.key, s.payload,
      s.headers, s.published_at
    from spent s
  )
  select count(*), array_agg(distinct s.key) filter (where s.ordered and s.key is not null) into dead, keys from spent s;
  if together is not null then
    after := coalesce(after, (select pgmb.backoff(queue, max(r.attempt)) from pgmb.retry r where r.lease = fail_retried.lease));
  end if;
  update pgmb.retry r
  set lease = null, due_at = now + coalesce(after, pgmb.backoff(queue, r.attempt)),
    attempt = r.attempt + case manner when 'release' then 0 else 1 end, expiries = 0,
    together = case manner when 'release' then r.together else fail_retried.together end,
    error = coalesce(fail_retried.error, r.error)
  where r.lease = fail_retried.lease and (seqs is null or r.seq = any (seqs));
  get diagnostics failed = row_count;
  if (queue).ordered and seqs is not null and failed > 0 then
    update pgmb.retry r
    set lease = null, due_at = ahead.due_at
    from pgmb.retry ahead
    where r.lease = fail_retried.lease and ahead.queue = r.queue and ahead.ordered and ahead.key = r.key
      and ahead.lease is null and ahead.seq = any (seqs) and (ahead.origin, ahead.seq) < (r.origin, r.seq);
  end if;
  if keys is not null then
    perform pgmb.wake_keys((queue).id, keys);
  end if;
  return dead + failed;
end $$;

-- Prolongs a lease to `lease_for` from now (default: the queue's own). Returns when it expires.
-- Errors: MB011 the lease is lost, 42501.
create or replace function pgmb.extend(lease uuid, lease_for interval default null)
returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  held pgmb.claim;
  expires timestamptz;
begin
  perform pgmb.assert_consumer(pgmb.lease_queue(lease), null);
  select clock_timestamp() + coalesce(extend.lease_for, q.lease_for) into expires
  from pgmb.queue q where q.id = pgmb.lease_queue(extend.lease);
  if pgmb.is_retry_lease(lease) then
    update pgmb.retry r set due_at = expires where r.lease = extend.lease;
    if not found then
      perform pgmb.raise_lost(extend.lease);
    end if;
    return expires;
  end if;
  held := pgmb.hold_claim(extend.lease);
  if held.id is null then
    perform pgmb.raise_lost(extend.lease);
  end if;
  -- Never behind the sweep: a clock set back must not hide the lease from it.
  select greatest(expires, c.swept + (expires - clock_timestamp())) into expires
  from pgmb.claim c where c.queue = held.queue order by c.id desc limit 1;
  update pgmb.claim c set expires_at = expires where c.queue = held.queue and c.id = held.id;
  return expires;
end $$;
