-- Leases: the lock under which a queue's position moves, the tokens, and what happens when one expires.
--
-- A claim's id is (generation << 40) + number. A lease is a UUID of the queue's id (6 hex digits), the
-- claim's id (14) and a random token (12); the lease of retried events has ff and 24 random digits there.

create or replace function pgmb.lease_of(queue integer, claim bigint, token bigint)
returns uuid
language sql immutable parallel safe
as $$
  select (lpad(to_hex(queue), 6, '0') || lpad(to_hex(claim), 14, '0') || lpad(to_hex(token), 12, '0'))::uuid
$$;

create or replace function pgmb.lease_queue(lease uuid)
returns integer
language sql immutable parallel safe
as $$
  select ('x' || substr(lease::text, 1, 6))::bit(24)::integer
$$;

create or replace function pgmb.lease_claim(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select ('x' || substr(lease::text, 7, 2) || substr(lease::text, 10, 4) || substr(lease::text, 15, 4)
    || substr(lease::text, 20, 4))::bit(56)::bigint
$$;

create or replace function pgmb.lease_token(lease uuid)
returns bigint
language sql immutable parallel safe
as $$
  select ('x' || substr(lease::text, 25))::bit(48)::bigint
$$;

-- Whether a lease is one of retried events. Internal.
create or replace function pgmb.is_retry_lease(lease uuid)
returns boolean
language sql immutable parallel safe
as $$
  select substr(lease::text, 7, 2) = 'ff'
$$;

-- Takes the queue's lock until the transaction ends and returns its newest claim, the queue's position. A
-- receive in a transaction that stays open would hold up all others: they wait one second, then open a
-- new generation at the last committed position, and that receive's claim is void. Errors: MB002 it was dropped
-- meanwhile. Internal.
create or replace function pgmb.lock_queue(queue integer)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
  generation bigint := -1;
  newest bigint;
begin
  loop
    select c.id >> 40 into newest from pgmb.claim c where c.queue = lock_queue.queue order by c.id desc limit 1;
    -- A generation that another session opened since is the one to lock.
    generation := greatest(generation, newest);
    if not pg_try_advisory_xact_lock(pgmb.queue_lock(queue, generation)) then
      begin
        perform pg_advisory_xact_lock(pgmb.queue_lock(queue, generation));
      exception when lock_not_available or deadlock_detected then
        generation := generation + 1;
        continue;
      end;
    end if;
    select * into base
    from pgmb.claim c where c.queue = lock_queue.queue order by c.id desc limit 1;
    if base.id is null then
      raise exception 'the queue was dropped' using errcode = 'MB002';
    end if;
    exit when base.id >> 40 <= generation;
    generation := base.id >> 40;
  end loop;
  if base.id >> 40 < generation then
    insert into pgmb.supersession (queue, generation, floor)
    values (lock_queue.queue, generation, (base.id & 1099511627775) + 1)
    on conflict do nothing;
    if not found then
      perform pgmb.raise_moved_on();
    end if;
    -- The new generation's first claim is written at once, whatever the caller finds to receive: without
    -- it the void claim, once committed, would be the newest and so the queue's position.
    base.id := (generation << 40) + (base.id & 1099511627775);
    perform pgmb.write_claim(base, 0, 'p', base.bindings, 0, base.place, base.place, 'infinity');
    base.id := base.id + 1;
  end if;
  return base;
end $$;

-- The advisory lock of a queue's generation; 28749 in the high bits keeps clear of applications' own keys.
-- Internal.
create or replace function pgmb.queue_lock(queue integer, generation bigint)
returns bigint
language sql immutable parallel safe
as $$
  select (28749::bigint << 48) | (queue::bigint << 24) | (generation & 16777215)
$$;

-- Whether a claim was made void by a newer generation. Internal.
create or replace function pgmb.is_void(queue integer, claim bigint)
returns boolean
language sql stable
as $$
  select exists (
    select from pgmb.supersession s
    where s.queue = is_void.queue and s.generation > claim >> 40 and s.floor <= claim & 1099511627775
  )
$$;

-- Whether a claim was made void or is about to be: whoever opens a new generation holds its lock, and while
-- this transaction holds it too nobody can. Internal.
create or replace function pgmb.may_be_void(queue integer, claim bigint)
returns boolean
language plpgsql
as $$
begin
  return not pg_try_advisory_xact_lock_shared(pgmb.queue_lock(queue, (claim >> 40) + 1))
    or pgmb.is_void(queue, claim);
end $$;

-- A transaction that received and settled in one go may have been superseded while it stayed open: it must
-- not commit then, or its effects would happen twice. Runs at commit; holds the next generation's lock so
-- that nobody supersedes between this check and the commit.
create or replace function pgmb.refuse_void()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if pgmb.may_be_void(new.queue, new.id) then
    raise exception 'the lease was superseded: this transaction stayed open for too long after its receive'
      using errcode = 'MB011', hint = 'Receive in a transaction of its own, or finish within a second.';
  end if;
  return null;
end $$;

-- Raises that another session moved the queue's position behind this transaction's snapshot. Internal.
create or replace function pgmb.raise_moved_on()
returns void
language plpgsql
as $$
begin
  raise exception 'the queue moved on after this transaction''s snapshot' using errcode = '40001',
    hint = 'Try the transaction again.';
end $$;

-- Appends the claim that follows `base`: the queue's new position, and the lease of (lo, hi] if it is one.
-- Another session's claim of that number can only be there when this transaction's snapshot is older than
-- it: the caller tries again (40001). Internal.
create or replace function pgmb.write_claim(
  base pgmb.claim, token bigint, state "char", bindings integer, events bigint, lo bigint, hi bigint,
  expires_at timestamptz, keys integer[] default null, chosen bigint[] default null
)
returns void
language plpgsql
as $$
begin
  insert into pgmb.claim (queue, id, token, state, bindings, events, lo, hi, place, upto,
    done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next,
    own, own_seq, expires_at, swept, held, keys, open, paid_until, chosen)
  values (base.queue, base.id + 1, write_claim.token, write_claim.state, write_claim.bindings, write_claim.events,
    write_claim.lo, write_claim.hi, base.place, base.upto,
    base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot, base.batch_seq, base.batch_next,
    base.own, base.own_seq, write_claim.expires_at, base.swept, base.held, write_claim.keys, base.open, base.paid_until,
    write_claim.chosen)
  on conflict do nothing;
  if not found then
    perform pgmb.raise_moved_on();
  end if;
end $$;

-- The condition that an event e is of one of the keys, by their hashes. A key that is none has the hash 0, which
-- no other has: such events are held by no key. Internal.
create or replace function pgmb.with_keys(keys integer[])
returns text
language sql immutable parallel safe
as $$
  select format(' and case when e.key is null then 0 else coalesce(nullif(hashtext(e.key), 0), 1) end = any (%L)', keys)
$$;

-- The condition that an event e is one of those that passed a filter. Internal.
create or replace function pgmb.among(chosen bigint[])
returns text
language sql immutable parallel safe
as $$
  select format(' and e.seq = any (%L::bigint[])', chosen)
$$;

-- The hash by which a lease of an ordered queue remembers a key: keys that share one wait for each other.
-- Internal.
create or replace function pgmb.key_hash(key text)
returns integer
language sql immutable parallel safe
as $$
  select case when key is null then 0 else coalesce(nullif(hashtext(key), 0), 1) end
$$;

-- The events of a claim that are not settled yet. Internal.
create or replace function pgmb.claim_events(claim pgmb.claim)
returns setof pgmb.event
language plpgsql
as $$
#variable_conflict use_variable
declare
  q pgmb.queue;
  b pgmb.binding;
  columns text;
  leaf text;
begin
  select * into q from pgmb.queue where id = (claim).queue;
  select * into b from pgmb.binding where queue = q.id and version = (claim).bindings;
  if (claim).state = 'o' then
    select pgmb.event_columns(s.salt) into columns from pgmb.stream s where s.id = q.stream;
    for leaf in
      select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
      where s.stream = q.stream and s.number between (claim).lo >> 40 and (claim).hi >> 40
        and s.dropped_at is null
      order by s.number
    loop
      return query execute format('select * from (select %s from %s e
          where e.xid = $1 and e.seq + 0 > $2 and e.seq + 0 <= $3 %s) own
          where not exists (select from pgmb.settlement s where s.queue = $4 and s.claim = $5 and s.seq = own.seq)
          order by seq + 0', columns, leaf, b.matching)
        using (claim).xid, (claim).lo, (claim).hi, (claim).queue, (claim).id;
    end loop;
  else
    if (claim).chosen is not null then
      b.matching := pgmb.among((claim).chosen);
    end if;
    if (claim).keys is not null then
      b.matching := b.matching || pgmb.with_keys((claim).keys);
    end if;
    return query
    select e.* from pgmb.batch_events(q.stream, (claim).done_snapshot, (claim).done_seq, (claim).done_next,
      (claim).batch_snapshot, (claim).own, (claim).own_seq, (claim).lo, (claim).hi,
      b.matching, 9223372036854775807) e
    where not exists (
      select from pgmb.settlement s where s.queue = (claim).queue and s.claim = (claim).id and s.seq = e.seq);
  end if;
end $$;

-- When the next attempt is due: the queue's exponential backoff with jitter, after `failed` attempts.
-- Internal.
create or replace function pgmb.backoff(queue pgmb.queue, failed integer)
returns interval
language sql volatile
as $$
  select least((queue).backoff_max,
      (queue).backoff_base * least(power((queue).backoff_factor, least(failed - 1, 60)), 1e9))
    * (1 - (queue).backoff_jitter + 2 * (queue).backoff_jitter * random())
$$;

-- Sends an event of claim `origin` whose attempt failed to be tried again at due_at, or to the dead letters
-- when that was its last or is `final`. Internal.
create or replace function pgmb.fail_event(
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

-- In an ordered queue, has the first event of each key that waited behind one now settled come up at once.
-- Internal.
create or replace function pgmb.wake_keys(queue integer, keys text[])
returns void
language sql
as $$
  update pgmb.retry r set due_at = clock_timestamp()
  where r.due_at > clock_timestamp() and r.id = any (array(
    select head.id from unnest(wake_keys.keys) settled (key)
    cross join lateral (
      select first.id, first.lease, first.attempt from pgmb.retry first
      where first.queue = wake_keys.queue and first.ordered and first.key = settled.key
      order by first.origin, first.seq limit 1) head
    -- One that was tried waits by its own backoff.
    where head.lease is null and head.attempt = 1))
$$;

-- Examines leases that expired since the last sweep, at most about 200, and sends their unsettled events
-- to be tried again at once. Runs under the queue's lock. `examined` counts the claims looked at. Internal.
create or replace function pgmb.sweep(
  queue integer, base pgmb.claim, now timestamptz, out swept timestamptz, out held bigint[], out examined integer
)
language plpgsql
as $$
#variable_conflict use_column
declare
  passing record;
  expired pgmb.claim;
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
    if passing.state in ('l', 'o') then
      held := held || passing.id;
    end if;
  end loop;
  if examined < 200 then
    swept := greatest(swept, sweep.now);
  end if;
  held := (base).held || held;
  if held is null then
    return;
  end if;
  for passing in select id from unnest(held) id loop
    select * into expired from pgmb.claim c
    where c.queue = sweep.queue and c.id = passing.id for update skip locked;
    if found then
      held := nullif(array_remove(held, passing.id), '{}');
      if expired.state in ('l', 'o') and expired.expires_at <= swept then
        if not pgmb.is_void(expired.queue, expired.id) then
          perform pgmb.fail_event((select q from pgmb.queue q where q.id = sweep.queue), e, expired.id, 1, sweep.now,
            'lease expired', expiries => 1)
          from pgmb.claim_events(expired) e;
        end if;
        update pgmb.claim c set state = 'x' where c.queue = expired.queue and c.id = expired.id;
      end if;
    elsif not exists (select from pgmb.claim c where c.queue = sweep.queue and c.id = passing.id) then
      held := nullif(array_remove(held, passing.id), '{}');
    end if;
  end loop;
end $$;
