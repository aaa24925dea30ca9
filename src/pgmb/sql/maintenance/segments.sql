-- The life of a segment: opened by a rotation, sealed, dropped by retention, detached. maintain() does all of it.

-- Opens the stream's next segment: publishers' numbers go there from this call on, without waiting for its
-- commit or for one another. Segments are attached ahead, and one is opened only when every transaction that
-- writes to the log can see it (note_writers). Returns the number opened; null if that is not yet so: try again.
-- Lock: the stream's row; SHARE UPDATE EXCLUSIVE on the log.
create or replace function pgmb.rotate(stream text default 'main')
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
set lock_timeout = '50ms'
as $$
declare
  log text := format('pgmb.%I', 'log_' || rotate.stream);
  rotated pgmb.stream;
  next_one pgmb.segment;
  newest_seq bigint;
  current_number integer;
  opened integer;
  age interval;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(rotate.stream);
  -- Not its segments: autovacuum holds this lock on the one that it is at, and gives way only to those who wait for a second.
  execute format('lock table only %s in share update exclusive mode', log);
  -- Not FOR UPDATE: a tick in an open transaction holds the row's key.
  select * into rotated from pgmb.stream s where s.name = rotate.stream for no key update;
  perform pgmb_internal.note_writers(rotated);
  newest_seq := pgmb_internal.last_seq(rotate.stream);
  current_number := pgmb_internal.segment_of(newest_seq);
  select * into next_one from pgmb.segment s where s.stream = rotated.id and s.number = current_number + 1;
  if not next_one.writers && pgmb_internal.log_writers(log::regclass) then
    opened := next_one.number;
    -- Not transactional, on purpose: the next number drawn anywhere is in the new segment.
    perform setval(format('pgmb.%I', 'seq_' || rotate.stream)::regclass, pgmb_internal.first_number(opened));
    if rotate.stream = 'main' then
      perform pgmb_internal.create_main_reader(rotated.id, opened);
    end if;
    -- Also those before it: a rotation that was rolled back has moved the numbers on but closed nothing.
    update pgmb.segment s
    set closed_at = clock_timestamp(), last_seq = case when s.number = current_number then newest_seq end
    where s.stream = rotated.id and s.number <= current_number and s.closed_at is null;
    select clock_timestamp() - max(s.closed_at) into age
    from pgmb.segment s where s.stream = rotated.id and s.number = current_number - 1;
  end if;
  -- As many ahead as open within a minute at the present pace: a long transaction then delays no rotation.
  for nth in (select max(s.number) + 1 from pgmb.segment s where s.stream = rotated.id) ..
    coalesce(opened, current_number) + greatest(1, least(16, ceil(60 / greatest(extract(epoch from coalesce(age, '1 hour')), 1))::integer))
  loop
    perform pgmb_internal.attach_segment(rotated, nth);
    exit when clock_timestamp() >= pgmb_internal.maintain_deadline();
  end loop;
  return opened;
end $$;

-- Notes, for segments that were attached since the last call, which transactions are writing to the log. These may not
-- see the segment: a transaction looks for new partitions when it first locks the log, and not again. All that lock
-- the log later see it. Lock: SHARE UPDATE EXCLUSIVE on the log if there is such a segment: an attach whose commit is
-- visible, but not yet announced to other sessions, still holds it.
create or replace function pgmb_internal.note_writers(noted pgmb.stream)
returns void
language plpgsql
set lock_timeout = '50ms'
as $$
declare
  log text := format('pgmb.%I', 'log_' || (noted).name);
begin
  if exists (select from pgmb.segment s where s.stream = (noted).id and s.writers is null) then
    execute format('lock table only %s in share update exclusive mode', log);
    -- Not those of this transaction: others see them only after it commits.
    update pgmb.segment s set writers = pgmb_internal.log_writers(log::regclass)
    where s.stream = (noted).id and s.writers is null
      and s.attached_xid is distinct from pg_current_xact_id_if_assigned();
  end if;
