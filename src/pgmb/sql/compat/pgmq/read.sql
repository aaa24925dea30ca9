-- Reading: messages become visible to others again when their vt has passed.

-- Reads at most qty messages that may be read and contain `conditional`, and hides them for vt seconds: those first
-- that were read before or delayed, then the log in its order. Never two callers the same. Writes one row a message, or
-- one a read of 20 or more from the log. Lock, where it reads the log: the queue's, as pgmb.receive, to the end of the
-- transaction; one that stays open for more than a second is superseded. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.read(queue_name text, vt integer, qty integer, conditional jsonb default '{}')
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(read.queue_name);
  now timestamptz := clock_timestamp();
  until timestamptz := now + make_interval(secs => read.vt);
  wanted integer := coalesce(read.qty, 2147483647);
  asked_for jsonb := coalesce(read.conditional, '{}');
  due tid[];
  got integer := 0;
begin
  if wanted <= 0 then
    perform pgmq.assert_not_negative(wanted);
    return;
  end if;
  if asked_for <> '{}' or pgmq.is_disturbed(asked.id, now) then
    due := pgmq.lock_due(asked, now, asked_for, wanted);
    return query
    with hidden as (
      update pgmq.parked p
      set read_ct = p.read_ct + 1, last_read_at = now, vt = until
      where p.ctid = any (due)
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
    )
    select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, h.vt, h.message, h.headers from hidden h order by h.msg_id;
  else
    -- The same where those that wait were never hidden, in one statement.
    return query
    with hidden as (
      update pgmq.parked p
      set read_ct = p.read_ct + 1, last_read_at = now, vt = until
      where p.ctid = any (array(
        select waiting.ctid from pgmq.parked waiting
        where waiting.queue = asked.id and waiting.vt = '-infinity'
        order by waiting.msg_id limit wanted for update skip locked))
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
    )
    select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, h.vt, h.message, h.headers from hidden h order by h.msg_id;
  end if;
  get diagnostics got = row_count;
  if got = wanted then
    return;
  end if;
  if pgmq.park_retried(asked.id) then
    return query select * from pgmq.read(read.queue_name, read.vt, wanted - got, asked_for);
  else
    return query select * from pgmq.read_log(asked, wanted - got, asked_for, until, now, false);
  end if;
end $$;

-- Reads at most `wanted` messages of the log that contain `conditional`; popped: and removes them from the queue. A small
-- read, which would pay for a range of its own, and one that selects take the way of pgmq.take_fresh.
create or replace function pgmq.read_log(
  queue pgmq.queue, wanted integer, conditional jsonb, vt timestamptz, read_at timestamptz, popped boolean
)
returns setof pgmq.message_record
language plpgsql
as $$
declare
  got integer;
begin
  if wanted < 20 or conditional <> '{}' or pgmq.has_passed_over((read_log.queue).id) then
    return query select * from pgmq.take_fresh(read_log.queue,
      greatest(wanted, case when conditional = '{}' then 100 else 500 end), wanted, conditional, read_log.vt, read_log.read_at, popped);
    return;
  end if;
  loop
    return query
    select r.seq, (not popped)::integer, r.published_at, case when not popped then read_log.read_at end,
      case when popped then r.published_at else read_log.vt end, r.payload::jsonb, r.headers::jsonb
    from pgmb.receive((read_log.queue).stream, read_log.wanted, interval '1000 years', raw => true) r;
    get diagnostics got = row_count;
    exit when got = 0;
    if popped then
      -- The receive returned messages, so the newest claim is its own.
      perform pgmq.settle_newest((read_log.queue).id, 0);
    else
      perform pgmq.note_reading((read_log.queue).id, read_log.vt, read_log.read_at);
    end if;
    wanted := wanted - got;
    -- A batch has an end, behind which there may be more: what committed late, or what this transaction sent itself.
    exit when wanted = 0;
  end loop;
end $$;

-- Raises for a number of messages that cannot be. Errors: 2201W.
create or replace function pgmq.assert_not_negative(qty integer)
returns void
language plpgsql immutable
as $$
begin
  if qty < 0 then
    raise exception 'qty must not be negative, got %', qty using errcode = '2201W';
  end if;
end $$;

-- Locks at most `wanted` parked messages and returns their rows: those that may be read and contain `conditional`, and that no other transaction has
-- locked: those with the lowest numbers, or where more than a thousand may be read those that waited longest, which
-- costs the same however many wait. First it parks what readings held that are over.
create or replace function pgmq.lock_due(queue pgmq.queue, now timestamptz, conditional jsonb, wanted integer)
returns tid[]
language plpgsql
as $$
begin
  perform pgmq.park_readings(lock_due.queue, lock_due.now, clock_timestamp() + pgmq.part_of_a_call());
  if exists (
    select from pgmq.parked p where p.queue = (lock_due.queue).id and p.vt <= lock_due.now
    order by p.vt, p.msg_id offset 1000)
  then
    return array(
      select p.ctid from pgmq.parked p
      where p.queue = (lock_due.queue).id and p.vt <= lock_due.now
        and case when lock_due.conditional = '{}' then true else p.message @> lock_due.conditional end
      order by p.vt, p.msg_id limit lock_due.wanted for update skip locked);
  end if;
  return array(
    select p.ctid from pgmq.parked p
    where p.queue = (lock_due.queue).id and p.vt <= lock_due.now
      and case when lock_due.conditional = '{}' then true else p.message @> lock_due.conditional end
    order by p.msg_id + 0 limit lock_due.wanted for update skip locked);
