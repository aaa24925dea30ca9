-- What the database knows of failures and delays, for `pgmb lake report`. An event that is acked leaves no row
-- (docs/adr/0020-only-failures-cost-a-row.md), so there are no delays of those. Each of these reads a table as a whole: they
-- are for a person who asks, not for a service.

-- Dead letters of a time that are not archived; the lake has the others. Without payloads. Support.
create or replace function pgmb.report_dead(since timestamptz, until timestamptz)
returns table (
  id bigint, stream text, queue text, endpoint text, died_at timestamptz, published_at timestamptz, attempt integer, error text
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select d.id, q.stream_name, coalesce(head.name, q.name), e.name, d.died_at, d.published_at, d.attempt, d.error
  from pgmb.dead d
  join pgmb.queue q on q.id = d.queue
  left join pgmb.queue head on head.id = q.lane_of
  left join pgmb.endpoint e on e.id = d.endpoint
  where d.archived_at is null and d.died_at >= report_dead.since and d.died_at < report_dead.until;
end $$;

-- Events that wait to be tried again now, by queue, endpoint and error: how many, the most attempts of one, and since when the
-- oldest is published. Support.
create or replace function pgmb.report_retries()
returns table (stream text, queue text, endpoint text, error text, events bigint, attempts integer, oldest_age interval)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  return query
  select q.stream_name, coalesce(head.name, q.name), w.endpoint, w.error, count(*), max(w.attempt), now - min(w.published_at)
  from (
    -- Of an ordered queue, those of the first attempt wait for others of their key.
    select r.queue, null::text endpoint, r.error, r.attempt, r.published_at from pgmb.retry r where r.attempt > 1
    union all
    select d.queue, e.name, d.error, d.attempt, d.published_at from pgmb.delivery d join pgmb.endpoint e on e.id = d.endpoint
  ) w
  join pgmb.queue q on q.id = w.queue
  left join pgmb.queue head on head.id = q.lane_of
  group by 1, 2, 3, 4;
end $$;

-- Requests to endpoints that were recorded in a time: their number, failures, seconds, and seconds from publication to success.
-- The time of publication is in an event's id if that was derived (derive_id); delayed: how many such successes there are.
-- Endpoints with log = 'failures' record failures only. Support.
create or replace function pgmb.report_endpoints(since timestamptz, until timestamptz)
returns table (
  endpoint text, stream text, queue text, log text, timeout double precision, attempts bigint, failed bigint,
  seconds double precision[], delayed bigint, delays double precision[]
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select e.name, e.stream, e.queue, e.log, date_part('epoch', e.timeout), count(a.id), count(a.id) filter (where a.error is not null),
    percentile_cont('{0.5,0.95,0.99,1}'::double precision[]) within group (order by a.seconds),
    count(a.delay), percentile_cont('{0.5,0.95,0.99,1}'::double precision[]) within group (order by a.delay)
  from pgmb.endpoints e
  left join (
    select t.id, t.endpoint, t.error, t.seconds::double precision seconds,
      case when t.error is null and t.event_id = pgmb.derive_id(t.seq, t.published_at, s.salt)
        then date_part('epoch', t.at - t.published_at) end delay
    from (
      select t.*, to_timestamp(('x' || substr(replace(t.event_id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0) published_at
      from pgmb.attempt t
      where t.at >= report_endpoints.since and t.at < report_endpoints.until
    ) t
    join pgmb.endpoints n on n.id = t.endpoint
    join pgmb.stream s on s.name = n.stream
  ) a on a.endpoint = e.id
  group by e.id, e.name, e.stream, e.queue, e.log, e.timeout;
end $$;

-- Failed requests of a time, by endpoint, hour and error. Support.
create or replace function pgmb.report_requests(since timestamptz, until timestamptz)
returns table (stream text, queue text, endpoint text, hour timestamptz, error text, events bigint)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select e.stream, e.queue, e.name, date_trunc('hour', a.at, 'UTC'), concat_ws(' ', a.error, a.status), count(*)
  from pgmb.attempt a
  join pgmb.endpoints e on e.id = a.endpoint
  where a.error is not null and a.at >= report_requests.since and a.at < report_requests.until
  group by 1, 2, 3, 4, 5;
end $$;
