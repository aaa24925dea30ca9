-- Roles: who may do what. Publishing is a grant on the log itself. Everything that runs with the owner's rights asks here
-- first, about the role that the session acts as, not the owner (docs/adr/0027).

-- The role that the caller acts as, inside a definer function too. Errors: MB042 in an operation that PostgreSQL
-- restricts (ANALYZE, REINDEX, REFRESH MATERIALIZED VIEW, also autovacuum's): it runs code of a table's owner in the
-- session of another role, and the session's role says nothing about the caller.
create or replace function pgmb_internal.caller()
returns name
language plpgsql volatile
as $$
begin
  -- At half the cost, where that works. The refusal is then PostgreSQL's own.
  if pg_catalog.current_setting('max_prepared_transactions') = '0' and not pg_catalog.pg_is_in_recovery() then
    return pgmb_internal.caller_at_low_cost();
  end if;
  -- There is no such cursor. But PostgreSQL refuses CLOSE in a restricted operation before it looks, and SQL has few
  -- other ways to ask that leave nothing behind.
  execute 'close "pgmb: no cursor has this name"';
  raise invalid_cursor_name;
exception
  when invalid_cursor_name then
    return coalesce(nullif(pg_catalog.current_setting('role'), 'none'), session_user);
  when insufficient_privilege then
    raise exception 'pgmb cannot tell which role calls it during ANALYZE, REINDEX, REFRESH and the like'
      using errcode = 'MB042', hint = 'Call it in a statement of its own: create table … as select …, or a plain view.';
end $$;

-- As caller(), for receive and ack, without a subtransaction, which costs the two 4 to 7 %: a restricted operation refuses
-- UNLISTEN too, and outside there is no error to catch. The refusal is then PostgreSQL's own, 42501. Not on a replica,
-- which refuses it always, nor where transactions can be prepared: a session that has ever listened no longer could.
create or replace function pgmb_internal.caller_at_low_cost()
returns name
language plpgsql volatile
as $$
begin
  if pg_catalog.current_setting('max_prepared_transactions') <> '0' or pg_catalog.pg_is_in_recovery() then
    return pgmb_internal.caller();
  end if;
  unlisten "pgmb cannot tell which role calls it in this operation";
  return coalesce(nullif(pg_catalog.current_setting('role'), 'none'), session_user);
end $$;

-- Whether a role acts for another, which may not exist.
create or replace function pgmb_internal.acts_for(caller name, role text)
returns boolean
language sql stable
as $$
  select coalesce(pg_catalog.pg_has_role(caller, pg_catalog.to_regrole(role), 'usage'), false)
$$;

-- Whether the caller acts for a role, which may not exist.
create or replace function pgmb_internal.caller_is(role text)
returns boolean
language sql volatile
as $$
  select pgmb_internal.acts_for(pgmb_internal.caller(), role)
$$;

-- Whether the caller acts for the owner. Called inside definer functions, where the owner is the current
-- user.
create or replace function pgmb_internal.caller_is_owner()
returns boolean
language sql volatile
as $$
  select pg_catalog.pg_has_role(pgmb_internal.caller(), current_user, 'usage')
$$;

-- Whether the caller is an admin. Called by functions that run as the owner.
create or replace function pgmb_internal.is_admin(caller name default pgmb_internal.caller())
returns boolean
language plpgsql stable
as $$
begin
  return pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_admin');
end $$;

create or replace function pgmb_internal.assert_admin()
returns void
language plpgsql
as $$
begin
  if not pgmb_internal.is_admin() then
    raise exception 'role % is not a pgmb admin', pgmb_internal.caller() using errcode = '42501',
      hint = 'Grant it pgmb_admin.';
  end if;
end $$;

-- Whether the caller may consume a queue.
create or replace function pgmb_internal.may_consume(queue integer, caller name default pgmb_internal.caller())
returns boolean
language plpgsql
as $$
begin
  -- Apart from the rest, which is a query: on the hot path, PL/pgSQL evaluates this as an expression.
  if pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_consumer')
    or pgmb_internal.acts_for(caller, 'pgmb_admin')
  then
    return true;
  end if;
  return exists (
    select from pgmb.queue_grant g
    -- A lane belongs to the queue that the user named.
    where g.queue in (may_consume.queue, (select q.lane_of from pgmb.queue q where q.id = may_consume.queue))
      and pg_has_role(caller, g.role_id, 'usage'));
end $$;

create or replace function pgmb_internal.assert_consumer(
  queue integer, name text, caller name default pgmb_internal.caller()
)
returns void
language plpgsql
as $$
begin
  if not pgmb_internal.may_consume(queue, caller) then
    -- The grant went with the queue.
    if name is null and not exists (select from pgmb.queue q where q.id = assert_consumer.queue) then
      perform pgmb_internal.raise_dropped();
    end if;
    raise exception 'role % may not consume queue %', caller, coalesce(name, queue::text) using errcode = '42501',
      hint = 'Grant it with pgmb.grant_consume(queue, role), or the role pgmb_consumer for all queues.';
  end if;
end $$;

-- Whether the caller may read a stream.
create or replace function pgmb_internal.may_read(stream text)
returns boolean
language plpgsql
as $$
declare
  caller name := pgmb_internal.caller();
begin
  return pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_consumer')
    or pgmb_internal.acts_for(caller, 'pgmb_admin') or has_table_privilege(caller, format('pgmb.%I', 'log_' || stream), 'select');
end $$;

create or replace function pgmb_internal.assert_reader(stream text)
returns void
language plpgsql
as $$
begin
  if not pgmb_internal.may_read(stream) then
    raise exception 'role % may not read stream %', pgmb_internal.caller(), stream using errcode = '42501',
      hint = 'Grant it with pgmb.grant_read(stream, role), or the role pgmb_consumer for all streams.';
  end if;
end $$;

-- The id of a stream that the caller may read. Errors: MB001 no such stream, 42501.
create or replace function pgmb_internal.readable_stream(name text)
returns integer
language plpgsql
as $$
declare
  found_id integer := pgmb.stream_id(name);
begin
  perform pgmb_internal.assert_reader(name);
  return found_id;
end $$;

-- Raises 42501 where another role confirmed a durable reader first: to move or forget it would have retention drop what
-- that role has not read. One whose role is gone belongs to no one.
create or replace function pgmb_internal.assert_own_reader(stream text, reader text)
returns void
language plpgsql
as $$
declare
  caller name := pgmb_internal.caller();
  holder name := (select r.role from pgmb.reader r
    where r.stream = pgmb.stream_id(assert_own_reader.stream) and r.name = assert_own_reader.reader);
begin
  if to_regrole(quote_ident(holder)) is not null and not (pg_has_role(caller, current_user, 'usage')
    or pgmb_internal.acts_for(caller, 'pgmb_admin') or pgmb_internal.acts_for(caller, quote_ident(holder)))
  then
    raise exception 'reader % of stream % belongs to role %', quote_literal(reader), stream, holder using errcode = '42501',
      hint = 'Use another name for the reader, act as that role, or ask an admin to forget it.';
  end if;
end $$;

-- Whether the caller may publish to a stream, which must exist.
create or replace function pgmb_internal.may_publish(stream text)
returns boolean
language sql volatile
as $$
  select pgmb_internal.caller_is_owner()
    or has_any_column_privilege(pgmb_internal.caller(), format('pgmb.%I', 'log_' || stream), 'insert')
$$;

-- Raises 42501 unless the caller may publish to a stream.
create or replace function pgmb_internal.assert_publisher(stream text)
returns void
language plpgsql
as $$
begin
  perform pgmb.stream_id(assert_publisher.stream);
  if not pgmb_internal.may_publish(assert_publisher.stream) then
    raise exception 'role % may not publish to stream %', pgmb_internal.caller(), assert_publisher.stream using errcode = '42501',
      hint = 'Grant it with pgmb.grant_publish(stream, role), or the role pgmb_publisher for all streams.';
  end if;
end $$;

-- The functions that each kind of role may call.
create or replace function pgmb_internal.functions_for(kind text)
returns setof regprocedure
language sql stable
as $$
  select p.oid::regprocedure
  from pg_proc p
  where p.pronamespace = 'pgmb'::regnamespace and p.proname = any (case kind
    when 'publish' then '{publish,publish_many,send,cancel,claim_key,holder_of_key,derive_id,fresh_id,stream_id,matches,compile_patterns,push_table_mutations,stop_table_mutations,table_mutations,attach_mutations,table_topic,published_version,claim_stage,publish_stage,publish_tasks,abandon_tasks,begin_tasks,claim_task,task_published,finish_task,describe_sinks}'::text[]
    when 'read' then '{position,earliest,position_at,position_of,newest_tick,ticks,between,between_filtered,assert_between,identify,newest,divide,confirm,forget,tick,stream_id,matches,compile_patterns,derive_id,stream_settings,subscribe,unsubscribe,keep_subscriptions,resume_subscriptions,between_group,describe_readers,describe_sinks,lake_segments,lake_between,seq_at,passing,passing_events,event_fate,projection_of}'
    when 'consume' then '{receive,receive_any,claim_next,claims_from,receive_group,stream_of,queue_of,ack,retry,bury,bury_unreadable,release,extend,pause,resume,redrive,dead_letters,drop_dead,pending_messages,as_jsonb,matches,compile_patterns,describe_queues,describe_streams,describe_readers,describe_sinks,describe_retention,describe_broker,lake_health,queue_depth,next_events,queue_health,queue_activity,queue_settings,event_fate,worker_heartbeat,worker_depart,describe_workers,declare_queue,queue_declarations,queue_disagreements,runs_other_code}'
    when 'admin' then array(select all_of.proname::text from pg_proc all_of where all_of.pronamespace = 'pgmb'::regnamespace)
  end)
$$;

-- Keeps other sessions from granting rights on what all roles and streams share, to the end of the transaction: PostgreSQL
-- lets one session at a time change the rights on a table. Waits for two seconds. Errors: MB004 another one does.
create or replace function pgmb_internal.lock_grants()
returns void
language plpgsql
set lock_timeout = '2s'
as $$
begin
  perform pg_advisory_xact_lock(pgmb_internal.lock_key('grants'));
exception when lock_not_available then
  raise exception 'another session creates a stream or grants rights at this moment' using errcode = 'MB004',
    hint = 'Its transaction is still open. Try again when it has ended.';
end $$;

-- Lets a role call the functions of a kind.
create or replace function pgmb_internal.grant_functions(kind text, role text)
returns void
language plpgsql
as $$
declare
  allowed regprocedure;
begin
  perform pgmb_internal.lock_grants();
  execute format('grant usage on schema pgmb to %I', role);
  execute format('grant select (version, identity) on pgmb.installation to %I', role);
  for allowed in select * from pgmb_internal.functions_for(kind) loop
    execute format('grant execute on function %s to %I', allowed, role);
  end loop;
  execute format('grant select on pgmb.sink_status to %I', role);
  if kind <> 'publish' then
    execute format('grant select on pgmb.reader_status to %I', role);
  end if;
end $$;

-- Lets roles write to and read a stream's log: the whole of what publishing and COPY need.
create or replace function pgmb_internal.grant_stream(stream text, publisher text, reader text)
returns void
language plpgsql
as $$
declare
  leaf regclass;
begin
  perform pgmb_internal.lock_grants();
  if publisher is not null then
    execute format('grant insert (id, topic, key, payload, headers), select (seq, published_at, tableoid) on pgmb.%I to %I',
      'log_' || stream, publisher);
    execute format('grant usage on sequence pgmb.%I to %I', 'seq_' || stream, publisher);
    execute format('grant select (id, name, salt) on pgmb.stream to %I', publisher);
    execute format('grant insert on pgmb.delayed to %I', publisher);
    execute format('grant insert on pgmb.dedup to %I', publisher);
  end if;
  if reader is not null then
    execute format('grant select on pgmb.%I to %I', 'log_' || stream, reader);
    execute format('grant select on pgmb.stream, pgmb.segment to %I', reader);
    for leaf in select * from pgmb_internal.segment_tables(grant_stream.stream) loop
      execute format('grant select on %s to %I', leaf, reader);
    end loop;
  end if;
end $$;

-- The tables of a stream's segments. Those to come get their rights from the log (attach_segment).
create or replace function pgmb_internal.segment_tables(stream text)
returns setof regclass
language sql stable
as $$
  select to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number))
  from pgmb.stream s join pgmb.segment g on g.stream = s.id
  where s.name = segment_tables.stream and to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number)) is not null
