-- What a queue would deliver next, without a lease. Nothing here writes, locks a row or takes a transaction id.

-- Events of leases that expired and that no receive has swept yet, at most `max`: the next receive makes them due at once.
-- Looks at as many expired claims as a sweep does, and at those that it left because their holder was settling them.
create or replace function pgmb_internal.lapsed_events(q pgmb.queue, newest pgmb.claim, now timestamptz, max bigint)
returns setof pgmb.receivable

language plpgsql stable
as $$
declare
  lapsed pgmb.claim;
  tried integer := case when pgmb_internal.is_dispatched(q) then 0 else 1 end;
  got bigint := 0;
  part bigint;
begin
  for lapsed in
    select c.* from (
      (select passing.id from pgmb.claim passing
      where passing.queue + 0 = q.id and passing.expires_at > (newest).swept and passing.expires_at <= lapsed_events.now
      order by passing.expires_at limit pgmb_internal.sweep_batch())
      union select unnest((newest).held)
      union select s.claim from pgmb.shortened s where s.queue = q.id and s.ends_at <= lapsed_events.now) one
    -- Each by itself: planned while the table was small, `id = any (…)` would walk all claims of the queue.
    cross join lateral (select * from pgmb.claim c where c.queue = q.id and c.id = one.id limit 1) c
    where pgmb_internal.is_leased(c.state) and c.expires_at <= lapsed_events.now
    order by c.expires_at, c.id
  loop
    exit when got >= lapsed_events.max;
    if lapsed.state = 'leased_retries' then
      return query
      select (r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event, r.attempt + tried, lapsed.expires_at, 'lease expired'

      from pgmb.retry r where r.queue = q.id and r.lease = lapsed.id and (tried = 0 or r.attempt < q.max_attempts)
      order by r.seq limit lapsed_events.max - got;
    elsif (tried = 0 or q.max_attempts > 1) and not pgmb_internal.is_void(lapsed.queue, lapsed.id) then
      return query
      select e, 1 + tried, lapsed.expires_at, 'lease expired' from pgmb_internal.claim_events(lapsed) e limit lapsed_events.max - got;
    end if;
    get diagnostics part = row_count;
    got := got + part;
  end loop;
end $$;

-- Messages of a PGMQ queue that pgmb's queue has passed and that may be read, at most `max`: those that wait in pgmq.parked and
-- those of reads whose vt has passed.
create or replace function pgmb_internal.pgmq_visible(q pgmb.queue, now timestamptz, max bigint)
returns setof pgmb.receivable
language plpgsql stable
as $$
begin
  if pgmb_internal.is_pgmqs(q.id) then
    return query execute 'select (p.msg_id, pgmb.derive_id(p.msg_id, p.enqueued_at, s.salt), $4, p.headers ->> ''x-pgmq-group'',
        p.message::json, p.headers::json, p.enqueued_at)::pgmb.event, p.read_ct + 1,
        case when p.vt > ''-infinity'' then p.vt else p.enqueued_at end, null::text
      from (select * from pgmq.parked p where p.queue = $1 and p.vt <= $2 order by p.vt, p.msg_id limit $3) p
      join pgmb.stream s on s.id = $5
      union all
      select e, 2, r.vt, null
      from pgmq.reading r
      join pgmb.claim c on c.queue = r.queue and c.id = r.claim and c.state = ''leased''
      cross join lateral pgmb_internal.claim_events(c) e
      where r.queue = $1 and r.vt <= $2 and not pgmb_internal.is_void(c.queue, c.id)
      limit $3'
    using q.id, pgmq_visible.now, pgmq_visible.max, q.name, q.stream;
  end if;
end $$;

-- Events of the log that wait in a queue that is at `newest`, in the order of the log, at most `max`. Looks at about `look`
-- numbers, or for a quarter of the statement_timeout where the queue asks in SQL or by a costly filter; more: it stopped
-- before the end of the log. Errors: MB009 the filter raised, MB010 the condition did, MB024.
create or replace function pgmb_internal.fresh_events(
  q pgmb.queue, newest pgmb.claim, max bigint, look bigint, now timestamptz,
  out events pgmb.receivable[], out looked bigint, out more boolean
)
language plpgsql stable
as $$
declare
  base pgmb.claim := newest;
  asked text;
  timed boolean := pgmb_internal.needs_timeout(q);
  ending timestamptz := 'infinity';
  -- A slow condition is asked of a few events at a time, so that it cannot use up the timeout.
  size bigint := case when timed then 64 else 5000 end;
    part pgmb.pending;
  batch pgmb.batch;
  lo bigint;
  hi bigint;
