-- Endpoints: URLs that queues feed. The dispatcher posts; nothing here waits for the network.

-- Creates an endpoint for the events that match the patterns, fields, filter and condition (see create_queue), from now on,
-- and returns its id. An existing endpoint gets all of these settings and keeps its id, state, secrets and waiting
-- deliveries. A new URL ends throttling and tripping.
--   ordered          events with the same key are posted one at a time
--   batch            maximum number of events per request; a failed batch is retried unchanged
--   body             payload, with the rest in headers, or cloudevents: a structured CloudEvents document
--   rps              maximum number of requests per second, over all dispatchers
--   max_in_flight    maximum number of concurrent requests, over all dispatchers
--   timeout          of a request, up to 10 minutes
--   headers          additional headers, by name
--   gzip_above       compress bodies larger than this many bytes
--   retry_after      the delay after each failure, with 20 % jitter; after the last delay, a failure is a dead letter; null:
--                    the queue's backoff
--   log              which attempts to record: failures, or all; keep_response: with 1 KB of the response
--   id               of a new endpoint, so that its headers can be sealed for it before they are sent
--   queue            the queue that feeds it, shared with other endpoints and created if it does not exist. An endpoint
--                    that is ordered or takes batches has its own queue, named endpoint/<name>
-- Errors: MB001 no such stream, MB003 invalid name, MB005 invalid URL or header, 23514 a setting out of bounds, MB006 it is fed by another queue,
-- or another kind of queue, MB007 invalid pattern, MB009 invalid filter, MB010 invalid condition, 42501.
create or replace function pgmb.create_endpoint(
  name text, url text, patterns text[] default '{#}', equals jsonb default null, filter text default null,
  condition text default null, params jsonb default null, stream text default 'main',
  ordered boolean default false, batch integer default 1, body text default 'payload', rps integer default null,
  max_in_flight integer default 16, timeout interval default '15 seconds', headers jsonb default '{}',
  gzip_above integer default null,
  retry_after interval[] default '{0 s,5 s,5 min,30 min,2 h,5 h,10 h,14 h,20 h,24 h}',
  log text default 'failures', keep_response boolean default false, description text default null,
  metadata jsonb default '{}', queue text default null, id uuid default null
)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  former pgmb.endpoint;
  made uuid;
  asked uuid;
  fed record;
  own text := case when create_endpoint.ordered or create_endpoint.batch > 1
    then 'endpoint/' || create_endpoint.name end;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_name('endpoint', create_endpoint.name);
  perform pgmb_internal.assert_url(create_endpoint.url);
  perform pgmb_internal.assert_headers(create_endpoint.headers);
  if length(own) > 90 then
    raise exception 'invalid endpoint name: %', quote_literal(create_endpoint.name) using errcode = 'MB003',
      hint = 'Up to 81 characters, where a queue of its own is named after it.';
  end if;
  perform pgmb_internal.reopen_endpoint(e.id)
  from pgmb.endpoint e where e.name = create_endpoint.name and e.url <> create_endpoint.url;
  select * into former from pgmb.endpoint e where e.name = create_endpoint.name for no key update;
  if found and (former.subscription is null) <> (own is not null) then
    raise exception 'endpoint % has % queue of its own', quote_literal(create_endpoint.name),
      case when own is null then 'a' else 'no' end
      using errcode = 'MB006', hint = 'Drop and recreate it, or use another name.';
  end if;
  if own is null then
    select s.group_id queue, t.name stream into fed
    from pgmb.subscription s join pgmb.stream t on t.id = s.stream where s.id = former.subscription;
    create_endpoint.queue := coalesce(create_endpoint.queue, fed.queue, pgmb_internal.shared_queue(create_endpoint.stream));
    if (fed.queue, fed.stream) <> (create_endpoint.queue, create_endpoint.stream) then
      raise exception 'endpoint % is fed by queue % of stream %', quote_literal(create_endpoint.name),
        quote_literal(fed.queue), quote_literal(fed.stream)
        using errcode = 'MB006', hint = 'Drop and recreate it, or use another name.';
    end if;
    perform pgmb_internal.share_queue(create_endpoint.queue, create_endpoint.stream);
    asked := pgmb_internal.add_subscription(create_endpoint.queue, create_endpoint.patterns, create_endpoint.equals,
      create_endpoint.filter, create_endpoint.condition, create_endpoint.params, null, create_endpoint.stream);
  elsif create_endpoint.queue is not null then
    raise exception 'an endpoint that is ordered or takes batches has a queue of its own' using errcode = 'MB005',
      hint = 'Leave `queue` out.';
  end if;
  insert into pgmb.endpoint as e (id, name, url, rps, subscription, after_seq, description, metadata, body, batch, timeout, headers,
    gzip_above, max_in_flight, retry_after, log, keep_response)
  values (coalesce(create_endpoint.id, gen_random_uuid()), create_endpoint.name, create_endpoint.url, create_endpoint.rps, asked,
    pgmb_internal.last_seq(create_endpoint.stream), create_endpoint.description,
    coalesce(create_endpoint.metadata, '{}'), create_endpoint.body, create_endpoint.batch, create_endpoint.timeout,
    coalesce(create_endpoint.headers, '{}'), create_endpoint.gzip_above, create_endpoint.max_in_flight,
    create_endpoint.retry_after, create_endpoint.log, create_endpoint.keep_response)
  on conflict on constraint endpoint_name_key do update
  set url = excluded.url, rps = excluded.rps, subscription = excluded.subscription, description = excluded.description,
    metadata = excluded.metadata, body = excluded.body, batch = excluded.batch, timeout = excluded.timeout,
    headers = excluded.headers, gzip_above = excluded.gzip_above, max_in_flight = excluded.max_in_flight,
    retry_after = excluded.retry_after, log = excluded.log, keep_response = excluded.keep_response,
    changed_at = clock_timestamp()
  returning e.id into made;
  insert into pgmb.endpoint_activity (endpoint) values (made) on conflict do nothing;
  if own is not null then
    perform pgmb_internal.feed_endpoint(made, own, create_endpoint.stream, create_endpoint.ordered, create_endpoint.retry_after,
      create_endpoint.patterns, create_endpoint.equals, create_endpoint.filter, create_endpoint.condition,
      create_endpoint.params);
  end if;
  if former.subscription <> asked then
    perform pgmb_internal.forget_subscription(former.subscription);
  end if;
  if pgmb_internal.live_dispatchers() = 0 then
    raise notice 'no dispatcher runs: nothing posts the events of endpoint %', quote_literal(create_endpoint.name)
      using hint = 'Run pgmb serve, or pgmb dispatcher.';
  end if;
  return made;
