-- Erase: remove all events of a key, from the log, from what waits to be delivered, from dead letters and from the lake. An
-- event of the log or a dead letter becomes a tombstone: its number, id, topic and time stay, its key is null, its payload
-- null, and its headers name the erasure. A client calls the steps one after the other; each can be repeated
-- (docs/adr/0036-an-erased-event-is-a-tombstone.md).

-- The headers of a tombstone.
create or replace function pgmb_internal.erased_headers(erasure uuid)
returns json
language sql immutable
as $$
  select format('{"pgmb-erased":"%s"}', erasure)::json
$$;

-- What is remembered of keys, in the order of the digests.
create or replace function pgmb_internal.key_digests(erasure uuid, keys text[])
returns bytea[]
language sql immutable
as $$
  select array_agg(distinct sha256(uuid_send(erasure) || convert_to(k, 'UTF8')) order by sha256(uuid_send(erasure) || convert_to(k, 'UTF8')))
  from unnest(keys) k
$$;

-- The erasure of that id, if the keys are its own and it has not ended. Errors: MB004, MB005.
create or replace function pgmb_internal.erasure_of(erasure uuid, keys text[])
returns pgmb.erasure
language plpgsql
as $$
declare
  found_one pgmb.erasure;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_primary();
  select * into found_one from pgmb.erasure e where e.id = erasure_of.erasure;
  if found_one.id is null or found_one.ended_at is not null then
    raise exception 'erasure % %', erasure_of.erasure, case when found_one.id is null then 'does not exist' else 'has ended' end
      using errcode = 'MB004', hint = 'See pgmb erasures.';
  elsif found_one.digests is distinct from pgmb_internal.key_digests(found_one.id, erasure_of.keys) then
    raise exception 'erasure % has other keys', found_one.id using errcode = 'MB005';
  end if;
  return found_one;
end $$;

-- Begins an erasure of keys, or continues one of the same keys and streams that has not ended, and returns its id. The session
-- holds the lock of erasures until it ends. streams null: all of them. Errors: MB001 no such stream, MB004 another session
-- erases and has not ended after 2 s, or a replay of a stream is not finished, MB005 no key or no reason. Support.
create or replace function pgmb.start_erasure(keys text[], reason text, streams text[] default null)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  made uuid;
  named text[];
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  if coalesce(cardinality(start_erasure.keys), 0) = 0 or array_position(start_erasure.keys, null) is not null then
    raise exception 'an erasure needs at least one key' using errcode = 'MB005';
  elsif coalesce(btrim(start_erasure.reason), '') = '' then
    raise exception 'an erasure needs a reason' using errcode = 'MB005', hint = 'It is kept in pgmb.erasure. Do not write the key into it.';
  elsif exists (select from unnest(start_erasure.keys) k where strpos(start_erasure.reason, k) > 0 and k <> '') then
    raise exception 'the reason of an erasure must not contain the key' using errcode = 'MB005', hint = 'It is kept in pgmb.erasure.';
  end if;
  perform pgmb.stream_id(s) from unnest(start_erasure.streams) s;
  perform pgmb_internal.lock_beginnings();
  if exists (
    select from pgmb.lake_replay r join pgmb.stream s on s.id = r.stream
    where r.ended_at is null and (start_erasure.streams is null or s.name = any (start_erasure.streams)))
  then
    raise exception 'a replay of the stream is not finished' using errcode = 'MB004',
      hint = 'It may send events that it has read already. See pgmb lake replays; continue it or give it up.';
  end if;
  if not pgmb_internal.try_session_lock('erase') then
    raise exception 'another session erases' using errcode = 'MB004', hint = 'Wait for its end.';
  end if;
  named := array(select s.name from pgmb.stream s
    where start_erasure.streams is null or s.name = any (start_erasure.streams) order by s.name);
  select e.id into made from pgmb.erasure e
  where e.ended_at is null and e.digests = pgmb_internal.key_digests(e.id, start_erasure.keys)
    and e.all_streams = (start_erasure.streams is null)
    and (e.all_streams or named = array(select s.stream from pgmb.erasure_stream s where s.erasure = e.id order by s.stream))
  order by e.begun_at limit 1;
  if made is null then
    made := gen_random_uuid();
    insert into pgmb.erasure (id, role, reason, digests, all_streams)
    values (made, pgmb_internal.caller(), start_erasure.reason, pgmb_internal.key_digests(made, start_erasure.keys),
      start_erasure.streams is null);
    insert into pgmb.erasure_stream (erasure, stream) select made, n from unnest(named) n;
    -- These are rewritten in any case: a row that was deleted before leaves its bytes in the file.
    insert into pgmb.erasure_table (erasure, name)
    select made, 'pgmb.' || t from unnest('{retry,dead,delivery,delayed,dedup,attempt,claim}'::text[]) t;
  end if;
  return made;
