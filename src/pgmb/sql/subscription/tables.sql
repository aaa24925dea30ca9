-- Subscriptions: many readers of one group, matched together. Those of one shape ask the same of an event and differ
-- in their values alone, so that one statement matches them all.

-- What a condition sees as e: an event whose payload and headers are jsonb, null where jsonb cannot hold them.
-- metadata is another name of headers; event is {topic, key, payload, headers}, what filters look at.
create type pgmb.document as (
  seq bigint,
  id text,
  topic text,
  key text,
  payload jsonb,
  headers jsonb,
  metadata jsonb,
  published_at timestamptz,
  event jsonb
);

-- What a condition sees as s: whose params are asked for.
create type pgmb.subscriber as (
  id uuid,
  group_id text,
  params jsonb
);

-- Conditions that were checked, as the server writes them (pgmb_internal.compile_condition).
create table pgmb.condition (
  -- SHA-256 of the text as it was given.
  digest bytea primary key,
  compiled text not null,
  -- Readers that leave no trace use it until then (pgmb.passing_events).
  kept_until timestamptz
);

create table pgmb.shape (
  id integer generated always as identity primary key,
  patterns text[] not null constraint "patterns must have at most 65536 bytes" check (pg_column_size(patterns) <= 65536),
  -- The patterns compiled (pgmb.compile_patterns).
  topics text[],
  regex text,
  -- The fields that must be equal, for example {payload,room}; a subscription holds their values in this order.
  fields text[] not null default '{}',
  -- A jsonpath predicate on the event; if it asks about the payload alone, the same on the payload.
  filter jsonpath,
  payload_filter jsonpath,
  condition text,
  -- SHA-256 of what was asked.
  digest bytea not null unique,
  created_at timestamptz not null default now()
);

create table pgmb.subscription (
  id uuid primary key default gen_random_uuid(),
  group_id text not null,
  stream integer not null references pgmb.stream on delete cascade,
  shape integer not null references pgmb.shape,
  params jsonb not null default '{}' constraint "params must have at most 65536 bytes" check (pg_column_size(params) <= 65536),
  equals jsonb not null default '[]' constraint "equals must have at most 65536 bytes" check (pg_column_size(equals) <= 65536),
  -- Whether its filter may take long with these params (pgmb_internal.is_costly): it is matched by itself, within a time.
  costly boolean not null default false,
  -- SHA-256 of group, stream, shape and values: equal subscriptions are one.
  digest bytea not null unique,
  expires_after interval constraint "expires_after must be more than 0" check (expires_after > interval '0'),
  active_at timestamptz not null default clock_timestamp(),
  -- active_at + expires_after.
  expires_at timestamptz,
  created_at timestamptz not null default now(),
  -- A subscription whose filter or condition raised is passed over until it is resumed.
  paused_at timestamptz,
  paused_reason text constraint "a reason must have at most 8192 bytes" check (octet_length(paused_reason) <= 8192),
  constraint "a group must have a name" check (group_id ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$')
);
create index subscription_group on pgmb.subscription (stream, group_id, shape);
create index subscription_shape on pgmb.subscription (shape);
create index subscription_equals on pgmb.subscription using hash (equals) where equals <> '[]';
create index subscription_params on pgmb.subscription using gin (params jsonb_path_ops) with (fastupdate = off);
create index subscription_active on pgmb.subscription (active_at) where expires_at is not null;
create index subscription_expiry on pgmb.subscription (expires_at);
