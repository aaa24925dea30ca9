-- Leases: the lock under which a queue's position moves, the tokens, and what happens when one expires.
--
-- A claim's id is (generation << 40) + number. A lease is a UUID of the queue's id (6 hex digits), the claim's id (16)
-- and a random token (10).

create or replace function pgmb_internal.lease_of(queue integer, claim bigint, token bigint)
returns uuid
language sql immutable parallel safe
as $$
  select (lpad(to_hex(queue), 6, '0') || lpad(to_hex(claim), 16, '0') || lpad(to_hex(token), 10, '0'))::uuid
$$;

create or replace function pgmb_internal.lease_queue(lease uuid)
returns integer
language sql immutable parallel safe
as $$
  select ('x' || encode(substr(uuid_send(lease), 1, 3), 'hex'))::bit(24)::integer
$$;

create or replace function pgmb_internal.lease_claim(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select ('x' || encode(substr(uuid_send(lease), 4, 8), 'hex'))::bit(64)::bigint
$$;

create or replace function pgmb_internal.lease_token(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select ('x' || encode(substr(uuid_send(lease), 12, 5), 'hex'))::bit(40)::bigint
$$;

-- Takes the queue's lock until the transaction ends and returns its newest claim, the queue's position. A receive in a
-- transaction that stays open would hold up all others: they wait for one second, then open a new generation at the last
-- committed position, and that receive's claim is void. If a second such transaction holds the newer generation by then,
-- they wait a quarter of a second for that one. A generation that another session is opening is waited for.
-- Errors: MB002 the queue was dropped meanwhile, MB013 no generation can be opened.
create or replace function pgmb_internal.lock_queue(queue integer)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
  hint record;
  newest record;
  wanted integer;
  waited boolean := false;
  given_up integer := -1;
  openings bigint;
begin
  -- The common way: nobody opened a generation since the last claim. Others hold the lock for a fraction of a
  -- millisecond: trying again now and then lets whoever runs go on, where a queue of waiters would have each wait for the
  -- next to be woken.
  select q.generation, q.lock_key into hint from pgmb.queue q where q.id = lock_queue.queue;
  for attempt in 1 .. 10 loop
    if pg_try_advisory_xact_lock(hint.lock_key) then
      select * into base from pgmb.claim c where c.queue = lock_queue.queue order by c.id desc limit 1;
      if base.openings = pg_sequence_last_value('pgmb.opening'::regclass) and base.id >> 40 = hint.generation then
        return base;
      end if;
      base := null;
      exit;
    end if;
    -- Or the hint is old: a long transaction holds a generation that others have left behind.
    exit when exists (select from pgmb.generation g
      where g.queue = lock_queue.queue and g.number > hint.generation and g.base is not null);
    perform pg_sleep(0.001);
  end loop;
  loop
    newest := pgmb_internal.newest_generation(lock_queue.queue);
    wanted := greatest(newest.opened, newest.opening, given_up + 1);
    if not pg_try_advisory_xact_lock(pgmb_internal.queue_lock(lock_queue.queue, wanted)) then
      begin
        if not waited then
          waited := true;
          perform pg_advisory_xact_lock(pgmb_internal.queue_lock(lock_queue.queue, wanted));
        else
          perform pgmb_internal.lock_after_waiting(pgmb_internal.queue_lock(lock_queue.queue, wanted));
        end if;
      exception when lock_not_available or deadlock_detected then
        given_up := wanted;
        continue;
      end;
    end if;
    -- Looked at again under the lock: whoever opens a generation from here on sees what was committed before. Those
    -- whose number is drawn by now have marked theirs before.
    openings := pg_sequence_last_value('pgmb.opening'::regclass);
    newest := pgmb_internal.newest_generation(lock_queue.queue);
    continue when greatest(newest.opened, newest.opening) > wanted;
    if newest.opened = wanted then
      select * into base from pgmb.claim c where c.queue = lock_queue.queue order by c.id desc limit 1;
    else
      base := pgmb_internal.open_generation(lock_queue.queue, wanted);
    end if;
    exit when base.id is not null;
  end loop;
  base.openings := openings;
  return base;
end $$;

-- Takes an advisory lock for the transaction, for a caller that has waited for another one already.
create or replace function pgmb_internal.lock_after_waiting(key bigint)
returns void
language sql
set lock_timeout = '250ms'
as $$
  select pg_advisory_xact_lock(key)
$$;

-- The newest generation of a queue that was opened, and the newest that another transaction is opening at this moment or
-- has just opened. Errors: MB002 the queue was dropped.
create or replace function pgmb_internal.newest_generation(queue integer, out opened integer, out opening integer)
language plpgsql
as $$
begin
  select coalesce(max(g.number) filter (where g.base is not null), q.generation),
    max(g.number) filter (where g.base is null and g.xmax <> '0'::xid and pgmb_internal.fate(g.xmax) <> 'aborted')
  into opened, opening
  from pgmb.queue q left join pgmb.generation g on g.queue = q.id and g.number >= q.generation
  where q.id = newest_generation.queue
  group by q.id;
  if opened is null then
    raise exception 'the queue was dropped' using errcode = 'MB002';
  end if;
end $$;

-- What became of a transaction, by the 32 bits that a row shows of its id: in progress, committed or aborted.
create or replace function pgmb_internal.fate(xid xid)
returns text
language sql volatile
as $$
  -- Within 2^31 of the next one, on either side: a snapshot may be older than the row.
  select coalesce(pg_xact_status((near.next
    + ((fate.xid::text::bigint - near.next + 2147483648) & 4294967295) - 2147483648)::text::xid8), 'aborted')
  from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint next) near
$$;

-- Opens a generation under its lock and returns its first claim, the queue's position; null if a newer one is there by
-- now. First its row is marked, which every session sees; then transactions that are committing what they received are
-- waited for; then the position is read. So a claim that this does not find was not committed when it was marked.
-- Errors: MB013.
create or replace function pgmb_internal.open_generation(queue integer, number integer)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
begin
  begin
    perform from pgmb.generation g
    where g.queue = open_generation.queue and g.number = open_generation.number and g.base is null
    for no key update;
    if not found then
      perform pgmb_internal.raise_held(open_generation.queue);
    end if;
    perform nextval('pgmb.opening');
    perform pgmb_internal.await_commits(open_generation.queue);
    select * into base from pgmb.claim c where c.queue = open_generation.queue order by c.id desc limit 1;
    if base.id is null or base.id >> 40 >= open_generation.number then
      -- The mark goes with this block.
      raise exception 'overtaken' using errcode = 'MB000';
    end if;
    update pgmb.generation g set base = base.id, opened_at = clock_timestamp()
    where g.queue = open_generation.queue and g.number = open_generation.number;
    if not exists (select from pgmb.generation g
      where g.queue = open_generation.queue and g.number = open_generation.number + 1)
    then
      perform pgmb_internal.add_generations(open_generation.queue);
    end if;
  exception
    when sqlstate 'MB000' then
      return null;
    when lock_not_available then
      perform pgmb_internal.raise_held(open_generation.queue);
  end;
  -- The new generation's first claim is written at once, whatever the caller finds to receive: without
  -- it the void claim, once committed, would be the newest and so the queue's position.
  base.id := (open_generation.number::bigint << 40) + (base.id & 1099511627775);
  perform pgmb_internal.write_claim(base, 0, 'p', base.bindings, 0, base.place, base.place, 'infinity');
  base.id := base.id + 1;
  return base;
end $$;

-- Waits until no transaction is committing that settled what it received of a queue.
create or replace function pgmb_internal.await_commits(queue integer)
returns void
language plpgsql
as $$
begin
  perform from pgmb.generation g where g.queue = await_commits.queue and g.number = -1 for update;
  -- Rolled back at once: others who open a generation must not wait for this transaction.
  raise exception 'waited' using errcode = 'MB000';
exception when sqlstate 'MB000' then
  null;
end $$;

-- Gives a queue rows for its next generations.
create or replace function pgmb_internal.add_generations(queue integer)
returns void
language sql
as $$
  insert into pgmb.generation (queue, number)
  select add_generations.queue, ahead
  from (select coalesce(max(g.number), -1) last from pgmb.generation g
    where g.queue = add_generations.queue and (g.base is not null or g.number = -1)) newest,
    generate_series(greatest(newest.last, 0) + 1, greatest(newest.last, 0) + 4) ahead
  on conflict do nothing
$$;

-- Raises that a queue can neither be received from nor be taken over at this moment.
create or replace function pgmb_internal.raise_held(queue integer)
returns void
language plpgsql
as $$
begin
  raise exception 'queue % is held by transactions that stay open',
    (select quote_literal(q.name) from pgmb.queue q where q.id = raise_held.queue)
    using errcode = 'MB013',
      hint = 'One received and settled and is prepared: commit or roll it back (pg_prepared_xacts). Or several received and stay open.';
end $$;

-- The advisory lock of a queue's generation. A stranger who saw it in pg_locks and holds it delays receivers for a
-- second: then they open the next generation, which has another.
create or replace function pgmb_internal.queue_lock(queue integer, generation integer)
returns bigint
language sql stable
as $$
  select pgmb_internal.lock_key('queue ' || queue || ' generation ' || generation)
$$;

-- Whether a claim was made void: a newer generation that counts went on from a claim before it. The newest generation
-- counts, and so does each that the base of one that counts belongs to.
create or replace function pgmb_internal.is_void(queue integer, claim bigint)
returns boolean
language sql stable
as $$
  with recursive counting (number, base) as (
    (select g.number, g.base from pgmb.generation g
    where g.queue = is_void.queue and g.number > is_void.claim >> 40 and g.base is not null
    order by g.number desc limit 1)
    union all
    select g.number, g.base from counting c
    join pgmb.generation g on g.queue = is_void.queue and g.number = c.base >> 40 and g.base is not null
    where g.number > is_void.claim >> 40
  )
  select exists (select from counting c where c.base < is_void.claim)
$$;

-- How a committed claim stands: h it holds, whatever happens; v it is void; u undecided: a transaction is opening a
-- generation and may not have seen it. Asked after the claim committed, h stays true: a generation that is opened later
-- goes on from this claim or a later one. Errors: 40001 by the caller's snapshot this cannot be told.
create or replace function pgmb_internal.standing(queue integer, claim bigint)
returns "char"
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  newer record;
begin
  loop
    select bool_or(g.base is not null) opened, bool_or(g.base is null and pgmb_internal.fate(g.xmax) = 'in progress') opening,
      bool_or(g.base is null and pgmb_internal.fate(g.xmax) = 'committed') unseen
    into newer
    from pgmb.generation g
    where g.queue = standing.queue and g.number > standing.claim >> 40
      and (g.base is not null or g.xmax <> '0'::xid);
    exit when newer.unseen is not true;
    -- It committed after this statement's snapshot: the next statement sees it, unless they share one.
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
      perform pgmb_internal.raise_moved_on();
    end if;
  end loop;
  if newer.opened and pgmb_internal.is_void(standing.queue, standing.claim) then
    return 'v';
  end if;
  -- A later claim of the same generation by another transaction was made after this one committed, and looked for
  -- openers first: whoever opens now saw it.
  if newer.opening and not exists (
    select from pgmb.claim later
    where later.queue = standing.queue and later.id > standing.claim and later.id < ((standing.claim >> 40) + 1) << 40
      and later.xid <> (select own.xid from pgmb.claim own where own.queue = standing.queue and own.id = standing.claim))
  then
    return 'u';
  end if;
  return 'h';
end $$;

-- Whether a claim was made void or may be.
create or replace function pgmb_internal.may_be_void(queue integer, claim bigint)
returns boolean
language sql volatile
as $$
  select pgmb_internal.standing(may_be_void.queue, may_be_void.claim) <> 'h'
$$;

-- A transaction that received and settled in one go may have been superseded while it stayed open: it must
-- not commit then, or its effects would happen twice. Runs at commit; holds a row that whoever opens a generation
-- waits for (pgmb_internal.await_commits), so that nobody supersedes between this check and the commit.
create or replace function pgmb_internal.refuse_void()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.hold_generation(new.queue);
  if pgmb_internal.may_be_void(new.queue, new.id) then
    raise exception 'the lease was superseded: this transaction stayed open for too long after its receive'
      using errcode = 'MB011', hint = 'Receive in a transaction of its own, or finish within a second.';
  end if;
  return null;
end $$;

-- Keeps generations of a queue from being opened until this transaction ends, but for those that are marked already.
create or replace function pgmb_internal.hold_generation(queue integer)
returns void
language sql
set enable_seqscan = off
set jit = off
as $$
  select from pgmb.generation g where g.queue = hold_generation.queue and g.number = -1 for share
$$;

-- Raises that another session moved the queue's position behind this transaction's snapshot.
create or replace function pgmb_internal.raise_moved_on()
returns void
language plpgsql
as $$
begin
  raise exception 'the queue moved on after this transaction''s snapshot' using errcode = '40001',
    hint = 'Try the transaction again.';
end $$;

-- Appends the claim that follows `base`: the queue's new position, and the lease of (lo, hi] if it is one.
-- Another session's claim of that number can only be there when this transaction's snapshot is older than
-- it: the caller tries again (40001).
create or replace function pgmb_internal.write_claim(
  base pgmb.claim, token bigint, state "char", bindings integer, events bigint, lo bigint, hi bigint,
  expires_at timestamptz, keys integer[] default null, chosen bigint[] default null
)
returns void
language plpgsql
as $$
begin
  insert into pgmb.claim (queue, id, token, state, bindings, events, lo, hi, place, upto,
    done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next,
    own, own_seq, expires_at, swept, held, keys, open, paid_until, chosen, openings)
  values (base.queue, base.id + 1, write_claim.token, write_claim.state, write_claim.bindings, write_claim.events,
    write_claim.lo, write_claim.hi, base.place, base.upto,
    base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot, base.batch_seq, base.batch_next,
    base.own, base.own_seq, write_claim.expires_at, base.swept, base.held, write_claim.keys, base.open, base.paid_until,
    write_claim.chosen, base.openings)
  on conflict do nothing;
  if not found then
    perform pgmb_internal.raise_moved_on();
  end if;
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

-- The events of a claim that are not settled yet; `numbers`: those of them alone.
create or replace function pgmb_internal.claim_events(claim pgmb.claim, numbers bigint[] default null)
returns setof pgmb.event
language plpgsql
as $$
declare
  held pgmb.claim := claim_events.claim;
  only_these text := case when claim_events.numbers is null then '' else pgmb_internal.among(claim_events.numbers) end;
  q pgmb.queue;
  b pgmb.binding;
  columns text;
  leaf text;
begin
  select * into q from pgmb.queue where id = held.queue;
  select * into b from pgmb.binding where queue = q.id and version = held.bindings;
  if held.state = 'o' then
    select pgmb_internal.event_columns(s.salt) into columns from pgmb.stream s where s.id = q.stream;
    for leaf in
      select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
      where s.stream = q.stream and s.number between held.lo >> 40 and held.hi >> 40
        and s.dropped_at is null
      order by s.number
    loop
      return query execute format('select * from (select %s from %s e
          where e.xid = $1 and e.seq + 0 > $2 and e.seq + 0 <= $3 %s) own
          where not exists (select from pgmb.settlement s where s.queue = $4 and s.claim = $5 and s.seq = own.seq)
          order by seq + 0', columns, leaf, b.matching || only_these)
        using held.xid, held.lo, held.hi, held.queue, held.id;
    end loop;
  else
    if held.chosen is not null then
      b.matching := pgmb_internal.among(held.chosen);
    end if;
    if held.keys is not null then
      b.matching := b.matching || pgmb_internal.with_keys(held.keys);
    end if;
    return query
    select e.* from pgmb_internal.batch_events(q.stream, held.done_snapshot, held.done_seq, held.done_next,
      held.batch_snapshot, held.own, held.own_seq, held.lo, held.hi,
      b.matching || only_these, 9223372036854775807) e
    where not exists (
      select from pgmb.settlement s where s.queue = held.queue and s.claim = held.id and s.seq = e.seq);
  end if;
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

-- Sends an event of claim `origin` whose attempt failed to be tried again at due_at, or to the dead letters
-- when that was its last or is `final`.
create or replace function pgmb_internal.fail_event(
  queue pgmb.queue, event pgmb.event, origin bigint, attempt integer, due_at timestamptz, error text,
  final boolean default false, expiries integer default 0, together bigint default null
)
returns void
language plpgsql
as $$
begin
  if final or attempt >= (queue).max_attempts then
    insert into pgmb.dead (queue, attempt, error, seq, event_id, topic, key, payload, headers, published_at)
    values ((queue).id, fail_event.attempt, fail_event.error, (event).seq, (event).id, (event).topic, (event).key,
      (event).payload, (event).headers, (event).published_at);
  else
    insert into pgmb.retry (queue, due_at, attempt, error, seq, event_id, topic, key, payload, headers, published_at,
      ordered, origin, expiries, together)
    values ((queue).id, fail_event.due_at, fail_event.attempt + 1, fail_event.error, (event).seq, (event).id,
      (event).topic, (event).key, (event).payload, (event).headers, (event).published_at,
      (queue).ordered, fail_event.origin, fail_event.expiries, fail_event.together);
  end if;
end $$;

-- Sends the retried events that a lease holds to be tried again at once, or to the dead letters where that was their last
-- attempt: the lease expired, or the reason that `error` gives. Runs under the lock of the lease's claim.
create or replace function pgmb_internal.fail_leased(queue pgmb.queue, claim bigint, now timestamptz, error text, expired integer)
returns void
language sql
as $$
  with spent as (
    delete from pgmb.retry r
    where r.queue = (fail_leased.queue).id and r.lease = fail_leased.claim and r.attempt >= (fail_leased.queue).max_attempts
    returning r.*
  ), back as (
    update pgmb.retry r
    set lease = null, due_at = fail_leased.now, attempt = r.attempt + 1, error = fail_leased.error,
      expiries = r.expiries + fail_leased.expired
    where r.queue = (fail_leased.queue).id and r.lease = fail_leased.claim and r.attempt < (fail_leased.queue).max_attempts
  )
  insert into pgmb.dead (queue, attempt, error, seq, event_id, topic, key, payload, headers, published_at)
  select s.queue, s.attempt, fail_leased.error || coalesce('; before: ' || s.error, ''), s.seq, s.event_id, s.topic,
    s.key, s.payload, s.headers, s.published_at
  from spent s order by s.id
$$;

-- Examines leases that expired since the last sweep, at most about 200, and sends their unsettled events to be tried
-- again at once: all of a lease, under the lock of its claim, so that its holder has the whole of it or nothing. Those
-- that were made shorter are looked at in any case. Runs under the queue's lock. `examined` counts the claims that
-- expired.
create or replace function pgmb_internal.sweep(
  queue integer, base pgmb.claim, now timestamptz, out swept timestamptz, out held bigint[], out examined integer
)
language plpgsql
as $$
declare
  passing record;
  expired pgmb.claim;
  swept_queue pgmb.queue;
begin
  swept := (base).swept;
  examined := 0;
  for passing in
    select c.id, c.state, c.expires_at
    from pgmb.claim c
    where c.queue + 0 = sweep.queue and c.expires_at > (base).swept and c.expires_at <= sweep.now
    order by c.expires_at fetch first 200 rows with ties
  loop
    examined := examined + 1;
    swept := passing.expires_at;
    if passing.state in ('l', 'o', 'r') then
      held := held || passing.id;
    end if;
  end loop;
  if examined < 200 then
    swept := greatest(swept, sweep.now);
  end if;
  held := (base).held || held;
  for passing in
    select one.id, false short from unnest(held) one (id)
    union all
    select distinct s.claim, true from pgmb.shortened s where s.queue = sweep.queue
  loop
    select * into expired from pgmb.claim c
    where c.queue = sweep.queue and c.id = passing.id for update skip locked;
    if found then
      if expired.state in ('l', 'o', 'r') and expired.expires_at <= (case when passing.short then sweep.now else swept end) then
        select * into swept_queue from pgmb.queue q where q.id = sweep.queue;
        if expired.state = 'r' then
          perform pgmb_internal.fail_leased(swept_queue, expired.id, sweep.now, 'lease expired', 1);
        elsif not pgmb_internal.is_void(expired.queue, expired.id) then
          perform pgmb_internal.fail_event(swept_queue, e, expired.id, 1, sweep.now, 'lease expired', expiries => 1)
          from pgmb_internal.claim_events(expired) e;
        end if;
        update pgmb.claim c set state = 'x' where c.queue = expired.queue and c.id = expired.id;
        expired.state := 'x';
      end if;
    else
      -- Locked by its holder, or cleared.
      continue when exists (select from pgmb.claim c where c.queue = sweep.queue and c.id = passing.id);
      expired.state := 'x';
    end if;
    if passing.short then
      delete from pgmb.shortened s
      where s.queue = sweep.queue and s.claim = passing.id and expired.state not in ('l', 'o', 'r');
    else
      held := nullif(array_remove(held, passing.id), '{}');
    end if;
  end loop;
end $$;
