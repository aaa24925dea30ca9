-- Bodies of deliveries that wait. A row of pgmb.delivery has no payload while the log has the event: an event that waits for
-- forty endpoints is stored once. Before a segment is dropped, its events are copied into the rows that wait for them.

-- The payloads and headers of these deliveries. None for an event that the log no longer has: its key is being erased.
create or replace function pgmb_internal.delivery_bodies(ids bigint[])
returns table (delivery bigint, payload json, headers json)
language plpgsql stable
as $$
declare
  logged record;
begin
  return query
  select d.id, d.payload, d.headers from pgmb.delivery d where d.id = any (ids) and d.payload is not null;
  for logged in
    select q.stream, array_agg(d.id) ids, array_agg(d.seq) seqs, array_agg(distinct d.seq) numbers
    from pgmb.delivery d join pgmb.queue q on q.id = d.queue
    where d.id = any (ids) and d.payload is null
    group by q.stream
  loop
    return query
    select waiting.id, e.payload, e.headers
    from pgmb_internal.numbered_events(logged.stream, logged.numbers, raw => true) e
    join unnest(logged.ids, logged.seqs) waiting (id, seq) on waiting.seq = e.seq;
  end loop;
end $$;

-- Whether deliveries wait for events of a segment that the log alone has.
create or replace function pgmb_internal.awaits_segment(stream integer, number integer)
returns boolean
language sql volatile
as $$
  select exists (
    select from pgmb.queue q
    cross join lateral (
      select from pgmb.delivery d
      where d.queue = q.id and d.seq > pgmb_internal.first_number(awaits_segment.number)
        and d.seq < pgmb_internal.first_number(awaits_segment.number + 1) and d.payload is null
      limit 1) waiting
    where q.stream = awaits_segment.stream)
$$;

-- Copies events of a segment into the deliveries that wait for them, as many as fit into one batch; those that are being leased
-- or settled are left to the next call. Deliveries of events that are not there, because their keys are being erased, go.
-- Returns whether none is left.
create or replace function pgmb_internal.copy_awaited(stream integer, number integer)
returns boolean
language plpgsql
as $$
begin
  if not pgmb_internal.awaits_segment(stream, number) then
    return true;
  end if;
  execute format($copy$
    with waiting as materialized (
      select d.id, e.seq is null gone, e.payload, e.headers,
        sum(pgmb_internal.weight(e.payload) + coalesce(pgmb_internal.weight(e.headers), 0)) over (order by d.id) weight,
        row_number() over (order by d.id) nth
      from (
        select d.id, d.seq from pgmb.queue q
        cross join lateral (
          select d.id, d.seq from pgmb.delivery d
          where d.queue = q.id and d.seq > $1 and d.seq < $2 and d.payload is null
          limit 500 for update skip locked) d
        where q.stream = $3
        limit 500) d
      left join pgmb.segment_%s_%s e on e.seq = d.seq
    ), erased as (
      delete from pgmb.delivery d using waiting w where d.id = w.id and w.gone
    )
    update pgmb.delivery d set payload = w.payload, headers = w.headers
    from waiting w
    where d.id = w.id and not w.gone and (w.nth = 1 or w.weight <= pgmb_internal.batch_bytes())$copy$, stream, number)
  using pgmb_internal.first_number(number), pgmb_internal.first_number(number + 1), stream;
  return not pgmb_internal.awaits_segment(stream, number);
end $$;
