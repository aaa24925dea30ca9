-- Positions: taking them, naming them by ticks, and reading the events between two of them.

create or replace function pgmb.last_seq(stream text)
returns bigint
language sql volatile
as $$
  select coalesce(pg_sequence_last_value(format('pgmb.%I', 'seq_' || stream)::regclass), 0)
$$;

-- Refuses to read positions where they cannot be right: on a standby, whose snapshots do not show what is
-- in progress on the primary, and on a cluster other than the one that gave the log its xids.
-- Errors: MB020 standby, MB021 another cluster. Internal.
create or replace function pgmb.assert_primary()
returns void
language plpgsql
as $$
begin
  if pg_catalog.pg_is_in_recovery() then
    raise exception 'positions are taken on the primary only' using errcode = 'MB020',
      hint = 'Connect to the primary; a replica serves pgmb.between() over positions taken there.';
  end if;
  if pg_catalog.current_setting('pgmb.cluster_checked', true) = pg_catalog.current_database() then
    return;
  end if;
  if (select i.system_identifier from pgmb.installation i)
    <> (select c.system_identifier from pg_catalog.pg_control_system() c)
  then
    raise exception 'this database was restored or copied from another cluster' using errcode = 'MB021',
      hint = 'Its positions hold the other cluster''s transaction ids. Stop publishers and run pgmb.rebase().';
  end if;
  perform pg_catalog.set_config('pgmb.cluster_checked', pg_catalog.current_database(), false);
end $$;

-- The stream's position now: everything that was committed by this moment lies before it.
-- Takes a transaction id, no lock. Errors: MB001 no such stream, MB020 standby, MB021 another cluster.
create or replace function pgmb.position(stream text default 'main')
returns pgmb.position
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  taken pgmb.position;
  stream_number integer := pgmb.stream_id(position.stream);
  newest pgmb.position;
begin
  perform pgmb.assert_primary();
  perform pgmb.assert_reader(position.stream);
  select i.epoch into taken.epoch from pgmb.installation i;
  if pg_current_xact_id_if_assigned() is null then
    -- The order is the guarantee: the sequence, then an xid of our own. Whoever takes a higher xid draws higher
    -- numbers, and so does this transaction itself.
    taken.seq := pgmb.last_seq(position.stream);
    taken.next := (pg_current_xact_id()::text::bigint - 1)::text::xid8;
  else
    -- Our xid is older than the numbers given out since: keep the newest tick's pair, a longer walk.
    select (t.position).* into newest from pgmb.tick t
    where t.stream = stream_number order by t.id desc limit 1;
    taken.seq := coalesce(newest.seq, 0);
    taken.next := coalesce(newest.next, '3');
  end if;
  taken.snapshot := pgmb.snapshot();
  taken.lsn := pg_current_wal_insert_lsn();
  return taken;
end $$;

-- The position before a stream's first event that is still kept.
create or replace function pgmb.earliest(stream text default 'main')
returns pgmb.position
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select i.epoch, '3:3:'::pg_snapshot, 0::bigint, '3'::xid8, '0/0'::pg_lsn
  from pgmb.installation i
  where pgmb.stream_id(stream) is not null
$$;

-- Stores the stream's position under a short name, the tick's id, and wakes sleepers by one NOTIFY on
-- channel pgmb with the stream's name. Does nothing, and returns null, when nothing happened since the
-- last tick. Takes no lock that outlives the statement but the row's own: a tick in a long transaction
-- stalls nobody (an id that is taken is skipped). One tick a transaction: a second one in it names the same
-- bounds, which only makes the walk from there longer.
create or replace function pgmb.tick(stream text default 'main')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  stream_number integer := pgmb.stream_id(tick.stream);
  newest pgmb.tick;
  taken pgmb.position;
  given bigint;
begin
  perform pgmb.assert_read_committed();
  perform pgmb.assert_primary();
  perform pgmb.release_due(tick.stream, clock_timestamp());
  select * into newest from pgmb.tick t where t.stream = stream_number order by t.id desc limit 1;
  if newest.id is not null and pgmb.last_seq(tick.stream) <= (newest.position).seq
    and not exists (
      select from pgmb.batch_events(stream_number, (newest.position).snapshot, (newest.position).seq,
        (newest.position).next, pg_current_snapshot(), null, null, 0, (newest.position).seq, '', 1))
  then
    return null;
  end if;
  taken := pgmb.position(tick.stream);
  insert into pgmb.tick (stream, id, position) values (stream_number, nextval('pgmb.tick_id'), taken)
  returning id into given;
  perform pg_notify('pgmb', tick.stream);
  return given;
