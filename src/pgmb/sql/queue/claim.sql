-- The loop that receives from queues of every kind: plain, with patterns or a filter, ordered by key, fair to tenants, limited, with
-- a time to live, a length or lanes. (pgmb.receive and pgmb.claim_next have shorter ways for plain ones, which refuse what only
-- the loop decides.)

-- Asks the lanes of a queue in turn for a lease, within the limits of them all. entry_xid, noted: as receive found them. Gives
-- what pgmb_internal.claim_lane gives. ended: why it gives no more.
--   more     it gave what was wanted, or stopped before the end of the log
--   end      of the log
--   keys     what is left waits for keys that leases hold
--   limited  the queue's limits leave no room
--   busy     others receive from it
--   paused   its filter raised an error
create or replace function pgmb_internal.claim_queue(
  queue integer, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out retried boolean, out numbers bigint[], out ended text
)
language plpgsql
as $$
declare
  lanes pgmb.queue[] := array(
    select l.lane
    from (
      select q lane from pgmb.queue q where q.id = claim_queue.queue
      union all
      select q from pgmb.queue q where q.lane_of = claim_queue.queue) l
    order by (l.lane).lane);
  head pgmb.queue := lanes[1];
  base pgmb.claim;
  lane pgmb.queue;
  passed_over pgmb.queue;
  locked_upto integer := -1;
  passing boolean;
  began timestamptz := clock_timestamp();
  now timestamptz;
  paid timestamptz;
  claimed record;
begin
  if head.id is null then
    perform pgmb_internal.raise_dropped();
  end if;
  select null::uuid lease, false retried, null::bigint[] numbers into claimed;
  if head.max_in_flight is not null or head.rps is not null then
    -- One after another: a limit is everybody's.
    base := pgmb_internal.lock_as_found(head);
    if base.id is null then
      ended := 'busy';
      return;
    end if;
    now := clock_timestamp();
    max := least(max, pgmb_internal.room_in_flight(head, lanes, max, now));
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
    ended := 'limited';
    return;
  end if;
  ended := 'end';
  -- Shards are asked in any order, those that others are at passed over. But for one call in eight, which asks in
  -- order and waits, so that a long transaction in a shard is superseded. Who waits holds only shards before it, and
  -- waits for no more after a second.
  passing := head.shards > 1 and random() >= 0.125;
  if passing then
    lanes := array(select one from unnest(lanes) one order by random());
  elsif head.shards = 1 and cardinality(lanes) > 1 and random() < 0.125 then
    -- One call in eight begins at the other end, so that no lane starves. The first lane is locked first even so:
    -- of two that ask in opposite orders each would wait for the other.
    perform pgmb_internal.lock_queue(head.id);
    lanes := array(select one from unnest(lanes) one order by one.lane desc);
  end if;
  foreach lane in array lanes loop
    if (passing or head.shards > 1 and clock_timestamp() > began + interval '1 second')
      and not pgmb_internal.try_queue(lane.id)
    then
      -- Another receives from it at this moment.
      passed_over := lane;
      ended := 'busy';
      continue;
    end if;
    locked_upto := greatest(locked_upto, lane.lane);
    claimed := pgmb_internal.claim_lane(lane, entry_xid, noted, max, lease_for);
    if ended = 'end' or claimed.ended = 'more' then
      ended := claimed.ended;
    end if;
    exit when claimed.lease is not null;
  end loop;
  if claimed.lease is null and passed_over.id is not null
    and (pgmb_internal.try_queue(passed_over.id)
      or passed_over.lane > locked_upto and clock_timestamp() <= began + interval '1 second')
  then
    claimed := pgmb_internal.claim_lane(passed_over, entry_xid, noted, max, lease_for);
    ended := claimed.ended;
  end if;
  if claimed.lease is not null and cardinality(lanes) > 1 then
    -- The lanes behind it were not asked.
    ended := 'more';
  end if;
  lease := claimed.lease;
  retried := claimed.retried;
  numbers := claimed.numbers;
  if lease is not null and head.rps is not null then
    select * into base from pgmb.claim c where c.queue = head.id order by c.id desc limit 1;
    base.paid_until := paid + interval '1 second' * (claimed.events / head.rps);
    perform pgmb_internal.write_position(base);
  end if;