$$;

-- Lets a role publish to a stream, by the functions or by COPY.
create or replace function pgmb.grant_publish(stream text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(grant_publish.stream);
  perform pgmb_internal.grant_functions('publish', role);
  perform pgmb_internal.grant_stream(grant_publish.stream, role, null);
end $$;

-- Lets a role read a stream between positions.
create or replace function pgmb.grant_read(stream text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(grant_read.stream);
  perform pgmb_internal.grant_functions('read', role);
  perform pgmb_internal.grant_stream(grant_read.stream, null, role);
end $$;

-- Lets a role receive from and settle a queue.
create or replace function pgmb.grant_consume(queue text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.grant_functions('consume', role);
  execute format('grant select on pgmb.queue_status, pgmb.stream_status to %I', role);
  insert into pgmb.queue_grant as g (queue, role, role_id)
  select (pgmb_internal.queue_for_consumer(grant_consume.queue)).id, grant_consume.role, to_regrole(quote_ident(grant_consume.role))
  on conflict on constraint queue_grant_pkey do update set role_id = excluded.role_id;
  perform pgmb_internal.grant_queue_views((pgmb_internal.queue_for_consumer(grant_consume.queue)).id, role);
end $$;

-- Takes back what grant_publish and grant_read gave on a stream.
create or replace function pgmb.revoke_stream(stream text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  leaf regclass;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(revoke_stream.stream);
  execute format('revoke all on pgmb.%I from %I', 'log_' || revoke_stream.stream, role);
  for leaf in select * from pgmb_internal.segment_tables(revoke_stream.stream) loop
    execute format('revoke all on %s from %I', leaf, role);
  end loop;
  execute format('revoke all on sequence pgmb.%I from %I', 'seq_' || revoke_stream.stream, role);
end $$;

-- Takes back what grant_consume gave on a queue.
create or replace function pgmb.revoke_consume(queue text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.queue_grant g
  where g.queue = (pgmb_internal.queue_for_consumer(revoke_consume.queue)).id and g.role = revoke_consume.role;
end $$;
