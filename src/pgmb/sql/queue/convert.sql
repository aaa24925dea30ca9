-- Converting: a queue becomes ordered, fair or prioritised, or plain again, and keeps what waits in it.

-- Errors: MB005 settings that exclude each other; `parts` is the number of shards.
create or replace function pgmb_internal.assert_form(
  ordered boolean, parts integer, lanes text[], fair_by text, max_length bigint, filtered boolean
)
returns void
language plpgsql
as $$
begin
  if lanes is not null then
    perform pgmb_internal.matching(assert_form.lanes);
  end if;
  if lanes is not null and (ordered or max_length is not null) then
    raise exception 'lanes cannot be combined with ordered or max_length' using errcode = 'MB005',
      hint = 'Create a separate queue for urgent events.';
  end if;
  if max_length is not null and filtered then
    raise exception 'max_length cannot be combined with a filter' using errcode = 'MB005',
      hint = 'Every publish would have to filter the waiting events.';
  end if;
  perform pgmb_internal.assert_fair(assert_form.fair_by);
  if fair_by is not null and ordered then
    raise exception 'fair_by cannot be combined with ordered' using errcode = 'MB005',
      hint = 'An ordered queue serves its keys in parallel; a fair one keeps no order while events are retried.';
  end if;
  if parts not in (1, 2, 4, 8, 16, 32, 64) or (parts > 1 and (not ordered or max_length is not null)) then
    raise exception 'invalid number of shards: %', parts using errcode = 'MB005',
      hint = 'A power of two up to 64; more than one only where ordered, and without max_length.';
  end if;
end $$;

-- Takes the lock of a queue or lane as lock_queue does, for a receive that read its row `found` before. Null if a conversion
-- changed its form or removed the lane while the receive waited: the next receive finds the queue in its new form. Errors: MB002 the
-- queue was dropped meanwhile.
create or replace function pgmb_internal.lock_as_found(found pgmb.queue)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
begin
  begin
    base := pgmb_internal.lock_queue(found.id);
  exception when sqlstate 'MB002' then
    if not exists (select from pgmb.queue q where q.id = coalesce(found.lane_of, found.id)) then
      raise;
    end if;
    return null;
  end;
  if pgmb_internal.generation_of(base.id) <> found.generation and not exists (
    select from pgmb.queue q
    where q.id = found.id and q.plain = found.plain and q.ordered = found.ordered and q.shards = found.shards
      and q.lane_of is not distinct from found.lane_of and q.lanes is not distinct from found.lanes
      and q.fair_by is not distinct from found.fair_by)
  then
    return null;
  end if;
  return base;
end $$;

-- How many events the leases of a queue hold that is at `base`, under its lock. Leases that expired are ended before, and so
-- are those whose events were all settled one by one.
create or replace function pgmb_internal.end_spent_leases(q pgmb.queue, inout base pgmb.claim, out held bigint)
language plpgsql
as $$
declare
  now timestamptz := clock_timestamp();
  swept record;
  leased pgmb.claim;
  left_over bigint;
begin
  loop
    swept := pgmb_internal.sweep(q.id, base, now);
    base.swept := swept.swept;
    base.held := swept.held;
    exit when not swept.stopped;
  end loop;
  held := 0;
  for leased in select * from pgmb.claim c where c.queue = q.id and pgmb_internal.is_leased(c.state) loop
    left_over := case
      when leased.state = 'leased_retries' then (select count(*) from pgmb.retry r where r.queue = q.id and r.lease = leased.id)
      when pgmb_internal.is_void(q.id, leased.id) then 0
      else leased.events - (select count(*) from pgmb.settlement s where s.queue = q.id and s.claim = leased.id) end;
    if left_over > 0 then
      held := held + left_over;
    else
      update pgmb.claim c set state = 'expired' where c.queue = q.id and c.id = leased.id;
    end if;
  end loop;
end $$;

-- Moves what waits in the log behind the position `base` of a queue, up to what `ending` shows and the number `last`, to
-- pgmb.retry.
create or replace function pgmb_internal.set_backlog_aside(q pgmb.queue, base pgmb.claim, ending pg_snapshot, last bigint)
returns void
language plpgsql
as $$
begin
    
  perform pgmb_internal.fail_events(q, pgmb_internal.passing(q, array(
            select e.seq from pgmb_internal.pending(q, base, ending, last) p
      cross join lateral pgmb_internal.batch_events(q.stream, p.batch, p.lo, p.hi, q.matching || p.matching, raw => true) e)),
    0, 0, clock_timestamp(), null, fresh => true);
end $$;

