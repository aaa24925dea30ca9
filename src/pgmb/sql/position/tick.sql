-- Ticks: rows that make positions durable, and the NOTIFY that tells listeners which topics are new.

-- How many of the transactions that were open at a position have ended by a snapshot. If more than 1000 were open, all of
-- them count as ended.
create or replace function pgmb_internal.ended_since(done pgmb.position, now pg_snapshot)
returns bigint
language plpgsql immutable
as $$
begin
  -- The common way: none was open.
  if (done).next < pg_snapshot_xmax((done).snapshot) and right((done).snapshot::text, 1) = ':' then
    return 0;
  end if;
  return (
    select case when count(*) > 1000 then count(*)
      else count(*) filter (where pg_visible_in_snapshot(unfinished.open, now)) end
    from (
      select open from pg_snapshot_xip((done).snapshot) open
      union all
      -- Those that had an id when nothing with a higher one had ended yet.
      select number::text::xid8
      from generate_series(pg_snapshot_xmax((done).snapshot)::text::bigint, (done).next::text::bigint) number
      limit 1001) unfinished);
end $$;

-- The streams with news since their newest tick: `moved` if numbers were given out or delayed events are due; `ended`
-- counts transactions that were open at that tick and have ended, and so may have published. With `idle`, also the streams
-- without news. Called by the ticker. Support.
create or replace function pgmb.streams_to_tick(
  idle boolean default false, out stream text, out tick bigint, out moved boolean, out ended bigint
)
returns setof record
language sql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
  select s.name, newest.id, since.moved, since.ended
  from pgmb.stream s
  left join lateral (
    select t.id, t.position from pgmb.tick t where t.stream = s.id order by t.id desc limit 1) newest on true
  cross join lateral (
    select newest.id is null or pgmb_internal.last_seq(s.name) > (newest.position).seq
        or exists (select from pgmb.delayed d where d.stream = s.name and d.due_at <= statement_timestamp()
          and d.due_at >= pgmb_internal.delayed_since(s.name, statement_timestamp())) moved,
      pgmb_internal.ended_since(newest.position, pg_current_snapshot()) ended) since
  where streams_to_tick.idle or since.moved or since.ended > 0
$$;

-- The topic hints in a tick's NOTIFY, for the events since the previous tick: per topic, four hex digits of a hash of its
-- first word and four of a hash of the whole topic. Salted, because every role of the database may listen. Empty if there
-- are events of late commits, many events or a new segment: then all listeners wake up.
create or replace function pgmb_internal.topic_hints(stream integer, done pgmb.position, upto pgmb.position, last bigint)
returns text
language plpgsql
as $$
declare
  topics text[];
begin
  if pgmb_internal.segment_of((done).seq) < pgmb_internal.segment_of(topic_hints.last)
    or pgmb_internal.ended_since(done, (upto).snapshot) > 0
      and pgmb_internal.has_stragglers(topic_hints.stream, pgmb_internal.batch_between(done, upto), 0, (done).seq)
  then
    return '';
  end if;
  -- What was committed since `upto` may be among them.
  execute 'select array(select e.topic from pgmb.segment_' || topic_hints.stream || '_' || pgmb_internal.segment_of(topic_hints.last)
    || ' e where e.seq > $1 order by e.seq limit 33)' into topics using (done).seq;
  if cardinality(topics) > 32 then
    return '';
  end if;
  return (
    select coalesce(string_agg(distinct ' ' || left(encode(sha256(convert_to((done).stream || ' ' || split_part(topic, '.', 1),
        'UTF8')), 'hex'), 4)
      || left(encode(sha256(convert_to((done).stream || ' ' || topic, 'UTF8')), 'hex'), 4), ''), ' -')
    from unnest(topics) topic);
end $$;

-- The stream's newest tick, or a new one where something happened since, which wakes listeners. Takes no lock that
-- outlives the statement but the row's own: a tick in a long transaction stalls no other session. Its commit is
-- flushed even under synchronous_commit = off, so that its transaction ids are never given again.
create or replace function pgmb_internal.make_tick(stream text, out made boolean, out "position" pgmb.position)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  stream_number integer := pgmb.stream_id(make_tick.stream);
  newest pgmb.tick;
  finished bigint;
