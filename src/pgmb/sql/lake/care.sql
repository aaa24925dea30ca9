-- Care for tables of the lake: what was verified is read again, what is missing in the manifest is taken from the table, and
-- what holds up a segment is named.

-- Segments that are verified in the lake, closed since a time: what they must hold, or may hold while an erasure is under way, and
-- whether the log has dropped them.
-- Errors: MB001, MB061. Support.
create or replace function pgmb.archived_segments(stream text, since timestamptz default '-infinity')
returns table (segment integer, events bigint, digest bytea, erased_digest bytea, dropped boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  lake record;
begin
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(archived_segments.stream);
  select * into lake from pgmb.lake_of(archived_segments.stream);
  return query
  select a.segment, a.events, a.digest, a.erased_digest, g.dropped_at is not null
  from pgmb.archived a join pgmb.segment g on g.stream = a.stream and g.number = a.segment
  where a.stream = stream_number and a.url = lake.url and a.verified_at is not null and g.closed_at >= archived_segments.since
  order by a.segment;
end $$;

-- Records that the table does not hold a segment as the log does, and why. A segment that the log still has is not archived any
-- more: retention keeps it, and an archiver can write its files again. Returns whether the log has it. Lock: what retention
-- locks before it drops. Errors: MB001. Support.
create or replace function pgmb.record_damage(stream text, segment integer, failure text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  kept boolean;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(record_damage.stream);
  -- A drop that is under way is waited for.
  perform from pgmb.history h where h.stream = stream_number for share;
  update pgmb.segment g set archived_at = null
  where g.stream = stream_number and g.number = record_damage.segment and g.dropped_at is null;
  kept := found;
  update pgmb.archived a
  set failed_at = clock_timestamp(), failure = left(record_damage.failure, 1000),
    url = case when not kept then a.url end, lake_version = case when not kept then a.lake_version end,
    verified_at = case when not kept then a.verified_at end
  where a.stream = stream_number and a.segment = record_damage.segment;
  return kept;
end $$;

-- Records that the table holds segments as it should: damage that was recorded before is repaired. Returns how many had damage.
-- Errors: MB001. Support.
create or replace function pgmb.record_sound(stream text, segments integer[])
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  repaired bigint;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(record_sound.stream);
  update pgmb.archived a set failed_at = null, failure = null
  where a.stream = stream_number and a.segment = any (record_sound.segments) and a.failed_at is not null
    and a.verified_at is not null;
  get diagnostics repaired = row_count;
  return repaired;
end $$;

-- The segments of a stream that the log dropped and that are not in the manifest. Support.
create or replace function pgmb.orphaned_segments(stream text)
returns setof integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
begin
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(orphaned_segments.stream);
  return query
  select g.number from pgmb.segment g
  where g.stream = stream_number and g.dropped_at is not null and g.max_xid is not null and not exists (
    select from pgmb.archived a where a.stream = g.stream and a.segment = g.number and a.verified_at is not null)
  order by g.number;
end $$;

-- Takes a segment that the log dropped into the manifest, as it was read from version lake_version of the table: `events` of
-- epoch `epoch` with that digest. True if it was not there. Errors: MB063 the log has it, or never had it, MB001, MB061. Support.
create or replace function pgmb.adopt_archived(
  stream text, segment integer, epoch integer, events bigint, digest bytea, lake_version bigint
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  lake record;
  gone pgmb.segment;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(adopt_archived.stream);
  select * into lake from pgmb.lake_of(adopt_archived.stream);
  select * into gone from pgmb.segment g where g.stream = stream_number and g.number = adopt_archived.segment;
  if gone.dropped_at is null then
    raise exception 'segment % of stream % is not one that was dropped', adopt_archived.segment, adopt_archived.stream
      using errcode = 'MB063', hint = 'What the log has is verified by pgmb lake archive.';
  end if;
  insert into pgmb.archived as a (stream, segment, epoch, events, digest, max_xid, url, lake_version, verified_at)
  values (stream_number, adopt_archived.segment, adopt_archived.epoch, adopt_archived.events, adopt_archived.digest, gone.max_xid,
    lake.url, adopt_archived.lake_version, clock_timestamp())
  on conflict on constraint archived_pkey do update
  set epoch = excluded.epoch, events = excluded.events, digest = excluded.digest, erased_digest = null, url = excluded.url,
    lake_version = excluded.lake_version, verified_at = excluded.verified_at, failed_at = null, failure = null
  where a.verified_at is null;
  return found;
end $$;

-- What is not archived or not dropped yet, of streams with a lake: each closed segment that the log has, and dropped ones of which
-- the table is damaged, with its state (closed, sealed, archived, damaged), since when, and what it waits for: open transactions, a
-- verification that failed, an archiver, queues and readers, or its time.
create or replace function pgmb.describe_lake_segments(
  out stream text, out segment integer, out state text, out since timestamptz, out reason text
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
  g pgmb.segment;
  copy pgmb.archived;
  first_kept integer;
  unsealed integer;
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  for s in select st.* from pgmb.stream st join pgmb.lake l on l.stream = st.id order by st.name loop
    stream := s.name;
    unsealed := null;
    first_kept := null;
    for g in
      select * from pgmb.segment gs
      where gs.stream = s.id and gs.closed_at is not null and (gs.dropped_at is null or exists (
        select from pgmb.archived a where a.stream = gs.stream and a.segment = gs.number and a.failure is not null))
      order by gs.number
    loop
      segment := g.number;
      select * into copy from pgmb.archived a where a.stream = g.stream and a.segment = g.number;
      state := case when g.dropped_at is not null then 'damaged' when g.archived_at is not null then 'archived'
        when g.sealed_at is not null then 'sealed' else 'closed' end;
      since := case state when 'damaged' then copy.failed_at when 'archived' then g.archived_at when 'sealed' then g.sealed_at
        else g.closed_at end;
      reason := case state
        when 'damaged' then 'the log dropped it, and the table is damaged: ' || copy.failure
        when 'closed' then coalesce('transactions that may write to it are open: '
          || pgmb_internal.writers_of(s.name, g.closed_xid), 'waits for pgmb.maintain()')
        when 'sealed' then case
          when unsealed is not null then format('segment %s before it is not sealed', unsealed)
          when copy.failure is not null then format('verification failed: %s', copy.failure)
          when not pgmb_internal.may_lock_lake(s.id) then 'an archiver works on the stream'
          else 'waits for pgmb lake archive' end
        else case
          when s.keep_for is null then 'kept without limit'
          when coalesce(g.last_published_at, g.closed_at) + s.keep_for >= now
            then format('kept until %s', date_trunc('second', coalesce(g.last_published_at, g.closed_at) + s.keep_for))
          when not s.drop_unread and exists (select from pgmb_internal.segment_holders(g))
            then 'held by ' || (select string_agg(h.kind || ' ' || h.name, ', ' order by h.kind, h.name)
              from pgmb_internal.segment_holders(g) h)
          when first_kept is not null then format('segment %s before it is kept', first_kept)
          else 'waits for pgmb.maintain()' end
        end;
      if state = 'closed' then
        unsealed := coalesce(unsealed, g.number);
      end if;
      if state <> 'damaged' then
        first_kept := coalesce(first_kept, g.number);
      end if;
      return next;
    end loop;
  end loop;
end $$;

-- When the first event of a stream that is not archived was published; null: all are. An open transaction may have one in a
-- closed segment that shows none: it is not younger than the closing.
create or replace function pgmb_internal.unarchived_since(stream integer)
returns timestamptz
language plpgsql volatile
as $$
declare
  kept pgmb.segment;
  oldest timestamptz;
begin
  for kept in
    select * from pgmb.segment g
    where g.stream = unarchived_since.stream and g.archived_at is null and g.dropped_at is null order by g.number
  loop
    execute format('select e.published_at from pgmb.segment_%s_%s e order by e.seq limit 1', kept.stream, kept.number) into oldest;
    if oldest is not null then
      -- Replayed events have the times of the originals.
      return greatest(oldest, (select max(b.closed_at) from pgmb.segment b where b.stream = kept.stream and b.number = kept.number - 1));
    elsif kept.closed_at is not null and kept.sealed_at is null then
      return kept.closed_at;
    end if;
  end loop;
  return null;
end $$;

-- The open transactions that hold a write lock on a log and may have numbers of a segment that was closed before `last`.
create or replace function pgmb_internal.writers_of(stream text, last xid8)
returns text
language sql volatile
as $$
  select string_agg(coalesce(
    format('process %s (%s, %s, %s since %s)', a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no name'), a.state,
      date_trunc('second', a.xact_start)),
    'a prepared transaction'), ', ')
  from pg_locks writing
  left join pg_stat_activity a on a.pid = writing.pid
  where writing.locktype = 'relation' and writing.relation = format('pgmb.%I', 'log_' || stream)::regclass
    and writing.mode = 'RowExclusiveLock' and writing.granted and writing.pid is distinct from pg_backend_pid()
    and (last is null or exists (
      select from pg_locks held
      where held.virtualtransaction = writing.virtualtransaction and held.pid is not distinct from writing.pid
        and held.locktype = 'transactionid' and held.mode = 'ExclusiveLock' and held.granted
        and held.transactionid::text::bigint
          in (select x.unfinished::text::bigint & 4294967295 from pgmb_internal.unfinished_upto(last) x (unfinished))))
$$;

-- Whether no archiver works on a stream.
create or replace function pgmb_internal.may_lock_lake(stream integer)
returns boolean
language plpgsql volatile
as $$
declare
  key bigint := pgmb_internal.lock_key('lake ' || stream);
begin
  return not exists (
    select from pg_locks l where l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.classid::bigint = (key >> 32) & 4294967295 and l.objid::bigint = key & 4294967295);
end $$;
