-- Views of messages: as fraruiz/pgmb has them. pgmb.messages shows stream main; each queue that `create` made has a view
-- of its unacknowledged messages and one of its dead letters.

-- Some json as jsonb, or as a string that holds its text where jsonb cannot hold it (\u0000, numbers out of range).
create or replace function pgmb.as_jsonb(document json)
returns jsonb
language plpgsql immutable strict
as $$
begin
  return document::jsonb;
exception when others then
  return to_jsonb(document::text);
end $$;

-- Makes the view pgmb.messages: what the log of stream main holds, and what waits there with a delay. Reading it reads
-- the log.
create or replace function pgmb_internal.create_messages_view()
returns void
language plpgsql
as $$
begin
  create or replace view pgmb.messages as
  select coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, s.salt)) id, e.topic::text routing_key,
    pgmb.as_jsonb(e.payload) body, pgmb.as_jsonb(e.headers) headers, e.published_at enqueued_at,
    e.published_at occurred_at
  from pgmb.log_main e
  cross join (select m.salt from pgmb.stream m where m.name = 'main') s
  union all
  select d.id, d.topic, pgmb.as_jsonb(d.payload), pgmb.as_jsonb(d.headers), d.due_at, null
  from pgmb.delayed d
  where d.stream = 'main';
  if to_regrole('pgmb_admin') is not null then
    grant select on pgmb.messages to pgmb_admin;
  end if;
end $$;

