-- Receiving: the next events of a queue, under a lease.

-- Whether no event of a batch can be late any more: all transactions up to `next`, below which events may have low numbers, had
-- finished in the snapshot.
create or replace function pgmb_internal.had_finished(next xid8, snapshot pg_snapshot)
returns boolean
language sql immutable
as $$
  select next < pg_snapshot_xmin(snapshot)
$$;

-- Whether the next batch of a queue starts where the one before started, not where it ended. Publishers were at work when
-- the last batch was opened, so that some of their numbers lie below its end: events that committed since would be late
-- ones, each found by its transaction. Where nothing below the start of the last batch was unfinished, and that start is
-- not far away for what is new, to walk over those numbers again costs less. `last`: the last number of the log.
create or replace function pgmb_internal.rereads(
  done_seq bigint, done_next xid8, batch_next xid8, batch_snapshot pg_snapshot, upto bigint, last bigint
)
returns boolean
language sql immutable
as $$
  select not pgmb_internal.had_finished(batch_next, batch_snapshot) and pgmb_internal.had_finished(done_next, batch_snapshot)
    and upto - done_seq <= 64 + 4 * (last - upto)
$$;

-- Whether the batch after the present one starts from the pair of the batch before (pgmb_internal.note_pair): publishers are
-- at work, none of them since before that pair, and the present batch did not start from it.
create or replace function pgmb_internal.keeps_pair(done_next xid8, batch_next xid8, batch_snapshot pg_snapshot)
returns boolean
language sql volatile
as $$
  select done_next < batch_next and pgmb_internal.had_finished(batch_next, batch_snapshot)
    and pg_snapshot_xmin(batch_snapshot) < pg_current_xact_id()
$$;

-- The transaction id before another.
create or replace function pgmb_internal.xid_before(xid xid8)
returns xid8
language sql immutable
as $$
  select (xid::text::bigint - 1)::text::xid8
$$;

-- Whether at least half of the numbers of the last lease were events of the queue.
create or replace function pgmb_internal.was_dense(base pgmb.claim)
returns boolean
language sql immutable
as $$
  select (base).events * 2 >= (base).hi - greatest((base).lo, (base).done_seq)
$$;

-- A queue's position with the next batch opened: it begins where the one before ended, and ends here and now. In this
-- call alone until a claim is written: looking costs no xid. Late events come first, so that its place is 0. `again`: it may
-- begin where the one before began (pgmb_internal.rereads); snapshots tell what was read.
create or replace function pgmb_internal.open_batch(base pgmb.claim, numbers regclass, again boolean default false)
returns pgmb.claim
language plpgsql
as $$
declare
  present record;
begin
  present := pgmb_internal.boundary(open_batch.numbers);
  if not open_batch.again
    or not pgmb_internal.rereads(base.done_seq, base.done_next, base.batch_next, base.batch_snapshot, base.upto, present.last)
  then
    base.done_seq := base.batch_seq;
    base.done_next := base.batch_next;
  end if;
  base.done_snapshot := base.batch_snapshot;
  base.batch_snapshot := present.snapshot;
  base.read_before := greatest(base.read_before, nullif(base.upto, 0));
  base.upto := greatest(present.last, base.done_seq);
  base.place := 0;
  return base;
end $$;

-- A queue's position with what the batch after this one starts from: a number of the log and a transaction id, so that
-- every transaction with a higher id takes higher numbers only. `noted` is the sequence before this transaction had an
-- xid, which is the id then. A transaction that had one before (`noted` null) takes the end of the batch, which was read
-- earlier in this call, and an id that no transaction has yet; not for a short batch, which is as soon read again.
-- `again`: the pair before may stay (pgmb_internal.keeps_pair).
create or replace function pgmb_internal.note_pair(base pgmb.claim, noted bigint, again boolean default false)
returns pgmb.claim
language plpgsql
as $$
begin
  if noted is not null then
    if not (note_pair.again and pgmb_internal.keeps_pair(base.done_next, base.batch_next, base.batch_snapshot)) then
      base.batch_next := greatest(pgmb_internal.xid_before(pg_current_xact_id()), base.batch_next);
      base.batch_seq := greatest(note_pair.noted, base.batch_seq);
    end if;
  elsif base.upto - base.batch_seq >= pgmb_internal.worth_a_claim() then
    base.batch_next := greatest(pgmb_internal.xid_before(pgmb_internal.unused_xid()), base.batch_next);
    base.batch_seq := base.upto;
  end if;
  return base;
