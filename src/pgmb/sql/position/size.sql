-- How large a batch may be: by what its events weigh, as well as by their number.

-- A batch ends with the event by which it weighs this much: 32 MiB. So does every lease and every page of a reader. SQL cannot
-- hold a value of 1 GB, and a client holds a batch as a whole.
create or replace function pgmb_internal.batch_bytes()
returns bigint
language sql immutable parallel safe
as $$
  select 33554432::bigint
$$;

-- How many events one lease may hold: a larger `max` means that.
create or replace function pgmb_internal.lease_events()
returns integer
language sql immutable parallel safe
as $$
  select 20000
$$;

-- How many events of a segment without stored large values always fit into a batch. A row of it has at most 2,032 bytes, which
-- count sixteen times as much if they are compressed (pgmb_internal.weight).
create or replace function pgmb_internal.always_fits()
returns bigint
language sql immutable parallel safe
as $$
  select 1000::bigint
$$;

-- What one stored value weighs: its bytes, as far as its header tells. To read a compressed value only in order to know its
-- length would cost as much as to deliver it, so it counts sixteen times its stored size, and more if that is large: pglz
-- compresses to a 91st at most. A batch of 32 MiB has so at most 182 MiB of text, and its last event.
create or replace function pgmb_internal.weight(value json)
returns bigint
language sql stable parallel safe
as $$
  select case
    when pg_column_compression(value) is null then pg_column_size(value)::bigint
    when pg_column_size(value) <= 65536 then pg_column_size(value)::bigint * 16
    else least(pg_column_size(value)::bigint * 91, 50331648)
  end
$$;

-- What an event e weighs, as an SQL expression.
create or replace function pgmb_internal.weight_of_event()
returns text
language sql immutable parallel safe
as $$
  select 'pgmb_internal.weight(e.payload) + coalesce(pgmb_internal.weight(e.headers), 0)'
$$;

-- Whether a segment has values that are stored apart from their rows, because they are large.
create or replace function pgmb_internal.has_large(stream integer, segment bigint)
returns boolean
language plpgsql stable
as $$
begin
  return (
    select pg_relation_size(t.reltoastrelid) > 0 from pg_class t
    where t.oid = to_regclass('pgmb.segment_' || has_large.stream || '_' || has_large.segment));
end $$;

-- As has_large, for receives that must cost little: where there are none, the session does not look again for 50 ms, in which
-- hardly anybody can write more than a batch may hold. The time of the look is kept as a number, because clients of a pooler
-- share a session and may write dates differently; one that lies ahead, by a clock that was wrong, counts for nothing.
create or replace function pgmb_internal.look_for_large(stream integer, segment bigint, now timestamptz)
returns boolean
language plpgsql volatile
as $$
begin
  if pgmb_internal.has_large(look_for_large.stream, look_for_large.segment) then
    return true;
  end if;
  perform set_config('pgmb.small_' || look_for_large.stream || '_' || look_for_large.segment,
    pgmb_internal.microseconds(look_for_large.now)::text, false);
  return false;
end $$;

-- Where one lease or page of the range (lo, hi] ends because of the bytes of its first `most` events: hi, or the number before
-- the first event for which there is no room.
create or replace function pgmb_internal.fitting_end(
  stream integer, batch pgmb.batch, lo bigint, hi bigint, matching text, most bigint
)
returns bigint
language plpgsql
as $$
begin
  if most <= 1 or most <= pgmb_internal.always_fits() and not (
    -- Of many segments it is cheaper to look at the events than at each segment.
    select count(*) > 4 or coalesce(bool_or(pgmb_internal.has_large(read.stream, read.number)), false)
    from (
      select s.stream, s.number from pgmb.segment s
      where s.stream = fitting_end.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi)
        and s.dropped_at is null and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin(batch.done))
      limit 5) read)
  then
    return hi;
  end if;
  return (
    select coalesce(min(e.seq) filter (where e.before >= pgmb_internal.batch_bytes()) - 1, hi)
    from (
      select e.seq, sum(pgmb_internal.weight(e.payload) + coalesce(pgmb_internal.weight(e.headers), 0))
        over (order by e.seq rows between unbounded preceding and 1 preceding) before
      from pgmb_internal.batch_events(fitting_end.stream, batch, lo, hi, matching, most, true) e) e);
end $$;

-- How many of the events `more` of a segment, from the first on, fit into a lease that has those of `taken`.
create or replace function pgmb_internal.fitting_more(stream integer, segment bigint, taken bigint[], more bigint[])
returns integer
language plpgsql
as $$
declare
  count bigint := cardinality(taken) + cardinality(more);
begin
  if count <= 1 or count <= pgmb_internal.always_fits() and not pgmb_internal.has_large(fitting_more.stream, fitting_more.segment) then
    return cardinality(more);
  end if;
  return (
    select count(*) filter (where n.nth > cardinality(taken))
    from (
      select n.nth, sum(pgmb_internal.weight(e.payload) + coalesce(pgmb_internal.weight(e.headers), 0))
        over (order by n.nth rows between unbounded preceding and 1 preceding) before
      from unnest(taken || more) with ordinality n (number, nth)
      join pgmb_internal.numbered_events(fitting_more.stream, taken || more, raw => true) e on e.seq = n.number) n
    where coalesce(n.before, 0) < pgmb_internal.batch_bytes());
end $$;
