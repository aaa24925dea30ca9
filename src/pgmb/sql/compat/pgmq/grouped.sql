-- Reading by group, the value of header x-pgmq-group: messages of one group come in the order of their numbers, none
-- while one before it is hidden. Messages without the header are one group. These calls read pgmq.parked, one row a
-- message, and park messages of the log as far as they need.

-- The first message of each group of pgmq.parked that may be read and has a number below `bound`, in the order of the
-- numbers. Looks at the oldest messages, which is enough where there are many groups; then skips from group to group in the
-- index, which costs the same however many messages each group has.
create or replace function pgmq.group_heads(queue integer, bound bigint, now timestamptz)
returns table (msg_id bigint, fifo bigint)
language sql stable
as $$
  with recursive oldest as materialized (
    select o.msg_id, o.fifo
    from (select p.msg_id, p.fifo, p.vt from pgmq.parked p where p.queue = group_heads.queue order by p.msg_id limit 1000) o
    where o.vt <= group_heads.now limit 50
  ), head as (
    (select p.msg_id, p.fifo, p.vt from pgmq.parked p where p.queue = group_heads.queue order by p.fifo, p.msg_id limit 1)
    union all
    select next.* from head h cross join lateral (
      select p.msg_id, p.fifo, p.vt from pgmq.parked p
      where p.queue = group_heads.queue and p.fifo > h.fifo order by p.fifo, p.msg_id limit 1) next
  )
  select o.msg_id, o.fifo from oldest o
  where o.msg_id < group_heads.bound and o.msg_id = (
    select p.msg_id from pgmq.parked p where p.queue = group_heads.queue and p.fifo = o.fifo order by p.msg_id limit 1)
  union all
  (select h.msg_id, h.fifo from head h
  where h.vt <= group_heads.now and h.msg_id < group_heads.bound
    and h.msg_id > coalesce((select max(o.msg_id) from oldest o), 0)
  order by h.msg_id)
$$;

-- The first messages of a group, at most `most`, up to one that is hidden or has number `bound`.
create or replace function pgmq.free_messages(queue integer, fifo bigint, bound bigint, now timestamptz, most integer)
returns setof bigint
language sql stable
as $$
  select m.msg_id
  from (
    select p.msg_id, bool_and(p.vt <= free_messages.now) over (order by p.msg_id) free
    from pgmq.parked p
    where p.queue = free_messages.queue and p.fifo = free_messages.fifo and p.msg_id < free_messages.bound
    order by p.msg_id limit free_messages.most) m
  where m.free order by m.msg_id
$$;

-- Locks messages of pgmq.parked and returns them and their rows, in their order, without those that another transaction has
-- locked or hidden, and without those behind them in their groups.
create or replace function pgmq.lock_runs(queue integer, now timestamptz, inout chosen bigint[], out found_at tid[])
language plpgsql
as $$
declare
  locked bigint[];
begin
  -- Each message by its number: a plan that was made while the table was small would look through the queue for all of them,
  -- or for what is visible. (`is true` keeps vt from the index.)
  select coalesce(array_agg(l.msg_id), '{}'), coalesce(array_agg(l.ctid), '{}') into locked, found_at
  from unnest(chosen) c (msg_id)
  cross join lateral (
    select p.msg_id, p.ctid from pgmq.parked p
    where p.queue = lock_runs.queue and p.msg_id = c.msg_id and (p.vt <= lock_runs.now) is true
    limit 1 for update skip locked) l;
  if cardinality(locked) < cardinality(chosen) then
    select coalesce(array_agg(c.msg_id order by c.nth), '{}'),
      coalesce(array_agg(found_at[array_position(locked, c.msg_id)] order by c.nth), '{}')
    into chosen, found_at
    from unnest(chosen) with ordinality c (msg_id, nth)
    join pgmq.parked p on p.queue = lock_runs.queue and p.msg_id = c.msg_id
    where c.msg_id = any (locked) and not exists (
      select from unnest(chosen) one
      join pgmq.parked ahead on ahead.queue = lock_runs.queue and ahead.msg_id = one
      where one <> all (locked) and ahead.fifo = p.fifo and ahead.msg_id < p.msg_id);
  end if;
