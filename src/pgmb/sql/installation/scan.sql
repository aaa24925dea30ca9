-- Scans for due rows: where a session starts the next one (docs/adr/0039).
--
-- While a transaction pins xmin, rows that were leased or deleted stay in the index, and a scan for the next due row has to
-- pass all of them. A session that passed many stores, in a setting of its own, the value up to which it found no row, and
-- starts the next scan there. Rows that become visible below that value are found too: scans regularly start some seconds
-- earlier, and from time to time at the beginning of the index.
--
-- The setting holds four numbers: when it expires, its lifetime, the start of the next scan, and the time of the last scan.
-- Times are in microseconds since 1970.

-- The numbers of a setting. Null if it has expired or the clock was set back.
create or replace function pgmb_internal.read_scan(setting text, now timestamptz)
returns bigint[]
language plpgsql immutable
as $$
declare
  stored bigint[] := string_to_array(read_scan.setting, ' ')::bigint[];
  remaining double precision := stored[1] - extract(epoch from read_scan.now)::double precision * 1000000;
begin
  return case when remaining > 0 and remaining <= stored[2] then stored end;
end $$;

-- The stored start of the session's next scan; null: at the beginning. Inlined, because most sessions store nothing.
create or replace function pgmb_internal.scan_start(setting_name text, now timestamptz)
returns bigint
language sql stable
as $$
  select case when coalesce(current_setting(setting_name, true), '') <> ''
    then (pgmb_internal.read_scan(current_setting(setting_name, true), now))[3] end
$$;

-- The start of a scan by time: 100 ms before the stored one. The first scan in a new second starts 2 seconds before it, the
-- first after a multiple of 2, 4, 8 ... seconds 4, 8, 16 ... seconds before it. A row that was committed some time after it
-- was due is therefore found after the same time again.
create or replace function pgmb_internal.time_of_start(setting text, now timestamptz)
returns timestamptz
language plpgsql immutable
as $$
declare
  stored bigint[] := pgmb_internal.read_scan(time_of_start.setting, time_of_start.now);
  changed bigint;                            -- the bits of the seconds that differ from the last scan's
begin
  if stored is null then
    return '-infinity';
  end if;
  changed := (stored[4] / 1000000) # floor(extract(epoch from time_of_start.now))::bigint;
  return to_timestamp(stored[3] / 1000000.0) - case when changed = 0 then interval '100 milliseconds'
    else interval '2 seconds' * 2 ^ floor(ln(changed) / ln(2) + 0.000001) end;
end $$;

-- The same for statements that do not store anything. Inlined, as scan_start.
create or replace function pgmb_internal.scan_since(setting_name text, now timestamptz)
returns timestamptz
language sql stable
as $$
  select case when coalesce(current_setting(setting_name, true), '') = '' then timestamptz '-infinity'
    else pgmb_internal.time_of_start(current_setting(setting_name, true), now) end
$$;

-- Begins a scan of an index, the start of which is stored in the setting of that name. by_time => false: by another number.
create or replace function pgmb_internal.begin_scan(setting_name text, index regclass, by_time boolean default true)
returns pgmb.scan
language plpgsql volatile
as $$
declare
  scan pgmb.scan;
  stored bigint[];
begin
  scan.setting_name := begin_scan.setting_name;
  scan.index := begin_scan.index;
  scan.at := clock_timestamp();
  scan.since := '-infinity';
  if coalesce(current_setting(begin_scan.setting_name, true), '') <> '' then
    stored := pgmb_internal.read_scan(current_setting(begin_scan.setting_name), scan.at);
    scan.start := stored[3];
    scan.last_at := to_timestamp(stored[4] / 1000000.0);
    if by_time then
      scan.since := pgmb_internal.time_of_start(current_setting(begin_scan.setting_name), scan.at);
    end if;
  end if;
  scan.read_before := pgmb_internal.entries_read(begin_scan.index);
  return scan;
end $$;

-- Ends a scan that found no row below `start`, and stores that if the scan passed 64 entries or more. After a scan from the
-- beginning, the setting is valid for `lifetime` microseconds per entry, at least a second and at most a minute. A scan
-- takes less than a microsecond per entry.
create or replace function pgmb_internal.end_scan(scan pgmb.scan, start bigint, lifetime bigint default 200)
returns void
language plpgsql volatile
as $$
declare
  passed bigint := pgmb_internal.entries_read((scan).index) - (scan).read_before;
  now bigint := pgmb_internal.microseconds((scan).at);
  valid_for bigint;
  stored bigint[];
begin
  if (scan).start is null then
    if passed < 64 then
      return;
    end if;
    valid_for := least(greatest(lifetime * passed, 1000000), 60000000);
    stored := array[now + valid_for, valid_for];
  else
    stored := string_to_array(current_setting((scan).setting_name), ' ')::bigint[];
    if passed < 64 and stored[4] / 1000000 = now / 1000000 then
      return;
    end if;
  end if;
  perform set_config((scan).setting_name, concat_ws(' ', stored[1], stored[2], start, now), false);
end $$;

-- How many entries of an index this transaction has read, dead ones included. Always 0 if track_counts is off: then scans
-- always start at the beginning.
create or replace function pgmb_internal.entries_read(index regclass)
returns bigint
language sql volatile
as $$
  select coalesce(pg_stat_get_xact_tuples_returned(index), 0)
$$;

-- A time in microseconds since 1970.
create or replace function pgmb_internal.microseconds(at timestamptz)
returns bigint
language sql immutable parallel safe
as $$
  select (extract(epoch from greatest(at, timestamptz '1970-01-01 00:00:00+00')) * 1000000)::bigint
$$;
