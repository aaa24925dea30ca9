-- Clearing what is settled: the claims that a queue has left behind.

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
            or (c.state = 'leased' and pgmb_internal.is_void(c.queue, c.id)))
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
      ), noted as (
        delete from pgmb.noted_key k using gone where k.queue = gone.queue and k.claim = gone.id
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
    -- Leases that positions no longer name: what is left of them was noted again.
    delete from pgmb.noted_lease n
    where n.queue = q.id and n.nr < (
      select (c.flight).first from pgmb.claim c where c.queue = q.id order by c.id desc limit 1);
    exit when rows >= clear_claims.max or clock_timestamp() >= until;
  end loop;
end $$;
