-- Leases: their tokens and events, and what happens when one expires.
--
-- A lease is a UUID of the queue's id (6 hex digits), the claim's id (16) and a random token (10).

create or replace function pgmb_internal.draw_token()
returns bigint
language sql volatile
as $$
  select (random() * 1099511627775)::bigint
$$;

create or replace function pgmb_internal.lease_of(queue integer, claim bigint, token bigint)
returns uuid
language sql immutable parallel safe
as $$
  select (lpad(to_hex(queue), 6, '0') || lpad(to_hex(claim), 16, '0') || lpad(to_hex(token), 10, '0'))::uuid
$$;

-- A lease as bits. Functions that need several of its numbers decode the UUID once; the others call lease_queue,
-- lease_claim or lease_token.
create or replace function pgmb_internal.lease_bits(lease uuid)
returns varbit
language sql immutable parallel safe
as $$
  select ('x' || encode(uuid_send(lease), 'hex'))::varbit
$$;

create or replace function pgmb_internal.queue_of_bits(bits varbit)
returns integer
language sql immutable parallel safe
as $$
  select int4(substring(bits, 1, 24))
$$;

create or replace function pgmb_internal.claim_of_bits(bits varbit)
returns bigint
language sql immutable parallel safe
as $$
  select int8(substring(bits, 25, 64))
$$;

create or replace function pgmb_internal.token_of_bits(bits varbit)
returns bigint
language sql immutable parallel safe
as $$
  select int8(substring(bits, 89, 40))
$$;

create or replace function pgmb_internal.lease_queue(lease uuid)
returns integer
language sql immutable parallel safe
as $$
  select pgmb_internal.queue_of_bits(pgmb_internal.lease_bits(lease))
$$;