end $$;

-- Whether anything is to be looked at beside the log and parked messages that were never hidden: messages that are visible
-- again, and readings that ended.
create or replace function pgmq.is_disturbed(queue integer, now timestamptz)
returns boolean
language plpgsql
as $$
begin
  return exists (
      select from pgmq.parked p
      where p.queue = is_disturbed.queue and p.vt > '-infinity' and p.vt <= is_disturbed.now)
    or exists (select from pgmq.reading r where r.queue = is_disturbed.queue and r.vt <= is_disturbed.now);
end $$;

-- Reads at most qty messages and removes them from the queue. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.pop(queue_name text, qty integer default 1)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(pop.queue_name);
  now timestamptz := clock_timestamp();
  wanted integer := coalesce(pop.qty, 2147483647);
  due tid[];
  got integer := 0;
begin
  if wanted <= 0 then
    perform pgmq.assert_not_negative(wanted);
    return;
  end if;
  if pgmq.is_disturbed(asked.id, now) then
    due := pgmq.lock_due(asked, now, '{}', wanted);
    return query
    with popped as (
      delete from pgmq.parked p
      where p.ctid = any (due)
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
    )
    select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, pgmq.visible_from(h.vt, h.enqueued_at), h.message, h.headers
    from popped h order by h.msg_id;
  else
    return query
    with popped as (
      delete from pgmq.parked p
      where p.ctid = any (array(
        select waiting.ctid from pgmq.parked waiting
        where waiting.queue = asked.id and waiting.vt = '-infinity'
        order by waiting.msg_id limit wanted for update skip locked))
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.message, p.headers
    )
    select h.msg_id, h.read_ct, h.enqueued_at, h.last_read_at, h.enqueued_at, h.message, h.headers
    from popped h order by h.msg_id;
  end if;
  get diagnostics got = row_count;
  if got = wanted then
    return;
  end if;
  if pgmq.park_retried(asked.id) then
    return query select * from pgmq.pop(pop.queue_name, wanted - got);
  else
    return query select * from pgmq.read_log(asked, wanted - got, '{}', null, now, true);
  end if;
end $$;

-- Whether a read may find something. Takes no lock.
create or replace function pgmq.has_visible(queue pgmq.queue)
returns boolean
language plpgsql
as $$
begin
  return pgmq.is_disturbed((has_visible.queue).id, clock_timestamp())
    or exists (select from pgmq.parked p where p.queue = (has_visible.queue).id and p.vt = '-infinity')
    or exists (select from pgmb.retry t where t.queue = (has_visible.queue).id)
    or exists (select from pgmq.unread(has_visible.queue, 1));
end $$;

-- As read, but waits up to max_poll_seconds for a message, looking every poll_interval_ms. While it waits it holds up
-- no other reader. It returns nothing earlier where it passed a backlog that gave nothing: the caller commits how far it
-- came, and reads again. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.read_with_poll(
  queue_name text, vt integer, qty integer, max_poll_seconds integer default 5, poll_interval_ms integer default 100,
  conditional jsonb default '{}'
)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select * from pgmq.poll(
    'select * from pgmq.read($1, $2, $3, $4)', queue_name, vt, qty, max_poll_seconds, poll_interval_ms, conditional);
end $$;

-- How many messages of the log a read that gives nothing must have passed for its progress to be kept: to pass fewer again
-- costs less than to return to the caller for that alone.
create or replace function pgmq.worth_keeping()
returns integer
language sql immutable
as $$
  select 500
$$;

-- Runs a reading statement until it gives something, the time is over, or its progress in the log is worth keeping.
create or replace function pgmq.poll(
  statement text, queue_name text, vt integer, qty integer, max_poll_seconds integer, poll_interval_ms integer,
  conditional jsonb default null
)
returns setof pgmq.message_record
language plpgsql
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(queue_name);
  stop_at timestamptz := clock_timestamp() + make_interval(secs => max_poll_seconds);
  reached bigint;
begin
  while clock_timestamp() < stop_at loop
    if pgmq.has_visible(asked) then
      reached := pgmb_internal.reached(c) from pgmb_internal.queue_position(asked.id) c;
      begin
        return query execute statement using queue_name, vt, qty, conditional;
        if found or (
          select pgmb_internal.reached(c) >= reached + pgmq.worth_keeping() from pgmb_internal.queue_position(asked.id) c)
        then
          return;
        end if;
        -- Another session was first. Rolling back releases the queue's lock, for which others wait.
        raise exception 'nothing read' using errcode = 'MB099';
      exception when sqlstate 'MB099' then
        null;
      end;
    end if;
    perform pg_sleep(greatest(least(poll_interval_ms / 1000.0, extract(epoch from stop_at - clock_timestamp())), 0));
  end loop;
end $$;
