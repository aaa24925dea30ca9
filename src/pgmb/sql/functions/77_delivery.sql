-- Delivery: events with the endpoints that they are for, and what became of them. The Dispatcher receives, posts with
-- no transaction open, and settles.

-- As receive, from a queue that feeds endpoints: the next events, each with the endpoints that it is for. Of a queue that
-- many share those are matched here, once for all of them; an event that is for none is settled. For admins.
create or replace function pgmb.receive_deliveries(queue text, max integer default 500, lease_for interval default null)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload text, headers text,
  published_at timestamptz, attempt integer, endpoints uuid[])
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  q pgmb.queue;
  given uuid;
  events pgmb.event[];
  attempts integer[];
  seqs bigint[];
  meant text[];
  salt bigint;
begin
  perform pgmb.assert_admin();
  q := pgmb.queue_for_consumer(receive_deliveries.queue);
  select s.salt into salt from pgmb.stream s where s.id = q.stream;
  if q.endpoint is not null then
    return query
    select r.lease, r.seq, r.id, r.topic, r.key, r.payload::text, r.headers::text, r.published_at, r.attempt,
      array[q.endpoint]
    from pgmb.receive(receive_deliveries.queue, receive_deliveries.max, receive_deliveries.lease_for) r;
    return;
  end if;
  for turn in 1 .. 5 loop
    select min(r.lease::text)::uuid, array_agg((r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event),
      array_agg(r.attempt)
    into given, events, attempts
    from pgmb.receive(receive_deliveries.queue, receive_deliveries.max, receive_deliveries.lease_for, raw => true) r;
    if given is null then
      return;
    end if;
    with matched as materialized (
      select m.seq, one.subscription
      from pgmb.match(receive_deliveries.queue, q.stream, events) m, unnest(m.subscriptions) one (subscription)
    ), meant as (
      select m.seq, array_agg(e.id)::text endpoints
      from matched m join pgmb.endpoint e on e.subscription = m.subscription and e.state <> 'disabled'
      group by m.seq
    )
    select array_agg(m.seq), array_agg(m.endpoints) into seqs, meant from meant m;
    if seqs is not null then
      if cardinality(seqs) < cardinality(events) then
        perform pgmb.narrow_lease(given, seqs, array(select e.seq from unnest(events) e except select unnest(seqs)));
      end if;
      return query
      select given, e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, salt)), e.topic, e.key, e.payload::text,
        e.headers::text, e.published_at, e.attempt, m.endpoints::uuid[]
      from unnest(seqs, meant) m (seq, endpoints)
      join unnest(events, attempts) e (seq, id, topic, key, payload, headers, published_at, attempt)
        on e.seq = m.seq
      order by e.seq;
      return;
    end if;
    perform pgmb.ack_lease(given);
  end loop;
end $$;