end $$;

-- The streams of an erasure. Support.
create or replace function pgmb.erasure_streams(erasure uuid)
returns setof text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query select s.stream from pgmb.erasure_stream s join pgmb.stream st on st.name = s.stream
  where s.erasure = erasure_streams.erasure order by s.stream;
end $$;

-- How many rows have one of these keys: events of the log, by stream, and rows of other tables. Changes nothing.
create or replace function pgmb.count_erasable(keys text[], streams text[] default null)
returns table (name text, stream text, events bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(named) from unnest(count_erasable.streams) named;
  for s in
    select st.* from pgmb.stream st where count_erasable.streams is null or st.name = any (count_erasable.streams) order by st.name
  loop
    name := format('pgmb.%I', 'log_' || s.name);
    stream := s.name;
    execute format('select count(*) from %s e where e.key = any ($1)', name) into events using count_erasable.keys;
    return next;
    for name, events in select w.name, count(*) from pgmb_internal.keyed_rows(count_erasable.keys, array[s.name]) w group by w.name loop
      return next;
    end loop;
  end loop;
end $$;

-- The rows beside the log that hold an event with one of these keys, in one snapshot: an event that moves from one table to
-- another is in one of them at least.
create or replace function pgmb_internal.keyed_rows(keys text[], streams text[])
returns table (name text, id text)
language plpgsql
as $$
declare
  -- Not the queues of these streams: rows of a queue that was dropped are of a stream that nobody knows any more.
  others integer[] := array(select q.id from pgmb.queue q where q.stream_name <> all (keyed_rows.streams));
begin
  return query
  select 'pgmb.retry', r.id::text from pgmb.retry r where r.key = any (keyed_rows.keys) and r.queue <> all (others)
  union all
  select 'pgmb.dead', d.id::text from pgmb.dead d where d.key = any (keyed_rows.keys) and d.queue <> all (others)
  union all
  select 'pgmb.delivery', d.id::text from pgmb.delivery d where d.key = any (keyed_rows.keys) and d.queue <> all (others)
  union all
  select 'pgmb.delayed', d.id::text from pgmb.delayed d where d.key = any (keyed_rows.keys) and d.stream = any (keyed_rows.streams)
  union all
  select 'pgmb.dedup', d.key from pgmb.dedup d where d.key = any (keyed_rows.keys) and d.stream = any (keyed_rows.streams)
  union all
  select 'pgmb.claim', c.queue || ' ' || c.id from pgmb.claim c where c.passed_keys && keyed_rows.keys and c.queue <> all (others);
end $$;

-- Fixes which segments of a stream an erasure covers: those up to the open one, which is closed if numbers of it were given
-- out. Returns whether that is done; false: try again, see rotate(). Support.
create or replace function pgmb.close_for_erasure(erasure uuid, stream text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  last bigint;
  opened integer;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if exists (select from pgmb.erasure_stream s
    where s.erasure = close_for_erasure.erasure and s.stream = close_for_erasure.stream and s.border is not null)
  then
    return true;
  end if;
  last := pgmb_internal.last_seq(close_for_erasure.stream);
  if pgmb_internal.number_in_segment(last) = 0 then
    opened := pgmb_internal.segment_of(last);
  else
    opened := pgmb.rotate(close_for_erasure.stream);
  end if;
  update pgmb.erasure_stream s set border = opened - 1
  where s.erasure = close_for_erasure.erasure and s.stream = close_for_erasure.stream and opened is not null;
  return found;
exception when lock_not_available then
  return false;
end $$;

-- The open transactions that an erasure waits for before it erases a stream in the log: they may have written events to a
-- closed segment. Null: none. seal() must have been called. Support.
create or replace function pgmb.writers_before_erasure(erasure uuid, stream text)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  unsealed pgmb.segment;
begin
  perform pgmb_internal.assert_admin();
  select g.* into unsealed from pgmb.segment g
  join pgmb.stream st on st.id = g.stream and st.name = writers_before_erasure.stream
  join pgmb.erasure_stream s on s.erasure = writers_before_erasure.erasure and s.stream = st.name
  where g.number <= s.border and g.sealed_at is null and g.dropped_at is null order by g.number limit 1;
  if unsealed.number is null then
    return null;
  end if;
  return coalesce(pgmb_internal.writers_of(writers_before_erasure.stream, unsealed.closed_xid), 'segment ' || unsealed.number);
end $$;

-- Erases the events with these keys in the next segment of a stream, and what is known of their deliveries. Returns the
-- segment's number; null: there is none left. One transaction per segment. Locks rows only. Support.
create or replace function pgmb.erase_segment(erasure uuid, keys text[], stream text)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  erased_stream pgmb.stream;
  next_one pgmb.segment;
  leaf text;
  erased bigint;
  ids uuid[];
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(erase_segment.erasure, erase_segment.keys);
  select * into erased_stream from pgmb.stream s where s.name = erase_segment.stream;
  -- Retention waits or passes by.
  perform from pgmb.history h where h.stream = erased_stream.id for share;
  select g.* into next_one from pgmb.segment g
  join pgmb.erasure_stream s on s.erasure = erase_segment.erasure and s.stream = erase_segment.stream
  where g.stream = erased_stream.id and g.number > s.scanned and g.number <= s.border and g.dropped_at is null
  order by g.number limit 1;
  if next_one.number is null then
    return null;
  elsif next_one.sealed_at is null then
    raise exception 'segment % of stream % is not sealed', next_one.number, erase_segment.stream using errcode = 'MB063',
      hint = 'A transaction that may write to it is open.';
  end if;
  leaf := format('pgmb.segment_%s_%s', next_one.stream, next_one.number);
  execute format('with gone as (
      update %s e set key = null, payload = ''null'', headers = $2 where e.key = any ($1)
      returning coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, $3)) id)
    select count(*), array_agg(g.id) from gone g', leaf)
  into erased, ids
  using erase_segment.keys, pgmb_internal.erased_headers(erase_segment.erasure), erased_stream.salt;
  if erased > 0 then
    perform pgmb_internal.note_erased(erase_segment.erasure, leaf, erased, erase_segment.stream);
    perform pgmb_internal.erase_traces(erase_segment.erasure, erased_stream, ids);
    -- A digest that was not yet compared with the table's is of the events as they were.
    delete from pgmb.archived a where a.stream = next_one.stream and a.segment = next_one.number and a.verified_at is null;
  end if;
  update pgmb.erasure_stream s set scanned = next_one.number
  where s.erasure = erase_segment.erasure and s.stream = erase_segment.stream;
  return next_one.number;
