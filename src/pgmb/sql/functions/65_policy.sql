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
-- and the leased retries hold, which keys, and since when the youngest of them. A lease whose events were all
-- settled one by one is not; of one that has expired the keys are still held, but its events count no more.
-- Internal.
create or replace function pgmb.in_flight(
  queue integer, named bigint[], now timestamptz, out open bigint[], out events bigint, out keys integer[],
  out youngest timestamptz
)
language plpgsql
as $$
#variable_conflict use_column
begin
  if in_flight.named is null and not exists (
    select from pgmb.retry r
    where r.queue = in_flight.queue and r.lease is not null and r.due_at > in_flight.now)
  then
    events := 0;
    keys := '{}';
    return;
  end if;
  select array_agg(c.id), coalesce(sum(held.events) filter (where c.expires_at > in_flight.now), 0), max(c.at)
  into open, events, youngest
  from unnest(in_flight.named) one
  join pgmb.claim c on c.queue = in_flight.queue and c.id = one
  cross join lateral (
    select c.events - count(*) events from pgmb.settlement s where s.queue = c.queue and s.claim = c.id) held
  where c.state in ('l', 'o') and held.events > 0;
  select coalesce(array_agg(distinct held.hash) filter (where held.hash <> 0), '{}'),
    in_flight.events + count(*) filter (where held.retried),
    -- A retried event's lease began so long before its end, if neither was chosen otherwise.
    greatest(in_flight.youngest, max(held.since) filter (where held.since <= in_flight.now))
  into keys, events, youngest
  from (
    select one hash, false retried, null::timestamptz since from pgmb.claim c, unnest(c.keys) one
    where c.queue = in_flight.queue and c.id = any (in_flight.open)
    union all
    -- Also those of a key ahead of which a dead letter was put back.
    select case when r.ordered then pgmb.key_hash(r.key) else 0 end, true,
      r.due_at - (select q.lease_for from pgmb.queue q where q.id = in_flight.queue)
    from pgmb.retry r
    where r.queue = in_flight.queue and r.lease is not null and r.due_at > in_flight.now) held;
end $$;

-- As lease_due, in an ordered queue: of each key the first event that waits, if it is due and no lease holds
-- the key, and those behind it. Internal.
create or replace function pgmb.lease_due_in_order(
  queue integer, max integer, now timestamptz, expires_at timestamptz, max_attempts integer, busy integer[],
  out lease uuid, out events bigint
)
language plpgsql
as $$
#variable_conflict use_column
begin
  perform pgmb.bury_spent(queue, max, now, max_attempts);
  lease := pgmb.retry_lease(queue);
  with head as materialized (
    select later.id, later.key, later.due_at, later.origin, later.seq,
      pgmb.comes_alone(later, lease_due_in_order.max_attempts) alone
    from pgmb.retry later
    where later.queue = lease_due_in_order.queue and later.due_at <= lease_due_in_order.now
      and (later.lease is null or later.attempt < lease_due_in_order.max_attempts)
      and (later.key is null or (
        pgmb.key_hash(later.key) <> all (lease_due_in_order.busy)
        and not exists (
          select from pgmb.retry ahead
          where ahead.queue = later.queue and ahead.ordered and ahead.key = later.key
            and (ahead.origin, ahead.seq) < (later.origin, later.seq))))
    order by later.due_at
    limit lease_due_in_order.max
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
        where one.queue = lease_due_in_order.queue and one.ordered and one.key = c.key
          and (one.origin, one.seq) > (c.origin, c.seq)
        order by one.origin, one.seq
        limit lease_due_in_order.max) r) b
    where b.free and not exists (select from head h where h.alone)
  ), taken as (
    select t.id
    from (
      select c.id, c.due_at, c.origin, c.seq from chosen c
      union all
      select b.id, b.due_at, b.origin, b.seq from behind b) t
    -- Heads first sort before what is behind them: a limit never parts a key's first from its second.
    order by t.due_at, t.origin, t.seq
    limit lease_due_in_order.max
  ), leased as (
    update pgmb.retry r
    set attempt = r.attempt + case when r.lease is null then 0 else 1 end,
      error = case when r.lease is null then r.error else 'lease expired' end,
      expiries = r.expiries + case when r.lease is null then 0 else 1 end,
      lease = lease_due_in_order.lease, due_at = lease_due_in_order.expires_at
    from taken
    where r.id = taken.id
    returning 1
  )
  select count(*) into events from leased;
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

