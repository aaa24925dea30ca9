-- Receiving from queues that are more than plain: ordered by key, limited, with a time to live, a length or
-- lanes. The same claims as receive makes, by one longer way.

-- What receive does for a queue that is not plain: asks its lanes in turn for a lease, within the limits of them
-- all. entry_xid, noted: as receive found them. Gives what pgmb_internal.claim_lane gives; of a fair queue `numbers`, as
-- pgmb_internal.claim_fair.
create or replace function pgmb_internal.claim_by_policy(
  queue integer, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out retried boolean, out claim pgmb.claim, out matching text, out rows tid[], out numbers bigint[]
)
language plpgsql
as $$
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
  began timestamptz := clock_timestamp();
  now timestamptz;
  paid timestamptz;
  claimed record;
begin
  select null::uuid lease, false retried, null::pgmb.claim claim, null matching, null::tid[] rows into claimed;
  if head.max_in_flight is not null or head.rps is not null then
    -- One after another: a limit is everybody's.
    base := pgmb_internal.lock_as_found(head);
    if base.id is null then
      return;
    end if;
    now := clock_timestamp();
    max := least(max, pgmb_internal.room_in_flight(head, lanes));
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
  if head.fair_by is not null then
    lanes := '{}';
    claimed := pgmb_internal.claim_fair(head, entry_xid, noted, max, lease_for);
    numbers := claimed.numbers;
  end if;
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
      continue;
    end if;
    locked_upto := greatest(locked_upto, lane.lane);
    claimed := pgmb_internal.claim_lane(lane, entry_xid, noted, max, lease_for);
    exit when claimed.lease is not null;
  end loop;
  if claimed.lease is null and passed_over.id is not null
    and (pgmb_internal.try_queue(passed_over.id)
      or passed_over.lane > locked_upto and clock_timestamp() <= began + interval '1 second')
  then
    claimed := pgmb_internal.claim_lane(passed_over, entry_xid, noted, max, lease_for);
  end if;
  lease := claimed.lease;
  retried := claimed.retried;
  if head.fair_by is null then
    claim := claimed.claim;
    matching := claimed.matching;
    rows := claimed.rows;
  end if;
  if lease is not null and head.rps is not null then
    select * into base from pgmb.claim c where c.queue = head.id order by c.id desc limit 1;
    base.paid_until := paid + interval '1 second' * (claimed.events / head.rps);
    perform pgmb_internal.write_claim(base, 0, 'position', head.bindings, 0, base.place, base.place, 'infinity');
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

-- How many more events of a queue with max_in_flight may be leased; null without a limit.
create or replace function pgmb_internal.room_in_flight(head pgmb.queue, lanes pgmb.queue[])
returns bigint
language sql volatile
as $$
  select (head).max_in_flight - sum((pgmb_internal.in_flight(lane.id,
    (select c.open from pgmb.claim c where c.queue = lane.id order by c.id desc limit 1), clock_timestamp())).events)
  from unnest(lanes) lane
$$;

-- Leases the next events of a queue, or of one of its lanes, within its limits: `retried` ones, or fresh ones,
-- for which `claim`, `matching` and `rows` say what the lease holds. Null if there is nothing. A transaction's own
-- events come once it has committed.
create or replace function pgmb_internal.claim_lane(
  q pgmb.queue, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out retried boolean, out claim pgmb.claim, out matching text, out rows tid[], out events bigint
)
language plpgsql
as $$
declare
  base pgmb.claim := pgmb_internal.lock_as_found(q);
  now timestamptz := clock_timestamp();
  flight record;
  swept record;
  picked record;
  trimmed pgmb.claim;
  taken bigint := 0;
  windows integer := 0;                      -- looked at
  looked bigint := 0;                        -- events that matched in them
  pending boolean := false;                  -- the position moved enough to be worth writing
  opened boolean := false;
  wrote boolean := false;                    -- rows that must not outlive a superseded claim
  lo bigint;
  hi bigint;
  asks boolean := num_nonnulls(q.equals, q.filter, q.condition) > 0;
  choice record;
  chosen bigint[];
  asked pgmb.queue := q;
  token bigint := pgmb_internal.draw_token();
  waiting bigint;                            -- where the rows of pgmb.retry begin
