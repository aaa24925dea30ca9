-- How far a queue has come: its position, and what of the log waits behind it.

-- The position of a queue: its newest claim. Inlined.
create or replace function pgmb_internal.queue_position(queue integer)
returns setof pgmb.claim
language sql stable
as $$
  select * from pgmb.claim c where c.queue = queue_position.queue order by c.id desc limit 1
$$;

-- How many numbers a receive passes for nothing before it writes a claim for that alone: to pass fewer again costs less.
create or replace function pgmb_internal.worth_a_claim()
returns integer
language sql immutable parallel safe
as $$
  select 64
$$;

-- The number up to which a queue has come: at or below it waits only what committed late, and in a fair queue what lags.
-- Inlined.
create or replace function pgmb_internal.reached(at pgmb.claim)
returns bigint
language sql immutable
as $$
  select case when (at).place >= (at).upto then greatest((at).upto, (at).batch_seq) else greatest((at).place, (at).done_seq) end
$$;

-- Whether a queue has passed an event: it was leased, or did not match. In a fair queue it may lag (pgmb_internal.is_lagging).
-- Inlined.
create or replace function pgmb_internal.is_passed(at pgmb.claim, seq bigint, xid xid8)
returns boolean
language sql immutable
as $$
  select pg_visible_in_snapshot(xid, (at).done_snapshot)
    or pg_visible_in_snapshot(xid, (at).batch_snapshot) and seq <= (at).place
$$;

-- Whether a queue has passed all events of a sealed segment, and none of them lags. Leases are not looked at. Inlined.
create or replace function pgmb_internal.has_passed(at pgmb.claim, segment pgmb.segment)
returns boolean
language sql immutable
as $$
  select ((segment).max_xid is null or (segment).max_xid < pg_snapshot_xmin((at).done_snapshot)
      or (segment).max_xid < pg_snapshot_xmin((at).batch_snapshot) and (segment).last_seq <= (at).place)
    and ((at).lagging is null or not pgmb_internal.lags_within((at).lagging, segment))
$$;

-- Whether events of a segment may wait because their tenants lag.
create or replace function pgmb_internal.lags_within(lagging pgmb.lag[], segment pgmb.segment)
returns boolean
language plpgsql immutable
as $$
begin
  return exists (
    select from unnest(lagging) l where l.place < (segment).last_seq and l.upto >= pgmb_internal.first_number((segment).number));
end $$;

-- The batch that a queue at this position reads, or of which a claim leases events.
create or replace function pgmb_internal.batch_of(at pgmb.claim)
returns pgmb.batch
language sql immutable
as $$
  select row((at).done_snapshot, (at).done_seq, (at).done_next, (at).batch_snapshot)::pgmb.batch
$$;

-- What of the log waits in a queue at this position, in the order in which it is delivered: what was passed over because its
-- tenant lags, the rest of the batch that the queue reads, and what came after that batch, until now or, where `seen` is given,
-- what that snapshot shows up to the number `last`. Read each part with
-- batch_events(q.stream, part.batch, part.lo, part.hi, q.matching || part.matching).
create or replace function pgmb_internal.pending(
  q pgmb.queue, at pgmb.claim, seen pg_snapshot default null, last bigint default null
)
returns setof pgmb.pending
language plpgsql
as $$
begin
  if at.lagging is not null then
    return query select * from pgmb_internal.lagging_range(q, at);
  end if;
  if at.place < at.upto then
    return next (pgmb_internal.batch_of(at), at.place, at.upto, '')::pgmb.pending;
  end if;
  at := pgmb_internal.open_batch(at, q.numbers);
  at.batch_snapshot := coalesce(pending.seen, at.batch_snapshot);
  return next (pgmb_internal.batch_of(at), at.place, coalesce(pending.last, at.upto), '')::pgmb.pending;
end $$;

-- Of that, what waits because its tenant lags.
create or replace function pgmb_internal.lagging_range(q pgmb.queue, at pgmb.claim)
returns setof pgmb.pending
language sql immutable
as $$
  select row('3:3:', 0, '3', (at).batch_snapshot)::pgmb.batch, min(l.place), max(l.upto), pgmb_internal.lagging(q, at)
  from unnest((at).lagging) l
  having count(*) > 0
$$;

-- The condition on an event e of the log that a queue matches: a receive would deliver it. Not what its ttl has ended, nor what
-- PGMQ's functions took out of its way.
create or replace function pgmb_internal.deliverable(q pgmb.queue, now timestamptz)
returns text
language sql stable
as $$
  select case when q.ttl is null then '' else format(' and e.published_at > %L', deliverable.now - q.ttl) end
    || case when pgmb_internal.is_pgmqs(q.id)
      then format(' and not exists (select from pgmq.passed_over o where o.queue = %s and o.msg_id = e.seq)', q.id) else '' end
