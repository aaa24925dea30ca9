-- Publishing from many tasks. Each task writes into a stage, as those of Spark's sink do; one call publishes all stages
-- and notes their version in the ledger, in one transaction.

-- An application's line in the ledger, which is made, and locked to the end of the transaction. Waits for the transaction that holds
-- it. Errors: 42501 another role began it.
create or replace function pgmb_internal.ledger_of(stream text, app text)
returns pgmb.ledger
language plpgsql
as $$
declare
  line pgmb.ledger;
begin
  insert into pgmb.ledger (app, stream, role)
  values (ledger_of.app, pgmb.stream_id(ledger_of.stream), pgmb_internal.caller())
  on conflict do nothing;
  select * into strict line from pgmb.ledger l
  where l.app = ledger_of.app and l.stream = pgmb.stream_id(ledger_of.stream) for update;
  perform pgmb_internal.assert_app(line);
  return line;
end $$;

-- Raises 42501 unless the application belongs to the caller's role. If its role was dropped, any role may take it.
create or replace function pgmb_internal.assert_app(line pgmb.ledger)
returns void
language plpgsql
as $$
begin
  if not (pgmb_internal.caller_is_owner() or pgmb_internal.caller_is('pgmb_admin') or pgmb_internal.caller_is(quote_ident((line).role))
    or to_regrole(quote_ident((line).role)) is null)
  then
    raise exception 'application % belongs to role %, not to %', quote_literal((line).app), (line).role, pgmb_internal.caller()
      using errcode = '42501', hint = 'Publish as that role or a member of it, or under another txnAppId.';
  end if;
end $$;

-- The last version that an application has published to a stream; null if it is none.
create or replace function pgmb.published_version(stream text, app text)
returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_publisher(stream);
  return (select l.version from pgmb.ledger l where l.app = published_version.app
    and l.stream = pgmb.stream_id(published_version.stream));
end $$;

-- Publishes what the tasks of a version have written, all or nothing, in the order of the arrays: a stage each, or null
-- for a task without events or one that published directly. digests: of each task's events;
-- without them a version that comes again is not compared. Returns the number of events
-- published by this call, or null if the application has published this version with the same events already. Frees these
-- stages and those that dead tasks of it left. version null: without the ledger. Lock: the application's line in it.
-- Errors: MB050 a stage lost its events, MB051 a version that was published, or a task of one, held other events, MB001, 42501,
-- MB040.
create or replace function pgmb.publish_tasks(
  stream text, app text, version bigint, tasks integer[], stages integer[], events bigint[],
  digests bigint[] default null, delayed boolean default false
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  line pgmb.ledger;
  now timestamptz := clock_timestamp();
  staged record;
  published bigint := 0;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  if version is not null then
    line := pgmb_internal.ledger_of(stream, app);
    if line.version >= version then
      perform pgmb_internal.assert_repeated(line, version, events, digests);
      perform pgmb_internal.free_stages(stream, app, line.version);
      return null;
    end if;
    perform pgmb_internal.assert_tasks(line, version, tasks, stages, events, digests);
  end if;
  for staged in
    select given.stage, given.events
    from unnest(stages, events) with ordinality given (stage, events, place)
    where given.stage is not null
    order by given.place
  loop
    perform pgmb_internal.hold_stage(stream, staged.stage, app, version);
    -- Each truncate holds locks to the end, of which a server has a few thousand: thousands of stages are left to
    -- those who claim them next.
    perform pgmb_internal.move_stage(stream, staged.stage, staged.events, delayed, now, cardinality(stages) <= 100);
    published := published + staged.events;
  end loop;
  if version is not null then
    update pgmb.ledger l
    set version = publish_tasks.version, committed_at = now, under_way = null, run = null,
      events = (select coalesce(sum(e), 0) from unnest(publish_tasks.events) e)
    where l.app = publish_tasks.app and l.stream = line.stream;
    delete from pgmb.ledger_task t where t.app = publish_tasks.app and t.stream = line.stream;
    perform pgmb_internal.note_version(line, version, events, digests);
  end if;
  perform pgmb_internal.free_stages(stream, app, version);
  return published;
end $$;

-- How many versions of an application are compared when they come again. Spark repeats the last one; a restored checkpoint may be
-- some batches older.
create or replace function pgmb_internal.versions_kept()
returns integer
language sql immutable parallel safe
as $$
  select 100
$$;

-- The digest of the events of several tasks: the sum of theirs, modulo 2^64. Null if one is not known.
create or replace function pgmb_internal.digest_of_tasks(digests bigint[])
returns bigint
language sql immutable
as $$
  select case when bool_and(d is not null) then
    (mod(mod(sum(d::numeric), 18446744073709551616) + 27670116110564327424, 18446744073709551616) - 9223372036854775808)::bigint end
  from unnest(digests) d
$$;

-- Notes what a version held, and forgets versions that are too old to come again.
create or replace function pgmb_internal.note_version(line pgmb.ledger, version bigint, events bigint[], digests bigint[])
returns void
language plpgsql
as $$
begin
  insert into pgmb.ledger_version (app, stream, version, events, digest)
  values ((line).app, (line).stream, note_version.version, (select coalesce(sum(e), 0) from unnest(note_version.events) e),
    pgmb_internal.digest_of_tasks(note_version.digests));
  delete from pgmb.ledger_version v
  where v.app = (line).app and v.stream = (line).stream and v.version <= (
    select old.version from pgmb.ledger_version old
    where old.app = (line).app and old.stream = (line).stream
    order by old.version desc offset pgmb_internal.versions_kept() limit 1);
end $$;

-- Raises MB051 unless a version that is not newer than what the application has published holds what it held when it was
-- published, as far as the digests are known. One without events may be passed over in any case.
create or replace function pgmb_internal.assert_repeated(line pgmb.ledger, version bigint, events bigint[], digests bigint[])
returns void
language plpgsql
as $$
declare
  events_now bigint := (select coalesce(sum(e), 0) from unnest(assert_repeated.events) e);
  digest_now bigint := pgmb_internal.digest_of_tasks(assert_repeated.digests);
  before pgmb.ledger_version;
begin
  select * into before from pgmb.ledger_version v
  where v.app = (line).app and v.stream = (line).stream and v.version = assert_repeated.version;
  if events_now = 0 or before.version is not null and (before.digest <> digest_now) is not true then
    return;
  end if;
  raise exception 'version % of application % cannot be published: %', version, quote_literal((line).app),
    case when before.version is null then format('version %s was published already', (line).version)
      else format('it was published already with %s', case when before.events = events_now then 'other events'
        else format('%s events, and now it holds %s', before.events, events_now) end) end
    using errcode = 'MB051', hint = 'The checkpoint is new, or older than what was published: go on from the newest one. Under another'
      ' txnAppId all versions are published again.';
end $$;

-- Gives up what the tasks of a version have written: frees their stages, except those being written. What tasks published
-- directly stays published. forget: the application ends here, and so does its line in the ledger. Returns the number of
-- stages freed.
create or replace function pgmb.abandon_tasks(stream text, app text, version bigint, forget boolean default false)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  line pgmb.ledger;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_publisher(stream);
  if forget then
    line := pgmb_internal.ledger_of(stream, app);
    delete from pgmb.ledger_task t where t.app = abandon_tasks.app and t.stream = line.stream;
    delete from pgmb.ledger_version v where v.app = abandon_tasks.app and v.stream = line.stream;
    delete from pgmb.ledger l where l.app = abandon_tasks.app and l.stream = line.stream;
  end if;
  return pgmb_internal.free_stages(stream, app, version);
end $$;