begin
  events := '{}';
  looked := 0;

  if timed then
    perform pgmb_internal.assert_timeout();
    ending := pgmb_internal.deadline();
  end if;
  base := pgmb_internal.kept_from(q, newest, look);
  asked := q.matching || pgmb_internal.asking(q) || pgmb_internal.deliverable(q, fresh_events.now);

  for part in select * from pgmb_internal.pending(q, base) loop
    batch := part.batch;
    lo := part.lo;
    while lo < part.hi and cardinality(events) < fresh_events.max and looked < look and clock_timestamp() < ending loop
      if lo < batch.done_seq then
        if pgmb_internal.has_stragglers(q.stream, batch, lo, batch.done_seq) then
          events := events || array(
            select (e, 1, null, null)::pgmb.receivable from pgmb_internal.batch_events(q.stream, batch, lo, batch.done_seq, asked || part.matching,
              fresh_events.max - cardinality(events)) e);
        end if;
        lo := batch.done_seq;
        continue;
      end if;
      -- A window lies in one segment.
      hi := pgmb_internal.window_end(q.stream, lo, part.hi, least(size, look - looked)::integer);
      events := events || array(
        select (e, 1, null, null)::pgmb.receivable from pgmb_internal.batch_events(q.stream, batch, lo, hi, asked || part.matching,
          fresh_events.max - cardinality(events)) e);
      looked := looked + hi - greatest(lo, pgmb_internal.first_number(pgmb_internal.segment_of(hi)));
      lo := hi;
    end loop;
  end loop;
  more := cardinality(events) >= fresh_events.max or looked >= look or clock_timestamp() >= ending;
exception when others then
  if q.plain or sqlstate = 'MB024' or pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
    raise;
  end if;
  raise exception 'the % of queue % failed: %', case when q.condition is null then 'filter' else 'condition' end,
    quote_literal(q.name), sqlerrm
    using errcode = case when q.condition is null then 'MB009' else 'MB010' end,
      hint = 'A receive that meets this event pauses the queue. Change what it asks for with pgmb.bind.';
end $$;

-- What could be received now of a queue that is at `newest`, or of a lane of it: what is due again, then what ended leases held,
-- at most `max` of each, then, if that is less than `max`, what waits in the log, without what its length lets be. looked, more: as
-- fresh_events. Not the failed requests of endpoints.
create or replace function pgmb_internal.receivable(
  q pgmb.queue, newest pgmb.claim, max bigint, look bigint, now timestamptz,
  out events pgmb.receivable[], out looked bigint, out more boolean
)
language plpgsql stable
as $$
declare
  fresh record;
begin
  looked := 0;
  more := true;
  events := array(
    (select ((r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event, r.attempt, r.due_at,
      left(r.error, 300))::pgmb.receivable
    from pgmb.retry r where r.queue = q.id and r.due_at <= receivable.now
    order by r.due_at, r.together, r.id limit receivable.max)
    union all
    select l from pgmb_internal.lapsed_events(q, newest, receivable.now, receivable.max) l
    union all
    select m from pgmb_internal.pgmq_visible(q, receivable.now, receivable.max) m);
  if cardinality(events) < receivable.max then
    fresh := pgmb_internal.fresh_events(q, newest, receivable.max, receivable.look, receivable.now);
        events := events || fresh.events;
    looked := fresh.looked;
    more := fresh.more;
  end if;
end $$;

-- What a queue would deliver next if it were not paused, without leasing it: {events, looked, more}. First what is due
-- again, with `due_at` and the attempt that comes, then fresh events (due_at null, attempt 1) from the queue's position, in
-- the order of the log. Each event comes with the beginning of its payload and how many bytes it has. At most `max` (200)
-- events are returned and about `look` (100000) numbers of the log looked at; more: it stopped before the end of the log.
-- Events of the calling transaction are left out, and so are the failed requests of endpoints. An ordered, fair or sharded
-- queue delivers in another order: keys that are leased wait, tenants take turns. Needs a statement_timeout where the
-- queue has an SQL condition or a costly filter. Errors: MB002, MB005, MB009, MB010, MB024, 42501.
create or replace function pgmb.next_events(queue text, max integer default 20, look integer default 10000)
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  lanes pgmb.queue[];
  q pgmb.queue;
  newest pgmb.claim;
  now timestamptz := clock_timestamp();
  most integer := least(next_events.max, 200);
  part record;
  looked bigint := 0;
  more boolean := false;
    events pgmb.receivable[] := '{}';
  ranks integer[] := '{}';
begin
  lanes := array(select l from pgmb_internal.lanes_for_consumer(next_events.queue) l);
  if not coalesce(next_events.max > 0 and next_events.look > 0, false) then
    raise exception 'max and look must be at least 1' using errcode = 'MB005';
  end if;
  foreach q in array lanes loop
    if q.shards = 1 and cardinality(events) >= most then
      more := true;
      exit;
    end if;
    select * into newest from pgmb_internal.queue_position(q.id);
    part := pgmb_internal.receivable(q, newest, most, greatest(1, least(next_events.look, 100000) / cardinality(lanes)), now);
    events := events || part.events;
    looked := looked + part.looked;
    more := more or part.more;
    ranks := ranks || array_fill(case when q.shards > 1 then 0 else q.lane end, array[cardinality(part.events)]);
  end loop;
  return json_build_object('events', coalesce((
      select json_agg(json_build_object('seq', (e.event).seq, 'id', (e.event).id, 'topic', (e.event).topic, 'key', (e.event).key,
        'payload', left((e.event).payload::text, 300), 'bytes', octet_length((e.event).payload::text),
        'published_at', (e.event).published_at,
        'attempt', e.attempt, 'due_at', e.due_at, 'error', e.error) order by e.place)
      from (
        select e.*, row_number() over (
          order by e.rank, e.due_at is null, e.due_at, case when lanes[1].shards > 1 then (e.event).seq end, e.nth) place
        from unnest(events, ranks) with ordinality e (event, attempt, due_at, error, rank, nth)) e
      where e.place <= most), '[]'),
    'looked', looked, 'more', more or cardinality(events) > most);
end $$;
