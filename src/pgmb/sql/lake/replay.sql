-- Replay: send a part of a stream's history, from the log and the lake, to one queue or stream. A client reads the events and
-- hands them over in batches; each batch is inserted in the transaction that moves the replay on, so that every event
-- arrives once, however often the client is killed (docs/adr/0033-a-replay-enters-a-queue-as-retries.md).

-- Begins a replay of the events between two positions, of which none has a number above `last`, into a queue or a stream:
-- those with topics that match a pattern, published from `since` until before `until`, which pass a filter as in
-- create_queue. Returns its id. Errors: MB001 no such stream, MB002 no such queue, MB004 the target has an unfinished replay
-- or the stream an unfinished erasure, MB005 not one target, or a queue of an endpoint, MB007, MB009, and those of between.
-- Support.
create or replace function pgmb.start_replay(
  stream text, after pgmb.position, upto pgmb.position, last bigint, into_queue text default null,
  into_stream text default null, patterns text[] default null, since timestamptz default null,
  until timestamptz default null, equals jsonb default null, filter text default null, params jsonb default null
)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  target pgmb.queue;
  target_stream integer;
  made uuid;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(start_replay.stream);
  perform pgmb_internal.assert_position(stream_number, start_replay.after);
  perform pgmb_internal.assert_position(stream_number, start_replay.upto);
  perform pgmb_internal.assert_filter(start_replay.equals, start_replay.filter, start_replay.params);
  if start_replay.patterns is not null then
    perform pgmb.compile_patterns(start_replay.patterns);
  end if;
  if num_nonnulls(start_replay.into_queue, start_replay.into_stream) <> 1 then
    raise exception 'a replay goes into one queue or one stream' using errcode = 'MB005';
  end if;
  perform pgmb_internal.lock_beginnings();
  if exists (select from pgmb.erasure e join pgmb.erasure_stream s on s.erasure = e.id
    where e.ended_at is null and s.stream = start_replay.stream)
  then
    raise exception 'an erasure of stream % is not finished', start_replay.stream using errcode = 'MB004',
      hint = 'See pgmb erasures; run pgmb erase again with its keys.';
  end if;
  if start_replay.into_queue is not null then
    target := pgmb_internal.queue_for_consumer(start_replay.into_queue);
    if target.endpoint is not null or exists (
      select from pgmb.endpoint e join pgmb.subscription s on s.id = e.subscription where s.group_id = target.name)
    then
      raise exception 'queue % feeds endpoints', target.name using errcode = 'MB005',
        hint = 'Send events to an endpoint again with pgmb.replay(endpoint, since).';
    end if;
  else
    target_stream := pgmb.stream_id(start_replay.into_stream);
  end if;
  insert into pgmb.lake_replay (stream, queue, into_stream, after, upto, last, patterns, since, until, equals, filter, params)
  values (stream_number, target.id, target_stream, start_replay.after, start_replay.upto, start_replay.last,
    start_replay.patterns, start_replay.since, start_replay.until, start_replay.equals, start_replay.filter, start_replay.params)
  on conflict do nothing
  returning id into made;
  if made is null then
    select r.id into made from pgmb.lake_replay r
    where r.ended_at is null and (r.queue = target.id or r.into_stream = target_stream);
    raise exception 'replay % into % is not finished', made, coalesce(start_replay.into_queue, start_replay.into_stream)
      using errcode = 'MB004',
        hint = format('Continue it: pgmb lake replay --resume %s. Or give it up: pgmb lake replay --cancel %1$s.', made);
  end if;
  return made;
end $$;

