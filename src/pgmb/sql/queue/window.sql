-- What of the log lies ahead of a queue: how far to look at once, and how much of it a length lets be.

-- Where a window of `size` numbers above `place` ends, at most at `upto`. Numbers jump from segment to segment:
-- what lies between is passed over.
create or replace function pgmb_internal.window_end(stream integer, place bigint, upto bigint, size integer)
returns bigint
language plpgsql
as $$
declare
  seg bigint;
  last bigint;
begin
  loop
    if pgmb_internal.segment_of(place) >= pgmb_internal.segment_of(upto) then
      return least(place + size, upto);
    end if;
    select g.number into seg from pgmb.segment g
    where g.stream = window_end.stream and g.number >= pgmb_internal.segment_of(place) and g.dropped_at is null
    order by g.number limit 1;
    if seg is null or seg >= pgmb_internal.segment_of(upto) then
      place := pgmb_internal.first_number(pgmb_internal.segment_of(upto));
      continue;
    end if;
    place := greatest(place, pgmb_internal.first_number(seg));
    execute 'select coalesce(max(e.seq), 0) from pgmb.segment_' || stream || '_' || seg || ' e' into last;
    if place < last then
      return least(place + size, last);
    end if;
    place := pgmb_internal.first_number(seg + 1);
  end loop;
end $$;

-- How many events of a batch match, counted from its newest down to at most `most`, and the number of the last
-- one counted.
create or replace function pgmb_internal.count_newest(
  stream integer, done pg_snapshot, batch pg_snapshot, lo bigint, hi bigint, matching text, most bigint,
  out counted bigint, out first bigint
)
language plpgsql
as $$
declare
  leaf text;
  part record;
begin
  counted := 0;
  for leaf in
    select 'pgmb.segment_' || s.stream || '_' || s.number from pgmb.segment s
    where s.stream = count_newest.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi) and s.dropped_at is null
    order by s.number desc
  loop
    exit when counted >= most;
    execute 'select count(*) counted, min(seq) first from (' || pgmb_internal.main_part(leaf, 'e.seq', matching)
        || ' desc limit $7) newest'
      into part using lo, hi, batch, pg_snapshot_xmin(batch), done, pg_snapshot_xmax(done), most - counted;
    counted := counted + part.counted;
    first := coalesce(part.first, first);
  end loop;
end $$;

-- Passes over the oldest events of a queue that holds more than its length allows, those that lag first. Returns its position.
create or replace function pgmb_internal.drop_oldest(queue pgmb.queue, base pgmb.claim)
returns pgmb.claim
language plpgsql
as $$
declare
  opened pgmb.claim := pgmb_internal.open_batch(base, (queue).numbers);
  fresh record;
  older record;
begin
  -- Some more than allowed are let be: the look is not worth it for one or two.
  if pgmb_internal.numbers_between((queue).stream,
    least(case when base.place >= base.upto then base.batch_seq else greatest(base.place, base.done_seq) end,
      (select min(l.place) from unnest(base.lagging) l)), opened.upto)
    <= (queue).max_length + (queue).max_length / 20
  then
    return base;
  end if;
  fresh := pgmb_internal.count_newest((queue).stream, opened.done_snapshot, opened.batch_snapshot, opened.done_seq, opened.upto, (queue).matching,
    (queue).max_length);
  if fresh.counted >= (queue).max_length then
    opened.place := fresh.first - 1;
    opened.lagging := null;
    return opened;
  end if;
  if base.place < base.upto then
    older := pgmb_internal.count_newest((queue).stream, base.done_snapshot, base.batch_snapshot, greatest(base.place, base.done_seq),
      base.upto, (queue).matching, (queue).max_length - fresh.counted);
    if older.counted >= (queue).max_length - fresh.counted then
      base.place := older.first - 1;
      base.lagging := null;
      return base;
    end if;
    fresh.counted := fresh.counted + older.counted;
  end if;
  if base.lagging is not null then
    return pgmb_internal.drop_lagging(queue, base, (queue).max_length - fresh.counted);
  end if;
  return base;
end $$;

-- Passes over the oldest events of tenants that lag, but for the newest `kept`.
create or replace function pgmb_internal.drop_lagging(queue pgmb.queue, base pgmb.claim, kept bigint)
returns pgmb.claim
language plpgsql
as $$
declare
  part pgmb.pending;
  newest record;
begin
  select * into part from pgmb_internal.lagging_range(queue, base);
  newest := pgmb_internal.count_newest((queue).stream, (part.batch).done, (part.batch).seen, part.lo, part.hi,
    (queue).matching || part.matching, kept);
  if newest.counted >= kept then
    base.lagging := (
      select array_agg((l.tenant, greatest(l.place, newest.first - 1), l.upto, l.since, l.owed)::pgmb.lag order by l.nth)
      from unnest(base.lagging) with ordinality l (tenant, place, upto, since, owed, nth)
      where l.upto >= newest.first);
  end if;
  return base;
end $$;

-- How many events of the log wait in a queue that is at `newest`, and when the oldest of them was published. `asked` is the
-- condition on an event. Looks at `most` events of the log at most: `complete` is false where there are more.
create or replace function pgmb_internal.count_waiting(
  q pgmb.queue, newest pgmb.claim, asked text, most bigint, out waiting bigint, out oldest timestamptz, out complete boolean
)
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  pending pgmb.pending;
  batch pgmb.batch;
  filter text;
  looked bigint := 0;
  leaf text;
  late record;
  part record;