end $$;

-- The lowest number that is not in pgmq.parked yet, but in the log or held by a reading: a message of any group may be
-- behind it. from_log: whether the log has it. Infinite, as a number, where all are parked.
create or replace function pgmq.first_unparked(queue pgmq.queue, out number bigint, out from_log boolean)
language plpgsql
as $$
declare
  unread bigint := (select min(u.seq) from pgmq.unread(first_unparked.queue, 1) u);
  held bigint := (select min(r.lo) + 1 from pgmq.reading r where r.queue = (first_unparked.queue).id);
begin
  number := coalesce(least(unread, held), 9223372036854775807);
  from_log := unread = number;
end $$;

-- Reads at most qty messages by group. manner: 'filled' takes all that it can of one group, then of the next; 'layered'
-- the first of each, then the second of each; 'heads' the first of each alone. The group whose first message is the oldest
-- comes first. A group belongs to the caller that locked its first message; others pass it over and get the next groups.
-- While it finds fewer, it parks messages of the log, for as long as pgmq.part_of_a_call() allows; the next call parks more.
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
  stop_at timestamptz := clock_timestamp() + pgmq.part_of_a_call();
  now timestamptz;
  bound record;
  last bigint := 0;
  heads refcursor;
  head record;
  chosen bigint[];
  groups bigint[];
  locked record;
  block integer := greatest(read_by_group.qty, 100);
begin
  if read_by_group.qty <= 0 then
    return;
  end if;
  perform pgmq.park_readings(asked, 'infinity', stop_at);
  perform pgmq.park_retried(asked.id);
  loop
    chosen := '{}';
    groups := '{}';
    now := clock_timestamp();
    bound := pgmq.first_unparked(asked);
    open heads for select h.msg_id, h.fifo from pgmq.group_heads(asked.id, bound.number, now) h;
    loop
      fetch heads into head;
      exit when not found;
      perform from pgmq.parked p
      where p.queue = asked.id and p.msg_id = head.msg_id and (p.vt <= now) is true for update skip locked;
      continue when not found;
      groups := groups || head.fifo;
      chosen := chosen || case when manner = 'filled'
        then array(select m from pgmq.free_messages(asked.id, head.fifo, bound.number, now, qty - cardinality(chosen)) m)
        else array[head.msg_id] end;
      exit when cardinality(chosen) >= read_by_group.qty;
    end loop;
    close heads;
    -- The same number again: the log gives nothing now, the queue is paused.
    exit when cardinality(chosen) >= read_by_group.qty or bound.from_log is not true or bound.number = last
      or clock_timestamp() >= stop_at;
    last := bound.number;
    perform pgmq.take_fresh(asked, block, 0, '{}', null, null, false);
    block := greatest(block, least(block * 2, 1000));
  end loop;
  if manner = 'layered' then
    chosen := array(
      select m.msg_id
      from unnest(groups) with ordinality g (fifo, place)
      cross join lateral pgmq.free_messages(asked.id, g.fifo, bound.number, now, read_by_group.qty)
        with ordinality m (msg_id, layer)
      order by m.layer, g.place limit read_by_group.qty);
  end if;
  locked := pgmq.lock_runs(asked.id, now, chosen);
  return query
  with hidden as (
    update pgmq.parked p
    set read_ct = p.read_ct + 1, last_read_at = now, vt = clock_timestamp() + make_interval(secs => read_by_group.vt)
    where p.ctid = any (locked.found_at)
    returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
  )
  select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, h.vt, h.message, h.headers
  from hidden h order by array_position(locked.chosen, h.msg_id);
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
