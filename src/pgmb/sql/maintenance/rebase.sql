-- Rebasing: making a log that was restored or copied from another cluster readable here.

-- Gives every event and position the ids of this cluster and raises the epoch, so that positions kept
-- outside from before are refused. Queues keep their place: what was not settled, leases included, is
-- delivered (again), and nothing else. Attaches the segment that a sequence points to, if the dump did not have it. Ticks and
-- readers' positions are forgotten. Each segment that it rewrites takes several locks until the transaction ends, so that a call
-- rewrites at most 50 segments that all queues have passed, and returns true if more are left: call it again, in another
-- transaction, until it returns false. The last call does the rest, and locks every log against publishers until its transaction
-- ends. Run it after a restore, before publishers and consumers return. Errors: 53200 too many segments that queues have not
-- passed.
create or replace function pgmb.rebase()
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
  q pgmb.queue;
  newest pgmb.claim;
  last bigint;
  place bigint;
  unread bigint[];
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if pg_is_in_recovery() then
    perform pgmb_internal.assert_primary();
  end if;
  if pgmb_internal.rebase_passed(50) then
    return true;
  end if;
  -- Another cluster numbers roles in another way.
  update pgmb.queue_grant g set role_id = r.oid from pg_roles r where r.rolname = g.role and r.oid <> g.role_id;
  if to_regclass('pgmq.sender') is not null then
    execute 'update pgmq.sender g set role_id = r.oid from pg_roles r where r.rolname = g.role and r.oid <> g.role_id';
  end if;
  for s in select * from pgmb.stream order by id loop
    -- Not its segments: who writes to one locks the log first.
    execute format('lock table only pgmb.%I in share row exclusive mode', 'log_' || s.name);
    perform pgmb_internal.mend_sequence(s);
    perform pgmb_internal.attach_current(s);
    last := pgmb_internal.last_seq(s.name);
    for q in select * from pgmb.queue where stream = s.id order by id loop
      select * into newest from pgmb_internal.queue_position(q.id);
      -- What was leased goes to be tried again; so does what the queue has not consumed below the last event that it has.
      perform pgmb_internal.fail_events(q, pgmb_internal.unsettled(c), c.id, 1, clock_timestamp(),
        'rebased')
      from pgmb.claim c
      where c.queue = q.id and c.state = 'leased' and not pgmb_internal.is_void(c.queue, c.id);
      place := pgmb_internal.last_consumed(s.id, newest);
      unread := array(
        select e.seq from pgmb_internal.unread_upto(s.id, newest, place, q.matching) e
        union all
                select e.seq from pgmb_internal.lagging_range(q, newest) r
        cross join lateral pgmb_internal.batch_events(q.stream, r.batch, r.lo, r.hi, q.matching || r.matching, raw => true) e);
      begin
        unread := pgmb_internal.passing(q, unread);
      exception when others then
        if q.plain or pgmb_internal.servers_trouble(sqlstate) then
          raise;
        end if;
        -- Its filter cannot be asked: rather too many than too few.
        perform pgmb_internal.pause_failing(q, format('%s (%s)', sqlerrm, sqlstate));
      end;
      perform pgmb_internal.fail_events(q, unread, newest.id, 0, clock_timestamp(), null, fresh => true);
      perform pgmb_internal.fail_leased(q, c.id, clock_timestamp(), 'rebased', 0)
      from pgmb.claim c where c.queue = q.id and c.state = 'leased_retries';
      delete from pgmb.claim c where c.queue = q.id;
      update pgmb.queue moved set moves = null where moved.id = q.id;
      delete from pgmb.shortened h where h.queue = q.id;
      delete from pgmb.noted_lease n where n.queue = q.id;
      delete from pgmb.noted_key k where k.queue = q.id;
      delete from pgmb.settlement t where t.queue = q.id;
      perform pgmb_internal.write_position(pgmb_internal.rebased_position(q.id, newest.id, place, last));
    end loop;
    perform pgmb_internal.rebase_segment(g) from pgmb.segment g
    where g.stream = s.id and g.dropped_at is null order by g.number;
    -- The ids of segments that only the lake has are another cluster's too.
    update pgmb.segment g set max_xid = '3'
    where g.stream = s.id and g.dropped_at is not null and g.max_xid is not null;
    -- The trigger names the owner, who may be another here.
    execute format('drop trigger if exists refuse_full on pgmb.%I', 'log_' || s.name);
    perform pgmb_internal.guard_stream(s.name);
  end loop;
  delete from pgmb.tick;
  update pgmb.archived a set proofs = '{}' where a.proofs is not null;
  delete from pgmb.reader;
  update pgmb.installation i
  set epoch = i.epoch + 1, system_identifier = c.system_identifier,
    -- A copy elsewhere is another installation than the one that it was made of.
    identity = case when i.system_identifier = c.system_identifier then i.identity else gen_random_uuid() end
  from pg_control_system() c;
  perform pgmb_internal.write_lineage();
  perform set_config('pgmb.cluster_checked', '', false);
  return false;
end $$;

-- Whether events of a segment may have ids of another cluster. After a rebase those that are sealed have none.
create or replace function pgmb_internal.must_rebase(segment pgmb.segment)
returns boolean
language sql immutable
as $$
  select (segment).dropped_at is null and ((segment).sealed_at is null or (segment).max_xid > '3')
$$;

