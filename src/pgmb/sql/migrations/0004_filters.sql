-- Filters and conditions on queues, subscriptions of groups, endpoints.

alter table pgmb.queue
  drop column plain,
  add column equals jsonb,
  add column filter text,
  add column condition text,
  add column params jsonb,
  add column uid uuid not null default gen_random_uuid() unique,
  add column endpoint uuid,
  add column plain boolean not null generated always as (not ordered and max_in_flight is null and rps is null
    and ttl is null and max_length is null and lanes is null and lane_of is null
    and equals is null and filter is null and condition is null) stored;

alter table pgmb.binding
  add column equals jsonb,
  add column filter text,
  add column condition text,
  add column params jsonb;

alter table pgmb.claim add column chosen bigint[];

alter table pgmb.retry add column together bigint;

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
create type pgmb.subscriber as (
  id uuid,
  group_id text,
  params jsonb
);

create table pgmb.condition (
  digest bytea primary key,
  compiled text not null
);

create table pgmb.shape (
  id integer generated always as identity primary key,
  patterns text[] not null,
  topics text[],
  regex text,
  fields text[] not null default '{}',
  filter jsonpath,
  payload_filter jsonpath,
  condition text,
  digest bytea not null unique,
  created_at timestamptz not null default now()
);

create table pgmb.subscription (
  id uuid primary key default gen_random_uuid(),
  group_id text not null,
  stream integer not null references pgmb.stream on delete cascade,
  shape integer not null references pgmb.shape,
  params jsonb not null default '{}',
  equals jsonb not null default '[]',
  digest bytea not null unique,
  expires_after interval check (expires_after > interval '0'),
  active_at timestamptz not null default clock_timestamp(),
  created_at timestamptz not null default now(),
  paused_at timestamptz,
  paused_reason text,
  constraint group_name check (group_id ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$')
);
create index subscription_group on pgmb.subscription (stream, group_id, shape);
create index subscription_shape on pgmb.subscription (shape);
create index subscription_equals on pgmb.subscription using hash (equals) where equals <> '[]';
create index subscription_params on pgmb.subscription using gin (params jsonb_path_ops) with (fastupdate = off);
create index subscription_expiry on pgmb.subscription (active_at) where expires_after is not null;

create table pgmb.endpoint (
  id uuid primary key default gen_random_uuid(),
  name text not null unique check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  url text not null,
  rps integer check (rps > 0),
  created_at timestamptz not null default now()
);

create table pgmb.queue_view (
  queue integer not null references pgmb.queue on delete cascade,
  name name not null unique,
  primary key (queue, name)
);

-- Functions whose parameters changed since version 3.
drop function if exists pgmb.create_queue(text, text[], text, pgmb.position, interval, integer, interval, double precision,
  interval, double precision, boolean, integer, double precision, interval, bigint, text, text[], integer);
drop function if exists pgmb.bind(text, text[]);
drop function if exists pgmb.retry(uuid, bigint[], interval, text);
drop function if exists pgmb.settle_as_failed(uuid, bigint[], interval, text, text);
drop function if exists pgmb.fail_retried(pgmb.queue, uuid, bigint[], interval, text, text);
drop function if exists pgmb.fail_event(pgmb.queue, pgmb.event, bigint, integer, timestamptz, text, boolean, integer);
drop function if exists pgmb.write_claim(pgmb.claim, bigint, "char", integer, bigint, bigint, bigint, timestamptz, integer[]);
drop function if exists pgmb.stream_of(text);
