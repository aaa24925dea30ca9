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
      raise exception 'invalid scope: %', coalesce(quote_literal(scope), 'null') using errcode = 'MB005',
        hint = 'publish:STREAM, read:STREAM, consume:QUEUE (each may be *), inspect or operate.';
    end if;
  end loop;
end $$;

-- Registers a key by the SHA-256 of its text, which stays with its holder, and returns its id. Errors: MB003 invalid name,
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
    raise exception 'API key % exists', quote_literal(create_api_key.name) using errcode = 'MB004',
      hint = 'Drop it first with pgmb.drop_api_key(name), or use another name.';
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
      and (k.used_at is null or k.used_at not between now - interval '1 minute' and now);
  end if;
  return query
  select k.id, k.name, k.scopes, k.expires_at from pgmb.api_key k
  where k.digest = find_api_key.digest and (k.expires_at is null or k.expires_at > now);
end $$;

-- Keeps a key, and the session of it that acts, until the transaction ends: dropping either waits. Returns when the key
-- expires; no row if the key or the session is no longer valid. For admins.
create or replace function pgmb.hold_api_key(id integer, session bytea default null)
returns table (expires_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  -- The key first, as dropping it locks the key and then its sessions.
  select k.expires_at into hold_api_key.expires_at from pgmb.api_key k
  where k.id = hold_api_key.id and (k.expires_at is null or k.expires_at > now)
  for key share;
  if found and hold_api_key.session is not null then
    perform from pgmb.access_token p
    where p.digest = hold_api_key.session and p.api_key = hold_api_key.id and p.kind = 'session'
      and p.expires_at > now
    for key share;
  end if;
  if found then
    return next;
  end if;
end $$;

-- Creates an access token for a key. kind is session, or ticket, which can be used once. The token expires with the key at
-- the latest. Returns false if the key no longer exists. Errors: MB005 invalid scopes, kind or digest. For admins.
create or replace function pgmb.create_access_token(api_key integer, kind text, digest bytea, scopes text[], lasts interval)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_scopes(create_access_token.scopes);
  if not coalesce(create_access_token.kind in ('session', 'ticket'), false) or coalesce(octet_length(create_access_token.digest), 0) <> 32 then
    raise exception 'invalid access token: kind must be session or ticket, digest must have 32 bytes' using errcode = 'MB005';
  end if;
  insert into pgmb.access_token (digest, api_key, kind, scopes, expires_at)
  select create_access_token.digest, k.id, create_access_token.kind, create_access_token.scopes, least(now + create_access_token.lasts, k.expires_at)
  from pgmb.api_key k
  where k.id = create_access_token.api_key and (k.expires_at is null or k.expires_at > now)
  for key share;
  return found;
end $$;

-- The valid session with this digest, with the key's name. For admins.
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
  from pgmb.access_token p join pgmb.api_key k on k.id = p.api_key
  where p.digest = find_session.digest and p.kind = 'session' and p.expires_at > statement_timestamp()
    -- Not for longer because it was made while the clock was ahead.
    and p.created_at < statement_timestamp() + interval '1 second';
end $$;

-- Uses up a ticket. Of several concurrent calls, one gets it. For admins.
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
    delete from pgmb.access_token p
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
  delete from pgmb.access_token p where p.digest = end_session.digest and p.kind = 'session';
  return found;
end $$;

-- Records a change and who made it, in the transaction that makes it. Returns the entry's id. For admins.
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

-- Removes expired access tokens and old entries of the audit. Returns the number of rows.
create or replace function pgmb_internal.clear_access(keep interval, max integer default 10000)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  tokens bigint;
  entries bigint;
  now timestamptz := clock_timestamp();
begin
  delete from pgmb.access_token p where p.digest = any (array(
    select old.digest from pgmb.access_token old where old.expires_at < now order by old.expires_at limit max
    for update skip locked));
  get diagnostics tokens = row_count;
  delete from pgmb.audit a where a.id = any (array(
    select old.id from pgmb.audit old where old.at < now - keep order by old.at limit max for update skip locked));
  get diagnostics entries = row_count;
  return tokens + entries;
end $$;

-- Every key, without what would let one use it. For admins.
create or replace view pgmb.api_keys as
select k.id, k.name, k.scopes, k.created_at, k.expires_at, k.used_at
from pgmb.api_key k;