begin
  if base.id is null then
    return;
  end if;
  if asks and pgmb_internal.needs_timeout(q) then
    perform pgmb_internal.assert_timeout();
  end if;
  swept := pgmb_internal.sweep_when_due(q, base, now);
  base := swept.base;

  flight := pgmb_internal.in_flight(q.id, base.open, now);
  pending := swept.pending or pgmb_internal.is_much_shorter(flight.open, base.open);
  base.open := flight.open || (base.id + 1);
  if q.ordered then
    -- After the leases in flight: what one of them returns later has its claim as its origin.
    waiting := pgmb_internal.lowest_origin(base);
    base.first_origin := (select min(one) from unnest(base.open || waiting) one);
  end if;
  events := case when swept.stopped and clock_timestamp() >= pgmb_internal.deadline() then 0
    else pgmb_internal.lease_retries(q, base, max, now, now + lease_for, token, flight.keys) end;
  if events > 0 then
    lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
    retried := true;
    return;
  end if;
  base.open := flight.open;
  if swept.stopped then
    -- What was swept is committed.
    perform pgmb_internal.write_claim(base, 0, 'position', q.bindings, 0, base.place, base.place, 'infinity');
    return;
  end if;

  if q.max_length is not null and q.when_full = 'drop_oldest' then
    trimmed := pgmb_internal.drop_oldest(q, base);
    pending := pending or trimmed.place <> base.place;
    opened := trimmed.batch_snapshot::text <> base.batch_snapshot::text;
    base := trimmed;
  end if;

  -- A few windows, or a thousand events: what a filter, busy keys or age leave over of each may be little. Those in which
  -- nothing matches are passed until the deadline, as receive does. While a lease of an ordered queue was just given nothing is
  -- read behind it: most likely its keys will be free in a moment, and nothing has to be set aside.
  loop
    exit when q.ordered and flight.youngest > now - interval '100 milliseconds';
    if base.place >= base.upto then
      exit when opened;
      opened := true;
      base := pgmb_internal.open_batch(base, q.numbers);
      pending := pending or base.upto - base.done_seq >= pgmb_internal.worth_a_claim();
      if not pgmb_internal.has_stragglers(q.stream, pgmb_internal.batch_of(base), 0, base.done_seq) then
        base.place := base.done_seq;
        exit when base.upto = base.done_seq;
      end if;
    end if;
    lo := base.place;
    hi := pgmb_internal.window_end(q.stream, greatest(base.place, base.done_seq), base.upto, 5000);
    if asks then
      choice := pgmb_internal.choose(q, base, hi, max * 2);
      exit when choice.chosen is null;
      -- What took long to look at need not be looked at again, however little it was.
      pending := pending or choice.upto < hi;
      hi := choice.upto;
      chosen := choice.chosen;
      asked.matching := pgmb_internal.among(chosen);
    end if;
    -- Of as many as are read to find those that may go.
    hi := pgmb_internal.fitting_end(q.stream, pgmb_internal.batch_of(base), base.place, hi, asked.matching, greatest(max * 2, 200));
    picked := pgmb_internal.pick(asked, base, hi, max, now, flight.keys, flight.youngest,
      -- Of each key whose dead letters were put back, the first that is not leased has a time.
      q.ordered and (waiting is not null or exists (
        select from pgmb.retry r where r.queue = q.id and r.due_at < 'infinity'
          and r.due_at >= pgmb_internal.retry_since(q.id, now))));
    exit when picked.waits;
    base.place := picked.upto;
    pending := pending or picked.looked > 0 or base.place - lo >= pgmb_internal.worth_a_claim();
    wrote := wrote or picked.wrote;
    taken := picked.taken;
    windows := windows + 1;
    looked := looked + picked.looked;
    exit when taken > 0 or (windows >= 5 and looked >= 1000) or clock_timestamp() >= pgmb_internal.deadline();
  end loop;

  if opened and pending then
    base := pgmb_internal.note_pair(base, case when entry_xid is null then noted end);
  end if;
  if taken > 0 then
    lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
    matching := picked.matching;
    rows := picked.rows;
    events := taken;
    base.open := base.open || (base.id + 1);
    perform pgmb_internal.write_claim(base, token, 'leased', q.bindings, taken + cardinality(picked.expired), lo, base.place,
      now + lease_for, picked.keys,
      case when asks then array(select one from unnest(chosen) one where one <= base.place) end, now);
    if cardinality(picked.expired) > 0 then
      insert into pgmb.settlement (queue, claim, seq)
      select q.id, base.id + 1, one from unnest(picked.expired) one;
    end if;
    claim := base;
    claim.lo := lo;
    claim.hi := base.place;
  elsif pending then
    perform pgmb_internal.write_claim(base, 0, 'position', q.bindings, 0, base.place, base.place, 'infinity');
  end if;
  if wrote then
    perform pgmb_internal.recheck_at_commit(q.id, base.id + 1);
  end if;
end $$;
