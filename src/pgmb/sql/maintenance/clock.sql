-- The clock may go back or jump ahead (docs/explanation/clock.md). A time that lies ahead was written while the clock was ahead,
-- or the clock is behind now: nothing tells which. What is true in both cases is how much time has passed since the clock went
-- back, and that is what such times are compared with.

-- How much of the time between two calls of maintain() counts at most. More is a jump of the clock, or nobody called.
create or replace function pgmb_internal.counted_at_most()
returns interval
language sql immutable
as $$
  select interval '5 minutes'
$$;

-- For how long nothing is deleted because of its age after the clock jumped ahead.
create or replace function pgmb_internal.jump_stands_after()
returns interval
language sql immutable
as $$
  select interval '10 minutes'
$$;

-- What the clock showed when maintain() last ended. Null: it never ran.
create or replace function pgmb_internal.clock_seen()
returns timestamptz
language sql volatile
as $$
  select to_timestamp(pg_sequence_last_value('pgmb.maintained') / 1000.0)
$$;

-- How many times in pgmb.clock.up_to are kept at most.
create or replace function pgmb_internal.steps_kept()
returns integer
language sql immutable
as $$
  select 20
$$;

-- What maintain() saw of the clock. It counts no time if the clock is behind what maintain() saw.
create or replace function pgmb_internal.read_clock()
returns pgmb.clock
language plpgsql volatile
as $$
declare
  clock pgmb.clock;
begin
  select * into clock from pgmb.clock c;
  if clock_timestamp() < pgmb_internal.clock_seen() - interval '1 second' then
    clock.counted := '{}';
  end if;
  return clock;
end $$;

-- How much time has passed for certain since a time that lies ahead: since the clock went back from there or from a later time,
-- or since such a time was found. Zero if maintain() saw neither. Inlined.
create or replace function pgmb_internal.passed_since(at timestamptz, now timestamptz, clock pgmb.clock)
returns interval
language sql immutable
as $$
  select greatest(now - (clock).zero - (clock).counted[width_bucket(at, (clock).up_to) + 1], interval '0')
$$;

-- Whether more than `age` has passed since a time; null if there is none. clock: as pgmb_internal.read_clock returns it. Inlined.
create or replace function pgmb_internal.has_aged(at timestamptz, age interval, now timestamptz, clock pgmb.clock)
returns boolean
language sql stable
as $$
  select case when at > now then age <= pgmb_internal.passed_since(at, now, clock) else at + age < now end
$$;

-- Whether the clock jumped ahead a while ago. What is due by such a clock and cannot be taken back waits.
create or replace function pgmb_internal.clock_jumped()
returns boolean
language plpgsql volatile
as $$
declare
  now timestamptz := clock_timestamp();
begin
  return coalesce((select now - c.zero < c.stepped_ahead + pgmb_internal.jump_stands_after() from pgmb.clock c), false);
end $$;

-- Whether a process's silence may be believed: the clock did not jump ahead lately, and maintain() was called so lately that it
-- would have seen a jump. Where maintain() never ran, nothing tells of jumps.
create or replace function pgmb_internal.clock_stands()
returns boolean
language sql volatile
as $$
  select not pgmb_internal.clock_jumped()
    and coalesce(clock_timestamp() <= pgmb_internal.clock_seen() + pgmb_internal.counted_at_most(), true)
$$;

-- Notes whether the clock went back or jumped ahead since the last call of maintain(). A segment that was closed while the clock
-- was behind becomes as old as it is when the clock is right again. Called by maintain.
create or replace function pgmb_internal.look_at_clock()
returns void
language plpgsql
as $$
declare
  now timestamptz := clock_timestamp();
  seen timestamptz := pgmb_internal.clock_seen();
  jump interval := now - seen - pgmb_internal.counted_at_most();
  -- How far the clock ran on, at most, before it went back: as long as nobody calls maintain().
  ran_to timestamptz := seen + (select greatest(pgmb_internal.counted_at_most(), c.jumped_by) from pgmb.clock c);
