-- Settling: ack, retry, bury and extend what a lease holds. Every call names the lease; a lease that was
-- lost (expired and taken over, superseded, sought past) changes nothing and raises MB011. A lease is the caller's as a
-- whole or not at all: what holds it is the row of its claim, which every call locks first.
--   some events, ack              FOR KEY SHARE: other settlements of parts, and extend, pass
--   extend                        FOR NO KEY UPDATE: acks of parts pass; another extend, and retry, are waited for
--   some events, retry or bury    FOR SHARE: as well, but extend and an ack of the whole wait
--   the whole, ack                by its update, which waits for the latter
--   the whole, retry or bury      FOR UPDATE: waits for all of them, so that what they settled is known
--   the sweep of what expired     FOR UPDATE SKIP LOCKED

-- Raises that a lease no longer holds.
create or replace function pgmb_internal.raise_lost(lease uuid)
returns void
language plpgsql
as $$
begin
  raise exception 'lease % is lost', lease using errcode = 'MB011',
    hint = 'It expired and its events were delivered again, or the queue was moved. Roll back; extend() long work in time.';
end $$;

-- The claim of a lease, its row locked as `mode` says (key share, share, no key update, update) so that no takeover can pass while this
-- transaction settles. Null if it was settled before. A generation that is being opened and may make it void is waited
-- for, at most a second. Errors: MB011 lost, 40001 the caller's snapshot is too old to tell.
create or replace function pgmb_internal.hold_claim(lease uuid, mode text)
returns pgmb.claim
language plpgsql
as $$
declare
  held pgmb.claim;
  queue_id integer := pgmb_internal.lease_queue(lease);
  claim_id bigint := pgmb_internal.lease_claim(lease);
  stands text;
begin
  if not pgmb_internal.lock_claim(queue_id, claim_id, mode, false) then
    -- Locked, gone, or never there. A takeover locks only what has expired: that is lost. Other transactions that
    -- settle it are waited for.
    select * into held from pgmb.claim c
    where c.queue = queue_id and c.id = claim_id and c.token = pgmb_internal.lease_token(lease);
    if not found and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
      perform pgmb_internal.raise_moved_on();
    end if;
    if not found or (held.expires_at <= clock_timestamp() and pgmb_internal.is_being_taken(queue_id, claim_id)) then
      perform pgmb_internal.raise_lost(lease);
    end if;
    perform pgmb_internal.lock_claim(queue_id, claim_id, mode, true);
  end if;
  -- Read again under the lock: KEY SHARE may have locked an older version of the row.
  select * into held from pgmb.claim c
  where c.queue = queue_id and c.id = claim_id and c.token = pgmb_internal.lease_token(lease);
  if held.state = 'settled' then
    return null;
  end if;
  if held.id is null or not pgmb_internal.is_leased(held.state) then
    perform pgmb_internal.raise_lost(lease);
  end if;
  -- A lease of retried events cannot have committed void: see pgmb_internal.lease_retried.
  if held.xid = pg_current_xact_id() then
    perform pgmb_internal.recheck_at_commit(held.queue, held.id);
  end if;
  if held.state <> 'leased_retries' then
    for look in 1 .. 200 loop
      stands := pgmb_internal.standing(held.queue, held.id);
      exit when stands <> 'undecided';
      perform pg_sleep(0.005);
    end loop;
    if stands <> 'holds' then
      perform pgmb_internal.raise_lost(lease);
    end if;
  end if;
  return held;
end $$;

-- Locks the row of a claim, or says false where it is locked otherwise, unless `waits`.
create or replace function pgmb_internal.lock_claim(queue integer, claim bigint, mode text, waits boolean)
returns boolean
language plpgsql
as $$
begin
  if waits then
    if mode = 'key share' then
      perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for key share;
    elsif mode = 'share' then
      perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for share;
    elsif mode = 'no key update' then
      perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for no key update;
    else
      perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for update;
    end if;
  elsif mode = 'key share' then
    perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for key share skip locked;
  elsif mode = 'share' then
    perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for share skip locked;
  elsif mode = 'no key update' then
    perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for no key update skip locked;
  else
    perform from pgmb.claim c where c.queue = lock_claim.queue and c.id = lock_claim.claim for update skip locked;
  end if;
  return found;
