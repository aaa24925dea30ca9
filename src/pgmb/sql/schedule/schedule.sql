-- Recurring publishes. The cron expression is read by the client (pgmb.cron in Python); here lies when a schedule is
-- due next, and the one step that publishes and moves it on.

-- Creates a schedule that publishes an event at each time that `cron` names in `timezone`, first at next_at; or
-- changes an existing one. If cron and timezone do not change, the schedule keeps its next_at.
-- missed: publish the 'last' or 'all' due times that were missed while no scheduler ran. app: the app that declares it, which an owned
-- schedule keeps until it is dropped. True if it was created.
-- Errors: MB001 no such stream, MB003 invalid name, MB005 an invalid argument.
create or replace function pgmb.create_schedule(
  name text, cron text, topic text, payload json, next_at timestamptz, timezone text default 'UTC',
  key text default null, headers json default null, stream text default 'main', missed text default 'last',
  app text default null
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  made boolean;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(create_schedule.stream);
  perform pgmb_internal.assert_name('schedule', create_schedule.name);
  if create_schedule.missed is null or create_schedule.missed not in ('last', 'all') then
    raise exception 'invalid missed: %', coalesce(quote_literal(create_schedule.missed), 'null')
      using errcode = 'MB005', hint = 'It is ''last'' or ''all''.';
  end if;
  if json_typeof(create_schedule.headers) <> 'object' then
    raise exception 'schedule headers must be an object, got %', json_typeof(create_schedule.headers)
      using errcode = 'MB005', hint = 'The schedule adds its name and due time to the headers.';
  end if;
  if create_schedule.cron is null or create_schedule.timezone is null or create_schedule.topic is null
    or create_schedule.payload is null or create_schedule.next_at is null
  then
    raise exception 'a schedule needs cron, timezone, topic, payload and next_at' using errcode = 'MB005',
      hint = 'For an event without a payload give ''null''::json.';
  end if;
  insert into pgmb.schedule as c (name, cron, timezone, stream, topic, key, payload, headers, next_at, missed, app)
  values (create_schedule.name, create_schedule.cron, create_schedule.timezone, create_schedule.stream,
    create_schedule.topic, create_schedule.key, create_schedule.payload, create_schedule.headers,
    create_schedule.next_at, create_schedule.missed, create_schedule.app)
  on conflict on constraint schedule_pkey do update
  set cron = excluded.cron, timezone = excluded.timezone, stream = excluded.stream, topic = excluded.topic,
    key = excluded.key, payload = excluded.payload, headers = excluded.headers, missed = excluded.missed,
    app = coalesce(c.app, excluded.app),
    next_at = case when (c.cron, c.timezone) = (excluded.cron, excluded.timezone) then c.next_at
      else excluded.next_at end,
    decided_at = case when (c.cron, c.timezone) = (excluded.cron, excluded.timezone) then c.decided_at
      else excluded.decided_at end,
    published = case when (c.cron, c.timezone) = (excluded.cron, excluded.timezone) then c.published
      else excluded.published end
  where (c.cron, c.timezone, c.stream, c.topic, c.key, c.payload::text, c.headers::text, c.missed, c.app) is distinct from
    (excluded.cron, excluded.timezone, excluded.stream, excluded.topic, excluded.key, excluded.payload::text,
      excluded.headers::text, excluded.missed, coalesce(c.app, excluded.app))
  returning c.xmax = 0 into made;
  return coalesce(made, false);
end $$;

-- Says which schedules the code of a worker declares, each with a digest of what it says, and returns those that this
-- transaction may create or change: there is none of the name, or no other live worker declares another one and no app of
-- another name owns it. Of workers of other apps, the owner does not wait for what they declare. So an old worker
-- that starts again in a deployment changes nothing back. Others that declare schedules wait until the transaction ends, for
-- a second at most. worker: as in worker_heartbeat, which comes first; null records nothing. Errors: 42501, 55P03.
create or replace function pgmb.declare_schedules(worker uuid, schedules jsonb)
returns text[]
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '1s'
as $$
declare
  caller name := pgmb_internal.caller();
  since timestamptz := pgmb_internal.alive_since();
  mine text := (select w.app from pgmb.worker w where w.id = declare_schedules.worker);
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pg_advisory_xact_lock(pgmb_internal.lock_key('schedules'));
  update pgmb.worker w set schedules = declare_schedules.schedules
  where w.id = declare_schedules.worker and w.role = caller;
  if not found and declare_schedules.worker is not null then
    raise exception 'role % has no worker %', caller, declare_schedules.worker using errcode = '42501',
      hint = 'Call pgmb.worker_heartbeat first.';
  end if;
  return array(
    select d.key from jsonb_each(declare_schedules.schedules) d
    left join pgmb.schedule s on s.name = d.key
    where s.name is null
      or (s.app <> mine) is not true and not exists (select from pgmb.worker w
        where w.id is distinct from declare_schedules.worker and w.heartbeat_at > since and w.schedules -> d.key <> d.value
          and (s.app = mine and w.app <> mine) is not true)
    order by d.key);
end $$;

-- Drops a schedule. True if there was one.
create or replace function pgmb.drop_schedule(name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.schedule c where c.name = drop_schedule.name;
  return found;
end $$;

-- Stops a schedule until resume_schedule. Errors: MB008 no such schedule.
create or replace function pgmb.pause_schedule(name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.schedule c set paused_at = coalesce(c.paused_at, clock_timestamp())
  where c.name = pause_schedule.name;
  if not found then
    perform pgmb_internal.refuse_schedule(pause_schedule.name);
  end if;
end $$;

-- Lets a paused schedule go on, from next_at: what was due meanwhile is not made up for. Nothing happens when it is not
-- paused. Errors: MB008 no such schedule.
create or replace function pgmb.resume_schedule(name text, next_at timestamptz)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.schedule c
  set paused_at = null, next_at = case when c.paused_at is null then c.next_at else resume_schedule.next_at end,
    decided_at = case when c.paused_at is null then c.decided_at else clock_timestamp() end
  where c.name = resume_schedule.name;
  if not found then
    perform pgmb_internal.refuse_schedule(resume_schedule.name);
  end if;
end $$;

-- Raises MB008.
create or replace function pgmb_internal.refuse_schedule(name text)
returns void
language plpgsql
as $$
begin
  raise exception 'schedule % does not exist', coalesce(quote_literal(name), 'null')
    using errcode = 'MB008', hint = 'Create it with pgmb.create_schedule.';
end $$;

-- Every schedule, by name; `now` is the database's clock, which decides what is due. app: the app that owns it; others: apps of
-- other names of which a live worker declares it, to no effect.
create or replace function pgmb.schedules(
  out name text, out cron text, out timezone text, out stream text, out topic text, out key text, out payload json,
  out headers json, out missed text, out next_at timestamptz, out last_at timestamptz, out paused_at timestamptz,
  out app text, out others text[], out now timestamptz
)
returns setof record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  since timestamptz := pgmb_internal.alive_since();
begin
  perform pgmb_internal.assert_admin();
  return query select c.name, c.cron, c.timezone, c.stream, c.topic, c.key, c.payload::json, c.headers::json, c.missed,
      c.next_at, c.last_at, c.paused_at, c.app,
      array(select distinct w.app from pgmb.worker w
        where w.heartbeat_at > since and w.schedules ? c.name and w.app <> c.app order by w.app),
      clock_timestamp()
    from pgmb.schedule c order by c.name;
end $$;

-- The schedules that are due or will be within `ahead`, soonest first, with the database's clock. recompute_after: not null
-- if the clock was wrong when the due time was decided, or is wrong now: wait to see whether that stays. Then the due time after
-- this moment is the right one, for pgmb.reschedule. Writes nothing.
create or replace function pgmb.due_schedules(
  ahead interval default '0 s', out name text, out cron text, out timezone text, out missed text,
  out due_at timestamptz, out now timestamptz, out recompute_after timestamptz
)
returns setof record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  present timestamptz := clock_timestamp();
  before timestamptz := present + ahead;
begin
  perform pgmb_internal.assert_admin();
  return query
  select c.name, c.cron, c.timezone, c.missed, c.next_at, present,
    case when pgmb_internal.was_behind(c, present) then c.passed_upto end
  from pgmb.schedule c
  where c.paused_at is null and c.next_at <= before and c.decided_at <= present
  union all
  select c.name, c.cron, c.timezone, c.missed, c.next_at, present,
    -- What was published up to now by the clock that is right stays published.
    coalesce((select upper(p) from unnest(c.published) p where lower(p) <= present order by lower(p) desc limit 1), present)
  from pgmb.schedule c
  where c.paused_at is null and c.decided_at > present
  order by 5;
end $$;

-- Whether a schedule's due time was decided while the clock was behind: the clock has jumped over a time at which the due times
-- up to it had been decided before. A minute apart, because a clock that goes on comes there too, where it was ahead once.
create or replace function pgmb_internal.was_behind(schedule pgmb.schedule, now timestamptz)
returns boolean
language sql stable
as $$
  select coalesce((schedule).passed_upto <= now and (schedule).next_at < (schedule).passed_upto - interval '1 minute', false)
$$;

-- Sets the due time of a schedule that stands at due_at, if the clock was ahead or behind when that was decided. Returns whether
-- it was. Called by the scheduler. Support.
create or replace function pgmb.reschedule(name text, due_at timestamptz, next_at timestamptz)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  update pgmb.schedule c
  set next_at = reschedule.next_at, decided_at = now,
    passed_upto = case when c.decided_at > now then c.decided_at end
  where c.name = reschedule.name and c.next_at is not distinct from reschedule.due_at
    and (c.decided_at > now or pgmb_internal.was_behind(c, now)) and c.paused_at is null;
  return found;
end $$;

-- Publishes a schedule's event and moves the schedule on from due_at to next_at (null: it never falls due again), if it
-- is still at due_at and that time has come. Returns the event's id, or null if another scheduler was faster, or if the due
-- time was published before: each is published once. The event's headers contain "schedule" and "due_at": stands_for, by
-- default due_at. Lock: the schedule's row. Errors: as pgmb.publish.
create or replace function pgmb.fire(
  name text, due_at timestamptz, next_at timestamptz, stands_for timestamptz default null
)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  fired pgmb.schedule;
  stood_for timestamptz := coalesce(fire.stands_for, fire.due_at);
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  if fire.next_at <= fire.due_at then
    raise exception 'a schedule moves on, not from % to %', fire.due_at, fire.next_at using errcode = 'MB005';
  end if;
  select * into fired from pgmb.schedule c
  where c.name = fire.name and c.next_at = fire.due_at and c.next_at <= now and c.paused_at is null
  for update;
  if not found then
    return null;
  end if;
  update pgmb.schedule c
  set next_at = fire.next_at, decided_at = now,
    last_at = case when stood_for <@ fired.published then c.last_at else stood_for end,
    published = pgmb_internal.with_published(fired.published, fire.due_at, stood_for)
  where c.name = fire.name;
  if stood_for <@ fired.published then
    return null;
  end if;
  return pgmb_internal.publish_scheduled(fired, stood_for);
end $$;

-- The due times that were published, with one more. It joins the one before, which next_at followed; but where due times were
-- missed, a clock that was ahead may have said so: they stay out. Of more than ten parts the earliest two become one.
create or replace function pgmb_internal.with_published(published tstzmultirange, due_at timestamptz, stands_for timestamptz)
returns tstzmultirange
language sql immutable
as $$
  select case when (select count(*) from unnest(more.parts)) > 10
    then more.parts + (
      select tstzmultirange(tstzrange(min(lower(p)), max(upper(p)), '[]'))
      from (select p from unnest(more.parts) p order by lower(p) limit 2) earliest (p))
    else more.parts end
  from (
    select published + tstzmultirange(tstzrange(
      case when stands_for = due_at
        then coalesce((select max(upper(p)) from unnest(published) p where upper(p) <= stands_for), stands_for)
        else stands_for end, stands_for, '[]')) parts) more
$$;

-- Publishes a schedule's event for a due time and returns its id. Errors: as pgmb.publish.
create or replace function pgmb_internal.publish_scheduled(schedule pgmb.schedule, due_at timestamptz)
returns uuid
language sql volatile
as $$
  select pgmb.publish((schedule).topic, (schedule).payload, (schedule).key, (coalesce((schedule).headers, '{}')::jsonb
    || jsonb_build_object('schedule', (schedule).name,
      'due_at', to_char(due_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')))::json, (schedule).stream)
$$;

-- Publishes a schedule's event now, whether it is due or paused, and returns its id. The schedule stays as it is: its next
-- due time is published too. The event's headers contain the present time as "due_at".
-- Errors: MB008 no such schedule, and as pgmb.publish.
create or replace function pgmb.run_schedule(name text)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  found_schedule pgmb.schedule;
begin
  perform pgmb_internal.assert_admin();
  select * into found_schedule from pgmb.schedule c where c.name = run_schedule.name;
  if not found then
    perform pgmb_internal.refuse_schedule(run_schedule.name);
  end if;
  return pgmb_internal.publish_scheduled(found_schedule, clock_timestamp());
end $$;