begin
  select * into newest from pgmb.tick t where t.stream = stream_number order by t.id desc limit 1;
  made := newest.id is null or pgmb_internal.last_seq(make_tick.stream) > (newest.position).seq
    or pgmb_internal.ended_since(newest.position, pg_current_snapshot()) > 0 and exists (
    select from pgmb_internal.batch_events(stream_number, row((newest.position).snapshot, (newest.position).seq,
      (newest.position).next, pg_current_snapshot())::pgmb.batch, 0, (newest.position).seq, '', 1));
  if not made then
    position := newest.position;
    return;
  end if;
  position := pgmb_internal.take_position(make_tick.stream);
  position.proof := hashtextextended(gen_random_uuid()::text, 0) & 9223372036854775807;
  finished := pg_snapshot_xmax(position.snapshot)::text::bigint
    - (select count(*) from pg_snapshot_xip(position.snapshot));
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;
  loop
    position.tick := (finished << 16) | (hashtextextended(gen_random_uuid()::text, 0) & 65535);
    insert into pgmb.tick (stream, id, at, position)
    values (stream_number, (make_tick.position).tick, clock_timestamp(), make_tick.position)
    on conflict do nothing;
    exit when found;
  end loop;
  perform pg_notify('pgmb', make_tick.stream
    || case when newest.id is null then '' else pgmb_internal.topic_hints(stream_number, newest.position, make_tick.position,
      pgmb_internal.last_seq(make_tick.stream)) end);
end $$;

-- Publishes what is due and stores the stream's position under a short name, the tick's id, with one NOTIFY on channel
-- pgmb that carries the stream's name, and hints at the topics after a space. Does nothing, and returns null, when nothing happened since the last tick.
-- Takes no lock that outlives the statement but the row's own: a tick in a long transaction stalls no other session. What it
-- publishes is held until the transaction ends, so only a tick of an admin publishes, as that of the ticker is.
-- Errors: those of position.
create or replace function pgmb.tick(stream text default 'main')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb.stream_id(tick.stream);
  perform pgmb_internal.assert_primary();
  perform pgmb_internal.assert_reader(tick.stream);
  if pgmb_internal.is_admin() then
    perform pgmb_internal.release_due(tick.stream, clock_timestamp());
  end if;
  return (select case when t.made then (t.position).tick end from pgmb_internal.make_tick(tick.stream) t);
end $$;

-- The stream's newest tick; before the first, number 0 at the earliest position. Errors: MB001 no such stream, 42501.
create or replace function pgmb.newest_tick(
  stream text default 'main', out tick bigint, out at timestamptz, out "position" pgmb.position
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb.stream_id(newest_tick.stream);
  newest pgmb.tick;
begin
  perform pgmb_internal.assert_reader(newest_tick.stream);
  select t.* into newest from pgmb.tick t where t.stream = stream_number order by t.id desc limit 1;
  newest_tick.tick := coalesce(newest.id, 0);
  newest_tick.at := newest.at;
  newest_tick.position := case when newest.id is null then pgmb.earliest(newest_tick.stream) else newest.position end;
end $$;

-- The ticks of these numbers that are still there, number 0 being the earliest position. Errors: as newest_tick.
create or replace function pgmb.ticks(stream text, numbers bigint[])
returns table (tick bigint, at timestamptz, "position" pgmb.position)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb.stream_id(ticks.stream);
begin
  perform pgmb_internal.assert_reader(ticks.stream);
  return query
  select t.id, t.at, t.position from pgmb.tick t where t.stream = stream_number and t.id = any (ticks.numbers)
  union all
  select 0, null, pgmb.earliest(ticks.stream) where 0 = any (ticks.numbers);
end $$;

-- The position that a tick's id names. Errors: MB001 no such stream, MB012 it is gone, 42501.
create or replace function pgmb.position_of(stream text, tick bigint)
returns pgmb.position
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  named pgmb.position;
  stream_number integer := pgmb_internal.readable_stream(position_of.stream);
begin
  select (t.position).* into named from pgmb.tick t
  where t.stream = stream_number and t.id = position_of.tick;
  if named is null then
    raise exception 'stream % has no tick %', position_of.stream, position_of.tick using errcode = 'MB012',
      hint = 'Ticks go with the history they name: start from pgmb.earliest() or pgmb.position().';
  end if;
  return named;
end $$;
