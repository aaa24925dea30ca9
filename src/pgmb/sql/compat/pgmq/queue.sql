-- Queues: create, drop, purge, list.

-- The name under which a queue's own relations go: q_ what is in it, a_ its archive. Errors: 22023 not a name.
create or replace function pgmq.format_table_name(queue_name text, prefix text)
returns text
language plpgsql immutable
as $$
begin
  if queue_name is null or queue_name = '' or queue_name ~ '\$|;|--|''' then
    raise exception 'queue name contains invalid characters: $, ;, --, or \''' using errcode = '22023',
      hint = 'It must not be empty either.';
  end if;
  return pg_catalog.lower(prefix || '_' || queue_name);
end $$;

-- Raises when a queue's name is too long. Errors: 22023.
create or replace function pgmq.validate_queue_name(queue_name text)
returns void
language plpgsql immutable
as $$
begin
  if pg_catalog.length(queue_name) > 47 then
    raise exception 'queue name is too long, maximum length is 47 characters' using errcode = '22023';
  end if;
  -- PostgreSQL cuts names at 63 bytes: two queues would share one archive.
  if pg_catalog.octet_length(pg_catalog.lower(queue_name)) > 61 then
    raise exception 'queue name is too long, maximum length is 61 bytes' using errcode = '22023';
  end if;
end $$;

-- Waits until no other transaction creates or drops a queue of that name.
create or replace function pgmq.acquire_queue_lock(queue_name text)
returns void
language sql security definer
set search_path = pg_catalog, pg_temp
as $$
  select pg_advisory_xact_lock(pgmb_internal.lock_key('pgmq queue ' || lower(queue_name)))
$$;

-- The stream of a queue: its name where that is a stream's name, else as much of it as there is room for beside a
-- hash.
create or replace function pgmq.stream_name(queue_name text)
returns text
language sql immutable
as $$
  select case
    when lower(queue_name) ~ '^[a-z0-9_-]{1,35}$' then 'pgmq.' || lower(queue_name)
    else 'pgmq.' || left(regexp_replace(lower(queue_name), '[^a-z0-9_-]', '_', 'g'), 18) || '.'
      || lpad(to_hex(hashtextextended(lower(queue_name), 0)), 16, '0')
  end
$$;

-- The queue of that name. Errors: 42P01 there is none.
create or replace function pgmq.queue_named(queue_name text)
returns pgmq.queue
language plpgsql stable
as $$
declare
  named pgmq.queue;
begin
  select * into named from pgmq.queue q where lower(q.queue_name) = lower(queue_named.queue_name);
  if named.id is null then
    perform pgmq.format_table_name(queue_named.queue_name, 'q');
    raise exception 'queue "%" does not exist', queue_named.queue_name using errcode = '42P01',
      hint = 'Create it with pgmq.create(queue_name).';
  end if;
  return named;
end $$;

-- The queue of that name, if the caller may read it. Errors: 42P01, 42501.
create or replace function pgmq.queue_for_reader(queue_name text)
returns pgmq.queue
language plpgsql
as $$
declare
  caller name := pgmb_internal.caller_at_low_cost();
  named pgmq.queue;
begin
  -- As pgmq.queue_named, without the call.
  select * into named from pgmq.queue q where lower(q.queue_name) = lower(queue_for_reader.queue_name);
  if named.id is null then
    return pgmq.queue_named(queue_name);
  end if;
  if not pg_has_role(caller, current_user, 'usage') then
    perform pgmb_internal.assert_consumer(named.id, named.stream, caller);
  end if;
  return named;
end $$;

-- Makes a queue: a stream, a queue of pgmb that reads it from its beginning, the archive pgmq.a_<name>, and the view
-- pgmq.q_<name> of what is in it. Does nothing where there is one of that name.
create or replace function pgmq.make_queue(
  queue_name text, partitioned boolean, unlogged boolean, rotate_every interval, rotate_events bigint
)
returns void
language plpgsql
as $$
declare
  contents text := pgmq.format_table_name(make_queue.queue_name, 'q');
  archive text := pgmq.format_table_name(make_queue.queue_name, 'a');
  made text := pgmq.stream_name(make_queue.queue_name);
