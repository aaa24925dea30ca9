-- Delivery: events with the endpoints that they are for, and what became of them. The Dispatcher receives, posts with
-- no transaction open, and settles.

-- As receive, from a queue that feeds endpoints: the next events, each with the endpoints that it is for. Of a queue that
-- many share those are matched here, once for all of them; an event that is for none is settled. One that waited to be
-- tried again more than once, because it was sent again, comes once. `more` is false if the
-- queue is at its end. A single row without a lease means that the events looked at are for no endpoint, and that there are
-- more. For admins.
create or replace function pgmb.receive_deliveries(queue text, max integer default 500, lease_for interval default null)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload text, headers text,
  published_at timestamptz, attempt integer, endpoints uuid[], more boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
set lock_timeout = '1s'
as $$
declare
  q pgmb.queue;
  made record;
  events pgmb.event[];
  attempts integer[];
  seqs bigint[];
  meant text[];
  source pgmb.stream;
begin
  perform pgmb_internal.assert_primary();
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  q := pgmb_internal.queue_for_consumer(receive_deliveries.queue);
  if q.paused_at is not null or receive_deliveries.max <= 0 then
    return;
  end if;
  select s.* into source from pgmb.stream s where s.id = q.stream;
  for turn in 1 .. 5 loop
    made := pgmb_internal.claim_queue(q.id, pg_current_xact_id_if_assigned(), coalesce(pg_sequence_last_value(q.numbers), 0),
      least(receive_deliveries.max, pgmb_internal.lease_events()),
      greatest(coalesce(receive_deliveries.lease_for, q.lease_for), interval '1 millisecond'));
    more := made.ended = 'more';
    if made.lease is null then
      if more then
        return next;
      end if;
      return;
    end if;
    -- An event that waited more than once comes once.
    select array_agg((r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event order by r.place),
      array_agg(r.attempt order by r.place)
    into events, attempts
    from (
      select distinct on (one.seq) one.*
      from pgmb_internal.read_claimed(made.lease, made.retried, made.numbers, q.stream, q.stream_name = 'main', raw => true)
        with ordinality one (lease, seq, id, topic, key, payload, headers, published_at, attempt, place)
      order by one.seq, one.place) r;
    if q.endpoint is not null then
      seqs := array(select e.seq from unnest(events) e);
      meant := array_fill(array[q.endpoint]::text, array[cardinality(events)]);
    else
      with matched as materialized (
        select m.seq, one.subscription
        from pgmb_internal.match(receive_deliveries.queue, q.stream, events) m, unnest(m.subscriptions) one (subscription)
      ), again as materialized (
        -- Leased before, or sent again: what failed then waits in a row of the endpoint.
        select r.seq, r.id from unnest(events) r where r.id is not null
      ), meant as (
        select m.seq, array_agg(e.id)::text endpoints
        from matched m
        join pgmb.endpoint e on e.subscription = m.subscription and e.state <> 'disabled' and e.after_seq < m.seq
        where not exists (
          select from again a join pgmb.delivery d on d.event_id = a.id where a.seq = m.seq and d.endpoint = e.id)
        group by m.seq
      )
      select array_agg(m.seq), array_agg(m.endpoints) into seqs, meant from meant m;
    end if;
    if seqs is not null then
      if cardinality(seqs) < cardinality(events) then
        perform pgmb_internal.narrow_lease(made.lease, seqs, array(select e.seq from unnest(events) e except select unnest(seqs)));
      end if;
      return query
      select made.lease, e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, source.salt)), e.topic::text, e.key::text,
        e.payload::text, e.headers::text, e.published_at, e.attempt, m.endpoints::uuid[], more
      from unnest(events, attempts) with ordinality e (seq, id, topic, key, payload, headers, published_at, attempt, place)
      join unnest(seqs, meant) m (seq, endpoints) on m.seq = e.seq
      order by e.place;
      return;
    end if;
    perform pgmb_internal.ack_lease(made.lease, pgmb_internal.caller_at_low_cost());
    -- Rates count what endpoints get.
    update pgmb.claim c set events = 0
    where c.queue = pgmb_internal.lease_queue(made.lease) and c.id = pgmb_internal.lease_claim(made.lease)
      and c.token = pgmb_internal.lease_token(made.lease);
  end loop;
  return next;