end $$;

-- A transaction id that no transaction has yet: the next one, or one not far above it. pg_xact_status() refuses those,
-- while a snapshot's xmax may lie below the ids of transactions that are open.
create or replace function pgmb_internal.unused_xid()
returns xid8
language plpgsql
as $$
declare
  candidate bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
  step bigint := 1;
begin
  loop
    begin
      perform pg_xact_status(candidate::text::xid8);
    exception when invalid_parameter_value then
      return candidate::text::xid8;
    end;
    candidate := candidate + step;
    step := step * 2;
  end loop;
end $$;

-- Whether a queue needs a sweep: leases expired since the last one or were shortened, or retries or delayed events are due. Also true if
-- 64 or more claims, settled or not, lie behind: the sweep moves past them.
create or replace function pgmb_internal.needs_sweep(queue integer, stream_name text, swept timestamptz, now timestamptz)
returns boolean
language plpgsql volatile
as $$
declare
  read_before bigint := pgmb_internal.entries_read('pgmb.delayed_due');
  passed bigint;
begin
  if pgmb_internal.first_retry(needs_sweep.queue, needs_sweep.now) is not null
    or (select count(*) >= 64 or count(*) filter (where pgmb_internal.is_leased(passing.state)) > 0
      from (
        select c.state from pgmb.claim c
        where c.queue + 0 = needs_sweep.queue
          and c.expires_at > needs_sweep.swept and c.expires_at <= needs_sweep.now
        limit 64) passing)
    or exists (select from pgmb.shortened s where s.queue = needs_sweep.queue)
    or exists (select from pgmb.delayed d where d.stream = needs_sweep.stream_name and d.due_at <= needs_sweep.now
      and d.due_at >= pgmb_internal.delayed_since(needs_sweep.stream_name, needs_sweep.now))
  then
    return true;
  end if;
  passed := pgmb_internal.entries_read('pgmb.delayed_due') - read_before;
  return pgmb_internal.should_store_scan(pgmb_internal.delayed_setting(needs_sweep.stream_name), passed)
    and pgmb_internal.first_delayed(needs_sweep.stream_name, needs_sweep.now) is not null;
end $$;

-- The segment in which the range (place, upto] goes on: its table, the last number of it to read, and `place` moved past
-- segments that hold nothing of the range or were dropped.
create or replace function pgmb_internal.next_segment(stream integer, upto bigint, inout place bigint, out leaf text, out bound bigint)
language plpgsql
as $$
declare
  number bigint;
begin
  loop
    number := pgmb_internal.segment_of(upto);
    bound := upto;
    if pgmb_internal.segment_of(place) < pgmb_internal.segment_of(upto) then
      select g.number into number from pgmb.segment g
      where g.stream = next_segment.stream and g.number >= pgmb_internal.segment_of(next_segment.place) and g.dropped_at is null
      order by g.number limit 1;
      place := greatest(place, pgmb_internal.first_number(number));
      if number < pgmb_internal.segment_of(upto) then
        execute 'select coalesce(max(e.seq), 0) from pgmb.segment_' || stream || '_' || number || ' e' into bound;
      end if;
    end if;
    exit when bound > place or number = pgmb_internal.segment_of(upto);
    place := pgmb_internal.first_number(number + 1);
  end loop;
  leaf := 'pgmb.segment_' || stream || '_' || number;
end $$;

-- Where a window of a segment ends that holds at most `max` matching events, how many it holds, and the first of them: for
-- queues of which few events match, so that a window as wide as `max` would hold next to nothing.
create or replace function pgmb_internal.look_ahead(
  base pgmb.claim, leaf text, bound bigint, filter text, max bigint, out ending bigint, out events bigint, out first bigint
)
language plpgsql
as $$
declare
  last bigint;