-- What receive does for a queue that is not plain: asks its lanes in turn for a lease, within the limits of them
-- all. entry_xid, noted: as receive found them. Gives what pgmb.claim_lane gives. Internal.
create or replace function pgmb.claim_by_policy(
  queue integer, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out claim pgmb.claim, out matching text, out rows tid[]
)
language plpgsql
as $$
#variable_conflict use_variable
declare
  lanes pgmb.queue[] := array(
    select l from pgmb.queue l
    where l.id = claim_by_policy.queue or l.lane_of = claim_by_policy.queue order by l.lane);
  head pgmb.queue := lanes[1];
  base pgmb.claim;
  lane pgmb.queue;
  passed_over pgmb.queue;
  locked_upto integer := -1;
  passing boolean;
  now timestamptz;
  paid timestamptz;
  claimed record;
begin
  select null::uuid lease, null::pgmb.claim claim, null matching, null::tid[] rows into claimed;
  if head.max_in_flight is not null or head.rps is not null then
    -- One after another: a limit is everybody's.
    base := pgmb.lock_queue(head.id);
    now := clock_timestamp();
    max := least(max, pgmb.room_in_flight(head, lanes));
    if head.rps is not null then
      -- What was not used lately may be used at once: as much as a quarter of a second gives, at least one.
      paid := now - interval '1 second' * greatest(0.25, 1 / head.rps);
      -- Nothing is paid for in advance: where it seems so, the clock was set back.
      if base.paid_until > paid and base.paid_until < now + interval '1 second' then
        paid := base.paid_until;
      end if;
      max := least(max, floor(extract(epoch from now - paid) * head.rps + 0.000001));
    end if;
  end if;
  if max <= 0 then
    return;
  end if;
  -- Shards are asked in any order, those that others are at passed over. But for one call in eight, which asks in
  -- order and waits, so that a long transaction in a shard is superseded. Who waits holds only shards before it.
  passing := head.shards > 1 and random() >= 0.125;
  if passing then
    lanes := array(select one from unnest(lanes) one order by random());
  elsif head.shards > 1 then
    null;
  elsif cardinality(lanes) > 1 and random() < 0.125 then
    -- One call in eight begins at the other end: nothing waits for ever. The first lane is locked first even so:
    -- of two that ask in opposite orders each would wait for the other.
    perform pgmb.lock_queue(head.id);
    lanes := array(select one from unnest(lanes) one order by one.lane desc);
  end if;
  foreach lane in array lanes loop
    if passing and not pgmb.try_queue(lane.id) then
      -- Another receives from it at this moment.
      passed_over := lane;
      continue;
    end if;
    locked_upto := greatest(locked_upto, lane.lane);
    claimed := pgmb.claim_lane(lane, entry_xid, noted, max, lease_for);
    exit when claimed.lease is not null;
  end loop;
  if claimed.lease is null and passed_over.id is not null
    and (pgmb.try_queue(passed_over.id) or passed_over.lane > locked_upto)
  then
    claimed := pgmb.claim_lane(passed_over, entry_xid, noted, max, lease_for);
  end if;
  lease := claimed.lease;
  claim := claimed.claim;
  matching := claimed.matching;
  rows := claimed.rows;
  if lease is not null and head.rps is not null then
    select * into base from pgmb.claim c where c.queue = head.id order by c.id desc limit 1;
    base.paid_until := paid + interval '1 second' * (claimed.events / head.rps);
    perform pgmb.write_claim(base, 0, 'p', head.bindings, 0, base.place, base.place, 'infinity');
  end if;
end $$;

