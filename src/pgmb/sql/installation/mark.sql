-- Marks: where a session's next look through an index begins (docs/adr/0039).
--
-- Rows that were taken are dead, but while any transaction pins xmin they stay in the index that is searched for the next
-- one, and every look passes all of them. So a session that passed many remembers, in a setting of its own, up to where it
-- found nothing, and begins there next time. What commits late behind that mark is found all the same: every second a look
-- begins a second or two earlier, every other second up to four, and so on; and from time to time one begins at the beginning.

-- A mark's setting: until when it counts, how long that was, the mark, and the time of the last look, all but the mark in
-- microseconds of the epoch. Null if its time is over, or the clock was set back.
create or replace function pgmb_internal.read_mark(setting text, now timestamptz)
returns bigint[]
language plpgsql immutable
as $$
declare
  said bigint[] := string_to_array(read_mark.setting, ' ')::bigint[];
  left_over double precision := said[1] - extract(epoch from read_mark.now)::double precision * 1000000;
begin
  return case when left_over > 0 and left_over <= said[2] then said end;
end $$;

-- The mark that the session has at `place`; null: look from the beginning. Inlined: most often there is none.
create or replace function pgmb_internal.mark_at(place text, now timestamptz)
returns bigint
language sql stable
as $$
  select case when coalesce(current_setting(place, true), '') <> ''
    then (pgmb_internal.read_mark(current_setting(place, true), now))[3] end
$$;

-- Where a look by time begins at `place`: a moment before the mark. If the clock has passed a whole second since the last
-- look, 2 seconds before it; if it has passed a whole number of 2, 4, 8 ... seconds, 4, 8, 16 ... before it. What commits
-- some time later than its own is found after as much time again.
create or replace function pgmb_internal.time_of_mark(setting text, now timestamptz)
returns timestamptz
language plpgsql immutable
as $$
declare
  said bigint[] := pgmb_internal.read_mark(time_of_mark.setting, time_of_mark.now);
  passed bigint;
begin
  if said is null then
    return '-infinity';
  end if;
  passed := (said[4] / 1000000) # floor(extract(epoch from time_of_mark.now))::bigint;
  return to_timestamp(said[3] / 1000000.0)
    - case when passed = 0 then interval '100 milliseconds' else interval '2 seconds' * 2 ^ floor(ln(passed) / ln(2) + 0.000001) end;
end $$;

create or replace function pgmb_internal.look_since(place text, now timestamptz)
returns timestamptz
language sql stable
as $$
  select case when coalesce(current_setting(place, true), '') = '' then timestamptz '-infinity'
    else pgmb_internal.time_of_mark(current_setting(place, true), now) end
$$;

-- When the session looked at `place` last, to the second; null without a mark.
create or replace function pgmb_internal.looked_at(place text)
returns timestamptz
language sql stable
as $$
  select to_timestamp(nullif(split_part(coalesce(current_setting(place, true), ''), ' ', 4), '')::bigint / 1000000.0)
$$;

-- How many entries of an index this transaction has read, dead ones included. 0 if track_counts is off: there are no marks
-- then.
create or replace function pgmb_internal.entries_read(index regclass)
returns bigint
language sql volatile
as $$
  select coalesce(pg_stat_get_xact_tuples_returned(index), 0)
$$;

-- Remembers the mark at `place`, after a look that passed so many entries. One from the beginning (`whole`) sets a mark if
-- they were many. It then counts for `patience` microseconds per entry, of which a look takes less than one, but for a second
-- at least and a minute at most.
create or replace function pgmb_internal.set_mark(
  place text, mark bigint, passed bigint, whole boolean, now timestamptz, patience bigint default 200
)
returns void
language plpgsql volatile
as $$
declare
  present bigint;
  pause bigint;
  said bigint[];
begin
  if set_mark.whole and set_mark.passed < 64 then
    return;
  end if;
  present := pgmb_internal.mark_of_time(set_mark.now);
  if set_mark.whole then
    pause := least(greatest(set_mark.patience * set_mark.passed, 1000000), 60000000);
    said := array[present + pause, pause];
  else
    said := string_to_array(current_setting(set_mark.place), ' ')::bigint[];
    if set_mark.passed < 64 and said[4] / 1000000 = present / 1000000 then
      return;
    end if;
  end if;
  perform set_config(set_mark.place, concat_ws(' ', said[1], said[2], set_mark.mark, present), false);
end $$;

-- A mark that is a time.
create or replace function pgmb_internal.mark_of_time(at timestamptz)
returns bigint
language sql immutable parallel safe
as $$
  select (extract(epoch from greatest(at, timestamptz '1970-01-01 00:00:00+00')) * 1000000)::bigint
$$;
