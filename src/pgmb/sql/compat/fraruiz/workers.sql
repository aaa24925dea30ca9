-- Workers: the calls of fraruiz/pgmb. A worker is an endpoint; `create` makes a queue that feeds one, beside the views
-- that show it; `send` publishes to stream main under an id of the caller's.

-- Creates the HTTP endpoint that queues feed and returns its id. For an existing name, it changes the URL and the limit
-- and keeps the id. rps: maximum number of requests per second, over all of its queues; null for no limit.
-- Errors: MB003 invalid name, MB005 not an http or https URL or not a limit.
create or replace function pgmb.worker(name text, endpoint text, rps integer default null)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  registered uuid;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_name('worker', worker.name);
  perform pgmb_internal.assert_url(worker.endpoint);
  if worker.rps <= 0 then
    raise exception 'rps must be at least 1, got %', worker.rps using errcode = 'MB005',
      hint = 'At least 1, or null for no limit.';
  end if;
  perform pgmb_internal.reopen_endpoint(e.id) from pgmb.endpoint e where e.name = worker.name and e.url <> worker.endpoint;
  insert into pgmb.endpoint as e (name, url, rps)
  values (worker.name, worker.endpoint, worker.rps)
  on conflict on constraint endpoint_name_key do update set url = excluded.url, rps = excluded.rps, changed_at = clock_timestamp()
  returning e.id into registered;
  insert into pgmb.endpoint_activity (endpoint) values (registered) on conflict do nothing;
  return registered;
end $$;

-- Creates a queue on stream main that feeds a worker, and returns its id; with it the views pgmb.<name>_queue and
-- pgmb.<name>_dead_letter_queue. A queue of that name and pattern gets this worker and these retries and keeps its id.
--   binding_key   an AMQP pattern: in order.* the * is one word, in order.# the # is any number of words
--   max_retries   so often a message is tried again, with a growing delay, before it is a dead letter
--   worker_id     one that is not registered draws a warning
-- Errors: MB003 invalid name, MB005 no worker or not a number of retries, MB006 it exists and differs, MB007 invalid pattern.
create or replace function pgmb.create(name text, binding_key text, max_retries integer, worker_id uuid)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  made pgmb.queue;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if "create".worker_id is null then
    raise exception 'a queue needs a worker' using errcode = 'MB005',
      hint = 'One that consumers receive from is made with pgmb.create_queue(name, patterns).';
  end if;
  if not coalesce("create".max_retries between 0 and 2147483646, false) then
    raise exception 'max_retries must be at least 0, got %', coalesce("create".max_retries::text, 'null') using errcode = 'MB005',
      hint = '0 or more.';
  end if;
  if not exists (select from pgmb.endpoint e where e.id = "create".worker_id) then
    raise warning 'worker % is not registered: nothing delivers the messages of queue %',
      "create".worker_id, quote_literal("create".name)
      using hint = 'Register it with pgmb.worker(name, endpoint, rps), then create the queue again with the id that returns.';
  end if;
  perform pgmb.create_queue("create".name, array["create".binding_key], max_attempts => "create".max_retries + 1);
  update pgmb.queue q
  set endpoint = "create".worker_id, max_attempts = "create".max_retries + 1
  where q.name = "create".name
  returning q.* into made;
  perform pgmb_internal.create_queue_views(made);
  return made.uid;
end $$;

-- The same with the last two the other way round.
create or replace function pgmb.create(queue text, pattern text, worker uuid, retries integer default 5)
returns uuid
language sql
as $$
  select pgmb.create(queue, pattern, retries, worker)
$$;

-- Publishes a message to stream main under the id given, to be delivered when the caller's transaction commits, or once
-- `delay` has come: a time or a number of seconds, however far away. routing_key is the event's topic, body its payload.
-- Waits for a transaction that is sending under the same id. Errors: 23505 that id was sent within a day, MB005 no id,
-- MB040 a queue of the stream is full.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, headers jsonb, delay timestamptz)
returns void
language plpgsql
as $$
begin
  if send.id is null then
    raise exception 'a message needs an id' using errcode = 'MB005', hint = 'Create one with gen_random_uuid().';
  end if;
  if pgmb.claim_key('main', 'message ' || send.id, send.id, interval '1 day') is not null then
    raise exception 'message % was sent before', send.id using errcode = '23505',
      hint = 'It was delivered, or will be: nothing needs to be done if this is a repeated attempt.';
  end if;
  perform pgmb.publish(send.routing_key, send.body::json, headers => send.headers::json, id => send.id, at => send.delay);
end $$;

-- The same, with the delay in seconds.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, headers jsonb, delay double precision)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, headers, pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => delay))
$$;

-- The same without headers.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, delay timestamptz)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, null::jsonb, delay)
$$;

-- The same without headers, with the delay in seconds.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, delay double precision)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, null::jsonb, delay)
$$;

-- The same without a delay.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, headers jsonb)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, headers, null::timestamptz)
$$;

-- The same without a delay. Where the fourth argument is a literal of no type, it is the headers.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb, headers text)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, headers::jsonb, null::timestamptz)
$$;

-- The same without headers and delay.
create or replace function pgmb.send(id uuid, routing_key text, body jsonb)
returns void
language sql
as $$
  select pgmb.send(id, routing_key, body, null::jsonb, null::timestamptz)
$$;

-- The endpoints that queues feed; last_heartbeat: when a dispatcher last said that it lives. For admins.
create or replace view pgmb.workers as
select e.id, e.name, e.rps, e.url endpoint, e.created_at,
  (select max(d.heartbeat_at) from pgmb.dispatcher d) last_heartbeat
from pgmb.endpoint e;

-- Every queue, those without a worker too; several patterns have commas between them. For admins.
create or replace view pgmb.queues as
select q.uid id, q.name, array_to_string(b.patterns, ',') binding_key, q.endpoint worker_id,
  q.max_attempts - 1 max_retries, q.created_at
from pgmb.queue q
join pgmb.binding b on b.queue = q.id and b.version = q.bindings
where q.lane_of is null;