-- Takes the queue's lock as pgmb.lock_queue does, but only if that is free. Internal.
create or replace function pgmb.try_queue(queue integer)
returns boolean
language sql volatile
as $$
  select pg_try_advisory_xact_lock(pgmb.queue_lock(try_queue.queue, newest.id >> 40))
  from (select c.id from pgmb.claim c where c.queue = try_queue.queue order by c.id desc limit 1) newest
$$;

-- How many events more may be leased of a queue that allows only so many in flight; null if it allows any number.
-- Internal.
create or replace function pgmb.room_in_flight(head pgmb.queue, lanes pgmb.queue[])
returns bigint
language sql volatile
as $$
  select (head).max_in_flight - sum((pgmb.in_flight(lane.id,
    (select c.open from pgmb.claim c where c.queue = lane.id order by c.id desc limit 1), clock_timestamp())).events)
  from unnest(lanes) lane
$$;

-- Leases the next events of a queue, or of one of its lanes, within its limits: retried ones, then fresh ones,
-- for which `claim`, `matching` and `rows` say what the lease holds. Null if there is nothing. A transaction's own
-- events come once it has committed. Internal.
create or replace function pgmb.claim_lane(
  q pgmb.queue, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out claim pgmb.claim, out matching text, out rows tid[], out events bigint
)
language plpgsql
as $$
#variable_conflict use_variable
declare
  base pgmb.claim := pgmb.lock_queue(q.id);
  now timestamptz := clock_timestamp();
  flight record;
  swept record;
  due record;
  picked record;
  trimmed pgmb.claim;
  taken bigint := 0;
  vacant integer := 0;                       -- windows in which nothing matched
  pending boolean := false;                  -- the position moved enough to be worth writing
  opened boolean := false;
  wrote boolean := false;                    -- rows that must not outlive a superseded claim
  lo bigint;
  hi bigint;
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
  if exists (select from pgmb.retry r where r.queue = q.id and r.due_at <= now) then
    if q.ordered then
      due := pgmb.lease_due_in_order(q.id, max, now, now + lease_for, q.max_attempts, flight.keys);
    else
      due := pgmb.lease_due(q.id, max, now, now + lease_for, q.max_attempts);
    end if;
    if due.events > 0 then
      lease := due.lease;
      events := due.events;
      if pending then
        perform pgmb.write_claim(base, 0, 'p', q.bindings, 0, base.place, base.place, 'infinity');
      end if;
      return;
    end if;
  end if;

  if q.max_length is not null and q.when_full = 'drop_oldest' then
    trimmed := pgmb.drop_oldest(q, base);
    pending := pending or trimmed.place <> base.place;
    opened := trimmed.batch_snapshot::text <> base.batch_snapshot::text;
    base := trimmed;
  end if;

  -- A few windows at most: what a filter, busy keys or age leave over of each may be little. While a lease of an ordered
  -- queue was just given nothing is read behind it: most likely its keys will be free in a moment, and nothing
  -- has to be set aside.
  for turn in 1 .. greatest(5, 1000 / max) loop
    exit when q.ordered and flight.youngest > now - interval '100 milliseconds';
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
      if not pgmb.has_stragglers(q.stream, base.done_snapshot, base.done_next, base.batch_snapshot, 0, base.done_seq) then
        base.place := base.done_seq;
        exit when base.upto = base.done_seq;
      end if;
    end if;
    lo := base.place;
    hi := pgmb.window_end(q.stream, greatest(base.place, base.done_seq), base.upto, 5000);
    picked := pgmb.pick(q, base, hi, max, now, flight.keys, flight.youngest);
    exit when picked.waits;
    base.place := picked.upto;
    pending := pending or picked.moved or base.place - lo >= 64;
    wrote := wrote or picked.wrote;
    taken := picked.taken;
    vacant := vacant + case when picked.moved then 0 else 1 end;
    exit when taken > 0 or vacant >= 5;
  end loop;

  if opened and entry_xid is null and pending then
    -- As receive does: what the next batch starts from.
    base.batch_next := greatest((pg_current_xact_id()::text::bigint - 1)::text::xid8, base.batch_next);
    base.batch_seq := greatest(noted, base.batch_seq);
  end if;
  if taken > 0 then
    lease := pgmb.lease_of(q.id, base.id + 1, token);
    matching := picked.matching;
    rows := picked.rows;
    events := taken;
    base.open := base.open || (base.id + 1);
    perform pgmb.write_claim(base, token, 'l', q.bindings, taken + cardinality(picked.expired), lo, base.place,
      now + lease_for, picked.keys);
    if cardinality(picked.expired) > 0 then
      insert into pgmb.settlement (queue, claim, seq)
      select q.id, base.id + 1, one from unnest(picked.expired) one;
    end if;
    claim := base;
    claim.lo := lo;
    claim.hi := base.place;
  elsif pending then
    perform pgmb.write_claim(base, 0, 'p', q.bindings, 0, base.place, base.place, 'infinity');
  end if;
  if wrote then
    perform pgmb.recheck_at_commit(q.id, base.id + 1);
  end if;
