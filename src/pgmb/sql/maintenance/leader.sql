-- Leader election: of all processes that run a service, one does its work. This saves work and guards nothing: two
-- tickers, janitors or schedulers at once do no harm.

-- Leads services for `lasts` from now, or goes on leading them: those that no other live process leads. Call it again
-- before that. Returns the services that the process leads. Errors: 42501, MB020 on a standby. For admins.
create or replace function pgmb.lead(
  process uuid, services text[], host text, pid integer, program text, lasts interval default '6 seconds'
)
returns text[]
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  -- Followers write nothing. In one order, so that no two processes wait for each other.
  insert into pgmb.leader as l (service, process, host, pid, program, since, expires_at)
  select wanted.service, lead.process, lead.host, lead.pid, lead.program, now, now + lead.lasts
  from (select distinct s service from unnest(lead.services) s order by s) wanted
  where not exists (
    select from pgmb.leader other where other.service = wanted.service and other.process <> lead.process
      and pgmb_internal.leads(other, now))
  on conflict (service) do update
  set process = excluded.process, host = excluded.host, pid = excluded.pid, program = excluded.program,
    since = case when l.process = excluded.process then l.since else excluded.since end, expires_at = excluded.expires_at
  where l.process = excluded.process or not pgmb_internal.leads(l, now);
  return array(
    select l.service from pgmb.leader l
    where l.service = any (lead.services) and l.process = lead.process order by l.service);
end $$;

-- Whether a leader is alive. A time further ahead than a lease lasts is from before the clock was set back.
create or replace function pgmb_internal.leads(leader pgmb.leader, now timestamptz)
returns boolean
language sql immutable
as $$
  select (leader).expires_at > now and (leader).expires_at < now + interval '1 minute'
$$;

-- Leads no service any more: other processes take over when they next look. For admins.
create or replace function pgmb.resign(process uuid)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  update pgmb.leader l set expires_at = least(l.expires_at, clock_timestamp()) where l.process = resign.process;
end $$;

-- The process that led each service last, since when, and whether it is alive. For admins. Support.
create or replace function pgmb.describe_leaders(
  out service text, out host text, out pid integer, out program text, out since timestamptz, out alive boolean
)
returns setof record
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select l.service, l.host, l.pid, l.program, l.since, pgmb_internal.leads(l, clock_timestamp())
  from pgmb.leader l order by l.service;
end $$;
