-- Where live workers do not agree about a queue, and queues that no live worker consumes any more.

-- The modules of handlers, of which each is module.function.
create or replace function pgmb_internal.modules_of(handlers text[])
returns text[]
language sql immutable
as $$
  select array(select distinct regexp_replace(h, '\.[^.]*$', '') from unnest(handlers) h)
$$;

-- Why no live worker declares a queue: stopped while the code of a live worker has handlers of it, stranded while the program
-- that declared it last is at work without them. That program has the app's name or, of apps without a name, handlers of the
-- same modules. worker: null unless this worker has handlers of the queue or is of that program. The handlers of all live
-- workers count: beside an old worker, a new one does not call the queue stranded.
create or replace function pgmb_internal.left_behind(head integer, worker uuid)
returns text
language plpgsql stable
as $$
declare
  since timestamptz := pgmb_internal.alive_since();
begin
  if exists (select from pgmb_internal.declarations(head)) then
    return null;
  end if;
  return (
    select case when bool_or(w.concerned and (w.handles or w.declared))
      then case when bool_or(w.handles) then 'stopped' else 'stranded' end end
    from (
      select left_behind.worker is null or w.id = left_behind.worker concerned, q.name = any (w.handled) handles,
        w.app is not distinct from o.app and (o.app is not null or exists (
          select from pgmb.declaration d
          where d.worker = w.id and pgmb_internal.modules_of(d.handlers) && pgmb_internal.modules_of(o.handlers))) declared
      from pgmb.owner o join pgmb.queue q on q.id = o.queue cross join pgmb.worker w
      where o.queue = head and o.handlers <> '{}' and w.heartbeat_at > since
        and case when to_regrole(quote_ident(w.role)) is not null then pgmb_internal.may_consume(head, w.role) end
    ) w);
end $$;

-- Where the live workers of a queue disagree, in words: see pgmb.queue_disagreements.
create or replace function pgmb_internal.disagreements(head integer)
returns table (kind text, message text)
language sql stable
as $$
  with told as materialized (
    -- A set of equal declarations is shown by one of its workers.
    select d.app, d.shared, d.patterns, d.settings, d.handlers, min(d.worker::text) worker,
      coalesce('app ' || d.app || ' on ', '') || min(d.host || ':' || d.pid)
        || case when count(*) > 1 then format(' and %s more', count(*) - 1) else '' end who
    from pgmb_internal.declarations(head) d group by d.app, d.shared, d.patterns, d.settings, d.handlers
  )
  select 'apps', 'apps that do not share their queues consume it: ' || string_agg(t.who, ', ' order by t.who)
  from told t where t.app is not null having count(distinct t.app) > 1 and not bool_and(t.shared)
  union all
  (select 'programs', format('two programs seem to consume it: %s declares %s of %s, %s declares %s of %s',
    a.who, array_to_string(a.patterns[:3], ', '), array_to_string(a.handlers[:3], ', '),
    b.who, array_to_string(b.patterns[:3], ', '), array_to_string(b.handlers[:3], ', '))
  from told a join told b on a.worker < b.worker
  where (a.app is null or b.app is null) and (not a.patterns && b.patterns or not a.handlers && b.handlers)
  order by a.worker, b.worker limit 1)
  union all
  select 'patterns', 'live workers declare different patterns: ' || string_agg(format('%s not by %s', p.pattern, p.lacking), '; '
    order by p.pattern)
  from (
    select p.pattern, string_agg(t.who, ', ' order by t.who) filter (where p.pattern <> all (t.patterns)) lacking
    from (select distinct unnest(t.patterns) pattern from told t) p cross join told t group by p.pattern
  ) p where p.lacking is not null having count(*) > 0
  union all
  select 'settings', 'live workers declare different settings: ' || string_agg(format('%s %s', s.key, s.said), '; ' order by s.key)
  from (
    select k.key, string_agg(format('= %s by %s', coalesce((t.settings -> k.key)::text, 'not declared'), t.who), ', ' order by t.who) said
    from (select distinct jsonb_object_keys(t.settings) key from told t) k cross join told t group by k.key
    having count(distinct coalesce((t.settings -> k.key)::text, '')) > 1
  ) s having count(*) > 0
  union all
  select 'undeclared', 'it is bound to patterns that no live worker declares: ' || array_to_string(u.patterns, ', ')
  from (select pgmb_internal.undeclared_patterns(head) patterns) u where u.patterns <> '{}'
  union all
  select 'unbound', 'it is not bound to patterns that live workers declare: ' || string_agg(u.pattern, ', ' order by u.pattern)
  from (select distinct unnest(t.patterns) pattern from told t) u
  where u.pattern <> all (select unnest(b.patterns) from pgmb.queue q
    join pgmb.binding b on b.queue = q.id and b.version = q.bindings where q.id = head)
  having count(*) > 0
  union all
  select 'overridden', 'it has other settings than all live workers declare: '
    || string_agg(format('%s = %s, declared %s', s.key, s.present, s.declared), '; ' order by s.key)
  from (
    select k.key, kept.settings -> k.key present, min((t.settings -> k.key)::text)::jsonb declared
    from (select distinct jsonb_object_keys(t.settings) key from told t) k cross join told t
    cross join (select pgmb_internal.settings_of(to_jsonb(q), to_jsonb(q)) settings from pgmb.queue q where q.id = head) kept
    group by k.key, kept.settings having count(distinct coalesce((t.settings -> k.key)::text, '')) = 1
  ) s
  -- Only an admin's worker declares a condition as the queue stores it.
  where case s.key when 'filter'
    then s.declared - 'condition' <> s.present - 'condition' or (s.declared ? 'condition') <> (s.present ? 'condition')
    else s.declared <> s.present end
  having count(*) > 0
