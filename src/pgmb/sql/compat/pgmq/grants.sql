-- Rights: nothing for PUBLIC. Who may publish or consume may call what sends or reads; the functions ask about the
-- queue themselves. What changes queues needs pgmb_admin.

-- The functions that each kind of role may call.
create or replace function pgmq.functions_for(kind text)
returns setof regprocedure
language sql stable
as $$
  select p.oid::regprocedure
  from pg_proc p
  where p.pronamespace = 'pgmq'::regnamespace and p.proname = any (case kind
    when 'send' then '{send,send_batch,send_topic,send_batch_topic}'::text[]
    when 'read' then '{read,read_with_poll,read_by_group,read_grouped,read_grouped_with_poll,read_grouped_rr,read_grouped_rr_with_poll,
      read_grouped_head,read_grouped_head_with_poll,pop,delete,archive,set_vt,messages,metrics,metrics_all}'::text[]
    when 'look' then '{list_queues,list_topic_bindings,test_routing,list_notify_insert_throttles,validate_queue_name,
      validate_routing_key,validate_topic_pattern,format_table_name,detach_archive,convert_archive_partitioned,
      create_fifo_index,create_fifo_indexes_all}'::text[]
    when 'manage' then '{create,create_non_partitioned,create_unlogged,create_partitioned,drop_queue,purge_queue,
      bind_topic,unbind_topic,enable_notify_insert,disable_notify_insert,update_notify_insert,acquire_queue_lock,
      grant_send,grant_read}'::text[]
  end)
$$;

-- Lets a role call the functions of some kinds.
create or replace function pgmq.grant_functions(kinds text[], role text)
returns void
language plpgsql
as $$
declare
  allowed regprocedure;
begin
  execute format('grant usage on schema pgmq to %I', role);
  for allowed in select pgmq.functions_for(kind) from unnest(kinds) kind loop
    execute format('grant execute on function %s to %I', allowed, role);
  end loop;
end $$;

-- Lets a role send to a queue. Needs the rights of pgmb_admin. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.grant_send(queue_name text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  insert into pgmq.sender (queue, role, role_id)
  values ((pgmq.queue_named(queue_name)).id, grant_send.role, to_regrole(quote_ident(grant_send.role)))
  on conflict on constraint sender_pkey do update set role_id = excluded.role_id;
  perform pgmq.grant_functions('{send,look}', role);
end $$;

-- Lets a role read a queue, and remove from it what it reads. Needs the rights of pgmb_admin. Errors: 42P01 no such
-- queue, 42501.
create or replace function pgmq.grant_read(queue_name text, role text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.grant_consume((pgmq.queue_named(queue_name)).stream, role);
  execute format('grant select on pgmq.%I, pgmq.%I to %I', pgmq.format_table_name(queue_name, 'q'),
    pgmq.format_table_name(queue_name, 'a'), role);
  perform pgmq.grant_functions('{read,look}', role);
end $$;

revoke all on all functions in schema pgmq from public;
revoke all on all tables in schema pgmq from public;
revoke all on schema pgmq from public;

do $$
begin
  perform pgmq.grant_functions(kinds, role)
  from (values ('{send,look}'::text[], 'pgmb_publisher'), ('{read,look}', 'pgmb_consumer'), ('{send,read,look,manage}', 'pgmb_admin'))
    rights (kinds, role)
  where to_regrole(role) is not null;
  perform pgmq.grant_relation(relation)
  from (values ('meta'), ('topic_bindings'), ('notify_insert_throttle')) looked_at (relation);
  perform pgmq.grant_relation(pgmq.format_table_name(q.queue_name, prefix))
  from pgmq.queue q, (values ('q'), ('a')) own (prefix)
  where to_regclass(format('pgmq.%I', pgmq.format_table_name(q.queue_name, prefix))) is not null;
  -- After an upgrade, only the owner may call recreated functions.
  perform pgmq.keep_to_itself(q.stream) from pgmq.queue q;
  perform pgmq.grant_functions('{send,look}', held.role)
  from (select distinct r.rolname::text role from pgmq.sender s join pg_roles r on r.oid = s.role_id) held;
  perform pgmq.grant_functions('{read,look}', held.role)
  from (
    select distinct r.rolname::text role
    from pgmq.queue q join pgmb.queue_grant g on g.queue = q.id join pg_roles r on r.oid = g.role_id) held;
end $$;