begin
  waiting := 0;
  complete := true;
  for pending in select * from pgmb_internal.pending(q, newest) loop
    batch := pending.batch;
    filter := asked || pending.matching;
    if pending.lo < batch.done_seq and pgmb_internal.has_stragglers(q.stream, batch, pending.lo, batch.done_seq) then
      select count(*) events, min(e.published_at) oldest into late
      from pgmb_internal.batch_events(q.stream, batch, pending.lo, batch.done_seq, filter, most + 1 - looked, true) e;
      looked := looked + late.events;
      waiting := waiting + late.events;
      oldest := least(oldest, late.oldest);
    end if;
    continue when batch.done_seq >= pending.hi;
    for leaf in
      select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
      where s.stream = q.stream
        and s.number between pgmb_internal.segment_of(greatest(pending.lo, batch.done_seq)) and pgmb_internal.segment_of(pending.hi)
        and s.dropped_at is null and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin(batch.done))
      order by s.number
    loop
      exit when looked > most;
      execute 'select count(*) looked, count(*) filter (where e.counts) events, min(e.published_at) filter (where e.counts) oldest
          from (select e.published_at, (e.xid < $4 or pg_visible_in_snapshot(e.xid, $3))
              and (e.xid >= $6 or not pg_visible_in_snapshot(e.xid, $5))' || filter || ' counts
            from ' || leaf || ' e where e.seq > $1 and e.seq <= $2 order by e.seq limit $7) e'
        into part
        using greatest(pending.lo, batch.done_seq), pending.hi, batch.seen, pg_snapshot_xmin(batch.seen), batch.done,
          pg_snapshot_xmax(batch.done), most + 1 - looked;
      looked := looked + part.looked;
      waiting := waiting + part.events;
      oldest := least(oldest, part.oldest);
    end loop;
    if looked > most then
      waiting := least(waiting, most);
      complete := false;
      return;
    end if;
  end loop;
end $$;

-- Moves a queue that nobody receives from past events that do not match, up to the first that does: what waits in it is
-- counted from there, and retention need not keep what lies before. Looks at `most` numbers at most and returns how many it
-- passed. A queue that another session is at is left alone.
create or replace function pgmb_internal.pass_unmatched(q pgmb.queue, most bigint)
returns bigint
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set lock_timeout = '1s'
as $$
declare
  base pgmb.claim;
  asked text := (pgmb_internal.askable(q)).condition;
  began bigint;
  hi bigint;
  first bigint;
  trimmed pgmb.claim;
  opened boolean := false;
  moved boolean := false;
  passed bigint := 0;
begin
  if not pgmb_internal.try_queue(q.id) then
    return 0;
  end if;
  base := pgmb_internal.lock_queue(q.id);
  if q.max_length is not null and q.when_full = 'drop_oldest' then
    trimmed := pgmb_internal.drop_oldest(q, base);
    moved := trimmed.place <> base.place;
    opened := trimmed.batch_snapshot::text <> base.batch_snapshot::text;
    base := trimmed;
  end if;
  while first is null and passed < most loop
    if base.place >= base.upto then
      exit when opened;
      opened := true;
      base := pgmb_internal.open_batch(base, q.numbers);
    end if;
    began := greatest(base.place, base.done_seq);
    hi := case when base.place < base.done_seq then base.done_seq
      else pgmb_internal.window_end(q.stream, base.place, base.upto, least(5000, most - passed)::integer) end;
    select e.seq into first
    from pgmb_internal.batch_events(q.stream, pgmb_internal.batch_of(base), base.place, hi, asked, 1, true) e;
    base.place := coalesce(first - 1, hi);
    passed := passed + greatest(0, base.place - began);
  end loop;
  if passed < pgmb_internal.worth_a_claim() and not moved then
    return 0;
  end if;
  if opened then
    base := pgmb_internal.note_pair(base, null);
  end if;
  perform pgmb_internal.write_position(base);
  return passed;
end $$;

-- Passes over what does not match in queues that nobody has received from for seconds and that are far behind, those first
-- that were not looked at for longest. Looks at 100,000 events at most. Stops at `until`, after one queue at least. Returns
-- whether it stopped.
create or replace function pgmb_internal.pass_idle_queues(until timestamptz)
returns boolean
language plpgsql
as $$
declare
  idle record;
  left_over bigint := 100000;
  before timestamptz := clock_timestamp() - interval '2 seconds';
begin
  for idle in
    select q, newest.place
    from pgmb.queue q
    cross join lateral (
            select c.at, pgmb_internal.reached(c) place from pgmb_internal.queue_position(q.id) c) newest
    -- A time that lies ahead says nothing: the clock was ahead, or is behind now.
    where (newest.at < before or newest.at > before + interval '3 seconds')
      and pgmb_internal.numbers_between(q.stream, newest.place, pgmb_internal.last_seq(q.stream_name)) >= least(1000, q.max_length)
    order by newest.at
  loop
    begin
      left_over := left_over - 100 - pgmb_internal.pass_unmatched(idle.q, case when (idle.q).plain then 20000 else 5000 end);
    exception when others then
      -- Its filter raises, which receive tells.
      if (idle.q).plain or pgmb_internal.servers_trouble(sqlstate) then
        raise;
      end if;
    end;
    if left_over <= 0 or clock_timestamp() >= until then
      return true;
    end if;
  end loop;
  return false;
end $$;
