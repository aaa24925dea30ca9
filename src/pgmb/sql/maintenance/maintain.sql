-- Maintenance: rotation, sealing, retention, and clearing what is settled. Nothing here is needed for
-- publishing or receiving to go on; any role allowed to may call maintain() from cron or a janitor.

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
-- says so, and passed by every queue and reader unless the stream says drop_unread. The first `max` of them.
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
  where q.stream = (segment).stream and (segment).max_xid is not null and c.state in ('leased', 'leased_own') and c.lo < (segment).last_seq
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
    begin
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

-- The oldest claim of a queue that was not cleared yet.
create or replace function pgmb_internal.first_claim(queue integer)
returns bigint
language plpgsql volatile
as $$
declare
  setting_name text := 'pgmb.claim_' || first_claim.queue;
  now timestamptz := clock_timestamp();
  read_before bigint := pgmb_internal.entries_read('pgmb.claim_newest');
  passed bigint;
  first bigint;
begin
  select c.id into first from pgmb.claim c
  where c.queue = first_claim.queue and c.id >= coalesce(pgmb_internal.scan_start(setting_name, now), 0)
  order by c.id limit 1;
  passed := pgmb_internal.entries_read('pgmb.claim_newest') - read_before;
  if pgmb_internal.should_store_scan(setting_name, passed) then
    perform pgmb_internal.store_scan(setting_name, now, first, passed, lifetime => 1000000);
  end if;
  return first;
end $$;

-- Deletes claims that are settled or void and no longer a queue's position, with their settlements, but not those
-- made within `keep`. They lie behind what receive reads, so that this is about space, not speed. Returns how many claims. A call
-- stops after `max` rows of both, and after five seconds or a quarter of a shorter statement_timeout: call it again until it
-- returns 0.
create or replace function pgmb.clear_settled(max integer default 100000, keep interval default '0')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  return (select done.cleared
    from pgmb_internal.clear_claims(clear_settled.max, clear_settled.keep, pgmb_internal.maintain_deadline()) done);
end $$;

-- Does so in parts, until the time `until` at the latest. A claim counts as one row and one for each of its events, because each
-- may have been settled on its own. more: it stopped before it had looked at all queues.
create or replace function pgmb_internal.clear_claims(
  max integer, keep interval, until timestamptz, out cleared bigint, out more boolean
)
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  q record;
  first bigint;
  part record;
  rows bigint := 0;
  parts integer := 0;
  part_rows integer;
  now timestamptz := clock_timestamp();
  before timestamptz := now - clear_claims.keep;
begin
  cleared := 0;
  more := false;
  for q in
    select queue.id, newest.id position
    from pgmb.queue
    cross join lateral (select c.id from pgmb.claim c where c.queue = queue.id order by c.id desc limit 1) newest
    -- A queue at rest has its position alone. Not exists, which may read the claims of all queues.
    where (select true from pgmb.claim old where old.queue = queue.id and old.id < newest.id
      and old.id >= coalesce(pgmb_internal.scan_start('pgmb.claim_' || queue.id, now), 0) limit 1)
    order by random()
  loop
    first := pgmb_internal.first_claim(q.id);
    loop
      parts := parts + 1;
      part_rows := least(pgmb_internal.part_rows(parts), clear_claims.max - rows);
      with old as materialized (
        select c.ctid, c.id, c.events + 1 rows from pgmb.claim c
        where c.queue = q.id and c.id >= first and c.id < q.position
          and (c.state in ('settled', 'expired', 'position')
            or (c.state in ('leased', 'leased_own') and pgmb_internal.is_void(c.queue, c.id)))
          -- What was made while the clock was ahead is not kept until that time.
          and (c.at <= before or c.at > now)
        order by c.id limit part_rows
        for update skip locked
      ), counted as (
        select o.ctid, sum(o.rows) over (order by o.id) - o.rows passed from old o
      ), gone as (
        delete from pgmb.claim c
        -- The first of them goes, however many events it has.
        where c.ctid = any (array(select n.ctid from counted n where n.passed < part_rows))
        returning c.queue, c.id, c.events
      ), partial as (
        delete from pgmb.settlement s using gone where s.queue = gone.queue and s.claim = gone.id
      )
      select count(*) claims, coalesce(sum(gone.events + 1), 0) rows, max(gone.id) last,
        coalesce(sum(gone.events + 1), 0) >= part_rows "full"
      into part from gone;
      cleared := cleared + part.claims;
      rows := rows + part.rows;
      first := part.last + 1;
      more := part."full" or clock_timestamp() >= until;
      exit when not part."full" or rows >= clear_claims.max or clock_timestamp() >= until;
    end loop;
    exit when rows >= clear_claims.max or clock_timestamp() >= until;
  end loop;
