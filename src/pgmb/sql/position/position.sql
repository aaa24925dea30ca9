-- Positions: taking them, and reading the events between two of them.

-- The last number that the sequence of a stream gave, 0 before the first.
create or replace function pgmb_internal.last_seq(stream text)
returns bigint
language sql volatile
as $$
  select coalesce(pg_sequence_last_value(format('pgmb.%I', 'seq_' || stream)::regclass), 0)
$$;

-- Whether the log's transaction ids are this cluster's: it is the same one, or pg_upgrade made it of the same files.
create or replace function pgmb_internal.is_home()
returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select i.system_identifier = c.system_identifier or pgmb_internal.is_same_lineage()
  from pgmb.installation i, pg_control_system() c
$$;

-- Whether the rows of pgmb.lineage are where they were written, in a cluster that has given the ids that ticks hold.
create or replace function pgmb_internal.is_same_lineage()
returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select (select count(*) = 3 and bool_and(l.written = l.xmin) from pgmb.lineage l)
    and not exists (
      select from pgmb.stream s
      cross join lateral (select t.position from pgmb.tick t where t.stream = s.id order by t.id desc limit 1) newest
      where pg_snapshot_xmax((newest.position).snapshot) > pg_snapshot_xmax(pg_current_snapshot()))
$$;

-- Writes the rows of pgmb.lineage.
create or replace function pgmb_internal.write_lineage()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from pgmb.lineage;
  for number in 1 .. 3 loop
    -- A block that could catch something is a subtransaction, with an id of its own.
    begin
      insert into pgmb.lineage (id, written) values (number, '0');
      update pgmb.lineage l set written = l.xmin where l.id = number;
    exception when division_by_zero then
      raise;
    end;
  end loop;
end $$;

-- Refuses to read positions where they cannot be right: on a standby, whose snapshots do not show what is
-- in progress on the primary, and on a cluster other than the one that gave the log its xids.
-- Errors: MB020 standby, MB021 another cluster.
create or replace function pgmb_internal.assert_primary()
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
  if not pgmb_internal.is_home() then
    raise exception 'this database was restored or copied from another cluster' using errcode = 'MB021',
      hint = 'Its positions hold the other cluster''s transaction ids. Stop publishers and run pgmb.rebase().';
  end if;
  perform pg_catalog.set_config('pgmb.cluster_checked', pg_catalog.current_database(), false);
end $$;

-- The stream's current position, without a tick: for positions that this transaction stores in the database.
create or replace function pgmb_internal.take_position(stream text)
returns pgmb.position
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  taken pgmb.position;
  stream_number integer := pgmb.stream_id(take_position.stream);
  newest pgmb.position;
begin
  perform pgmb_internal.assert_primary();
  select i.epoch, s.salt into taken.epoch, taken.stream
  from pgmb.installation i, pgmb.stream s where s.id = stream_number;
  if pg_current_xact_id_if_assigned() is null then
    -- The order is the guarantee: the sequence, then an xid of our own. A transaction with a higher xid draws higher
    -- numbers, and so does this transaction itself.
    taken.seq := pgmb_internal.last_seq(take_position.stream);
    taken.next := (pg_current_xact_id()::text::bigint - 1)::text::xid8;
  else
    -- Our xid is older than the numbers given out since: keep the newest tick's pair, a longer walk.
    select (t.position).* into newest from pgmb.tick t
    where t.stream = stream_number order by t.id desc limit 1;
    taken.seq := coalesce(newest.seq, 0);
    taken.next := coalesce(newest.next, '3');
  end if;
  taken.snapshot := pgmb_internal.snapshot();
  return taken;
end $$;

-- The stream's position now: everything that was committed by this moment lies before it. It is a tick's, the newest
-- one where nothing happened since, and holds from this transaction's commit on, also after a crash or failover.
-- Errors: MB001 no such stream, MB020 standby, MB021 another cluster, 42501.
create or replace function pgmb.position(stream text default 'main')
returns pgmb.position
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb.stream_id(position.stream);
  perform pgmb_internal.assert_primary();
  perform pgmb_internal.assert_reader(position.stream);
  return (select t.position from pgmb_internal.make_tick(position.stream) t);