-- Makes a queue ordered, fair or prioritised, or plain again where nothing is given (see create_queue), and keeps what waits in
-- it: events, retries and dead letters. No settled event comes again. Refused while leases are held: pause the queue, and
-- call it again until they have ended. Of a queue that has lanes, shards or tenants that lag, all that waits is copied to
-- pgmb.retry. Holds the queue until the transaction ends, as pgmb.seek does. Errors: MB002 no such queue, MB004 it is a lane or
-- shard, feeds endpoints or belongs to PGMQ, MB005 settings that exclude each other, MB006 a name like NAME/1 is taken, MB007
-- invalid pattern, MB013 leases are held, or another administrative call holds the queue, MB024 its condition needs a
-- statement_timeout.
create or replace function pgmb.convert_queue(
  queue text, ordered boolean default false, shards integer default null, lanes text[] default null, fair_by text default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set lock_timeout = '1s'
as $$
declare
  head pgmb.queue;
  converted pgmb.queue[];
  bases pgmb.claim[] := '{}';
  base pgmb.claim;
  one pgmb.queue;
  spent record;
  held bigint := 0;
  parts integer;
  made integer;
  number integer;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  head := pgmb_internal.queue_for_consumer(convert_queue.queue);
  if head.endpoint is not null or pgmb_internal.feeds_endpoints(head.name) then
    raise exception 'queue % feeds endpoints', quote_literal(head.name) using errcode = 'MB004';
  end if;
  if to_regclass('pgmq.queue') is not null then
    execute 'select id from pgmq.queue where id = $1' into made using head.id;
    if made is not null then
      raise exception 'queue % belongs to PGMQ', quote_literal(head.name) using errcode = 'MB004';
    end if;
  end if;
  perform pgmb_internal.administer(head.id);
  for one in select * from pgmb.queue q where q.id = head.id or q.lane_of = head.id order by q.lane loop
    bases := bases || pgmb_internal.lock_queue(one.id);
  end loop;
  -- A change of patterns waits, or is waited for.
  begin
    perform from pgmb.queue q where q.id = head.id or q.lane_of = head.id order by q.id for no key update;
  exception when lock_not_available then
    perform pgmb_internal.raise_administered(head.id);
  end;
  converted := array(select q from pgmb.queue q where q.id = head.id or q.lane_of = head.id order by q.lane);
  if cardinality(converted) = 0 then
    perform pgmb_internal.raise_dropped();
  end if;
  for nth in 1 .. cardinality(converted) loop
    spent := pgmb_internal.end_spent_leases(converted[nth], bases[nth]);
    bases[nth] := spent.base;
    held := held + spent.held;
  end loop;
  if held > 0 then
    raise exception 'leases of queue % hold % events', quote_literal(head.name), held using errcode = 'MB013',
      hint = 'Pause it with pgmb.pause(queue) and try again when its consumers have settled what they hold.';
  end if;
  head := converted[1];
  parts := coalesce(convert_queue.shards, case when convert_queue.ordered and head.max_length is null then 4 else 1 end);
  perform pgmb_internal.assert_form(convert_queue.ordered, parts, convert_queue.lanes, convert_queue.fair_by, head.max_length,
    num_nonnulls(head.equals, head.filter, head.condition) > 0);
  base := bases[1];
  if cardinality(converted) > 1 or base.lagging is not null then
    if pgmb_internal.needs_timeout(head) then
      perform pgmb_internal.assert_timeout();
    end if;
    -- One boundary for all of them: what lies behind it is read by the converted queue.
    base := pgmb_internal.open_batch(base, head.numbers);
    for nth in 1 .. cardinality(converted) loop
      perform pgmb_internal.set_backlog_aside(converted[nth], bases[nth], base.batch_snapshot, base.upto);
    end loop;
    base.place := base.upto;
    base.lagging := null;
    base := pgmb_internal.note_pair(base, null);
  end if;
  base.flight := null;
  base.first_origin := null;
  base.passed_keys := null;
  base.passed_origins := null;
  base.passed_seqs := null;

  -- All that waits is the first lane's; it is dealt out again below.
  update pgmb.retry r set queue = head.id where r.queue in (select c.id from unnest(converted[2:]) c);
  update pgmb.dead d set queue = head.id where d.queue in (select c.id from unnest(converted[2:]) c);
  foreach one in array converted[2:] loop
    delete from pgmb.queue q where q.id = one.id;
    delete from pgmb.claim c where c.queue = one.id;
    delete from pgmb.settlement s where s.queue = one.id;
    delete from pgmb.shortened h where h.queue = one.id;
    delete from pgmb.noted_lease n where n.queue = one.id;
    delete from pgmb.noted_key k where k.queue = one.id;
  end loop;
  -- Of a key, in the order of the log, before all that is read from now on (as dead letters that were put back).
  update pgmb.retry r
  set ordered = convert_queue.ordered, origin = 0, due_at = case when r.due_at = 'infinity' then clock_timestamp() else r.due_at end,
    decided_at = case when r.due_at = 'infinity' then clock_timestamp() else r.decided_at end
  where r.queue = head.id and (convert_queue.ordered or r.ordered);

  -- A receive that found the queue in its old form sees another generation than it expected, and looks again.
  number := pgmb_internal.generation_of(base.id)::integer + 1;
  perform pg_advisory_xact_lock(pgmb_internal.queue_lock(head.id, number));
  base.id := (pgmb_internal.open_generation(head.id, number, clock_timestamp() + interval '1 second')).id;
  if base.id is null then
    perform pgmb_internal.raise_held(head.id);
  end if;
  update pgmb.queue q
  set ordered = convert_queue.ordered, shards = parts, lanes = convert_queue.lanes, fair_by = convert_queue.fair_by,
    generation = number, lock_key = pgmb_internal.queue_lock(q.id, number),
    matching = pgmb_internal.lane_matching(b.patterns, convert_queue.lanes, parts, 0), bindings = b.version + 1
  from pgmb.binding b
  where q.id = head.id and b.queue = q.id and b.version = q.bindings
  returning q.* into head;
  insert into pgmb.binding (queue, version, patterns, matching, equals, filter, condition, params)
  select b.queue, head.bindings, b.patterns, head.matching, b.equals, b.filter, b.condition, b.params
  from pgmb.binding b where b.queue = head.id and b.version = head.bindings - 1;
  perform pgmb_internal.write_position(base);
  perform pgmb_internal.recheck_at_commit(head.id, base.id + 1);
  for nth in 1 .. greatest(cardinality(convert_queue.lanes), parts - 1) loop
    made := pgmb_internal.add_lane(head, nth, base);
    execute format('update pgmb.retry e set queue = %s where e.queue = %s %s', made, head.id,
      pgmb_internal.lane_matching('{#}', convert_queue.lanes, parts, nth));
    execute format('update pgmb.dead e set queue = %s where e.queue = %s %s', made, head.id,
      pgmb_internal.lane_matching('{#}', convert_queue.lanes, parts, nth));
  end loop;
end $$;

-- Adds a lane or shard to a queue, at the position `base` of the first one. Returns its id. Errors: MB006 the name is taken.
create or replace function pgmb_internal.add_lane(head pgmb.queue, lane integer, base pgmb.claim)
returns integer
language plpgsql
as $$
declare
  made integer;
  named text := (head).name || '/' || lane;
begin
  if exists (select from pgmb.queue q where q.name = named) then
    raise exception 'queue % exists', quote_literal(named) using errcode = 'MB006',
      hint = 'Its name is needed for a part of the converted queue: drop it first.';
  end if;
  insert into pgmb.queue (id, name, stream, stream_name, numbers, matching, topics, regex, lease_for,
    max_attempts, backoff_base, backoff_factor, backoff_max, backoff_jitter, ordered, max_in_flight, rps, ttl, max_length,
    when_full, lanes, lane, lane_of, shards, equals, filter, condition, params, fair_by, moves, untraced)
  overriding system value
  select pgmb_internal.next_queue_number(), named, q.stream, q.stream_name, q.numbers, pgmb_internal.lane_matching(b.patterns, q.lanes, q.shards, add_lane.lane),
    q.topics, q.regex, q.lease_for, q.max_attempts, q.backoff_base, q.backoff_factor,
    q.backoff_max, q.backoff_jitter, q.ordered, q.max_in_flight, q.rps, q.ttl, q.max_length, q.when_full, q.lanes,
    add_lane.lane, q.id, q.shards, q.equals, q.filter, q.condition, q.params, q.fair_by, q.moves, q.untraced
  from pgmb.queue q join pgmb.binding b on b.queue = q.id and b.version = q.bindings
  where q.id = (head).id
  returning id into made;
  update pgmb.queue q set lock_key = pgmb_internal.queue_lock(q.id, q.generation) where q.id = made;
  insert into pgmb.binding (queue, version, patterns, matching, equals, filter, condition, params)
  select made, 1, b.patterns, q.matching, b.equals, b.filter, b.condition, b.params
  from pgmb.binding b, pgmb.queue q where b.queue = (head).id and b.version = (head).bindings and q.id = made;
  insert into pgmb.generation (queue, number) values (made, -1);
  perform pgmb_internal.add_generations(made);
  base.queue := made;
  base.id := 0;
  base.held := null;
  base.paid_until := null;
  perform pgmb_internal.write_position(base);
  return made;
end $$;
