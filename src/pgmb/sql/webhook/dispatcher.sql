-- What dispatchers share: who of them lives, how many requests a second are left, which endpoints have failed too often.

-- Says that a dispatcher lives, which server processes are its own, and what its endpoints did since it last said so;
-- errors: of each the newest, null where its newest request succeeded; refused: how many of the failures were refusals of
-- one message, which do not count against the endpoint. An endpoint, unless it is a worker, that failed for `give_up_after`
-- without a success is disabled, and pgmb.endpoint.disabled is published on stream main. Returns the ids of the dispatchers
-- that live. For admins.
create or replace function pgmb.heartbeat(
  dispatcher uuid, host text, pid integer, endpoints uuid[] default '{}', delivered bigint[] default '{}',
  failed bigint[] default '{}', errors text[] default '{}', alive_for interval default '10 seconds',
  give_up_after interval default '5 days', backends integer[] default '{}', refused bigint[] default '{}'
)
returns uuid[]
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
  clock pgmb.clock := pgmb_internal.read_clock();
  hopeless record;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  insert into pgmb.dispatcher as d (id, host, pid, backends)
  values (heartbeat.dispatcher, heartbeat.host, heartbeat.pid, heartbeat.backends)
  on conflict (id) do update set heartbeat_at = now, backends = excluded.backends;
  -- One that said so while the clock was ahead may be gone.
  update pgmb.dispatcher d set heartbeat_at = now where d.id = any (array(
    select early.id from pgmb.dispatcher early where early.heartbeat_at > now for update skip locked));
  delete from pgmb.dispatcher d where pgmb_internal.clock_stands() and d.id = any (array(
    select gone.id from pgmb.dispatcher gone where gone.heartbeat_at < now - interval '1 hour' for update skip locked));
  -- In one order, so that no two dispatchers wait for each other.
  perform from pgmb.endpoint_activity a where a.endpoint = any (heartbeat.endpoints) order by a.endpoint for no key update;
  update pgmb.endpoint_activity a
  set delivered = a.delivered + did.delivered, failed = a.failed + did.failed,
    delivered_at = case when did.delivered > 0 then now else a.delivered_at end,
    failed_at = case when did.failed > 0 then now else a.failed_at end,
    -- It does not fail through a silence as long as that for which one is given up: then the clock jumped.
    failing_since = case when did.delivered > 0 or did.refused > 0 then null when did.failed = 0 then a.failing_since
      when a.failed_at < now - heartbeat.give_up_after then now else coalesce(a.failing_since, now) end,
    error = case when did.delivered > 0 then did.error else coalesce(did.error, a.error) end
  from unnest(heartbeat.endpoints, heartbeat.delivered, heartbeat.failed, heartbeat.errors, heartbeat.refused)
    did (endpoint, delivered, failed, error, refused)
  where a.endpoint = did.endpoint;
  for hopeless in
    update pgmb.endpoint e
    set state = 'disabled', probe_at = null, changed_at = now, unchanged_since = now,
      reason = format('failed since %s', to_char(a.failing_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI "UTC"'))
    from pgmb.endpoint_activity a
    where a.endpoint = e.id and e.id = any (heartbeat.endpoints) and e.state in ('active', 'throttled', 'tripped')
      and not pgmb_internal.is_worker(e) and pgmb_internal.has_aged(a.failing_since, heartbeat.give_up_after, now, clock)
    returning e.*
  loop
    perform pgmb_internal.announce_disabled(hopeless.id, hopeless.name, hopeless.url, hopeless.reason);
  end loop;
  return array(
    select d.id from pgmb.dispatcher d where d.heartbeat_at > now - heartbeat.alive_for order by d.id);
end $$;

-- How many dispatchers are alive.
create or replace function pgmb_internal.live_dispatchers()
returns bigint
language plpgsql volatile
as $$
declare
  since timestamptz := clock_timestamp() - interval '10 seconds';
begin
  return (select count(*) from pgmb.dispatcher d where d.heartbeat_at > since);
end $$;

-- Publishes that an endpoint was disabled, unless a queue of the stream is full: that it is disabled matters more.
create or replace function pgmb_internal.announce_disabled(endpoint uuid, name text, url text, reason text)
returns void
language plpgsql
as $$
begin
  perform pgmb.publish('pgmb.endpoint.disabled',
    json_build_object('endpoint', endpoint, 'name', name,
      -- Where it is, without what may be a secret.
      'url', substring(url from '^[a-zA-Z]+://[^/?#]*'), 'reason', reason), key => name);
exception when sqlstate 'MB040' then
  raise warning 'could not publish that endpoint % was disabled: %', quote_literal(name), sqlerrm;
end $$;

-- Says that a dispatcher stops. For admins.
create or replace function pgmb.depart(dispatcher uuid)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.dispatcher d where d.id = depart.dispatcher;
end $$;

-- Draws requests from the rate limits of endpoints: at most as many as wanted, and as rps allows now. Unused capacity is
-- kept for half a second. Returns the number granted per endpoint. For admins.
create or replace function pgmb.take_requests(endpoints uuid[], wanted integer[])
returns table (endpoint uuid, given integer)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform from pgmb.endpoint_activity a where a.endpoint = any (take_requests.endpoints)
  order by a.endpoint for no key update;
  -- Read when the rows are ours: who waited for them sees what was given meanwhile.
  now := clock_timestamp();
  return query
  with due as (
    -- Nothing is given in advance: a later time was written while the clock was ahead, and counts for nothing.
    select a.endpoint, e.rps, w.wanted,
      least(now, greatest(case when a.paid_until < now + interval '1 second' then a.paid_until end,
        now - make_interval(secs => greatest(0.5, 1.0 / e.rps)))) since
    from (
      select one.endpoint, sum(one.wanted) wanted from unnest(take_requests.endpoints, take_requests.wanted)
        one (endpoint, wanted)
      group by one.endpoint) w
    join pgmb.endpoint_activity a on a.endpoint = w.endpoint
    join pgmb.endpoint e on e.id = w.endpoint and e.rps is not null
  ), taken as (
    select d.endpoint, d.since, d.rps,
      greatest(0, least(coalesce(d.wanted, 0), floor(extract(epoch from now - d.since) * d.rps + 1e-6)))::integer given
    from due d
  ), paid as (
    update pgmb.endpoint_activity a set paid_until = t.since + make_interval(secs => t.given::double precision / t.rps)
    from taken t where a.endpoint = t.endpoint and t.given > 0
  )
  select t.endpoint, t.given from taken t;
end $$;

-- Trips an endpoint: its events wait until it may be probed, after a time that doubles from `first` to `longest`.
-- Returns the time of the next probe; null if the endpoint is neither active nor throttled or tripped. For admins.
create or replace function pgmb.trip_endpoint(
  id uuid, reason text, first interval default '10 seconds', longest interval default '5 minutes'
)
returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  probe timestamptz;
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  update pgmb.endpoint e
  set state = 'tripped', reason = trip_endpoint.reason, trips = e.trips + 1,
    probe_at = clock_timestamp() + least(trip_endpoint.longest, trip_endpoint.first * power(2, least(e.trips, 20))),
    changed_at = clock_timestamp()
  where e.id = trip_endpoint.id
    -- Another dispatcher may have tripped it a moment ago.
    and (e.state = 'active' or e.state in ('throttled', 'tripped') and e.probe_at <= now)
  returning e.probe_at into probe;
  if probe is null then
    select e.probe_at into probe from pgmb.endpoint e where e.id = trip_endpoint.id and e.state in ('throttled', 'tripped');
  end if;
  return probe;
end $$;

-- Throttles an active endpoint that asked for time: its events wait until it may be probed, after `wait`, at most `longest`.
-- For admins.
create or replace function pgmb.throttle_endpoint(id uuid, wait interval, reason text, longest interval default '1 hour')
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.endpoint e
  set state = 'throttled', reason = throttle_endpoint.reason,
    probe_at = clock_timestamp() + least(throttle_endpoint.wait, throttle_endpoint.longest), changed_at = clock_timestamp()
  where e.id = throttle_endpoint.id and e.state = 'active';
end $$;

-- Whether the caller may send one request to a throttled or tripped endpoint. Other dispatchers may not for `busy_for`. For
-- admins.
create or replace function pgmb.probe_endpoint(id uuid, busy_for interval)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  update pgmb.endpoint e set probe_at = now + probe_endpoint.busy_for, changed_at = now
  where e.id = probe_endpoint.id and e.state in ('throttled', 'tripped') and e.probe_at <= now;
  return found;
end $$;

-- Makes one event that waits for its retry in an endpoint's own queues due now, so that a probe has an event: one with the
-- fewest attempts. Events of one batch stay together. Returns whether there was one. For admins.
create or replace function pgmb.hasten_retry(endpoint uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  with first as materialized (
    select near.* from pgmb.queue head
    join pgmb.queue q on head.id in (q.id, q.lane_of)
    cross join lateral (
      -- Parked events of an ordered queue are due at infinity.
      select r.queue, r.id, r.together, r.attempt, r.due_at from pgmb.retry r
      where r.queue = q.id and r.lease is null and r.due_at < 'infinity' order by r.due_at limit 1000) near
    where head.endpoint = hasten_retry.endpoint and head.lane_of is null and head.paused_at is null
    order by near.attempt, near.due_at limit 1
  )
  update pgmb.retry r set due_at = now, decided_at = now
  from first
  where r.queue = first.queue and r.lease is null and (r.id = first.id or r.together = first.together);
  return found;
end $$;

-- Ends a probe: the endpoint is active again, or stays as it is for longer: throttled for `wait` where it asked for time,
-- otherwise tripped. `succeeded` is null if no event could be sent: another probe may come soon. For admins.
create or replace function pgmb.end_probe(
  id uuid, succeeded boolean, reason text default null, first interval default '10 seconds',
  longest interval default '5 minutes', wait interval default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.endpoint e
  set state = case when end_probe.succeeded then 'active' when end_probe.succeeded is null then e.state
      when end_probe.wait is not null then 'throttled' else 'tripped' end,
    reason = case when end_probe.succeeded then null else coalesce(end_probe.reason, e.reason) end,
    trips = case when end_probe.succeeded then 0 when not end_probe.succeeded and end_probe.wait is null then e.trips + 1
      else e.trips end,
    probe_at = case when not end_probe.succeeded and end_probe.wait is not null then
        clock_timestamp() + least(end_probe.wait, interval '1 hour')
      when not end_probe.succeeded then
        clock_timestamp() + least(end_probe.longest, end_probe.first * power(2, least(e.trips, 20)))
      when end_probe.succeeded is null then clock_timestamp() + interval '1 second' end,
    changed_at = clock_timestamp()
  where e.id = end_probe.id and e.state in ('throttled', 'tripped');
end $$;

-- Disables an endpoint that answered that it is gone, unless it is a worker, and publishes that. For admins.
create or replace function pgmb.disable_endpoint(id uuid, reason text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  gone pgmb.endpoint;
begin
  perform pgmb_internal.assert_admin();
  update pgmb.endpoint e
  set state = 'disabled', reason = disable_endpoint.reason, probe_at = null, changed_at = clock_timestamp(),
    unchanged_since = clock_timestamp()
  where e.id = disable_endpoint.id and e.state <> 'disabled' and not pgmb_internal.is_worker(e)
  returning e.* into gone;
  if gone.id is not null then
    perform pgmb_internal.announce_disabled(gone.id, gone.name, gone.url, gone.reason);
  end if;
end $$;

-- Writes attempts down, in this order. For admins.
create or replace function pgmb.log_attempts(
  endpoints uuid[], seqs bigint[], event_ids uuid[], topics text[], attempts integer[], statuses integer[], seconds real[],
  errors text[], details text[], responses text[]
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  -- One that is being dropped is waited for.
  perform from pgmb.endpoint e where e.id = any (log_attempts.endpoints) order by e.id for key share;
  insert into pgmb.attempt (endpoint, seq, event_id, topic, attempt, status, seconds, error, detail, response)
  select a.endpoint, a.seq, a.event_id, a.topic, a.attempt, a.status, a.seconds, a.error, left(a.detail, 500), left(a.response, 1024)
  from unnest(log_attempts.endpoints, log_attempts.seqs, log_attempts.event_ids, log_attempts.topics, log_attempts.attempts,
    log_attempts.statuses, log_attempts.seconds, log_attempts.errors, log_attempts.details, log_attempts.responses)
    with ordinality a (endpoint, seq, event_id, topic, attempt, status, seconds, error, detail, response, place)
  join pgmb.endpoint e on e.id = a.endpoint
  order by a.place;
end $$;

-- The endpoints that a dispatcher needs to know: all, or those that changed since a moment before. The end of a secret is a
-- change. For admins.
create or replace function pgmb.dispatched_endpoints(since timestamptz default '-infinity')
returns table (id uuid, name text, url text, body text, batch integer, timeout interval, headers jsonb,
  gzip_above integer, rps integer, max_in_flight integer, retry_after interval[], log text, keep_response boolean, state text,
  probe_at timestamptz, ordered boolean, source text, secrets bytea[], queue text, changed_at timestamptz, worker boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  return query
  select e.id, e.name, e.url, e.body, e.batch, e.timeout, e.headers, e.gzip_above, e.rps, e.max_in_flight, e.retry_after,
    e.log, e.keep_response, e.state, e.probe_at, coalesce(own.ordered, false),
    '/pgmb/' || coalesce(own.stream_name, t.name, 'main'),
    array(select k.sealed from pgmb.endpoint_secret k
      where k.endpoint = e.id and (k.expires_at is null or k.expires_at > now) order by k.id desc),
    coalesce(own.name, s.group_id), changed.at, pgmb_internal.is_worker(e)
  from pgmb.endpoint e
  cross join lateral (
    select greatest(e.changed_at, max(k.expires_at)) at
    from pgmb.endpoint_secret k where k.endpoint = e.id and k.expires_at <= now) changed
  left join lateral (
    select q.name, q.ordered, q.stream_name from pgmb.queue q where q.endpoint = e.id and q.lane_of is null order by q.id limit 1) own on true
  left join pgmb.subscription s on s.id = e.subscription
  left join pgmb.stream t on t.id = s.stream
  where e.id = any (array(
      select one.id from pgmb.endpoint one where one.changed_at >= dispatched_endpoints.since
      union
      select k.endpoint from pgmb.endpoint_secret k where k.expires_at >= dispatched_endpoints.since and k.expires_at <= now))
    and changed.at >= dispatched_endpoints.since;
end $$;

-- The queues that feed endpoints: with the endpoint where it has the queue for itself. For admins.
create or replace function pgmb.dispatched_queues()
returns table (queue text, endpoint uuid, stream text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select q.name, q.endpoint, q.stream_name from pgmb.queue q
  join pgmb.endpoint e on e.id = q.endpoint
  where q.lane_of is null and q.paused_at is null
  union
  select q.name, null, q.stream_name from pgmb.queue q
  where q.paused_at is null and q.lane_of is null and q.endpoint is null and exists (
    select from pgmb.endpoint e join pgmb.subscription s on s.id = e.subscription where s.group_id = q.name);
end $$;

-- Deletes attempts older than `keep`. Called by maintain.
create or replace function pgmb_internal.clear_attempts(keep interval, max integer default 10000)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  gone bigint;
  before timestamptz := clock_timestamp() - keep;
begin
  delete from pgmb.attempt a where a.id = any (array(
    select old.id from pgmb.attempt old where old.at < before order by old.at limit max for update skip locked));
  get diagnostics gone = row_count;
  return gone;
end $$;
