-- Publishing from many tasks at once, as Spark's sink does: each writes into a stage, and one call publishes all stages
-- and notes their version in the ledger, in one transaction. Or tasks publish directly, each in a transaction of its
-- own that notes the task; what such a run leaves undone is finished through stages.

-- Raises 42501 unless the caller may publish to a stream. Internal.
create or replace function pgmb.assert_publisher(stream text)
returns void
language plpgsql stable
as $$
begin
  perform pgmb.stream_id(assert_publisher.stream);
  if not (pgmb.caller_is_owner()
    or has_any_column_privilege(pgmb.caller(), format('pgmb.%I', 'log_' || assert_publisher.stream), 'insert'))
  then
    raise exception 'role % may not publish to stream %', pgmb.caller(), assert_publisher.stream using errcode = '42501',
      hint = 'Grant it with pgmb.grant_publish(stream, role), or the role pgmb_publisher for all streams.';
  end if;
end $$;

-- An application's line in the ledger, which is made, and locked to the end of the transaction. Waits for whoever holds
-- it. Errors: 42501 another role began it. Internal.
create or replace function pgmb.ledger_of(stream text, app text)
returns pgmb.ledger
language plpgsql
as $$
declare
  line pgmb.ledger;
begin
  insert into pgmb.ledger (app, stream, role)
  values (ledger_of.app, pgmb.stream_id(ledger_of.stream), pgmb.caller())
  on conflict do nothing;
  select * into strict line from pgmb.ledger l
  where l.app = ledger_of.app and l.stream = pgmb.stream_id(ledger_of.stream) for update;
  perform pgmb.assert_app(line);
  return line;
end $$;

-- Raises 42501 unless the caller may go on with an application. One whose role is gone is anybody's. Internal.
create or replace function pgmb.assert_app(line pgmb.ledger)
returns void
language plpgsql stable
as $$
begin
  if not (pgmb.caller_is_owner() or pgmb.caller_is('pgmb_admin') or pgmb.caller_is(quote_ident((line).role))
    or to_regrole(quote_ident((line).role)) is null)
  then
    raise exception 'application % belongs to role %, not to %', quote_literal((line).app), (line).role, pgmb.caller()
      using errcode = '42501', hint = 'Publish as that role or a member of it, or under another txnAppId.';
  end if;
end $$;

-- The last version that an application has published to a stream; null if it is none.
create or replace function pgmb.published_version(stream text, app text)
returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  perform pgmb.assert_publisher(stream);
  return (select l.version from pgmb.ledger l where l.app = app and l.stream = pgmb.stream_id(stream));
end $$;

-- Gives the caller an empty table pgmb.stage_<number> (id, topic, key, payload, headers, due_at) to write into until the
-- end of the transaction, and returns the number: publish_tasks or publish_stage publishes it. Null if the application
-- has published this version already (version null: it has none). What rolls back leaves nothing.
create or replace function pgmb.claim_stage(stream text, app text, version bigint default null)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
#variable_conflict use_variable
declare
  stage integer;
begin
  perform pgmb.assert_publisher(stream);
  if version <= pgmb.published_version(stream, app) then
    return null;
  end if;
  select s.number into stage from pgmb.stage s
  where s.app is null and s.role = pgmb.caller()
  order by s.number limit 1 for update skip locked;
  if stage is null then
    insert into pgmb.stage (role) values (pgmb.caller()) returning number into stage;
    execute format('create unlogged table pgmb.stage_%s (
        id uuid,
        topic text not null,
        key text,
        payload json not null,
        headers json,
        due_at timestamptz
      ) using heap with (autovacuum_enabled = off, toast.autovacuum_enabled = off)', stage);
    execute format('grant insert on pgmb.stage_%s to %I', stage, pgmb.caller());
  else
    -- Also when it is empty: into a table that is new in this transaction COPY only appends, never into a gap, so
    -- that the rows lie in the order written.
    execute format('truncate pgmb.stage_%s', stage);
  end if;
  update pgmb.stage s
  set stream = pgmb.stream_id(stream), app = app, version = version, claimed_at = clock_timestamp()
  where s.number = stage;
  return stage;
