-- Subscriptions of a group: the filters of thousands of readers of the same events, matched together.

-- Subscribes within a group to events that match the patterns, fields, filter and condition (see create_queue), and
-- returns the subscription's id. Equal subscriptions of a group are one. It expires if it is neither subscribed again nor
-- kept (keep_subscriptions) for expires_after. What it matches is read with receive_group or between_group. Errors:
-- MB001 no such stream, MB003 invalid name, MB007 invalid pattern, MB009 invalid filter, MB010 invalid condition, MB025 no conditions here,
-- 42501.
create or replace function pgmb.subscribe(
  group_id text, patterns text[] default '{#}', equals jsonb default null, filter text default null,
  condition text default null, params jsonb default null, expires_after interval default null,
  stream text default 'main'
)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
  perform pgmb_internal.assert_reader(subscribe.stream);
  perform pgmb_internal.assert_name('group', subscribe.group_id);
  perform pgmb_internal.assert_no_endpoints(subscribe.group_id);
  return pgmb_internal.add_subscription(subscribe.group_id, subscribe.patterns, subscribe.equals, subscribe.filter,
    subscribe.condition, subscribe.params, subscribe.expires_after, subscribe.stream);
end $$;

-- Refuses a group that feeds endpoints, or has a name that is kept for one: what is subscribed there is matched by the
-- Dispatcher, for all of its endpoints. Errors: 42501.
create or replace function pgmb_internal.assert_no_endpoints(group_id text)
returns void
language plpgsql stable
as $$
begin
  if group_id ~ '^(webhooks|endpoint)(/|$)' or pgmb_internal.feeds_endpoints(group_id) then
    raise exception 'group % feeds endpoints', quote_literal(group_id) using errcode = '42501',
      hint = 'What it asks for is changed with pgmb.create_endpoint and pgmb.bind_endpoint, by admins.';
  end if;
end $$;

-- What subscribe does, of any group.
create or replace function pgmb_internal.add_subscription(
  group_id text, patterns text[], equals jsonb, filter text, condition text, params jsonb, expires_after interval,
  stream text
)
returns uuid
language plpgsql
as $$
declare
  compiled record;
  asked jsonb;
  made integer;
  given uuid;
  fields text[];
  amounts jsonb;
  identity bytea;
  stream_number integer := pgmb.stream_id(add_subscription.stream);
  -- A condition is matched by itself already.
  heavy boolean := add_subscription.condition is null and add_subscription.filter is not null;
begin
  compiled := pgmb.compile_patterns(add_subscription.patterns);
  perform pgmb_internal.assert_filter(add_subscription.equals, add_subscription.filter, add_subscription.params);
  heavy := heavy and pgmb_internal.is_costly(pgmb_internal.predicate(add_subscription.filter), add_subscription.params);
  if heavy and (
    select count(*) >= 100 from pgmb.subscription s
    where s.stream = stream_number and s.group_id = add_subscription.group_id and s.costly)
  then
    raise exception 'group % has 100 costly filters', quote_literal(add_subscription.group_id) using errcode = 'MB009',
      hint = 'A filter costs little without .**, a filter inside another, and long lists in params.';
  end if;
  add_subscription.condition := pgmb_internal.compile_condition(add_subscription.condition);
  select array_agg(f.path::text order by f.path), jsonb_agg(f.value order by f.path) into fields, amounts
  from pgmb_internal.equal_fields(add_subscription.equals) f;
  asked := jsonb_build_array(add_subscription.patterns, fields, pgmb_internal.predicate(add_subscription.filter)::text, add_subscription.condition);
  select h.id into made from pgmb.shape h where h.digest = sha256(convert_to(asked::text, 'UTF8'))
  for key share;
  if made is null then
    insert into pgmb.shape as h (patterns, topics, regex, fields, filter, payload_filter, condition, digest)
    values (add_subscription.patterns, compiled.topics, compiled.regex, coalesce(fields, '{}'), pgmb_internal.predicate(add_subscription.filter),
      pgmb_internal.payload_predicate(pgmb_internal.predicate(add_subscription.filter)), add_subscription.condition, sha256(convert_to(asked::text, 'UTF8')))
    on conflict (digest) do update set digest = excluded.digest
    returning h.id into made;
  end if;
  identity := sha256(convert_to(jsonb_build_array(add_subscription.group_id, stream_number, made,
    coalesce(add_subscription.params, '{}'), coalesce(amounts, '[]'))::text, 'UTF8'));
  -- A permanent subscription is not written again by each equal call.
  select s.id into given from pgmb.subscription s
  where s.digest = identity and num_nonnulls(s.expires_after, add_subscription.expires_after, s.paused_at) = 0
  for key share;
  if given is not null then
    return given;
  end if;
  insert into pgmb.subscription as s (group_id, stream, shape, params, equals, costly, expires_after, expires_at, digest)
  values (add_subscription.group_id, stream_number, made, coalesce(add_subscription.params, '{}'), coalesce(amounts, '[]'),
    heavy, add_subscription.expires_after, clock_timestamp() + add_subscription.expires_after, identity)
  on conflict (digest) do update
  set expires_after = excluded.expires_after, active_at = clock_timestamp(), expires_at = excluded.expires_at,
    paused_at = null, paused_reason = null
  returning s.id into given;
  return given;