end $$;

-- Whether another transaction has a claim's row locked FOR UPDATE. Takes no lock that stays.
create or replace function pgmb_internal.is_being_taken(queue integer, claim bigint)
returns boolean
language plpgsql
as $$
begin
  if pgmb_internal.lock_claim(is_being_taken.queue, is_being_taken.claim, 'key share', false) then
    raise exception 'free' using errcode = 'MB099';
  end if;
  return true;
exception when sqlstate 'MB099' then
  return false;
end $$;

-- Settles some events of a claim, of those named the ones that it holds, and returns those that this settled. The only event
-- of a claim is all of it: a claim of one event has no row in pgmb.settlement.
create or replace function pgmb_internal.settle_claim(claim pgmb.claim, seqs bigint[])
returns bigint[]
language plpgsql
as $$
declare
  held pgmb.claim := settle_claim.claim;
  settled bigint[];
begin
  seqs := pgmb_internal.numbers_of(held, seqs);
  if held.events = 1 and cardinality(seqs) = 1 then
    update pgmb.claim c set state = 'settled'
    where c.queue = held.queue and c.id = held.id and pgmb_internal.is_leased(c.state);
    return case when found then seqs else '{}' end;
  end if;
  with fresh as (
    insert into pgmb.settlement (queue, claim, seq)
    select held.queue, held.id, one from unnest(seqs) one
    on conflict do nothing
    returning settlement.seq
  )
  select array_agg(fresh.seq) into settled from fresh;
  return coalesce(settled, '{}');
end $$;

-- Deletes retried events that a claim holds, which settles them: all, or those named. Returns how many.
create or replace function pgmb_internal.ack_retried(queue integer, claim bigint, seqs bigint[] default null)
returns bigint
language plpgsql
as $$
declare
  acked bigint;
begin
  delete from pgmb.retry r
  where r.queue = ack_retried.queue and r.lease = ack_retried.claim
    and (ack_retried.seqs is null or r.seq = any (ack_retried.seqs));
  get diagnostics acked = row_count;
  return acked;
end $$;

-- Settles a whole lease, by the numbers that it contains, as done. Returns how many events it held; 0 if it was settled before.
-- The caller may consume the queue. Errors: MB011 lost.
create or replace function pgmb_internal.ack_claim(queue integer, claim bigint, token bigint)
returns bigint
language plpgsql
as $$
declare
  events bigint;
  special boolean;
  held pgmb.claim;
begin
  -- The common way: not expired, so no takeover is at it, and nobody has begun to open a generation since
  -- (see pgmb.opening).
  update pgmb.claim c set state = 'settled'
  where c.queue = ack_claim.queue and c.id = ack_claim.claim and c.token = ack_claim.token
    and pgmb_internal.is_leased(c.state) and c.expires_at > clock_timestamp()
    and c.openings = pg_sequence_last_value('pgmb.opening'::regclass)
  returning c.events, c.xid = pg_current_xact_id() or c.lo = c.hi
  into events, special;
  if not special then
    return events;
  elsif special then
    -- A lease that this transaction made, or one of retried events.
    select * into held from pgmb.claim c where c.queue = ack_claim.queue and c.id = ack_claim.claim;
    if held.xid = pg_current_xact_id() then
      perform pgmb_internal.recheck_at_commit(held.queue, held.id);
    end if;
  else
    held := pgmb_internal.hold_claim(pgmb_internal.lease_of(ack_claim.queue, ack_claim.claim, ack_claim.token), 'key share');
    update pgmb.claim c set state = 'settled'
    where c.queue = held.queue and c.id = held.id and pgmb_internal.is_leased(c.state);
    if not found then
      return 0;
    end if;
  end if;
  return case when held.lo = held.hi then pgmb_internal.ack_retried(held.queue, held.id) else held.events end;
end $$;

-- The same for a caller whose rights are not known yet. Errors: MB011 lost, 42501.
create or replace function pgmb_internal.ack_lease(lease uuid, caller name)
returns bigint
language plpgsql
as $$
declare
  bits varbit := pgmb_internal.lease_bits(lease);