create or replace function pgmb_internal.lease_claim(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select pgmb_internal.claim_of_bits(pgmb_internal.lease_bits(lease))
$$;

create or replace function pgmb_internal.lease_token(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select pgmb_internal.token_of_bits(pgmb_internal.lease_bits(lease))
$$;

-- Appends the claim that follows `base`: the queue's new position, and a lease unless the state is position. lo, hi, seqs,
-- events: see pgmb.claim. at: the reading of the clock that expires_at rests on; of two readings, one may be before a step of
-- the clock and one behind it. Another session's claim of that number can only be there when this transaction's snapshot is
-- older than it: the caller tries again (40001). Errors: 23514 the numbers of the generation are used up.
create or replace function pgmb_internal.write_claim(
  base pgmb.claim, token bigint, state pgmb.claim_state, lo bigint, hi bigint, seqs bigint[], events bigint,
  expires_at timestamptz, keys integer[] default null, at timestamptz default clock_timestamp()
)
returns void
language plpgsql
as $$
begin
  -- Not a check of the table: every claim and every ack would prepare it again, 5 % of a receive of one event.
  if pgmb_internal.generation_of(base.id + 1) <> pgmb_internal.generation_of(base.id) then
    raise exception 'lease numbers are used up: the queue must be created again' using errcode = 'check_violation';
  end if;
  insert into pgmb.claim (queue, id, token, state, events, lo, hi, seqs, place, upto,
    done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next, read_before, expires_at, swept, held, keys, flight,
    paid_until, first_origin, passed_keys, passed_origins, passed_seqs, lagging, openings, at)
  values (base.queue, base.id + 1, write_claim.token, write_claim.state, write_claim.events, write_claim.lo, write_claim.hi,
    write_claim.seqs, base.place, base.upto,
    base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot, base.batch_seq, base.batch_next, base.read_before,
    write_claim.expires_at, base.swept, base.held, write_claim.keys,
    base.flight, base.paid_until, base.first_origin, base.passed_keys, base.passed_origins, base.passed_seqs, base.lagging, base.openings,
    write_claim.at)
  on conflict do nothing;
  if not found then
    perform pgmb_internal.raise_moved_on();
  end if;
end $$;

-- Appends a claim that is no lease: the queue has moved on to `base`.
create or replace function pgmb_internal.write_position(base pgmb.claim)
returns void
language plpgsql
as $$
begin
  perform pgmb_internal.write_claim(base, 0, 'position', base.place, base.place, null, 0, 'infinity');
end $$;

-- Appends the lease of these events of the log, and writes the queue's position with it. began: the place from
-- which on the receive looked.
create or replace function pgmb_internal.lease_numbers(
  base pgmb.claim, token bigint, numbers bigint[], began bigint, expires_at timestamptz, keys integer[] default null,
  at timestamptz default clock_timestamp()
)
returns void
language plpgsql
as $$
declare
  first bigint;
  last bigint;
begin
  select min(one) - 1, max(one) into first, last from unnest(numbers) one;
  -- Late events lie below the place from which on the log is walked.
  first := case when began < base.done_seq then first else least(first, began) end;
  perform pgmb_internal.write_claim(base, lease_numbers.token, 'leased', first, last,
    case when last - first > cardinality(numbers) then numbers end, cardinality(numbers), lease_numbers.expires_at,
    lease_numbers.keys, lease_numbers.at);
end $$;

-- The condition that an event e is of one of the keys, by their hashes. A key that is none has the hash 0, which
-- no other has: such events are held by no key.
create or replace function pgmb_internal.with_keys(keys integer[])
returns text
language sql immutable parallel safe
as $$
  select format(' and case when e.key is null then 0 else coalesce(nullif(hashtext(e.key), 0), 1) end = any (%L)', keys)
$$;

-- The condition that an event e is one of those that passed a filter.
create or replace function pgmb_internal.among(chosen bigint[])
returns text
language sql immutable parallel safe
as $$
  select format(' and e.seq = any (%L::bigint[])', chosen)
$$;

-- The hash by which a lease of an ordered queue remembers a key: keys that share one wait for each other.
create or replace function pgmb_internal.key_hash(key text)
returns integer
language sql immutable parallel safe
as $$
  select case when key is null then 0 else coalesce(nullif(hashtext(key), 0), 1) end
$$;

-- The numbers of a claim's events that are not settled yet; `among`: those of these alone.
create or replace function pgmb_internal.unsettled(held pgmb.claim, among bigint[] default null)
returns bigint[]
language plpgsql
as $$
begin
  return array(
    select one from unnest(pgmb_internal.numbers_of(held, unsettled.among)) one
    where not exists (
      select from pgmb.settlement s where s.queue = held.queue and s.claim = held.id and s.seq = one));
end $$;

-- The numbers of a claim's events, settled or not; `among`: those of these alone.
create or replace function pgmb_internal.numbers_of(held pgmb.claim, among bigint[] default null)
returns bigint[]
language plpgsql immutable
as $$
begin
  if among is null then
    return coalesce(held.seqs, array(select generate_series(held.lo + 1, held.hi)));
  end if;
  return array(
    select distinct one from unnest(among) one
    where one > held.lo and one <= held.hi and (held.seqs is null or one = any (held.seqs)));
end $$;

-- The events of a claim that are not settled yet; `among`: those of these alone.
create or replace function pgmb_internal.claim_events(claim pgmb.claim, among bigint[] default null)
returns setof pgmb.event
language plpgsql
as $$
begin
  return query
  select e.* from pgmb_internal.numbered_events((select q.stream from pgmb.queue q where q.id = claim.queue),
    pgmb_internal.unsettled(claim, claim_events.among)) e;
end $$;

-- When the next attempt is due: the queue's exponential backoff with jitter, after `failed` attempts.
create or replace function pgmb_internal.backoff(queue pgmb.queue, failed integer)
returns interval
language sql volatile
as $$
  select least((queue).backoff_max,
      (queue).backoff_base * least(power((queue).backoff_factor, least(failed - 1, 60)), 1e9))
    * (1 - (queue).backoff_jitter + 2 * (queue).backoff_jitter * random())
$$;

-- The errors of an event with one more, the newest last: {attempt, at, error, detail}. It keeps the last ten; of a longer error
-- the beginning, of a longer detail (a traceback) the end, each 2,000 bytes at most.
create or replace function pgmb_internal.with_error(errors jsonb, attempt integer, error text, detail text default null)
returns jsonb
language sql volatile
as $$
  select coalesce((
      select jsonb_agg(kept.one order by kept.nth)
      from (select e.one, e.nth from jsonb_array_elements(errors) with ordinality e (one, nth) order by e.nth desc limit 9) kept), '[]')
    || jsonb_strip_nulls(jsonb_build_object('attempt', attempt, 'at', clock_timestamp(),
      'error', left(error, case when octet_length(left(error, 2000)) <= 2000 then 2000 else 500 end),
      'detail', right(detail, case when octet_length(right(detail, 2000)) <= 2000 then 2000 else 500 end)))
$$;

-- The two halves of a list of numbers; of a single number, that one.
create or replace function pgmb_internal.halves(numbers bigint[])
returns table (half bigint[])
language sql immutable
as $$
  select h.half
  from (values (numbers[:cardinality(numbers) / 2]), (numbers[cardinality(numbers) / 2 + 1:])) h (half)
  where cardinality(h.half) > 0
$$;

-- Copies events of the log to pgmb.retry, to be tried again at due_at (null: after the queue's backoff), or to the dead letters
-- if `attempt` was the last or is `final`. attempt: how many were made; 0 for events that are set aside or released. Returns how many of them the server cannot read: those become dead letters at once,
-- so that they do not hold up the others, with a payload that gives the error, `damage`. fresh: see pgmb.retry.
create or replace function pgmb_internal.fail_events(
  queue pgmb.queue, numbers bigint[], origin bigint, attempt integer, due_at timestamptz, error text,
  final boolean default false, expiries integer default 0, together bigint default null, detail text default null,
  released_at timestamptz default null, fresh boolean default false, damage text default null
)
returns bigint
language plpgsql
as $$
declare
  -- An event that was given back untried has no error.
  errors jsonb := case when attempt > 0 or final or damage is not null
    then pgmb_internal.with_error(null, attempt, coalesce(damage, error), detail) end;
begin
  if final or damage is not null or attempt >= (queue).max_attempts then
    insert into pgmb.dead (queue, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at)
    select (fail_events.queue).id, fail_events.attempt, coalesce('cannot be read: ' || damage, fail_events.error), errors, e.seq, e.id, e.topic, e.key,
      case when damage is null then e.payload else pgmb_internal.unreadable(damage, e.payload, e.headers) end,
      case when damage is null then e.headers end, e.published_at
    from pgmb_internal.numbered_events((fail_events.queue).stream, numbers) e;
    return case when damage is null then 0 else cardinality(numbers) end;
  end if;
  insert into pgmb.retry (queue, due_at, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at,
    ordered, origin, expiries, together, released_at, fresh)
  select (fail_events.queue).id,
    coalesce(fail_events.due_at, clock_timestamp() + pgmb_internal.backoff(fail_events.queue, fail_events.attempt)),
    fail_events.attempt + 1, fail_events.error, errors, e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at,
    (fail_events.queue).ordered, fail_events.origin, fail_events.expiries, fail_events.together, fail_events.released_at,
    fail_events.fresh
  from pgmb_internal.numbered_events((fail_events.queue).stream, numbers) e;
  return 0;
exception
when foreign_key_violation then
  perform pgmb_internal.raise_dropped();
when data_corrupted or index_corrupted or program_limit_exceeded then
  if damage is not null then
    raise;
  end if;
  if cardinality(numbers) = 1 then
    damage := sqlerrm;
  end if;
  return (
    select sum(pgmb_internal.fail_events(fail_events.queue, h.half, fail_events.origin, fail_events.attempt, fail_events.due_at,
      fail_events.error, final, fail_events.expiries, fail_events.together, fail_events.detail, fail_events.released_at,
      fail_events.fresh, damage))
    from pgmb_internal.halves(numbers) h);
end $$;

-- What a dead letter has for a payload that the server cannot read. Only the size of the values is looked at.
create or replace function pgmb_internal.unreadable(damage text, payload json, headers json)
returns json
language sql stable
as $$
  select json_build_object('pgmb_unreadable', left(damage, 500),
    'stored_bytes', pg_column_size(payload) + coalesce(pg_column_size(headers), 0))
$$;

-- Moves rows of pgmb.retry to the dead letters; one that the server cannot read as fail_events does. keeps_last: the last error
-- is told after the new one.
create or replace function pgmb_internal.bury_retried(
  ids bigint[], error text, detail text default null, keeps_last boolean default false, damage text default null
)
returns void
language plpgsql
as $$
begin
  with spent as (
    delete from pgmb.retry r where r.id = any (ids) returning r.*
  )
  insert into pgmb.dead (queue, attempt, error, errors, seq, event_id, topic, key, payload, headers, published_at)
  select s.queue, attempt.failed, coalesce('cannot be read: ' || damage,
      bury_retried.error || case when keeps_last then coalesce('; before: ' || s.error, '') else '' end, s.error),
    pgmb_internal.with_error(s.errors, attempt.failed, coalesce(damage, bury_retried.error), bury_retried.detail), s.seq, s.event_id,
    s.topic, s.key, case when damage is null then s.payload else pgmb_internal.unreadable(damage, s.payload, s.headers) end,
    case when damage is null then s.headers end, s.published_at
  from spent s
  cross join lateral (select case when s.fresh then 0 else s.attempt end failed) attempt
  order by s.id;
exception
when foreign_key_violation then
  perform pgmb_internal.raise_dropped();
when data_corrupted or index_corrupted or program_limit_exceeded then
  if damage is not null then
    raise;
  end if;
  if cardinality(ids) = 1 then
    damage := sqlerrm;
  end if;
  perform pgmb_internal.bury_retried(h.half, bury_retried.error, bury_retried.detail, keeps_last, damage)
  from pgmb_internal.halves(ids) h;
end $$;

-- Sends the retried events that a lease holds to be tried again at once, or to the dead letters where that was their last
-- attempt: the lease expired, or the reason that `error` gives. tried => false: it was not an attempt. Runs under the lock of the
-- lease's claim.
create or replace function pgmb_internal.fail_leased(
  queue pgmb.queue, claim bigint, now timestamptz, error text, expired integer, tried boolean default true
)
returns void
language plpgsql
as $$
begin
  if tried then
    perform pgmb_internal.bury_retried(array(
      select r.id from pgmb.retry r
      where r.queue = (fail_leased.queue).id and r.lease = fail_leased.claim and r.attempt >= (fail_leased.queue).max_attempts),
      fail_leased.error, keeps_last => true);
  end if;
  update pgmb.retry r
  set lease = null, due_at = fail_leased.now, decided_at = fail_leased.now,
    attempt = r.attempt + case when tried then 1 else 0 end, error = case when tried then fail_leased.error else r.error end,
    errors = case when tried then pgmb_internal.with_error(r.errors, r.attempt, fail_leased.error) else r.errors end,
    expiries = r.expiries + fail_leased.expired
  where r.queue = (fail_leased.queue).id and r.lease = fail_leased.claim;
end $$;

-- Whether a dispatcher receives from a queue, for endpoints. An expired lease of such a queue is no attempt: the dispatcher
-- died, and may not have posted the event.
create or replace function pgmb_internal.is_dispatched(queue pgmb.queue)
returns boolean
language sql stable
as $$
  select exists (
    select from pgmb.queue head
    where head.id = coalesce((queue).lane_of, (queue).id)
      and (head.endpoint is not null or exists (
        select from pgmb.endpoint e join pgmb.subscription s on s.id = e.subscription where s.group_id = head.name)))
$$;

-- When a sweep stops and leaves the rest to the next: so early that the receive which sweeps has time left.
create or replace function pgmb_internal.sweep_deadline()
returns timestamptz
language sql volatile
as $$
  select least(pgmb_internal.deadline(), clock_timestamp() + interval '200 milliseconds')
$$;

-- How many leases a sweep reads at a time: of those that sweeps before it left, and of those that expired since.
create or replace function pgmb_internal.sweep_batch()
returns integer
language sql immutable parallel safe
as $$
  select 200
$$;

-- Called by receives alone: until one comes, an expired lease stays, can still be acked, and holds its segments. Ends a lease that
-- expired up to `upto`, and sends its unsettled events to be tried again at once: all of the lease, under the
-- lock of its claim, so that its holder has the whole of it or nothing. A lease from before the queue was moved, which was being
-- settled then, ends whenever it would expire, and its events are not tried again. Returns 'ended'; 'over' if it had ended before
-- or was settled; 'leased' if it ends later; 'locked' if its holder is settling or extending it.
create or replace function pgmb_internal.end_expired(queue integer, claim bigint, upto timestamptz, now timestamptz)
returns text
language plpgsql
as $$
declare
  expired pgmb.claim;
  swept_queue pgmb.queue;
  tried boolean;
  moved_past boolean;                        -- the queue was moved since it was given
begin
  select * into expired from pgmb.claim c
  where c.queue = end_expired.queue and c.id = end_expired.claim for update skip locked;
  if not found then
    return case when exists (select from pgmb.claim c where c.queue = end_expired.queue and c.id = end_expired.claim)
      then 'locked' else 'over' end;
  end if;
  if not pgmb_internal.is_leased(expired.state) then
    return 'over';
  end if;
  select * into swept_queue from pgmb.queue q where q.id = end_expired.queue;
  moved_past := coalesce(expired.id <= (swept_queue.moves -> -1 ->> 'claim')::bigint, false);
  if expired.expires_at > end_expired.upto and not moved_past then
    return 'leased';
  end if;
  tried := not pgmb_internal.is_dispatched(swept_queue);
  if moved_past then
    delete from pgmb.retry r where r.queue = expired.queue and r.lease = expired.id;
  elsif expired.state = 'leased_retries' then
    perform pgmb_internal.fail_leased(swept_queue, expired.id, end_expired.now, 'lease expired', 1, tried);
  elsif not pgmb_internal.is_void(expired.queue, expired.id) then
    perform pgmb_internal.fail_events(swept_queue, pgmb_internal.unsettled(expired),
      expired.id, case when tried then 1 else 0 end, end_expired.now, case when tried then 'lease expired' end, expiries => 1);
  end if;
  update pgmb.claim c set state = 'expired' where c.queue = expired.queue and c.id = expired.id;
  return 'ended';
end $$;

-- Ends leases that expired since the last sweep (pgmb_internal.end_expired). `held` has the leases up to `swept` that are left,
-- most of them because their holders are settling them. A sweep looks at some of these and of those that were made shorter and end by now, in
-- random order, and then at what expired since, however many are held: a transaction that settles many leases delays no
-- other. It stops at its deadline, but not before it ended a lease or moved `swept` on. Runs under the queue's lock. `examined`
-- counts the claims that expired; stopped: more may be left that a sweep could end now.
create or replace function pgmb_internal.sweep(
  queue integer, base pgmb.claim, now timestamptz, out swept timestamptz, out held bigint[], out examined integer,
  out stopped boolean
)
language plpgsql
as $$
declare
  most constant integer := pgmb_internal.sweep_batch();
  until constant timestamptz := pgmb_internal.sweep_deadline();
  batch bigint[];                            -- the leases to look at
  short boolean[];                           -- which of them were made shorter
  more boolean;                              -- not all that sweeps before left are among them
  passing record;
  outcome text;
  ended integer := 0;
  passed integer;
begin
  swept := (base).swept;
  held := (base).held;
  examined := 0;
  select array_agg(chosen.id order by chosen.id), array_agg(chosen.short order by chosen.id), count(*) = most
  into batch, short, more
  from (
    select left_over.*
    from (
      select one.id, false short from unnest(held) one (id)
      union all
      select distinct s.claim, true from pgmb.shortened s where s.queue = sweep.queue and s.ends_at <= sweep.now) left_over
    order by random() limit most) chosen;
  loop
    for passing in select b.id, coalesce(b.short, false) short from unnest(batch, short) b (id, short) loop
      stopped := (ended > 0 or swept > (base).swept) and clock_timestamp() >= until;
      exit when stopped;
      outcome := pgmb_internal.end_expired(sweep.queue, passing.id, case when passing.short then sweep.now else swept end, sweep.now);
      if outcome = 'ended' then
        ended := ended + 1;
      end if;
      if not passing.short then
        held := nullif(array_remove(held, case when outcome <> 'locked' then passing.id end), '{}');
      elsif outcome <> 'locked' then
        -- Also if it was made longer again: no sweep has passed an end that lies ahead.
        delete from pgmb.shortened s where s.queue = sweep.queue and s.claim = passing.id and s.ends_at <= sweep.now;
      end if;
    end loop;
    exit when stopped or swept >= sweep.now;
    stopped := (ended > 0 or swept > (base).swept) and clock_timestamp() >= until;
    exit when stopped;
    batch := null;
    short := null;
    passed := 0;
    for passing in
      select c.id, c.state, c.expires_at
      from pgmb.claim c
      where c.queue + 0 = sweep.queue and c.expires_at > sweep.swept and c.expires_at <= sweep.now
      order by c.expires_at fetch first most rows with ties
    loop
      passed := passed + 1;
      swept := passing.expires_at;
      if pgmb_internal.is_leased(passing.state) then
        batch := batch || passing.id;
      end if;
    end loop;
    examined := examined + passed;
    held := held || batch;
    if passed < most then
      swept := greatest(swept, sweep.now);
    end if;
  end loop;
  stopped := coalesce(stopped, false) or more and ended > 0;
end $$;

-- Finds leases that no sweep would look at, and has the next one look at them. A lease ends after `swept`, or is held, or is
-- noted in pgmb.shortened: this does not rest on it, but looks at the leases. One given or extended at a time that lies ahead
-- ends once it has lasted as long as it was to, counted since the clock went back. Called by maintain(), after settled claims
-- were cleared. Of leases that were given ahead it finds those among the `most` of a queue that end last: there may be many
-- leases, and they end later than most others. Stops at `until`, after one lease at least, and returns whether it did. Queues
-- come in no order, so that none is always among those that are left.
create or replace function pgmb_internal.find_hidden_leases(now timestamptz, until timestamptz, most integer default 10000)
returns boolean
language plpgsql
as $$
declare
  hidden record;
  ahead timestamptz := find_hidden_leases.now + interval '1 second';
  clock pgmb.clock := pgmb_internal.read_clock();
begin
  for hidden in
    select lease.*
    from (select queue.id from pgmb.queue order by random()) q
    cross join lateral (select c.swept, c.held from pgmb.claim c where c.queue = q.id order by c.id desc limit 1) newest
    cross join lateral (
      (select c.queue, c.id, c.expires_at, coalesce(c.extended_at, c.at) decided_at
      from pgmb.claim c
      where c.queue + 0 = q.id and c.expires_at <= least(newest.swept, find_hidden_leases.now)
        and pgmb_internal.is_leased(c.state) and (c.id = any (newest.held)) is not true
        and not exists (select from pgmb.shortened s where s.queue = c.queue and s.claim = c.id)
      order by c.expires_at limit 1000)
      union all
      (select late.*
      from (
        select c.queue, c.id, c.expires_at, coalesce(c.extended_at, c.at) decided_at
        from pgmb.claim c
        where c.queue + 0 = q.id and c.expires_at > ahead and c.expires_at < 'infinity'
          and pgmb_internal.is_leased(c.state)
        order by c.expires_at desc limit most) late
      where late.decided_at > ahead
        and (late.expires_at - late.decided_at <= pgmb_internal.passed_since(late.decided_at, find_hidden_leases.now, clock)
          or width_bucket(late.decided_at, clock.up_to) = cardinality(clock.up_to))
      limit 1000)) lease
  loop
    if hidden.decided_at > ahead then
      -- Written since the clock went back last: nothing tells how long ago.
      if width_bucket(hidden.decided_at, clock.up_to) = cardinality(clock.up_to) then
        perform pgmb_internal.note_ahead(hidden.decided_at);
        clock := pgmb_internal.read_clock();
      end if;
      continue when hidden.expires_at - hidden.decided_at
        > pgmb_internal.passed_since(hidden.decided_at, find_hidden_leases.now, clock);
      update pgmb.claim c
      set expires_at = find_hidden_leases.now, at = least(c.at, find_hidden_leases.now), extended_at = find_hidden_leases.now
      where c.ctid = (select early.ctid from pgmb.claim early where early.queue = hidden.queue and early.id = hidden.id
        and pgmb_internal.is_leased(early.state) and coalesce(early.extended_at, early.at) > find_hidden_leases.now
        for no key update skip locked);
      -- Being settled: next time.
      continue when not found;
    end if;
    insert into pgmb.shortened (queue, claim, ends_at) values (hidden.queue, hidden.id, find_hidden_leases.now);
    if clock_timestamp() >= until then
      return true;
    end if;
  end loop;
  return false;
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
    or exists (select from pgmb.shortened s where s.queue = needs_sweep.queue and s.ends_at <= needs_sweep.now)
    or exists (select from pgmb.delayed d where d.stream = needs_sweep.stream_name and d.due_at <= needs_sweep.now
      and d.due_at >= pgmb_internal.delayed_since(needs_sweep.stream_name, needs_sweep.now))
  then
    return true;
  end if;
  passed := pgmb_internal.entries_read('pgmb.delayed_due') - read_before;
  return pgmb_internal.should_store_scan(pgmb_internal.delayed_setting(needs_sweep.stream_name), passed)
    and pgmb_internal.first_delayed(needs_sweep.stream_name, needs_sweep.now) is not null;
end $$;

-- Sweeps a queue that is at `base`, or a lane of it, at most every 50 ms, and brings due delayed events into the log.
-- pending: the position is worth writing. stopped: the sweep used up its time. A call that goes on for longer is
-- superseded or cancelled, and what it swept is lost: it gives what is due again if there is time left, and nothing else.
create or replace function pgmb_internal.sweep_when_due(
  q pgmb.queue, inout base pgmb.claim, now timestamptz, out pending boolean, out stopped boolean
)
language plpgsql
as $$
declare
  swept record;
begin
  stopped := false;
  -- The clock was set back: the sweep begins again, because leases that were given since may end before `swept`.
  pending := base.swept > now;
  if pending then
    base.swept := '-infinity';
  end if;
  if now > base.swept + interval '50 milliseconds' or base.held is not null then
    swept := pgmb_internal.sweep(q.id, base, now);
    stopped := swept.stopped;
    -- `held` must be written whenever it changed: leases that only this call knows to have ended would be looked at again.
    pending := pending or stopped or swept.examined >= 64 or swept.held is distinct from base.held;
    base.swept := swept.swept;
    base.held := swept.held;
    if not stopped then
      perform pgmb_internal.release_due(q.stream_name, now, topics => q.topics, regex => q.regex);
    end if;
  end if;
end $$;