end $$;

-- Takes the queue's lock as pgmb_internal.lock_queue does, but only if that is free.
create or replace function pgmb_internal.try_queue(queue integer)
returns boolean
language sql volatile
as $$
  select pg_try_advisory_xact_lock(pgmb_internal.queue_lock(try_queue.queue, pgmb_internal.generation_of(newest.id)::integer))
  from (select c.id from pgmb.claim c where c.queue = try_queue.queue order by c.id desc limit 1) newest
$$;

-- Leases the next events of a queue, or of one of its lanes, within its limits: `retried` ones, or fresh ones, with these
-- numbers. Null if there is nothing. ended: as claim_queue.
create or replace function pgmb_internal.claim_lane(
  q pgmb.queue, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out retried boolean, out numbers bigint[], out events bigint, out ended text
)
language plpgsql
as $$
declare
  base pgmb.claim := pgmb_internal.lock_as_found(q);
  now timestamptz := clock_timestamp();
  token bigint := pgmb_internal.draw_token();
  flight record;
  swept record;
  trimmed pgmb.claim;
  taken record;
  pending boolean;                           -- the position moved enough to be worth writing
  opened boolean := false;
  waiting bigint;                            -- the lowest origin in pgmb.retry; null: none waits
  -- What is due again comes first, in a lease of its own. In a fair queue it takes turns with fresh events, so that a tenant whose
  -- events fail does not hold up the others.
  fresh_first boolean := q.fair_by is not null and hashint8(base.id) & 1 = 1;
begin
  if base.id is null then
    ended := 'busy';
    return;
  end if;
  ended := 'more';
  -- Its patterns must be newer than the batch that it reads: what is published after a bind goes by that.
  select * into q from pgmb.queue present where present.id = q.id;
  retried := false;
  if pgmb_internal.asks(q) and pgmb_internal.needs_timeout(q) then
    perform pgmb_internal.assert_timeout();
  end if;
  swept := pgmb_internal.sweep_when_due(q, base, now);
  base := swept.base;
  pending := swept.pending;
  base := pgmb_internal.note_leases(base, q.ordered or q.max_in_flight is not null);

  select null::integer[] keys, null::timestamptz youngest into flight;
  if q.ordered then
    flight := pgmb_internal.recent_leases(base, now, true);
    base.flight.noted := coalesce(flight.oldest - 1, base.id);
    -- After the leases in flight: what one of them returns later has its claim as its origin.
    waiting := pgmb_internal.lowest_origin(base);
    base.first_origin := least(flight.oldest, (base.flight).oldest, base.id + 1, waiting);
  end if;
  events := 0;
  if swept.stopped and clock_timestamp() < pgmb_internal.deadline() or not swept.stopped and not fresh_first then
    events := pgmb_internal.lease_retries(q, base, max, now, now + lease_for, token, flight.keys);
  end if;
  if events > 0 then
    lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
    retried := true;
    return;
  end if;
  if swept.stopped then
    -- What was swept is committed.
    perform pgmb_internal.write_position(base);
    return;
  end if;

  if q.max_length is not null and q.when_full = 'drop_oldest' then
    trimmed := pgmb_internal.drop_oldest(q, base);
    pending := pending or trimmed.place <> base.place or trimmed.lagging::text is distinct from base.lagging::text;
    opened := trimmed.batch_snapshot::text <> base.batch_snapshot::text;
    base := trimmed;
  end if;
  taken := pgmb_internal.take_next(q, base, max, now, flight.keys, flight.youngest, waiting, opened);
  ended := taken.ended;
  base := taken.base;
  pending := pending or taken.pending;
  if taken.opened and pending then
    base := pgmb_internal.note_pair(base, case when entry_xid is null then noted end, again => q.plain and taken.numbers <> '{}');
  end if;
  if taken.numbers <> '{}' then
    lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
    numbers := taken.numbers;
    events := cardinality(numbers);
    perform pgmb_internal.lease_numbers(base, token, numbers, taken.began, now + lease_for, taken.keys, now);
  else
    if fresh_first then
      events := pgmb_internal.lease_retries(q, base, max, now, now + lease_for, token, flight.keys);
    end if;
    if events > 0 then
      lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
      retried := true;
      ended := 'more';
    elsif pending then
      perform pgmb_internal.write_position(base);
    end if;
  end if;
  if taken.wrote then
    perform pgmb_internal.recheck_at_commit(q.id, base.id + 1);
  end if;
