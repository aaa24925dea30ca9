-- Times that were written while the clock was ahead: found by the time of their decision, which lies ahead too, and corrected.

-- Corrects times that were written while the clock was ahead, at most `max` of each kind; those that another session has locked
-- next time. What was to happen after a while happens that while from now. Returns the number of rows. Called by maintain;
-- pgmb_internal.find_hidden_leases does the same for leases.
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
  corrected bigint := 0;
  part bigint;
begin
  update pgmb.retry r set due_at = now + (r.due_at - r.decided_at), decided_at = now
  where r.id = any (array(
    select wrong.id from pgmb.retry wrong where wrong.decided_at > ahead and wrong.due_at < 'infinity'
    limit max for update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  update pgmb.delivery d set due_at = now + (d.due_at - d.decided_at), decided_at = now
  where d.id = any (array(
    select wrong.id from pgmb.delivery wrong where wrong.decided_at > ahead limit max for update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  update pgmb.delayed d set due_at = now + (d.due_at - d.decided_at), decided_at = now
  where d.ctid = any (array(
    select wrong.ctid from pgmb.delayed wrong where wrong.decided_at > ahead limit max for update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  update pgmb.segment s
  set closed_at = case when s.closed_at > now then now else s.closed_at end,
    sealed_at = case when s.sealed_at > now then now else s.sealed_at end,
    last_published_at = case when s.last_published_at > now then now else s.last_published_at end,
    archived_at = case when s.archived_at > now then now else s.archived_at end,
    dropped_at = case when s.dropped_at > now then now else s.dropped_at end
  where s.ctid = any (array(
    select wrong.ctid from pgmb.segment wrong
    where greatest(wrong.closed_at, wrong.sealed_at, wrong.last_published_at, wrong.archived_at, wrong.dropped_at) > ahead
    limit max for update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  -- What its first segment is as old as.
  update pgmb.stream s set created_at = now
  where s.id = any (array(
    select wrong.id from pgmb.stream wrong where wrong.created_at > ahead limit max for no key update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  update pgmb.subscription s set active_at = now, expires_at = now + s.expires_after
  where s.id = any (array(
    select wrong.id from pgmb.subscription wrong where wrong.active_at > ahead and wrong.expires_at is not null
    limit max for update skip locked));
  get diagnostics part = row_count;
  corrected := corrected + part;
  update pgmb.endpoint e set probe_at = now + (e.probe_at - e.changed_at), changed_at = now
  where e.id = any (array(
    select wrong.id from pgmb.endpoint wrong where wrong.changed_at > ahead limit max for update skip locked));
  get diagnostics part = row_count;
  return corrected + part;
end $$;

-- What was written while the clock was ahead and is not corrected yet, by kind: how many rows, at most 10,000, and the latest
-- time in them. Only the scheduler corrects schedules; maintain() corrects the others. For admins.
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
    (select 'segments', greatest(s.closed_at, s.sealed_at, s.last_published_at, s.archived_at, s.dropped_at)
      from pgmb.segment s
      where greatest(s.closed_at, s.sealed_at, s.last_published_at, s.archived_at, s.dropped_at) > ahead limit 10000)
    union all
    (select 'streams', s.created_at from pgmb.stream s where s.created_at > ahead limit 10000)
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