end $$;

-- Settles events of a lease, those of `seqs` or with null all that are left, and reports failures by event and endpoint: each
-- waits for its endpoint `after` that time, or is a dead letter where it is the last. An event that failed for one
-- endpoint and is not among `seqs` stays leased for its others. tried => false: it was not posted, and the attempt does not
-- count. after => null: as the queue says. Returns how many events were settled; repeated, it changes nothing. Errors: MB011
-- the lease is lost, MB029 not READ COMMITTED. For admins.
create or replace function pgmb.settle_deliveries(
  lease uuid, seqs bigint[] default null, failed bigint[] default '{}', endpoints uuid[] default '{}',
  after interval[] default '{}', errors text[] default '{}', tried boolean[] default '{}', last boolean[] default '{}'
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  q pgmb.queue;
  owner pgmb.endpoint;
  settled record;
  salt bigint;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  select shared.* into q from pgmb.queue shared where shared.id = pgmb_internal.lease_queue(settle_deliveries.lease);
  select e.* into owner from pgmb.queue head join pgmb.endpoint e on e.id = head.endpoint
  where head.id = coalesce(q.lane_of, q.id);
  if coalesce(settle_deliveries.failed, '{}') = '{}' then
    return pgmb.ack(settle_deliveries.lease, settle_deliveries.seqs);
  end if;
  if owner.id is not null then
    return pgmb_internal.settle_own(settle_deliveries.lease, settle_deliveries.seqs, settle_deliveries.failed, settle_deliveries.after,
      settle_deliveries.errors, settle_deliveries.tried, settle_deliveries.last, owner.batch > 1);
  end if;
  settled := pgmb_internal.settle_shared(settle_deliveries.lease, settle_deliveries.seqs, settle_deliveries.failed);
  if settled.failing is null then
    return settled.events;
  end if;
  select s.salt into salt from pgmb.stream s where s.id = q.stream;
  -- One that was dropped meanwhile gets nothing more; one that is being dropped is waited for.
  perform from pgmb.endpoint e where e.id = any (settle_deliveries.endpoints) order by e.id for key share;
  with outcome as (
    select f.endpoint, f.error, f.due_at, f.spent, e.attempt + case when f.tried and not f.spent then 1 else 0 end attempt,
      case when f.tried then pgmb_internal.with_error(e.errors, e.attempt, f.error) else e.errors end errors,
      e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, salt)) event_id, e.topic::text, e.key::text, e.payload, e.headers,
      e.published_at
    -- Without payloads where the log has them: each would be copied for every endpoint.
    from unnest(settled.failing, settled.attempts, settled.errors) e (seq, id, topic, key, payload, headers, published_at, attempt, errors)
    join unnest(settle_deliveries.failed, settle_deliveries.endpoints, settle_deliveries.after, settle_deliveries.errors,
      settle_deliveries.tried, settle_deliveries.last) said (seq, endpoint, after, error, tried, last) on said.seq = e.seq
    cross join lateral pgmb_internal.outcome(q, e.attempt, said.endpoint, said.after, said.error, said.tried, said.last) f
    join pgmb.endpoint still on still.id = f.endpoint
  ), parked as (
    insert into pgmb.delivery (queue, endpoint, due_at, attempt, error, errors, seq, event_id, topic, key, payload, headers,
      published_at)
    select q.id, o.endpoint, o.due_at, o.attempt, o.error, o.errors, o.seq, o.event_id, o.topic, o.key, o.payload, o.headers,
      o.published_at
    from outcome o
    where not o.spent
      and not exists (select from pgmb.delivery d where d.event_id = o.event_id and d.endpoint = o.endpoint)
    order by o.seq
  )
  insert into pgmb.dead (queue, endpoint, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at)
  select q.id, o.endpoint, o.attempt, o.error, o.errors, o.seq, o.event_id, o.topic, o.key, coalesce(o.payload, logged.payload),
    coalesce(o.headers, logged.headers), o.published_at
  from outcome o
  left join pgmb_internal.numbered_events(q.stream,
      array(select distinct o.seq from outcome o where o.spent and o.payload is null order by o.seq), raw => true) logged
    on logged.seq = o.seq
  where o.spent
    and not exists (select from pgmb.dead d where d.event_id = o.event_id and d.endpoint = o.endpoint and d.queue = q.id)
  order by o.seq;
  return settled.events;
