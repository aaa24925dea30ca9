-- Receiving: the next events of a queue, under a lease.

-- The events of a stream that have these numbers, in the order of the numbers, as a receive gives them. main: it is the stream
-- main. raw: ids that nobody gave stay null.
create or replace function pgmb_internal.read_numbers(stream integer, main boolean, numbers bigint[], given uuid, raw boolean)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  segment bigint := pgmb_internal.segment_of(numbers[1]);
  leaf text := format('pgmb.segment_%s_%s', stream, segment);
begin
  if segment <> any (array(select pgmb_internal.segment_of(one) from unnest(numbers) one)) then
    return query
    select given, e.*, 1
    from unnest(numbers) with ordinality n (number, nth)
    join pgmb_internal.numbered_events(read_numbers.stream, numbers, raw => read_numbers.raw) e on e.seq = n.number
    order by n.nth;
  elsif cardinality(numbers) > 100 then
    return query execute 'select $2, ' || pgmb_internal.columns_of(stream, raw) || ', 1'
        || case when pgmb_internal.ascend(numbers) then pgmb_internal.numbered_rows(leaf, numbers, '', true)
          else format(' from unnest($1) with ordinality n (number, nth) join %s e on e.seq = n.number order by n.nth', leaf) end
      using numbers, given;
  elsif main then
    return query select * from pgmb_internal.numbered_main(segment, numbers, given, raw);
  else
    return query execute format('select * from pgmb_internal.numbered_%s_%s($1, $2, $3)', stream, segment)
      using numbers, given, raw;
  end if;
end $$;

-- Receives in every case, from a queue of any kind: claims, then reads what the lease holds. entry_xid, noted: as pgmb.receive
-- found them.
create or replace function pgmb_internal.receive_claimed(
  queue integer, max integer, lease_for interval, entry_xid xid8, noted bigint, stream integer, main boolean, raw boolean
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  made record;
begin
  made := pgmb_internal.claim_queue(queue, entry_xid, noted, receive_claimed.max, lease_for);
  if made.lease is not null then
    return query
    select * from pgmb_internal.read_claimed(made.lease, made.retried, made.numbers, stream, main, raw);
  end if;
end $$;

-- The events of a lease that pgmb_internal.claim_queue gave.
create or replace function pgmb_internal.read_claimed(
  given uuid, retried boolean, numbers bigint[], stream integer, main boolean, raw boolean
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer)
language plpgsql
as $$
declare
  -- In variables: with the functions, a plan made while the table was small reads all that waits.
  lane integer;
  claim_id bigint;
begin
  if not retried then
    return query select * from pgmb_internal.read_numbers(stream, main, numbers, given, raw);
    return;
  end if;
  lane := pgmb_internal.lease_queue(given);
  claim_id := pgmb_internal.lease_claim(given);
  return query
  select given, r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at, r.attempt
  from pgmb.retry r
  where r.queue = lane and r.lease = claim_id
  -- Only an ordered queue keeps the order in which events were received first.
  order by case when r.ordered then r.origin else 0 end, r.seq;
end $$;

-- The next events of a queue, at most `max` and 20,000, leased for `lease_for` (default: the queue's own); fewer where they are
-- large: a lease ends with the event that reaches 32 MiB. Settle
-- them by ack, retry or bury with the lease; what is not settled in time is delivered again. Retries that
-- are due come first. `ack` settles an earlier lease in the same round trip and commit. durable => false
-- lets the transaction commit without waiting for the disk, unless it brought delayed events into the log: only for a
-- receive alone in its transaction, where a lost claim means redelivery. raw => true leaves ids that nobody gave null, for clients that
-- derive them themselves as pgmb.derive_id does. Nothing to receive: no rows, nothing written, no transaction id.
-- Writes one row of pgmb.claim, and of retries each row of pgmb.retry. Locks the queue, or each lane or shard that it looks at, to the
-- end of the transaction, also where it finds nothing; others supersede this transaction after a second.
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
  seqs bigint[];                             -- what it leases, where that is not all of the window
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
  select asked.id, asked.stream, asked.stream_name, asked.numbers, asked.matching, asked.topics, asked.regex,
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
  if q.plain and q.entry_xid is null and not q.due and pgmb_internal.takes_short_ways()
    and (pg_try_advisory_xact_lock(q.lock_key) or pgmb_internal.try_lock(q.id, q.generation, q.lock_key))
  then
    -- Again, as this session may have waited: a lease begins now, and the sweep's time may be later than the call's.
    now := clock_timestamp();
    select c.id, c.place, c.upto, c.done_seq, c.done_next, c.done_snapshot, c.batch_seq, c.batch_next, c.batch_snapshot,
      c.read_before, c.swept, now > c.swept + interval '50 milliseconds' stale, c.openings,
      c.events * 2 >= c.hi - greatest(c.lo, c.done_seq) dense,
      c.held is null and pgmb_internal.generation_of(c.id + 1) = q.generation simple
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
        if q.matching <> '' then
          -- Newer than the batch, as in pgmb_internal.claim_lane.
          select asked.matching, asked.topics, asked.regex into q.matching, q.topics, q.regex
          from pgmb.queue asked where asked.id = q.id;
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
          if got < base.place - lo then
            if q.stream_name = 'main' then
              seqs := pgmb_internal.numbers_main(pgmb_internal.segment_of(lo), lo, base.place, base.batch_snapshot,
                pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot, pg_snapshot_xmax(base.done_snapshot), q.topics, q.regex);
            else
              seqs := pgmb_internal.numbers_in(q.stream, pgmb_internal.segment_of(lo), lo, base.place, base.batch_snapshot,
                base.done_snapshot, q.topics, q.regex);
            end if;
          end if;
          insert into pgmb.claim (queue, id, token, state, events, lo, hi, seqs, place, upto, done_snapshot, done_seq,
            done_next, batch_snapshot, batch_seq, batch_next, read_before, expires_at, swept, openings, at)
          values (q.id, base.id + 1, token, 'leased', got, lo, base.place, seqs, base.place, base.upto, base.done_snapshot,
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

  return query
  select * from pgmb_internal.receive_claimed(q.id, receive.max, q.lease_for, q.entry_xid, q.noted, q.stream,
    q.stream_name = 'main', receive.raw);
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