end $$;

-- The newest position that a tick recorded at or before `at`; before the first tick, the earliest.
create or replace function pgmb.position_at(stream text, at timestamptz)
returns pgmb.position
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(
    (select t.position from pgmb.tick t
     where t.stream = pgmb.stream_id(position_at.stream) and t.at <= position_at.at
     order by t.at desc, t.id desc limit 1),
    pgmb.earliest(position_at.stream))
$$;

-- The stream's newest tick; before the first, number 0 at the earliest position. Errors: MB001 no such stream, 42501.
create or replace function pgmb.newest_tick(
  stream text default 'main', out tick bigint, out at timestamptz, out "position" pgmb.position
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb.stream_id(newest_tick.stream);
  newest pgmb.tick;
begin
  perform pgmb.assert_reader(newest_tick.stream);
  select t.* into newest from pgmb.tick t where t.stream = stream_number order by t.id desc limit 1;
  newest_tick.tick := coalesce(newest.id, 0);
  newest_tick.at := newest.at;
  newest_tick.position := case when newest.id is null then pgmb.earliest(newest_tick.stream) else newest.position end;
end $$;

-- The ticks of these numbers that are still there, number 0 being the earliest position. Errors: as newest_tick.
create or replace function pgmb.ticks(stream text, numbers bigint[])
returns table (tick bigint, at timestamptz, "position" pgmb.position)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  stream_number integer := pgmb.stream_id(ticks.stream);
begin
  perform pgmb.assert_reader(ticks.stream);
  return query
  select t.id, t.at, t.position from pgmb.tick t where t.stream = stream_number and t.id = any (ticks.numbers)
  union all
  select 0, null, pgmb.earliest(ticks.stream) where 0 = any (ticks.numbers);
end $$;

-- The position that a tick's id names. Errors: MB012 it is gone.
create or replace function pgmb.position_of(stream text, tick bigint)
returns pgmb.position
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  named pgmb.position;
begin
  select (t.position).* into named from pgmb.tick t
  where t.stream = pgmb.stream_id(position_of.stream) and t.id = position_of.tick;
  if named is null then
    raise exception 'stream % has no tick %', position_of.stream, position_of.tick using errcode = 'MB012',
      hint = 'Ticks go with the history they name: start from pgmb.earliest() or pgmb.position().';
  end if;
  return named;
end $$;

-- The events between two positions, in the order of their numbers: visible in `upto`, not in `after`. The
-- same pair gives the same events whenever it is read. To go on after a full page, pass the last event's
-- seq as after_seq. Works on a replica that has replayed `upto`. Takes no lock, writes nothing.
-- Errors: MB012 history is gone, MB021 another cluster, MB022 the reader is behind, MB023 ahead of the log.
create or replace function pgmb.between(
  stream text, after pgmb.position, upto pgmb.position, after_seq bigint default 0, max bigint default 1000
)
returns setof pgmb.event
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
#variable_conflict use_variable
declare
  stream_number integer := pgmb.stream_id(stream);
begin
  perform pgmb.assert_between(stream, after, upto);
  return query select * from pgmb.batch_events(
    stream_number, (after).snapshot, (after).seq, (after).next, (upto).snapshot,
    null, null, coalesce(after_seq, 0), 9223372036854775807, '', max);
  -- Afterwards: a segment may have been emptied while it was about to be read. TRUNCATE empties it for every
  -- snapshot at once, also an older one, which still shows it as kept, and its file as the one it was.
  if exists (
    select from pgmb.segment s
    join pg_class leaf on leaf.oid = to_regclass(format('pgmb.segment_%s_%s', s.stream, s.number))
    where current_setting('transaction_isolation') <> 'read committed'
      and s.stream = stream_number and s.dropped_at is null and leaf.relfilenode <> pg_relation_filenode(leaf.oid)
  ) then
    perform pgmb.raise_gone();
  end if;
  perform pgmb.assert_history(stream_number, (after).snapshot);
end $$;

-- Refuses to read between two positions where they do not apply, or not yet: the checks of pgmb.between, for who reads
-- the log itself. With lo and hi, afterwards, refuses if retention took of the events between them with
-- lo < seq <= hi. The errors are those of between.
create or replace function pgmb.assert_between(
  stream text, after pgmb.position, upto pgmb.position, lo bigint default null, hi bigint default null
)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  current_epoch integer;
  seen pg_snapshot := pg_current_snapshot();
  gone record;
begin
  perform pgmb.assert_reader(stream);
  select i.epoch into current_epoch from pgmb.installation i;
  if (after).epoch is distinct from current_epoch or (upto).epoch is distinct from current_epoch then
    raise exception 'position of epoch %, the log is at %', coalesce((after).epoch, (upto).epoch), current_epoch
      using errcode = 'MB021', hint = 'The log was rebased after a restore: positions from before do not apply.';
  end if;
  if pg_is_in_recovery() then
    if (upto).lsn > pg_last_wal_replay_lsn() or current_setting('transaction_isolation') <> 'read committed' then
      raise exception 'this replica has not yet replayed %', (upto).lsn using errcode = 'MB022',
        hint = 'Try again shortly, in READ COMMITTED, or read from the primary.';
    end if;
  elsif (upto).lsn > pg_current_wal_insert_lsn() then
    raise exception 'position % is ahead of the log', (upto).lsn using errcode = 'MB023',
      hint = 'It was taken on a primary whose last transactions were lost in a failover.';
  elsif pg_snapshot_xmax((upto).snapshot) > pg_snapshot_xmax(seen) or exists (
    select from pg_snapshot_xip(seen) unfinished
    where unfinished <> coalesce(pg_current_xact_id_if_assigned(), '0')
      and pg_visible_in_snapshot(unfinished, (upto).snapshot))
  then
    raise exception 'this transaction''s snapshot is older than the position' using errcode = 'MB022',
      hint = 'Read in READ COMMITTED, or take the position before the REPEATABLE READ transaction begins.';
  end if;
  select greatest(assert_between.lo, min(s.number::bigint << 40),
      -- Up to there only stragglers can be among them.
      case when max(s.last_seq) > (after).seq then (after).seq end) lo,
    max(s.last_seq) hi, max(s.last_published_at) last_published_at
  into gone
  from pgmb.segment s
  where s.stream = pgmb.stream_id(assert_between.stream) and s.dropped_at is not null
    and s.max_xid >= pg_snapshot_xmin((after).snapshot)
    and s.number between assert_between.lo >> 40 and assert_between.hi >> 40 and s.last_seq > assert_between.lo;
  if gone.hi is not null then
    raise exception 'events of stream % with numbers % to %, published until %, were dropped by retention',
      assert_between.stream, gone.lo + 1, gone.hi, coalesce(gone.last_published_at::text, 'an unknown time')
      using errcode = 'MB012', hint = 'Start again from pgmb.earliest() or pgmb.position().';
  end if;
end $$;

-- Refuses a position whose events retention has dropped. From the earliest on, what is still there counts.
-- Internal.
create or replace function pgmb.assert_history(stream integer, after pg_snapshot)
returns void
language plpgsql
as $$
begin
  if pg_snapshot_xmin(after) > '3' and exists (
    select from pgmb.segment s
    where s.stream = assert_history.stream and s.dropped_at is not null and s.max_xid >= pg_snapshot_xmin(after)
  ) then
    perform pgmb.raise_gone();
  end if;
end $$;

create or replace function pgmb.raise_gone()
returns void
language plpgsql
as $$
begin
  raise exception 'events after this position were dropped by retention' using errcode = 'MB012',
    hint = 'Start again from pgmb.earliest() or pgmb.position().';
end $$;

-- Records how far a reader outside the database has come: retention keeps what lies after it.
create or replace function pgmb.confirm(stream text, reader text, "at" pgmb.position)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  perform pgmb.assert_reader(stream);
  insert into pgmb.reader as r (stream, name, position)
  values (pgmb.stream_id(stream), reader, confirm."at")
  on conflict on constraint reader_pkey do update
  set position = excluded.position, updated_at = clock_timestamp();
end $$;

-- Forgets such a reader. True if there was one.
create or replace function pgmb.forget(stream text, reader text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  perform pgmb.assert_reader(stream);
  delete from pgmb.reader r where r.stream = pgmb.stream_id(forget.stream) and r.name = reader;
  return found;
end $$;