-- Rewrites at most `max` sealed segments that all queues have passed. For these queues nothing changes: the events were
-- consumed before, and are consumed with an id that is below all others. Returns whether more are left.
create or replace function pgmb_internal.rebase_passed(max integer)
returns boolean
language plpgsql
as $$
declare
  passed pgmb.segment;
  rewritten integer := 0;
begin
  for passed in
    select g.* from pgmb.segment g
    where g.sealed_at is not null and pgmb_internal.must_rebase(g)
      and not exists (
        select from pgmb.queue q
                cross join lateral pgmb_internal.queue_position(q.id) newest
        where q.stream = g.stream and not pgmb_internal.has_passed(newest, g))
      and not exists (
        select from pgmb.queue q join pgmb.claim c on c.queue = q.id
        where q.stream = g.stream and c.state = 'leased'
          and not g.max_xid < pg_snapshot_xmin(c.done_snapshot))
    order by g.stream, g.number limit max + 1
  loop
    if rewritten = max then
      return true;
    end if;
    perform pgmb_internal.rebase_segment(passed);
    rewritten := rewritten + 1;
  end loop;
  return false;
end $$;

-- The number of the last event of a stream that a queue has consumed or leased; those that it has not may lie below.
create or replace function pgmb_internal.last_consumed(stream integer, base pgmb.claim)
returns bigint
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  -- Of the batch, up to its place; of those before, all.
  consumed bigint := base.place;
  leaf text;
  last bigint;
begin
  for leaf in
    select format('pgmb.segment_%s_%s', g.stream, g.number) from pgmb.segment g
    where g.stream = last_consumed.stream and g.dropped_at is null and g.number >= pgmb_internal.segment_of(consumed)
    order by g.number desc
  loop
    execute 'select e.seq from ' || leaf || ' e where e.seq > $1 and pg_visible_in_snapshot(e.xid, $2) order by e.seq desc limit 1'
      into last using consumed, base.done_snapshot;
    exit when last is not null;
  end loop;
  return greatest(consumed, last);
end $$;

-- The events of a stream up to a number that a queue has neither consumed nor leased.
create or replace function pgmb_internal.unread_upto(stream integer, base pgmb.claim, upto bigint, matching text)
returns setof pgmb.event
language plpgsql
set enable_seqscan = off
set jit = off
as $$
declare
  leaf text;
begin
  for leaf in
    select format('pgmb.segment_%s_%s', g.stream, g.number) from pgmb.segment g
    where g.stream = unread_upto.stream and g.dropped_at is null and g.number <= pgmb_internal.segment_of(unread_upto.upto)
      and (g.max_xid is null or g.max_xid >= pg_snapshot_xmin(base.done_snapshot))
      -- Consumed with the batch.
      and (g.sealed_at is null or g.max_xid >= pg_snapshot_xmin(base.batch_snapshot) or g.last_seq > base.place)
    order by g.number
  loop
    return query execute 'select ' || pgmb_internal.columns_of(stream, false) || ' from ' || leaf || ' e
            where e.xid >= $1 and e.seq + 0 <= $2 and not pgmb_internal.is_passed($3, e.seq, e.xid)' || matching || ' order by e.seq + 0'
      using pg_snapshot_xmin(base.done_snapshot), unread_upto.upto, base;
  end loop;
end $$;

-- The position of a queue in a log of which all events have one transaction id: everything up to `place` is consumed.
create or replace function pgmb_internal.rebased_position(queue integer, claim bigint, place bigint, last bigint)
returns pgmb.claim
language plpgsql
as $$
declare
  -- Before all events.
  base pgmb.claim := pgmb_internal.first_position(rebased_position.queue, (null, null, null, null, '3:3:', 0, '3'));
begin
  base.id := rebased_position.claim;
  base.place := rebased_position.place;
  base.upto := rebased_position.last;
  base.batch_snapshot := '4:4:';
  base.batch_seq := rebased_position.last;
  base.batch_next := '4';
  return base;
end $$;

-- Moves a stream's sequence behind the last event of its log: a copy may have the events and not the sequence.
create or replace function pgmb_internal.mend_sequence(stream pgmb.stream)
returns void
language plpgsql
as $$
declare
  leaf text;
  last bigint;
begin
  -- The newest segment that has events has the last one. To ask the log would lock all segments.
  for leaf in
    select format('pgmb.segment_%s_%s', g.stream, g.number) from pgmb.segment g
    where g.stream = (mend_sequence.stream).id and g.dropped_at is null order by g.number desc
  loop
    execute 'select max(e.seq) from ' || leaf || ' e' into last;
    exit when last is not null;
  end loop;
  if last > pgmb_internal.last_seq((stream).name) then
    perform setval(format('pgmb.%I', 'seq_' || (stream).name)::regclass, last);
  end if;
end $$;

-- Rewrites one segment's xids; 3 is below every xid that this cluster will give.
create or replace function pgmb_internal.rebase_segment(segment pgmb.segment)
returns void
language plpgsql
as $$
begin
  if pgmb_internal.must_rebase(segment) then
    execute format('update pgmb.segment_%s_%s set xid = ''3''', (segment).stream, (segment).number);
  end if;
  update pgmb.segment s
  set closed_xid = case when s.sealed_at is not null then '3'::xid8 end,
    max_xid = case when s.max_xid is not null then '3'::xid8 end
  where s.stream = (segment).stream and s.number = (segment).number;
end $$;