end $$;

-- Publishes what is in a stage and frees it. Events with a due_at later than now are kept until then. Errors: MB050
-- it does not hold as many events as were written. Internal.
create or replace function pgmb.move_stage(
  stream text, stage integer, events bigint, delayed boolean, now timestamptz, truncated boolean default true
)
returns void
language plpgsql
-- The rows' order is that of the table's blocks.
set synchronize_seqscans = off
set jit = off
as $$
#variable_conflict use_variable
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
  perform pgmb.free_stage(stage, truncated);
end $$;

-- Frees a stage that the caller's transaction has locked, and its space if it has much. Internal.
create or replace function pgmb.free_stage(stage integer, truncated boolean default true)
returns void
language plpgsql
as $$
#variable_conflict use_variable
begin
  update pgmb.stage s set stream = null, app = null, version = null
  where s.number = stage;
  if truncated and pg_table_size(format('pgmb.stage_%s', stage)::regclass) > 1048576 then
    execute format('truncate pgmb.stage_%s', stage);
  end if;
end $$;

-- Frees stages that an application holds on a stream for versions up to the one given (null: for none), except those
-- being written. Returns how many. Internal.
create or replace function pgmb.free_stages(stream text, app text, version bigint)
returns integer
language plpgsql
as $$
#variable_conflict use_variable
declare
  freed integer := 0;
  stage integer;
begin
  for stage in
    select s.number from pgmb.stage s
    where s.app = app and s.stream = pgmb.stream_id(stream) and s.role = pgmb.caller()
      and (s.version <= version or (version is null and s.version is null))
    order by s.number for update skip locked
  loop
    freed := freed + 1;
    perform pgmb.free_stage(stage, freed <= 100);
  end loop;
  return freed;
end $$;

-- Locks a stage and raises MB050 unless it was written for this. Internal.
create or replace function pgmb.hold_stage(stream text, stage integer, app text, version bigint)
returns void
language plpgsql
as $$
#variable_conflict use_variable
begin
  perform from pgmb.stage s
  where s.number = stage and s.role = pgmb.caller() and s.stream = pgmb.stream_id(stream)
    and s.app = app and s.version is not distinct from version
  for update;
  if not found then
    raise exception 'stage % is not held by application %', stage, quote_literal(app) using errcode = 'MB050',
      hint = 'It was freed by another run, or by maintain() after a time. Nothing was published: run it again.';
  end if;
end $$;