-- Settles what became of a lease's events: those of `seqs`, or with null all that are left, are done with, but for what
-- is listed here by event and endpoint. Such a one waits for its endpoint `after` that time, or is a dead letter where it
-- is the last. tried => false: it was not posted, and that attempt does not count. after => null: as the queue says.
-- Returns how many events. Errors: MB011 the lease is lost.
create or replace function pgmb.settle_deliveries(
  lease uuid, seqs bigint[] default null, failed bigint[] default '{}', endpoints uuid[] default '{}',
  after interval[] default '{}', errors text[] default '{}', tried boolean[] default '{}', last boolean[] default '{}'
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  q pgmb.queue;
  held pgmb.claim;
  failing pgmb.event[];
  attempts integer[];
  salt bigint;
  one record;
begin
  perform pgmb.assert_admin();
  select * into q from pgmb.queue q where q.id = pgmb.lease_queue(settle_deliveries.lease);
  if coalesce(q.endpoint, (select head.endpoint from pgmb.queue head where head.id = q.lane_of)) is not null then
    -- What failed in one request fails together, and in one call.
    for one in
      select array_agg(f.seq) seqs, f.after, f.error, f.tried, f.last
      from unnest(settle_deliveries.failed, settle_deliveries.after, settle_deliveries.errors, settle_deliveries.tried,
        settle_deliveries.last) f (seq, after, error, tried, last)
      group by f.after, f.error, f.tried, f.last
      order by min(f.seq)
    loop
      perform case when one.last then pgmb.bury(settle_deliveries.lease, one.seqs, one.error)
        when one.tried then pgmb.retry(settle_deliveries.lease, one.seqs, one.after, one.error,
          together => cardinality(one.seqs) > 1)
        else pgmb.release(settle_deliveries.lease, one.seqs) end;
    end loop;
    settle_deliveries.seqs := case when settle_deliveries.seqs is not null
      then array(select unnest(settle_deliveries.seqs) except select unnest(settle_deliveries.failed)) end;
    -- What failed may have been all that was left.
    if settle_deliveries.seqs = '{}' or (settle_deliveries.failed <> '{}' and settle_deliveries.seqs is null
      and pgmb.is_retry_lease(settle_deliveries.lease)
      and not exists (select from pgmb.retry r where r.lease = settle_deliveries.lease))
    then
      return 0;
    end if;
    return pgmb.ack(settle_deliveries.lease, settle_deliveries.seqs);
  end if;

  if settle_deliveries.failed <> '{}' then
    if pgmb.is_retry_lease(settle_deliveries.lease) then
      select array_agg((r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event),
        array_agg(r.attempt)
      into failing, attempts
      from pgmb.retry r where r.lease = settle_deliveries.lease and r.seq = any (settle_deliveries.failed);
    else
      held := pgmb.hold_claim(settle_deliveries.lease);
      if held.id is not null then
        select array_agg(e), array_agg(1) into failing, attempts
        from pgmb.claim_events(held) e where e.seq = any (settle_deliveries.failed);
      end if;
    end if;
    select s.salt into salt from pgmb.stream s where s.id = q.stream;
    with outcome as (
      select f.endpoint, f.error, f.last, clock_timestamp() + coalesce(f.after, pgmb.backoff(q, e.attempt)) due_at,
        e.attempt + case when f.tried and not f.last then 1 else 0 end attempt,
        e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, salt)) event_id, e.topic, e.key, e.payload, e.headers,
        e.published_at
      from unnest(settle_deliveries.failed, settle_deliveries.endpoints, settle_deliveries.after, settle_deliveries.errors,
        settle_deliveries.tried, settle_deliveries.last) f (seq, endpoint, after, error, tried, last)
      join unnest(failing, attempts) e (seq, id, topic, key, payload, headers, published_at, attempt) on e.seq = f.seq
      -- One that was dropped meanwhile gets nothing more.
      join pgmb.endpoint still on still.id = f.endpoint
    ), parked as (
      insert into pgmb.delivery (queue, endpoint, due_at, attempt, error, seq, event_id, topic, key, payload, headers,
        published_at)
      select q.id, o.endpoint, o.due_at, o.attempt, o.error, o.seq, o.event_id, o.topic, o.key, o.payload, o.headers,
        o.published_at
      from outcome o where not o.last
    )
    insert into pgmb.dead (queue, endpoint, attempt, error, seq, event_id, topic, key, payload, headers, published_at)
    select q.id, o.endpoint, o.attempt, o.error, o.seq, o.event_id, o.topic, o.key, o.payload, o.headers, o.published_at
    from outcome o where o.last;
  end if;
  return pgmb.ack(settle_deliveries.lease, settle_deliveries.seqs);
end $$;

-- Leases what waits for endpoints and is due, those first that waited longest: of each endpoint at most `room`, or what is
-- given for it in `rooms`, and of none that is not active unless it is named there. A row whose lease expired counts as a
-- failed attempt. For admins.
create or replace function pgmb.claim_deliveries(
  max integer default 500, lease_for interval default '10 seconds', room integer default 10,
  endpoints uuid[] default '{}', rooms integer[] default '{}'
)
returns table (lease uuid, delivery bigint, endpoint uuid, seq bigint, id uuid, topic text, key text, payload text,
  headers text, published_at timestamptz, attempt integer)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  given uuid := gen_random_uuid();
  now timestamptz := clock_timestamp();