end $$;

-- Which events of a queue above its position and up to `hi` are to be delivered now, at most `allowed`: those up to
-- `upto` that match `matching`, `taken` in number. Those older than the queue lets them live become dead letters,
-- `expired`. In an ordered queue those whose key is held wait in pgmb.retry, behind what holds it; `keys` are the
-- hashes of those taken. rows: where in its segment those taken lie, if they are all in one. moved: something was
-- read and has its place now. wrote: events were parked or became dead letters. Where many wait already and
-- most of these are of keys that are held, but not for long, all are left where they are: waits. Internal.
create or replace function pgmb.pick(
  q pgmb.queue, base pgmb.claim, hi bigint, allowed bigint, now timestamptz, busy integer[], youngest timestamptz,
  out taken bigint, out upto bigint, out matching text, out rows tid[], out expired bigint[], out keys integer[],
  out moved boolean, out wrote boolean, out waits boolean
)
language plpgsql
as $$
#variable_conflict use_variable
declare
  source text := 'select null::tid ctid, e.seq, e.key, e.published_at from pgmb.batch_events($8, $5, $9, $10, $3, $11, $12, $1, $2, $13, $7, true) e';
  retried boolean := q.ordered and exists (select from pgmb.retry r where r.queue = q.id and r.ordered);
  most bigint := allowed;
  found_events bigint;
  last bigint;
  behind integer[];
  blocked bigint := 0;
  ending timestamptz := now - q.ttl;