-- Publishes what the tasks of a version have written, all or nothing, in the order of the arrays: a stage each, or null
-- for a task without events or one that published directly, then with its digest. Returns the number of events
-- published by this call, or null if the application has published this version, or a later one, already. Frees these
-- stages and those that dead tasks of it left. version null: without the ledger. Lock: the application's line in it.
-- Errors: MB050 a stage lost its events, MB051 a task that published directly held other events, MB001, 42501, MB040.
create or replace function pgmb.publish_tasks(
  stream text, app text, version bigint, tasks integer[], stages integer[], events bigint[],
  digests bigint[] default null, delayed boolean default false
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  line pgmb.ledger;
  now timestamptz := clock_timestamp();
  staged record;
  published bigint := 0;
begin
  perform pgmb.assert_publisher(stream);
  if version is not null then
    line := pgmb.ledger_of(stream, app);
    if line.version >= version then
      perform pgmb.free_stages(stream, app, line.version);
      return null;
    end if;
    perform pgmb.assert_tasks(line, version, tasks, stages, events, digests);
  end if;
  for staged in
    select given.stage, given.events
    from unnest(stages, events) with ordinality given (stage, events, place)
    where given.stage is not null
    order by given.place
  loop
    perform pgmb.hold_stage(stream, staged.stage, app, version);
    -- Each truncate holds locks to the end, of which a server has a few thousand: thousands of stages are left to
    -- those who claim them next.
    perform pgmb.move_stage(stream, staged.stage, staged.events, delayed, now, cardinality(stages) <= 100);
    published := published + staged.events;
  end loop;
  if version is not null then
    update pgmb.ledger l
    set version = version, committed_at = now, under_way = null, run = null,
      events = (select coalesce(sum(e), 0) from unnest(events) e)
    where l.app = app and l.stream = line.stream;
    delete from pgmb.ledger_task t where t.app = app and t.stream = line.stream;
  end if;
  perform pgmb.free_stages(stream, app, version);
  return published;
end $$;

-- Gives up what the tasks of a version have written: frees their stages, except those being written. What tasks published
-- directly stays published. forget: the application ends here, and so does its line in the ledger. Returns the number of
-- stages freed.
create or replace function pgmb.abandon_tasks(stream text, app text, version bigint, forget boolean default false)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  line pgmb.ledger;
begin
  perform pgmb.assert_publisher(stream);
  if forget then
    line := pgmb.ledger_of(stream, app);
    delete from pgmb.ledger_task t where t.app = app and t.stream = line.stream;
    delete from pgmb.ledger l where l.app = app and l.stream = line.stream;
  end if;
  return pgmb.free_stages(stream, app, version);
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
  perform pgmb.assert_publisher(stream);
  perform pgmb.hold_stage(stream, stage, app, version);
  perform pgmb.move_stage(stream, stage, events, delayed, clock_timestamp());
  return events;
end $$;

-- Says how a task of a version is to publish in this run: 'published' not at all, the application has come further
-- already; 'direct' by claim_task; 'staged' by claim_stage and publish_tasks, because tasks of an earlier run published
-- directly and it is not yet shown that this run cuts the version into the same. From then on tasks of other runs are
-- refused; waits for those that are publishing, a minute at most. Call it in a transaction of its own. Errors: MB051
-- another version was published in part, 42501, 55P03.
create or replace function pgmb.begin_tasks(stream text, app text, version bigint, run uuid)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '1min'
as $$
#variable_conflict use_variable
declare
  line pgmb.ledger;
begin
  perform pgmb.assert_publisher(stream);
  -- The first task of a run locks the line, the others only look.
  select * into line from pgmb.ledger l where l.app = app and l.stream = pgmb.stream_id(stream);
  if line.app is null or (line.under_way, line.run) is distinct from (version, run) then
    line := pgmb.ledger_of(stream, app);
    if line.version is null or line.version < version then
      perform pgmb.assert_whole(line, version);
      update pgmb.ledger l set under_way = version, run = run where l.app = app and l.stream = line.stream;
    end if;
  end if;
  return case
    when line.version >= version then 'published'
    when exists (select from pgmb.ledger_task t
      where t.app = app and t.stream = line.stream and t.version = version and t.run <> run) then 'staged'
    else 'direct' end;
end $$;

-- Raises MB051 if tasks of another version than this have published directly and the rest of them has not. Internal.
create or replace function pgmb.assert_whole(line pgmb.ledger, version bigint)
returns void
language plpgsql stable
as $$
#variable_conflict use_variable
declare
  part record;
begin
  select t.version, count(*) tasks, sum(t.events) events into part
  from pgmb.ledger_task t
  where t.app = (line).app and t.stream = (line).stream and t.version <> version
  group by t.version limit 1;
  if found then
    raise exception 'version % of application % was published in part only: % events of % tasks',
      part.version, quote_literal((line).app), part.events, part.tasks
      using errcode = 'MB051', hint = format('Run version %s again before version %s.', part.version, version);
  end if;
end $$;

-- Notes that a task publishes directly in the caller's transaction, which writes its events to the log and then calls
-- finish_task. False if an attempt of it has done so: it publishes nothing again. Waits for one that is under way.
-- Errors: MB051 another run has begun.
create or replace function pgmb.claim_task(stream text, app text, version bigint, task integer, run uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  line pgmb.ledger;
begin
  perform pgmb.assert_publisher(stream);
  -- Held to the end: no other run begins while this task publishes.
  select * into line from pgmb.ledger l where l.app = app and l.stream = pgmb.stream_id(stream) for share;
  perform pgmb.assert_app(line);
  if (line.under_way, line.run) is distinct from (version, run) then
    raise exception 'another run of application % has begun', quote_literal(app) using errcode = 'MB051',
      hint = 'Only one run at a time publishes directly.';
  end if;
  insert into pgmb.ledger_task (app, stream, version, task, run) values (app, line.stream, version, task, run)
  on conflict do nothing;
  return found;
end $$;

-- Whether a task of a version has published directly.
create or replace function pgmb.task_published(stream text, app text, version bigint, task integer)
returns boolean
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  perform pgmb.assert_publisher(stream);
  return exists (select from pgmb.ledger_task t
    where t.app = app and t.stream = pgmb.stream_id(stream) and t.version = version and t.task = task);
end $$;

-- Notes what a task has published directly, at the end of its transaction.
create or replace function pgmb.finish_task(stream text, app text, version bigint, task integer, events bigint, digest bigint)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  perform pgmb.assert_publisher(stream);
  perform pgmb.assert_app(l) from pgmb.ledger l where l.app = app and l.stream = pgmb.stream_id(stream);
  update pgmb.ledger_task t set events = events, digest = digest, committed_at = clock_timestamp()
  where t.app = app and t.stream = pgmb.stream_id(stream) and t.version = version and t.task = task and t.events is null;
end $$;

-- Raises MB051 unless the tasks of a version that published directly held the same events as the tasks of that number
-- now: only then are the others those that are missing. Internal.
create or replace function pgmb.assert_tasks(
  line pgmb.ledger, version bigint, tasks integer[], stages integer[], events bigint[], digests bigint[]
)
returns void
language plpgsql stable
as $$
#variable_conflict use_variable
declare
  other record;
begin
  perform pgmb.assert_whole(line, version);
  select done.task, done.events, done.tasks, now.task is null missing, now.stage is not null staged, now.events now_events
  into other
  from (
    select t.task, t.events, t.digest, count(*) over () tasks from pgmb.ledger_task t
    where t.app = (line).app and t.stream = (line).stream and t.version = version
  ) done
  left join unnest(tasks, stages, events, digests) now (task, stage, events, digest) on now.task = done.task
  where now.task is null or now.stage is not null
    or (now.events, now.digest) is distinct from (done.events, done.digest)
  order by done.task limit 1;
  if found then
    raise exception 'version % of application % was cut into other tasks before: task % published % events, and now %; '
      '% published before, it has % now', version, quote_literal((line).app), other.task, other.events,
      case when other.missing then 'there is none'
        when other.staged then format('it came to be published with all others (%s events)', other.now_events)
        when other.events = other.now_events then format('it holds %s other ones', other.now_events)
        else format('it holds %s', other.now_events) end,
      case when other.tasks = 1 then '1 task' else format('%s tasks', other.tasks) end,
      cardinality(tasks)
      using errcode = 'MB051', hint = 'Run it again cut as it was and with commitMode=direct. Where that cannot be'
        ' promised, commitMode=staged needs no such promise, from the next version on.';
  end if;
  select now.task, now.events into other
  from unnest(tasks, stages, events) now (task, stage, events)
  where now.stage is null and now.events > 0 and not exists (select from pgmb.ledger_task t
    where t.app = (line).app and t.stream = (line).stream and t.version = version and t.task = now.task)
  limit 1;
  if found then
    raise exception 'task % of application % neither published its % events nor has a stage', other.task,
      quote_literal((line).app), other.events using errcode = 'MB050', hint = 'Run it again.';
  end if;
end $$;

-- Frees stages that were written and not published within `older`, drops those that nobody used for as long, a hundred a
-- call, and returns how many were freed. Those being written are left. maintain() calls it with the setting pgmb.keep_stages, a day.
create or replace function pgmb.clear_stages(older interval default '1 day')
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
#variable_conflict use_variable
declare
  old record;
  freed integer := 0;
begin
  perform pgmb.assert_admin();
  for old in
    select s.number, s.app from pgmb.stage s where s.claimed_at < clock_timestamp() - older
    order by s.number limit 100 for update skip locked
  loop
    begin
      if old.app is not null then
        perform pgmb.free_stage(old.number);
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
    where empty.version is null and empty.begun_at < clock_timestamp() - older
      and not exists (select from pgmb.ledger_task t where t.app = empty.app and t.stream = empty.stream)
    for update skip locked));
  return freed;
end $$;
