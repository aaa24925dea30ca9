-- Claiming for clients that read the log themselves, in the statement that claims (docs/adr/0035).

-- Whether what claim_next is about to lease fits into one lease. If not, receive leases less.
create or replace function pgmb_internal.may_claim(
  queue integer, stream integer, segment bigint, known bigint, start bigint, counted bigint, max integer
)
returns boolean
language plpgsql
as $$
declare
  place bigint := may_claim.start;
  weight bigint;
begin
  if may_claim.counted is null then
    select c.place into place from pgmb.claim c
    where c.queue = may_claim.queue and c.id >= may_claim.known order by c.id desc limit 1;
  end if;
  execute format('select sum(%s) from pgmb.segment_%s_%s e where e.seq > $1 and e.seq <= $2', pgmb_internal.weight_of_event(),
    stream, segment) into weight using place, place + may_claim.max;
  return coalesce(weight, 0) <= pgmb_internal.batch_bytes();
end $$;

-- Leases events of a queue: all numbers of (lo, hi], of one segment of its stream, as pgmb.claimed. The statement that calls it
-- reads them, with the caller's own rights. It passes its own snapshot as `seen`, which is older than the queue's lock; a batch
-- that it cannot see as a whole is refused. Whatever pgmb.receive must decide is refused too, such as numbers that are no
-- events: the result is null then, and nothing has happened.
--   In the middle of a batch (`counted` null): the next `max` numbers.
--   A new batch: the statement looked for max + 1 events after the number `start` and found `counted`, up to the number `last`.
-- The first `max` of them are leased, in a new batch, if they have all numbers from `start` on, and if every number up to
-- `start` was consumed. If it found none and receive would find none either, the id is 0.
-- queue, ack, ack_token: numbers that a lease contains (pgmb_internal.lease_bits); the lease to settle must be of this queue.
-- token: what the new lease contains. known: a claim of the queue that the caller had a lease of; the search for the newest
-- claim ends there. start: the last event of that lease; in the middle of a batch null if the caller does not know it.
-- Lock: the queue's, as receive. Errors: MB011 the ack's lease is lost, MB021 another cluster. Support.
create or replace function pgmb.claim_next(
  queue integer, max integer, token bigint, lease_for interval, ack bigint, ack_token bigint, durable boolean,
  known bigint, segment bigint, seen pg_snapshot, start bigint default null, counted bigint default null,
  last bigint default null
)
returns pgmb.claimed
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  now timestamptz := clock_timestamp();
  caller name;
  q record;
  base record;
  noted bigint;
  claimed pgmb.claimed;
