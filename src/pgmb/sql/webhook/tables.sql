-- Endpoints: HTTP destinations that queues feed, what waits for one of them, and what was tried.

-- Of one with a queue of its own (pgmb.queue.endpoint) the queue says what it wants; the others are subscriptions of the
-- group that has the name of the queue that they share.
create table pgmb.endpoint (
  id uuid primary key default gen_random_uuid(),
  name text not null unique
    constraint "an endpoint must have a name" check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  url text not null,
  rps integer constraint "rps must be at least 1" check (rps > 0),
  created_at timestamptz not null default now(),
  subscription uuid references pgmb.subscription,
  -- The last number of the stream when it was created: a shared queue may still hold events from before.
  after_seq bigint not null default 0,
  description text,
  metadata jsonb not null default '{}',
  -- What is posted: the payload with the rest in headers, or a CloudEvents document.
  body text not null default 'payload'
    constraint "body must be payload or cloudevents" check (body in ('payload', 'cloudevents')),
  -- Maximum number of events per request.
  batch integer not null default 1 constraint "batch must be between 1 and 1000" check (batch between 1 and 1000),
  timeout interval not null default '15 seconds'
    constraint "timeout must be more than 0 and at most 10 minutes" check (timeout > interval '0' and timeout <= interval '10 minutes'),
  headers jsonb not null default '{}' constraint "headers must be an object" check (jsonb_typeof(headers) = 'object'),
  -- Bodies of more bytes than this are compressed.
  gzip_above integer constraint "gzip_above must be 0 or more" check (gzip_above >= 0),
  max_in_flight integer not null default 16 constraint "max_in_flight must be at least 1" check (max_in_flight > 0),
  -- When to try again after each failure; null: as the queue says.
  retry_after interval[]
    constraint "retry_after must have at most 100 intervals, none of them null" check (array_position(retry_after, null) is null and cardinality(retry_after) <= 100),
  -- Which attempts are written down, and whether with what came back.
  log text not null default 'failures' constraint "log must be failures or all" check (log in ('failures', 'all')),
  keep_response boolean not null default false,
  --   active     events are posted
  --   paused     by an operator: they wait
  --   throttled  it asked for time (Retry-After): they wait until probe_at, when one of them tests it
  --   tripped    it failed too often: they wait until probe_at, when one of them tests it
  --   disabled   it is gone, or failed for days: those that share a queue do not get events any more
  state text not null default 'active'
    constraint "state must be active, paused, throttled, tripped or disabled" check (state in ('active', 'paused', 'throttled', 'tripped', 'disabled')),
  reason text,
  probe_at timestamptz,
  trips integer not null default 0,
  -- Since when it has wanted the same: its subscription has not changed and was not paused, and it has been disabled or not.
  -- By that is known whether an event that the shared queue has passed was sent (pgmb_internal.endpoint_fates).
  unchanged_since timestamptz not null default now(),
  -- Of the row, for those who keep a copy.
  changed_at timestamptz not null default clock_timestamp()
);
create index endpoint_subscription on pgmb.endpoint (subscription) where subscription is not null;
create index endpoint_changed on pgmb.endpoint (changed_at);

-- What requests are signed with, sealed: the key is not in the database. Several while they are replaced.
create table pgmb.endpoint_secret (
  endpoint uuid not null references pgmb.endpoint on delete cascade,
  id integer generated always as identity,
  sealed bytea not null,
  created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz,
  primary key (endpoint, id)
);
create index endpoint_secret_expiry on pgmb.endpoint_secret (expires_at) where expires_at is not null;

-- What an endpoint has done lately, and what it may do: written often, and by many.
create table pgmb.endpoint_activity (
  endpoint uuid primary key references pgmb.endpoint on delete cascade,
  delivered bigint not null default 0,
  failed bigint not null default 0,
  delivered_at timestamptz,
  failed_at timestamptz,
  -- Since when nothing was delivered and something failed.
  failing_since timestamptz,
  error text,
  -- Of rps: the requests up to this moment were given away.
  paid_until timestamptz not null default '-infinity'
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- Processes that deliver. Each says every few seconds that it lives.
create table pgmb.dispatcher (
  id uuid primary key,
  host text not null,
  pid integer not null,
  started_at timestamptz not null default clock_timestamp(),
  heartbeat_at timestamptz not null default clock_timestamp(),
  -- The server processes of its connections.
  backends integer[] not null default '{}'
);

-- Events of a shared queue that wait for one endpoint: to be tried again, or because it could not take them. Their payloads and
-- headers are in the log until their segment goes (webhook/body.sql), so that none is stored once for each endpoint, and none
-- holds back retention.
create table pgmb.delivery (
  id bigint generated always as identity primary key,
  queue integer not null references pgmb.queue on delete cascade,
  endpoint uuid not null references pgmb.endpoint on delete cascade,
  -- While leased, the lease and its expiry; otherwise null and the time to try.
  due_at timestamptz not null,
  -- When due_at was decided.
  decided_at timestamptz not null default clock_timestamp(),
  lease uuid,
  attempt integer not null,
  error text,
  seq bigint not null,
  event_id uuid not null,
  topic text not null,
  key text,
  -- Null: as the log has them.
  payload json,
  headers json,
  published_at timestamptz not null,
  -- The last attempts that failed, the newest last; the server process that leased it.
  errors jsonb,
  pid integer
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index delivery_event on pgmb.delivery (event_id);
create index delivery_due on pgmb.delivery (endpoint, due_at);
create index delivery_decided on pgmb.delivery (decided_at);
create index delivery_time on pgmb.delivery (due_at);
create index delivery_oldest on pgmb.delivery (endpoint, published_at);
create index delivery_queue on pgmb.delivery (queue, seq);
create index delivery_lease on pgmb.delivery (lease) where lease is not null;
-- Keys and what may quote a payload are not sampled: pg_statistic would keep them after an erasure.
alter table pgmb.delivery alter column key set statistics 0, alter column error set statistics 0,
  alter column errors set statistics 0;

-- Delivery attempts: failures, and all attempts of endpoints with log = 'all'.
create table pgmb.attempt (
  id bigint generated always as identity primary key,
  endpoint uuid not null references pgmb.endpoint on delete cascade,
  at timestamptz not null default clock_timestamp(),
  seq bigint,
  event_id uuid,
  topic text,
  attempt integer not null,
  -- Null where nothing came back.
  status integer,
  seconds real not null,
  -- What went wrong, in a word; null where nothing did.
  error text,
  detail text,
  response text constraint "a response must have at most 4096 bytes" check (octet_length(response) <= 4096)
) with (autovacuum_vacuum_scale_factor = 0.02);
create index attempt_endpoint on pgmb.attempt (endpoint, id);
create index attempt_at on pgmb.attempt (at);
create index attempt_event on pgmb.attempt (event_id);
alter table pgmb.attempt alter column detail set statistics 0, alter column response set statistics 0;
