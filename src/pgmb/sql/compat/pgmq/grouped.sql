-- Reading by group, the value of header x-pgmq-group: messages of one group come in the order of their numbers, none
-- while one before it is hidden. Messages without the header are one group. What these read lies in pgmq.parked: one
-- row a message.

-- Reads at most qty messages by group. manner: 'filled' takes all that it can of one group, then of the next; 'layered'
-- the first of each, then the second of each; 'heads' the first of each alone. A group belongs to the caller that
-- locked its first message; others pass it over and get the next groups.
create or replace function pgmq.read_by_group(queue_name text, vt integer, qty integer, manner text)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(read_by_group.queue_name);
  now timestamptz := clock_timestamp();
  -- What is in the log comes before what is parked with a higher number.
  bound bigint;
  heads refcursor;
  head record;
  chosen bigint[];
  groups bigint[];
  ordered bigint[];
  parked integer := 0;
begin
  if read_by_group.qty <= 0 then
    return;
  end if;
  perform pgmq.park_readings(asked, 'infinity');
  perform pgmq.park_retried(asked.id);
  loop
    chosen := '{}';
    groups := '{}';
    bound := coalesce((select min(u.seq) from pgmq.unread(asked, 1) u), 9223372036854775807);
    -- The oldest group first; where more than a thousand messages may be read, the one that waited longest.
    if exists (
      select from pgmq.parked p where p.queue = asked.id and p.vt <= now order by p.vt, p.msg_id offset 1000)
    then
      open heads for
        select p.msg_id, p.fifo from pgmq.parked p
        where p.queue = asked.id and p.vt <= now and p.msg_id < bound
          and not exists (
            select from pgmq.parked ahead
            where ahead.queue = asked.id and ahead.fifo = p.fifo and ahead.msg_id < p.msg_id)
        order by p.vt, p.msg_id
        for update skip locked;
    else
      open heads for
        select p.msg_id, p.fifo from pgmq.parked p
        where p.queue = asked.id and p.vt <= now and p.msg_id < bound
          and not exists (
            select from pgmq.parked ahead
            where ahead.queue = asked.id and ahead.fifo = p.fifo and ahead.msg_id < p.msg_id)
        order by p.msg_id + 0
        for update skip locked;
    end if;
    loop
      fetch heads into head;
      exit when not found;
      groups := groups || head.fifo;
      if manner = 'filled' then
        -- Up to the first that is hidden.
        chosen := chosen || array(
          select m.msg_id from (
            select p.msg_id, bool_and(p.vt <= now) over (order by p.msg_id) free
            from pgmq.parked p
            where p.queue = asked.id and p.fifo = head.fifo and p.msg_id < bound
            order by p.msg_id limit read_by_group.qty - cardinality(chosen)) m
          where m.free order by m.msg_id);
        exit when cardinality(chosen) >= read_by_group.qty;
      else
        chosen := chosen || head.msg_id;
        exit when cardinality(groups) >= read_by_group.qty;
      end if;
    end loop;
    close heads;
    exit when cardinality(chosen) >= read_by_group.qty or bound = 9223372036854775807 or parked >= 5000;
    perform pgmq.take_fresh(asked, greatest(read_by_group.qty, 100), 0, '{}', null, null, false);
    parked := parked + greatest(read_by_group.qty, 100);
    now := clock_timestamp();
  end loop;
  if manner = 'layered' then
    ordered := array(
      select m.msg_id
      from unnest(groups) with ordinality g (fifo, place)
      cross join lateral (
        select f.msg_id, f.rank from (
          select p.msg_id, row_number() over (order by p.msg_id) rank, bool_and(p.vt <= now) over (order by p.msg_id) free
          from pgmq.parked p
          where p.queue = asked.id and p.fifo = g.fifo and p.msg_id < bound
          order by p.msg_id limit read_by_group.qty) f
        where f.free) m
      order by m.rank, g.place limit read_by_group.qty);
  else
    ordered := chosen;
  end if;
  return query
  with hidden as (
    update pgmq.parked p
    set read_ct = p.read_ct + 1, last_read_at = now, vt = clock_timestamp() + make_interval(secs => read_by_group.vt)
    where p.queue = asked.id and p.msg_id = any (ordered)
    returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
  )
  select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, h.vt, h.message, h.headers
  from hidden h order by array_position(ordered, h.msg_id);
end $$;

-- Reads at most qty messages, as many as there are of one group, then of the next. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.read_grouped(queue_name text, vt integer, qty integer)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.read_by_group(queue_name, vt, qty, 'filled')
$$;

-- Reads at most qty messages, the first of each group, then the second of each. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.read_grouped_rr(queue_name text, vt integer, qty integer)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.read_by_group(queue_name, vt, qty, 'layered')
$$;

-- Reads the first message of at most qty groups. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.read_grouped_head(queue_name text, vt integer, qty integer)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.read_by_group(queue_name, vt, qty, 'heads')
$$;

-- As read_grouped, but waits as read_with_poll does.
create or replace function pgmq.read_grouped_with_poll(
  queue_name text, vt integer, qty integer, max_poll_seconds integer default 5, poll_interval_ms integer default 100
)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select * from pgmq.poll('select * from pgmq.read_grouped($1, $2, $3)', queue_name, vt, qty, max_poll_seconds, poll_interval_ms);
end $$;

-- As read_grouped_rr, but waits as read_with_poll does.
create or replace function pgmq.read_grouped_rr_with_poll(
  queue_name text, vt integer, qty integer, max_poll_seconds integer default 5, poll_interval_ms integer default 100
)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select * from pgmq.poll('select * from pgmq.read_grouped_rr($1, $2, $3)', queue_name, vt, qty, max_poll_seconds, poll_interval_ms);
end $$;

-- As read_grouped_head, but waits as read_with_poll does.
create or replace function pgmq.read_grouped_head_with_poll(
  queue_name text, vt integer, qty integer, max_poll_seconds integer default 5, poll_interval_ms integer default 100
)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select * from pgmq.poll('select * from pgmq.read_grouped_head($1, $2, $3)', queue_name, vt, qty, max_poll_seconds, poll_interval_ms);
end $$;
