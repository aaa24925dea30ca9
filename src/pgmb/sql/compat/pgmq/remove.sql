-- Deleting, archiving and hiding messages by their numbers, wherever they are: parked, held by a reading, or not read
-- by anybody yet.

-- Those of the given messages that are unread, by a queue's position.
create or replace function pgmq.unread_of(queue pgmq.queue, at pgmb.claim, numbers bigint[])
returns bigint[]
language plpgsql
as $$
declare
  unread bigint[];
begin
  execute 'select array_agg(e.seq) from ' || (queue).log || ' e where e.seq = any ($1)
            and not pgmb_internal.is_passed($2, e.seq, e.xid)
      and not exists (select from pgmq.passed_over o where o.queue = $3 and o.msg_id = e.seq)'
  into unread using numbers, at, (queue).id;
  return coalesce(unread, '{}');
end $$;

-- Takes unread messages out of the log's way and returns their numbers. moved: another session read one of
-- them meanwhile. Lock: the queue's, if there are any.
create or replace function pgmq.pass_over(queue pgmq.queue, numbers bigint[], out passed bigint[], out moved boolean)
language plpgsql
set lock_timeout = '1s'
as $$
declare
  candidates bigint[];
begin
  moved := false;
  passed := '{}';
  select pgmq.unread_of(pass_over.queue, c, numbers) into candidates
  from pgmb.claim c where c.queue = (pass_over.queue).id order by c.id desc limit 1;
  if cardinality(candidates) = 0 then
    return;
  end if;
  passed := pgmq.unread_of(pass_over.queue, pgmb_internal.lock_queue((pass_over.queue).id), candidates);
  moved := cardinality(passed) < cardinality(candidates);
  insert into pgmq.passed_over (queue, msg_id) select (pass_over.queue).id, unnest(passed) on conflict do nothing;
end $$;

-- What the log has of messages, as those of a reading, or of none.
create or replace function pgmq.from_log(queue pgmq.queue, numbers bigint[], reading pgmq.reading)
returns setof pgmq.message_record
language plpgsql
as $$
begin
  return query execute 'select e.seq, case when $3 is null then 0 else 1 end, e.published_at, $3,
      coalesce($4, e.published_at), e.payload::jsonb, e.headers::jsonb
    from ' || (from_log.queue).log || ' e where e.seq = any ($1) and e.seq between $2[1] and $2[2]'
  using numbers, array[(select min(i) from unnest(numbers) i), (select max(i) from unnest(numbers) i)],
    (from_log.reading).read_at, (from_log.reading).vt;
end $$;

-- The reading that holds exactly these messages, if there is one and its claim is not settled.
create or replace function pgmq.reading_of(queue integer, numbers bigint[])
returns pgmq.reading
language plpgsql
as $$
declare
  held pgmq.reading;
  part record;
begin
  select * into held from pgmq.reading r
  where r.queue = reading_of.queue and r.lo < numbers[1] order by r.lo desc limit 1;
  if held.events is distinct from cardinality(numbers) then
    return null;
  end if;
  if held.ids is null then
    -- As read gives them, or in any order.
    if numbers <> array(select generate_series(held.lo + 1, held.hi)) then
      select count(distinct i) distinct_numbers, min(i) first, max(i) last into part from unnest(numbers) i;
      if part.distinct_numbers <> held.events or part.first <= held.lo or part.last > held.hi then
        return null;
      end if;
    end if;
  elsif not (numbers @> held.ids) then
    return null;
  end if;
  if not exists (
    select from pgmb.claim c
    where c.queue = held.queue and c.id = held.claim and c.token = held.token and pgmb_internal.is_leased(c.state))
  then
    return null;
  end if;
  if exists (
    select from pgmb.generation n
    where n.queue = held.queue and n.number > pgmb_internal.generation_of(held.claim) and (n.base is not null or n.xmax <> '0'::xid))
    and pgmb_internal.may_be_void(held.queue, held.claim)
  then
    return null;
  end if;
  return held;
end $$;

-- Settles the reading that holds exactly these messages. taken: those that were not settled before; null if there is no
-- such reading.
create or replace function pgmq.take_whole(queue integer, numbers bigint[], out reading pgmq.reading, out taken bigint[])
language plpgsql
as $$
declare
  ended bigint;
begin
  reading := pgmq.reading_of(queue, numbers);
  if reading.queue is null then
    return;
  end if;
  ended := pgmq.end_reading(reading);
  if ended = reading.events then
    taken := numbers;
  elsif ended = 0 then
    -- Another session settled the claim meanwhile, which leaves no rows in pgmb.settlement.
    taken := '{}';
  elsif ended is not null then
    taken := array(
      select i from unnest(numbers) i
      where not exists (
        select from pgmb.settlement s
        where s.queue = (take_whole.reading).queue and s.claim = (take_whole.reading).claim and s.seq = i));
  end if;