begin
  if retried or cardinality(busy) > 0 then
    -- Besides those that can be delivered, as many are read that perhaps cannot.
    most := allowed * 2;
  end if;
  if base.place >= base.done_seq and base.place >> 40 = hi >> 40 and base.own is null then
    -- The common way: one segment, no stragglers.
    source := pgmb.main_part('pgmb.segment_' || q.stream || '_' || (hi >> 40), 'e.ctid, e.seq, e.key, e.published_at', q.matching)
      || ' limit $7';
  end if;
  if q.ordered and most = allowed then
    -- No key is held and nothing waits: all that is read may go.
    execute 'select count(*) filter (where not e.old), count(*), max(e.seq),
        coalesce(array_agg(e.seq) filter (where e.old), ''{}''), array_agg(e.ctid) filter (where not e.old),
        array_agg(distinct e.held) filter (where not e.old)
      from (
        select e.ctid, e.seq, coalesce(e.published_at <= $14, false) old,
          case when e.key is null then 0 else coalesce(nullif(hashtext(e.key), 0), 1) end held
        from (' || source || ') e) e'
    into taken, found_events, last, expired, rows, keys
    using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
      pg_snapshot_xmax(base.done_snapshot), most, q.stream, base.done_seq, base.done_next, base.own, base.own_seq,
      q.matching, ending;
  elsif q.ordered then
    execute 'with read as materialized (
        select e.ctid, e.seq, e.key is not null keyed, e.key, coalesce(e.published_at <= $14, false) old,
          case when e.key is null then 0 else coalesce(nullif(hashtext(e.key), 0), 1) end held
        from (' || source || ') e
      ), waiting as materialized (
        select distinct r.held from read r
        where r.keyed and (r.held in (select unnest($15)) or $16 and exists (
          select from pgmb.retry ahead where ahead.queue = $17 and ahead.ordered and ahead.key = r.key))
      ), judged as (
        select r.ctid, r.seq, r.held, r.old, w.held is not null behind,
          count(*) filter (where not r.old and w.held is null) over (order by r.seq) free
        from read r
        left join waiting w on w.held = r.held and r.keyed
      )
      select count(*) filter (where not j.old and not j.behind), array_agg(distinct j.held) filter (where not j.old and not j.behind),
        array_agg(distinct j.held) filter (where not j.old and j.behind), count(*) filter (where not j.old and j.behind),
        coalesce(array_agg(j.seq) filter (where j.old), ''{}''), array_agg(j.ctid) filter (where not j.old and not j.behind),
        case when count(*) filter (where not j.old and not j.behind) = $18 then max(j.seq) end,
        (select count(*) from read), (select max(r.seq) from read r)
      from judged j
      where j.free < $18 or (j.free = $18 and not j.old and not j.behind)'
    into taken, keys, behind, blocked, expired, rows, upto, found_events, last
    using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
      pg_snapshot_xmax(base.done_snapshot), most, q.stream, base.done_seq, base.done_next, base.own, base.own_seq,
      q.matching, ending, busy, retried, q.id, allowed;
  else
    execute 'select count(*) filter (where e.published_at <= $14 is not true), count(*), max(e.seq),
        coalesce(array_agg(e.seq) filter (where e.published_at <= $14), ''{}''),
        array_agg(e.ctid) filter (where e.published_at <= $14 is not true)
      from (' || source || ') e'
    into taken, found_events, last, expired, rows
    using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
      pg_snapshot_xmax(base.done_snapshot), most, q.stream, base.done_seq, base.done_next, base.own, base.own_seq,
      q.matching, ending;
  end if;
  waits := blocked > 3 * taken and youngest > now - interval '1 second' and (
    select count(*) = 200 from (select from pgmb.retry r where r.queue = q.id and r.due_at > '-infinity' limit 200) parked);
  if waits then
    taken := 0;
    upto := base.place;
    return;
  end if;
  upto := coalesce(upto, case when found_events < most then hi else last end);
  moved := found_events > 0;
  rows := array_remove(rows, null);
  wrote := behind is not null or cardinality(expired) > 0;
  matching := q.matching;
  if keys is not null then
    matching := matching || pgmb.with_keys(keys);
  end if;
  if cardinality(expired) > 0 then
    matching := matching || format(' and e.published_at > %L', ending);
    perform pgmb.fail_event(q, e, base.id + 1, 0, now, 'expired: older than ' || q.ttl, true)
    from pgmb.batch_events(q.stream, base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot,
      base.own, base.own_seq, base.place, upto, q.matching || format(' and e.published_at <= %L', ending),
      9223372036854775807) e;
  end if;
  if behind is not null then
    insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, key, payload, headers, published_at, ordered, origin)
    -- The first behind a lease is due: nobody need wake it, so that a transaction which is settling that lease and
    -- cannot see it yet leaves none behind. Whatever settles a parked event wakes the next.
    select q.id,
      case when e.key_place = 1 and ahead.due_at is null then now else greatest(ahead.due_at, now) + interval '1 minute' end,
      1, e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at, true, base.id + 1
    from (
      select parked.*, row_number() over (partition by parked.key order by parked.seq) key_place
      from pgmb.batch_events(q.stream, base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot,
        base.own, base.own_seq, base.place, upto,
        q.matching || pgmb.with_keys(behind)
          || case when ending is null then '' else format(' and e.published_at > %L', ending) end,
        9223372036854775807) parked) e
    left join lateral (
      select waiting.due_at from pgmb.retry waiting
      where waiting.queue = q.id and waiting.ordered and waiting.key = e.key and waiting.lease is null
      order by waiting.origin, waiting.seq limit 1) ahead on true;
  end if;
end $$;
