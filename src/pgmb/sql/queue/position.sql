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
    or coalesce((at).own = xid and seq <= (at).own_seq, false)
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
  select row((at).done_snapshot, (at).done_seq, (at).done_next, (at).batch_snapshot, (at).own, (at).own_seq)::pgmb.batch
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
  return query select * from pgmb_internal.lagging_range(q, at);
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
language plpgsql
as $$
begin
  if at.lagging is not null then
    return query
    select row('3:3:', 0, '3', at.batch_snapshot, null, null)::pgmb.batch, min(l.place), max(l.upto), pgmb_internal.lagging(q, at)
    from unnest(at.lagging) l;
  end if;
end $$;