end $$;

-- What follows from one failure: when it is due, or that it is spent. Without a time the queue's backoff and its
-- max_attempts count.
create or replace function pgmb_internal.outcome(
  queue pgmb.queue, attempt integer, inout endpoint uuid, after interval, inout error text, inout tried boolean,
  last boolean, out due_at timestamptz, out spent boolean
)
language sql volatile
as $$
  select endpoint, error, coalesce(tried, true),
    clock_timestamp() + coalesce(after, case when tried is false then interval '0' else pgmb_internal.backoff(queue, attempt) end),
    coalesce(last, false) or (after is null and tried is not false and attempt >= (queue).max_attempts)
$$;

-- Settles events of a lease of a shared queue, and returns those of `failed` that it settled or that stay leased, with their
-- attempts and errors: events that another call settled have their rows from there. Events of the log come without payload and
-- headers.
create or replace function pgmb_internal.settle_shared(
  lease uuid, seqs bigint[], failed bigint[], out events bigint, out failing pgmb.event[], out attempts integer[],
  out errors jsonb[]
)
language plpgsql
as $$
declare
  held pgmb.claim;
  settled bigint[];
begin
  held := pgmb_internal.hold_claim(lease, case when settle_shared.seqs is null then 'update' else 'share' end);
  events := 0;
  if held.id is null then
    return;
  end if;
  if settle_shared.seqs is null then
    update pgmb.claim c set state = 'settled' where c.queue = held.queue and c.id = held.id;
  end if;
  if held.state = 'leased_retries' then
    with gone as (
      delete from pgmb.retry r
      where r.queue = held.queue and r.lease = held.id
        and (settle_shared.seqs is null or r.seq = any (settle_shared.seqs))
      returning r.*
    ), once as (
      select distinct on (g.seq) g.*
      from (select * from gone union all
        select r.* from pgmb.retry r
        where r.queue = held.queue and r.lease = held.id and r.seq <> all (settle_shared.seqs)) g
      where g.seq = any (settle_shared.failed) order by g.seq, g.attempt desc
    )
    select (select count(distinct g.seq) from gone g),
      array_agg((o.seq, o.event_id, o.topic, o.key, o.payload, o.headers, o.published_at)::pgmb.event), array_agg(o.attempt),
      array_agg(o.errors)
    into events, failing, attempts, errors
    from once o;
    return;
  end if;
  failing := array(
    select (e.seq, e.id, e.topic, e.key, null, null, e.published_at)::pgmb.event
    from pgmb_internal.claim_events(held, settle_shared.failed) e);
  if settle_shared.seqs is null then
    events := held.events - count(*) from pgmb.settlement s where s.queue = held.queue and s.claim = held.id;
  else
    settled := pgmb_internal.settle_claim(held, settle_shared.seqs);
    events := cardinality(settled);
    failing := array(select f from unnest(failing) f where f.seq = any (settled) or f.seq <> all (settle_shared.seqs));
  end if;
  attempts := array_fill(1, array[cardinality(failing)]);
end $$;

-- As settle_deliveries, of a queue that one endpoint has for itself: what failed is tried again, or buried, in that queue.
-- together: what failed in one request comes in one again.
create or replace function pgmb_internal.settle_own(
  lease uuid, seqs bigint[], failed bigint[], after interval[], errors text[], tried boolean[], last boolean[],
  together boolean
)
returns bigint
language plpgsql
as $$
declare
  one record;
  settled bigint := 0;
