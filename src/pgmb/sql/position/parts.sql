-- Reading in parts: how a batch between two positions is divided among readers that work side by side (Spark), each
-- with a plain SELECT of its own on the log. What they read is what pgmb.between would give.

-- Where a stream lives: the installation, the database and the epoch to which its positions belong, and the salt of derived
-- ids (pgmb.derive_id). On a replica too. Errors: MB001 no such stream.
create or replace function pgmb.identify(
  stream text, out cluster text, out database text, out epoch integer, out salt bigint
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb.stream_id(identify.stream);
  perform pgmb_internal.assert_reader(identify.stream);
  select i.identity::text, current_database()::text, i.epoch, s.salt
  into identify.cluster, identify.database, identify.epoch, identify.salt
  from pgmb.installation i, pgmb.stream s
  where s.name = identify.stream;
end $$;

-- The newest tick's position, or the earliest where there is none, and the highest number drawn so far: no event
-- before the position lies above it. Tick first, in a transaction of its own.
create or replace function pgmb.newest(stream text, out "position" pgmb.position, out last bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_reader(newest.stream);
  newest."position" := (select t."position" from pgmb.newest_tick(newest.stream) t);
  -- Second: what the position holds drew its numbers before.
  newest.last := pgmb_internal.last_seq(newest.stream);
end $$;

-- Divides the events between two positions with after_seq < seq <= last into parts of about `size` numbers, at least
-- `parts` of them where there are as many. A part is lo < seq <= hi, and together they cover the whole stretch. A late
-- part holds transactions that were unfinished at `after`, to be found by their xids; the others are walked by number. max:
-- the number of numbers in all parts; the last part then ends before `last`, and the next call continues with
-- after_seq => its hi. Numbers of rolled-back events count too, but a range is never empty while events remain. The cost
-- depends on neither the backlog nor the log's size. Errors: those of assert_between without lo and hi.
create or replace function pgmb.divide(
  stream text, after pgmb.position, upto pgmb.position, after_seq bigint, last bigint,
  max bigint default null, size bigint default 500000, parts integer default 1,
  out lo bigint, out hi bigint, out late boolean, out numbers bigint
)
returns setof record
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  stream_number integer := pgmb.stream_id(stream);
  place bigint := coalesce(after_seq, 0);
  -- Where stragglers end, and the walk above them begins.
  floor bigint := least(last, (after).seq);
  budget bigint := coalesce(max, 9223372036854775807);
  first bigint;
  straggling bigint;
begin
  perform pgmb.assert_between(stream, after, upto);
  if place < floor then
    -- History that only the lake has cannot be counted here: it is walked.
    first := pgmb_internal.first_in_lake(stream_number, after, place, floor);
    straggling := case when first is null then
      (pgmb_internal.stragglers(stream_number, after, (upto).snapshot, place, floor)).events else 10001 end;
    if straggling between 1 and least(budget, 10000) then
      lo := place;
      hi := floor;
      late := true;
      numbers := straggling;
      budget := budget - straggling;
      return next;
    elsif straggling > 0 then
      -- Many: their numbers lie close together, and from the first on the log is walked as it is above them.
      late := false;
      first := coalesce(first, pgmb_internal.first_between(stream_number, after, upto, place, floor));
      for lo, hi, numbers in select * from pgmb_internal.cut(stream_number, first - 1, floor, budget, size, parts) loop
        budget := budget - numbers;
        return next;
      end loop;
    end if;
    if straggling > 0 and hi < floor then
      return;
    end if;
    place := floor;
  end if;
  first := pgmb_internal.first_in_lake(stream_number, after, place, last);
  if first is not null then
    place := first - 1;
  elsif budget > 0 and budget < pgmb_internal.numbers_between(stream_number, place, last) then
    first := pgmb_internal.first_between(stream_number, after, upto, place, last);
    if first is null then
      return;
    end if;
    place := first - 1;
  end if;
  late := false;
  for lo, hi, numbers in select * from pgmb_internal.cut(stream_number, place, last, budget, size, parts) loop
    return next;
  end loop;
end $$;

-- The events with lo < seq <= hi of transactions that were unfinished at `after` and have ended in `batch`: how many,
-- counted up to 10000 a segment and a little beyond, and when the oldest of those was published.
create or replace function pgmb_internal.stragglers(
  stream integer, after pgmb.position, batch pg_snapshot, lo bigint, hi bigint,
  out events bigint, out oldest timestamptz
)
language plpgsql
as $$
declare
  unfinished xid8[] := array(select x from pg_snapshot_xip((after).snapshot) x
    where x <= (after).next and pg_visible_in_snapshot(x, batch));
  leaf text;
  part record;
begin
  events := 0;
  if lo >= hi or (cardinality(unfinished) = 0 and (after).next < pg_snapshot_xmax((after).snapshot)) then
    return;
  end if;
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
    where s.stream = stragglers.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi)
      and s.dropped_at is null and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin((after).snapshot))
  loop
    -- seq + 0, so that a table never analyzed is not walked by seq instead.
    execute format('select count(*) events, min(straggler.published_at) oldest from (
        select e.published_at from %1$s e where e.xid = any ($1) and e.seq + 0 > $2 and e.seq + 0 <= $3
        union all
        select e.published_at from %1$s e where e.xid >= $4 and e.xid <= $5 and pg_visible_in_snapshot(e.xid, $6)
          and e.seq + 0 > $2 and e.seq + 0 <= $3
        limit 10001) straggler', leaf)
      into part using unfinished, lo, hi, pg_snapshot_xmax((after).snapshot), (after).next, batch;
    events := events + part.events;
    oldest := least(oldest, part.oldest);
  end loop;