end $$;

-- The position before a stream's first event that is still kept.
create or replace function pgmb.earliest(stream text default 'main')
returns pgmb.position
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select i.epoch, s.salt, 0::bigint, 0::bigint, '3:3:'::pg_snapshot, 0::bigint, '3'::xid8
  from pgmb.installation i, pgmb.stream s
  where s.id = (select pgmb_internal.readable_stream(earliest.stream))
$$;

-- The newest position that a tick recorded at or before `at`; before the first tick, the earliest.
create or replace function pgmb.position_at(stream text, at timestamptz)
returns pgmb.position
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(
    -- Now is the newest tick, also if its time lies ahead: the clock was ahead then, or is behind now.
    (select t.position from pgmb.tick t
     where t.stream = (select pgmb_internal.readable_stream(position_at.stream)) and position_at.at >= statement_timestamp()
     order by t.id desc limit 1),
    (select t.position from pgmb.tick t
     where t.stream = (select pgmb_internal.readable_stream(position_at.stream)) and t.at <= position_at.at
     order by t.at desc, t.id desc limit 1),
    pgmb.earliest(position_at.stream))
$$;

-- The events between two positions, in the order of their numbers: visible in `upto`, not in `after`. The
-- same pair gives the same events whenever it is read. A page has at most `max` events, and fewer where they are large
-- (pgmb_internal.batch_bytes): to go on, pass the last event's seq as after_seq, until a page is empty. Works on a replica that has replayed both. Takes no lock, writes nothing. lake: give what the log has,
-- for a reader that asks lake_between() for the rest afterwards, in the same statement.
-- Errors: MB012 history is gone, MB021 another epoch, MB022 the reader is behind, MB023 the position was lost,
-- MB026 another stream's.
create or replace function pgmb.between(
  stream text, after pgmb.position, upto pgmb.position, after_seq bigint default 0, max bigint default 1000,
  lake boolean default false
)
returns setof pgmb.event
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  stream_number integer := pgmb.stream_id(stream);
    batch pgmb.batch;
  lo bigint;
  last bigint;
begin
  perform pgmb_internal.assert_reader(stream);
  perform pgmb_internal.assert_position(stream_number, after);
  perform pgmb_internal.assert_position(stream_number, upto);
  lo := greatest((after).seq, after_seq);
  last := pgmb_internal.last_seq(stream);
  if last > lo and last - lo <= least(max, 100) and (after).next < pg_snapshot_xmin((after).snapshot)
    and (last - lo = 1 or not pgmb_internal.has_large(stream_number, pgmb_internal.segment_of(last)))
  then
    -- Few numbers, of one segment, and no late commits below them: the session keeps the plan of the segment's function.
    return query execute format(
        'select r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at'
        ' from pgmb_internal.read_%s_%s($1, $2, $3, $4, $5, $6, null, false, null, null) r', stream_number, pgmb_internal.segment_of(last))
      using lo, last, (upto).snapshot, pg_snapshot_xmin((upto).snapshot), (after).snapshot, pg_snapshot_xmax((after).snapshot);
  else
        batch := pgmb_internal.batch_between(after, upto);
    return query select * from pgmb_internal.batch_events(stream_number, batch, coalesce(after_seq, 0),
      pgmb_internal.fitting_end(stream_number, batch, coalesce(after_seq, 0), 9223372036854775807, '', max), '', max);
  end if;
  -- Afterwards: a segment may have been emptied while it was about to be read. TRUNCATE empties it for every
  -- snapshot at once, also an older one, which still shows it as kept, and its file as the one it was.
  if exists (
    select from pgmb.segment s
    join pg_class leaf on leaf.oid = to_regclass(format('pgmb.segment_%s_%s', s.stream, s.number))
    where current_setting('transaction_isolation') <> 'read committed'
      and s.stream = stream_number and s.dropped_at is null and leaf.relfilenode <> pg_relation_filenode(leaf.oid)
  ) then
    perform pgmb_internal.raise_gone();
  end if;
  if not lake then
    perform pgmb_internal.assert_history(stream_number, (after).snapshot);
  end if;
end $$;