begin
  for one in
    select array_agg(f.seq) seqs, f.after, f.error,
      case when f.last then 'bury' when f.tried is false then 'release' else 'retry' end manner
    from unnest(settle_own.failed, settle_own.after, settle_own.errors, settle_own.tried, settle_own.last)
      f (seq, after, error, tried, last)
    group by f.after, f.error, 4
    order by min(f.seq)
  loop
    settled := settled + pgmb_internal.settle_as_failed(settle_own.lease, one.seqs,
      case when one.manner = 'release' then coalesce(one.after, '0') else one.after end, one.error, one.manner,
      case when settle_own.together and one.manner = 'retry' and cardinality(one.seqs) > 1
        then nextval('pgmb.retry_id_seq') end);
  end loop;
  settle_own.seqs := case when settle_own.seqs is not null
    then array(select unnest(settle_own.seqs) except select unnest(settle_own.failed)) end;
  if settle_own.seqs = '{}' then
    return settled;
  end if;
  return settled + pgmb.ack(settle_own.lease, settle_own.seqs);
end $$;

-- The due time of the first delivery to an active endpoint, or to one of `endpoints`, that is due; null: none is.
create or replace function pgmb_internal.first_delivery(now timestamptz, endpoints uuid[])
returns timestamptz
language plpgsql volatile
as $$
declare
  read_before bigint := pgmb_internal.entries_read('pgmb.delivery_time');
  passed bigint;
  last_scan bigint;
  first timestamptz;
begin
  last_scan := (pgmb_internal.read_scan(current_setting('pgmb.delivery', true), first_delivery.now))[4];
  -- The scan skips deliveries to paused endpoints. After an endpoint was resumed, its deliveries lie below the stored start.
  if last_scan is not null and exists (select from pgmb.endpoint e
    where e.changed_at > to_timestamp(last_scan / 1000000.0) - interval '1 second'
      and (e.state = 'active' or e.id = any (first_delivery.endpoints)))
  then
    perform set_config('pgmb.delivery', '', false);
  end if;
  select d.due_at into first from pgmb.delivery d
  where d.due_at <= first_delivery.now and d.due_at >= pgmb_internal.scan_since('pgmb.delivery', first_delivery.now)
    and (d.endpoint = any (first_delivery.endpoints)
      or (select e.state = 'active' from pgmb.endpoint e where e.id = d.endpoint))
  order by d.due_at limit 1;
  passed := pgmb_internal.entries_read('pgmb.delivery_time') - read_before;
  if pgmb_internal.should_store_scan('pgmb.delivery', passed) then
    perform pgmb_internal.store_scan('pgmb.delivery', first_delivery.now,
      pgmb_internal.microseconds(coalesce(first, first_delivery.now)), passed);
  end if;
  return first;
end $$;

-- Leases what waits for endpoints and is due, those first that waited longest: of each endpoint at most `room`, or what is
-- given for it in `rooms`, and of none that is not active unless it is named there; as many as fit into one batch. A lease that
-- expired is no attempt. Rows that another leases at this moment are passed over. Nothing due: nothing written. For admins.
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
declare
  given uuid := gen_random_uuid();
  now timestamptz := clock_timestamp();
  since timestamptz;
  few uuid[];