-- The messages of a queue that are not acknowledged: those that wait, those under a lease, those to be tried again.
-- Reads every one of them and changes nothing. seq is null for one that was delayed, is due and is not in the log yet.
-- Errors: MB002 no such queue, MB024 it has an SQL condition or a costly filter and the caller no
-- statement_timeout, 42501.
create or replace function pgmb.pending_messages(queue text)
returns table (seq bigint, id uuid, attempt integer, leased boolean, topic text, payload json, headers json,
  published_at timestamptz, error text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  q pgmb.queue;
  newest pgmb.claim;
  held pgmb.claim;
  settled bigint[];
  now timestamptz := clock_timestamp();
begin
  -- Stable: claims, settlements and retries are read by one snapshot, so that a message on its way is met once.
  for q in select * from pgmb_internal.lanes_for_consumer(pending_messages.queue) loop
    select * into newest from pgmb_internal.queue_position(q.id);
    if pgmb_internal.needs_timeout(q) then
      perform pgmb_internal.assert_timeout();
    end if;
    q.matching := q.matching || pgmb_internal.asking(q);
    return query
    select e.seq, e.id, 1, false, e.topic::text, e.payload::json, e.headers::json, e.published_at, null::text
    from (
            select b.* from pgmb_internal.pending(q, newest, pgmb_internal.snapshot_with_own(), 9223372036854775807) p
      cross join lateral pgmb_internal.batch_events(q.stream, p.batch, p.lo, p.hi, q.matching || p.matching) b
    ) e
    order by case when q.when_full = 'drop_oldest' then e.seq end desc
    limit case when q.when_full = 'drop_oldest' then q.max_length end;
    return query execute format('select e.seq, e.id, 1, false, e.topic::text, e.payload::json, e.headers::json, e.published_at, null::text
        from (
          select null::bigint seq, d.id, d.topic, d.key, d.payload, d.headers, d.due_at published_at
          from pgmb.delayed d where d.stream = $1 and d.due_at <= $2) e
        where true %s', q.matching)
      using q.stream_name, now;
    for held in
      select c.* from pgmb.claim c
      where c.queue = q.id and c.state = 'leased' and not pgmb_internal.is_void(c.queue, c.id)
    loop
      settled := array(select s.seq from pgmb.settlement s where s.queue = held.queue and s.claim = held.id);
      -- No claim has this number: claim_events finds nothing settled by a newer snapshot.
      held.id := 0;
      return query
      select e.seq, e.id, 1, held.expires_at > now, e.topic::text, e.payload::json, e.headers::json, e.published_at, null::text
      from pgmb_internal.claim_events(held) e
      where e.seq <> all (settled);
    end loop;
    return query
    select r.seq, r.event_id, r.attempt, exists (
        select from pgmb.claim c where c.queue = r.queue and c.id = r.lease and c.expires_at > now), r.topic, r.payload,
      r.headers, r.published_at, r.error
    from pgmb.retry r
    where r.queue = q.id;
  end loop;
end $$;

-- Makes the views of a queue: pgmb.<name>_queue and pgmb.<name>_dead_letter_queue, and for one that is called <x>_queue
-- pgmb.<x>_queue and pgmb.<x>_dead_letter_queue too. A name that is taken or too long draws a warning.
create or replace function pgmb_internal.create_queue_views(made pgmb.queue)
returns void
language plpgsql
as $$
declare
  wanted record;
  refusal text;
  consumer text;
begin
  for wanted in
    select (stem.name || kind.ending) view, kind.query,
      exists (select from pg_class c where c.relname = stem.name || kind.ending and c.relnamespace = 'pgmb'::regnamespace)
      or exists (select from pg_type t where t.typname = stem.name || kind.ending and t.typnamespace = 'pgmb'::regnamespace)
      taken
    from (select made.name union select nullif(regexp_replace(made.name, '_queue$', ''), '')) stem (name)
    cross join (values
      ('_queue', 'select m.seq id, m.id message_id, false acknoledge, m.attempt - 1 retries, m.leased locked,
          m.published_at enqueued_at, null::timestamptz acknoledged_at, m.topic routing_key,
          pgmb.as_jsonb(m.payload) body, pgmb.as_jsonb(m.headers) headers, m.error
        from pgmb.pending_messages(%L) m'),
      ('_dead_letter_queue', 'select d.id, d.event_id message_id, false acknoledge, greatest(d.attempt - 1, 0) retries,
          false locked, d.died_at enqueued_at, null::timestamptz acknoledged_at, d.topic routing_key,
          pgmb.as_jsonb(d.payload) body, pgmb.as_jsonb(d.headers) headers, d.error
        from pgmb.dead_letters(%L, max => 2147483647) d')) kind (ending, query)
    where stem.name is not null
    order by length(stem.name) desc, kind.ending
  loop
    continue when wanted.taken
      and exists (select from pgmb.queue_view v where v.queue = made.id and v.name = wanted.view);
    refusal := case
      when octet_length(wanted.view) > 63 then 'the name is too long'
      -- Or a stream may need it one day.
      when wanted.taken or wanted.view ~ '^(log|seq)_' then 'the name is taken' end;
    if refusal is null then
      -- Waits for another queue that is about to get a view of that name.
      insert into pgmb.queue_view (queue, name) values (made.id, wanted.view) on conflict do nothing;
      if exists (select from pgmb.queue_view v where v.queue <> made.id and v.name = wanted.view) then
        refusal := 'the name is taken';
      end if;
    end if;
    if refusal is not null then
      raise warning 'queue % has no view pgmb.%: %', quote_literal(made.name), quote_ident(wanted.view), refusal;
      continue;
    end if;
    execute format('create view pgmb.%I as %s', wanted.view, format(wanted.query, made.name));
  end loop;
  for consumer in
    select r.rolname from pg_roles r where r.rolname in ('pgmb_consumer', 'pgmb_admin')
      or r.oid in (select g.role_id from pgmb.queue_grant g where g.queue = made.id)
  loop
    perform pgmb_internal.grant_queue_views(made.id, consumer);
  end loop;
end $$;

-- Lets a role read the views of a queue, which ask whether it may consume the queue.
create or replace function pgmb_internal.grant_queue_views(queue integer, role text)
returns void
language plpgsql
as $$
declare
  shown name;
begin
  for shown in
    select c.relname from pgmb.queue_view v join pg_class c on c.relname = v.name
    where v.queue = grant_queue_views.queue and c.relnamespace = 'pgmb'::regnamespace and c.relkind = 'v'
  loop
    execute format('grant select on pgmb.%I to %I', shown, role);
  end loop;
end $$;

-- Drops the views of a queue. Waits for transactions that read them.
create or replace function pgmb_internal.drop_queue_views(queue text)
returns void
language plpgsql
as $$
declare
  shown name;
begin
  for shown in
    select c.relname
    from pgmb.queue q
    join pgmb.queue_view v on v.queue = q.id
    join pg_class c on c.relname = v.name
    where q.name = drop_queue_views.queue and c.relnamespace = 'pgmb'::regnamespace and c.relkind = 'v'
  loop
    execute format('drop view pgmb.%I', shown);
  end loop;
end $$;