begin
  ending := least((base).place + 5000, bound);
  execute 'select count(*), min(seq), max(seq) from (' || pgmb_internal.main_part(leaf, 'e.seq', filter) || ' limit $7) found'
    into events, first, last
    using (base).place, ending, (base).batch_snapshot, pg_snapshot_xmin((base).batch_snapshot),
      (base).done_snapshot, pg_snapshot_xmax((base).done_snapshot), look_ahead.max;
  if events = look_ahead.max then
    ending := last;
  end if;
end $$;

-- Events at or below done_seq that belong to the batch, because their transactions were unfinished in the batch before, at
-- most `max` and as many as fit into one lease: how many, and up to where they lie. Their values are not read.
create or replace function pgmb_internal.late_events(
  base pgmb.claim, stream integer, matching text, max bigint, out events bigint, out upto bigint
)
language plpgsql
as $$
declare
  last bigint;
begin
  events := 0;
  upto := (base).done_seq;
  if (base).done_next >= pg_snapshot_xmin((base).done_snapshot)
    -- In the middle of them, asking costs more than looking.
    and ((base).place > 0 or pgmb_internal.has_stragglers(stream, pgmb_internal.batch_of(base), (base).place, (base).done_seq))
  then
    upto := pgmb_internal.fitting_end(late_events.stream, pgmb_internal.batch_of(base), (base).place, (base).done_seq,
      late_events.matching, late_events.max);
    select count(*), max(e.seq) into events, last
    from pgmb_internal.batch_events(late_events.stream, pgmb_internal.batch_of(base), (base).place, late_events.upto,
      late_events.matching, late_events.max, true) e;
    if events = late_events.max then
      upto := last;
    end if;
  end if;
end $$;

