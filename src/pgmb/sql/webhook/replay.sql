-- Replay: sends events from the log, and dead letters, to one endpoint again, at once and as a first attempt.

-- Sends events from the log to an endpoint again, by id, even if they do not match it, and returns how many it sends. To an
-- ordered endpoint only those that it has handled or passed: the others come anyway, in their order. To find ids that
-- publishers set, it may read the whole log. Errors: MB060 no such endpoint, MB002 no queue feeds it, MB013 an event does not
-- match the ordered endpoint, and others of its key wait there, MB024 its condition needs a statement_timeout. For admins.
create or replace function pgmb.resend(endpoint text, ids uuid[])
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  feed pgmb.queue;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  select * into feed from pgmb_internal.endpoint_feeds(resend.endpoint) f order by f.id limit 1;
  return pgmb_internal.send_again(pgmb_internal.endpoint_id(resend.endpoint), feed, pgmb_internal.events_by_id(feed.stream, resend.ids));
end $$;

-- Sends matching events from the log to an endpoint again, published from `since` until before `until`: at most `max`
-- events, oldest first, whose topic matches a pattern and which pass a jsonpath filter. Returns their number. To an ordered
-- endpoint it sends only what that has handled or passed: the rest comes anyway, in its order. Uses the
-- endpoint's current patterns and filter. Reads the log from `since` on. Errors: MB060 no such endpoint, MB002 no queue feeds it, MB005 no `since`,
-- MB007 invalid pattern, MB009 invalid filter, MB012 history since then is gone, MB024 an SQL condition or a costly
-- filter is used without a statement_timeout. For admins.
create or replace function pgmb.replay(
  endpoint text, since timestamptz, until timestamptz default null, topic text default null, filter text default null,
  max integer default 10000
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  target uuid;
  feed pgmb.queue;
  asking text;
  page pgmb.event[];
  after bigint;
  sent bigint := 0;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if replay.since is null then
    raise exception 'a replay needs a time to begin at' using errcode = 'MB005',
      hint = '''-infinity'' for all that is kept.';
  end if;
  perform pgmb_internal.assert_filter(null, replay.filter, null);
  target := pgmb_internal.endpoint_id(replay.endpoint);
  for feed in select * from pgmb_internal.endpoint_feeds(replay.endpoint) f order by f.id loop
    perform pgmb_internal.assert_kept(feed.stream, replay.since);
    if pgmb_internal.needs_timeout(feed) or replay.filter is not null and pgmb_internal.is_costly(pgmb_internal.predicate(replay.filter), null) then
      perform pgmb_internal.assert_timeout();
    end if;
    asking := feed.matching || case when replay.topic is null then '' else pgmb_internal.matching(array[replay.topic]) end
      || pgmb_internal.filtering(null, replay.filter, null) || pgmb_internal.asking(feed);
    -- Nothing that was published since has a lower number.
    after := (pgmb.position_at(feed.stream_name, replay.since)).seq;
    while sent < replay.max loop
      page := pgmb_internal.published_between(feed, replay.since, replay.until, asking, after, least(replay.max - sent, 1000));
      exit when cardinality(page) = 0;
      sent := sent + pgmb_internal.send_again(target, feed, page);
      after := page[cardinality(page)].seq;
    end loop;
  end loop;
  return sent;
end $$;

-- Sends an endpoint's dead letters since a time to it again, retries its waiting events at once, and ends throttling and
-- tripping. Returns how many events. Errors: MB060 no such endpoint. For admins.
create or replace function pgmb.redrive_failed(endpoint text, since timestamptz default '-infinity')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  target uuid;
  letters record;
  moved bigint := 0;
  part bigint;
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  target := pgmb_internal.endpoint_id(redrive_failed.endpoint);
  perform pgmb_internal.reopen_endpoint(target);
  update pgmb.delivery d set due_at = now, decided_at = now
  where d.endpoint = target and d.lease is null and d.attempt > 1 and d.due_at > now;
  get diagnostics part = row_count;
  moved := moved + part;
  update pgmb.retry r set due_at = now, decided_at = now
  from pgmb.queue q left join pgmb.queue head on head.id = q.lane_of
  where target in (q.endpoint, head.endpoint) and r.queue = q.id and r.lease is null and r.attempt > 1
    and r.due_at > now;
  get diagnostics part = row_count;
  moved := moved + part;
  for letters in
    select coalesce(head.name, q.name) queue, array_agg(d.id order by d.id) ids
    from pgmb.dead d
    join pgmb.queue q on q.id = d.queue
    left join pgmb.queue head on head.id = q.lane_of
    where (d.endpoint = target or d.endpoint is null and target in (q.endpoint, head.endpoint)) and d.died_at >= redrive_failed.since
    group by 1
  loop
    moved := moved + pgmb.redrive(letters.queue, letters.ids);
  end loop;
  return moved;
end $$;

-- The queues that feed an endpoint, each with its patterns and filter; for a shared queue, those of the endpoint. `matching` is of
-- all its lanes. Errors: MB060 no such endpoint, MB002 no queue feeds it.
create or replace function pgmb_internal.endpoint_feeds(endpoint text)
returns setof pgmb.queue
language plpgsql stable
as $$
declare
  fed pgmb.endpoint;
  feed pgmb.queue;
  asked record;
begin
  select * into fed from pgmb.endpoint e where e.id = pgmb_internal.endpoint_id(endpoint_feeds.endpoint);
  for feed in
    select q.* from pgmb.queue q
    where q.lane_of is null and (q.endpoint = fed.id
      or q.name = (select s.group_id from pgmb.subscription s where s.id = fed.subscription))
  loop
    if feed.endpoint is null then
      select h.patterns, h.filter, h.condition, s.params, pgmb.fields_object(h.fields, s.equals) equals into asked
      from pgmb.subscription s join pgmb.shape h on h.id = s.shape where s.id = fed.subscription;
      feed.equals := asked.equals;
      feed.filter := asked.filter::text;
      feed.condition := asked.condition;
      feed.params := asked.params;
    else
      select b.patterns into asked from pgmb.binding b where b.queue = feed.id and b.version = feed.bindings;
    end if;
    feed.matching := pgmb_internal.matching(asked.patterns);
    return next feed;
  end loop;
  if not found then
    raise exception 'no queue feeds endpoint %', quote_literal(endpoint_feeds.endpoint) using errcode = 'MB002',
      hint = 'A worker is fed by a queue that pgmb.create(name, binding_key, max_retries, worker_id) makes.';
  end if;
end $$;

-- Refuses a time since when retention has dropped events; from -infinity on, what is still there counts. Errors: MB012.
create or replace function pgmb_internal.assert_kept(stream integer, since timestamptz)
returns void
language plpgsql stable
as $$
begin
  if since > '-infinity' and exists (
    select from pgmb.segment s
    where s.stream = assert_kept.stream and s.dropped_at is not null
      and coalesce(s.last_published_at, s.closed_at) >= assert_kept.since)
  then
    raise exception 'events published since % were dropped by retention', since using errcode = 'MB012',
      hint = 'Begin later, or at ''-infinity'' for all that is kept.';
  end if;
end $$;

-- The next events of a queue's stream above a number that were published from `since` until before `until` and that
-- `asking` holds for, at most `most`.
create or replace function pgmb_internal.published_between(
  feed pgmb.queue, since timestamptz, until timestamptz, asking text, after bigint, most bigint
)
returns pgmb.event[]
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
  -- Of a statement that ran for an hour, what came last is left out.
  bound bigint := (
    select (t.position).seq from pgmb.tick t
    where t.stream = (feed).stream and t.at >= until + interval '1 hour' order by t.at, t.id limit 1);
  page pgmb.event[];
begin
  execute format('select array(select (%s)::pgmb.event from pgmb.%I e
      where e.seq > $1 and e.seq <= coalesce($2, 9223372036854775807) and e.published_at >= $3
        and ($4 is null or e.published_at < $4) %s
      order by e.seq limit $5)',
    pgmb_internal.event_columns((select s.salt from pgmb.stream s where s.id = (feed).stream)), 'log_' || (feed).stream_name, asking)
  into page using after, bound, since, until, most;
  return page;
end $$;

-- The events of a stream with these ids, as far as they are found. A derived id names its number; for one that was given,
-- an attempt may; otherwise the log is read, from its end.
create or replace function pgmb_internal.events_by_id(stream integer, ids uuid[])
returns pgmb.event[]
language plpgsql
set jit = off
as $$
declare
  read_from pgmb.stream;
  columns text;
  found_events pgmb.event[] := '{}';
  part pgmb.event[];
  wanted uuid[] := array(select distinct id from unnest(events_by_id.ids) id where id is not null);
  leaf text;
begin
  select * into read_from from pgmb.stream s where s.id = events_by_id.stream;
  columns := pgmb_internal.event_columns(read_from.salt);
  execute format('select array(select found from (select %s from pgmb.%I e where e.seq = any ($1)) found where found.id = any ($2))',
    replace(columns, ', e.topic', ' id, e.topic'), 'log_' || read_from.name)
  into found_events
  using array(
    select ((('x' || right(replace(one::text, '-', ''), 16))::bit(64)::bigint & 4611686018427387903) - read_from.salt)
      & 4611686018427387903
    from unnest(wanted) one
    union
    select a.seq from pgmb.attempt a where a.event_id = any (wanted)), wanted;
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
    where s.stream = events_by_id.stream and s.dropped_at is null order by s.number desc
  loop
    wanted := array(select unnest(wanted) except select f.id from unnest(found_events) f);
    exit when wanted = '{}';
    execute format('select array(select (%s)::pgmb.event from %s e where e.id = any ($1))', columns, leaf)
    into part using wanted;
    found_events := found_events || part;
  end loop;
  return found_events;
end $$;

-- Has events wait for an endpoint, due at once, as if they had never been tried: those that wait already too, but for what
-- is on its way. To an ordered endpoint nothing is sent that it has before it. Returns how many. Errors: those of still_to_come.
create or replace function pgmb_internal.send_again(endpoint uuid, feed pgmb.queue, events pgmb.event[])
returns bigint
language plpgsql
-- The planner has no statistics on the waiting rows and would wrongly choose a nested loop.
set enable_nestloop = off
set jit = off
as $$
declare
  coming bigint[] := '{}';
  sent bigint;
begin
  -- One that is being dropped is waited for.
  perform from pgmb.endpoint e where e.id = send_again.endpoint for key share;
  if not found then
    return 0;
  end if;
  if feed.endpoint is null then
    with again as (
      update pgmb.delivery d set attempt = 1, due_at = clock_timestamp(), decided_at = clock_timestamp()
      from unnest(send_again.events) e
      where d.endpoint = send_again.endpoint and d.seq = e.seq and d.event_id = e.id and d.lease is null
      returning d.seq
    )
    insert into pgmb.delivery (queue, endpoint, due_at, attempt, seq, event_id, topic, key, payload, headers, published_at)
    select feed.id, send_again.endpoint, clock_timestamp(), 1, e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at
    from unnest(send_again.events) e
    where e.seq not in (select a.seq from again a)
    order by e.seq;
    return cardinality(send_again.events);
  end if;
  if feed.ordered then
    coming := pgmb_internal.still_to_come(feed, array(select e.seq from unnest(send_again.events) e));
  end if;
  with again as (
    update pgmb.retry r set attempt = 1, due_at = clock_timestamp(), decided_at = clock_timestamp(), expiries = 0, together = null
    from unnest(send_again.events) e, pgmb.queue lane
    where feed.id in (lane.id, lane.lane_of) and r.queue = lane.id and r.seq = e.seq and r.lease is null
    returning r.seq
  ), inserted as (
    insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, key, payload, headers, published_at, ordered)
    select lane.id, clock_timestamp(), 1, e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at, feed.ordered
    from unnest(send_again.events) e
    join pgmb.queue lane on feed.id in (lane.id, lane.lane_of) and case when feed.shards = 1 then lane.id = feed.id
      else case when e.key is null then e.seq else hashtext(e.key)::bigint end & (feed.shards - 1) = lane.lane end
    where e.seq not in (select a.seq from again a) and e.seq not in (select unnest(coming))
    order by e.seq
    returning seq
  )
  select count(*) into sent from (select a.seq from again a union select i.seq from inserted i) both_ways;
  return sent;
end $$;
