-- Retries: which are due, and how they are leased.

-- Where a scan for due retries of a queue starts, for statements that do not call first_retry.
create or replace function pgmb_internal.retry_since(queue integer, now timestamptz)
returns timestamptz
language sql stable
as $$
  select pgmb_internal.scan_since('pgmb.retry_' || queue, now)
$$;

-- The due time of the first retry of a queue that is due; null: none is.
create or replace function pgmb_internal.first_retry(queue integer, now timestamptz)
returns timestamptz
language plpgsql volatile
as $$
declare
  setting_name text := 'pgmb.retry_' || first_retry.queue;
  read_before bigint := pgmb_internal.entries_read('pgmb.retry_due');
  passed bigint;
  first timestamptz;
begin
  select r.due_at into first from pgmb.retry r
  where r.queue = first_retry.queue and r.due_at <= first_retry.now
    and r.due_at >= pgmb_internal.scan_since(setting_name, first_retry.now)
  order by r.due_at limit 1;
  passed := pgmb_internal.entries_read('pgmb.retry_due') - read_before;
  if pgmb_internal.should_store_scan(setting_name, passed) then
    perform pgmb_internal.store_scan(setting_name, first_retry.now,
      pgmb_internal.microseconds(coalesce(first, first_retry.now)), passed);
  end if;
  return first;
end $$;

-- Leases retried events that are due, those first that waited longest, as many as fit into one lease, in a claim that
-- follows `base`, and returns how many. `first`: the due time of the first of them (first_retry). An event whose lease expired twice in a row, or before its last
-- attempt, may have crashed its consumer, so it is leased alone.
create or replace function pgmb_internal.lease_due(
  base pgmb.claim, max integer, first timestamptz, now timestamptz, expires_at timestamptz,
  max_attempts integer, token bigint
)
returns bigint
language plpgsql
as $$
declare
  -- Then the others are not locked: there may be hundreds.
  first_alone boolean := (
    select later.together is null and pgmb_internal.comes_alone(later, lease_due.max_attempts) from pgmb.retry later
    where later.queue = (lease_due.base).queue and later.due_at >= lease_due.first and later.due_at <= lease_due.now
    order by later.due_at, later.together
    limit 1);
  leased bigint[];
begin
  with due as materialized (
    select later.id, later.due_at, later.together,
      pgmb_internal.weight(later.payload) + coalesce(pgmb_internal.weight(later.headers), 0) weight,
      later.together is null and pgmb_internal.comes_alone(later, lease_due.max_attempts) alone
    from pgmb.retry later
    where later.queue = (lease_due.base).queue and later.due_at >= lease_due.first and later.due_at <= lease_due.now
    order by later.due_at, later.together
    limit case when first_alone then 1 else lease_due.max end
    for update skip locked
  )
  -- What failed together comes together, and by itself.
  select array_agg(c.id) into leased
  from (
    select d.id, row_number() over w place, bool_or(d.alone) over w stopped,
      -- What failed together was one lease before.
      d.together is null and sum(d.weight) over w - d.weight >= pgmb_internal.batch_bytes() heavy
    from due d
    where d.together is not distinct from (
      select d.together from due d order by d.due_at, d.together, d.id limit 1)
    window w as (order by d.due_at, d.id)) c
  where c.place = 1 or not (c.stopped or c.heavy);
  return pgmb_internal.lease_retried(lease_due.base, leased, lease_due.expires_at, lease_due.token,
    lease_due.now);
end $$;

-- Leases what is due again of a queue that is at `base`, or of a lane of it, in a claim that follows. Returns how many
-- events. busy: hashes of the keys that leases of an ordered queue hold.
create or replace function pgmb_internal.lease_retries(
  q pgmb.queue, base pgmb.claim, max integer, now timestamptz, expires_at timestamptz, token bigint, busy integer[] default null
)
returns bigint
language plpgsql
as $$
declare
  first timestamptz := pgmb_internal.first_retry(q.id, now);
begin
  if first is null then
    return 0;
  end if;
  if q.ttl is not null and not pgmb_internal.bury_expired(q, base, now) then
    return 0;
  end if;
  if q.ordered then
    return pgmb_internal.lease_due_in_order(base, max, first, now, expires_at, q.max_attempts, token, busy);
  end if;
  return pgmb_internal.lease_due(base, max, first, now, expires_at, q.max_attempts, token);
end $$;

-- The error of events that are older than a queue lets them live.
create or replace function pgmb_internal.expired(q pgmb.queue)
returns text
language sql stable
as $$
  select 'expired: older than ' || (q).ttl
$$;

-- Makes dead letters of those events in pgmb.retry for which the queue's ttl still holds and that are older than it. False: the caller's time is over, and more may be left.
create or replace function pgmb_internal.bury_expired(q pgmb.queue, base pgmb.claim, now timestamptz)
returns boolean
language plpgsql
as $$
declare
  page constant integer := 1000;
  expired bigint[];
  keys text[];
begin
  loop
    expired := array(
      select r.id from pgmb.retry r
      where r.queue = q.id and r.fresh and r.published_at <= now - q.ttl
      order by r.published_at limit page for update skip locked);
    exit when expired = '{}';
    if q.ordered then
      keys := array(select distinct r.key from pgmb.retry r where r.id = any (expired) and r.key is not null);
    end if;
    perform pgmb_internal.bury_retried(expired, pgmb_internal.expired(q));
    perform pgmb_internal.wake_first(base, keys, now);
    exit when cardinality(expired) < page;
    if clock_timestamp() >= pgmb_internal.deadline() then
      return false;
    end if;
  end loop;
  return true;
end $$;

-- Leases rows of pgmb.retry, which the caller has locked, in a claim that follows `base`. Returns how many. If this
-- transaction is superseded it cannot commit: its claim would be void, and no sweep would give the rows back.
create or replace function pgmb_internal.lease_retried(
  base pgmb.claim, leased bigint[], expires_at timestamptz, token bigint, now timestamptz
)
returns bigint
language plpgsql
as $$
begin
  if leased is null then
    return 0;
  end if;
  update pgmb.retry r set lease = (lease_retried.base).id + 1, due_at = 'infinity', decided_at = lease_retried.now,
    fresh = false
  where r.id = any (lease_retried.leased);
  perform pgmb_internal.write_claim(lease_retried.base, lease_retried.token, 'leased_retries',
    (lease_retried.base).place, (lease_retried.base).place, null, cardinality(leased), lease_retried.expires_at,
    at => lease_retried.now);
  perform pgmb_internal.recheck_at_commit((lease_retried.base).queue, (lease_retried.base).id + 1);
  return cardinality(leased);
end $$;

-- Whether a retried event is to be leased without others.
create or replace function pgmb_internal.comes_alone(retried pgmb.retry, max_attempts integer)
returns boolean
language sql immutable
as $$
  select (retried).expiries >= 2 or ((retried).expiries = 1 and (retried).attempt >= max_attempts)
$$;