begin
  perform pgmb_internal.assert_admin();
  perform pgmq.validate_queue_name(make_queue.queue_name);
  perform pgmq.acquire_queue_lock(make_queue.queue_name);
  if exists (select from pgmq.queue q where lower(q.queue_name) = lower(make_queue.queue_name)) then
    return;
  end if;
  -- What everybody has read needs not be kept.
  perform pgmb.create_stream(made, make_queue.rotate_every, make_queue.rotate_events, keep_for => '0 s');
  perform pgmq.keep_to_itself(made);
  perform pgmb.create_queue(made, stream => made, starting => pgmb.earliest(made), max_attempts => 2147483647);
  insert into pgmq.queue (id, queue_name, stream, log, archive, is_partitioned, is_unlogged)
  select q.id, make_queue.queue_name, q.stream_name, format('pgmb.%I', 'log_' || q.stream_name),
    format('pgmq.%I', archive), make_queue.partitioned, make_queue.unlogged
  from pgmb.queue q where q.name = made;
  execute format('create table if not exists pgmq.%I (
      msg_id bigint primary key,
      read_ct integer not null default 0,
      enqueued_at timestamptz not null default now(),
      last_read_at timestamptz,
      archived_at timestamptz not null default now(),
      vt timestamptz not null,
      message jsonb,
      headers jsonb
    )', archive);
  -- Not sampled: pg_statistic would keep what was erased.
  execute format('alter table pgmq.%I alter column message set statistics 0, alter column headers set statistics 0', archive);
  execute format('create index if not exists %I on pgmq.%I (archived_at)', left('archived_at_idx_' || lower(make_queue.queue_name), 63), archive);
  execute format('create or replace view pgmq.%I as select * from pgmq.messages(%L)', contents, make_queue.queue_name);
  perform pgmq.grant_relation(contents);
  perform pgmq.grant_relation(archive);
end $$;

-- Takes from those who may publish to every stream the right to write to this one by themselves.
create or replace function pgmq.keep_to_itself(stream text)
returns void
language sql
as $$
  select pgmb.revoke_stream(stream, 'pgmb_publisher') where to_regrole('pgmb_publisher') is not null
$$;

-- Lets those who may read every queue look at one of a queue's own relations.
create or replace function pgmq.grant_relation(relation text)
returns void
language plpgsql
as $$
declare
  role text;
begin
  execute format('revoke all on pgmq.%I from public', relation);
  foreach role in array '{pgmb_consumer,pgmb_admin}'::text[] loop
    if to_regrole(role) is not null then
      execute format('grant select on pgmq.%I to %I', relation, role);
    end if;
  end loop;
end $$;