end $$;

-- Removes messages from a queue, wherever they are, and returns those that were in it; content: with all their columns.
create or replace function pgmq.take(queue pgmq.queue, numbers bigint[], content boolean)
returns setof pgmq.message_record
language plpgsql
as $$
declare
  held pgmq.reading;
  claimed pgmb.claim;
  settled bigint[];
  rest bigint[];
  passing record;
begin
  rest := array(select distinct i from unnest(numbers) i where i is not null order by i);
  loop
    for passing in
      delete from pgmq.parked p where p.queue = (take.queue).id and p.msg_id = any (rest)
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, pgmq.visible_from(p.vt, p.enqueued_at) vt, p.message,
        p.headers
    loop
      rest := array_remove(rest, passing.msg_id);
      return next passing;
    end loop;
    for held in
      select * from pgmq.reading r
      where r.queue = (take.queue).id and r.lo < rest[cardinality(rest)] and r.hi >= rest[1]
      order by r.lo desc
    loop
      exit when cardinality(rest) = 0;
      settled := array(select i from unnest(rest) i where i > held.lo and i <= held.hi and (held.ids is null or i = any (held.ids)));
      continue when cardinality(settled) = 0;
      -- Keeps a read from taking it apart meanwhile.
      perform from pgmq.reading r where r.queue = held.queue and r.lo = held.lo and r.claim = held.claim for key share;
      continue when not found;
      if (pgmq.claim_of(held)).id is null then
        continue;
      end if;
      claimed := pgmb_internal.hold_claim(pgmq.lease(held), 'key share');
      continue when claimed.id is null;
      settled := pgmb_internal.settle_claim(claimed, settled);
      if content then
        return query select * from pgmq.from_log(take.queue, settled, held);
      else
        return query
        select i, null::integer, null::timestamptz, null::timestamptz, null::timestamptz, null::jsonb, null::jsonb from unnest(settled) i;
      end if;
      rest := array(select i from unnest(rest) i where i <> all (settled) order by i);
      -- The last of a reading is often the last to be settled: then it is over.
      if held.hi = any (settled) or held.events = 1 then
        perform pgmq.end_settled(held);
      end if;
    end loop;
    exit when cardinality(rest) = 0;
    select * into passing from pgmq.pass_over(take.queue, rest);
    if content then
      return query select * from pgmq.from_log(take.queue, passing.passed, null);
    else
      return query
      select i, null::integer, null::timestamptz, null::timestamptz, null::timestamptz, null::jsonb, null::jsonb from unnest(passing.passed) i;
    end if;
    rest := array(select i from unnest(rest) i where i <> all (passing.passed) order by i);
    exit when not passing.moved or cardinality(rest) = 0;
  end loop;
end $$;

-- Ends a reading whose messages were all settled one by one.
create or replace function pgmq.end_settled(reading pgmq.reading)
returns void
language plpgsql
as $$
begin
  -- A claim of one message is settled itself and has no rows in pgmb.settlement.
  if exists (
    select from pgmb.claim c
    where c.queue = (end_settled.reading).queue and c.id = (end_settled.reading).claim
      and (c.state = 'settled' or c.events <= (
        select count(*) from pgmb.settlement s where s.queue = c.queue and s.claim = c.id)))
  then
    -- Not waiting for others who settle messages of it.
    perform from pgmq.reading r
    where r.queue = (end_settled.reading).queue and r.lo = (end_settled.reading).lo and r.claim = (end_settled.reading).claim
    for update skip locked;
    if found then
      perform pgmq.end_reading(end_settled.reading);
    end if;
  end if;
end $$;

-- Deletes messages and returns the numbers of those that were in the queue. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.delete(queue_name text, msg_ids bigint[])
returns setof bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(queue_name);
  whole record;
  deleted integer;
begin
  -- What small reads gave is parked; what a large one gave, a reading holds.
  if cardinality(msg_ids) < 20 then
    return query
    delete from pgmq.parked p where p.queue = asked.id and p.msg_id = any (delete.msg_ids) returning p.msg_id;
    get diagnostics deleted = row_count;
    if deleted = cardinality(msg_ids) then
      return;
    end if;
  end if;
  whole := pgmq.take_whole(asked.id, msg_ids);
  if whole.taken is not null then
    return query select unnest(whole.taken);
  else
    return query select t.msg_id from pgmq.take(asked, msg_ids, false) t;
  end if;