begin
  perform pgmb_internal.assert_admin();
  -- An empty look takes no lock and no transaction id.
  since := pgmb_internal.first_delivery(now, claim_deliveries.endpoints);
  if since is null then
    return;
  end if;
  -- Where few are due, these name the endpoints. Otherwise the index is walked from endpoint to endpoint.
  few := array(
    select d.endpoint from pgmb.delivery d where d.due_at >= since and d.due_at <= now order by d.due_at limit 1000);
  if cardinality(few) = 1000 then
    few := '{}';
    since := '-infinity';
  end if;
  return query
  with recursive waiting (endpoint, due_at) as (
    (select d.endpoint, d.due_at from pgmb.delivery d where few = '{}' order by d.endpoint, d.due_at limit 1)
    union all
    select next.endpoint, next.due_at
    from waiting w
    cross join lateral (
      select d.endpoint, d.due_at from pgmb.delivery d
      where d.endpoint > w.endpoint order by d.endpoint, d.due_at limit 1) next
  ), open as materialized (
    select w.endpoint, coalesce(named.room, claim_deliveries.room) room
    from (select w.endpoint from waiting w where w.due_at <= now union select unnest(few)) w
    left join unnest(claim_deliveries.endpoints, claim_deliveries.rooms) named (endpoint, room) on named.endpoint = w.endpoint
    join pgmb.endpoint e on e.id = w.endpoint
    where (e.state = 'active' or named.room is not null) and coalesce(named.room, claim_deliveries.room) > 0
    -- In random order, so that no endpoint is always first.
    order by random()
  ), due as materialized (
    select first.id, row_number() over () nth
    from open o
    cross join lateral (
      select d.id from pgmb.delivery d
      where d.endpoint = o.endpoint and d.due_at >= since and d.due_at <= now
      order by d.due_at limit o.room for update skip locked) first
    limit claim_deliveries.max
  ), body as materialized (
    select b.* from pgmb_internal.delivery_bodies(array(select due.id from due)) b
  ), fitting as (
    select f.id
    from (
      select due.id, sum(weight.bytes) over (order by due.nth) - weight.bytes before
      from due
      left join body b on b.delivery = due.id
      cross join lateral (
        select coalesce(pgmb_internal.weight(b.payload) + coalesce(pgmb_internal.weight(b.headers), 0), 0) bytes) weight) f
    where f.before < pgmb_internal.batch_bytes()
  ), leased as (
    update pgmb.delivery d
    set pid = pg_backend_pid(), lease = given, due_at = now + claim_deliveries.lease_for, decided_at = now
    from fitting
    where d.id = fitting.id
    returning d.*
  )
  select l.lease, l.id, l.endpoint, l.seq, l.event_id, l.topic, l.key, b.payload::text, b.headers::text, l.published_at,
    l.attempt
  from leased l join body b on b.delivery = l.id order by l.seq, l.id;
end $$;