-- Receives from a plain queue in every case: another transaction may hold the queue, events may be due again or late, leases
-- may have expired, the range may cross segments. `base`, the queue's position, is passed
-- from step to step and becomes the new claim. token, entry_xid, noted: as pgmb.receive found them.
create or replace function pgmb_internal.receive_plain(
  queue integer, max integer, lease_for interval, token bigint, entry_xid xid8, noted bigint, raw boolean
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  base pgmb.claim := pgmb_internal.lock_queue(receive_plain.queue);
  now timestamptz := clock_timestamp();
  given uuid := pgmb_internal.lease_of(receive_plain.queue, base.id + 1, receive_plain.token);
  sparse boolean := not pgmb_internal.was_dense(base);
  q pgmb.queue;
  swept record;
  late record;
  segment record;
  fits bigint;                               -- where a lease of the window must end
  ahead record;
  lo bigint;                                 -- the lease is (lo, base.place]
  part bigint;
  got bigint := 0;
  scanned bigint := 0;
  opened boolean := false;
  read_before bigint;                        -- nearly all numbers up to here were read before
  rereads boolean := false;                  -- the batch begins with many of them
  pending boolean := false;                  -- the position moved enough to be worth writing
begin
  select * into q from pgmb.queue asked where asked.id = receive_plain.queue;
  if not q.plain then
    -- It was converted before this call had its lock. The next one finds it so.
    return;
  end if;

  swept := pgmb_internal.sweep_when_due(q, base, now);
  base := swept.base;
  pending := swept.pending;

  -- What is due again comes first, in a lease of its own.
  if (not swept.stopped or clock_timestamp() < pgmb_internal.deadline())
    and pgmb_internal.lease_retries(q, base, receive_plain.max, now, now + receive_plain.lease_for, receive_plain.token) > 0
  then
    return query
    select given, r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at, r.attempt
    from pgmb.retry r where r.queue = q.id and r.lease = base.id + 1 order by r.seq;
    return;
  end if;
  if swept.stopped then
    -- What was swept is committed.
    perform pgmb_internal.write_claim(base, 0, 'position', q.bindings, 0, base.place, base.place, 'infinity');
    return;
  end if;

  loop
    -- The batch goes on. At its end the next one is opened, in this call alone until something is written: looking costs
    -- no xid.
    if base.place >= base.upto then
      exit when opened or got > 0;
      opened := true;
      lo := 0;
      read_before := base.upto;
      base := pgmb_internal.open_batch(base, q.numbers, again => true);
      -- Whatever it holds (a rotation, what was rolled back), later calls need not pass over it again.
      pending := pending or base.upto - base.done_seq >= pgmb_internal.worth_a_claim();
      rereads := (read_before - base.done_seq) * 4 > receive_plain.max;
    end if;
    lo := coalesce(lo, base.place);

    if base.place < base.done_seq then
      late := pgmb_internal.late_events(base, q.stream, q.matching, receive_plain.max);
      got := late.events;
      if got > 0 then
        return query
        select given, e.*, 1
        from pgmb_internal.batch_events(q.stream, pgmb_internal.batch_of(base), base.place, late.upto, q.matching, got,
          receive_plain.raw) e;
      end if;
      base.place := late.upto;
      -- Some did not fit, or what follows might not.
      exit when base.place < base.done_seq or got > 0 and pgmb_internal.has_large(q.stream, pgmb_internal.segment_of(base.upto));
    end if;

    -- The main part: (place, upto] of the log, a window at a time, as wide as events are wanted. Where one yields little,
    -- the next are wide. To come back with nothing although there is something further on would have consumers wait, so
    -- that a call ends so only at its deadline.
    while got < receive_plain.max and base.place < base.upto
      and (scanned < 5000 or (got = 0 or scanned < 20000) and clock_timestamp() < pgmb_internal.deadline())
    loop
      segment := pgmb_internal.next_segment(q.stream, base.upto, base.place);
      base.place := segment.place;
      if sparse or rereads then
        ahead := pgmb_internal.look_ahead(base, segment.leaf, segment.bound, q.matching, receive_plain.max - got);
        if rereads and got = 0 and ahead.events > 0 then
          -- The lease begins with its first event: it is not taken for a sparse one.
          base.place := ahead.first - 1;
          lo := base.place;
          rereads := false;
        end if;
      else
        select least(base.place + receive_plain.max - got, segment.bound) ending, null::bigint events into ahead;
      end if;
      fits := case when ahead.events = 0 then ahead.ending else pgmb_internal.fitting_end(q.stream,
        pgmb_internal.batch_of(base), base.place, ahead.ending, q.matching, receive_plain.max - got) end;
      part := 0;
      if ahead.events is distinct from 0 then
        return query execute pgmb_internal.main_part(segment.leaf,
            '$7, ' || pgmb_internal.columns_of(q.stream, receive_plain.raw) || ', 1', q.matching)
          using base.place, fits, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot),
            base.done_snapshot, pg_snapshot_xmax(base.done_snapshot), given;
        get diagnostics part = row_count;
        sparse := sparse or part * 2 < fits - base.place;
      end if;
      got := got + part;
      scanned := scanned + fits - base.place;
      base.place := fits;
      -- Each window by itself fits into a lease. Two may not.
      exit when fits < ahead.ending or got > 0
        and pgmb_internal.has_large(q.stream, pgmb_internal.segment_of(base.upto));
    end loop;
    exit when got > 0 or base.place < base.upto;
  end loop;

  if opened and (got > 0 or pending or scanned >= pgmb_internal.worth_a_claim()) then
    base := pgmb_internal.note_pair(base, case when entry_xid is null then noted end, again => got > 0);
  end if;
  if got > 0 then
    perform pgmb_internal.write_claim(base, receive_plain.token, 'leased', q.bindings, got, lo, base.place,
      now + receive_plain.lease_for, at => now);
    return;
  end if;

  if pending or scanned >= pgmb_internal.worth_a_claim() then
    perform pgmb_internal.write_claim(base, 0, 'position', q.bindings, 0, base.place, base.place, 'infinity');
  end if;
end $$;