-- Refuses to read between two positions where they do not apply, or not yet: the checks of pgmb.between, for readers of
-- the log itself. With lo and hi, afterwards, refuses if retention took of the events between them with
-- lo < seq <= hi; without, dropped history is accepted. Not what the lake has, in a transaction with pgmb.read_lake = on. The
-- errors are those of between.
create or replace function pgmb.assert_between(
  stream text, after pgmb.position, upto pgmb.position, lo bigint default null, hi bigint default null
)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer := pgmb.stream_id(assert_between.stream);
  gone record;
begin
  perform pgmb_internal.assert_reader(assert_between.stream);
  perform pgmb_internal.assert_position(stream_number, assert_between.after);
  perform pgmb_internal.assert_position(stream_number, assert_between.upto);
  select greatest(assert_between.lo, min(pgmb_internal.first_number(s.number)),
      -- Up to there only stragglers can be among them.
      case when max(s.last_seq) > (after).seq then (after).seq end) lo,
    max(s.last_seq) hi, max(s.last_published_at) last_published_at
  into gone
  from pgmb.segment s
  where s.stream = stream_number and s.dropped_at is not null
    and s.max_xid >= pg_snapshot_xmin((after).snapshot)
    and s.number between pgmb_internal.segment_of(assert_between.lo) and pgmb_internal.segment_of(assert_between.hi) and s.last_seq > assert_between.lo
    and not pgmb_internal.is_in_lake(s);
  if gone.hi is not null then
    raise exception 'events of stream % with numbers % to %, published until %, were dropped by retention',
      assert_between.stream, gone.lo + 1, gone.hi, coalesce(gone.last_published_at::text, 'an unknown time')
      using errcode = 'MB012', hint = 'Start again from pgmb.earliest() or pgmb.position().';
  end if;
end $$;

-- Refuses a position that was not taken from this stream's history as it is here: two look-ups by primary key. Whether
-- retention dropped what lies after it is for assert_history to say. Errors: MB005 none given, MB021 another epoch,
-- MB022 not here yet, MB023 lost, MB026 another stream.
create or replace function pgmb_internal.assert_position(stream integer, given pgmb.position)
returns void
language plpgsql
as $$
declare
  here record;
  kept bigint;
begin
  if (given).epoch is null or (given).snapshot is null or (given).seq is null or (given).next is null then
    raise exception 'a position is expected, null was given' using errcode = 'MB005',
      hint = 'Take it with pgmb.position, pgmb.position_at or pgmb.earliest.';
  end if;
  select i.epoch, s.salt, s.name into here from pgmb.installation i, pgmb.stream s where s.id = assert_position.stream;
  if (given).epoch <> here.epoch then
    raise exception 'position of epoch %, the log is at %', (given).epoch, here.epoch using errcode = 'MB021',
      hint = 'The log was rebased after a restore: positions from before do not apply. Start again from '
        'pgmb.earliest() or pgmb.position_at().';
  end if;
  if (given).stream is distinct from here.salt then
    raise exception 'the position does not belong to stream %', here.name using errcode = 'MB026',
      hint = 'It was taken from another stream, or from one of this name that was dropped. Start again from '
        'pgmb.earliest() or pgmb.position_at().';
  end if;
  if (given).tick = 0 then
    return;
  end if;
  select (t.position).proof into kept from pgmb.tick t
  where t.stream = assert_position.stream and t.id = (given).tick;
  if kept = (given).proof then
    return;
  end if;
  -- Retention deletes ticks by the same rule, and keeps their proofs for history that it leaves to the lake.
  if kept is null and pgmb_internal.is_dropped(assert_position.stream, (given).snapshot)
    and pgmb_internal.is_proven(assert_position.stream, given)
  then
    return;
  end if;
  if kept is null and pg_is_in_recovery() then
    raise exception 'this replica has not yet replayed tick %', (given).tick using errcode = 'MB022',
      hint = 'Try again shortly, or read from the primary.';
  end if;
  if kept is null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    raise exception 'this transaction''s snapshot does not hold the position''s tick %', (given).tick
      using errcode = 'MB022',
        hint = 'Read in READ COMMITTED, or take the position before the REPEATABLE READ transaction begins.';
  end if;
  raise exception 'the history of this position was lost: stream % has no such tick %', here.name, (given).tick
    using errcode = 'MB023',
      hint = 'Its transaction did not commit, or was lost in a failover or a recovery to an earlier time. Start again '
        'from pgmb.position_at(), with a time before that, or from pgmb.earliest().';