-- Leases one event that waits for an endpoint, due or not, to test the endpoint: one with the fewest attempts among the
-- first 1000; with `fresh`, only one that has not failed. For admins.
create or replace function pgmb.claim_probe(endpoint uuid, fresh boolean default false, lease_for interval default '10 seconds')
returns table (lease uuid, delivery bigint, recipient uuid, seq bigint, id uuid, topic text, key text, payload text,
  headers text, published_at timestamptz, attempt integer)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  return query
  with fewest as materialized (
    select near.id
    from (select d.id, d.attempt, d.due_at, d.lease from pgmb.delivery d where d.endpoint = claim_probe.endpoint
      order by d.due_at limit 1000) near
    where (near.lease is null or near.due_at <= now) and (near.attempt = 1 or not claim_probe.fresh)
    order by near.attempt, near.due_at limit 1
  ), free as (
    select d.id from pgmb.delivery d join fewest f on f.id = d.id where d.lease is null or d.due_at <= now
    for update of d skip locked
  ), leased as (
    update pgmb.delivery d
    set pid = pg_backend_pid(), lease = gen_random_uuid(), due_at = now + claim_probe.lease_for, decided_at = now
    from free where d.id = free.id
    returning d.*
  )
  select l.lease, l.id, l.endpoint, l.seq, l.event_id, l.topic, l.key, b.payload::text, b.headers::text, l.published_at,
    l.attempt
  from leased l join pgmb_internal.delivery_bodies(array(select f.id from free f)) b on b.delivery = l.id;
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
declare
  settled bigint;
  failures bigint;
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.delivery d where d.id = any (settle_claimed.done) and d.lease = settle_claimed.lease;
  get diagnostics settled = row_count;
  if coalesce(settle_claimed.failed, '{}') = '{}' then
    return settled;
  end if;
  with outcome as materialized (
    select d.id, f.*
    from unnest(settle_claimed.failed, settle_claimed.after, settle_claimed.errors, settle_claimed.tried,
      settle_claimed.last) said (id, after, error, tried, last)
    join pgmb.delivery d on d.id = said.id and d.lease = settle_claimed.lease
    join pgmb.queue q on q.id = d.queue
    cross join lateral pgmb_internal.outcome(q, d.attempt, d.endpoint, said.after, said.error, said.tried, said.last) f
  ), body as materialized (
    select b.* from pgmb_internal.delivery_bodies(array(select o.id from outcome o where o.spent)) b
  ), spent as (
    delete from pgmb.delivery d using outcome o
    where d.id = o.id and d.lease = settle_claimed.lease and o.spent
    returning d.*, o.error newest, o.tried
  ), buried as (
    insert into pgmb.dead (queue, endpoint, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at)
    select s.queue, s.endpoint, s.attempt, coalesce(s.newest, s.error),
      case when s.tried then pgmb_internal.with_error(s.errors, s.attempt, s.newest) else s.errors end, s.seq, s.event_id, s.topic, s.key, b.payload,
      b.headers, s.published_at
    from spent s join body b on b.delivery = s.id
  ), waiting as (
    update pgmb.delivery d
    set lease = null, due_at = o.due_at, decided_at = clock_timestamp(), error = coalesce(o.error, d.error),
      errors = case when o.tried then pgmb_internal.with_error(d.errors, d.attempt, o.error) else d.errors end,
      attempt = d.attempt + case when o.tried then 1 else 0 end
    from outcome o
    where d.id = o.id and d.lease = settle_claimed.lease and not o.spent
    returning d.id
  )
  select (select count(*) from spent) + (select count(*) from waiting) into failures;
  return settled + failures;
end $$;

-- Makes dead letters of deliveries that wait for disabled endpoints: nobody retries them. `redrive` sends them again once an
-- endpoint is resumed. Returns how many. Called by maintain.
create or replace function pgmb_internal.bury_disabled(max integer default 1000)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  now timestamptz := clock_timestamp();
  buried bigint;
begin
  with waits as materialized (
    select waits.id from pgmb.endpoint e
    cross join lateral (
      select d.id from pgmb.delivery d
      where d.endpoint = e.id and (d.lease is null or d.due_at < now)
      order by d.due_at limit bury_disabled.max for update skip locked) waits
    -- A moment for whoever disabled it by mistake.
    where e.state = 'disabled' and e.changed_at < now - interval '1 minute'
    limit bury_disabled.max
  ), body as materialized (
    select b.* from pgmb_internal.delivery_bodies(array(select w.id from waits w)) b
  ), spent as (
    delete from pgmb.delivery d where d.id = any (array(select w.id from waits w))
    returning d.*
  )
  insert into pgmb.dead (queue, endpoint, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at)
  select s.queue, s.endpoint, case when s.error is null then s.attempt - 1 else s.attempt end,
    concat_ws('; before: ', 'the endpoint is disabled', s.error), s.errors, s.seq, s.event_id, s.topic, s.key, b.payload,
    b.headers, s.published_at
  from spent s join body b on b.delivery = s.id order by s.seq;
  get diagnostics buried = row_count;
  return buried;
end $$;

-- Prolongs the leases of deliveries to `lease_for` from now. Returns those that hold any. For admins.
create or replace function pgmb.extend_claimed(leases uuid[], lease_for interval default '10 seconds')
returns setof uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  with extended as (
    update pgmb.delivery d set due_at = clock_timestamp() + extend_claimed.lease_for, decided_at = clock_timestamp()
    where d.lease = any (extend_claimed.leases)
    returning d.lease
  )
  select distinct e.lease from extended e;
end $$;