begin
  if pg_current_xact_id_if_assigned() is not null or current_setting('transaction_isolation') <> 'read committed'
    or claim_next.start <> claim_next.last - claim_next.counted
  then
    return null;
  end if;
  if current_setting('pgmb.cluster_checked', true) is distinct from current_database() then
    perform pgmb_internal.assert_primary();
  end if;
  caller := pgmb_internal.caller_at_low_cost();
  -- Few expressions and functions in them: the executor prepares each one again at every call.
  select asked.stream, asked.stream_name, asked.numbers, asked.generation,
    pg_sequence_last_value('pgmb.opening'::regclass) openings,
    -- At least a moment, as in receive.
    greatest(coalesce(claim_next.lease_for, asked.lease_for), interval '1 millisecond') lease_for,
    asked.plain and asked.matching = '' and asked.paused_at is null and claim_next.max between 1 and pgmb_internal.lease_events()
      and (pg_has_role(caller, current_user, 'usage') or pgmb_internal.may_consume(asked.id, caller))
      and (pg_try_advisory_xact_lock(asked.lock_key)
        or pgmb_internal.try_lock(asked.id, asked.generation, asked.lock_key))
      and (claim_next.durable or set_config('synchronous_commit', 'off', true) is not null) ready
  into q
  from pgmb.queue asked
  where asked.id = claim_next.queue;
  if q.ready is not true
    -- A single event always fits.
    or claim_next.max > 1
    and (claim_next.max > 1000
      or pgmb_internal.microseconds(now) - coalesce(nullif(current_setting(
        'pgmb.small_' || q.stream || '_' || claim_next.segment, true), '')::bigint, 0) not between 0 and 50000
      and pgmb_internal.look_for_large(q.stream, claim_next.segment, now))
    and not pgmb_internal.may_claim(claim_next.queue, q.stream, claim_next.segment,
      claim_next.known, claim_next.start, claim_next.counted, claim_next.max)
  then
    return null;
  end if;

  -- Again, as this session may have waited.
  now := clock_timestamp();
  -- A statement of its own: its snapshot must be newer than the lock, so that the newest claim is seen. Refused is what only
  -- receive knows: which leases a sweep could not examine. So is what is beside a generation that is being opened. Snapshots
  -- of one server are ordered, and a later one shows all that an earlier one does: a greater xmax is proof of that; where it
  -- is equal, the order is not known. Expired leases and due events are looked for every 50 ms.
  if claim_next.counted is null then
    insert into pgmb.claim (queue, id, token, state, events, lo, hi, place, upto, done_snapshot, done_seq, done_next,
      batch_snapshot, batch_seq, batch_next, read_before, expires_at, swept, openings, at)
    select claim_next.queue, before.id + 1, claim_next.token, 'leased', claim_next.max, before.place, before.ending,
      before.ending, before.upto, before.done_snapshot, before.done_seq, before.done_next, before.batch_snapshot,
      before.from_seq, before.batch_next, before.read_before, now + q.lease_for,
      case when before.stale then now else before.swept end, before.openings, now
    from (
      select c.id, c.place, c.place + claim_next.max ending, c.upto, c.done_snapshot, c.done_seq, c.done_next,
        c.batch_snapshot, c.batch_next, c.read_before, c.swept, c.held, c.openings,
        -- The next batch begins behind what was leased without a gap.
        case when c.id = claim_next.known and c.lo = c.batch_seq and c.hi = claim_next.start and c.events = c.hi - c.lo
          then c.hi else c.batch_seq end from_seq,
        now > c.swept + interval '50 milliseconds' stale
      from pgmb.claim c
      where c.queue = claim_next.queue and c.id >= claim_next.known order by c.id desc limit 1) before
    -- Past what is late, and with enough of the batch left in this segment.
    where before.held is null and before.place >= before.done_seq and before.ending <= before.upto
      and pgmb_internal.segment_of(before.place) = claim_next.segment
      and pgmb_internal.segment_of(before.upto) = claim_next.segment
      and pg_snapshot_xmax(claim_next.seen) > pg_snapshot_xmax(before.batch_snapshot)
      and pgmb_internal.generation_of(before.id + 1) = q.generation and before.openings = q.openings and now >= before.swept
      and not (before.stale and pgmb_internal.needs_sweep(claim_next.queue, q.stream_name, before.swept, now))
      and case when q.stream_name = 'main'
        then pgmb_internal.dense_main(claim_next.segment, before.place, before.ending, before.batch_snapshot,
          pg_snapshot_xmin(before.batch_snapshot), before.done_snapshot, pg_snapshot_xmax(before.done_snapshot))
        else pgmb_internal.dense_in(q.stream, claim_next.segment, before.place, before.ending, before.batch_snapshot,
          before.done_snapshot) end
    returning claim.id, claim.lo, claim.hi into claimed;
  else
    -- Where the batch goes on, the new one has its rest, too. Above `start` nothing was read: events that were would come again.
    select c.id, case when c.place < c.upto then c.done_snapshot else c.batch_snapshot end done, c.swept,
      now > c.swept + interval '50 milliseconds' stale, c.openings,
      -- Up to which transaction id numbers may lie at or below `start`: all of those had finished, and were consumed. The
      -- position is `start`, or it is the caller's lease, which had all numbers from `lo` to `start`.
      case
        when (c.batch_seq = claim_next.start and c.place = c.batch_seq
            or c.lo = c.batch_seq and c.id = claim_next.known and c.events = claim_next.start - c.lo)
          and pgmb_internal.had_finished(c.batch_next, c.batch_snapshot) then c.batch_next
        when c.lo = c.done_seq and c.id = claim_next.known and c.events = claim_next.start - c.lo
          and pgmb_internal.had_finished(c.done_next, c.batch_snapshot) then c.done_next
      end next,
      c.read_before <= claim_next.start and c.hi >= claim_next.start and c.held is null
        and pg_snapshot_xmax(claim_next.seen) > pg_snapshot_xmax(c.batch_snapshot)
        -- It becomes the queue's position: a made-up one must not hide events that are published later.
        and pg_snapshot_xmax(claim_next.seen) <= pg_snapshot_xmax(pg_current_snapshot())
        and pgmb_internal.generation_of(c.id + 1) = q.generation and now >= c.swept simple
    into base
    from pgmb.claim c
    where c.queue = claim_next.queue and c.id >= claim_next.known order by c.id desc limit 1;
    -- Numbers were given out in this segment alone: the statement looked into no other. Read after its snapshot.
    noted := pg_sequence_last_value(q.numbers);
    if base.simple is not true or base.next is null or base.openings <> q.openings or claim_next.last > noted
      or pgmb_internal.segment_of(noted) <> claim_next.segment or pgmb_internal.segment_of(claim_next.start) <> claim_next.segment
      or base.stale and pgmb_internal.needs_sweep(claim_next.queue, q.stream_name, base.swept, now)
    then
      return null;
    end if;
    claimed.id := 0;
    if claim_next.counted > 0 then
      claimed := (base.id + 1, claim_next.start, least(claim_next.last, claim_next.start + claim_next.max));
      insert into pgmb.claim (queue, id, token, state, events, lo, hi, place, upto, done_snapshot, done_seq, done_next,
        batch_snapshot, batch_seq, batch_next, read_before, expires_at, swept, openings, at)
      values (claim_next.queue, claimed.id, claim_next.token, 'leased', claimed.hi - claimed.lo, claimed.lo,
        claimed.hi, claimed.hi, case when claimed.hi < claim_next.last then noted else claimed.hi end,
        base.done, claimed.lo, base.next, claim_next.seen, claimed.hi, base.next, claimed.lo, now + q.lease_for,
        case when base.stale then now else base.swept end, base.openings, now);
    end if;
  end if;
  if claimed.id is null or claim_next.ack is null then
    return claimed;
  end if;
  perform pgmb_internal.ack_claim(claim_next.queue, claim_next.ack, claim_next.ack_token);
  return claimed;
end $$;

-- The id of the stream whose segments a client can read in the statement that claims (pgmb.claim_next): null if the queue
-- is not plain, has patterns, or the caller may not read the stream's newest segment. Errors: MB002 no such queue, 42501.
-- Support.
create or replace function pgmb.claims_from(queue text)
returns integer
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
  select case when pgmb_internal.takes_short_ways() then q.stream end
  from pgmb_internal.queue_for_consumer(claims_from.queue) q
  where q.plain and q.matching = '' and has_table_privilege(pgmb_internal.caller(),
    'pgmb.segment_' || q.stream || '_' || (select max(s.number) from pgmb.segment s where s.stream = q.stream), 'select')
$$;
