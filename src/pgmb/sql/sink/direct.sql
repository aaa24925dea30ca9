-- Tasks that publish directly. Each publishes in a transaction of its own that notes the task. A run that leaves tasks
-- undone is finished through stages (pgmb.publish_tasks).

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
declare
  line pgmb.ledger;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  -- The first task of a run locks the line, the others only look.
  select * into line from pgmb.ledger l where l.app = begin_tasks.app and l.stream = pgmb.stream_id(begin_tasks.stream);
  if line.app is null or (line.under_way, line.run) is distinct from (version, run) then
    line := pgmb_internal.ledger_of(stream, app);
    if line.version is null or line.version < version then
      perform pgmb_internal.assert_whole(line, version);
      update pgmb.ledger l set under_way = begin_tasks.version, run = begin_tasks.run
      where l.app = begin_tasks.app and l.stream = line.stream;
    end if;
  end if;
  return case
    when line.version >= version then 'published'
    when exists (select from pgmb.ledger_task t
      where t.app = begin_tasks.app and t.stream = line.stream and t.version = begin_tasks.version
        and t.run <> begin_tasks.run) then 'staged'
    else 'direct' end;
end $$;

-- Notes that a task publishes directly in the caller's transaction, which writes its events to the log and then calls
-- finish_task. False if an attempt of it has done so: it publishes nothing again. Waits for one that is under way.
-- Errors: MB051 another run has begun.
create or replace function pgmb.claim_task(stream text, app text, version bigint, task integer, run uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  line pgmb.ledger;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  -- Held to the end: no other run begins while this task publishes.
  select * into line from pgmb.ledger l where l.app = claim_task.app and l.stream = pgmb.stream_id(claim_task.stream)
  for share;
  perform pgmb_internal.assert_app(line);
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
begin
  perform pgmb_internal.assert_publisher(stream);
  return exists (select from pgmb.ledger_task t
    where t.app = task_published.app and t.stream = pgmb.stream_id(task_published.stream)
      and t.version = task_published.version and t.task = task_published.task);
end $$;

-- Notes what a task has published directly, at the end of its transaction.
create or replace function pgmb.finish_task(stream text, app text, version bigint, task integer, events bigint, digest bigint)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  perform pgmb_internal.assert_app(l) from pgmb.ledger l
  where l.app = finish_task.app and l.stream = pgmb.stream_id(finish_task.stream);
  update pgmb.ledger_task t set events = finish_task.events, digest = finish_task.digest, committed_at = clock_timestamp()
  where t.app = finish_task.app and t.stream = pgmb.stream_id(finish_task.stream) and t.version = finish_task.version
    and t.task = finish_task.task and t.events is null;
end $$;

-- Raises MB051 if tasks of another version than this have published directly and the rest of them has not.
create or replace function pgmb_internal.assert_whole(line pgmb.ledger, version bigint)
returns void
language plpgsql stable
as $$
declare
  part record;
begin
  select t.version, count(*) tasks, sum(t.events) events into part
  from pgmb.ledger_task t
  where t.app = (line).app and t.stream = (line).stream and t.version <> assert_whole.version
  group by t.version limit 1;
  if found then
    raise exception 'version % of application % was published in part only: % events of % tasks',
      part.version, quote_literal((line).app), part.events, part.tasks
      using errcode = 'MB051', hint = format('Run version %s again before version %s.', part.version, version);
  end if;
end $$;

-- Raises MB051 unless the tasks of a version that published directly held the same events as the tasks of that number
-- now: only then are the others those that are missing.
create or replace function pgmb_internal.assert_tasks(
  line pgmb.ledger, version bigint, tasks integer[], stages integer[], events bigint[], digests bigint[]
)
returns void
language plpgsql stable
as $$
declare
  other record;
begin
  perform pgmb_internal.assert_whole(line, version);
  select done.task, done.events, done.tasks, now.task is null missing, now.stage is not null staged, now.events now_events
  into other
  from (
    select t.task, t.events, t.digest, count(*) over () tasks from pgmb.ledger_task t
    where t.app = (line).app and t.stream = (line).stream and t.version = assert_tasks.version
  ) done
  left join unnest(assert_tasks.tasks, assert_tasks.stages, assert_tasks.events, assert_tasks.digests) now (task, stage, events, digest) on now.task = done.task
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
  from unnest(assert_tasks.tasks, assert_tasks.stages, assert_tasks.events) now (task, stage, events)
  where now.stage is null and now.events > 0 and not exists (select from pgmb.ledger_task t
    where t.app = (line).app and t.stream = (line).stream and t.version = assert_tasks.version and t.task = now.task)
  limit 1;
  if found then
    raise exception 'task % of application % neither published its % events nor has a stage', other.task,
      quote_literal((line).app), other.events using errcode = 'MB050', hint = 'Run it again.';
  end if;
end $$;
