-- Maintenance in one call, in bounded steps. Nothing here is needed for publishing or receiving to go on; any role allowed to
-- may call maintain() from cron or a janitor.

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
    subscriptions,conditions,attempts,disabled endpoints,access,dead letters,stages,generations,idle queues,caps,drop,detach}';
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
    continue when jumped and steps[step] = any ('{dedup keys,subscriptions,attempts,disabled endpoints,access,stages,drop}');
    continue when pgmb_internal.is_resting(steps[step]);
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

-- Whether a step that searches for rows which no other step finds may be left out of this call of maintain(). While a transaction
-- pins xmin, such a search passes all rows that were deleted meanwhile. After one that passed many, the session leaves it out.
create or replace function pgmb_internal.is_resting(step text)
returns boolean
language sql volatile
as $$
  select case when coalesce(current_setting(pgmb_internal.rest_setting(step), true), '') = '' then false
    else current_setting(pgmb_internal.rest_setting(step))::bigint - pgmb_internal.microseconds(clock_timestamp())
      between 1 and 60000000 end
$$;

-- Notes that the session has made such a search, which passed that many entries of indexes: for each, it rests for a millisecond,
-- a thousand times what an entry takes, and at most a minute. more: it stopped before its end.
create or replace function pgmb_internal.rest_after(step text, passed bigint, more boolean)
returns void
language plpgsql
as $$
begin
  perform set_config(pgmb_internal.rest_setting(step),
    case when rest_after.more or rest_after.passed < 1000 then ''
      else (pgmb_internal.microseconds(clock_timestamp()) + least(rest_after.passed * 1000, 60000000))::text end, false);
end $$;

-- How many entries such searches have passed in this transaction.
create or replace function pgmb_internal.entries_searched()
returns bigint
language sql volatile
as $$
  select sum(pgmb_internal.entries_read(i)) from unnest('{pgmb.claim_newest,pgmb.claim_expiry,pgmb.settlement_pkey}'::regclass[]) i
$$;

-- The session's setting that says until when a step rests, in microseconds since 1970.
create or replace function pgmb_internal.rest_setting(step text)
returns text
language sql immutable
as $$
  select 'pgmb.rest_' || replace(step, ' ', '_')
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
  searched bigint := pgmb_internal.entries_searched();
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
      perform pgmb_internal.rest_after(maintain_step.step, pgmb_internal.entries_searched() - searched, more);
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
      if maintain_step.step = 'dropped queues' then
        perform pgmb_internal.rest_after(maintain_step.step, pgmb_internal.entries_searched() - searched, more);
      end if;
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
    when 'disabled endpoints' then pgmb_internal.bury_disabled(max)
    when 'access' then pgmb_internal.clear_access(
      coalesce(nullif(current_setting('pgmb.keep_audit', true), ''), '90 days')::interval, max)
    when 'dead letters' then pgmb_internal.drop_archived_dead(max)
  end
$$;
