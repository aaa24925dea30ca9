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
    if place >> 40 >= upto >> 40 then
      return least(place + size, upto);
    end if;
    select g.number into seg from pgmb.segment g
    where g.stream = window_end.stream and g.number >= place >> 40 and g.dropped_at is null
    order by g.number limit 1;
    if seg is null or seg >= upto >> 40 then
      place := (upto >> 40) << 40;
      continue;
    end if;
    place := greatest(place, seg << 40);
    execute 'select coalesce(max(e.seq), 0) from pgmb.segment_' || stream || '_' || seg || ' e' into last;
    if place < last then
      return least(place + size, last);
    end if;
    place := (seg + 1) << 40;
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
    where s.stream = count_newest.stream and s.number between lo >> 40 and hi >> 40 and s.dropped_at is null
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

-- Passes over the oldest events of a queue that holds more than its length allows. Returns its position.
create or replace function pgmb_internal.drop_oldest(queue pgmb.queue, base pgmb.claim)
returns pgmb.claim
language plpgsql
as $$
declare
  last bigint := pgmb_internal.last_seq((queue).stream_name);
  present pg_snapshot := pgmb_internal.snapshot();
  fresh record;
  older record;
begin
  -- Some more than allowed are let be: the look is not worth it for one or two.
  if pgmb_internal.numbers_between((queue).stream,
    case when base.place >= base.upto then base.batch_seq else greatest(base.place, base.done_seq) end, last)
    <= (queue).max_length + (queue).max_length / 20
  then
    return base;
  end if;
  fresh := pgmb_internal.count_newest((queue).stream, base.batch_snapshot, present, base.batch_seq, last,
    (queue).matching || pgmb_internal.without_own(base.own, base.own_seq), (queue).max_length);
  if fresh.counted >= (queue).max_length then
    base.done_snapshot := base.batch_snapshot;
    base.done_seq := base.batch_seq;
    base.done_next := base.batch_next;
    base.batch_snapshot := present;
    base.upto := last;
    base.place := fresh.first - 1;
  elsif base.place < base.upto then
    older := pgmb_internal.count_newest((queue).stream, base.done_snapshot, base.batch_snapshot, greatest(base.place, base.done_seq),
      base.upto, (queue).matching || pgmb_internal.without_own(base.own, base.own_seq), (queue).max_length - fresh.counted);
    if older.counted >= (queue).max_length - fresh.counted then
      base.place := older.first - 1;
    end if;
  end if;
  return base;
end $$;
