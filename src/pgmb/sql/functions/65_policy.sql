-- Receiving from queues that are more than plain: ordered by key, limited, with a time to live, a length or
-- lanes. The same claims as receive makes, by one longer way.

-- Where a window of `size` numbers above `place` ends, at most at `upto`. Numbers jump from segment to segment:
-- what lies between is passed over. Internal.
create or replace function pgmb.window_end(stream integer, place bigint, upto bigint, size integer)
returns bigint
language plpgsql
as $$
declare
  seg bigint;
  last bigint;
begin
  loop
    if place >> 40 >= upto >> 40 then
      return least(place + size, upto);
    end if;
    select g.number into seg from pgmb.segment g
    where g.stream = window_end.stream and g.number >= place >> 40 and g.dropped_at is null
    order by g.number limit 1;
    if seg is null or seg >= upto >> 40 then
      place := (upto >> 40) << 40;
      continue;
    end if;
    place := greatest(place, seg << 40);
    execute 'select coalesce(max(e.seq), 0) from pgmb.segment_' || stream || '_' || seg || ' e' into last;
    if place < last then
      return least(place + size, last);
    end if;
    place := (seg + 1) << 40;
  end loop;
end $$;

-- The leases of a queue that are still in flight, out of those that its position names, how many events they
-- and the leased retries hold, which keys, and since when the youngest of them. Internal.
create or replace function pgmb.in_flight(
  queue integer, named bigint[], now timestamptz, out open bigint[], out events bigint, out keys integer[],
  out youngest timestamptz
)
language plpgsql
as $$
#variable_conflict use_column
begin
  select array_agg(c.id),
    coalesce(sum(c.events - (select count(*) from pgmb.settlement s where s.queue = c.queue and s.claim = c.id)), 0),
    max(c.at)
  into open, events, youngest
  from unnest(in_flight.named) one
  join pgmb.claim c on c.queue = in_flight.queue and c.id = one
  where c.state in ('l', 'o');
  keys := array(
    select distinct one from pgmb.claim c, unnest(c.keys) one
    where c.queue = in_flight.queue and c.id = any (in_flight.open) and one <> 0);
  events := events + (
    select count(*) from pgmb.retry r
    where r.queue = in_flight.queue and r.lease is not null and r.due_at > in_flight.now);
end $$;

