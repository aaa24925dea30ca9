-- Leases in flight, for queues that limit or order: how many events they hold, and which keys.
--
-- A receive reads the newest claims alone, those after `noted` of its position (see pgmb.flight). Older leases that are still
-- in flight are noted: as rows of pgmb.noted_lease and, by key, of pgmb.noted_key. So a receive costs the same however many
-- leases there are. Events of noted leases are counted as they were when last looked at: no more than that are in flight, and
-- where this leaves too little room, some leases are looked at again. Whoever acks, retries or extends writes nothing here.
--
-- All of this runs under the queue's lock. Rows of both tables are only valid together with the position that was written with
-- them: a transaction that is superseded after it wrote them cannot commit (pgmb_internal.recheck_at_commit).

-- How many claims a receive reads at most, by and large, and how many of them it passes when there are more.
create or replace function pgmb_internal.recent_claims()
returns integer
language sql immutable parallel safe
as $$
  select 32
$$;

-- How many events of a lease are in flight; 0 if it ended.
create or replace function pgmb_internal.events_left(queue integer, claim bigint)
returns bigint
language plpgsql stable
as $$
declare
  held record;
begin
  select c.state, c.events into held from pgmb.claim c
  where c.queue = events_left.queue and c.id = events_left.claim limit 1;
  if held.state = 'leased_retries' then
    return (select count(*) from pgmb.retry r where r.queue = events_left.queue and r.lease = events_left.claim);
  elsif held.state = 'leased' then
    return held.events - (
      select count(*) from pgmb.settlement s where s.queue = events_left.queue and s.claim = events_left.claim);
  end if;
  return 0;
end $$;

-- The leases in flight among the newest claims of a queue that is at `base`: how many events they hold, the oldest of them, since
-- when the youngest is held (a time that has not come was written while the clock was ahead, and says nothing), and the hashes of
-- their keys if `ordered`. Of a lease that has expired the keys are still held, but its events count no more.
create or replace function pgmb_internal.recent_leases(
  base pgmb.claim, now timestamptz, ordered boolean, out events bigint, out oldest bigint, out youngest timestamptz,
  out keys integer[]
)
language plpgsql stable
as $$
declare
  noted bigint := (base.flight).noted;
  open bigint[];
  retried bigint[];
begin
  with settled as materialized (
    select s.claim, count(*) events from pgmb.settlement s
    where s.queue = base.queue and s.claim > noted and s.claim <= base.id group by s.claim
  )
  select coalesce(sum(held.events) filter (where c.expires_at > recent_leases.now), 0), min(c.id),
    max(c.at) filter (where c.at <= recent_leases.now), array_agg(c.id),
    array_agg(c.id) filter (where c.state = 'leased_retries')
  into events, oldest, youngest, open, retried
  from pgmb.claim c
  cross join lateral (
    select case c.state
      when 'leased_retries' then (select count(*) from pgmb.retry r where r.queue = c.queue and r.lease = c.id)
      else c.events - coalesce((select s.events from settled s where s.claim = c.id), 0) end events) held
  where c.queue = base.queue and c.id > noted and c.id <= base.id
    and pgmb_internal.is_leased(c.state) and held.events > 0
    and (pgmb_internal.generation_of(c.id) = pgmb_internal.generation_of(base.id) or not pgmb_internal.is_void(c.queue, c.id));
  keys := '{}';
  if recent_leases.ordered and open is not null then
    select coalesce(array_agg(held.hash) filter (where held.hash <> 0), '{}') into keys
    from (
      -- The same walk again, not a look-up for each.
      select unnest(c.keys) hash from pgmb.claim c
      where c.queue = base.queue and c.id > noted and c.id <= base.id and c.id = any (open)
      union all
      select k.hash from unnest(retried) one cross join lateral pgmb_internal.keys_of_lease(base.queue, one) k (hash)) held;
  end if;
end $$;