end $$;

-- Refuses a position from which a queue or durable reader cannot start, and keeps retention from dropping what lies
-- after it until this transaction ends. Waits for a drop that is under way. Errors: those of between.
create or replace function pgmb_internal.hold_history(stream integer, given pgmb.position)
returns void
language plpgsql
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform from pgmb.history h where h.stream = hold_history.stream for share;
  perform pgmb_internal.assert_position(hold_history.stream, given);
  perform pgmb_internal.assert_history(hold_history.stream, (given).snapshot);
end $$;

-- Refuses a position whose events retention has dropped. From the earliest on, what is still there counts.
-- Errors: MB012.
create or replace function pgmb_internal.assert_history(stream integer, after pg_snapshot)
returns void
language plpgsql
as $$
begin
  if pg_snapshot_xmin(after) > '3' and pgmb_internal.is_dropped(stream, after) then
    perform pgmb_internal.raise_gone();
  end if;
end $$;

-- Whether retention dropped events that the snapshot may not have seen.
create or replace function pgmb_internal.is_dropped(stream integer, after pg_snapshot)
returns boolean
language sql volatile
as $$
  select exists (
    select from pgmb.segment s
    where s.stream = is_dropped.stream and s.dropped_at is not null and s.max_xid >= pg_snapshot_xmin(after))
$$;

-- Whether the tick of a position was deleted with history that the lake has; true also if the lake does not have it: then
-- nothing can be read from there. A tick goes with the first segment that its snapshot may not have seen, or with a
-- later one if it was committed after that was dropped.
create or replace function pgmb_internal.is_proven(stream integer, given pgmb.position)
returns boolean
language sql volatile
as $$
  select first.proofs is null or exists (
    select from pgmb.archived a
    where a.stream = is_proven.stream and a.segment >= first.number and (given).proof = any (a.proofs))
  from (
    select s.number, a.proofs
    from pgmb.segment s
    left join pgmb.archived a on a.stream = s.stream and a.segment = s.number
    where s.stream = is_proven.stream and s.dropped_at is not null and s.max_xid >= pg_snapshot_xmin((given).snapshot)
    order by s.number limit 1) first
$$;

create or replace function pgmb_internal.raise_gone()
returns void
language plpgsql
as $$
begin
  raise exception 'events after this position were dropped by retention' using errcode = 'MB012',
    hint = 'Start again from pgmb.earliest() or pgmb.position().';
end $$;

-- Records how far a reader outside the database has come: retention keeps what lies after it. expected: what this reader
-- confirmed last, to find out that another one uses its name. Errors: those of between, MB006 another one has moved it.
create or replace function pgmb.confirm(stream text, reader text, "at" pgmb.position, expected pgmb.position default null)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_reader(stream);
  perform pgmb_internal.assert_own_reader(stream, reader);
  perform pgmb_internal.hold_history(pgmb.stream_id(stream), confirm."at");
  insert into pgmb.reader as r (stream, name, position, role)
  values (pgmb.stream_id(stream), reader, confirm."at", pgmb_internal.caller())
  on conflict on constraint reader_pkey do update
  set position = excluded.position, updated_at = clock_timestamp()
  -- Or the same call again, after a connection was lost.
  where confirm.expected is null or r.position::text in (confirm.expected::text, confirm."at"::text);
  if not found then
    raise exception 'reader % of stream % was moved by another one of that name', quote_literal(confirm.reader),
      quote_literal(confirm.stream) using errcode = 'MB006', hint = 'Give every reader a name of its own.';
  end if;
end $$;

-- Forgets such a reader. True if there was one.
create or replace function pgmb.forget(stream text, reader text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_reader(stream);
  perform pgmb_internal.assert_own_reader(stream, reader);
  delete from pgmb.reader r where r.stream = pgmb.stream_id(forget.stream) and r.name = reader;
  return found;
end $$;
