-- Streams: create, alter, drop; the segments a log is made of.

-- An event's number contains the number of its segment (docs/adr/0001). PostgreSQL inlines these functions.
create or replace function pgmb_internal.segment_of(seq bigint)
returns bigint
language sql immutable parallel safe
as $$
  select seq >> 40
$$;

create or replace function pgmb_internal.number_in_segment(seq bigint)
returns bigint
language sql immutable parallel safe
as $$
  select seq & 1099511627775
$$;

-- The first number of a segment.
create or replace function pgmb_internal.first_number(segment bigint)
returns bigint
language sql immutable parallel safe
as $$
  select segment << 40
$$;

-- The name of the constraint by which a segment refuses events that are larger than its stream allows.
create or replace function pgmb_internal.limit_name(max_event_bytes bigint)
returns text
language sql immutable
as $$
  select 'payload and headers must have at most ' || max_event_bytes || ' bytes'
$$;

-- Has a segment refuse events that are larger than its stream allows. The constraint is not valid, so that events which
-- were accepted before, also delayed ones that are released later, stay and can be dumped and restored. Waits for the lock
-- 50 ms at a time, so that publishers queued behind never wait longer. Errors: MB004 the segment is in use.
create or replace function pgmb_internal.limit_segment(stream pgmb.stream, number integer)
returns void
language plpgsql
set lock_timeout = '50ms'
as $$
declare
  leaf text := format('pgmb.segment_%s_%s', (stream).id, number);
  changes text;
begin
  select string_agg(format('drop constraint %I', c.conname), ', ') into changes
  from pg_constraint c
  where c.conrelid = leaf::regclass and c.conname like 'payload and headers must have at most % bytes';
  if (stream).max_event_bytes is not null then
    -- What release_due brings was accepted before. Only the owner can pass this way.
    changes := concat_ws(', ', changes, format('add constraint %I check (
        pg_column_size(payload) + coalesce(pg_column_size(headers), 0) <= %s
        or octet_length(payload::text) + coalesce(octet_length(headers::text), 0) <= %s
        or current_setting(''pgmb.releasing'', true) is not distinct from ''on'' and current_user = %L) not valid',
      pgmb_internal.limit_name((stream).max_event_bytes), (stream).max_event_bytes / 256, (stream).max_event_bytes,
      (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = leaf::regclass)));
  end if;
  if changes is null then
    return;
  end if;
  for attempt in 1 .. 30 loop
    begin
      execute format('alter table %s %s', leaf, changes);
      return;
    exception when lock_not_available then
      if attempt = 30 then
        raise exception 'stream % is in use: segment % could not be locked to change max_event_bytes',
          quote_literal((stream).name), number
          using errcode = 'MB004', hint = 'A transaction that published to it is still open. Try again when it has ended.';
      end if;
      perform pg_sleep(0.05 + random() * 0.1);
    end;
  end loop;
end $$;

-- Refuses a delayed event that is larger than its stream allows: a trigger on pgmb.delayed, because the log takes what was
-- accepted there. Errors: 23514.
create or replace function pgmb_internal.refuse_large()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  most bigint := (select s.max_event_bytes from pgmb.stream s where s.name = new.stream);
  bytes bigint;
begin
  if most is not null then
    bytes := octet_length(new.payload::text) + coalesce(octet_length(new.headers::text), 0);
    if bytes > most then
      raise exception '%, got %', pgmb_internal.limit_name(most), bytes
        using errcode = '23514', schema = 'pgmb', constraint = pgmb_internal.limit_name(most);
    end if;
  end if;
  return new;
end $$;

-- Attaches segment `number` to the stream's log. Takes SHARE UPDATE EXCLUSIVE on the log: publishers and
-- readers pass.
create or replace function pgmb_internal.attach_segment(stream pgmb.stream, number integer)
returns void
language plpgsql
as $$
declare
  log text := format('pgmb.%I', 'log_' || (stream).name);
  leaf text := format('pgmb.segment_%s_%s', (stream).id, number);
  reader name;
begin
  -- An insert-only table: vacuum only to freeze and to set visibility, in one pass after it is filled.
  execute format('create table %s (like %s including defaults) with (
      autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_vacuum_insert_threshold = 1000000,
      autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 1000000,
      autovacuum_freeze_min_age = 0, toast.autovacuum_freeze_min_age = 0)', leaf, log);
  -- Keys are not sampled: pg_statistic would keep them after an erasure.
  execute format('alter table %s alter column key set statistics 0', leaf);
  execute format('alter table %s attach partition %s for values from (%s) to (%s)',
    log, leaf, pgmb_internal.first_number(number), pgmb_internal.first_number(number + 1));
  perform pgmb_internal.limit_segment(stream, number);
  insert into pgmb.segment (stream, number) values ((stream).id, attach_segment.number);
  perform pgmb_internal.create_reader((stream).id, attach_segment.number);
  -- Readers of the log read a segment by its name too (pgmb.claim_next).
  for reader in
    select r.rolname from pg_class c cross join aclexplode(c.relacl) a join pg_roles r on r.oid = a.grantee
    where c.oid = log::regclass and a.privilege_type = 'SELECT' and a.grantee <> c.relowner
  loop
    execute format('grant select on %s to %I', leaf, reader);
  end loop;