end $$;

-- Notes that rows of a table were erased. Its files are to be written again.
create or replace function pgmb_internal.note_erased(erasure uuid, name text, events bigint, stream text default null)
returns void
language sql
as $$
  insert into pgmb.erasure_table as t (erasure, name, events, stream)
  values (note_erased.erasure, note_erased.name, note_erased.events, note_erased.stream)
  on conflict on constraint erasure_table_pkey do update set events = t.events + excluded.events, rewritten_at = null
$$;

-- Removes what other tables know of erased events by their ids: responses of endpoints, deduplication keys.
create or replace function pgmb_internal.erase_traces(erasure uuid, stream pgmb.stream, ids uuid[])
returns void
language plpgsql
as $$
declare
  changed bigint;
begin
  update pgmb.attempt a set detail = null, response = null
  where a.event_id = any (erase_traces.ids) and num_nonnulls(a.detail, a.response) > 0;
  get diagnostics changed = row_count;
  perform pgmb_internal.note_erased(erase_traces.erasure, 'pgmb.attempt', changed);
  delete from pgmb.dedup d where d.stream = (erase_traces.stream).name and d.id = any (erase_traces.ids);
  get diagnostics changed = row_count;
  perform pgmb_internal.note_erased(erase_traces.erasure, 'pgmb.dedup', changed);