begin
  if not pg_has_role(caller, current_user, 'usage') then
    perform pgmb_internal.assert_consumer(pgmb_internal.queue_of_bits(bits), null, caller);
  end if;
  return pgmb_internal.ack_claim(pgmb_internal.queue_of_bits(bits), pgmb_internal.claim_of_bits(bits),
    pgmb_internal.token_of_bits(bits));
end $$;

-- Writes a claim's xid as it is, so that pgmb_internal.refuse_void looks at the claim again when this transaction, which made it,
-- commits.
create or replace function pgmb_internal.recheck_at_commit(queue integer, claim bigint)
returns void
language sql
as $$
  update pgmb.claim c set xid = c.xid where c.queue = recheck_at_commit.queue and c.id = recheck_at_commit.claim
$$;

-- Settles a lease's events as done: all of them, or those named by seq; numbers that the lease does not hold are passed over.
-- Returns how many, or a few more: an ack of the whole lease also counts what another transaction acks by seq at that moment.
-- Repeating an ack changes nothing and returns 0. Atomic with the caller's transaction. Writes one row for a whole lease, one an
-- event otherwise. In REPEATABLE READ and SERIALIZABLE it raises 40001 where the snapshot is older than the lease or its
-- settlement by others. Errors: MB011 the lease is lost, MB002 its queue was dropped, 42501.
create or replace function pgmb.ack(lease uuid, seqs bigint[] default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  events bigint;
  parts bigint;
  held pgmb.claim;
begin
  if ack.seqs is null then
    events := pgmb_internal.ack_lease(ack.lease, pgmb_internal.caller_at_low_cost());
    -- A lease of one event has no parts (settle_claim).
    if events > 1 then
      -- A statement of its own: the update may have waited for another transaction that settled some of them.
      perform from pgmb.settlement s
      where s.queue = pgmb_internal.lease_queue(ack.lease) and s.claim = pgmb_internal.lease_claim(ack.lease);
      get diagnostics parts = row_count;
      return events - parts;
    end if;
    return events;
  end if;
  perform pgmb_internal.assert_consumer(pgmb_internal.lease_queue(lease), null);
  held := pgmb_internal.hold_claim(ack.lease, 'key share');
  if held.id is null then
    return 0;
  end if;
  if held.state = 'leased_retries' then
    return pgmb_internal.ack_retried(held.queue, held.id, ack.seqs);
  end if;
  return cardinality(pgmb_internal.settle_claim(held, ack.seqs));
end $$;

-- Sends events of a lease (all that are left, or those named) to be tried again `after` that time, by default the queue's
-- backoff; past the queue's max_attempts they become dead letters with this error. In an ordered queue, what the lease holds
-- behind them of the same keys goes back too, untried. together => true has these events, and no others, come together again: the
-- same set. detail, such as a traceback, is kept with the error, in the list of the last ten. Returns how many of those asked
-- for. Isolation levels as ack. Errors: MB011 the lease is lost, MB002 its queue was dropped, 42501.
create or replace function pgmb.retry(
  lease uuid, seqs bigint[] default null, after interval default null, error text default null,
  together boolean default false, detail text default null
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb_internal.settle_as_failed(retry.lease, retry.seqs, retry.after, retry.error, 'retry',
    case when retry.together then nextval('pgmb.retry_id_seq') end, retry.detail);
end $$;

-- Sends events of a lease (all that are left, or those named) to the queue's dead letters with the error. Returns how many.
-- Isolation levels as ack. Errors: MB011 the lease is lost, MB002 its queue was dropped, 42501.
create or replace function pgmb.bury(
  lease uuid, seqs bigint[] default null, error text default null, detail text default null
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb_internal.settle_as_failed(bury.lease, bury.seqs, null, bury.error, 'bury', detail => bury.detail);
end $$;

-- Gives events of a lease (all that are left, or those named) back untried: the attempt does not count. They are due at once, or
-- `after` that time. error says why, while they wait. With bury_after, for events that this consumer cannot handle and another
-- may: an event that is released again waits as long as it has waited since the first release, up to a minute, and becomes a dead
-- letter with the error once that is bury_after ago. Of an ordered queue, what the lease holds behind them of the same keys goes
-- back too. Returns how many. Isolation levels as ack. Errors: MB011 the lease is lost, MB002 its queue was dropped, 42501.
create or replace function pgmb.release(
  lease uuid, seqs bigint[] default null, after interval default null, error text default null, bury_after interval default null
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return pgmb_internal.settle_as_failed(release.lease, release.seqs, release.after, release.error, 'release',
    bury_after => release.bury_after);
end $$;

-- What retry, bury and release share.
create or replace function pgmb_internal.settle_as_failed(
  lease uuid, seqs bigint[], after interval, error text, manner text, together bigint default null, detail text default null,
  bury_after interval default null
)
returns bigint
language plpgsql
as $$
declare
  q pgmb.queue;
  whole boolean;
  held pgmb.claim;
  failing bigint[];
  behind bigint[] := '{}';
  settled bigint[];
  now timestamptz := clock_timestamp();
  final boolean := manner = 'bury' or coalesce(bury_after <= '0', false);
begin
  perform pgmb_internal.assert_consumer(pgmb_internal.lease_queue(lease), null);
  -- Of consumers, who could fill pages of status with it.
  error := left(error, 10000);
  select * into q from pgmb.queue where id = pgmb_internal.lease_queue(lease);
  -- The only event of a lease is all of it (settle_claim): two calls that hold SHARE would wait for each other.
  whole := seqs is null or coalesce((
    select c.events = 1 from pgmb.claim c where c.queue = q.id and c.id = pgmb_internal.lease_claim(lease)), false);
  held := pgmb_internal.hold_claim(lease, case when whole then 'update' else 'share' end);
  if held.id is null then
    return 0;
  end if;
  if seqs is null then
    update pgmb.claim c set state = 'settled' where c.queue = held.queue and c.id = held.id;
  end if;
  if held.state = 'leased_retries' then
    return pgmb_internal.fail_retried(q, held.id, seqs, after, error, manner, together, detail, bury_after);
  end if;
  failing := pgmb_internal.unsettled(held, seqs);
  if seqs is not null and q.ordered and manner <> 'bury' then
    behind := array(
      with held_events as materialized (select e.seq, e.key from pgmb_internal.claim_events(held) e)
      select e.seq from held_events e
      where e.seq <> all (seqs)
        and exists (select from held_events f where f.seq = any (failing) and f.key = e.key and f.seq < e.seq));
  end if;
  -- An older snapshot does not show what others settled since: the conflict with their rows raises 40001.
  if seqs is not null or current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    settled := pgmb_internal.settle_claim(held, failing || behind);
  end if;
  if seqs is not null then
    failing := array(select f from unnest(failing) f where f = any (settled));
    behind := array(select f from unnest(behind) f where f = any (settled));
  end if;
  if together is not null then
    -- One time for the whole set.
    after := coalesce(after, pgmb_internal.backoff(q, 1));
  end if;
  perform pgmb_internal.fail_events(q, failing, held.id, case when manner = 'release' and not final then 0 else 1 end,
    now + coalesce(after, case manner when 'release' then interval '0' end), error, final,
    together => together, detail => detail, released_at => case when bury_after is not null then now end);
  if behind <> '{}' then
    perform pgmb_internal.fail_events(q, behind, held.id, 0, now, null);
  end if;
  return cardinality(failing);
end $$;

-- The same for retried events, which have rows of their own, under the lock of their claim.
create or replace function pgmb_internal.fail_retried(
  queue pgmb.queue, claim bigint, seqs bigint[], after interval, error text, manner text, together bigint, detail text,
  bury_after interval
)
returns bigint
language plpgsql
as $$
declare
  spent bigint[];
  failed bigint;
  behind bigint[];
  now timestamptz := clock_timestamp();
begin
  if (fail_retried.queue).ordered and seqs is not null and manner <> 'bury' then
    -- Read before dead letters are made: what is behind one of these goes back too.
    behind := array(
      select r.id from pgmb.retry r
      where r.queue = (fail_retried.queue).id and r.lease = fail_retried.claim and r.seq <> all (seqs)
        and exists (
          select from pgmb.retry a
          where a.queue = r.queue and a.lease = r.lease and a.seq = any (seqs) and a.key = r.key
            and (a.origin, a.seq) < (r.origin, r.seq)));
  end if;
  spent := array(
    select r.id from pgmb.retry r
    where r.queue = (fail_retried.queue).id and r.lease = fail_retried.claim
      and (seqs is null or r.seq = any (seqs))
      and case manner when 'bury' then true
        when 'retry' then r.attempt >= (fail_retried.queue).max_attempts
        else least(coalesce(r.released_at, now), now) + fail_retried.bury_after <= now end);
  perform pgmb_internal.bury_retried(spent, fail_retried.error, fail_retried.detail);
  if fail_retried.together is not null then
    after := coalesce(after, (
      select pgmb_internal.backoff(fail_retried.queue, max(r.attempt)) from pgmb.retry r
      where r.queue = (fail_retried.queue).id and r.lease = fail_retried.claim));
  end if;
  if manner = 'release' then
    update pgmb.retry r
    set lease = null, expiries = 0, error = coalesce(fail_retried.error, r.error), decided_at = now,
      due_at = now + greatest(after, '0', case when fail_retried.bury_after is not null
        then least(coalesce(now - r.released_at, '0'), pgmb_internal.longest_release()) end),
      released_at = case when fail_retried.bury_after is null then r.released_at
        else least(coalesce(r.released_at, now), now) end
    where r.queue = (fail_retried.queue).id and r.lease = fail_retried.claim and (seqs is null or r.seq = any (seqs));
  else
    update pgmb.retry r
    set lease = null, expiries = 0, error = coalesce(fail_retried.error, r.error), decided_at = now,
      due_at = now + coalesce(after, pgmb_internal.backoff(fail_retried.queue, r.attempt)), attempt = r.attempt + 1,
      released_at = null, together = fail_retried.together,
      errors = pgmb_internal.with_error(r.errors, r.attempt, fail_retried.error, fail_retried.detail)
    where r.queue = (fail_retried.queue).id and r.lease = fail_retried.claim and (seqs is null or r.seq = any (seqs));
  end if;
  get diagnostics failed = row_count;
  -- They wait for those ahead, which are not due before.
  update pgmb.retry r
  set lease = null, decided_at = now, due_at = coalesce(
    (select max(a.due_at) from pgmb.retry a where a.queue = r.queue and a.key = r.key and a.ordered and a.seq = any (seqs)
      and a.lease is null and (a.origin, a.seq) < (r.origin, r.seq)), now)
  where r.id = any (behind);
  return cardinality(spent) + failed;
end $$;

-- How long an event waits at most that consumers release again and again because they cannot handle it.
create or replace function pgmb_internal.longest_release()
returns interval
language sql immutable
as $$
  select interval '1 minute'
$$;

-- Makes a lease end `lease_for` from now (default: the queue's own), later or sooner than before. Returns when it expires.
-- Isolation levels as ack. Errors: MB011 the lease is lost, MB002 its queue was dropped, 42501.
create or replace function pgmb.extend(lease uuid, lease_for interval default null)
returns timestamptz
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  held pgmb.claim;
  now timestamptz;
  expires timestamptz;
begin
  perform pgmb_internal.assert_consumer(pgmb_internal.lease_queue(lease), null);
  -- No other extend can change the end that this one compares.
  held := pgmb_internal.hold_claim(extend.lease, 'no key update');
  if held.id is null then
    perform pgmb_internal.raise_lost(extend.lease);
  end if;
  now := clock_timestamp();
  select now + coalesce(extend.lease_for, q.lease_for) into expires
  from pgmb.queue q where q.id = held.queue;
  update pgmb.claim c set expires_at = expires, extended_at = now where c.queue = held.queue and c.id = held.id;
  if expires < held.expires_at then
    -- Sweeps may pass the new end before this commits.
    insert into pgmb.shortened (queue, claim, ends_at) values (held.queue, held.id, expires);
  end if;
  return expires;
end $$;