-- Inserts the next events of a replay into its target and moves it on from after_seq to upto_seq: all events of the replay
-- with after_seq < seq <= upto_seq must be given. In a queue they are due at once, as dead letters are after redrive(); other queues
-- do not see them. An ordered queue is sent nothing that it has before it: that comes anyway, in its order. They keep id, key
-- and published_at and get the header pgmb-replay, the replay's id, if their headers are an object. Returns how many were
-- inserted. Lock: the row of the replay. Errors: MB004 the replay has ended or stands elsewhere: another
-- process continues it, MB013 the ordered queue does not take an event and has others of its key before it, MB024. Support.
create or replace function pgmb.replay_events(
  replay uuid, after_seq bigint, upto_seq bigint, seqs bigint[], ids uuid[], topics text[], keys text[], payloads text[],
  headers text[], times timestamptz[]
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  replayed pgmb.lake_replay;
  target pgmb.queue;
  sent bigint := cardinality(replay_events.seqs);
  coming bigint[] := '{}';
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  select * into replayed from pgmb.lake_replay r where r.id = replay_events.replay for update;
  if replayed.id is null or replayed.ended_at is not null or replayed.seq <> replay_events.after_seq then
    raise exception 'replay % %', replay_events.replay, case when replayed.id is null then 'does not exist'
        when replayed.ended_at is not null then 'has ended' else 'is continued by another process' end
      using errcode = 'MB004', hint = 'See pgmb lake replays.';
  end if;
  if replayed.queue is not null then
    perform pgmb_internal.administer(replayed.queue, shared => true);
    select * into target from pgmb.queue q where q.id = replayed.queue;
    if target.ordered and target.stream = replayed.stream then
      coming := pgmb_internal.still_to_come(target, replay_events.seqs);
    end if;
    insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, key, payload, headers, published_at, ordered)
    select case when target.lanes is null and target.shards = 1 then target.id
        else pgmb_internal.lane_for(target, e.seq, e.topic, e.key) end, now, 1, e.seq, e.id, e.topic, e.key, e.payload::json,
      pgmb_internal.with_replay(e.headers, replayed.id), e.published_at, target.ordered
    from unnest(replay_events.seqs, replay_events.ids, replay_events.topics, replay_events.keys, replay_events.payloads,
      replay_events.headers, replay_events.times) e (seq, id, topic, key, payload, headers, published_at)
    where e.seq not in (select unnest(coming))
    order by e.seq;
    get diagnostics sent = row_count;
  else
    execute format('insert into pgmb.%I (id, topic, key, payload, headers, published_at)
      select e.id, e.topic, e.key, e.payload::json, pgmb_internal.with_replay(e.headers, $8), e.published_at
      from unnest($1, $2, $3, $4, $5, $6, $7) e (seq, id, topic, key, payload, headers, published_at) order by e.seq',
      'log_' || (select s.name from pgmb.stream s where s.id = replayed.into_stream))
    using replay_events.seqs, replay_events.ids, replay_events.topics, replay_events.keys, replay_events.payloads,
      replay_events.headers, replay_events.times, replayed.id;
  end if;
  update pgmb.lake_replay r set seq = replay_events.upto_seq, events = r.events + sent, moved_at = now,
    bytes = r.bytes + coalesce((
      select sum(octet_length(e.topic) + coalesce(octet_length(e.key), 0) + octet_length(e.payload)
        + coalesce(octet_length(e.headers), 0))
      from unnest(replay_events.seqs, replay_events.topics, replay_events.keys, replay_events.payloads, replay_events.headers)
        e (seq, topic, key, payload, headers)
      where e.seq not in (select unnest(coming))), 0)
  where r.id = replayed.id;
  return sent;
end $$;

-- The queue behind a queue's lanes or shards that takes an event.
create or replace function pgmb_internal.lane_for(queue pgmb.queue, seq bigint, topic text, key text)
returns integer
language sql stable
as $$
  select q.id from pgmb.queue q
  where (queue).id in (q.id, q.lane_of) and case when (queue).lanes is null
    then case when key is null then seq else hashtext(key)::bigint end & ((queue).shards - 1) = q.lane
    else q.lanes[q.lane + 1] is null or pgmb.matches(q.lanes[q.lane + 1], topic) end
  order by q.lane limit 1
$$;

-- An event's headers with that of a replay. Their text stays as it is.
create or replace function pgmb_internal.with_replay(headers text, replay uuid)
returns json
language sql immutable
as $$
  select case
    when headers is null then json_build_object('pgmb-replay', replay)
    -- Headers have at most 16 MiB.
    when json_typeof(headers::json) <> 'object' or octet_length(headers) > 16777116 then headers::json
    else (regexp_replace(headers, '\}\s*$', case when headers ~ '^\s*\{\s*\}\s*$' then '' else ',' end)
      || format('"pgmb-replay":"%s"}', replay))::json
  end
$$;

-- Ends a replay, finished or not: what was inserted stays. True if it had not ended. Support.
create or replace function pgmb.end_replay(replay uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.lake_replay r set ended_at = clock_timestamp() where r.id = end_replay.replay and r.ended_at is null;
  return found;
end $$;

-- Every replay, the newest first: what it reads, where it goes, how far it is (the number of the last event that it passed,
-- of those up to `last`), and what it has inserted.
create or replace function pgmb.describe_replays(
  out id uuid, out stream text, out into_queue text, out into_stream text, out after pgmb.position, out upto pgmb.position,
  out last bigint, out patterns text[], out since timestamptz, out until timestamptz, out equals jsonb, out filter text,
  out params jsonb, out seq bigint, out events bigint, out bytes bigint, out created_at timestamptz, out moved_at timestamptz,
  out ended_at timestamptz
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select r.id, s.name, q.name, t.name, r.after, r.upto, r.last, r.patterns, r.since, r.until, r.equals, r.filter, r.params,
    r.seq, r.events, r.bytes, r.created_at, r.moved_at, r.ended_at
  from pgmb.lake_replay r
  join pgmb.stream s on s.id = r.stream
  left join pgmb.queue q on q.id = r.queue
  left join pgmb.stream t on t.id = r.into_stream
  order by r.created_at desc;
end $$;