end $$;

-- Changes some settings of an endpoint: see create_endpoint. Null leaves one as it is; rps => 0 and gzip_above => -1 take
-- those away. A new URL ends throttling and tripping. Errors: MB060 no such endpoint, MB005 invalid URL or header, 23514 a setting out of bounds, MB006 batches for one that shares a
-- queue.
create or replace function pgmb.alter_endpoint(
  name text, url text default null, batch integer default null, body text default null, rps integer default null,
  max_in_flight integer default null, timeout interval default null, headers jsonb default null,
  gzip_above integer default null, retry_after interval[] default null, log text default null,
  keep_response boolean default null, description text default null, metadata jsonb default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  altered pgmb.endpoint;
begin
  perform pgmb_internal.assert_admin();
  if alter_endpoint.url is not null then
    perform pgmb_internal.assert_url(alter_endpoint.url);
  end if;
  perform pgmb_internal.assert_headers(alter_endpoint.headers);
  perform pgmb_internal.reopen_endpoint(e.id)
  from pgmb.endpoint e where e.name = alter_endpoint.name and e.url <> alter_endpoint.url;
  update pgmb.endpoint e
  set url = coalesce(alter_endpoint.url, e.url), batch = coalesce(alter_endpoint.batch, e.batch),
    body = coalesce(alter_endpoint.body, e.body), rps = nullif(coalesce(alter_endpoint.rps, e.rps), 0),
    max_in_flight = coalesce(alter_endpoint.max_in_flight, e.max_in_flight),
    timeout = coalesce(alter_endpoint.timeout, e.timeout), headers = coalesce(alter_endpoint.headers, e.headers),
    gzip_above = nullif(coalesce(alter_endpoint.gzip_above, e.gzip_above), -1),
    retry_after = coalesce(alter_endpoint.retry_after, e.retry_after), log = coalesce(alter_endpoint.log, e.log),
    keep_response = coalesce(alter_endpoint.keep_response, e.keep_response),
    description = coalesce(alter_endpoint.description, e.description),
    metadata = coalesce(alter_endpoint.metadata, e.metadata), changed_at = clock_timestamp()
  where e.id = pgmb_internal.endpoint_id(alter_endpoint.name)
  returning e.* into altered;
  if altered.batch > 1 and altered.subscription is not null then
    raise exception 'endpoint % has no queue of its own', quote_literal(alter_endpoint.name)
      using errcode = 'MB006', hint = 'Endpoints with batches need their own queue: drop and recreate the endpoint.';
  end if;
  if alter_endpoint.retry_after is not null then
    perform pgmb_internal.set_max_attempts('endpoint/' || altered.name, altered.id, altered.retry_after);
  end if;
end $$;

-- Replaces what an endpoint asks of events, patterns and filter, from its queue's position on. See create_queue. Errors:
-- MB060 no such endpoint, MB002 a worker that has no queue of its own, MB007 invalid pattern, MB009 invalid filter, MB010 not a
-- condition, 42501.
create or replace function pgmb.bind_endpoint(
  name text, patterns text[], equals jsonb default null, filter text default null, condition text default null,
  params jsonb default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  bound pgmb.endpoint;
  asked uuid;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  select * into bound from pgmb.endpoint e where e.id = pgmb_internal.endpoint_id(bind_endpoint.name) for no key update;
  if bound.subscription is null then
    perform pgmb.bind('endpoint/' || bound.name, bind_endpoint.patterns, bind_endpoint.equals, bind_endpoint.filter,
      bind_endpoint.condition, bind_endpoint.params,
      num_nonnulls(bind_endpoint.equals, bind_endpoint.filter, bind_endpoint.condition, bind_endpoint.params) = 0);
    return;
  end if;
  select pgmb_internal.add_subscription(s.group_id, bind_endpoint.patterns, bind_endpoint.equals, bind_endpoint.filter,
    bind_endpoint.condition, bind_endpoint.params, null, t.name)
  into asked
  from pgmb.subscription s join pgmb.stream t on t.id = s.stream where s.id = bound.subscription;
  update pgmb.endpoint e
  set subscription = asked, changed_at = clock_timestamp(),
    unchanged_since = case when asked = e.subscription then e.unchanged_since else clock_timestamp() end
  where e.id = bound.id;
  if asked <> bound.subscription then
    perform pgmb_internal.forget_subscription(bound.subscription);
  end if;
end $$;

-- The queue that endpoints of a stream share unless they name another.
create or replace function pgmb_internal.shared_queue(stream text)
returns text
language sql immutable
as $$
  select case stream when 'main' then 'webhooks' else 'webhooks/' || stream end
$$;

-- Makes a queue for endpoints to share where there is none, and keeps it from being dropped until this transaction ends.
-- Errors: MB006 it cannot be shared.
create or replace function pgmb_internal.share_queue(name text, stream text)
returns void
language plpgsql
as $$
declare
  shared pgmb.queue;
begin
  loop
    select * into shared from pgmb.queue q where q.name = share_queue.name for key share;
    exit when found;
    perform pgmb.create_queue(share_queue.name, stream => share_queue.stream, max_attempts => 100, lease_for => '10 seconds');
  end loop;
  if shared.endpoint is not null or shared.ordered or shared.lane_of is not null or shared.stream_name <> share_queue.stream then
    raise exception 'queue % cannot be shared by endpoints of stream %', quote_literal(share_queue.name),
      quote_literal(share_queue.stream) using errcode = 'MB006',
      hint = 'It is ordered, feeds one endpoint, or reads another stream: name another queue.';
  end if;
  -- Readers subscribed to the group before endpoints shared it.
  delete from pgmb.subscription s
  where s.group_id = share_queue.name and not exists (select from pgmb.endpoint e where e.subscription = s.id);
end $$;

-- Drops the queue that endpoints of a stream share by default once none is left: it would never advance, and the log
-- would be kept for it.
create or replace function pgmb_internal.unshare_queue(name text, stream text)
returns void
language plpgsql
as $$
begin
  if name <> pgmb_internal.shared_queue(stream) then
    return;
  end if;
  -- Waits for those who are about to share it.
  perform from pgmb.queue q where q.name = unshare_queue.name for update;
  if found and not pgmb_internal.feeds_endpoints(name) then
    perform pgmb.drop_queue(name);
  end if;
end $$;

-- Whether endpoints share a queue, or one has it for its own.
create or replace function pgmb_internal.feeds_endpoints(queue text)
returns boolean
language sql stable
as $$
  select exists (
    select from pgmb.endpoint e join pgmb.subscription s on s.id = e.subscription where s.group_id = feeds_endpoints.queue)
    or exists (
      select from pgmb.queue q join pgmb.endpoint e on e.id = q.endpoint
      where q.name = feeds_endpoints.queue and q.name = 'endpoint/' || e.name)
$$;

-- Has the queue of an endpoint's own try events as often as its schedule says.
create or replace function pgmb_internal.set_max_attempts(queue text, endpoint uuid, retry_after interval[])
returns void
language sql
as $$
  update pgmb.queue q set max_attempts = cardinality(retry_after) + 1
  from pgmb.queue head
  where head.name = set_max_attempts.queue and head.endpoint = set_max_attempts.endpoint and head.id in (q.id, q.lane_of)
    and retry_after is not null
$$;

-- Gives an endpoint a queue of its own, or has the one it has ask for this.
create or replace function pgmb_internal.feed_endpoint(
  endpoint uuid, queue text, stream text, ordered boolean, retry_after interval[], patterns text[], equals jsonb, filter text,
  condition text, params jsonb
)
returns void
language plpgsql
as $$
begin
  if not exists (select from pgmb.queue q where q.name = feed_endpoint.queue) then
    perform pgmb.create_queue(feed_endpoint.queue, feed_endpoint.patterns, feed_endpoint.stream,
      lease_for => '10 seconds', ordered => feed_endpoint.ordered, equals => feed_endpoint.equals,
      filter => feed_endpoint.filter, condition => feed_endpoint.condition, params => feed_endpoint.params);
    update pgmb.queue q set endpoint = feed_endpoint.endpoint where q.name = feed_endpoint.queue;
  else
    if exists (select from pgmb.queue q where q.name = feed_endpoint.queue
      and ((q.ordered, q.stream_name) <> (feed_endpoint.ordered, feed_endpoint.stream)
        or q.endpoint is distinct from feed_endpoint.endpoint))
    then
      raise exception 'queue % exists with another order or stream, or for something else', quote_literal(feed_endpoint.queue)
        using errcode = 'MB006', hint = 'Drop and recreate the endpoint, or use another name.';
    end if;
    perform pgmb.bind(feed_endpoint.queue, feed_endpoint.patterns, feed_endpoint.equals, feed_endpoint.filter,
      feed_endpoint.condition, feed_endpoint.params,
      num_nonnulls(feed_endpoint.equals, feed_endpoint.filter, feed_endpoint.condition, feed_endpoint.params) = 0);
  end if;
  perform pgmb_internal.set_max_attempts(feed_endpoint.queue, feed_endpoint.endpoint, feed_endpoint.retry_after);
end $$;

-- Ends a subscription that no endpoint has any more.
create or replace function pgmb_internal.forget_subscription(subscription uuid)
returns void
language plpgsql
as $$
begin
  -- Waits for those who are about to ask the same.
  perform from pgmb.subscription s where s.id = forget_subscription.subscription for update;
  delete from pgmb.subscription s
  where s.id = forget_subscription.subscription
    and not exists (select from pgmb.endpoint e where e.subscription = s.id);
end $$;

-- Refuses headers that are not names with texts, or that a request sets itself. Errors: MB005.
create or replace function pgmb_internal.assert_headers(headers jsonb)
returns void
language plpgsql immutable
as $$
declare
  wrong text;
begin
  if jsonb_typeof(headers) <> 'object' then
    raise exception 'headers are an object of names and texts' using errcode = 'MB005';
  end if;
  select h.name into wrong
  from jsonb_each(headers) h (name, value)
  where h.name !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]{1,200}$'
    or jsonb_typeof(h.value) <> 'string' or h.value #>> '{}' ~ '[\x01-\x08\x0a-\x1f\x7f]' or length(h.value #>> '{}') > 8000
    or lower(h.name) ~ '^(ce-.*|webhook-.*|pgmb-.*|content-(type|length|encoding)|host|connection|keep-alive|te|trailer|transfer-encoding|upgrade|expect|proxy-.*|idempotency-key)$'
  limit 1;
  if wrong is not null then
    raise exception 'invalid endpoint header: %', quote_literal(left(wrong, 100)) using errcode = 'MB005',
      hint = 'A name and a text without control characters; those that every request sets are not to be set.';
  end if;
end $$;

-- The id of the endpoint of that name. Errors: MB060.
create or replace function pgmb_internal.endpoint_id(name text)
returns uuid
language plpgsql stable
as $$
declare
  found_id uuid := (select e.id from pgmb.endpoint e where e.name = endpoint_id.name);
begin
  if found_id is null then
    raise exception 'no endpoint is named %', coalesce(quote_literal(endpoint_id.name), 'null') using errcode = 'MB060',
      hint = 'Create it with pgmb.create_endpoint(name, url).';
  end if;
  return found_id;
end $$;

-- Ends throttling and tripping of an endpoint, and forgets since when it fails.
create or replace function pgmb_internal.reopen_endpoint(endpoint uuid)
returns void
language plpgsql
as $$
begin
  -- Locked before the endpoint's own row, as in a heartbeat.
  update pgmb.endpoint_activity a set failing_since = null where a.endpoint = reopen_endpoint.endpoint;
  update pgmb.endpoint e set state = 'active', reason = null, probe_at = null, trips = 0, changed_at = clock_timestamp()
  where e.id = reopen_endpoint.endpoint and e.state in ('throttled', 'tripped');
end $$;

-- Whether an endpoint is a worker: its queues were made for it (pgmb.create), and no other endpoint's events wait there.
create or replace function pgmb_internal.is_worker(endpoint pgmb.endpoint)
returns boolean
language sql stable
as $$
  select endpoint.subscription is null
    and not exists (select from pgmb.queue q where q.endpoint = endpoint.id and q.name = 'endpoint/' || endpoint.name)
$$;

-- Ends an endpoint, with what waits for it, its attempts and dead letters, and the queue of its own if it has one. True
-- if there was one. A queue that was made for a worker stays and keeps its events.
create or replace function pgmb.drop_endpoint(name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  gone pgmb.endpoint;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  -- Locked first: a dispatcher adds to the counts that are kept below.
  select e.* into gone from pgmb.endpoint e where e.name = drop_endpoint.name for update;
  if gone.id is null then
    return false;
  end if;
  update pgmb.installation i
  set dropped_delivered = i.dropped_delivered + a.delivered, dropped_failed = i.dropped_failed + a.failed
  from pgmb.endpoint_activity a where a.endpoint = gone.id and a.delivered + a.failed > 0;
  delete from pgmb.endpoint e where e.id = gone.id;
  delete from pgmb.dead d where d.endpoint = gone.id;
  perform pgmb.drop_queue(q.name) from pgmb.queue q
  where q.endpoint = gone.id and q.name = 'endpoint/' || gone.name;
  perform pgmb_internal.unshare_queue(s.group_id, t.name)
  from pgmb.subscription s join pgmb.stream t on t.id = s.stream where s.id = gone.subscription;
  perform pgmb_internal.forget_subscription(gone.subscription);
  return true;
end $$;

-- Has an endpoint wait, active again, or off for good, and says why.
--   active    it gets what waited for it; failures of before are forgotten, also those of its filter or condition
--   paused    events wait for it
--   disabled  events do not wait for it, unless it has a queue of its own
-- Returns whether that changed anything. Errors: MB060 no such endpoint, MB005 not a state.
create or replace function pgmb.set_endpoint_state(name text, state text, reason text default null)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  target uuid;
  changed boolean;
begin
  perform pgmb_internal.assert_admin();
  target := pgmb_internal.endpoint_id(set_endpoint_state.name);
  if not coalesce(set_endpoint_state.state in ('active', 'paused', 'disabled'), false) then
    raise exception 'invalid endpoint state: %', coalesce(quote_literal(set_endpoint_state.state), 'null')
      using errcode = 'MB005', hint = 'active, paused or disabled.';
  end if;
  if set_endpoint_state.state = 'active' then
    -- Before the endpoint's own row, as a heartbeat has it.
    update pgmb.endpoint_activity a set failing_since = null where a.endpoint = target;
    with resumed as (
      update pgmb.subscription s set paused_at = null, paused_reason = null
      from pgmb.endpoint e where e.id = target and s.id = e.subscription and s.paused_at is not null
      returning s.id
    )
    update pgmb.endpoint e set unchanged_since = clock_timestamp() from resumed where e.subscription = resumed.id;
    changed := found;
    update pgmb.queue q set paused_at = null, paused_reason = null
    where q.endpoint = target and q.name = 'endpoint/' || set_endpoint_state.name and q.paused_at is not null;
    changed := changed or found;
  end if;
  update pgmb.endpoint e
  set state = set_endpoint_state.state, reason = set_endpoint_state.reason, probe_at = null, trips = 0,
    changed_at = clock_timestamp(), unchanged_since = case
      when 'disabled' in (e.state, set_endpoint_state.state) and e.state <> set_endpoint_state.state then clock_timestamp()
      else e.unchanged_since end
  where e.id = target and (e.state, e.reason) is distinct from (set_endpoint_state.state, set_endpoint_state.reason);
  return found or coalesce(changed, false);
end $$;

-- Adds a signing secret, encrypted by the caller. Older secrets also sign for `overlap`. Returns the secret's
-- number. Errors: MB060 no such endpoint.
create or replace function pgmb.add_endpoint_secret(name text, sealed bytea, overlap interval default '1 day')
returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  target uuid;
  made integer;
  now timestamptz := clock_timestamp();
begin
  perform pgmb_internal.assert_admin();
  target := pgmb_internal.endpoint_id(add_endpoint_secret.name);
  update pgmb.endpoint e set changed_at = clock_timestamp() where e.id = target;
  delete from pgmb.endpoint_secret s where s.endpoint = target and s.expires_at <= now;
  -- None of them signs for longer than that, nor for longer than it was to.
  update pgmb.endpoint_secret s
  set expires_at = least(s.expires_at, clock_timestamp() + coalesce(add_endpoint_secret.overlap, interval '0'))
  where s.endpoint = target;
  insert into pgmb.endpoint_secret (endpoint, sealed) values (target, add_endpoint_secret.sealed) returning id into made;
  return made;
end $$;

-- Takes a secret away at once, or all of them. Returns how many. Errors: MB060 no such endpoint.
create or replace function pgmb.drop_endpoint_secret(name text, secret integer default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  target uuid;
  gone bigint;
begin
  perform pgmb_internal.assert_admin();
  target := pgmb_internal.endpoint_id(drop_endpoint_secret.name);
  update pgmb.endpoint e set changed_at = clock_timestamp() where e.id = target;
  delete from pgmb.endpoint_secret s
  where s.endpoint = target and (drop_endpoint_secret.secret is null or s.id = drop_endpoint_secret.secret);
  get diagnostics gone = row_count;
  return gone;
end $$;

-- Fields and their values as `equals` has them; null without fields. Called by the view pgmb.endpoints. Support.
create or replace function pgmb.fields_object(fields text[], amounts jsonb)
returns jsonb
language plpgsql immutable
as $$
declare
  path text[];
  built jsonb;
begin
  for nth in 1 .. coalesce(cardinality(fields), 0) loop
    path := fields[nth]::text[];
    for depth in 1 .. cardinality(path) - 1 loop
      if coalesce(built, '{}') #> path[:depth] is null then
        built := jsonb_set(coalesce(built, '{}'), path[:depth], '{}');
      end if;
    end loop;
    built := jsonb_set(coalesce(built, '{}'), path, amounts -> (nth - 1));
  end loop;
  return built;
end $$;

-- Whether the queue that a subscription belongs to may hold events that it has not given yet: numbers were drawn since.
create or replace function pgmb_internal.may_hold_more(subscription uuid)
returns boolean
language sql volatile
as $$
  select coalesce(bool_or(newest.place < newest.upto or pg_sequence_last_value(q.numbers) > newest.upto), false)
  from pgmb.subscription s
  join pgmb.queue q on q.name = s.group_id
  cross join lateral pgmb_internal.queue_position(q.id) newest
  where s.id = may_hold_more.subscription
$$;

-- How many events wait for an endpoint, and the age of the oldest: retries, events that it could not take yet, and events that
-- match it and that its queue has not given to a dispatcher yet, leased or not. Of a shared queue, events that a dispatcher
-- holds do not count until they fail; a disabled endpoint gets none of those that were not received. Counted up to 10000, and
-- of shared queues for the first second of a statement, as each endpoint asks about the same events: then at_least names it.
-- Called by the view pgmb.endpoints. For admins. Support.
create or replace function pgmb.endpoint_backlog(endpoint uuid, out waiting bigint, out oldest_age interval, out at_least text[])
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  oldest timestamptz;
  target pgmb.endpoint;
  lane pgmb.queue;
  newest pgmb.claim;
  part record;
begin
  perform pgmb_internal.assert_admin();
  select count(*) into waiting
  from (select from pgmb.delivery d where d.endpoint = endpoint_backlog.endpoint limit 10001) counted;
  select min(d.published_at) into oldest from pgmb.delivery d where d.endpoint = endpoint_backlog.endpoint;
  at_least := '{}';
  for lane in
    select q.* from pgmb.queue head join pgmb.queue q on head.id in (q.id, q.lane_of)
    where head.endpoint = endpoint_backlog.endpoint and head.lane_of is null
  loop
    select * into newest from pgmb.claim c where c.queue = lane.id order by c.id desc limit 1;
    part := pgmb_internal.waiting_of(lane, newest, 10000);
    waiting := waiting + part.waiting;
    oldest := least(oldest, part.oldest);
    if not part.complete then
      at_least := '{waiting}';
    end if;
    part := pgmb_internal.lease_counts(lane.id, newest, statement_timestamp());
    waiting := waiting + part.events + part.lapsed;
    select count(*) events, min(r.published_at) oldest into part
    from (select r.published_at from pgmb.retry r where r.queue = lane.id and r.lease is null limit 10001) r;
    waiting := waiting + part.events;
    oldest := least(oldest, part.oldest);
  end loop;
  select * into target from pgmb.endpoint e where e.id = endpoint_backlog.endpoint;
  if target.subscription is not null and target.state <> 'disabled' and pgmb_internal.may_hold_more(target.subscription) then
    if clock_timestamp() > statement_timestamp() + interval '1 second' then
      at_least := '{waiting}';
    else
      lane := (select f from pgmb_internal.endpoint_feeds(target.name) f);
      newest := pgmb_internal.queue_position(lane.id);
      lane.matching := lane.matching || format(' and e.seq > %s', target.after_seq);
      part := pgmb_internal.waiting_of(lane, newest, 10000);
      waiting := waiting + part.waiting;
      oldest := least(oldest, part.oldest);
      if not part.complete then
        at_least := '{waiting}';
      end if;
    end if;
  end if;
  if waiting > 10000 then
    waiting := 10000;
    at_least := '{waiting}';
  end if;
  oldest_age := statement_timestamp() - oldest;
end $$;

-- Every endpoint: what it wants, how it is, and what it did. One whose filter or condition raised is paused, and why is
-- said. Of its headers the names; waiting, oldest_age and at_least as endpoint_backlog tells. For admins.
create or replace view pgmb.endpoints as
select e.id, e.name, e.url,
  case when e.state = 'active' and coalesce(own.paused_at, s.paused_at) is not null then 'paused' else e.state end state,
  coalesce(e.reason, own.paused_reason, s.paused_reason) reason,
  coalesce(own.name, s.group_id) queue, coalesce(own.stream_name, t.name) stream, coalesce(b.patterns, h.patterns) patterns,
  coalesce(b.equals, pgmb.fields_object(h.fields, s.equals)) equals,
  coalesce(b.filter, h.filter::text) as filter, coalesce(b.condition, h.condition) condition,
  coalesce(b.params, s.params, '{}') params, coalesce(own.ordered, false) ordered, e.batch, e.body, e.rps,
  e.max_in_flight, e.timeout, array(select n from jsonb_object_keys(e.headers) n order by n) headers, e.retry_after,
  e.gzip_above, e.log, e.keep_response, e.description, e.metadata,
  (select count(*) from pgmb.endpoint_secret k
    where k.endpoint = e.id and (k.expires_at is null or k.expires_at > statement_timestamp())) secrets,
  a.delivered, a.failed, a.delivered_at, a.failed_at, case when a.failing_since is not null then least(a.failing_since, statement_timestamp()) end failing_since, a.error,
  (pgmb.endpoint_backlog(e.id)).waiting,
  e.probe_at, e.created_at, e.changed_at,
  (pgmb.endpoint_backlog(e.id)).oldest_age, (pgmb.endpoint_backlog(e.id)).at_least
from pgmb.endpoint e
left join pgmb.endpoint_activity a on a.endpoint = e.id
left join lateral (
  select q.* from pgmb.queue q where q.endpoint = e.id and q.lane_of is null order by q.id limit 1) own on true
left join pgmb.binding b on b.queue = own.id and b.version = own.bindings
left join pgmb.subscription s on s.id = e.subscription
left join pgmb.shape h on h.id = s.shape
left join pgmb.stream t on t.id = s.stream;

-- How many requests to endpoints succeeded and failed, to those that were dropped as well. For admins.
create or replace function pgmb.endpoint_totals(out delivered bigint, out failed bigint)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  select i.dropped_delivered + coalesce(sum(a.delivered), 0), i.dropped_failed + coalesce(sum(a.failed), 0)
  into delivered, failed
  from pgmb.installation i left join pgmb.endpoint_activity a on true
  group by i.only_one;
end $$;

-- The endpoints for which something waits (endpoint_backlog), those first whose oldest event is oldest; at most `max`. Of the
-- endpoints that wait only for their shared queue to be received, those are looked at that got no event for longest. For admins.
create or replace function pgmb.endpoint_backlogs(
  max integer default 100, out endpoint text, out waiting bigint, out oldest_age interval, out at_least text[]
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  with recursive parked (endpoint) as (
    (select d.endpoint from pgmb.delivery d order by d.endpoint limit 1)
    union all
    select next.endpoint from parked p
    cross join lateral (
      select d.endpoint from pgmb.delivery d where d.endpoint > p.endpoint order by d.endpoint limit 1) next
  )
  select e.name, b.waiting, b.oldest_age, b.at_least
  from (select p.endpoint from parked p union select q.endpoint from pgmb.queue q where q.endpoint is not null
    union (
      select sharing.id from pgmb.endpoint sharing join pgmb.endpoint_activity a on a.endpoint = sharing.id
      where sharing.subscription is not null and sharing.state <> 'disabled'
      order by a.delivered_at nulls first limit endpoint_backlogs.max)) one
  join pgmb.endpoint e on e.id = one.endpoint
  cross join lateral pgmb.endpoint_backlog(e.id) b
  where b.waiting > 0
  order by b.oldest_age desc nulls last limit endpoint_backlogs.max;
end $$;

-- Refuses what is not a plain http or https URL. Whether its host may be reached is asked when it is. Errors: MB005.
create or replace function pgmb_internal.assert_url(url text)
returns void
language plpgsql immutable
as $$
begin
  if url is null or length(url) > 2000
    -- A host, or an IPv6 address in brackets; a port; and no blank, control character or backslash anywhere.
    or url !~* '^https?://([^][\x01-\x20\x7f/?#@:\\"<>]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?([/?#][^\x01-\x20\x7f\\"<>]*)?$'
    or coalesce(substring(url from '^[^/]*//(?:\[[^]]*\]|[^][/?#:]*):([0-9]+)')::integer, 1) not between 1 and 65535
  then
    raise exception 'invalid endpoint URL: %', coalesce(quote_literal(left(url, 100)), 'null') using errcode = 'MB005',
      hint = 'http://host/path or https://host:port/path, without a user and a password, of at most 2000 characters.';
  end if;
end $$;
