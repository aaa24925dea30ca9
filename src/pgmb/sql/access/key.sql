-- Keys for HTTP. A scope is a word and what it is about: publish:STREAM, read:STREAM, consume:QUEUE with * for all, or
-- inspect (see everything) and operate (change everything).

-- Refuses what is not a list of scopes. Errors: MB005.
create or replace function pgmb_internal.assert_scopes(scopes text[])
returns void
language plpgsql immutable
as $$
declare
  scope text;
begin
  if coalesce(cardinality(scopes), 0) = 0 or cardinality(scopes) > 1000 then
    raise exception 'a key needs scopes, up to 1000' using errcode = 'MB005';
  end if;
  foreach scope in array scopes loop
    if scope is null or length(scope) > 200 or scope !~ '^(inspect|operate|(publish|read|consume):[^\x01-\x1f\x7f]+)$' then
      raise exception 'not a scope: %', coalesce(quote_literal(scope), 'null') using errcode = 'MB005',
        hint = 'publish:STREAM, read:STREAM, consume:QUEUE (each may be *), inspect or operate.';
    end if;
  end loop;
end $$;

-- Registers a key by the SHA-256 of its text, which stays with its holder, and returns its id. Errors: MB003 not a name,
-- MB004 the name is taken, MB005 not scopes, not a digest. For admins.
create or replace function pgmb.create_api_key(name text, digest bytea, scopes text[], expires_at timestamptz default null)
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  made integer;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_name('key', create_api_key.name);
  perform pgmb_internal.assert_scopes(create_api_key.scopes);
  if coalesce(octet_length(create_api_key.digest), 0) <> 32 then
    raise exception 'not a SHA-256 digest' using errcode = 'MB005';
  end if;
  insert into pgmb.api_key (name, digest, scopes, expires_at)
  values (create_api_key.name, create_api_key.digest, create_api_key.scopes, create_api_key.expires_at)
  on conflict do nothing
  returning id into made;
  if made is null then
    raise exception 'there is a key %', quote_literal(create_api_key.name) using errcode = 'MB004',
      hint = 'Drop it first with pgmb.drop_api_key(name), or take another name.';
  end if;
  return made;
end $$;

-- Takes a key back, with the sessions and tickets that came of it. Returns whether there was one. For admins.
create or replace function pgmb.drop_api_key(name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.api_key k where k.name = drop_api_key.name;
  return found;
end $$;

-- The key of a digest, while it is good. For admins.
create or replace function pgmb.find_api_key(digest bytea)
returns table (id integer, name text, scopes text[], expires_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if not pg_is_in_recovery() then
    update pgmb.api_key k set used_at = now
    where k.digest = find_api_key.digest
      and (k.used_at is null or k.used_at < now - interval '1 minute');
  end if;
  return query
  select k.id, k.name, k.scopes, k.expires_at from pgmb.api_key k
  where k.digest = find_api_key.digest and (k.expires_at is null or k.expires_at > now);
end $$;

-- Hands out a pass on behalf of a key: kind session, or ticket, which is good once. It ends with the key at the latest.
-- Returns whether the key is still there. Errors: MB005 not scopes, not a kind. For admins.
create or replace function pgmb.give_pass(api_key integer, kind text, digest bytea, scopes text[], lasts interval)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_scopes(give_pass.scopes);
  if not coalesce(give_pass.kind in ('session', 'ticket'), false) or coalesce(octet_length(give_pass.digest), 0) <> 32 then
    raise exception 'not a pass' using errcode = 'MB005';
  end if;
  insert into pgmb.pass (digest, api_key, kind, scopes, expires_at)
  select give_pass.digest, k.id, give_pass.kind, give_pass.scopes, least(now + give_pass.lasts, k.expires_at)
  from pgmb.api_key k
  where k.id = give_pass.api_key and (k.expires_at is null or k.expires_at > now);
  return found;
end $$;

-- The session of a digest, while it is good, with the key's name. For admins.
create or replace function pgmb.find_session(digest bytea)
returns table (api_key integer, name text, scopes text[], expires_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  return query
  select k.id, k.name, p.scopes, p.expires_at
  from pgmb.pass p join pgmb.api_key k on k.id = p.api_key
  where p.digest = find_session.digest and p.kind = 'session' and p.expires_at > statement_timestamp();
end $$;

-- Uses a ticket up. Of several that use it at once, one gets it. For admins.
create or replace function pgmb.take_ticket(digest bytea)
returns table (api_key integer, name text, scopes text[])
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  return query
  with taken as (
    delete from pgmb.pass p
    where p.digest = take_ticket.digest and p.kind = 'ticket'
    returning p.api_key, p.scopes, p.expires_at
  )
  select k.id, k.name, t.scopes
  from taken t join pgmb.api_key k on k.id = t.api_key
  where t.expires_at > statement_timestamp();
end $$;

-- Ends a session. Returns whether there was one. For admins.
create or replace function pgmb.end_session(digest bytea)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.pass p where p.digest = end_session.digest and p.kind = 'session';
  return found;
end $$;

-- Writes down what was changed, by whom: in the transaction that changes it. Returns the entry's id. For admins.
create or replace function pgmb.record(actor text, action text, subject text default null, detail jsonb default '{}')
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  written bigint;
begin
  perform pgmb_internal.assert_admin();
  insert into pgmb.audit (actor, action, subject, detail)
  values (record.actor, record.action, record.subject, coalesce(record.detail, '{}'))
  returning id into written;
  return written;
end $$;

-- Removes passes that are over, and what was changed longer ago than that. Returns how many rows.
create or replace function pgmb_internal.clear_access(keep interval, max integer default 10000)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  passes bigint;
  entries bigint;
  now timestamptz := clock_timestamp();
begin
  delete from pgmb.pass p where p.digest = any (array(
    select old.digest from pgmb.pass old where old.expires_at < now order by old.expires_at limit max));
  get diagnostics passes = row_count;
  delete from pgmb.audit a where a.id = any (array(
    select old.id from pgmb.audit old where old.at < now - keep order by old.at limit max));
  get diagnostics entries = row_count;
  return passes + entries;
end $$;

-- Every key, without what would let one use it. For admins.
create or replace view pgmb.api_keys as
select k.id, k.name, k.scopes, k.created_at, k.expires_at, k.used_at
from pgmb.api_key k;