end $$;

-- Deletes a message. True if it was in the queue. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.delete(queue_name text, msg_id bigint)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(queue_name);
begin
  delete from pgmq.parked p where p.queue = asked.id and p.msg_id = delete.msg_id;
  return found or exists (select from pgmq.take(asked, array[delete.msg_id], false));
end $$;

-- Moves messages to the archive, pgmq.a_<name>, and returns the numbers of those that were in the queue. Errors: 42P01
-- no such queue, 42501.
create or replace function pgmq.archive(queue_name text, msg_ids bigint[])
returns setof bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(queue_name);
  inserting text := 'insert into ' || asked.archive || ' as a (msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers) ';
  parked pgmq.message_record[];
  whole record;
begin
  -- As delete.
  if cardinality(msg_ids) < 20 then
    with gone as (
      delete from pgmq.parked p where p.queue = asked.id and p.msg_id = any (archive.msg_ids)
      returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, pgmq.visible_from(p.vt, p.enqueued_at) vt,
        p.message, p.headers
    )
    select array_agg(g::pgmq.message_record) into parked
    from (select g.msg_id, g.read_ct, g.enqueued_at, g.last_read_at, g.vt, g.message, g.headers from gone g) g;
    if parked is not null then
      return query execute inserting || 'select m.* from unnest($1) m returning a.msg_id' using parked;
    end if;
    if cardinality(parked) = cardinality(msg_ids) then
      return;
    end if;
  end if;
  whole := pgmq.take_whole(asked.id, msg_ids);
  if whole.taken is not null then
    return query execute inserting || 'select e.seq, 1, e.published_at, $1, $2, e.payload::jsonb, e.headers::jsonb
      from ' || asked.log || ' e where e.seq > $3 and e.seq <= $4'
      -- The whole range, or some of it.
      || case when cardinality(whole.taken) = (whole.reading).hi - (whole.reading).lo then '' else ' and e.seq = any ($5)' end
      || ' returning a.msg_id'
    using (whole.reading).read_at, (whole.reading).vt, (whole.reading).lo, (whole.reading).hi, whole.taken;
  else
    return query execute inserting || 'select t.msg_id, t.read_ct, t.enqueued_at, t.last_read_at, t.vt, t.message, t.headers
      from pgmq.take($1, $2, true) t returning a.msg_id'
    using asked, msg_ids;
  end if;
end $$;

-- Moves a message to the archive. True if it was in the queue. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.archive(queue_name text, msg_id bigint)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from pgmq.archive(archive.queue_name, array[archive.msg_id]));
end $$;

-- Hides messages until vt, or shows them at once if it has passed, and returns those that are in the queue. A whole
-- read is hidden with one row. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt timestamptz)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(set_vt.queue_name);
  held pgmq.reading := pgmq.reading_of(asked.id, set_vt.msg_ids);
  rest bigint[];
  passing pgmq.message_record;
begin
  if set_vt.vt is null then
    raise exception 'vt must not be null' using errcode = '23502';
  end if;
  if held.queue is not null then
    update pgmq.reading r set vt = set_vt.vt
    where r.queue = held.queue and r.lo = held.lo and r.claim = held.claim;
    if found then
      held.vt := set_vt.vt;
      return query
      select l.* from pgmq.from_log(asked, set_vt.msg_ids, held) l
      where not exists (
        select from pgmb.settlement s where s.queue = held.queue and s.claim = held.claim and s.seq = l.msg_id);
      return;
    end if;
  end if;
  rest := array(select distinct i from unnest(set_vt.msg_ids) i where i is not null order by i);
  for passing in
    update pgmq.parked p set vt = set_vt.vt where p.queue = asked.id and p.msg_id = any (rest)
    returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
  loop
    rest := array_remove(rest, passing.msg_id);
    return next passing;
  end loop;
  if cardinality(rest) > 0 then
    return query
    insert into pgmq.parked as p (queue, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers, fifo)
    select asked.id, t.msg_id, t.read_ct, t.enqueued_at, t.last_read_at, set_vt.vt, t.message, t.headers,
      pgmq.fifo_of(t.headers)
    from pgmq.take(asked, rest, true) t
    returning p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers;
  end if;
end $$;

create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt integer)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.set_vt(queue_name, msg_ids, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => vt))
$$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt timestamptz)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.set_vt(queue_name, array[msg_id], vt)
$$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt integer)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.set_vt(queue_name, array[msg_id], pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => vt))
$$;
