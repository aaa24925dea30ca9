-- Workers declare what their code expects of a queue. A process that starts adds patterns and takes none away, and it changes
-- a setting only when no other live worker declares it otherwise: old and new code run side by side during a deployment.

-- The settings that code may declare and a running queue can change, of a queue's row or of a declaration with the same keys.
-- Intervals are seconds and a missing limit is null, so that equal settings are equal values. filter has the keys of
-- `filtered` that are not null.
create or replace function pgmb_internal.settings_of(given jsonb, filtered jsonb)
returns jsonb
language sql stable
as $$
  select coalesce(jsonb_object_agg(s.key, case
    when s.key = any ('{max_in_flight,rps,ttl,max_length}') and s.value in ('0', 'null', '"PT0S"') then 'null'
    when s.key = any ('{lease_for,backoff_base,backoff_max,ttl}')
      then to_jsonb(trim_scale(extract(epoch from (s.value #>> '{}')::interval)))
    else s.value end), '{}')
    || case when filtered is null then '{}' else jsonb_build_object('filter', (
      select coalesce(jsonb_object_agg(f.key, f.value) filter (where f.value <> 'null'), '{}')
      from jsonb_each(filtered) f where f.key = any ('{equals,filter,condition,params}'))) end
  from jsonb_each(given) s
  where s.key = any ('{lease_for,max_attempts,backoff_base,backoff_factor,backoff_max,backoff_jitter,max_in_flight,rps,ttl,max_length,when_full}')
$$;

-- What live workers declare of a queue. A worker is alive if its last heartbeat is at most `alive_for` old. It counts only
-- while its role may consume the queue: others could stop workers from starting.
create or replace function pgmb_internal.declarations(queue integer, alive_for interval default '30 seconds')
returns table (worker uuid, app text, shared boolean, host text, pid integer, role name, patterns text[], settings jsonb,
  handlers text[], started_at timestamptz, heartbeat_at timestamptz)
language plpgsql stable
as $$
declare
  since timestamptz := clock_timestamp() - declarations.alive_for;
begin
  return query
  select w.id, w.app, w.shared, w.host, w.pid, w.role, d.patterns, d.settings, d.handlers, w.started_at, w.heartbeat_at
  from pgmb.declaration d join pgmb.worker w on w.id = d.worker
  where d.queue = declarations.queue and w.heartbeat_at > since
    and case when to_regrole(quote_ident(w.role)) is not null then pgmb_internal.may_consume(d.queue, w.role) end
  order by w.started_at, w.id;
end $$;

-- What live workers declare of a queue: their apps, topic patterns, settings (intervals in seconds) and handlers, the worker
-- that started first at the top. Errors: MB002 no such queue, 42501.
create or replace function pgmb.queue_declarations(queue text, alive_for interval default '30 seconds')
returns table (worker uuid, app text, shared boolean, host text, pid integer, role name, patterns text[], settings jsonb,
  handlers text[], started_at timestamptz, heartbeat_at timestamptz)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select d.* from pgmb_internal.declarations((pgmb_internal.queue_for_consumer(queue_declarations.queue)).id, alive_for) d
$$;

-- Whether workers declared other code for a queue lately: other handlers, patterns or payloads. What this worker cannot handle,
-- those may. They count until workers of the queue were heard for ten minutes without them, longer than a restart of all workers
-- of a deploy takes. Errors: MB002 no such queue, 42501. Support.
create or replace function pgmb.runs_other_code(queue text, code text)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  head integer := (pgmb_internal.queue_for_consumer(runs_other_code.queue)).id;
  since timestamptz := (select least(max(c.declared_at), clock_timestamp()) from pgmb.recent_code c where c.queue = head)
    - interval '10 minutes';
begin
  return exists (
    select from pgmb.recent_code c
    where c.queue = head and c.code <> runs_other_code.code and c.declared_at > since);
end $$;

-- Remembers the code that a worker declares. Workers declare theirs again every five minutes. The rows are a role's own, as are
-- a worker's declarations: no other role waits for them.
create or replace function pgmb_internal.remember_code(queue integer, role name, code text)
returns void
language plpgsql
as $$
declare
  now timestamptz := clock_timestamp();
  silent interval := now - interval '5 minutes'
    - (select max(c.declared_at) from pgmb.recent_code c where c.queue = remember_code.queue);
  most_codes integer := 20;
begin
  if code is null then
    return;
  end if;
  -- An outage, or a step of the clock: code does not age while no worker can declare it.
  update pgmb.recent_code c set declared_at = c.declared_at + silent
  where c.queue = remember_code.queue and c.role = remember_code.role and silent > interval '0';
  insert into pgmb.recent_code as c (queue, role, code, declared_at)
  values (remember_code.queue, remember_code.role, remember_code.code, now)
  on conflict on constraint recent_code_pkey do update set declared_at = excluded.declared_at;
  delete from pgmb.recent_code c
  where c.queue = remember_code.queue and c.role = remember_code.role and c.code = any (array(
    select o.code from pgmb.recent_code o where o.queue = remember_code.queue and o.role = remember_code.role
    order by o.declared_at > now, o.declared_at desc offset most_codes));
exception when lock_not_available or deadlock_detected then
  -- Another session of the role is at it. The next declaration remembers the code.
  null;
end $$;

-- Makes settings the operator's: they stay when no worker declares them.
create or replace function pgmb_internal.disown(queue integer, settings text[])
returns void
language sql
as $$
  update pgmb.owner o
  set settings = array(select kept.name from unnest(o.settings) kept (name) where not kept.name = any (disown.settings))
  where o.queue = disown.queue and o.settings && disown.settings
$$;

-- Errors: MB005 a setting that no queue has.
create or replace function pgmb_internal.assert_known_settings(settings jsonb)
returns void
language plpgsql
as $$
declare
  unknown text := (select k.key from jsonb_object_keys(assert_known_settings.settings) k (key)
    where k.key not in ('stream', 'ordered', 'lanes', 'shards', 'fair_by')
      and pgmb_internal.settings_of(jsonb_build_object(k.key, null), null) = '{}'
    limit 1);
begin
  if unknown is not null then
    raise exception 'unknown setting %', quote_literal(unknown) using errcode = 'MB005',
      hint = 'Settings have the names of create_queue''s parameters.';
  end if;
end $$;

-- Refuses what was decided when the queue was created and is declared otherwise. Errors: MB006.
create or replace function pgmb_internal.assert_same_kind(present pgmb.queue, given jsonb)
returns void
language plpgsql
as $$
declare
  kept jsonb := jsonb_build_object('stream', present.stream_name, 'ordered', present.ordered, 'lanes', present.lanes,
    'shards', present.shards, 'fair_by', present.fair_by);
  differs text := (select s.key from jsonb_each(given) s
    where kept ? s.key and s.value is distinct from kept -> s.key order by s.key limit 1);
begin
  if differs is not null then
    raise exception 'queue % exists with % = %, the code declares %', quote_literal(present.name), differs,
      kept -> differs, given -> differs
      using errcode = 'MB006', hint = case when differs = 'stream' then 'Take another name for the queue.'
        else 'Change the queue with pgmb queues convert, or take another name for it.' end;
  end if;
end $$;

-- Refuses a queue that belongs to another app or that a live worker of another app consumes, unless both apps share their
-- queues. A deploy may stop all workers of the owner: the queue stays the owner's until it is handed over. A worker that
-- declared the queue before a hand-over goes on until it stops. Errors: MB006.
create or replace function pgmb_internal.assert_one_app(present pgmb.queue, worker uuid)
returns void
language plpgsql
as $$
declare
  mine record;
  other record;
  owner text;
  advice text;
begin
  select w.app, w.shared into mine from pgmb.worker w where w.id = assert_one_app.worker;
  advice := format('Give the handler here another queue (queue=...), say shared=True in both apps, or stop the other app and hand the '
    'queue over: pgmb queues hand-over %s %s', present.name, mine.app);
  for other in
    select d.app, d.host, d.pid, clock_timestamp() - d.heartbeat_at silent
    from pgmb_internal.declarations(present.id) d
    where d.app <> mine.app and not (d.shared and mine.shared) limit 1
  loop
    raise exception 'queue % belongs to app %: its worker %:% was heard of % s ago, and this is app %',
      quote_literal(present.name), quote_literal(other.app), other.host, other.pid,
      trunc(extract(epoch from other.silent)), quote_literal(mine.app)
      using errcode = 'MB006', hint = advice;
  end loop;
  owner := (select o.app from pgmb.owner o
    where o.queue = present.id and o.app <> mine.app and not (o.shared and mine.shared)
      and not exists (select from pgmb.declaration d where d.queue = present.id and d.worker = assert_one_app.worker));
  if owner is not null then
    raise exception 'queue % belongs to app %, and this is app %', quote_literal(present.name), quote_literal(owner),
      quote_literal(mine.app) using errcode = 'MB006', hint = advice;
  end if;
end $$;

-- Hands a queue over to the app of this name. Apps of other names are refused it when they start, unless both share. Null: the
-- queue belongs to the next named app that declares it. Waits for a lock for a second at most. Errors: MB002 no such queue,
-- 23514 a name that is too long, 42501, 55P03.
create or replace function pgmb.hand_over(queue text, app text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
set lock_timeout = '1s'
as $$
declare
  head integer;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  head := (pgmb_internal.queue_for_consumer(hand_over.queue)).id;
  -- A worker that starts declares it under the same lock, before or after.
  perform from pgmb.queue q where q.id = head for no key update;
  insert into pgmb.owner as o (queue, app, handlers) values (head, hand_over.app, '{}')
  on conflict on constraint owner_pkey do update set app = excluded.app, shared = false, handlers = '{}';
end $$;

-- Changes the settings of a queue that all live workers declare alike, and takes back those from earlier declarations that
-- none of them declares. Returns what was changed, and the settings about which they differ. Only those of `names`, if given.
create or replace function pgmb_internal.agree(
  head integer, worker uuid, given jsonb, names text[], out applied jsonb, out reset text[], out pending text[]
)
language plpgsql
as $$
declare
  present pgmb.queue := (select q from pgmb.queue q where q.id = head);
  kept jsonb := pgmb_internal.settings_of(to_jsonb(present), to_jsonb(present));
  owned text[] := coalesce((select o.settings from pgmb.owner o where o.queue = head), '{}');
  others jsonb[] := array(select d.settings from pgmb_internal.declarations(head) d where d.worker is distinct from agree.worker);
  setting text;
  ours text[] := owned;
begin
  applied := '{}';
  reset := '{}';
  pending := '{}';
  for setting in
    select wanted.name from (select jsonb_object_keys(given) union select unnest(owned)) wanted (name)
    where agree.names is null or wanted.name = any (agree.names) order by wanted.name
  loop
    if given ? setting and given -> setting = kept -> setting then
      ours := array_append(array_remove(ours, setting), setting);
    elsif exists (select from unnest(others) o (settings) where o.settings -> setting is distinct from given -> setting) then
      pending := array_append(pending, setting);
    elsif given ? setting then
      applied := applied || jsonb_build_object(setting, given -> setting);
      ours := array_append(array_remove(ours, setting), setting);
    elsif agree.worker is not null then
      -- A process that handles a few events and ends takes nothing back: workers that declare it may start again.
      reset := array_append(reset, setting);
      ours := array_remove(ours, setting);
    end if;
  end loop;
  if applied ? 'filter' or 'filter' = any (reset) then
    perform pgmb_internal.write_binding(head, (select b.patterns from pgmb.binding b where b.queue = head and b.version = present.bindings),
      applied #> '{filter,equals}', applied #>> '{filter,filter}', applied #>> '{filter,condition}', applied #> '{filter,params}');
  end if;
  if applied - 'filter' <> '{}' then
    perform pgmb.alter_queue(present.name,
      lease_for => make_interval(secs => (applied ->> 'lease_for')::double precision),
      max_attempts => (applied ->> 'max_attempts')::integer,
      backoff_base => make_interval(secs => (applied ->> 'backoff_base')::double precision),
      backoff_factor => (applied ->> 'backoff_factor')::double precision,
      backoff_max => make_interval(secs => (applied ->> 'backoff_max')::double precision),
      backoff_jitter => (applied ->> 'backoff_jitter')::double precision,
      max_in_flight => case when applied ? 'max_in_flight' then coalesce((applied ->> 'max_in_flight')::integer, 0) end,
      rps => case when applied ? 'rps' then coalesce((applied ->> 'rps')::double precision, 0) end,
      ttl => case when applied ? 'ttl' then make_interval(secs => coalesce((applied ->> 'ttl')::double precision, 0)) end,
      max_length => case when applied ? 'max_length' then coalesce((applied ->> 'max_length')::bigint, 0) end,
      when_full => applied ->> 'when_full');
  end if;
  for setting in select s.name from unnest(reset) s (name) where s.name <> 'filter' loop
    execute format('update pgmb.queue q set %I = default where q.id = $1 or q.lane_of = $1', setting) using head;
  end loop;
  if reset && '{max_length,when_full}' then
    perform pgmb_internal.guard_stream(present.stream_name);
  end if;
  if ours <> owned then
    insert into pgmb.owner as o (queue, handlers, settings) values (head, '{}', ours)
    on conflict on constraint owner_pkey do update set settings = excluded.settings;
  end if;
end $$;

-- Records what a worker's code declares of a queue, and brings the queue to it as far as other live workers allow: adds
-- patterns, removes none, and changes a setting when all live workers declare it alike, or takes it back when none of them
-- declares it any more and it came from a declaration. Where the caller is no admin it changes nothing and locks nothing that
-- others wait for. An admin waits for a lock for a second at most; the declaration is recorded without it.
--   worker     as in worker_heartbeat, which comes first. Null: the declaration is not recorded
--   settings   those of create_queue that the code names, by their names
--   filter     an object with the keys equals, filter, condition and params, {} for none; null: the code says nothing
--   handlers   the functions, as module.function
--   names      the settings to look at, and patterns for the patterns; by default all of these
--   code       a digest of what the handlers take (runs_other_code)
-- Returns the queue's settings (queue_settings), and what happened: added (patterns), applied, reset, pending (settings that
-- wait for workers that declare them otherwise), denied (whether something was left to an admin), busy (whether a lock was not
-- free and nothing was changed: declare again later). Errors: MB002 no such queue, MB006 another app consumes it, or it is of
-- another kind, MB005 and 23514 more than is accepted, 42501.
create or replace function pgmb.declare_queue(
  worker uuid, queue text, patterns text[], settings jsonb default '{}', filter jsonb default null,
  handlers text[] default '{}', names text[] default null, code text default null
)
returns jsonb
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'iso_8601'
set jit = off
set lock_timeout = '1s'
as $$
declare
  caller name := pgmb_internal.caller();
  admin boolean := pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_admin');
  head pgmb.queue := pgmb_internal.queue_for_consumer(declare_queue.queue);
  given jsonb;
  missing text[];
  applied jsonb := '{}';
  reset text[] := '{}';
  pending text[] := '{}';
  busy boolean := false;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.matching(declare_queue.patterns);
  perform pgmb_internal.assert_known_settings(declare_queue.settings);
  perform pgmb_internal.assert_filter(declare_queue.filter -> 'equals', declare_queue.filter ->> 'filter', declare_queue.filter -> 'params');
  if admin and declare_queue.filter ? 'condition' then
    declare_queue.filter := jsonb_set(declare_queue.filter, '{condition}',
      to_jsonb(pgmb_internal.compile_condition(declare_queue.filter ->> 'condition')));
  end if;
  given := pgmb_internal.settings_of(declare_queue.settings, declare_queue.filter);
  if admin then
    begin
      -- One after another: two processes that start at once each see what the other declares.
      select * into head from pgmb.queue q where q.id = head.id for no key update;
      if head.id is null then
        raise exception 'queue % does not exist', quote_literal(declare_queue.queue) using errcode = 'MB002';
      end if;
      perform pgmb_internal.record_declaration(head, declare_queue.worker, caller, declare_queue.patterns, declare_queue.settings, given,
        declare_queue.handlers, declare_queue.code);
      perform pgmb_internal.record_owner(head.id, declare_queue.worker, declare_queue.handlers);
      missing := pgmb_internal.missing_patterns(head, declare_queue.patterns, declare_queue.names);
      if cardinality(missing) > 0 then
        perform pgmb_internal.write_binding(head.id, b.patterns || missing, b.equals, b.filter, b.condition, b.params)
        from pgmb.binding b where b.queue = head.id and b.version = head.bindings;
      end if;
      select a.applied, a.reset, a.pending into applied, reset, pending
      from pgmb_internal.agree(head.id, declare_queue.worker, given, declare_queue.names) a;
    exception when lock_not_available then
      busy := true;
      head := pgmb_internal.queue_for_consumer(declare_queue.queue);
    end;
  end if;
  if busy or not admin then
    perform pgmb_internal.record_declaration(head, declare_queue.worker, caller, declare_queue.patterns, declare_queue.settings, given,
      declare_queue.handlers, declare_queue.code);
    missing := pgmb_internal.missing_patterns(head, declare_queue.patterns, declare_queue.names);
  end if;
  return jsonb_build_object('settings', pgmb.queue_settings(declare_queue.queue),
    'added', case when admin and not busy then missing else '{}'::text[] end,
    'applied', applied, 'reset', reset, 'pending', pending, 'busy', busy,
    'denied', not admin and (cardinality(missing) > 0 or exists (
      select from jsonb_each(given) s
      where s.value is distinct from pgmb_internal.settings_of(to_jsonb(head), to_jsonb(head)) -> s.key)));
end $$;

-- The declared patterns that a queue is not bound to; none where `names` leaves the patterns out.
create or replace function pgmb_internal.missing_patterns(head pgmb.queue, patterns text[], names text[])
returns text[]
language sql stable
as $$
  select array(select p.pattern from unnest(missing_patterns.patterns) with ordinality p (pattern, nth)
    where (missing_patterns.names is null or 'patterns' = any (missing_patterns.names)) and not p.pattern = any (
      select unnest(b.patterns) from pgmb.binding b where b.queue = head.id and b.version = head.bindings)
    order by p.nth)
$$;

-- Refuses a declaration that the queue or another app contradicts, and records it. A queue that was converted under a worker
-- which consumes it is not refused to that worker: it must learn of the new form. Locks no row but the declaration.
create or replace function pgmb_internal.record_declaration(
  head pgmb.queue, worker uuid, caller name, patterns text[], given jsonb, settings jsonb, handlers text[], code text
)
returns void
language plpgsql
as $$
begin
  if not exists (select from pgmb.declaration d where d.queue = head.id and d.worker = record_declaration.worker) then
    perform pgmb_internal.assert_same_kind(head, given);
  end if;
  if worker is not null then
    perform pgmb_internal.assert_one_app(head, worker);
    perform pgmb_internal.write_declaration(head.id, worker, caller, patterns, settings, handlers, code);
  end if;
end $$;

-- Writes a declaration. A worker's declarations are its role's to write, and those of all workers of a role are bounded.
create or replace function pgmb_internal.write_declaration(
  queue integer, worker uuid, caller name, patterns text[], settings jsonb, handlers text[], code text
)
returns void
language plpgsql
as $$
declare
  most_bytes bigint := 64 * 1024 * 1024;
begin
  if not exists (select from pgmb.worker w where w.id = write_declaration.worker and w.role = caller) then
    raise exception 'role % has no worker %', caller, worker using errcode = '42501', hint = 'Call pgmb.worker_heartbeat first.';
  end if;
  insert into pgmb.declaration as d (queue, worker, patterns, settings, handlers, code)
  values (write_declaration.queue, write_declaration.worker, write_declaration.patterns, write_declaration.settings,
    write_declaration.handlers, write_declaration.code)
  on conflict on constraint declaration_pkey do update
  set patterns = excluded.patterns, settings = excluded.settings, handlers = excluded.handlers, code = excluded.code
  where (d.patterns, d.settings, d.handlers, d.code)
    is distinct from (excluded.patterns, excluded.settings, excluded.handlers, excluded.code);
  if found and (select sum(pg_column_size(d.patterns) + pg_column_size(d.settings) + pg_column_size(d.handlers))
    from pgmb.declaration d join pgmb.worker w on w.id = d.worker where w.role = caller) > most_bytes
  then
    raise exception 'the workers of role % declare more than % bytes', caller, most_bytes using errcode = 'MB005';
  end if;
  perform pgmb_internal.remember_code(write_declaration.queue, caller, write_declaration.code);
end $$;

-- Records whose a queue is beyond the life of its workers. An app without a name, or one that shares the queue, takes it from no
-- named app. For admins alone: an operator's bind waits for this row.
create or replace function pgmb_internal.record_owner(queue integer, worker uuid, handlers text[])
returns void
language sql
as $$
  insert into pgmb.owner as o (queue, app, shared, handlers)
  select record_owner.queue, w.app, w.shared, record_owner.handlers from pgmb.worker w where w.id = record_owner.worker
  on conflict on constraint owner_pkey do update set app = excluded.app, shared = excluded.shared, handlers = excluded.handlers
  where (o.app is null or o.app = excluded.app)
    and (o.app, o.shared, o.handlers) is distinct from (excluded.app, excluded.shared, excluded.handlers)
$$;

-- The patterns that a queue is bound to and no live worker declares; none where no live worker declares the queue.
create or replace function pgmb_internal.undeclared_patterns(head integer)
returns text[]
language sql stable
as $$
  select array(
    select p.pattern from pgmb.queue q join pgmb.binding b on b.queue = q.id and b.version = q.bindings
    cross join unnest(b.patterns) with ordinality p (pattern, nth)
    where q.id = head and p.pattern <> all (told.patterns) order by p.nth)
  from (select array(select unnest(d.patterns) from pgmb_internal.declarations(head) d) patterns) told
  where told.patterns <> '{}'
$$;

-- Removes from a queue the patterns that no live worker declares, from its position on. Nothing where no live worker declares
-- the queue. Returns what was removed. Waits for a lock for a second at most. Errors: MB002 no such queue, 42501, 55P03.
create or replace function pgmb.prune_queue(queue text)
returns text[]
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
set lock_timeout = '1s'
as $$
declare
  head integer;
  gone text[];
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  head := (pgmb_internal.queue_for_consumer(prune_queue.queue)).id;
  -- What starts now declares its patterns under the same lock, before or after.
  perform from pgmb.queue q where q.id = head for no key update;
  gone := coalesce(pgmb_internal.undeclared_patterns(head), '{}');
  if cardinality(gone) > 0 then
    perform pgmb_internal.write_binding(head, array(select kept.pattern from unnest(b.patterns) kept (pattern)
      where kept.pattern <> all (gone)), b.equals, b.filter, b.condition, b.params)
    from pgmb.queue q join pgmb.binding b on b.queue = q.id and b.version = q.bindings where q.id = head;
  end if;
  return gone;
end $$;