end $$;

-- Attaches the segment that a stream's sequence points to, and the next one, if it is missing: a dump has the segments of its
-- snapshot, but sequences as they were when it came to them. Closes the segments before it. Returns whether it was missing;
-- publishers fail while it is. Lock: SHARE UPDATE EXCLUSIVE on the log, if so.
create or replace function pgmb_internal.attach_current(stream pgmb.stream)
returns boolean
language plpgsql
set client_min_messages = warning
set lock_timeout = '50ms'
as $$
declare
  current_number bigint := pgmb_internal.segment_of(pgmb_internal.last_seq((stream).name));
begin
  if exists (select from pgmb.segment s where s.stream = (attach_current.stream).id and s.number = current_number) then
    return false;
  end if;
  execute format('lock table only pgmb.%I in share update exclusive mode', 'log_' || (stream).name);
  perform pgmb_internal.attach_segment(stream, nth::integer)
  from generate_series(current_number, current_number + 1) nth
  where not exists (select from pgmb.segment s where s.stream = (attach_current.stream).id and s.number = nth);
  if (stream).name = 'main' then
    perform pgmb_internal.create_main_reader((stream).id, current_number);
  end if;
  update pgmb.segment s set closed_at = clock_timestamp()
  where s.stream = (attach_current.stream).id and s.number < current_number and s.closed_at is null;
  return true;
end $$;

