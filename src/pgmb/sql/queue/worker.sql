-- Workers: processes that run handlers say that they live. Consumers that only call receive need not.

-- Says that a worker lives, which queues it receives from, and which server processes (backends) are its connections, by which
-- the leases that it holds are known. app: the name of its app; shared: whether the app shares its queues with apps of other
-- names (declare_queue); handled: all queues that its code has handlers of, by default `queues`. Returns true. Forgets workers of
-- the caller's role that were not heard of for an hour, and those of all roles where the caller is an admin: a role that is none
-- locks no row that another role waits for. Forgets none where the clock may have jumped (pgmb_internal.clock_stands). Errors:
-- 42501 another role's worker, MB005 and 23514 more than is accepted.
create or replace function pgmb.worker_heartbeat(
  worker uuid, host text, pid integer, queues text[], backends integer[] default '{}',
  app text default null, shared boolean default false, handled text[] default null
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  caller name := pgmb_internal.caller();
  now timestamptz := clock_timestamp();
  before timestamptz := clock_timestamp() - interval '1 hour';
  admin boolean := pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_admin');
begin
  -- Asked before the row is written: ON CONFLICT locks a row that its WHERE refuses.
  if exists (select from pgmb.worker w where w.id = worker_heartbeat.worker and w.role <> caller) then
    raise exception 'worker % belongs to another role', worker_heartbeat.worker using errcode = '42501';
  end if;
  if not exists (select from pgmb.worker w where w.id = worker_heartbeat.worker)
    and (select count(*) >= 10000 from pgmb.worker w where w.role = caller)
  then
    raise exception 'role % has 10,000 workers', caller using errcode = 'MB005';
  end if;
  insert into pgmb.worker as w (id, role, host, pid, application, app, shared, queues, handled, backends)
  values (worker_heartbeat.worker, caller, worker_heartbeat.host, worker_heartbeat.pid,
    left(nullif(current_setting('application_name'), ''), 255), worker_heartbeat.app, worker_heartbeat.shared,
    worker_heartbeat.queues, coalesce(worker_heartbeat.handled, worker_heartbeat.queues), worker_heartbeat.backends)
  on conflict (id) do update
  set heartbeat_at = now, application = excluded.application, app = excluded.app, shared = excluded.shared,
    queues = excluded.queues, handled = excluded.handled, backends = excluded.backends
  where w.role = excluded.role;
  if not found then
    raise exception 'worker % belongs to another role', worker_heartbeat.worker using errcode = '42501';
  end if;
  -- One that said so while the clock was ahead may be gone.
  update pgmb.worker w set heartbeat_at = now where w.id = any (array(
    select early.id from pgmb.worker early where early.heartbeat_at > now and (admin or early.role = caller) for update skip locked));
  delete from pgmb.worker w where pgmb_internal.clock_stands() and w.id = any (array(
    select gone.id from pgmb.worker gone where gone.heartbeat_at < before and (admin or gone.role = caller) for update skip locked));
  return true;
end $$;

-- Since when a worker must have been heard of to count as alive.
create or replace function pgmb_internal.alive_since()
returns timestamptz
language sql volatile
as $$
  select clock_timestamp() - interval '30 seconds'
$$;

-- Says that a worker stops. Changes nothing if it is another role's.
create or replace function pgmb.worker_depart(worker uuid)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  caller name := pgmb_internal.caller();
begin
  delete from pgmb.worker w where w.id = worker_depart.worker and w.role = caller;
end $$;

-- The workers that were heard of within the last hour and did not say that they stop, the newest first: alive if their last
-- heartbeat is at most `alive_for` old. Admins see all of them, other roles their own.
create or replace function pgmb.describe_workers(alive_for interval default '30 seconds')
returns table (worker uuid, host text, pid integer, application text, app text, role name, queues text[], backends integer[],
  started_at timestamptz, heartbeat_at timestamptz, alive boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  caller name := pgmb_internal.caller();
  admin boolean := pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_admin');
  since timestamptz := clock_timestamp() - describe_workers.alive_for;
begin
  return query
  select w.id, w.host, w.pid, w.application, w.app, w.role, w.queues, w.backends, w.started_at, w.heartbeat_at, w.heartbeat_at > since
  from pgmb.worker w
  where admin or pgmb_internal.acts_for(caller, quote_ident(w.role))
  order by w.started_at desc, w.id;
end $$;
