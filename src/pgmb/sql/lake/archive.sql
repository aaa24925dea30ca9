-- The lake: archive sealed segments to a table outside the database. An archiver plans, writes files, commits them to
-- the table, reads them back, and records here what it read. Retention drops a segment only after that
-- (docs/explanation/lake.md).

-- Archives a stream to the table at a URL from now on: retention then waits for the archive. keep_hot: how long the log
-- keeps events that are archived, which is the stream's keep_for; null leaves that as it is. dead_url: the table of the dead
-- letters of its queues, by default the URL with _dead at its end; keep_dead: how long the database keeps dead letters that
-- are archived, null leaves that as it is, and a negative one removes the limit. Errors: MB001 no such stream, MB004 the
-- stream is archived to another table, or one of the URLs lies in the folder of another table or holds one.
create or replace function pgmb.create_lake(
  stream text, url text, keep_hot interval default null, dead_url text default null, keep_dead interval default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  installed uuid;
  found_url text;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(create_lake.stream);
  if create_lake.url is null or create_lake.url = '' then
    raise exception 'a lake needs the URL of its table' using errcode = 'MB003',
      hint = 'For example s3://bucket/folder, or the absolute path of a folder.';
  end if;
  perform pgmb_internal.lock_places();
  select i.identity into installed from pgmb.installation i;
  -- A copy of a database that has a lake gets one of its own.
  insert into pgmb.lake as l (stream, url, identity, dead_url)
  values (stream_number, create_lake.url, installed, coalesce(create_lake.dead_url, rtrim(create_lake.url, '/') || '_dead'))
  on conflict on constraint lake_pkey do update
  set url = excluded.url, identity = excluded.identity, dead_url = excluded.dead_url
  where l.identity <> excluded.identity;
  update pgmb.lake l
  set keep_dead = case when create_lake.keep_dead >= interval '0' then create_lake.keep_dead end
  where l.stream = stream_number and create_lake.keep_dead is not null;
  select l.url into found_url from pgmb.lake l where l.stream = stream_number;
  if found_url <> create_lake.url then
    raise exception 'stream % is archived to %', create_lake.stream, found_url using errcode = 'MB004',
      hint = 'A stream has one table, and what is archived stays there.';
  end if;
  perform pgmb_internal.assert_places();
  perform pgmb.alter_stream(create_lake.stream, keep_for => create_lake.keep_hot, archive => true);
end $$;

-- What an archiver has to know of a stream: the URL of its table, the name under which this stream commits to it, the
-- salt of derived ids, the epoch, and the last segment that was verified in this table (null: none). Errors: MB001 no
-- such stream, MB061 it has no lake, or the one of the database that this one is a copy of. Support.
create or replace function pgmb.lake_of(
  stream text, out url text, out source text, out salt bigint, out epoch integer, out verified integer
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  owner uuid;
  installed uuid;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(lake_of.stream);
  select l.url, l.identity, i.identity, i.epoch, s.salt, format('pgmb:%s:%s', i.identity, s.salt)
  into lake_of.url, owner, installed, lake_of.epoch, lake_of.salt, lake_of.source
  from pgmb.stream s cross join pgmb.installation i left join pgmb.lake l on l.stream = s.id
  where s.id = stream_number;
  if lake_of.url is null then
    raise exception 'stream % has no lake', lake_of.stream using errcode = 'MB061',
      hint = 'Create one: pgmb lake init URL --stream NAME.';
  elsif owner <> installed then
    raise exception 'the lake of stream % belongs to the database that this one is a copy of', lake_of.stream
      using errcode = 'MB061', hint = 'Give it one of its own: pgmb lake init OTHER-URL --stream NAME.';
  end if;
  select max(a.segment) into lake_of.verified from pgmb.archived a
  where a.stream = stream_number and a.url = lake_of.url and a.verified_at is not null;
end $$;

-- The segments of a stream to archive, in their order: sealed, not yet archived, and with no unsealed one before them,
-- since segments may be sealed out of order. All their events have lo < seq and seq <= hi; hi null: there are none.
-- Bytes are those in the log. Support.
create or replace function pgmb.plan_archive(stream text)
returns table (segment integer, lo bigint, hi bigint, bytes bigint, sealed_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
begin
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(plan_archive.stream);
  return query
  select g.number, pgmb_internal.first_number(g.number) - 1, g.last_seq,
    coalesce(pg_table_size(to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number))), 0), g.sealed_at
  from pgmb.segment g
  where g.stream = stream_number and g.dropped_at is null and g.sealed_at is not null and g.archived_at is null
    and not exists (select from pgmb.segment open
      where open.stream = g.stream and open.number < g.number and open.sealed_at is null and open.dropped_at is null)
  order by g.number;
end $$;

-- The number of events in a sealed segment of the log, and their digest, which record_archived() compares the table's
-- with. It is computed once, in a few seconds for a million events, and kept in pgmb.archived. See
-- docs/explanation/lake.md for its definition. Errors: MB001 no such stream, MB063 the segment is not sealed, or
-- dropped. Support.
create or replace function pgmb.digest_segment(stream text, segment integer, out events bigint, out digest bytea)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  current_epoch integer;
  sealed pgmb.segment;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(digest_segment.stream);
  select i.epoch into current_epoch from pgmb.installation i;
  select a.events, a.digest into digest_segment.events, digest_segment.digest
  from pgmb.archived a
  where a.stream = stream_number and a.segment = digest_segment.segment
    and (a.epoch = current_epoch or a.verified_at is not null);
  if digest_segment.digest is not null then
    return;
  end if;
  select * into sealed from pgmb.segment g where g.stream = stream_number and g.number = digest_segment.segment;
  if sealed.sealed_at is null or sealed.dropped_at is not null then
    raise exception 'segment % of stream % is not a sealed one', digest_segment.segment, digest_segment.stream
      using errcode = 'MB063', hint = 'Events can still arrive in a segment that is not sealed. pgmb.maintain() seals and drops segments.';
  end if;
  select d.events, d.digest into digest_segment.events, digest_segment.digest
  from pgmb_internal.digest_leaf(stream_number, digest_segment.segment) d;
  insert into pgmb.archived as a (stream, segment, epoch, events, digest, max_xid)
  values (stream_number, digest_segment.segment, current_epoch, digest_segment.events, digest_segment.digest, sealed.max_xid)
  on conflict on constraint archived_pkey do update
  set epoch = excluded.epoch, events = excluded.events, digest = excluded.digest, max_xid = excluded.max_xid
  where a.verified_at is null;
end $$;

-- Counts and digests the events of a segment. Events whose seq has the same quotient by 4,096 are a block, which is hashed
-- column by column in the order of seq: of each value its length in bytes (4 bytes, -1: null) and its binary form. A payload or
-- headers of more than 1,024 bytes count by their SHA-256, so that a block stays small. A block has the SHA-256 of its columns'
-- SHA-256s, and the segment that of its blocks, in order.
create or replace function pgmb_internal.digest_leaf(
  stream integer, segment integer, out events bigint, out digest bytea
)
language plpgsql
set client_encoding = 'UTF8'
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
set jit = off
as $$
declare
  leaf text := format('pgmb.segment_%s_%s', digest_leaf.stream, digest_leaf.segment);
  lo bigint;
  next_lo bigint;
  counted bigint;
  block bytea;
  blocks bytea[] := '{}';
begin
  events := 0;
  execute format('select min(e.seq) from %s e', leaf) into lo;
  while lo is not null loop
    lo := lo >> 12 << 12;
    -- Without its 20 bytes of header an array is what the definition says. json_send(), since a cast to text would go through
    -- a C string, and in a subquery to call it once.
    execute format($query$
      select count(*), sha256(sha256(substr(array_send(array_agg(e.seq)), 21)) || sha256(substr(array_send(array_agg(e.xid)), 21))
          || sha256(substr(array_send(array_agg(e.published_at)), 21)) || sha256(substr(array_send(array_agg(e.id)), 21))
          || sha256(substr(array_send(array_agg(e.topic::text)), 21)) || sha256(substr(array_send(array_agg(e.key::text)), 21))
          || sha256(substr(array_send(array_agg(
            case when octet_length(e.payload) > 1024 then sha256(e.payload) else e.payload end)), 21))
          || sha256(substr(array_send(array_agg(
            case when octet_length(e.headers) > 1024 then sha256(e.headers) else e.headers end)), 21))),
        (select min(n.seq) from %1$s n where n.seq >= $1 + 4096)
      from (
        select o.seq, o.xid, o.published_at, o.id, o.topic, o.key, json_send(o.payload) payload, json_send(o.headers) headers
        from %1$s o where o.seq >= $1 and o.seq < $1 + 4096 order by o.seq offset 0
      ) e
      $query$, leaf)
    into counted, block, next_lo using lo;
    events := events + counted;
    blocks := blocks || block;
    lo := next_lo;
  end loop;
  digest := sha256(coalesce((
    select string_agg(b.digest, '' order by b.place) from unnest(blocks) with ordinality b (digest, place)), ''));
end $$;

-- Records that version lake_version of a stream's table holds a segment as the log does: `events` and `digest` are what
-- was read back from the table. From then on retention may drop the segment. Returns whether it was recorded by this
-- call; false: it had been before. Errors: MB062 they differ from the log's, MB001, MB061.
create or replace function pgmb.record_archived(
  stream text, segment integer, events bigint, digest bytea, lake_version bigint
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  lake record;
  own record;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(record_archived.stream);
  select * into lake from pgmb.lake_of(record_archived.stream);
  select * into own from pgmb.digest_segment(record_archived.stream, record_archived.segment);
  if (own.events, own.digest) is distinct from (record_archived.events, record_archived.digest) then
    raise exception 'segment % of stream % has % events in the log and % in the table%', record_archived.segment,
      record_archived.stream, own.events, coalesce(record_archived.events::text, 'no'),
      case when own.events = record_archived.events then ', whose digests differ' else '' end
      using errcode = 'MB062',
        hint = 'The segment stays in the log. Run pgmb lake archive --repair to write its files again.';
  end if;
  update pgmb.archived a
  set url = lake.url, lake_version = record_archived.lake_version, verified_at = clock_timestamp(), failed_at = null,
    failure = null
  where a.stream = stream_number and a.segment = record_archived.segment and a.verified_at is null;
  if not found then
    return false;
  end if;
  update pgmb.segment g set archived_at = clock_timestamp()
  where g.stream = stream_number and g.number = record_archived.segment;
  return true;
end $$;

-- Lets one archiver at a time work on a stream: whether this session holds the lock now, after waiting for up to 2 s. It
-- ends with the session. It only saves work: two archivers that write the same segments conflict at the table's commit. Support.
create or replace function pgmb.lock_lake(stream text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return pgmb_internal.try_session_lock('lake ' || pgmb.stream_id(lock_lake.stream));
end $$;

-- Every stream with a lake: its URL, how long the log keeps what is archived (null: without limit), how many segments are
-- verified there, with how many events, and when the last was; how many wait to be archived, with how many bytes in
-- the log, and for how long the first of them. lag: the age of the first event that is not archived, also if its segment is open.
-- dead_waiting and dead_waiting_for: how many dead letters wait to be archived, and for how long the oldest of them.
create or replace function pgmb.describe_lakes(
  out stream text, out url text, out keep_hot interval, out archived bigint, out events bigint, out verified_at timestamptz,
  out waiting bigint, out waiting_bytes bigint, out waiting_for interval, out lag interval, out dead_waiting bigint,
  out dead_waiting_for interval
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select s.name, l.url, s.keep_for, done.segments, done.events, done.verified_at,
    left_over.segments, left_over.bytes, clock_timestamp() - left_over.sealed_at,
    clock_timestamp() - pgmb_internal.unarchived_since(s.id), dead.letters, clock_timestamp() - dead.died_at
  from pgmb.lake l
  join pgmb.stream s on s.id = l.stream
  cross join lateral (
    select count(*) segments, coalesce(sum(a.events), 0)::bigint events, max(a.verified_at) verified_at
    from pgmb.archived a where a.stream = s.id and a.verified_at is not null
  ) done
  cross join lateral (
    select count(*) segments, coalesce(sum(p.bytes), 0)::bigint bytes, min(p.sealed_at) sealed_at
    from pgmb.plan_archive(s.name) p
  ) left_over
  cross join lateral (
    select count(*) letters, min(d.died_at) died_at
    from pgmb.dead d join pgmb.queue q on q.id = d.queue
    where d.archived_at is null and q.stream = s.id
  ) dead
  order by s.name;
end $$;

-- Of every stream with a lake that the caller may read: for how long its first sealed segment has waited to be archived, the
-- age of its first event that is not archived, also if its segment is open (both null: none), how many segments were damaged
-- in the table when they were last read, and for how long the first of them.
create or replace function pgmb.lake_health(
  out stream text, out waiting_for interval, out lag interval, out damaged bigint, out damaged_for interval
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select s.name,
    clock_timestamp() - (select min(g.sealed_at) from pgmb.segment g
      where g.stream = s.id and g.archived_at is null and g.dropped_at is null),
    clock_timestamp() - pgmb_internal.unarchived_since(s.id), failed.segments, clock_timestamp() - failed.since
  from pgmb.lake l
  join pgmb.stream s on s.id = l.stream
  cross join lateral (
    select count(*) segments, min(a.failed_at) since from pgmb.archived a where a.stream = s.id and a.failed_at is not null
  ) failed
  where pgmb_internal.may_read(s.name)
  order by s.name;
end $$;

-- Raises MB062 for a segment that only the lake has and that was found damaged there: readers would take what is left of it for all of
-- it. The setting pgmb.read_damaged = on allows that.
create or replace function pgmb_internal.assert_sound(stream text, segment integer, url text, failure text)
returns void
language plpgsql stable
as $$
begin
  if failure is not null and current_setting('pgmb.read_damaged', true) is distinct from 'on' then
    raise exception 'segment % of stream % is damaged in the table at %: %', segment, stream, url, failure using errcode = 'MB062',
      hint = 'Restore its files, then run pgmb lake verify. To read what is left, set pgmb.read_damaged to on.';
  end if;
end $$;

-- The segments of a stream with events in lo < seq <= hi that are verified in the lake: the URL of the table, whether the
-- log has dropped them, and whether their xids are of the present epoch; earlier ones are before every position. Errors: MB062 one
-- that only the lake has is damaged there. Support.
create or replace function pgmb.lake_segments(stream text, lo bigint, hi bigint)
returns table (segment integer, url text, dropped boolean, current boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb_internal.readable_stream(lake_segments.stream);
begin
  perform pgmb_internal.assert_sound(lake_segments.stream, a.segment, a.url, a.failure)
  from pgmb.archived a
  where a.stream = stream_number and a.verified_at is not null and a.failed_at is not null
    and a.segment between pgmb_internal.segment_of(lake_segments.lo) and pgmb_internal.segment_of(lake_segments.hi);
  return query
  select a.segment, a.url, g.dropped_at is not null, a.epoch = i.epoch
  from pgmb.archived a
  join pgmb.segment g on g.stream = a.stream and g.number = a.segment
  cross join pgmb.installation i
  where a.stream = stream_number and a.verified_at is not null and a.events > 0
    and a.segment between pgmb_internal.segment_of(lake_segments.lo) and pgmb_internal.segment_of(lake_segments.hi)
  order by a.segment;
end $$;

-- The segments of which only the lake has the events between two positions with seq > after_seq, in their order, at most
-- `max` of them: the table's URL and the version in which they were verified, lo < seq <= hi, the number of all events of
-- the segment, and whether their xids are of the present epoch. The log has nothing before the last of them. Does not
-- check the positions: read with between(lake => true) first, in the same statement. From the earliest on, history counts
-- that is kept in one of the two. Errors: MB012 some was dropped and is not in the lake, MB062 it is
-- damaged there. Support.
create or replace function pgmb.lake_between(
  stream text, after pgmb.position, upto pgmb.position, after_seq bigint default 0, max integer default 100
)
returns table (
  segment integer, url text, lake_version bigint, lo bigint, hi bigint, events bigint, current boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb_internal.readable_stream(lake_between.stream);
  beginning boolean := pg_snapshot_xmin((after).snapshot) <= '3' and after_seq = 0;
  failure text;
begin
  for segment, url, lake_version, lo, hi, events, current, failure in
    select g.number, a.url, a.lake_version, greatest(after_seq, pgmb_internal.first_number(g.number) - 1), g.last_seq, a.events,
      a.epoch = i.epoch, a.failure
    from pgmb.segment g
    cross join pgmb.installation i
    left join pgmb.archived a on a.stream = g.stream and a.segment = g.number and a.verified_at is not null
    where g.stream = stream_number and g.number >= pgmb_internal.segment_of(after_seq) and g.last_seq > after_seq
      and g.dropped_at is not null and g.max_xid >= pg_snapshot_xmin((after).snapshot)
    order by g.number
  loop
    if url is not null then
      perform pgmb_internal.assert_sound(lake_between.stream, segment, url, failure);
      beginning := false;
      return next;
      max := max - 1;
      exit when max = 0;
    elsif not beginning then
      perform pgmb_internal.raise_gone();
    end if;
  end loop;
end $$;

-- The highest number up to which all events of a stream were published before a time, by what is known of sealed segments;
-- 0: not known of any. Where to begin to look for events of that time that lie before the oldest tick. Support.
create or replace function pgmb.seq_at(stream text, at timestamptz)
returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb_internal.readable_stream(seq_at.stream);
begin
  return coalesce((
    select max(g.last_seq) from pgmb.segment g
    where g.stream = stream_number and g.number < (
      select min(later.number) from pgmb.segment later
      where later.stream = stream_number and (later.sealed_at is null or later.last_published_at >= seq_at.at))), 0);
end $$;