end $$;

-- Whether a queue looks at more of an event than its topic.
create or replace function pgmb_internal.asks(q pgmb.queue)
returns boolean
language sql immutable
as $$
  select num_nonnulls((q).equals, (q).filter, (q).condition) > 0
$$;

-- Reads on from a queue's position, a window at a time, and takes the numbers of at most `max` events that may go now; `keys` are
-- the hashes of their keys. busy, youngest: the keys of the leases in flight, and since when the last of these is held. waiting:
-- the lowest origin in pgmb.retry; null: none. began: the place from which on it looked in the batch. opened: a batch was opened. pending: the
-- position moved enough to be worth writing. wrote: so were rows that must not outlive a superseded claim. ended: as claim_queue.
create or replace function pgmb_internal.take_next(
  q pgmb.queue, inout base pgmb.claim, max integer, now timestamptz, busy integer[], youngest timestamptz, waiting bigint,
  inout opened boolean,
  out numbers bigint[], out keys integer[], out began bigint, out pending boolean, out wrote boolean, out ended text
)
language plpgsql
as $$
declare
  asked pgmb.queue := q;
  place bigint;
  hi bigint;
  fits bigint;
  choice record;
  picked record;
  enough boolean;                            -- the lease has no room for what follows
  tenants integer[] := '{}';                 -- of `numbers`, in a fair queue
  passing constant timestamptz := clock_timestamp() + interval '50 milliseconds';
  scanned bigint := 0;                       -- numbers passed
  looked bigint := 0;                        -- events among them that matched
  aside bigint := 0;                         -- events that were set aside: each is a row to write, under the queue's lock
  retries boolean;                           -- events of its keys may wait in pgmb.retry