-- Creates a queue; does nothing where there is one of that name. Needs the rights of pgmb_admin. Errors: 22023 not a
-- name, 42501.
create or replace function pgmq.create(queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
begin
  perform pgmq.make_queue(queue_name, false, false, '1 day', 5000000);
end $$;

-- As create.
create or replace function pgmq.create_non_partitioned(queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
begin
  perform pgmq.make_queue(queue_name, false, false, '1 day', 5000000);
end $$;

-- As create: messages of this one are no less durable, only the list of queues tells it apart.
create or replace function pgmq.create_unlogged(queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
begin
  perform pgmq.make_queue(queue_name, false, true, '1 day', 5000000);
end $$;

-- As create, but a new segment of the log begins after partition_interval, a number of messages or a duration. Every
-- log is in segments, without an extension. retention_interval and premake change nothing: no message that is in the
-- queue is ever dropped, and the archive is kept.
create or replace function pgmq.create_partitioned(
  queue_name text, partition_interval text default '10000', retention_interval text default '100000',
  premake integer default 4
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
as $$
begin
  if premake < 1 then
    raise exception 'premake must be at least 1, got %', premake using errcode = '22023';
  end if;
  if partition_interval ~ '^\d+$' then
    perform pgmq.make_queue(queue_name, true, false, null, greatest(partition_interval::bigint, 1));
  else
    perform pgmq.make_queue(queue_name, true, false, partition_interval::interval, null);
  end if;
end $$;

-- Drops a queue with its messages and its archive. False, with a notice, if there is none. Needs the rights of
-- pgmb_admin.
create or replace function pgmq.drop_queue(queue_name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  gone pgmq.queue;
begin
  perform pgmb_internal.assert_admin();
  perform pgmq.format_table_name(drop_queue.queue_name, 'q');
  perform pgmq.acquire_queue_lock(drop_queue.queue_name);
  select * into gone from pgmq.queue q where lower(q.queue_name) = lower(drop_queue.queue_name);
  if gone.id is null then
    raise notice 'pgmq queue `%` does not exist', drop_queue.queue_name;
    return false;
  end if;
  execute format('drop view if exists pgmq.%I', pgmq.format_table_name(gone.queue_name, 'q'));
  execute format('drop table if exists pgmq.%I', pgmq.format_table_name(gone.queue_name, 'a'));
  delete from pgmq.reading r where r.queue = gone.id;
  delete from pgmq.parked p where p.queue = gone.id;
  delete from pgmq.passed_over o where o.queue = gone.id;
  delete from pgmq.queue q where q.id = gone.id;
  perform pgmb.drop_queue(gone.stream);
  perform pgmb.drop_stream(gone.stream);
  return true;
end $$;

-- As drop_queue(queue_name), in an older form.
create or replace function pgmq.drop_queue(queue_name text, partitioned boolean)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  raise warning 'drop_queue(queue_name, partitioned) is deprecated: use drop_queue(queue_name)';
  perform pgmq.drop_queue(queue_name);
  return true;
end $$;

-- Removes every message from a queue and returns how many. The archive stays. Needs the rights of pgmb_admin.
create or replace function pgmq.purge_queue(queue_name text)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  purged pgmq.queue := pgmq.queue_named(purge_queue.queue_name);
  messages bigint;
begin
  perform pgmb_internal.assert_admin();
  messages := (select count(*) from pgmq.touched(purged, false)) + (select u.messages from pgmq.count_unread(purged) u);
  perform pgmb.purge(purged.stream);
  delete from pgmq.reading r where r.queue = purged.id;
  delete from pgmq.parked p where p.queue = purged.id;
  delete from pgmq.passed_over o where o.queue = purged.id;
  -- What this transaction sent itself.
  insert into pgmq.passed_over (queue, msg_id) select purged.id, u.seq from pgmq.unread(purged) u;
  return messages;
end $$;

-- Every queue.
create or replace function pgmq.list_queues()
returns setof pgmq.queue_record
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, q.is_partitioned, q.is_unlogged, q.created_at from pgmq.queue q order by q.created_at, q.queue_name
$$;

-- Does nothing: an archive is a table like any other.
create or replace function pgmq.detach_archive(queue_name text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  raise warning 'detach_archive(queue_name) is deprecated and does nothing';
end $$;

-- Does nothing: an archive stays one table.
create or replace function pgmq.convert_archive_partitioned(
  table_name text, partition_interval text default '10000', retention_interval text default '100000',
  leading_partition integer default 10
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  raise notice 'pgmq.% stays one table: pgmb partitions logs, not archives', pgmq.format_table_name(table_name, 'a');
end $$;

-- Does nothing: groups have their index from the beginning.
create or replace function pgmq.create_fifo_index(queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmq.queue_named(queue_name);
end $$;

-- Does nothing, for every queue.
create or replace function pgmq.create_fifo_indexes_all()
returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  select null::void
$$;