begin
  perform pgmb.assert_admin();
  -- An empty look takes no lock and no transaction id.
  if not exists (select from pgmb.delivery) then
    return;
  end if;
  return query
  with recursive waiting (endpoint) as (
    (select d.endpoint from pgmb.delivery d order by d.endpoint limit 1)
    union all
    select (select d.endpoint from pgmb.delivery d where d.endpoint > w.endpoint order by d.endpoint limit 1)
    from waiting w where w.endpoint is not null
  ), open as materialized (
    select w.endpoint, coalesce(named.room, claim_deliveries.room) room
    from waiting w
    join pgmb.endpoint e on e.id = w.endpoint
    left join unnest(claim_deliveries.endpoints, claim_deliveries.rooms) named (endpoint, room) on named.endpoint = w.endpoint
    where (e.state = 'active' or named.room is not null) and coalesce(named.room, claim_deliveries.room) > 0
    -- Who comes first shall not always be the same.
    order by random()
  ), due as materialized (
    select first.id
    from open o
    cross join lateral (
      select d.id from pgmb.delivery d
      where d.endpoint = o.endpoint and d.due_at <= now
      order by d.due_at limit o.room for update skip locked) first
    limit claim_deliveries.max
  )
  update pgmb.delivery d
  set attempt = d.attempt + case when d.lease is null then 0 else 1 end,
    error = case when d.lease is null then d.error else 'lease expired' end,
    lease = given, due_at = now + claim_deliveries.lease_for
  from due
  where d.id = due.id
  returning d.lease, d.id, d.endpoint, d.seq, d.event_id, d.topic, d.key, d.payload::text, d.headers::text, d.published_at,
    d.attempt;
end $$;

-- Settles what became of leased deliveries: those of `done` were delivered; the others wait again, or are dead letters, as
-- in settle_deliveries. Returns how many were still under the lease: others were delivered again. For admins.
create or replace function pgmb.settle_claimed(
  lease uuid, done bigint[], failed bigint[] default '{}', after interval[] default '{}', errors text[] default '{}',
  tried boolean[] default '{}', last boolean[] default '{}'
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  settled bigint;
  part bigint;
begin
  perform pgmb.assert_admin();
  delete from pgmb.delivery d where d.id = any (settle_claimed.done) and d.lease = settle_claimed.lease;
  get diagnostics settled = row_count;
  if settle_claimed.failed = '{}' then
    return settled;
  end if;
  with outcome as (
    select * from unnest(settle_claimed.failed, settle_claimed.after, settle_claimed.errors, settle_claimed.tried,
      settle_claimed.last) f (id, after, error, tried, last)
  ), spent as (
    delete from pgmb.delivery d using outcome o
    where d.id = o.id and d.lease = settle_claimed.lease and o.last
    returning d.*, o.error newest
  )
  insert into pgmb.dead (queue, endpoint, attempt, error, seq, event_id, topic, key, payload, headers, published_at)
  select s.queue, s.endpoint, s.attempt, coalesce(s.newest, s.error), s.seq, s.event_id, s.topic, s.key, s.payload, s.headers,
    s.published_at
  from spent s;
  get diagnostics part = row_count;
  settled := settled + part;
  update pgmb.delivery d
  set lease = null, due_at = clock_timestamp() + coalesce(o.after, interval '0'), error = coalesce(o.error, d.error),
    attempt = d.attempt + case when o.tried then 1 else 0 end
  from unnest(settle_claimed.failed, settle_claimed.after, settle_claimed.errors, settle_claimed.tried,
    settle_claimed.last) o (id, after, error, tried, last)
  where d.id = o.id and d.lease = settle_claimed.lease and not o.last;
  get diagnostics part = row_count;
  return settled + part;
end $$;

-- Prolongs the leases of deliveries to `lease_for` from now. Returns how many rows. For admins.
create or replace function pgmb.extend_claimed(leases uuid[], lease_for interval default '10 seconds')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  extended bigint;
begin
  perform pgmb.assert_admin();
  update pgmb.delivery d set due_at = clock_timestamp() + extend_claimed.lease_for
  where d.lease = any (extend_claimed.leases);
  get diagnostics extended = row_count;
  return extended;
end $$;