begin
  numbers := '{}';
  began := base.place;
  pending := false;
  wrote := false;
  -- While a lease of an ordered queue was just given nothing is read behind it: most likely its keys will be free in a moment,
  -- and nothing has to be set aside.
  if q.ordered and youngest > now - interval '100 milliseconds' then
    ended := 'keys';
    return;
  end if;
  loop
    if base.place >= base.upto then
      exit when opened or numbers <> '{}';
      -- In this call alone until something is written: looking costs no xid.
      opened := true;
      base := pgmb_internal.open_batch(base, q.numbers, again => q.plain);
      select * into q from pgmb.queue present where present.id = q.id;
      asked := q;
      -- Whatever it holds (a rotation, what was rolled back), later calls need not pass over it again.
      pending := pending or base.upto - base.done_seq >= pgmb_internal.worth_a_claim();
      if not pgmb_internal.has_stragglers(q.stream, pgmb_internal.batch_of(base), 0, base.done_seq) then
        base.place := base.done_seq;
        exit when base.upto = base.done_seq;
      end if;
      began := 0;
    end if;
    place := greatest(base.place, base.done_seq);
    -- Passing over the events of tenants that lag costs little.
    hi := pgmb_internal.window_end(q.stream, place, base.upto, case when base.lagging is null then 5000 else 20000 end);
    asked.matching := q.matching || case when base.lagging is null then '' else pgmb_internal.not_lagging(q.fair_by, base) end;
    if pgmb_internal.asks(q) then
      choice := pgmb_internal.choose(asked, pgmb_internal.batch_of(base), base.place, hi,
        case when q.fair_by is null then max * 2 else pgmb_internal.judged_at_once(max) end);
      if choice.chosen is null then
        ended := 'paused';
        exit;
      end if;
      -- What took long to look at need not be looked at again, however little it was.
      pending := pending or choice.upto < hi;
      hi := choice.upto;
      asked.matching := pgmb_internal.among(choice.chosen);
    end if;
    if q.fair_by is null then
      if retries is null then
        -- Of each key whose dead letters were put back, the first that is not leased has a time.
        retries := q.ordered and (waiting is not null or exists (
          select from pgmb.retry r
          where r.queue = q.id and r.due_at < 'infinity' and r.due_at >= pgmb_internal.retry_since(q.id, now)));
      end if;
      -- Of as many as are read to find those that may go. A single event always fits.
      fits := hi;
      if max > 1 and (pgmb_internal.segment_of(base.place) <> pgmb_internal.segment_of(hi) or max * 2 > pgmb_internal.always_fits()
        or pgmb_internal.look_for_large(q.stream, pgmb_internal.segment_of(hi), now))
      then
        fits := pgmb_internal.fitting_end(q.stream, pgmb_internal.batch_of(base), base.place, hi, asked.matching,
          case when q.plain then max else greatest(max * 2, 200) end);
      end if;
      picked := pgmb_internal.pick(asked, base, fits, max - cardinality(numbers), now, busy, youngest, retries);
      if picked.waits then
        ended := 'keys';
        exit;
      end if;
      base.place := picked.upto;
      keys := keys || picked.keys;
      aside := aside + picked.aside;
      enough := fits < hi;
    else
      picked := pgmb_internal.pick_in_turn(asked, base, hi, max, now, numbers);
      base := picked.base;
      tenants := tenants || picked.tenants;
      enough := picked.enough;
    end if;
    pending := pending or picked.looked > 0 or base.place - place >= pgmb_internal.worth_a_claim();
    wrote := wrote or picked.wrote;
    numbers := numbers || picked.taken;
    scanned := scanned + base.place - greatest(place, pgmb_internal.first_number(pgmb_internal.segment_of(base.place)));
    looked := looked + picked.looked;
    -- To come back with nothing although there is something further on would have consumers wait: only at the deadline, or
    -- after a thousand events that are not to go now, or were set aside. What a filter, busy keys or age leave over of a window
    -- may be little; the next ones are looked at too, but a lease ends with its first window where values are large. A backlog of
    -- a tenant that lags is passed over in as few receives as possible: the events of others lie behind it.
    exit when cardinality(numbers) >= max or clock_timestamp() >= pgmb_internal.deadline()
      or aside >= 1000
      or scanned >= 20000 and case when base.lagging is null then numbers <> '{}' or looked >= 1000
        else clock_timestamp() >= passing end
      or (numbers <> '{}' or base.lagging is not null) and enough
      or numbers <> '{}' and pgmb_internal.has_large(q.stream, pgmb_internal.segment_of(base.upto));
  end loop;
  if base.lagging is not null and cardinality(numbers) < max then
    picked := pgmb_internal.take_lagging(q, base, max - cardinality(numbers), now, numbers);
    base := picked.base;
    pending := true;
    wrote := wrote or picked.wrote;
    numbers := numbers || picked.taken;
    tenants := tenants || picked.tenants;
  end if;
  if q.fair_by is not null then
    numbers := pgmb_internal.in_turn(numbers, tenants);
  end if;
  ended := coalesce(ended, case when base.lagging is null and base.place >= base.upto
    and coalesce(pg_sequence_last_value(q.numbers), 0) <= base.upto then 'end' else 'more' end);
end $$;