end $$;

-- All maintenance in one call, for cron: events that are due, sealing, retention, rotation where its time has come, clearing,
-- subscriptions that expired, stages left behind, idle queues moved past what they do not match. Safe to call at any time
-- from any number of places; at most one works at a time. Each call does a bounded amount of work, and stops after five seconds
-- or a quarter of a shorter statement_timeout or transaction_timeout; the next call begins with the steps that it did not reach.
-- It returns whether more is left, and the caller should then call it again soon. A step that fails or is cancelled by
-- statement_timeout costs that step alone. It raises a warning, and pgmb.describe_broker() names it until it succeeds.
create or replace function pgmb.maintain()
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  -- Sealing comes first: it needs an xid younger than the last rotation. Dropping and detaching come last, because they keep
  -- readers, then publishers, out until the end of the transaction.
  steps constant text[] := '{lineage,times,current segments,seal,streams,leases,dropped queues,hidden leases,dedup keys,
    subscriptions,conditions,attempts,access,dead letters,stages,generations,idle queues,caps,drop,detach}';
  first integer;
  reached integer;
  more boolean;
  began timestamptz := clock_timestamp();
  ended timestamptz;
  jumped boolean;
  until timestamptz := pgmb_internal.maintain_deadline();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  -- Another key each minute: a stranger who saw one in pg_locks and holds it stops nothing for longer.
  if not pg_try_advisory_xact_lock(pgmb_internal.lock_key('maintain ' || extract(epoch from clock_timestamp())::bigint / 60)) then
    return false;
  end if;
  perform pgmb_internal.look_at_clock();
  jumped := pgmb_internal.clock_jumped();
  select t.last_value, t.is_called into first, more from pgmb.maintenance_turn t;
  for step in first .. cardinality(steps) loop
    reached := step;
    -- What is deleted because of its age waits until a clock that jumped ahead has stood.
    continue when jumped and steps[step] = any ('{dedup keys,subscriptions,attempts,access,stages,drop}');
    more := pgmb_internal.maintain_step(steps[step]) or more;
    exit when clock_timestamp() >= until;
  end loop;
  if reached < cardinality(steps) then
    perform setval('pgmb.maintenance_turn', reached + 1, more);
    more := true;
  elsif first > 1 then
    perform setval('pgmb.maintenance_turn', 1, false);
  end if;
  ended := clock_timestamp();
  if exists (select from pgmb.maintenance_failure f where f.failed_at not between began and ended) then
    delete from pgmb.maintenance_failure f
    where f.failed_at not between began and ended and split_part(f.step, ' of stream ', 1) = any (steps[first:reached]);
  end if;
  -- Where the clock went back meanwhile, the next call sees it.
  perform setval('pgmb.maintained', (extract(epoch from greatest(ended, began)) * 1000)::bigint);
  return more;
end $$;

-- When a call of maintain() leaves the other steps to the next one.
create or replace function pgmb_internal.maintain_deadline()
returns timestamptz
language sql stable
as $$
  select pgmb_internal.deadline('5 seconds')
$$;

-- After how long a step of maintain() leaves the other streams or queues to the next call.
create or replace function pgmb_internal.step_time()
returns interval
language sql immutable
as $$
  select interval '1 second'
$$;

-- How many rows the nth part of a step of maintain() changes before it looks at the clock. A part is at most double the one
-- before it: if the first ends before the deadline, none takes more than half of the timeout, however slow the rows are.
create or replace function pgmb_internal.part_rows(part integer)
returns integer
language sql immutable
as $$
  select least(1000, 100 * 2 ^ least(part - 1, 4))::integer
$$;

-- How many such parts a step does in a call.
create or replace function pgmb_internal.parts_per_step()
returns integer
language sql immutable
as $$
  select 10
$$;

-- One step of maintain(), of all streams or of one, in a subtransaction: if it fails, what the others did stands. Returns
-- whether it left something to do. It waits for no lock for longer than 50 ms: lesser roles can hold rows that it wants. It looks
-- at the clock after each part of its work, so that each call does one part at least.
create or replace function pgmb_internal.maintain_step(step text, stream pgmb.stream default null)
returns boolean
language plpgsql
set lock_timeout = '50ms'
as $$
declare
  one pgmb.stream;
  more boolean := false;
  failure text;
  changed bigint;
  now timestamptz := clock_timestamp();
  clock pgmb.clock := pgmb_internal.read_clock();
  until timestamptz := least(now + pgmb_internal.step_time(), pgmb_internal.maintain_deadline());
