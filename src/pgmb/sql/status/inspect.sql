-- What an operator looks at: segments, leases, what is due again when, and all of it at a glance.

-- The segments of a stream, newest first, at most 500: ready (not yet written to), open, closed, sealed or dropped; what
-- they hold, and whether retention would drop them now. Errors: MB001, 42501. For admins.
create or replace function pgmb.stream_segments(stream text)
returns table (number integer, state text, events bigint, bytes bigint, attached_at timestamptz, sealed_at timestamptz,
  archived_at timestamptz, last_published_at timestamptz, droppable boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked integer := pgmb.stream_id(stream_segments.stream);
  last bigint := pgmb_internal.last_seq(stream_segments.stream);
  due integer[];
begin
  perform pgmb_internal.assert_admin();
  due := array(select d from pgmb.droppable(stream_segments.stream) d);
  return query
  select g.number,
    case when g.dropped_at is not null then 'dropped' when g.sealed_at is not null then 'sealed'
      when g.closed_at is not null then 'closed' when g.number = pgmb_internal.segment_of(last) then 'open' else 'ready' end,
    case when g.dropped_at is not null or g.number > pgmb_internal.segment_of(last) then 0
      else greatest(0, coalesce(g.last_seq, last) - pgmb_internal.first_number(g.number)) end,
    coalesce(pg_total_relation_size(to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number))), 0),
    g.attached_at, g.sealed_at, g.archived_at, g.last_published_at, g.number = any (due)
  from pgmb.segment g
  where g.stream = asked
  order by g.number desc limit 500;
end $$;

-- The leases of a queue, those that end first at the top: kind event for those of fresh events, retry and delivery for
-- those of what is tried again. One that has ended is taken over by the next receiver. holder: the process that received, as
-- in event_fate. Errors: MB002, 42501. For admins.
create or replace function pgmb.queue_leases(queue text, max integer default 100)
returns table (kind text, lease text, events bigint, since timestamptz, expires_at timestamptz, holder jsonb)
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
  select held.* from pgmb_internal.lanes_for_consumer(queue_leases.queue) q
  cross join lateral (
    select c.swept from pgmb.claim c where c.queue = q.id order by c.id desc limit 1) newest
  cross join lateral (
    (select case c.state when 'leased_retries' then 'retry' else 'event' end, pgmb_internal.number_in_generation(c.id)::text,
      case c.state when 'leased_retries' then (select count(*) from pgmb.retry r where r.queue = c.queue and r.lease = c.id)
        else c.events::bigint end, c.at, c.expires_at, pgmb_internal.holder(c.pid, c.at, true)
    from pgmb.claim c
    where c.queue + 0 = q.id and c.expires_at > least(newest.swept, now) and c.expires_at < 'infinity'
      and pgmb_internal.is_leased(c.state) and not pgmb_internal.is_void(c.queue, c.id)
    order by c.expires_at limit queue_leases.max)
    union all
    (select 'delivery', d.lease::text, count(*), null, min(d.due_at), pgmb_internal.holder(min(d.pid), min(d.due_at), true)
    from pgmb.delivery d where d.queue = q.id and d.lease is not null group by d.lease limit queue_leases.max)
  ) held
  order by 5 limit queue_leases.max;
end $$;

-- When what failed is due again: how many within each of these seconds from now, the first of them overdue, the last
-- (null) later; of the first 10000. Errors: MB002, 42501. For admins.
create or replace function pgmb.retry_curve(queue text, seconds double precision[] default '{0,10,60,300,900,3600,21600,86400}')
returns table (within double precision, events bigint, attempts integer)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select retry_curve.seconds[place], count(due.attempt), coalesce(max(due.attempt), 0)
  from generate_series(1, cardinality(retry_curve.seconds) + 1) place
  left join (
    select width_bucket(extract(epoch from w.due_at - clock_timestamp())::double precision, retry_curve.seconds) + 1 bucket, w.attempt
    from (
      select r.due_at, r.attempt from pgmb_internal.lanes_for_consumer(retry_curve.queue) q
      join pgmb.retry r on r.queue = q.id where r.due_at < 'infinity'
      union all
      select d.due_at, d.attempt from pgmb_internal.lanes_for_consumer(retry_curve.queue) q
      join pgmb.delivery d on d.queue = q.id where d.lease is null
      limit 10000) w) due on due.bucket = place
  group by place order by place;
end $$;

-- One sample for the dashboard: the status of queues and readers, the events published to each stream since the numbers in
-- `seen` ({stream: number}), endpoints, dispatchers, and version numbers that change with each subject. For admins.
create or replace function pgmb.sample(seen jsonb default '{}')
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return json_build_object(
    'at', extract(epoch from clock_timestamp()),
    'streams', (
      select coalesce(json_agg(json_build_object('stream', s.name, 'last', now.last,
        'published', pgmb_internal.numbers_between(s.id, coalesce((seen ->> s.name)::bigint, now.last), now.last)) order by s.name), '[]')
      from pgmb.stream s cross join lateral (select pgmb_internal.last_seq(s.name) last) now),
    'queues', (
      select coalesce(json_agg(json_build_object('queue', q.queue, 'stream', q.stream, 'patterns', q.patterns,
        'paused', q.paused_at is not null, 'reason', q.paused_reason, 'waiting', q.waiting,
        'oldest', extract(epoch from q.oldest_age), 'leases', q.leases, 'leased', q.leased_events, 'retries', q.retries,
        'dead', q.dead, 'rate', q.received_per_second, 'behind', q.behind, 'at_least', q.at_least, 'at_most', q.at_most)), '[]')
      from pgmb.describe_queues() q),
    'readers', (
      select coalesce(json_agg(json_build_object('reader', r.reader, 'stream', r.stream, 'waiting', r.waiting,
        'lag', extract(epoch from r.lag), 'lost', r.lost)), '[]')
      from pgmb.describe_readers(500) r),
    'endpoints', (
      select json_build_object('all', count(*), 'tripped', count(*) filter (where e.state = 'tripped'),
        'paused', count(*) filter (where e.state = 'paused'), 'disabled', count(*) filter (where e.state = 'disabled'),
        'delivered', coalesce(sum(a.delivered), 0), 'failed', coalesce(sum(a.failed), 0),
        'changed', max(extract(epoch from e.changed_at)))
      from pgmb.endpoint e left join pgmb.endpoint_activity a on a.endpoint = e.id),
    -- Those that did something lately, the latest first.
    'busy', (
      select coalesce(json_agg(json_build_object('endpoint', b.name, 'delivered', b.delivered, 'failed', b.failed)), '[]')
      from (
        select e.name, a.delivered, a.failed
        from pgmb.endpoint_activity a join pgmb.endpoint e on e.id = a.endpoint
        where greatest(a.delivered_at, a.failed_at) > statement_timestamp() - interval '1 minute'
        order by greatest(a.delivered_at, a.failed_at) desc limit 200) b),
    'dispatchers', (
      select coalesce(json_agg(json_build_object('host', d.host, 'pid', d.pid,
        'started', extract(epoch from d.started_at), 'heard', extract(epoch from d.heartbeat_at))
        order by d.started_at), '[]')
      from pgmb.dispatcher d where d.heartbeat_at > statement_timestamp() - interval '30 seconds'),
    'newest', json_build_object('dead', (select max(d.id) from pgmb.dead d), 'audit', (select max(a.id) from pgmb.audit a),
      'attempt', (select max(a.id) from pgmb.attempt a)));
end $$;