-- The hashes of the keys that a lease in flight holds; none for events without a key.
create or replace function pgmb_internal.keys_of_lease(queue integer, claim bigint)
returns setof integer
language sql stable
as $$
  select hash
  from (
    select unnest(c.keys) hash from pgmb.claim c where c.queue = keys_of_lease.queue and c.id = keys_of_lease.claim
    union all
    -- No condition on r.ordered: planned while the table was empty, it would lead to another index.
    select case when r.ordered then pgmb_internal.key_hash(r.key) else 0 end from pgmb.retry r
    where r.queue = keys_of_lease.queue and r.lease = keys_of_lease.claim) held
  where hash <> 0
$$;

-- Whether a noted lease holds a key, by its hash. Of the leases that held a key in turn, only the newest can.
create or replace function pgmb_internal.is_noted(queue integer, flight pgmb.flight, hash integer)
returns boolean
language plpgsql stable
as $$
declare
  holder bigint;
begin
  select k.claim into holder from pgmb.noted_key k
  where k.queue = is_noted.queue and k.hash = is_noted.hash and k.claim >= (is_noted.flight).oldest
  order by k.claim desc limit 1;
  return holder is not null and pgmb_internal.events_left(is_noted.queue, holder) > 0
    and exists (select from pgmb_internal.keys_of_lease(is_noted.queue, holder) k (hash) where k.hash = is_noted.hash);
end $$;

-- Whether any lease is noted.
create or replace function pgmb_internal.has_noted(flight pgmb.flight)
returns boolean
language sql immutable parallel safe
as $$
  select (flight).next > (flight).first
$$;

-- Keeps the number of claims small that a receive reads: once there are more than recent_claims, the oldest half is passed, and
-- leases of it that are in flight are noted, in a position that is written for it. As many leases noted before are looked at:
-- what is left of them is noted again, so that the rows between `first` and `next` of a position stay as many as there are leases.
-- counts: the queue limits or orders.
create or replace function pgmb_internal.note_leases(base pgmb.claim, counts boolean)
returns pgmb.claim
language plpgsql
as $$
declare
  most constant integer := pgmb_internal.recent_claims() / 2;
  flight pgmb.flight := base.flight;
  passed record;
  looked record;
  appended record;
begin
  if not counts then
    base.flight := null;
    return base;
  elsif flight.noted is null then
    -- Leases given before are not known.
    base.flight := (base.id, 0, 0, 0, null)::pgmb.flight;
    return base;
  elsif base.id - flight.noted <= pgmb_internal.recent_claims() then
    return base;
  end if;
  select max(p.id) upto, array_agg(p.id order by p.id) filter (where p.events > 0) claims,
    array_agg(p.events order by p.id) filter (where p.events > 0) events
  into passed
  from (
    select c.id, case
      when pgmb_internal.generation_of(c.id) = pgmb_internal.generation_of(base.id) or not pgmb_internal.is_void(c.queue, c.id)
      then pgmb_internal.events_left(c.queue, c.id) else 0 end events
    from pgmb.claim c where c.queue = base.queue and c.id > flight.noted and c.id <= base.id order by c.id limit most) p;
  flight.noted := passed.upto;
  if passed.claims is null then
    base.flight := flight;
    return base;
  end if;
  select coalesce(max(n.nr) filter (where n.place = most), flight.next - 1) upto, sum(n.events) before,
    array_agg(n.claim order by n.nr) filter (where n.events_left > 0) claims,
    array_agg(n.events_left order by n.nr) filter (where n.events_left > 0) events
  into looked
  from (
    select old.nr, old.claim, old.events, pgmb_internal.events_left(base.queue, old.claim) events_left,
      row_number() over (order by old.nr) place
    from (
      select n.nr, n.claim, n.events from pgmb.noted_lease n
      where n.queue = base.queue and n.nr >= flight.first and n.nr < flight.next order by n.nr limit most) old) n;
  with rows as (
    insert into pgmb.noted_lease (queue, claim, events)
    select base.queue, one.claim, one.events
    from unnest(looked.claims || passed.claims, looked.events || passed.events) with ordinality one (claim, events, nth)
    order by one.nth
    returning noted_lease.nr, noted_lease.events
  ), keys as (
    insert into pgmb.noted_key (queue, hash, claim)
    select distinct base.queue, k.hash, one
    from unnest(passed.claims) one
    cross join lateral pgmb_internal.keys_of_lease(base.queue, one) k (hash)
  )
  select min(rows.nr) first, max(rows.nr) last, sum(rows.events) events into appended from rows;
  flight.events := flight.events - coalesce(looked.before, 0) + appended.events;
  flight.first := case when looked.upto < flight.next - 1 then looked.upto + 1 else appended.first end;
  flight.next := appended.last + 1;
  select min(n.claim) into flight.oldest from pgmb.noted_lease n
  where n.queue = base.queue and n.nr >= flight.first and n.nr < flight.next;
  base.flight := flight;
  perform pgmb_internal.write_position(base);
  base.id := base.id + 1;
  perform pgmb_internal.recheck_at_commit(base.queue, base.id);
  return base;