$$;

-- What to do about a kind of disagreement.
create or replace function pgmb_internal.advice(kind text, queue text)
returns text
language sql immutable
as $$
  select case kind
    when 'apps' then 'Give one of them another queue (queue=...), or say shared=True in both.'
    when 'programs' then 'Name the apps, App(name=...), and give one of them another queue (queue=...).'
    when 'patterns' then 'Finish the deployment: start the new code everywhere and stop the old.'
    when 'settings' then 'Finish the deployment: the setting changes when all live workers declare the same.'
    when 'undeclared' then format('pgmb work --prune removes them at a start, select pgmb.prune_queue(%L) at once.', queue)
    when 'unbound' then format('As an admin: pgmb queues bind %s PATTERN… with these and the present patterns. A worker of an admin '
      'adds them at its start.', queue)
    when 'overridden' then format('A worker of an admin sets them at its start, or within seconds of a deployment. To keep the '
      'present ones, change the code. By hand: pgmb queues alter %s, for the filter pgmb queues bind %s.', queue, queue)
    when 'stopped' then format('Start a worker for it: pgmb work MODULE:APP --queue %s', queue)
    when 'stranded' then format('If the handler was renamed, give it queue=%L, or let an old worker finish it (pgmb queues peek '
      '%s shows what waits). Then: pgmb queues drop %s. If other consumers read it: pgmb queues bind.', queue, queue, queue)
  end
$$;

-- Where live workers do not agree about a queue, and queues that code has left behind. hint: what to do. kind and message:
--   apps         workers of apps that do not share their queues consume it
--   programs     workers of apps without a name declare no common pattern, or no common handler
--   patterns     workers declare different patterns, as they do during a deployment
--   settings     workers declare different settings; the queue keeps its own
--   undeclared   it is bound to patterns that none of them declares: prune_queue removes them
--   unbound      it is not bound to patterns that live workers declare: it gets none of those events
--   overridden   all live workers declare another value of a setting, or another filter, than the queue has
--   stopped      no live worker consumes it, though the code of live workers has handlers of it: start a worker for it
--   stranded     no live worker has handlers of it while the app that declared it is at work: a handler was renamed or
--                removed. It keeps its events, collects more and holds back retention
-- `name`: of this queue alone; `worker`: of the queues that this worker declares or its program left behind. Of the queues
-- that the caller may consume.
create or replace function pgmb.queue_disagreements(name text default null, worker uuid default null)
returns table (queue text, kind text, message text, hint text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  head record;
  state text;
  most_characters integer := 1000;
begin
  for head in
    select q.id, q.name, o.app, o.handlers,
      queue_disagreements.worker is null or exists (
        select from pgmb.declaration d where d.queue = q.id and d.worker = queue_disagreements.worker) looked
    from pgmb.queue q left join pgmb.owner o on o.queue = q.id
    where (queue_disagreements.name is null or q.name = queue_disagreements.name)
      and (o.queue is not null or exists (select from pgmb.declaration d where d.queue = q.id))
    order by q.name
  loop
    continue when not pgmb_internal.may_consume(head.id);
    if head.looked then
      return query select head.name, d.kind, left(d.message, most_characters), pgmb_internal.advice(d.kind, head.name)
      from pgmb_internal.disagreements(head.id) d;
    end if;
    state := pgmb_internal.left_behind(head.id, queue_disagreements.worker);
    if state is not null then
      return query select head.name, state, left(format(case state
        when 'stopped' then 'no live worker consumes it, but the code of live workers has handlers of it'
        else 'no live worker has handlers of it any more, but %s is at work and declared it for %s' end
          || ': its events wait, and it collects more',
        coalesce('app ' || head.app, 'the program'), array_to_string(head.handlers[:3], ', ')), most_characters),
        pgmb_internal.advice(state, head.name);
    end if;
  end loop;
end $$;