end $$;

-- The other transactions that hold a write lock on the log; one that is prepared writes no more.
create or replace function pgmb_internal.log_writers(log regclass)
returns text[]
language sql volatile
as $$
  select coalesce(array_agg(distinct l.virtualtransaction), '{}')
  from pg_locks l
  where l.locktype = 'relation' and l.relation = log and l.mode = 'RowExclusiveLock' and l.granted
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
    and l.pid <> pg_backend_pid()
$$;

-- Notes an xid taken after the rotation of each closed segment that has none yet. Only such an xid bounds those of its writers:
-- this transaction's, if new. For all streams at once: whichever is sealed next in this transaction finds its xid old.
create or replace function pgmb_internal.note_closed_xid()
returns void
language plpgsql
as $$
begin
  if pg_current_xact_id_if_assigned() is null
    and exists (select from pgmb.segment s where s.closed_at is not null and s.closed_xid is null)
  then
    update pgmb.segment s set closed_xid = pg_current_xact_id()
    where s.closed_at is not null and s.closed_xid is null;
  end if;
end $$;

-- Seals closed segments of a stream that no writer can reach any more, at most `max`, and returns how many. A call stops after
-- five seconds, or a quarter of a shorter statement_timeout: call it again until it returns 0. A writer that
-- took its number before the rotation had its xid before it too: once no transaction up to an xid taken
-- after the rotation holds the log, all is written, whether it was slow, stopped or prepared. A
-- trigger then makes any stray write fail loudly. Lock: SHARE ROW EXCLUSIVE on the segment, readers pass.
create or replace function pgmb.seal(stream text default 'main', max integer default 50)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set enable_seqscan = off
set jit = off
as $$
declare
  stream_number integer := pgmb.stream_id(seal.stream);
  closed pgmb.segment;
  leaf text;
  sealed integer := 0;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.note_closed_xid();
  for closed in
    select * from pgmb.segment s
    where s.stream = stream_number and s.closed_xid is not null and s.sealed_at is null
    order by s.number
  loop
    exit when sealed >= seal.max or (sealed > 0 and clock_timestamp() >= pgmb_internal.maintain_deadline());
    leaf := format('pgmb.segment_%s_%s', closed.stream, closed.number);
    continue when pgmb_internal.has_writer(format('pgmb.%I', 'log_' || seal.stream)::regclass, closed.closed_xid);
    begin
      -- Not a constraint, which would lock readers out until this transaction ends.
      execute format('create trigger sealed before insert on %s for each row execute function pgmb_internal.refuse_sealed()', leaf);
    exception when lock_not_available then
      continue;
    end;
    execute format('update pgmb.segment s set sealed_at = clock_timestamp(),
        last_seq = (select max(e.seq) from %1$s e), max_xid = (select max(e.xid) from %1$s e),
        last_published_at = (
          -- Replayed events have the times of the originals, but the segment is not older than its opening.
          select greatest(least(e.published_at, clock_timestamp()), (select max(b.closed_at) from pgmb.segment b where b.stream = $1 and b.number = $2 - 1))
          from %1$s e order by e.seq desc limit 1)
      where s.stream = $1 and s.number = $2', leaf)
    using closed.stream, closed.number;
    sealed := sealed + 1;
  end loop;
  return sealed;
end $$;

-- Refuses to write to a sealed segment: a trigger on each.
create or replace function pgmb_internal.refuse_sealed()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception 'segment % is sealed', tg_relid::regclass using errcode = '23514',
    hint = 'Its last writer had ended. Nothing but an explicit seq leads here.';
end $$;

-- Whether an unfinished transaction with an xid up to `last` holds a write lock on the log.
create or replace function pgmb_internal.has_writer(log regclass, last xid8)
returns boolean
language sql volatile
as $$
  select exists (
    select from pg_locks writing
    join pg_locks transaction on transaction.virtualtransaction = writing.virtualtransaction
      and transaction.pid is not distinct from writing.pid
    where writing.locktype = 'relation' and writing.relation = log and writing.mode = 'RowExclusiveLock'
      and writing.database = (select d.oid from pg_database d where d.datname = current_database())
      and transaction.locktype = 'transactionid' and transaction.mode = 'ExclusiveLock' and transaction.granted
      -- pg_locks shows 32 bits; an unfinished xid lies within 2^31 of the newest.
      and transaction.transactionid::text::bigint
        in (select x.unfinished::text::bigint & 4294967295 from pgmb_internal.unfinished_upto(last) x(unfinished))
  )
$$;

-- Unfinished transactions with an xid up to `last`.
create or replace function pgmb_internal.unfinished_upto(last xid8)
returns setof xid8
language sql volatile
as $$
  select x from pg_snapshot_xip(pg_current_snapshot()) x where x <= last
  union all
  select g::text::xid8
  from generate_series(pg_snapshot_xmax(pg_current_snapshot())::text::bigint, last::text::bigint) g
$$;

-- The segments of a stream that retention may drop now: sealed, older than keep_for, archived if the stream
-- says so, and, unless the stream says drop_unread, passed by every queue and durable reader and held by no lease, not even one that
-- has expired but was not swept. The first `max` of them.
create or replace function pgmb.droppable(stream text default 'main', max integer default null)
returns setof integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmb.stream;
  old pgmb.segment;
  now timestamptz := clock_timestamp();
  clock pgmb.clock := pgmb_internal.read_clock();
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(droppable.stream);
  select * into asked from pgmb.stream s where s.name = droppable.stream;
  for old in
    select * from pgmb.segment s
    where s.stream = asked.id and s.dropped_at is null and s.closed_at is not null
    order by s.number limit droppable.max
  loop
    -- In order: history goes from its beginning.
    exit when old.sealed_at is null or (asked.archive and old.archived_at is null)
      or asked.keep_for is null
      or not pgmb_internal.has_aged(coalesce(old.last_published_at, old.closed_at), asked.keep_for, now, clock);
    exit when not asked.drop_unread and exists (select from pgmb_internal.segment_holders(old));
    return next old.number;
  end loop;
end $$;

-- The queues and durable readers that have not passed a segment, and queues with leases in it.
create or replace function pgmb_internal.segment_holders(segment pgmb.segment)
returns table (kind text, name text)
language sql stable
as $$
  select 'queue', coalesce(head.name, q.name)
  from pgmb.queue q
  left join pgmb.queue head on head.id = q.lane_of
    cross join lateral pgmb_internal.queue_position(q.id) newest
  where q.stream = (segment).stream and not pgmb_internal.has_passed(newest, segment)
  union
  select 'queue', coalesce(head.name, q.name)
  from pgmb.queue q
  left join pgmb.queue head on head.id = q.lane_of
  join pgmb.claim c on c.queue = q.id
  where q.stream = (segment).stream and (segment).max_xid is not null and c.state = 'leased' and c.lo < (segment).last_seq
    and not pgmb_internal.is_void(c.queue, c.id)
  union
  select 'reader', r.name from pgmb.reader r
  where r.stream = (segment).stream and not (segment).max_xid < pg_snapshot_xmin((r.position).snapshot)
$$;

-- Empties the segments that droppable() names, and returns how many. The space is free at once; only the
-- segment itself is locked, and positions cannot be moved back meanwhile. Empty segments are detached by detach_dropped() or
-- by the Janitor. A call stops after `max` segments, and after eight once 30 ms are over: each takes
-- several locks until the transaction ends. Call it again, in another transaction, until it returns 0.
create or replace function pgmb.drop_segments(stream text default 'main', max integer default 50)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
  stream_number integer := pgmb.stream_id(drop_segments.stream);
  old integer;
  dropped integer := 0;
  until timestamptz := clock_timestamp() + interval '30 milliseconds';
begin
  perform pgmb_internal.assert_read_committed();
  begin
    -- First: what droppable() sees is then all that positions hold.
    perform from pgmb.history h where h.stream = stream_number for update;
  exception when lock_not_available then
    return 0;
  end;
  for old in select * from pgmb.droppable(drop_segments.stream, drop_segments.max) loop
    exit when clock_timestamp() > until and (dropped >= 8 or dropped > 0 and clock_timestamp() >= pgmb_internal.maintain_deadline());
    exit when not pgmb_internal.copy_awaited(stream_number, old);
    begin
      execute format('lock table pgmb.segment_%s_%s in access exclusive mode', stream_number, old);
      -- A failure may have been reported before the segment was locked.
      exit when pgmb_internal.awaits_segment(stream_number, old);
      execute format('truncate pgmb.segment_%s_%s', stream_number, old);
    exception when lock_not_available then
      exit;
    end;
    update pgmb.segment s set dropped_at = clock_timestamp() where s.stream = stream_number and s.number = old;
    with forgotten as (
      delete from pgmb.tick t
      where t.stream = stream_number and pg_snapshot_xmin((t.position).snapshot) <=
        (select s.max_xid from pgmb.segment s where s.stream = stream_number and s.number = old)
      returning (t.position).proof
    )
    update pgmb.archived a set proofs = array(select f.proof from forgotten f)
    where a.stream = stream_number and a.segment = old and a.verified_at is not null;
    dropped := dropped + 1;
  end loop;
  return dropped;
end $$;

-- Detaches and drops segments that were emptied, where that takes no waiting, and returns how many. Not at
-- once: a reader that listed its segments just before may be about to look into one. A call stops after `max` segments
-- or 30 ms, because it locks the log against publishers and readers until the transaction ends. Call it again, in another
-- transaction, until it returns 0.
create or replace function pgmb.detach_dropped(stream text default 'main', max integer default 50)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set client_min_messages = warning
set lock_timeout = '20ms'
as $$
declare
  stream_number integer := pgmb.stream_id(detach_dropped.stream);
  emptied integer;
  detached integer := 0;
  now timestamptz := clock_timestamp();
  clock pgmb.clock := pgmb_internal.read_clock();
  until timestamptz := clock_timestamp() + interval '30 milliseconds';
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  for emptied in
    select s.number from pgmb.segment s
    where s.stream = stream_number and pgmb_internal.has_aged(s.dropped_at, '1 minute', now, clock)
      and to_regclass(format('pgmb.segment_%s_%s', s.stream, s.number)) is not null
    order by s.number limit detach_dropped.max
  loop
    exit when detached > 0 and clock_timestamp() > until;
    begin
      execute format('drop table pgmb.segment_%s_%s', stream_number, emptied);
      execute format('drop function if exists pgmb_internal.read_%s_%s', stream_number, emptied);
      detached := detached + 1;
    exception when lock_not_available or object_in_use or object_not_in_prerequisite_state then
      exit;
    end;
  end loop;
  return detached;
end $$;

-- Rotates a stream if its time has come.
create or replace function pgmb_internal.rotate_due(maintained pgmb.stream)
returns void
language plpgsql
as $$
declare
  newest_seq bigint := pgmb_internal.last_seq((maintained).name);
  opened_at timestamptz;
  now timestamptz := clock_timestamp();
begin
  -- The current segment opened when the one before it was closed.
  select coalesce(max(g.closed_at), (maintained).created_at) into opened_at
  from pgmb.segment g where g.stream = (maintained).id and g.number = pgmb_internal.segment_of(newest_seq) - 1;
  perform pgmb_internal.note_writers(maintained);
  if pgmb_internal.number_in_segment(newest_seq) > 0
    and (pgmb_internal.has_aged(opened_at, (maintained).rotate_every, now, pgmb_internal.read_clock())
      or pgmb_internal.number_in_segment(newest_seq) >= (maintained).rotate_events)
  then
    perform pgmb.rotate((maintained).name);
  end if;
end $$;