end $$;

-- What may still see rows as they were before the transaction id `before`: the open transactions of this database, prepared
-- ones too, but not the caller's and not vacuum's; and the replication slots and standbys that hold back older rows. Support.
create or replace function pgmb.open_transactions(before xid8)
returns text[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return array(
    select distinct format('process %s, transaction %s', l.pid, l.virtualtransaction)
    from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.pid <> pg_backend_pid()
      and a.datname = current_database() and not exists (select from pg_stat_progress_vacuum v where v.pid = l.pid)
    union
    select format('prepared transaction %L', p.gid) from pg_prepared_xacts p where p.database = current_database()
    union
    select format('replication slot %s', s.slot_name) from pg_replication_slots s
    where age(s.xmin) > age(open_transactions.before::xid)
    union
    select format('standby %s', coalesce(nullif(r.application_name, ''), r.pid::text)) from pg_stat_replication r
    where age(r.backend_xmin) > age(open_transactions.before::xid));
end $$;

-- Erases what waits outside the log for one of these keys. Retries, deliveries to endpoints and delayed events are deleted;
-- dead letters and the rows of stages become tombstones. Returns how many rows had such a key when it looked: 0 if nothing is
-- left. Call it until then, each time after the transactions have ended that were open before. Support.
create or replace function pgmb.erase_waiting(erasure uuid, keys text[])
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
set lock_timeout = '2s'
as $$
declare
  names text[];
  others integer[];
  found_rows bigint;
  changed bigint;
  gone uuid[];
  one pgmb.stage;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(erase_waiting.erasure, erase_waiting.keys);
  names := array(select s.stream from pgmb.erasure_stream s where s.erasure = erase_waiting.erasure);
  -- As in keyed_rows.
  others := array(select q.id from pgmb.queue q where q.stream_name <> all (names));
  -- First, and in one statement: a row that is moved meanwhile is found by the next call.
  select count(*) into found_rows from pgmb_internal.keyed_rows(erase_waiting.keys, names);
  with deleted as (
    delete from pgmb.retry r where r.key = any (erase_waiting.keys) and r.queue <> all (others) returning r.event_id)
  select count(*), array_agg(d.event_id) into changed, gone from deleted d;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.retry', changed);
  with deleted as (
    delete from pgmb.delivery r where r.key = any (erase_waiting.keys) and r.queue <> all (others) returning r.event_id)
  select count(*), gone || array_agg(d.event_id) into changed, gone from deleted d;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.delivery', changed);
  with emptied as (
    update pgmb.dead d set key = null, payload = 'null', headers = pgmb_internal.erased_headers(erase_waiting.erasure),
      error = null, errors = null
    where d.key = any (erase_waiting.keys) and d.queue <> all (others) returning d.event_id)
  select count(*), gone || array_agg(d.event_id) into changed, gone from emptied d;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.dead', changed);
  with deleted as (
    delete from pgmb.delayed r where r.key = any (erase_waiting.keys) and r.stream = any (names) returning r.id)
  select count(*), gone || array_agg(d.id) into changed, gone from deleted d;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.delayed', changed);
  delete from pgmb.dedup d where d.key = any (erase_waiting.keys) and d.stream = any (names);
  get diagnostics changed = row_count;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.dedup', changed);
  if gone is not null then
    perform pgmb_internal.erase_traces(erase_waiting.erasure, s, gone) from pgmb.stream s where s.name = any (names);
  end if;
  -- Where keys begin in an ordered queue's retries: see pgmb_internal.pass_keys. None of these has any left.
  update pgmb.claim c set passed_keys = array(
    select case when k.key <> all (erase_waiting.keys) then k.key end
    from unnest(c.passed_keys) with ordinality k (key, place) order by k.place)
  where c.passed_keys && erase_waiting.keys and c.queue <> all (others);
  get diagnostics changed = row_count;
  perform pgmb_internal.note_erased(erase_waiting.erasure, 'pgmb.claim', changed);
  if to_regclass('pgmq.parked') is not null then
    found_rows := found_rows + pgmb_internal.erase_pgmq(erase_waiting.erasure, erase_waiting.keys, names);
  end if;
  for one in select * from pgmb.stage g order by g.number loop
    -- A task that writes into it holds it.
    select * into one from pgmb.stage g where g.number = one.number for update;
    found_rows := found_rows + pgmb_internal.erase_stage(erase_waiting.erasure, erase_waiting.keys, names, one);
  end loop;
  return found_rows;
end $$;

-- Deletes messages of PGMQ's tables whose group is one of these keys, and returns how many.
create or replace function pgmb_internal.erase_pgmq(erasure uuid, keys text[], streams text[])
returns bigint
language plpgsql
as $$
declare
  holder text;
  erased bigint;
  total bigint := 0;
begin
  for holder in
    execute 'select ''pgmq.parked'' union all select q.archive from pgmq.queue q where q.stream = any ($1)' using erase_pgmq.streams
  loop
    execute format('delete from %s m where m.headers ->> ''x-pgmq-group'' = any ($1)', holder)
      || case when holder = 'pgmq.parked' then ' and m.queue not in (select q.id from pgmq.queue q where q.stream <> all ($2))' else '' end
    using erase_pgmq.keys, erase_pgmq.streams;
    get diagnostics erased = row_count;
    if erased > 0 then
      perform pgmb_internal.note_erased(erase_pgmq.erasure, holder, erased);
      total := total + erased;
    end if;
  end loop;
  return total;
end $$;

-- Erases rows of a stage, which is locked, and returns how many. One that is free is emptied. It is written again as a whole, since it has no index
-- by which its dead rows could be removed, and nothing but its publication reads it.
create or replace function pgmb_internal.erase_stage(erasure uuid, keys text[], streams text[], stage pgmb.stage)
returns bigint
language plpgsql
set synchronize_seqscans = off
set client_min_messages = warning
as $$
declare
  leaf text := format('pgmb.stage_%s', (stage).number);
  erased bigint := 0;
begin
  if to_regclass(leaf) is null then
    return 0;
  elsif (stage).app is null then
    if pg_relation_size(leaf::regclass) > 0 then
      execute format('truncate %s', leaf);
    end if;
    return 0;
  elsif not exists (select from pgmb.stream s where s.id = (stage).stream and s.name = any (erase_stage.streams)) then
    return 0;
  end if;
  execute format('select count(*) from %s e where e.key = any ($1)', leaf) into erased using erase_stage.keys;
  if erased > 0 then
    execute format('create temporary table pgmb_erased_stage on commit drop as
      select e.id, e.topic, case when not c.gone then e.key end as key, case when c.gone then ''null''::json else e.payload end payload,
        case when c.gone then %L::json else e.headers end headers, e.due_at
      from %s e cross join lateral (select coalesce(e.key = any (%L::text[]), false) gone) c',
      pgmb_internal.erased_headers(erase_stage.erasure), leaf, erase_stage.keys);
    execute format('truncate %s', leaf);
    execute format('insert into %s (id, topic, key, payload, headers, due_at) select * from pg_temp.pgmb_erased_stage', leaf);
    drop table pg_temp.pgmb_erased_stage;
    perform pgmb_internal.note_erased(erase_stage.erasure, 'pgmb.stage', erased);
    update pgmb.erasure_table t set rewritten_at = clock_timestamp() where t.erasure = erase_stage.erasure and t.name = 'pgmb.stage';
  end if;
  return erased;
end $$;

-- Writes the next table of the database again in which rows were erased, so that its files hold nothing of the old rows:
-- VACUUM would leave their bytes in pages and indexes. Returns its name; null: all are done. Transactions that may see the old
-- rows must have ended. Lock: ACCESS EXCLUSIVE on the table while it is written; waits for it at most half a second (55P03: try
-- again). Support.
create or replace function pgmb.rewrite_erased(erasure uuid)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '500ms'
as $$
declare
  next_name text;
  index_name text;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  select t.name into next_name from pgmb.erasure_table t
  where t.erasure = rewrite_erased.erasure and not t.in_lake and t.rewritten_at is null order by t.name limit 1;
  if next_name is null then
    return null;
  end if;
  if to_regclass(next_name) is not null then
    execute format('lock table %s in access exclusive mode', next_name);
    select c.relname into index_name
    from pg_index i join pg_class c on c.oid = i.indexrelid
    where i.indrelid = next_name::regclass and i.indpred is null and i.indexprs is null and i.indisvalid
    order by i.indisprimary desc, i.indisunique desc, c.relname limit 1;
    execute format('cluster %s using %I', next_name, index_name);
    execute format('alter table %s set without cluster', next_name);
  end if;
  update pgmb.erasure_table t set rewritten_at = clock_timestamp()
  where t.erasure = rewrite_erased.erasure and t.name = next_name;
  return next_name;
end $$;

-- Ends an erasure. True if it had not ended. Errors: MB004 it is not complete. Support.
create or replace function pgmb.end_erasure(erasure uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if exists (select from pgmb.erasure_table t
    where t.erasure = end_erasure.erasure and t.rewritten_at is null
      -- Of a stream that was dropped meanwhile nothing is left to do.
      and (t.stream is null or exists (select from pgmb.stream s where s.name = t.stream)))
  then
    raise exception 'erasure % is not complete', end_erasure.erasure using errcode = 'MB004',
      hint = 'Run pgmb erase again with the same keys.';
  end if;
  update pgmb.erasure e set ended_at = clock_timestamp() where e.id = end_erasure.erasure and e.ended_at is null;
  return found;
end $$;

-- Every erasure, the newest first: when, by whom and why, how many keys and streams, and what it changed: a list of tables with the
-- number of rows, and for those of the lake the files that were replaced. key: only those that erased this key.
create or replace function pgmb.describe_erasures(
  key text default null, out id uuid, out begun_at timestamptz, out ended_at timestamptz, out role name, out reason text,
  out keys integer, out streams text[], out tables jsonb
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select e.id, e.begun_at, e.ended_at, e.role, e.reason, cardinality(e.digests),
    array(select s.stream from pgmb.erasure_stream s where s.erasure = e.id order by s.stream),
    coalesce((
      select jsonb_agg(jsonb_build_object('name', t.name, 'events', t.events, 'files', to_jsonb(t.files)) order by t.name)
      from pgmb.erasure_table t where t.erasure = e.id and t.events > 0), '[]')
  from pgmb.erasure e
  where describe_erasures.key is null or sha256(uuid_send(e.id) || convert_to(describe_erasures.key, 'UTF8')) = any (e.digests)
  order by e.begun_at desc;
end $$;