$$;

-- Whether a queue is one that PGMQ's functions keep: they have messages that pgmb's queue has passed in tables of their own.
create or replace function pgmb_internal.is_pgmqs(queue integer)
returns boolean
language plpgsql stable
as $$
declare
  kept boolean := false;
begin
  if to_regclass('pgmq.queue') is not null then
    execute 'select exists (select from pgmq.queue p where p.id = $1)' into kept using is_pgmqs.queue;
  end if;
  return kept;
end $$;

-- The position from which a receive would go on: behind what a full queue drops first. To count that costs as much as the queue's
-- length, and is left where that is more than `look`.
create or replace function pgmb_internal.kept_from(q pgmb.queue, newest pgmb.claim, look bigint)
returns pgmb.claim
language plpgsql
as $$
begin
  return case when q.when_full = 'drop_oldest' and q.max_length <= look then pgmb_internal.drop_oldest(q, newest) else newest end;
end $$;

-- Since when a queue could have received events that were received before: retries that are due, and events whose lease expired
-- and that no receive has swept. Null: there are none. Looks at as many expired leases as a sweep does.
create or replace function pgmb_internal.due_since(q pgmb.queue, newest pgmb.claim, now timestamptz)
returns timestamptz
language sql stable
as $$
  select least(
    (select r.due_at from pgmb.retry r where r.queue = q.id and r.due_at <= due_since.now order by r.due_at limit 1),
    (select min(l.due_at) from pgmb_internal.lapsed_events(q, newest, due_since.now, 1) l))
$$;

-- How many numbers of the log still_to_come looks at for older events of a key.
create or replace function pgmb_internal.order_look()
returns bigint
language sql immutable parallel safe
as $$
  select 100000::bigint
$$;

-- Those of these events of its stream that an ordered queue has before it and gives in their order: they lie ahead of its
-- position, a lease holds them, or they wait to be tried again. If they were sent as well, newer events of a key would come before older ones.
-- One that lies ahead and that the queue does not take comes only if it is sent, and only before what waits of its key.
-- Errors: MB013 events of its key wait ahead, MB024 the queue's condition needs a statement_timeout.
create or replace function pgmb_internal.still_to_come(head pgmb.queue, numbers bigint[])
returns bigint[]
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  lane pgmb.queue;
  newest pgmb.claim;
  leases pgmb.claim[];
  one record;
  untaken integer[];
  ahead record;
  coming bigint[] := '{}';
begin
  for lane in select q.* from pgmb.queue q where head.id in (q.id, q.lane_of) order by q.lane loop
    -- In the order in which an event moves: what a receive takes meanwhile is in a lease, what fails meanwhile waits.
    select * into newest from pgmb_internal.queue_position(lane.id);
    leases := array(
      select c from pgmb.claim c
      where c.queue = lane.id and c.state = 'leased' and not pgmb_internal.is_void(c.queue, c.id));
    untaken := '{}';
    for one in
      execute format('select (%s)::pgmb.event event, e.xid, pgmb_internal.is_passed($2, e.seq, e.xid) passed
        from pgmb.%I e
        where e.seq = any ($1) and case when e.key is null then e.seq else hashtext(e.key)::bigint end & $3 = $4',
        pgmb_internal.event_columns((select s.salt from pgmb.stream s where s.id = lane.stream)), 'log_' || lane.stream_name)
      using still_to_come.numbers, newest, lane.shards - 1, case when lane.shards = 1 then 0 else lane.lane end
    loop
      if exists (select from pgmb.retry r where r.queue = lane.id and r.event_id = (one.event).id and r.seq = (one.event).seq) then
        coming := coming || (one.event).seq;
      elsif not one.passed then
        if coalesce(pgmb_internal.takes(lane, one.event), true) then
          coming := coming || (one.event).seq;
        elsif (one.event).key is not null then
          untaken := untaken || pgmb_internal.key_hash((one.event).key);
        end if;
      elsif exists (
        select from unnest(leases) c
        where pgmb_internal.is_of_claim(c, (one.event).seq) and not exists (
          select from pgmb.settlement s where s.queue = lane.id and s.claim = c.id and s.seq = (one.event).seq))
      then
        coming := coming || (one.event).seq;
      end if;
    end loop;
    if untaken <> '{}' then
      lane.matching := lane.matching || pgmb_internal.with_keys(untaken);
      ahead := pgmb_internal.fresh_events(lane, newest, 1, pgmb_internal.order_look(), clock_timestamp());
      if ahead.more then
        raise exception 'queue % has events before it of the same keys, which these would overtake', quote_literal(head.name)
          using errcode = 'MB013',
            hint = 'The queue does not take these events itself. Send them once its consumers have received what waits.';
      end if;
    end if;
  end loop;
  return coming;
end $$;