begin
  if now < seen - interval '1 second' then
    -- Times up to there were written before the clock went back. Later ones keep their count.
    update pgmb.clock c
    set zero = c.zero + (now - seen), back_from = seen, back_at = now, jumped_by = null,
      up_to = case when cardinality(earlier.up_to) < pgmb_internal.steps_kept() then array[ran_to] || earlier.up_to
        else array[earlier.up_to[cardinality(earlier.up_to)]] end,
      counted = case when cardinality(earlier.up_to) < pgmb_internal.steps_kept() then array[seen - c.zero] || earlier.counted
        else array[seen - c.zero] end
    from (
      select k.up_to[1 + width_bucket(ran_to, k.up_to):] up_to, k.counted[1 + width_bucket(ran_to, k.up_to):] counted
      from pgmb.clock k) earlier;
  elsif jump > interval '0' then
    -- Before this transaction has an xid, or nothing is ever sealed where each call looks like a jump.
    perform pgmb_internal.note_closed_xid();
    update pgmb.segment s
    set closed_at = s.closed_at + (now - seen), sealed_at = s.sealed_at + (now - seen),
      last_published_at = case when s.last_published_at between c.back_at and seen then s.last_published_at + (now - seen)
        else s.last_published_at end
    from pgmb.clock c
    where seen < c.back_from and now >= c.back_from and s.closed_at between c.back_at and seen and s.dropped_at is null;
    -- Where maintain() is called once in an hour, each call looks like a jump: one about as long as a jump that is waited for is
    -- such a call, and the time that it counts for is time in which the clock stood.
    update pgmb.clock c
    set zero = c.zero + jump, jumped_by = now - seen,
      stepped_ahead = case
        when now - seen <= 2 * c.jumped_by and seen - c.zero < c.stepped_ahead + pgmb_internal.jump_stands_after()
          then c.stepped_ahead
        else seen - c.zero
      end;
  end if;
end $$;

-- Corrects times that lie ahead of the clock, at most `max` of each kind; those that another session has locked next time. What
-- was to happen after a delay happens once that delay has passed since the clock went back: it is right whether the clock was
-- ahead then or is behind now. Returns the number of rows. Called by maintain; pgmb_internal.find_hidden_leases does the same
-- for leases, and what reads the ages of segments, streams, stages and deduplication keys looks at that time itself.
create or replace function pgmb_internal.correct_times(max integer default 10000)
returns bigint
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  now timestamptz := clock_timestamp();
  -- Rows that were written since `now` was read do not count.
  ahead timestamptz := now + interval '1 second';
  -- Keys may be millions: a key that was taken ahead is most likely among those that expire last.
  last_keys constant integer := 1000;
  newest timestamptz := greatest(
    (select r.decided_at from pgmb.retry r where r.decided_at > ahead and r.due_at < 'infinity' order by r.decided_at desc limit 1),
    (select d.decided_at from pgmb.delivery d where d.decided_at > ahead order by d.decided_at desc limit 1),
    (select d.decided_at from pgmb.delayed d where d.decided_at > ahead order by d.decided_at desc limit 1),
    (select greatest(s.closed_at, s.sealed_at, s.last_published_at, s.archived_at, s.dropped_at) from pgmb.segment s
     where greatest(s.closed_at, s.sealed_at, s.last_published_at, s.archived_at, s.dropped_at) > ahead
     order by greatest(s.closed_at, s.sealed_at, s.last_published_at, s.archived_at, s.dropped_at) desc limit 1),
    (select max(s.created_at) from pgmb.stream s where s.created_at > ahead),
    (select max(k.taken_at) from (select d.taken_at from pgmb.dedup d order by d.expires_at desc limit last_keys) k
     where k.taken_at > ahead),
    (select max(s.claimed_at) from pgmb.stage s where s.claimed_at > ahead),
    (select max(a.failing_since) from pgmb.endpoint_activity a where a.failing_since > ahead),
    (select s.active_at from pgmb.subscription s
     where s.active_at > ahead and s.expires_at is not null order by s.active_at desc limit 1));
  clock pgmb.clock;
  corrected bigint := 0;
  part bigint;