-- Creates a stream: its log pgmb.log_<name>, its sequence pgmb.seq_<name> and the first segments.
-- Does nothing when it exists. rotate_every / rotate_events: when maintain() opens a new segment.
-- keep_for: how long sealed segments are kept after the last queue and durable reader has passed them (null or a
-- negative value: without limit); drop_unread: even if one has not passed them; archive: not before the archive has
-- confirmed them. max_event_bytes: how many bytes an event's payload and headers may have together, as text, between 1024
-- and 67108864 (64 MiB, the default): a larger event is refused (23514). Errors: MB004 another session creates a stream or
-- grants rights in a transaction that stays open.
create or replace function pgmb.create_stream(
  name text, rotate_every interval default '1 hour', rotate_events bigint default 50000000,
  keep_for interval default '7 days', drop_unread boolean default false, archive boolean default false,
  max_event_bytes bigint default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
declare
  made pgmb.stream;
begin
  perform pgmb_internal.assert_admin();
  if create_stream.name is null or create_stream.name !~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$' then
    raise exception 'invalid stream name: %', coalesce(quote_literal(create_stream.name), 'null')
      using errcode = 'MB003',
        hint = 'Up to 40 letters, digits, dots, dashes and underscores, beginning with a letter or digit.';
  end if;
  -- Not left to the conflict below alone, which would use up an id at every call.
  if exists (select from pgmb.stream s where s.name = create_stream.name) then
    return;
  end if;
  insert into pgmb.stream (name, salt, rotate_every, rotate_events, keep_for, drop_unread, archive, max_event_bytes)
  values (create_stream.name, ('x' || substr(md5(gen_random_uuid()::text), 1, 16))::bit(64)::bigint & 4611686018427387903,
    create_stream.rotate_every, create_stream.rotate_events,
    case when create_stream.keep_for >= '0 s' then create_stream.keep_for end,
    create_stream.drop_unread, create_stream.archive, create_stream.max_event_bytes)
  on conflict do nothing
  returning * into made;
  if made.id is null then
    return;
  end if;
  insert into pgmb.history (stream) values (made.id);
  execute format('create sequence pgmb.%I as bigint cache 1', 'seq_' || made.name);
  -- xid before seq, on purpose: defaults are evaluated in this order, and a reader relies on an event's
  -- transaction having its xid before the event has its number. published_at is stable within a
  -- statement: a volatile default would turn COPY's bulk insert off.
  execute format('create table pgmb.%I (
      xid xid8 not null default pg_current_xact_id(),
      seq bigint not null default nextval(%L),
      id uuid,
      topic pgmb.event_topic not null,
      key pgmb.event_key,
      payload pgmb.event_payload not null,
      headers pgmb.event_headers,
      published_at timestamptz not null default statement_timestamp()
    ) partition by range (seq)', 'log_' || made.name, format('pgmb.%I', 'seq_' || made.name));
  execute format('alter table pgmb.%I alter column key set statistics 0', 'log_' || made.name);
  execute format('create index stream_%s_seq on pgmb.%I (seq)', made.id, 'log_' || made.name);
  execute format('create index stream_%s_xid on pgmb.%I (xid)', made.id, 'log_' || made.name);
  execute format('alter sequence pgmb.%I owned by pgmb.%I.seq', 'seq_' || made.name, 'log_' || made.name);
  perform pgmb_internal.attach_segment(made, nth) from generate_series(0, 1) nth;
  if made.name = 'main' then
    perform pgmb_internal.create_main_reader(made.id, 0);
  end if;
  -- Who comes to the new log sees both.
  update pgmb.segment s set writers = '{}' where s.stream = made.id;
  perform pgmb_internal.grant_stream(made.name, roles.publisher, roles.consumer)
  from (select to_regrole('pgmb_publisher')::text publisher, to_regrole('pgmb_consumer')::text consumer) roles;
end $$;

-- Changes how a stream rotates, what it keeps and how large its events may be. Null leaves a setting as it is; a negative
-- value switches it off: keep_for => '-1 s' keeps events without limit, max_event_bytes => -1 allows 64 MiB. Events that
-- were accepted before stay. Lock: ACCESS EXCLUSIVE on the segments that can be written to where max_event_bytes changes;
-- waits for it 50 ms at a time. Errors: MB004 a segment is in use.
create or replace function pgmb.alter_stream(
  name text, rotate_every interval default null, rotate_events bigint default null,
  keep_for interval default null, drop_unread boolean default null, archive boolean default null,
  max_event_bytes bigint default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.stream s
  set rotate_every = case when alter_stream.rotate_every < '0 s' then null
      else coalesce(alter_stream.rotate_every, s.rotate_every) end,
    rotate_events = case when alter_stream.rotate_events < 0 then null
      else coalesce(alter_stream.rotate_events, s.rotate_events) end,
    keep_for = case when alter_stream.keep_for < '0 s' then null
      else coalesce(alter_stream.keep_for, s.keep_for) end,
    drop_unread = coalesce(alter_stream.drop_unread, s.drop_unread),
    archive = coalesce(alter_stream.archive, s.archive),
    max_event_bytes = case when alter_stream.max_event_bytes < 0 then null
      else coalesce(alter_stream.max_event_bytes, s.max_event_bytes) end
  where s.id = pgmb.stream_id(alter_stream.name);
  if alter_stream.max_event_bytes is not null then
    perform pgmb_internal.limit_segment(s, g.number) from pgmb.stream s
    join pgmb.segment g on g.stream = s.id and g.sealed_at is null and g.dropped_at is null
    where s.name = alter_stream.name;
  end if;
end $$;

-- Drops a stream with all its events. Refuses while queues read it, or schedules or tables publish to it.
create or replace function pgmb.drop_stream(name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
declare
  gone integer := pgmb.stream_id(drop_stream.name);
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if exists (select from pgmb.queue q where q.stream = gone) then
    raise exception 'queues still read stream %', drop_stream.name
      using errcode = 'MB004', hint = 'Drop them first with pgmb.drop_queue(name).';
  end if;
  if exists (select from pgmb.schedule c where c.stream = drop_stream.name) then
    raise exception 'schedules still publish to stream %', drop_stream.name
      using errcode = 'MB004', hint = 'Drop them first with pgmb.drop_schedule(name).';
  end if;
  if exists (select from pgmb.table_mutations() m where m.stream = drop_stream.name) then
    raise exception 'tables still publish to stream %', drop_stream.name
      using errcode = 'MB004', hint = 'Stop them first with pgmb.stop_table_mutations(tabl).';
  end if;
  -- First: readers and ticks also lock it before the stream's row.
  execute format('lock table pgmb.%I in access exclusive mode', 'log_' || drop_stream.name);
  delete from pgmb.delayed d where d.stream = drop_stream.name;
  delete from pgmb.dedup d where d.stream = drop_stream.name;
  delete from pgmb.stream s where s.id = gone;
  if drop_stream.name = 'main' then
    drop view if exists pgmb.messages;
  end if;
  execute format('drop table pgmb.%I', 'log_' || drop_stream.name);
  perform pgmb_internal.drop_readers();
end $$;

-- The id of a stream. Called by pgmb.publish and by clients that write the log themselves. Errors: MB001 no such stream.
-- Support.
create or replace function pgmb.stream_id(name text)
returns integer
language plpgsql stable
as $$
declare
  found_id integer;
begin
  select s.id into found_id from pgmb.stream s where s.name = stream_id.name;
  if found_id is null then
    raise exception 'stream % does not exist', coalesce(quote_literal(name), 'null')
      using errcode = 'MB001', hint = 'Create it with pgmb.create_stream(name).';
  end if;
  return found_id;
end $$;
