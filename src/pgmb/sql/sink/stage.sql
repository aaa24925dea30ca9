-- Stages: tables into which one task at a time writes what is published as a whole later.

-- Gives the caller an empty table pgmb.stage_<number> (id, topic, key, payload, headers, due_at) to write into until the
-- end of the transaction, and returns the number: publish_tasks or publish_stage publishes it. Null if the application
-- has published this version already (version null: it has none). What rolls back leaves nothing.
create or replace function pgmb.claim_stage(stream text, app text, version bigint default null)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
declare
  stage integer;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  if version <= pgmb.published_version(stream, app) then
    return null;
  end if;
  select s.number into stage from pgmb.stage s
  where s.app is null and s.role = (select pgmb_internal.caller())
  order by s.number limit 1 for update skip locked;
  if stage is null then
    if (select count(*) from pgmb.stage s where s.role = (select pgmb_internal.caller())) >= 10000 then
      raise exception 'role % has 10000 stages', pgmb_internal.caller() using errcode = 'MB043',
        hint = 'Publish or abandon what is staged (pgmb.publish_tasks, pgmb.abandon_tasks); maintain() frees what is old.';
    end if;
    insert into pgmb.stage (role) values (pgmb_internal.caller()) returning number into stage;
    execute format('create unlogged table pgmb.stage_%s (
        id uuid,
        topic text not null,
        key text,
        payload pgmb.event_payload not null,
        headers pgmb.event_headers,
        due_at timestamptz
      ) using heap with (autovacuum_enabled = off, toast.autovacuum_enabled = off)', stage);
    -- Not sampled: pg_statistic would keep what was erased.
    execute format('alter table pgmb.stage_%s alter column key set statistics 0', stage);
    execute format('grant insert on pgmb.stage_%s to %I', stage, pgmb_internal.caller());
  else
    -- Also when it is empty: into a table that is new in this transaction COPY only appends, never into a gap, so
    -- that the rows lie in the order written.
    execute format('truncate pgmb.stage_%s', stage);
  end if;
  update pgmb.stage s
  set stream = pgmb.stream_id(claim_stage.stream), app = claim_stage.app, version = claim_stage.version,
    claimed_at = clock_timestamp()
  where s.number = stage;
  return stage;
end $$;

-- Locks a stage and raises MB050 unless it was written for this.
create or replace function pgmb_internal.hold_stage(stream text, stage integer, app text, version bigint)
returns void
language plpgsql
as $$
begin
  perform from pgmb.stage s
  where s.number = stage and s.role = (select pgmb_internal.caller()) and s.stream = pgmb.stream_id(hold_stage.stream)
    and s.app = hold_stage.app and s.version is not distinct from hold_stage.version
  for update;
  if not found then
    raise exception 'stage % is not held by application %', stage, quote_literal(app) using errcode = 'MB050',
      hint = 'It was freed by another run, or by maintain() after a time. Nothing was published: run it again.';
  end if;
end $$;

-- Publishes what is in a stage and frees it. Events with a due_at later than now are kept until then. Errors: MB050
-- it does not hold as many events as were written.
create or replace function pgmb_internal.move_stage(
  stream text, stage integer, events bigint, delayed boolean, now timestamptz, truncated boolean default true
)
returns void
language plpgsql
-- The rows' order is that of the table's blocks.
set synchronize_seqscans = off
set jit = off
as $$
declare
  moved bigint;
  later bigint := 0;
begin
  if delayed then
    execute format('insert into pgmb.delayed (id, stream, due_at, topic, key, payload, headers)
        select coalesce(e.id, pgmb.fresh_id()), $1, e.due_at, e.topic, e.key, e.payload, e.headers
        from pgmb.stage_%s e where e.due_at > $2', stage)
      using stream, now;
    get diagnostics later = row_count;
    execute format('insert into pgmb.%I (id, topic, key, payload, headers)
        select e.id, e.topic, e.key, e.payload, e.headers
        from pgmb.stage_%s e where e.due_at is null or e.due_at <= $1', 'log_' || stream, stage)
      using now;
  else
    execute format('insert into pgmb.%I (id, topic, key, payload, headers)
        select e.id, e.topic, e.key, e.payload, e.headers from pgmb.stage_%s e', 'log_' || stream, stage);
  end if;
  get diagnostics moved = row_count;
  if moved + later <> events then
    raise exception 'stage % holds % of the % events written into it', stage, moved + later, events
      using errcode = 'MB050', hint = 'The server crashed, which empties stages. Nothing was published: run it again.';
  end if;
  perform pgmb_internal.free_stage(stage, truncated);
end $$;

-- Publishes one stage of the caller's transaction, apart from others. Returns the number of events. Errors: MB050.
create or replace function pgmb.publish_stage(
  stream text, stage integer, app text, version bigint, events bigint, delayed boolean default false
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  perform pgmb_internal.hold_stage(stream, stage, app, version);
  perform pgmb_internal.move_stage(stream, stage, events, delayed, clock_timestamp());
  return events;
end $$;

-- Frees a stage that the caller's transaction has locked, and its space if it has much.
create or replace function pgmb_internal.free_stage(stage integer, truncated boolean default true)
returns void
language plpgsql
as $$
begin
  update pgmb.stage s set stream = null, app = null, version = null
  where s.number = stage;
  if truncated and pg_table_size(format('pgmb.stage_%s', stage)::regclass) > 1048576 then
    execute format('truncate pgmb.stage_%s', stage);
  end if;
end $$;

-- Frees stages that an application holds on a stream for versions up to the one given (null: for none), except those
-- being written. Returns how many.
create or replace function pgmb_internal.free_stages(stream text, app text, version bigint)
returns integer
language plpgsql
as $$
declare
  freed integer := 0;
  stage integer;
begin
  for stage in
    select s.number from pgmb.stage s
    where s.app = free_stages.app and s.stream = pgmb.stream_id(free_stages.stream) and s.role = (select pgmb_internal.caller())
      and (s.version <= free_stages.version or (free_stages.version is null and s.version is null))
    order by s.number for update skip locked
  loop
    freed := freed + 1;
    perform pgmb_internal.free_stage(stage, freed <= 100);
  end loop;
  return freed;
end $$;

-- Frees stages that were written but not published within `older`, drops stages unused for as long, up to a hundred per
-- call, and returns how many were freed. Skips stages that are being written. maintain() calls it with the setting
-- pgmb.keep_stages, by default a day.
create or replace function pgmb.clear_stages(older interval default '1 day')
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
  old record;
  freed integer := 0;
  now timestamptz := clock_timestamp();
  before timestamptz := now - older;
  clock pgmb.clock := pgmb_internal.read_clock();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  for old in
    select s.number, s.app from pgmb.stage s where pgmb_internal.has_aged(s.claimed_at, clear_stages.older, now, clock)
    order by s.number limit 100 for update skip locked
  loop
    begin
      if old.app is not null then
        perform pgmb_internal.free_stage(old.number);
        freed := freed + 1;
      else
        execute format('drop table if exists pgmb.stage_%s', old.number);
        delete from pgmb.stage s where s.number = old.number;
      end if;
    exception when lock_not_available then
      null;
    end;
  end loop;
  -- Lines of applications that ended before they published anything.
  delete from pgmb.ledger l
  where l.ctid = any (array(
    select empty.ctid from pgmb.ledger empty
    where empty.version is null and empty.begun_at < before
      and not exists (select from pgmb.ledger_task t where t.app = empty.app and t.stream = empty.stream)
    limit 10000 for update skip locked));
  return freed;
end $$;
