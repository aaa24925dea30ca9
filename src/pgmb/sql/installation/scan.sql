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
  return case when remaining > 0 and remaining <= stored[2] and stored[4] <= pgmb_internal.microseconds(read_scan.now)
    then stored end;
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

-- The same, for a setting by its name. Inlined, as scan_start.
create or replace function pgmb_internal.scan_since(setting_name text, now timestamptz)
returns timestamptz
language sql stable
as $$
  select case when coalesce(current_setting(setting_name, true), '') = '' then timestamptz '-infinity'
    else pgmb_internal.time_of_start(current_setting(setting_name, true), now) end
$$;

-- Whether to call store_scan after a scan that passed this many entries: they are many, or the session stored an earlier
-- scan. Inlined, as scan_start.
create or replace function pgmb_internal.should_store_scan(setting_name text, passed bigint)
returns boolean
language sql stable
as $$
  select passed >= 64 or coalesce(current_setting(setting_name, true), '') <> ''
$$;

-- Stores the start of the session's next scan, after a scan that found no row below it. passed: the entries that it read. After
-- a scan from the beginning, the setting is valid for `lifetime` microseconds per entry, at least a second and at most a
-- minute. A scan takes less than a microsecond per entry.
create or replace function pgmb_internal.store_scan(
  setting_name text, now timestamptz, start bigint, passed bigint, lifetime bigint default 200
)
returns void
language plpgsql volatile
as $$
declare
  stored bigint[] := pgmb_internal.read_scan(current_setting(store_scan.setting_name, true), store_scan.now);
  at bigint := pgmb_internal.microseconds(store_scan.now);
  valid_for bigint;
begin
  -- Short scans move the start once per second.
  if passed < 64 and (stored is null or stored[4] / 1000000 = at / 1000000) then
    return;
  end if;
  if stored is null then
    valid_for := least(greatest(lifetime * passed, 1000000), 60000000);
    stored := array[at + valid_for, valid_for];
  end if;
  perform set_config(setting_name, concat_ws(' ', stored[1], stored[2], start, at), false);
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
language sql stable parallel safe
as $$
  select (extract(epoch from greatest(at, timestamptz '1970-01-01 00:00:00+00')) * 1000000)::bigint
$$;