end $$;

-- Whether a segment that retention dropped can be read from the lake: it was verified there, and the transaction has said by
-- the setting pgmb.read_lake that it reads the lake.
create or replace function pgmb_internal.is_in_lake(gone pgmb.segment)
returns boolean
language sql stable
as $$
  select (gone).dropped_at is not null and current_setting('pgmb.read_lake', true) = 'on' and exists (
    select from pgmb.archived a
    where a.stream = (gone).stream and a.segment = (gone).number and a.verified_at is not null)
$$;

-- The lowest number with lo < seq <= hi that an event after a position may have in a segment which only the lake has.
-- Segments are dropped in order: what the log has lies above it.
create or replace function pgmb_internal.first_in_lake(stream integer, after pgmb.position, lo bigint, hi bigint)
returns bigint
language sql stable
as $$
  select greatest(lo + 1, min(pgmb_internal.first_number(s.number)))
  from pgmb.segment s
  where s.stream = first_in_lake.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi) and s.last_seq > lo
    and s.max_xid >= pg_snapshot_xmin((after).snapshot) and pgmb_internal.is_in_lake(s)
  having count(*) > 0
$$;

-- The number of the first event between two positions with lo < seq <= hi.
create or replace function pgmb_internal.first_between(
  stream integer, after pgmb.position, upto pgmb.position, lo bigint, hi bigint
)
returns bigint
language sql volatile
as $$
  select e.seq from pgmb_internal.batch_events(stream, pgmb_internal.batch_between(after, upto), lo, hi, '', 1, raw => true) e
$$;

-- Cuts lo < seq <= hi, or as much of it as holds `budget` numbers, into parts of about `size` numbers, at least `parts`.
-- They follow one another without a gap, also across segments.
create or replace function pgmb_internal.cut(
  stream integer, lo bigint, hi bigint, budget bigint, size bigint, parts integer
)
returns table (part_lo bigint, part_hi bigint, numbers bigint)
language plpgsql
as $$
declare
  held bigint := pgmb_internal.numbers_between(stream, lo, hi) + (
    select coalesce(sum(least(hi, s.last_seq) - greatest(lo, pgmb_internal.first_number(s.number))), 0)
    from pgmb.segment s
    where s.stream = cut.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi) and s.last_seq > lo and pgmb_internal.is_in_lake(s));
  rest bigint := least(held, budget);
  target bigint := ceil(rest / greatest(1, parts, ceil(rest / size::numeric)));
  place bigint;
  final bigint;
  step bigint;
begin
  -- From the beginning on: what is kept begins later.
  part_lo := case when lo > 0 then lo else coalesce((
    select pgmb_internal.first_number(min(s.number)) from pgmb.segment s
    where s.stream = cut.stream and (s.dropped_at is null or pgmb_internal.is_in_lake(s))), 0) end;
  numbers := 0;
  for place, final in
    select greatest(lo, pgmb_internal.first_number(s.number)), least(hi, coalesce(s.last_seq, hi))
    from pgmb.segment s
    where s.stream = cut.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi)
      and (s.dropped_at is null or pgmb_internal.is_in_lake(s)) and (s.last_seq is not null or s.number = pgmb_internal.segment_of(hi))
    order by s.number
  loop
    while rest > 0 and place < final loop
      step := least(target - numbers, final - place, rest);
      place := place + step;
      numbers := numbers + step;
      rest := rest - step;
      held := held - step;
      if numbers = target or rest = 0 then
        -- Nothing is left above: the last part ends where it was asked to, whatever its segment says of itself.
        part_hi := case when held = 0 then hi else place end;
        return next;
        part_lo := part_hi;
        numbers := 0;
      end if;
    end loop;
  end loop;
end $$;