begin
  if newest is not null then
    perform pgmb_internal.note_ahead(newest);
    clock := pgmb_internal.read_clock();
    update pgmb.retry r set due_at = now, decided_at = now
    where r.id = any (array(
      select wrong.id from pgmb.retry wrong
      where wrong.decided_at > ahead and wrong.due_at < 'infinity'
        and wrong.due_at - wrong.decided_at <= pgmb_internal.passed_since(wrong.decided_at, now, clock)
      limit max for update skip locked));
    get diagnostics part = row_count;
    corrected := corrected + part;
    update pgmb.delivery d set due_at = now, decided_at = now
    where d.id = any (array(
      select wrong.id from pgmb.delivery wrong
      where wrong.decided_at > ahead
        and wrong.due_at - wrong.decided_at <= pgmb_internal.passed_since(wrong.decided_at, now, clock)
      limit max for update skip locked));
    get diagnostics part = row_count;
    corrected := corrected + part;
    update pgmb.delayed d set due_at = now, decided_at = now
    where d.ctid = any (array(
      select wrong.ctid from pgmb.delayed wrong
      where wrong.decided_at > ahead
        and wrong.due_at - wrong.decided_at <= pgmb_internal.passed_since(wrong.decided_at, now, clock)
      limit max for update skip locked));
    get diagnostics part = row_count;
    corrected := corrected + part;
    update pgmb.subscription s set active_at = now, expires_at = now
    where s.id = any (array(
      select wrong.id from pgmb.subscription wrong
      where wrong.active_at > ahead and wrong.expires_at is not null
        and wrong.expires_after <= pgmb_internal.passed_since(wrong.active_at, now, clock)
      limit max for update skip locked));
    get diagnostics part = row_count;
    corrected := corrected + part;
  end if;
  -- At once, because a probe is one request.
  update pgmb.endpoint e set probe_at = now + (e.probe_at - e.changed_at), changed_at = now
  where e.id = any (array(
    select wrong.id from pgmb.endpoint wrong where wrong.changed_at > ahead limit max for update skip locked));
  get diagnostics part = row_count;
  return corrected + part;
end $$;

-- Notes a time that lies ahead. If it is later than all that are known, the clock was ahead since the last call, unseen.
create or replace function pgmb_internal.note_ahead(newest timestamptz)
returns void
language plpgsql
as $$
declare
  now timestamptz := clock_timestamp();
begin
  update pgmb.clock c
  set up_to = array[note_ahead.newest + interval '1 microsecond'], counted = array[now - c.zero]
  where width_bucket(note_ahead.newest, c.up_to) = cardinality(c.up_to);
end $$;

-- What was decided at a time that lies ahead, by kind: how many rows, at most 10,000, and the latest time in them. The clock was
-- ahead when they were written, or it is behind now. maintain() corrects them once their delay has passed, the scheduler
-- schedules. For admins.
create or replace function pgmb.times_ahead()
returns table (kind text, rows bigint, latest timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  now timestamptz := clock_timestamp();
  ahead timestamptz := now + interval '1 second';
begin
  perform pgmb_internal.assert_admin();
  return query
  select found.kind, count(*), max(found.at)
  from (
    (select 'retries' kind, r.due_at at from pgmb.retry r where r.decided_at > ahead and r.due_at < 'infinity' limit 10000)
    union all
    (select 'deliveries', d.due_at from pgmb.delivery d where d.decided_at > ahead limit 10000)
    union all
    (select 'delayed events', d.due_at from pgmb.delayed d where d.decided_at > ahead limit 10000)
    union all
    (select 'leases', c.expires_at from pgmb.queue q
      cross join lateral (
        select c.expires_at from pgmb.claim c
        where c.queue + 0 = q.id and c.expires_at > ahead and c.expires_at < 'infinity'
          and pgmb_internal.is_leased(c.state) and coalesce(c.extended_at, c.at) > ahead) c limit 10000)
    union all
    (select 'subscriptions', s.expires_at from pgmb.subscription s
      where s.active_at > ahead and s.expires_at is not null limit 10000)
    union all
    (select 'endpoints', coalesce(e.probe_at, e.changed_at) from pgmb.endpoint e where e.changed_at > ahead limit 10000)
    union all
    (select 'schedules', coalesce(c.next_at, c.decided_at) from pgmb.schedule c
      where c.decided_at > ahead and c.paused_at is null limit 10000)) found
  group by found.kind
  order by found.kind;
end $$;