begin
  if (maintain_step.stream).id is not null then
    case maintain_step.step
      when 'current segments' then
        perform pgmb_internal.attach_current(maintain_step.stream);
      when 'seal' then
        more := pgmb.seal((maintain_step.stream).name) >= 50;
      when 'delayed' then
        for part in 1 .. pgmb_internal.parts_per_step() loop
          more := pgmb_internal.release_due((maintain_step.stream).name, clock_timestamp(), pgmb_internal.part_rows(part))
            >= pgmb_internal.part_rows(part);
          exit when not more or clock_timestamp() >= until;
        end loop;
      when 'rotate' then
        perform pgmb_internal.rotate_due(maintain_step.stream);
      when 'caps' then
        perform pgmb_internal.guard_stream((maintain_step.stream).name, 1);
      when 'drop' then
        more := pgmb.drop_segments((maintain_step.stream).name) > 0;
      when 'detach' then
        more := pgmb.detach_dropped((maintain_step.stream).name) > 0;
    end case;
    return more;
  end if;
  -- Each step finds the streams that need it by one statement: those at rest cost a few index rows. It takes them in random
  -- order, so that none is always among those that are left.
  case maintain_step.step
    when 'lineage' then
      -- pg_upgrade gave the cluster another identifier.
      update pgmb.installation i set system_identifier = c.system_identifier
      from pg_control_system() c where i.system_identifier <> c.system_identifier and pgmb_internal.is_same_lineage();
    when 'current segments' then
      more := pgmb_internal.maintain_streams(maintain_step.step, until, array(
        select s.id from pgmb.stream s
        cross join lateral (select pgmb_internal.last_seq(s.name) seq offset 0) newest
        where (select true from pgmb.segment g where g.stream = s.id and g.number = pgmb_internal.segment_of(newest.seq)) is null));
    when 'seal' then
      more := pgmb_internal.maintain_streams(maintain_step.step, until, array(
        select s.id from pgmb.stream s
        where exists (select from pgmb.segment g where g.stream = s.id and g.sealed_at is null and g.closed_at is not null)));
    when 'streams' then
      for one in
        select s.* from pgmb.stream s
        cross join lateral (select pgmb_internal.last_seq(s.name) seq offset 0) newest
        left join pgmb.segment previous on previous.stream = s.id and previous.number = pgmb_internal.segment_of(newest.seq) - 1
        where pgmb_internal.number_in_segment(newest.seq) > 0 and (pgmb_internal.number_in_segment(newest.seq) >= s.rotate_events
            or pgmb_internal.has_aged(coalesce(previous.closed_at, s.created_at), s.rotate_every, now, clock))
          or pgmb_internal.first_delayed(s.name, now) is not null
          -- Not exists, which PostgreSQL may answer for all streams at once, by reading all rows.
          or (select true from pgmb.segment g where g.stream = s.id and g.sealed_at is null and g.writers is null limit 1)
        order by random()
      loop
        more := pgmb_internal.maintain_step('delayed', one) or more;
        perform pgmb_internal.maintain_step('rotate', one);
        if clock_timestamp() > until then
          more := true;
          exit;
        end if;
      end loop;
    when 'leases' then
      -- Those of the last seconds tell status how fast queues are received.
      more := (pgmb_internal.clear_claims(100000, '10 seconds', until)).more;
    when 'hidden leases' then
      more := pgmb_internal.find_hidden_leases(now, until);
    when 'conditions' then
      more := pgmb_internal.drop_unused_conditions(100) >= 100;
    when 'stages' then
      more := pgmb.clear_stages(coalesce(nullif(current_setting('pgmb.keep_stages', true), ''), '1 day')::interval) >= 100;
    when 'generations' then
      update pgmb.queue q set generation = newest.number, lock_key = pgmb_internal.queue_lock(q.id, newest.number)
      from (select n.queue, max(n.number) number from pgmb.generation n where n.base is not null group by n.queue) newest
      where q.id = newest.queue and q.generation <> newest.number
        and q.id = any (array(
          select behind.id from pgmb.queue behind
          where exists (select from pgmb.generation n
            where n.queue = behind.id and n.number > behind.generation and n.base is not null)
          limit 1000 for no key update skip locked));
      get diagnostics changed = row_count;
      more := changed >= 1000;
      perform pgmb_internal.add_generations(q.id) from pgmb.queue q
      where not exists (select from pgmb.generation n where n.queue = q.id and n.number = q.generation + 4)
      limit 1000;
      get diagnostics changed = row_count;
      more := more or changed >= 1000;
    when 'idle queues' then
      more := pgmb_internal.pass_idle_queues(until);
    when 'caps' then
      more := pgmb_internal.maintain_streams(maintain_step.step, until, array(
        select s.id from pgmb.stream s
        where exists (select from pgmb.queue q where q.stream = s.id and q.max_length is not null and q.when_full = 'refuse')
          <> exists (select from pg_trigger t
            where t.tgrelid = format('pgmb.%I', 'log_' || s.name)::regclass and t.tgname = 'refuse_full')));
    when 'drop' then
      -- One stream a call: its locks are kept until the end of the transaction.
      more := pgmb_internal.maintain_streams(maintain_step.step, until, array(
        select s.id from pgmb.stream s
        cross join lateral (
          select g.sealed_at, g.archived_at, coalesce(g.last_published_at, g.closed_at) "end" from pgmb.segment g
          where g.stream = s.id and g.dropped_at is null order by g.number limit 1) oldest
        where oldest.sealed_at is not null and pgmb_internal.has_aged(oldest."end", s.keep_for, now, clock) and (oldest.archived_at is not null or not s.archive)));
    when 'detach' then
      more := pgmb_internal.maintain_streams(maintain_step.step, until, array(
        select s.id from pgmb.stream s
        where exists (select from pgmb.segment g where g.stream = s.id and pgmb_internal.has_aged(g.dropped_at, '1 minute', now, clock)
          and to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number)) is not null)));
    else
      for part in 1 .. pgmb_internal.parts_per_step() loop
        more := pgmb_internal.maintain_rows(maintain_step.step, pgmb_internal.part_rows(part));
        exit when not more or clock_timestamp() >= until;
      end loop;
  end case;
  return more;