end $$;

-- How many events less are in flight in a queue, or a lane of it, than its position says, as far as a look at some of its noted
-- leases tells: any of them, so that others come next time. Writes what ended. Leases that have expired, but that no sweep has
-- ended yet, are not in flight either: their holder may extend them, so that they stay noted.
create or replace function pgmb_internal.recount_noted(q pgmb.queue, now timestamptz)
returns bigint
language plpgsql
as $$
declare
  most constant integer := 200;
  base pgmb.claim := pgmb_internal.lock_as_found(q);
  flight pgmb.flight := base.flight;
  start bigint := flight.first + floor(random() * (flight.next - flight.first));
  looked record;
  ended bigint := 0;
  expired bigint := 0;
begin
  if base.id is null or pgmb_internal.has_noted(flight) is not true then
    return 0;
  end if;
  for looked in
    select n.nr, n.claim, n.events, pgmb_internal.events_left(q.id, n.claim) events_left, exists (
      select from pgmb.claim c where c.queue = q.id and c.id = n.claim and c.expires_at <= recount_noted.now) expired
    from (
      (select n.nr, n.claim, n.events from pgmb.noted_lease n
      where n.queue = q.id and n.nr >= start and n.nr < flight.next order by n.nr limit most)
      union all
      (select n.nr, n.claim, n.events from pgmb.noted_lease n
      where n.queue = q.id and n.nr >= flight.first and n.nr < start order by n.nr limit most)
      limit most) n
  loop
    if looked.expired then
      expired := expired + looked.events_left;
    end if;
    continue when looked.events_left >= looked.events;
    -- A transaction that was superseded may have it locked: it cannot commit.
    delete from pgmb.noted_lease n
    where n.ctid = (
      select one.ctid from pgmb.noted_lease one where one.queue = q.id and one.nr = looked.nr for update skip locked);
    continue when not found;
    ended := ended + looked.events - looked.events_left;
    if looked.events_left > 0 then
      insert into pgmb.noted_lease (queue, claim, events) values (q.id, looked.claim, looked.events_left)
      returning nr + 1 into flight.next;
    end if;
  end loop;
  if ended > 0 then
    flight.events := flight.events - ended;
    base.flight := flight;
    perform pgmb_internal.write_position(base);
    perform pgmb_internal.recheck_at_commit(q.id, base.id + 1);
  end if;
  return ended + expired;
end $$;

-- How many more events of a queue with max_in_flight may be leased, at most `wanted`; null without a limit. Never more than that:
-- where noted leases leave too little room, some of them are looked at. The caller holds the lock of the head, and so no other
-- leases from a lane.
create or replace function pgmb_internal.room_in_flight(head pgmb.queue, lanes pgmb.queue[], wanted bigint, now timestamptz)
returns bigint
language plpgsql
as $$
declare
  room bigint := head.max_in_flight;
  newest pgmb.claim;
  lane pgmb.queue;
  noted pgmb.queue[];
begin
  if room is null then
    return null;
  end if;
  foreach lane in array lanes loop
    select * into newest from pgmb.claim c where c.queue = lane.id order by c.id desc limit 1;
    continue when (newest.flight).noted is null;
    room := room - (newest.flight).events - (pgmb_internal.recent_leases(newest, now, false)).events;
    if pgmb_internal.has_noted(newest.flight) then
      noted := noted || lane;
    end if;
  end loop;
  if noted is not null then
    foreach lane in array noted loop
      exit when room >= wanted;
      room := room + pgmb_internal.recount_noted(lane, now);
    end loop;
  end if;
  return least(room, wanted);
end $$;
