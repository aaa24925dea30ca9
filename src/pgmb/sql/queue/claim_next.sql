-- Claiming for clients that read the log themselves, in the statement that claims (docs/adr/0035).

-- Leases the next `max` numbers of the batch that a queue is in the middle of: (lo, hi] of one segment of its stream, as
-- pgmb.claimed (lease, lo, hi, batch, batch_xmin, done, done_xmax). The statement that calls it reads the events, those of
-- the batch alone: visible in `batch` and not in `done`. It passes its own snapshot as `seen`, which is older than the
-- queue's lock; a batch that it cannot see as a whole is refused. Refused is whatever pgmb.receive must decide: the result is
-- null then, and nothing has happened. `known`: a claim of the queue that the caller had a lease of, where the search for
-- the newest one ends. `ack`, `lease_for` and `durable` as in receive. All numbers of the range count as events: call
-- pgmb.recount if fewer were there. Lock: the queue's, as receive. Errors: MB011 the ack's lease is lost, MB021 another
-- cluster. Support.
create or replace function pgmb.claim_next(
  queue text, max integer, lease_for interval, ack uuid, durable boolean, known bigint, stream integer, segment bigint,
  seen pg_snapshot
)
returns pgmb.claimed
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
  caller name := pgmb_internal.caller_at_low_cost();
  q record;
  claimed pgmb.claimed;
begin
  if pg_current_xact_id_if_assigned() is not null or pg_is_in_recovery()
    or current_setting('transaction_isolation') <> 'read committed'
  then
    return null;
  end if;
  if current_setting('pgmb.cluster_checked', true) is distinct from current_database() then
    perform pgmb_internal.assert_primary();
  end if;
  -- Few expressions and plain statements: PL/pgSQL prepares each expression again in every transaction, and the executor
  -- initialises every column of every node. The conditions are a column, so that the queue is found by its name alone.
  select asked.id, asked.stream_name, asked.generation, asked.lock_key, asked.bindings, pgmb_internal.draw_token() token,
    -- At least a moment, as in receive.
    now + greatest(coalesce(claim_next.lease_for, asked.lease_for), interval '1 millisecond') expires_at,
    claim_next.max > 0 and asked.stream = claim_next.stream and asked.plain and asked.matching = '' and asked.paused_at is null
      and (pg_has_role(caller, current_user, 'usage') or pgmb_internal.may_consume(asked.id, caller))
      and not exists (select from pgmb.retry r where r.queue = asked.id and r.due_at <= now
        and r.due_at >= pgmb_internal.retry_since(asked.id, now)) ready
  into q
  from pgmb.queue asked
  where asked.name = claim_next.queue;
  if (q.ready and (pg_try_advisory_xact_lock(q.lock_key)
    or pgmb_internal.try_lock(q.id, q.generation, q.lock_key, 4))) is not true
  then
    return null;
  end if;

  -- A statement of its own: its snapshot must be newer than the lock, so that the newest claim is seen.
  insert into pgmb.claim (queue, id, token, state, bindings, events, lo, hi, place, upto,
    done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next, expires_at, swept, openings)
  select q.id, base.id + 1, q.token, 'leased', q.bindings, claim_next.max, base.place, base.place + claim_next.max,
    base.place + claim_next.max, base.upto, base.done_snapshot, base.done_seq, base.done_next,
    base.batch_snapshot, base.batch_seq, base.batch_next, q.expires_at,
    case when now > base.swept + interval '50 milliseconds' then now else base.swept end, base.openings
  from (
    select c.id, c.place, c.upto, c.done_snapshot, c.done_seq, c.done_next, c.batch_snapshot, c.batch_seq, c.batch_next,
      c.swept, c.openings,
      -- As in receive: nothing special, not too few events.
      c.own is null and c.held is null and c.events * 2 >= c.hi - greatest(c.lo, c.done_seq) as simple
    from pgmb.claim c
    where c.queue = q.id and c.id >= claim_next.known order by c.id desc limit 1) base
  -- In the middle of a batch: past what is late, and with enough of it left in this segment. Its first numbers are left to
  -- receive: a statement planned on a table of a few pages would scan all of it when it has grown.
  where base.place >= base.done_seq and base.place + claim_next.max <= base.upto
    and base.place - pgmb_internal.first_number(claim_next.segment) >= 4096 and pgmb_internal.segment_of(base.upto) = claim_next.segment
    -- Snapshots of one server are ordered, and a later one shows all that an earlier one does. A greater xmax is proof of
    -- that; where it is equal, the order is not known.
    and pg_snapshot_xmax(claim_next.seen) > pg_snapshot_xmax(base.batch_snapshot)
    and base.simple and pgmb_internal.generation_of(base.id) = q.generation and base.openings = pg_sequence_last_value('pgmb.opening'::regclass)
    -- Nothing expired.
    and now >= base.swept and (now <= base.swept + interval '50 milliseconds'
      or not pgmb_internal.needs_sweep(q.id, q.stream_name, base.swept, now))
  returning pgmb_internal.lease_of(claim.queue, claim.id, claim.token), claim.lo, claim.hi, claim.batch_snapshot,
    pg_snapshot_xmin(claim.batch_snapshot), claim.done_snapshot, pg_snapshot_xmax(claim.done_snapshot)
  into claimed;
  if claimed.lease is null then
    return null;
  end if;
  if claim_next.ack is not null then
    perform pgmb_internal.ack_lease(claim_next.ack, caller);
  end if;
  if not claim_next.durable then
    perform pgmb_internal.commit_lazily();
  end if;
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
  select q.stream
  from pgmb_internal.queue_for_consumer(claims_from.queue) q
  where q.plain and q.matching = '' and has_table_privilege(pgmb_internal.caller(),
    'pgmb.segment_' || q.stream || '_' || (select max(s.number) from pgmb.segment s where s.stream = q.stream), 'select')
$$;

-- Counts the events of a lease of pgmb.claim_next, of which fewer were there than numbers, and returns how many. A lease
-- without events is settled. Until then, status and acks count all numbers. Errors: MB011 the lease is lost, 42501.
-- Support.
create or replace function pgmb.recount(lease uuid)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  held pgmb.claim;
  counted bigint;
begin
  perform pgmb_internal.assert_consumer(pgmb_internal.lease_queue(lease), null);
  held := pgmb_internal.hold_claim(lease, 'update');
  if held.id is null or held.state <> 'leased' then
    return 0;
  end if;
  counted := count(*) from pgmb_internal.claim_events(held) e;
  update pgmb.claim c
  set events = counted + (select count(*) from pgmb.settlement s where s.queue = c.queue and s.claim = c.id),
    state = case when counted = 0 then 'settled' else c.state end
  where c.queue = held.queue and c.id = held.id;
  return counted;
end $$;
