-- Applied after every install and upgrade: the roles, if this user may create roles, and their rights.

do $$
declare
  wanted text;
begin
  foreach wanted in array '{pgmb_publisher,pgmb_consumer,pgmb_admin,pgmb_conditions,pgmb_matcher,pgmb_parser}'::text[] loop
    begin
      if to_regrole(wanted) is null then
        execute format('create role %I nologin', wanted);
      end if;
    exception
      -- Another database's install was first, or this user may not create roles: grants can then be
      -- given role by role, and `pgmb doctor` names what is missing.
      when duplicate_object or unique_violation or insufficient_privilege then null;
    end;
  end loop;
end $$;

do $$
begin
  if not exists (select from pgmb.lineage) then
    perform pgmb_internal.write_lineage();
  end if;
end $$;

-- Only where they are missing: each needs a lock that waits for every open transaction of a consumer or publisher, and
-- that all others wait behind. A version that changes one drops it in its migration.
do $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = 'pgmb.claim'::regclass and t.tgname = 'refuse_void') then
    create constraint trigger refuse_void after update of xid on pgmb.claim
      deferrable initially deferred
      for each row execute function pgmb_internal.refuse_void();
  end if;
  if not exists (select from pg_trigger t where t.tgrelid = 'pgmb.delayed'::regclass and t.tgname = 'refuse_large') then
    create trigger refuse_large before insert on pgmb.delayed
      for each row execute function pgmb_internal.refuse_large();
  end if;
  if not exists (select from pg_policy p where p.polrelid = 'pgmb.delayed'::regclass and p.polname = 'publish') then
    create policy publish on pgmb.delayed for insert
      with check (has_any_column_privilege(current_user, format('pgmb.%I', 'log_' || stream), 'insert'));
  end if;
  if not exists (select from pg_policy p where p.polrelid = 'pgmb.dedup'::regclass and p.polname = 'publish') then
    create policy publish on pgmb.dedup for insert
      with check (has_any_column_privilege(current_user, format('pgmb.%I', 'log_' || stream), 'insert')
        and expires_at <= clock_timestamp() + interval '366 days');
  end if;
end $$;

revoke all on all functions in schema pgmb, pgmb_internal from public;
revoke all on all tables in schema pgmb from public;
revoke all on schema pgmb, pgmb_internal from public;

do $$
declare
  role text;
begin
  foreach role in array '{pgmb_consumer,pgmb_admin}'::text[] loop
    if to_regrole(role) is not null then
      execute format('grant select on pgmb.queue_status, pgmb.stream_status, pgmb.xmin_holders to %I', role);
      perform pgmb_internal.grant_queue_views(q.id, role) from pgmb.queue q;
    end if;
  end loop;
  if to_regrole('pgmb_admin') is not null then
    grant select on pgmb.workers, pgmb.queues, pgmb.subscriptions, pgmb.endpoints, pgmb.attempt, pgmb.dispatcher, pgmb.api_keys,
      pgmb.audit to pgmb_admin;
  end if;
end $$;

do $$
begin
  perform pgmb_internal.grant_functions(kind, role)
  from (values ('publish', 'pgmb_publisher'), ('consume', 'pgmb_consumer'), ('read', 'pgmb_consumer'),
    ('admin', 'pgmb_admin')) rights (kind, role)
  where to_regrole(role) is not null;
  perform pgmb.create_stream('main');
  perform pgmb_internal.create_messages_view() where to_regclass('pgmb.messages') is null;
  perform pgmb_internal.grant_stream(s.name, to_regrole('pgmb_publisher')::text, to_regrole('pgmb_consumer')::text)
  from pgmb.stream s;
end $$;

-- After an upgrade, only the owner may call recreated or new functions: grant them again to the roles that were granted
-- a stream or a queue.
do $$
begin
  perform pgmb_internal.grant_functions('publish', held.role), pgmb_internal.grant_stream(held.stream, held.role, null)
  from (
    select distinct s.name stream, r.rolname::text role
    from pgmb.stream s
    join pg_attribute c on c.attrelid = format('pgmb.%I', 'log_' || s.name)::regclass
    cross join aclexplode(c.attacl) a
    join pg_roles r on r.oid = a.grantee
    where a.privilege_type = 'INSERT'
  ) held;
  perform pgmb_internal.grant_functions('read', held.role)
  from (
    select distinct r.rolname::text role
    from pgmb.stream s
    join pg_class c on c.oid = format('pgmb.%I', 'log_' || s.name)::regclass
    cross join aclexplode(c.relacl) a
    join pg_roles r on r.oid = a.grantee
    where a.privilege_type = 'SELECT' and a.grantee <> c.relowner
  ) held;
  perform pgmb_internal.grant_functions('consume', held.role)
  from (select distinct r.rolname::text role from pgmb.queue_grant g join pg_roles r on r.oid = g.role_id) held;
end $$;
