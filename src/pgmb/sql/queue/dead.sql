-- Dead letters: look at them, send them back, drop them.

-- The dead letters of a queue, oldest first. after: the id of the last one seen, to go on.
create or replace function pgmb.dead_letters(
  queue text, topic text default null, error text default null, after bigint default 0, max integer default 100
)
returns setof pgmb.dead
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked integer[] := array(select q.id from pgmb_internal.lanes_for_consumer(dead_letters.queue) q);
begin
  return query
  select d.* from pgmb.dead d
  where d.queue = any (asked) and d.id > dead_letters.after
    and (dead_letters.topic is null or pgmb.matches(dead_letters.topic, d.topic))
    and (dead_letters.error is null or d.error like dead_letters.error)
  order by d.id limit dead_letters.max;
end $$;

-- Sends dead letters back to be tried again, as if for the first time, and returns how many: all of the
-- queue, or those whose id is given, whose topic matches a pattern, whose error is like a pattern. A dead letter that the
-- server cannot read stays. Errors: MB002 no such
-- queue, MB013 a transaction that moves or converts the queue is open, 42501.
create or replace function pgmb.redrive(
  queue text, ids bigint[] default null, topic text default null, error text default null
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked integer[];
begin
  -- A conversion would remove a lane that this call is about to write to.
  perform pgmb_internal.administer((pgmb_internal.queue_for_consumer(redrive.queue)).id, shared => true);
  asked := array(select q.id from pgmb_internal.lanes_for_consumer(redrive.queue) q);
  return pgmb_internal.send_back(array(
    select d.id from pgmb.dead d
    where d.queue = any (asked) and (redrive.ids is null or d.id = any (redrive.ids))
      and (redrive.topic is null or pgmb.matches(redrive.topic, d.topic))
      and (redrive.error is null or d.error like redrive.error)
    order by d.id));
end $$;

-- Moves dead letters to where they wait for their next attempt, and returns how many. One that the server cannot read stays.
create or replace function pgmb_internal.send_back(ids bigint[])
returns bigint
language plpgsql
as $$
declare
  moved bigint;
begin
  with back as (
    delete from pgmb.dead d where d.id = any (ids) returning d.*
  ), delivered as (
    -- What one endpoint did not get goes to that one alone.
    insert into pgmb.delivery (queue, endpoint, due_at, attempt, error, errors, seq, event_id, topic, key, payload, headers,
      published_at)
    select b.queue, b.endpoint, clock_timestamp(), 1, b.error, b.errors, b.seq, b.event_id, b.topic, b.key, b.payload, b.headers,
      b.published_at
    from back b join pgmb.endpoint e on e.id = b.endpoint order by b.id
  ), retried as (
    -- In an ordered queue behind older events of the key that wait, before all others of the key (origin 0). The lock keeps the
    -- event ahead where it is until this commits: the queue's position cannot pass the place behind it before. A locked event is
    -- being leased or settled: a consumer has it.
    insert into pgmb.retry (queue, due_at, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at,
      ordered, origin)
    select b.queue, case when ahead.lease is null then greatest(ahead.due_at, clock_timestamp()) else clock_timestamp() end,
      1, b.error, b.errors, b.seq, b.event_id, b.topic, b.key, b.payload, b.headers, b.published_at, q.ordered,
      coalesce(ahead.origin, 0)
    from back b
    join pgmb.queue q on q.id = b.queue
    left join lateral (
      select r.origin, r.lease, r.due_at from pgmb.retry r
      where q.ordered and r.ordered and r.queue = b.queue and r.key = b.key and r.seq < b.seq
      order by r.origin desc, r.seq desc limit 1
      for key share skip locked) ahead on true
    where b.endpoint is null order by b.id
  )
  select count(*) into moved from back;
  return moved;
exception when data_corrupted or index_corrupted then
  if cardinality(ids) = 1 then
    return 0;
  end if;
  return (select sum(pgmb_internal.send_back(h.half)) from pgmb_internal.halves(ids) h);
end $$;

-- Deletes dead letters for good and returns how many: those whose id is given, or all of the queue.
create or replace function pgmb.drop_dead(queue text, ids bigint[] default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked integer[] := array(select q.id from pgmb_internal.lanes_for_consumer(drop_dead.queue) q);
  gone bigint;
begin
  with dropped as (
    delete from pgmb.dead d where d.queue = any (asked) and (drop_dead.ids is null or d.id = any (drop_dead.ids))
    returning d.queue, d.seq
  ), noted as (
    select pgmb_internal.note_untraced(d.queue, range_agg(int8range(d.seq, d.seq, '[]'))) from dropped d group by d.queue
  )
  select count(*) into gone from dropped cross join (select count(*) from noted) once;
  return gone;
end $$;