end $$;

-- Ends a subscription. True if there was one. Errors: MB004 it is an endpoint's.
create or replace function pgmb.unsubscribe(id uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_reader(t.name)
  from pgmb.subscription s join pgmb.stream t on t.id = s.stream where s.id = unsubscribe.id;
  if exists (select from pgmb.endpoint e where e.subscription = unsubscribe.id) then
    raise exception 'subscription % is an endpoint''s', unsubscribe.id using errcode = 'MB004',
      hint = 'It ends with the endpoint: pgmb.drop_endpoint(name).';
  end if;
  delete from pgmb.subscription s where s.id = unsubscribe.id;
  return found;
end $$;

-- Prevents subscriptions in use from expiring. Returns those that exist; subscribe again to missing ones. Cheap to
-- repeat: a row is written at most once in a quarter of its expires_after.
create or replace function pgmb.keep_subscriptions(ids uuid[])
returns setof uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_reader(t.name)
  from pgmb.stream t where t.id in (select s.stream from pgmb.subscription s where s.id = any (keep_subscriptions.ids));
  update pgmb.subscription s set active_at = now, expires_at = now + s.expires_after
  where s.id = any (keep_subscriptions.ids) and s.active_at not between now - s.expires_after / 4 and now;
  return query select s.id from pgmb.subscription s where s.id = any (keep_subscriptions.ids);
end $$;

-- Removes expired subscriptions, and shapes and conditions without subscriptions. Returns the number of subscriptions.
-- Called by maintain.
create or replace function pgmb_internal.expire_subscriptions(max integer default 1000)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
as $$
declare
  expired bigint;
  now timestamptz := clock_timestamp();
begin
  delete from pgmb.subscription s
  where s.id = any (array(
    select old.id from pgmb.subscription old
    where old.expires_at < now
      -- Not by not exists, which PostgreSQL may answer for all subscriptions at once.
      and (select true from pgmb.endpoint e where e.subscription = old.id limit 1) is null
    limit expire_subscriptions.max for update skip locked));
  get diagnostics expired = row_count;
  delete from pgmb.shape h
  where h.id = any (array(
    select unused.id from pgmb.shape unused
    -- As above.
    where (select true from pgmb.subscription s where s.shape = unused.id limit 1) is null
    limit expire_subscriptions.max for update skip locked));
  return expired;
end $$;

-- Drops compiled conditions that no subscription, binding or recent reader has any more, at most `max`, and returns how many: each takes
-- locks until the transaction ends. Called by maintain.
create or replace function pgmb_internal.drop_unused_conditions(max integer default 100)
returns bigint
language plpgsql
as $$
declare
  dropped bigint;
  now timestamptz := clock_timestamp();
begin
  -- Not while another session is about to use one of them.
  if not pgmb_internal.conditions_available() or not pg_try_advisory_xact_lock(pgmb_internal.lock_key('conditions')) then
    return 0;
  end if;
  delete from pgmb.condition c
  where c.digest = any (array(
    select unused.digest from pgmb.condition unused
    where not exists (select from pgmb.shape h where h.condition = unused.compiled)
      and not exists (select from pgmb.binding b where b.condition = unused.compiled)
      -- One further ahead was written by a clock that was wrong.
      and (unused.kept_until between now and now + interval '1 hour') is not true
    limit drop_unused_conditions.max));
  get diagnostics dropped = row_count;
  if dropped > 0 then
    perform pgmb_internal.forget_conditions(array(
      select pgmb_internal.condition_name(h.condition) from pgmb.shape h where h.condition is not null
      union select pgmb_internal.condition_name(b.condition) from pgmb.binding b where b.condition is not null
      union select pgmb_internal.condition_name(c.compiled) from pgmb.condition c));
  end if;
  return dropped;
end $$;

-- Lets paused subscriptions of a group be matched again, all or one. Returns how many.
create or replace function pgmb.resume_subscriptions(group_id text, id uuid default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  resumed bigint;
begin
  perform pgmb_internal.assert_reader(t.name)
  from pgmb.stream t
  where t.id in (select s.stream from pgmb.subscription s where s.group_id = resume_subscriptions.group_id);
  perform pgmb_internal.assert_no_endpoints(resume_subscriptions.group_id);
  update pgmb.subscription s set paused_at = null, paused_reason = null
  where s.group_id = resume_subscriptions.group_id and s.paused_at is not null
    and (resume_subscriptions.id is null or s.id = resume_subscriptions.id);
  get diagnostics resumed = row_count;
  return resumed;
end $$;

-- All subscriptions.
create or replace view pgmb.subscriptions as
select s.id, s.group_id, t.name stream, h.patterns,
  case when h.fields <> '{}' then (
    select jsonb_object_agg(f.field, f.value) from (
      select array_to_string(path::text[], '.') field, s.equals -> (place - 1)::integer value
      from unnest(h.fields) with ordinality f (path, place)) f) end equals,
  h.filter::text as filter, h.condition conditions_sql, s.params,
  s.expires_after expiry_interval, s.active_at last_active_at, s.created_at, s.paused_at, s.paused_reason
from pgmb.subscription s
join pgmb.shape h on h.id = s.shape
join pgmb.stream t on t.id = s.stream;