-- As receive_due, in an ordered queue: of each key the first event that waits, if it is due and no lease holds
-- the key, and those behind it. Internal.
create or replace function pgmb.receive_due_in_order(
  queue integer, max integer, now timestamptz, expires_at timestamptz, max_attempts integer, busy integer[]
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
#variable_conflict use_column
declare
  given uuid := pgmb.retry_lease(queue);
begin
  perform pgmb.bury_spent(queue, max, now, max_attempts);
  return query
  with head as materialized (
    select later.id, later.key, later.due_at, later.origin, later.seq,
      pgmb.comes_alone(later, receive_due_in_order.max_attempts) alone
    from pgmb.retry later
    where later.queue = receive_due_in_order.queue and later.due_at <= receive_due_in_order.now
      and (later.lease is null or later.attempt < receive_due_in_order.max_attempts)
      and (later.key is null or (
        pgmb.key_hash(later.key) <> all (receive_due_in_order.busy)
        and not exists (
          select from pgmb.retry ahead
          where ahead.queue = later.queue and ahead.ordered and ahead.key = later.key
            and (ahead.origin, ahead.seq) < (later.origin, later.seq))))
    order by later.due_at
    limit receive_due_in_order.max
    for update skip locked
  ), chosen as (
    select c.id, c.key, c.origin, c.seq, c.due_at
    from (
      select h.*, row_number() over w place, bool_or(h.alone) over w stopped
      from head h
      window w as (order by h.due_at, h.id)) c
    where c.place = 1 or not c.stopped
  ), behind as (
    select b.id, c.due_at, b.origin, b.seq
    from chosen c
    cross join lateral (
      select r.id, r.origin, r.seq, bool_and(r.lease is null) over (order by r.origin, r.seq) free
      from (
        select * from pgmb.retry one
        where one.queue = receive_due_in_order.queue and one.ordered and one.key = c.key
          and (one.origin, one.seq) > (c.origin, c.seq)
        order by one.origin, one.seq
        limit receive_due_in_order.max) r) b
    where b.free and not exists (select from head h where h.alone)
  ), taken as (
    select t.id
    from (
      select c.id, c.due_at, c.origin, c.seq from chosen c
      union all
      select b.id, b.due_at, b.origin, b.seq from behind b) t
    -- Heads first sort before what is behind them: a limit never parts a key's first from its second.
    order by t.due_at, t.origin, t.seq
    limit receive_due_in_order.max
  ), leased as (
    update pgmb.retry r
    set attempt = r.attempt + case when r.lease is null then 0 else 1 end,
      error = case when r.lease is null then r.error else 'lease expired' end,
      expiries = r.expiries + case when r.lease is null then 0 else 1 end,
      lease = given, due_at = receive_due_in_order.expires_at
    from taken
    where r.id = taken.id
    returning r.*
  )
  select given, l.seq, l.event_id, l.topic, l.key, l.payload, l.headers, l.published_at, l.attempt
  from leased l
  order by l.origin, l.seq;
end $$;

-- How many events of a batch match, counted from its newest down to at most `most`, and the number of the last
-- one counted. Internal.
create or replace function pgmb.count_newest(
  stream integer, done pg_snapshot, batch pg_snapshot, lo bigint, hi bigint, matching text, most bigint,
  out counted bigint, out first bigint
)
language plpgsql
as $$
declare
  leaf text;
  part record;
begin
  counted := 0;
  for leaf in
    select 'pgmb.segment_' || s.stream || '_' || s.number from pgmb.segment s
    where s.stream = count_newest.stream and s.number between lo >> 40 and hi >> 40 and s.dropped_at is null
    order by s.number desc
  loop
    exit when counted >= most;
    execute 'select count(*) counted, min(seq) first from (' || pgmb.main_part(leaf, 'e.seq', matching)
        || ' desc limit $7) newest'
      into part using lo, hi, batch, pg_snapshot_xmin(batch), done, pg_snapshot_xmax(done), most - counted;
    counted := counted + part.counted;
    first := coalesce(part.first, first);
  end loop;
end $$;

-- Passes over the oldest events of a queue that holds more than its length allows. Returns its position.
-- Internal.
create or replace function pgmb.drop_oldest(queue pgmb.queue, base pgmb.claim)
returns pgmb.claim
language plpgsql
as $$
declare
  last bigint := pgmb.last_seq((queue).stream_name);
  present pg_snapshot := pgmb.snapshot();
  fresh record;
  older record;
begin
  -- Some more than allowed are let be: the look is not worth it for one or two.
  if pgmb.numbers_between((queue).stream,
    case when base.place >= base.upto then base.batch_seq else greatest(base.place, base.done_seq) end, last)
    <= (queue).max_length + (queue).max_length / 20
  then
    return base;
  end if;
  fresh := pgmb.count_newest((queue).stream, base.batch_snapshot, present, base.batch_seq, last,
    (queue).matching || pgmb.without_own(base.own, base.own_seq), (queue).max_length);
  if fresh.counted >= (queue).max_length then
    base.done_snapshot := base.batch_snapshot;
    base.done_seq := base.batch_seq;
    base.done_next := base.batch_next;
    base.batch_snapshot := present;
    base.upto := last;
    base.place := fresh.first - 1;
  elsif base.place < base.upto then
    older := pgmb.count_newest((queue).stream, base.done_snapshot, base.batch_snapshot, greatest(base.place, base.done_seq),
      base.upto, (queue).matching || pgmb.without_own(base.own, base.own_seq), (queue).max_length - fresh.counted);
    if older.counted >= (queue).max_length - fresh.counted then
      base.place := older.first - 1;
    end if;
  end if;
  return base;
end $$;

-- What receive does for a queue that is not plain: asks its lanes in turn. entry_xid, noted: as receive found
-- them. Internal.
create or replace function pgmb.receive_by_policy(
  queue integer, entry_xid xid8, noted bigint, max integer, lease_for interval
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
#variable_conflict use_column
declare
  lanes pgmb.queue[] := array(
    select l from pgmb.queue l
    where l.id = receive_by_policy.queue or l.lane_of = receive_by_policy.queue order by l.lane);
begin
  -- One call in eight begins at the other end: nothing waits for ever.
  if cardinality(lanes) > 1 and random() < 0.125 then
    lanes := array(select one from unnest(lanes) one order by one.lane desc);
  end if;
  for lane in 1 .. cardinality(lanes) loop
    return query select * from pgmb.receive_lane(lanes[lane], entry_xid, noted, max, lease_for);
    if found then
      return;
    end if;
  end loop;
end $$;

-- The next events of a queue, or of one of its lanes, within its limits. A transaction's own events come once it
-- has committed. Internal.
create or replace function pgmb.receive_lane(
  q pgmb.queue, entry_xid xid8, noted bigint, max integer, lease_for interval
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
#variable_conflict use_column
declare
  base pgmb.claim := pgmb.lock_queue(q.id);
  now timestamptz := clock_timestamp();
  flight record;
  swept record;
  burst interval;
  allowed bigint := max;
  pending boolean := false;                  -- the position moved enough to be worth writing
  opened boolean := false;
  got bigint := 0;
  lo bigint;
  hi bigint;
  rows pgmb.event[];
  picked record;
  token bigint := (random() * 281474976710655)::bigint;
begin
  base.swept := least(base.swept, now);
  if now > base.swept + interval '50 milliseconds' or base.held is not null then
    swept := pgmb.sweep(q.id, base, now);
    base.swept := swept.swept;
    base.held := swept.held;
    pending := swept.examined >= 64;
    perform pgmb.release_due(q.stream_name, now);
  end if;

  flight := pgmb.in_flight(q.id, base.open, now);
  base.open := flight.open;
  allowed := least(allowed, q.max_in_flight - flight.events);
  if q.rps is not null then
    -- What was not used lately may be used at once: as much as a quarter of a second gives, at least one.
    burst := interval '1 second' * greatest(0.25, 1 / q.rps);
    base.paid_until := greatest(base.paid_until, now - burst);
    allowed := least(allowed, floor(extract(epoch from now - base.paid_until) * q.rps + 0.000001));
  end if;

  if allowed > 0 and exists (select from pgmb.retry r where r.queue = q.id and r.due_at <= now) then
    if q.ordered then
      return query select * from pgmb.receive_due_in_order(
        q.id, allowed::integer, now, now + lease_for, q.max_attempts, flight.keys);
    else
      return query select * from pgmb.receive_due(q.id, allowed::integer, now, now + lease_for, q.max_attempts);
    end if;
    get diagnostics got = row_count;
    if got > 0 then
      base.paid_until := base.paid_until + interval '1 second' * (got / q.rps);
      if pending or q.rps is not null then
        perform pgmb.write_claim(base, 0, 'p', q.bindings, 0, base.place, base.place, 'infinity');
      end if;
      return;
    end if;
  end if;

  if q.max_length is not null and q.when_full = 'drop_oldest' then
    picked := pgmb.drop_oldest(q, base);
    pending := pending or picked.place <> base.place;
    opened := picked.batch_snapshot::text <> base.batch_snapshot::text;
    base := picked;
  end if;

  -- A few windows at most: what a filter or busy keys leave over of each may be little.
  for turn in 1 .. 5 loop
    exit when allowed <= 0;
    if base.place >= base.upto then
      exit when opened;
      opened := true;
      if base.own is not null and pg_visible_in_snapshot(base.own, base.batch_snapshot) then
        base.own := null;
        base.own_seq := null;
      end if;
      base.done_snapshot := base.batch_snapshot;
      base.done_seq := base.batch_seq;
      base.done_next := base.batch_next;
      base.batch_snapshot := pgmb.snapshot();
      base.upto := greatest(pgmb.last_seq(q.stream_name), base.done_seq);
      base.place := 0;
      pending := pending or base.upto - base.done_seq >= 64;
    end if;
    lo := base.place;
    hi := pgmb.window_end(q.stream, greatest(base.place, base.done_seq), base.upto, 5000);
    rows := array(
      select e from pgmb.batch_events(q.stream, base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot,
        base.own, base.own_seq, base.place, hi, q.matching, allowed * case when q.ordered then 2 else 1 end) e);
    picked := pgmb.pick(q, base.id + 1, rows, flight.keys, flight.youngest, allowed, now);
    if picked.upto is null then
      base.place := case
        when cardinality(rows) < allowed * case when q.ordered then 2 else 1 end then hi
        else rows[cardinality(rows)].seq end;
    else
      base.place := picked.upto;
    end if;
    got := cardinality(picked.taken);
    exit when picked.waits;
    pending := pending or cardinality(rows) > 0 or base.place - lo >= 64;
    exit when got > 0;
  end loop;

  if opened and entry_xid is null and (got > 0 or pending) then
    base.batch_next := greatest((pg_current_xact_id()::text::bigint - 1)::text::xid8, base.batch_next);
    base.batch_seq := greatest(noted, base.batch_seq);
  end if;
  if got > 0 then
    base.paid_until := base.paid_until + interval '1 second' * (got / q.rps);
    insert into pgmb.settlement (queue, claim, seq)
    select q.id, base.id + 1, one from unnest(picked.expired) one;
    base.open := base.open || (base.id + 1);
    perform pgmb.write_claim(base, token, 'l', q.bindings, got + cardinality(picked.expired), lo, base.place,
      now + lease_for, picked.keys);
    return query
    select pgmb.lease_of(q.id, base.id + 1, token), r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at, 1
    from unnest(rows) r
    where r.seq = any (picked.taken)
    order by r.seq;
  elsif pending then
    perform pgmb.write_claim(base, 0, 'p', q.bindings, 0, base.place, base.place, 'infinity');
  end if;
end $$;

-- Which of the events read are to be delivered now: `taken`. Those older than the queue lets them live become dead
-- letters, `expired`. In an ordered queue those whose key is held wait in pgmb.retry, behind what holds it;
-- `keys` are the hashes of those taken, and `upto`, if the limit cut it short, the number up to which this
-- has looked. `waits`: all were of keys that leases just given hold, which will soon be free: nothing was moved.
-- Internal.
create or replace function pgmb.pick(
  q pgmb.queue, claim bigint, rows pgmb.event[], busy integer[], youngest timestamptz, allowed bigint, now timestamptz,
  out taken bigint[], out expired bigint[], out keys integer[], out upto bigint, out waits boolean
)
language plpgsql
as $$
#variable_conflict use_variable
declare
  parked bigint[];
begin
  waits := false;
  expired := array(select r.seq from unnest(rows) r where r.published_at + q.ttl <= now);
  if q.ordered then
    with judged as (
      select r.seq, r.place, pgmb.key_hash(r.key) held,
        r.key is not null and (pgmb.key_hash(r.key) = any (busy) or exists (
          select from pgmb.retry waiting
          where waiting.queue = q.id and waiting.ordered and waiting.key = r.key)) behind
      from unnest(rows) with ordinality r (seq, id, topic, key, payload, headers, published_at, place)
      where r.seq <> all (expired)
    ), counted as (
      select j.*, count(*) filter (where not j.behind) over (order by j.place) free
      from judged j
    )
    select array_agg(c.seq) filter (where not c.behind), array_agg(c.seq) filter (where c.behind),
      array_agg(distinct c.held) filter (where not c.behind),
      case when count(*) filter (where not c.behind) = allowed then max(c.seq) filter (where not c.behind) end
    into taken, parked, keys, upto
    from counted c
    where c.free < allowed or (c.free = allowed and not c.behind);
    taken := coalesce(taken, '{}');
    if cardinality(taken) = 0 and parked is not null and youngest > now - interval '100 milliseconds' then
      waits := true;
      parked := null;
    end if;
    expired := array(select one from unnest(expired) one where upto is null or one <= upto);
  else
    taken := array(select r.seq from unnest(rows) r where r.seq <> all (expired));
  end if;
  if waits then
    -- The position stays where it is.
    upto := rows[1].seq - 1;
    expired := '{}';
    return;
  end if;
  perform pgmb.fail_event(q, r, claim, 0, now, 'expired: older than ' || q.ttl, true)
  from unnest(rows) r where r.seq = any (expired);
  if parked is not null then
    insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, key, payload, headers, published_at, ordered, origin)
    select q.id, coalesce((
        select greatest(first.due_at, now) from pgmb.retry first
        where first.queue = q.id and first.ordered and first.key = r.key
        order by first.origin, first.seq limit 1), now),
      1, r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at, true, claim
    from unnest(rows) r
    where r.seq = any (parked);
  end if;
end $$;