exception when query_canceled or others then
  -- After the deadline it was statement_timeout: what the other steps did stands. Before it, a user cancels the call.
  if sqlstate = '57014' and clock_timestamp() < pgmb_internal.maintain_deadline() then
    raise;
  end if;
  failure := format('%s (%s)', sqlerrm, sqlstate);
  insert into pgmb.maintenance_failure as f (step, error, failed_at)
  values (concat_ws(' of stream ', maintain_step.step, (maintain_step.stream).name), failure, clock_timestamp())
  on conflict on constraint maintenance_failure_pkey do update set error = excluded.error, failed_at = excluded.failed_at;
  -- A lock that others hold is free again soon.
  if sqlstate <> '55P03' then
    raise warning 'maintenance: step % failed: %', concat_ws(' of stream ', maintain_step.step, (maintain_step.stream).name), failure
      using hint = 'The other steps stand. The next call tries again.';
  end if;
  return sqlstate = '57014';
end $$;

-- One step of maintain() for each of these streams. Ends after the first that leaves something to do and when the time is over,
-- and returns whether it did.
create or replace function pgmb_internal.maintain_streams(step text, until timestamptz, streams integer[])
returns boolean
language plpgsql
as $$
declare
  one pgmb.stream;
begin
  for one in select s.* from pgmb.stream s where s.id = any (maintain_streams.streams) order by random() loop
    if pgmb_internal.maintain_step(maintain_streams.step, one) or clock_timestamp() > maintain_streams.until then
      return true;
    end if;
  end loop;
  return false;
end $$;

-- Clears or corrects at most `max` rows of each kind that a step is about. Returns whether more may be left.
create or replace function pgmb_internal.maintain_rows(step text, max integer)
returns boolean
language sql
as $$
  select max <= case step
    when 'times' then pgmb_internal.correct_times(max)
    when 'dropped queues' then pgmb_internal.clear_dropped_queues(max)
    when 'dedup keys' then pgmb.clear_keys(max)
    when 'subscriptions' then pgmb_internal.expire_subscriptions(max)
    when 'attempts' then pgmb_internal.clear_attempts(
      coalesce(nullif(current_setting('pgmb.keep_attempts', true), ''), '7 days')::interval, max)
    when 'access' then pgmb_internal.clear_access(
      coalesce(nullif(current_setting('pgmb.keep_audit', true), ''), '90 days')::interval, max)
    when 'dead letters' then pgmb_internal.drop_archived_dead(max)
  end
$$;

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