-- Receives from an ordered, limited, filtered or prioritised queue: the events of the claim that
-- pgmb_internal.claim_by_policy makes.
create or replace function pgmb_internal.receive_by_policy(
  queue integer, max integer, lease_for interval, entry_xid xid8, noted bigint, stream integer, raw boolean
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  made record;
  claim pgmb.claim;
  lane integer;
  claim_id bigint;
begin
  made := pgmb_internal.claim_by_policy(queue, entry_xid, noted, receive_by_policy.max, lease_for);
  if made.lease is null then
    return;
  end if;
  if made.retried then
    -- In variables: with the functions, a plan made while the table was small reads all that waits.
    lane := pgmb_internal.lease_queue(made.lease);
    claim_id := pgmb_internal.lease_claim(made.lease);
    return query
    select made.lease, r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at, r.attempt
    from pgmb.retry r
    where r.queue = lane and r.lease = claim_id
    order by r.origin, r.seq;
    return;
  end if;
  if made.numbers is not null then
    if pgmb_internal.segment_of(made.numbers[1]) = all (array(select pgmb_internal.segment_of(one) from unnest(made.numbers) one)) then
      -- The common way: one segment. Where they lie close together and in order, all numbers between are walked.
      return query execute 'select $1, ' || pgmb_internal.columns_of(stream, raw) || ', 1 from '
          || case when made.numbers[cardinality(made.numbers)] - made.numbers[1] < 2 * cardinality(made.numbers)
              and made.numbers = array(select one from unnest(made.numbers) one order by one)
            then 'pgmb.segment_' || stream || '_' || pgmb_internal.segment_of(made.numbers[1])
              || ' e where e.seq >= $3 and e.seq <= $4 and e.seq + 0 = any ($2) order by e.seq'
            else 'unnest($2) with ordinality n (number, nth) join pgmb.segment_' || stream || '_' || pgmb_internal.segment_of(made.numbers[1])
              || ' e on e.seq = n.number order by n.nth' end
        using made.lease, made.numbers, made.numbers[1], made.numbers[cardinality(made.numbers)];
    else
      return query
      select made.lease, e.*, 1
      from unnest(made.numbers) with ordinality n (number, nth)
      join pgmb_internal.numbered_events(receive_by_policy.stream, made.numbers, raw => receive_by_policy.raw) e on e.seq = n.number
      order by n.nth;
    end if;
    return;
  end if;
  claim := made.claim;
  if cardinality(made.rows) > 0 then
    return query execute 'select $1, ' || pgmb_internal.columns_of(stream, raw) || ', 1 from pgmb.segment_' || stream
        || '_' || pgmb_internal.segment_of(claim.hi) || ' e where e.ctid = any ($2) order by e.seq + 0'
      using made.lease, made.rows;
    return;
  end if;
  return query
  select made.lease, e.*, 1
  from pgmb_internal.batch_events(receive_by_policy.stream, pgmb_internal.batch_of(claim), claim.lo, claim.hi, made.matching,
    raw => receive_by_policy.raw) e;
end $$;

-- The next events of a queue, at most `max` and 20,000, leased for `lease_for` (default: the queue's own); fewer where they are
-- large: a lease ends with the event that reaches 32 MiB. Settle
-- them by ack, retry or bury with the lease; what is not settled in time is delivered again. Retries that
-- are due come first. `ack` settles an earlier lease in the same round trip and commit. durable => false
-- lets the transaction commit without waiting for the disk, unless it brought delayed events into the log: only for a
-- receive alone in its transaction, where a lost claim means redelivery. raw => true leaves ids that nobody gave null, for clients that
-- derive them themselves as pgmb.derive_id does. Nothing to receive: no rows, nothing written, no transaction id.
-- Lock: one a queue, to the end of the transaction; others supersede this transaction after a second.
-- Needs READ COMMITTED. Errors: MB002 no such queue, MB004 it is a lane or shard, MB011 the ack's lease is lost, MB013 the queue is held by prepared
-- transactions or by several that stay open, MB020 standby, MB021 another cluster, MB029 another isolation level.
create or replace function pgmb.receive(
  queue text, max integer default 100, lease_for interval default null, ack uuid default null,
  durable boolean default true, raw boolean default false
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
set lock_timeout = '1s'
as $$
declare
  now timestamptz := clock_timestamp();
  caller name;
  q record;
  base record;                               -- the queue's position, which becomes the new claim
  opens boolean;                             -- the next batch, in this call
  fits boolean;                              -- a window of as many numbers as events are wanted is enough
  lo bigint;
  token bigint;
  given uuid;
  got bigint;
  large boolean := false;                    -- the segment has values that are stored apart
  lazily text;
begin
  -- Few expressions and functions in them, and no composite values: PL/pgSQL prepares each expression again in every
  -- transaction, and passes a claim by copies of its columns.
  if current_setting('pgmb.cluster_checked', true) is distinct from current_database()
    or current_setting('transaction_isolation') <> 'read committed'
  then
    perform pgmb_internal.assert_primary();
    perform pgmb_internal.assert_read_committed();
  end if;
  select asked.id, asked.stream, asked.stream_name, asked.numbers, asked.bindings, asked.matching, asked.topics, asked.regex,
    asked.generation, asked.lock_key, asked.paused_at, asked.plain, pg_current_xact_id_if_assigned() entry_xid,
    -- At least a moment: a lease that ends where the sweep stands would never be examined.
    greatest(coalesce(receive.lease_for, asked.lease_for), interval '1 millisecond') lease_for,
    -- The sequence, read before this transaction has an xid: what the next batch may start from.
    coalesce(pg_sequence_last_value(asked.numbers), 0) noted,
    asked.plain and exists (select from pgmb.retry r where r.queue = asked.id and r.due_at <= now
      and r.due_at >= pgmb_internal.retry_since(asked.id, now)) due
  into q
  from pgmb.queue asked
  where asked.name = receive.queue and asked.lane_of is null;
  caller := pgmb_internal.caller_at_low_cost();
  if q.id is null then
    perform pgmb_internal.queue_for_consumer(receive.queue);
  elsif not pg_has_role(caller, current_user, 'usage') then
    perform pgmb_internal.assert_consumer(q.id, receive.queue, caller);
  end if;
  if receive.ack is not null then
    got := pgmb_internal.ack_lease(receive.ack, caller);
  end if;
  if q.paused_at is not null or receive.max <= 0 then
    return;
  end if;
  receive.max := least(receive.max, pgmb_internal.lease_events());
  if not receive.durable then
    lazily := pgmb_internal.commit_lazily();
  end if;

  -- The short way: the batch goes on, or the next one begins, in one segment, and nothing is late, due, expired or
  -- special. Numbers are nearly dense, so a window of as many numbers as events are wanted holds at most that many and
  -- needs no limit and no count. Where few match, it is worth it if the window holds the rest of the batch.
  if q.plain and q.entry_xid is null and not q.due
    and (pg_try_advisory_xact_lock(q.lock_key) or pgmb_internal.try_lock(q.id, q.generation, q.lock_key))
  then
    -- Again, as this session may have waited: a lease begins now, and the sweep's time may be later than the call's.
    now := clock_timestamp();
    select c.id, c.place, c.upto, c.done_seq, c.done_next, c.done_snapshot, c.batch_seq, c.batch_next, c.batch_snapshot,
      c.read_before, c.swept, now > c.swept + interval '50 milliseconds' stale, c.openings,
      c.events * 2 >= c.hi - greatest(c.lo, c.done_seq) dense,
      c.held is null and pgmb_internal.generation_of(c.id) = q.generation simple
    into base
    from pgmb.claim c
    where c.queue = q.id order by c.id desc limit 1;
    if base.simple and base.openings = pg_sequence_last_value('pgmb.opening'::regclass) and now >= base.swept
      and not (base.stale and pgmb_internal.needs_sweep(q.id, q.stream_name, base.swept, now))
    then
      if base.stale then
        base.swept := now;
      end if;
      opens := base.place >= base.upto;
      if not opens then
        fits := base.place >= base.done_seq and (base.dense or receive.max >= base.upto - base.place);
      elsif pgmb_internal.had_finished(base.batch_next, base.batch_snapshot) then
        if q.noted <= base.batch_seq then
          -- No number was given out since.
          return;
        end if;
        fits := receive.max >= q.noted - base.batch_seq or base.dense and receive.max >= (base.upto - base.batch_seq) * 4;
        base.done_seq := base.batch_seq;
        base.done_next := base.batch_next;
      else
        fits := receive.max >= q.noted - base.done_seq and pgmb_internal.rereads(base.done_seq, base.done_next,
          base.batch_next, base.batch_snapshot, base.upto, q.noted);
      end if;
      if opens and fits then
        -- As pgmb_internal.open_batch does.
        base.done_snapshot := base.batch_snapshot;
        base.batch_snapshot := pgmb_internal.snapshot();
        base.read_before := greatest(base.read_before, nullif(base.upto, 0));
        base.upto := greatest(pg_sequence_last_value(q.numbers), base.done_seq);
        base.place := base.done_seq;
        if base.upto = base.done_seq then
          return;
        end if;
      end if;
      lo := base.place;
      if fits and pgmb_internal.segment_of(lo) = pgmb_internal.segment_of(base.upto) then
        base.place := least(lo + receive.max, base.upto);
        if base.place > lo + 1
          and pgmb_internal.microseconds(now)
            - coalesce(nullif(current_setting('pgmb.small_' || q.stream || '_' || (lo >> 40), true), '')::bigint, 0)
            not between 0 and 50000
        then
          large := pgmb_internal.look_for_large(q.stream, lo >> 40, now);
        end if;
        if large or receive.max > pgmb_internal.always_fits() then
          base.place := pgmb_internal.fitting_end(q.stream, row(base.done_snapshot, base.done_seq, base.done_next,
            base.batch_snapshot)::pgmb.batch, lo, base.place, q.matching, receive.max);
        end if;
        token := pgmb_internal.draw_token();
        given := pgmb_internal.lease_of(q.id, base.id + 1, token);
        if q.stream_name = 'main' and receive.max <= 100 then
          return query
          select * from pgmb_internal.read_main(pgmb_internal.segment_of(lo), lo, base.place, base.batch_snapshot,
            pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot, pg_snapshot_xmax(base.done_snapshot), given,
            receive.raw, q.topics, q.regex);
        else
          return query execute
            case when receive.max <= 100 then
              'select * from pgmb_internal.read_' || q.stream || '_' || pgmb_internal.segment_of(lo)
                || '($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)'
            -- Of many events, what a function costs each of them is more than planning the statement once.
            else pgmb_internal.main_part('pgmb.segment_' || q.stream || '_' || pgmb_internal.segment_of(lo),
              '$7, ' || pgmb_internal.columns_of(q.stream, receive.raw) || ', 1', q.matching) end
            using lo, base.place, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot),
              base.done_snapshot, pg_snapshot_xmax(base.done_snapshot), given, receive.raw, q.topics, q.regex;
        end if;
        get diagnostics got = row_count;
        if got > 0 then
          if opens then
            if not pgmb_internal.keeps_pair(base.done_next, base.batch_next, base.batch_snapshot) then
              base.batch_next := greatest(pgmb_internal.xid_before(pg_current_xact_id()), base.batch_next);
              base.batch_seq := greatest(q.noted, base.batch_seq);
            end if;
          end if;
          insert into pgmb.claim (queue, id, token, state, bindings, events, lo, hi, place, upto, done_snapshot, done_seq,
            done_next, batch_snapshot, batch_seq, batch_next, read_before, expires_at, swept, openings, at)
          values (q.id, base.id + 1, token, 'leased', q.bindings, got, lo, base.place, base.place, base.upto, base.done_snapshot,
            base.done_seq, base.done_next, base.batch_snapshot, base.batch_seq, base.batch_next, base.read_before,
            now + q.lease_for, base.swept, base.openings, now);
          return;
        end if;
        if opens and base.place = base.upto and base.upto - lo < 64 then
          return;
        end if;
      end if;
    end if;
  end if;

  if q.plain then
    return query
    select * from pgmb_internal.receive_plain(q.id, receive.max, q.lease_for, pgmb_internal.draw_token(), q.entry_xid, q.noted,
      receive.raw);
  else
    return query
    select * from pgmb_internal.receive_by_policy(q.id, receive.max, q.lease_for, q.entry_xid, q.noted, q.stream, receive.raw);
  end if;
end $$;

-- What the first of several queues that has something gives, as receive does: one look at all of them, for
-- consumers that wait. The queues are asked in the order of their names.
create or replace function pgmb.receive_any(
  queues text[], max integer default 100, lease_for interval default null, durable boolean default true,
  raw boolean default false
)
returns table (queue text, lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  asked text;
begin
  -- One order for all callers: each look keeps the queue's lock to the end of the transaction.
  for asked in select name from pg_catalog.unnest(receive_any.queues) name group by name order by name loop
    return query
    select asked, r.*
    from pgmb.receive(asked, receive_any.max, receive_any.lease_for, null, receive_any.durable, receive_any.raw) r;
    if found then
      return;
    end if;
  end loop;
end $$;
