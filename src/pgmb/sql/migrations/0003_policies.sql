-- Queues with an order, limits, lanes; deduplication; schedules.

alter table pgmb.queue
  add column ordered boolean not null default false,
  add column max_in_flight integer check (max_in_flight > 0),
  add column rps double precision check (rps > 0),
  add column ttl interval check (ttl > interval '0'),
  add column max_length bigint check (max_length > 0),
  add column when_full text not null default 'refuse' check (when_full in ('refuse', 'drop_oldest')),
  add column lanes text[],
  add column lane integer not null default 0,
  add column lane_of integer references pgmb.queue on delete cascade,
  add column shards integer not null default 1,
  add column plain boolean not null generated always as (not ordered and max_in_flight is null and rps is null
    and ttl is null and max_length is null and lanes is null and lane_of is null) stored;
create index queue_lane_of on pgmb.queue (lane_of) where lane_of is not null;

alter table pgmb.claim
  add column keys integer[],
  add column open bigint[],
  add column paid_until timestamptz;

alter table pgmb.retry
  drop constraint retry_queue_fkey,
  add column ordered boolean not null default false,
  add column origin bigint not null default 0,
  add column expiries integer not null default 0;
create index retry_leased on pgmb.retry (queue, due_at) where lease is not null;
create index retry_key on pgmb.retry (queue, key, origin, seq) where ordered;

create table pgmb.dedup (
  stream text not null,
  key text not null,
  id uuid not null,
  expires_at timestamptz not null,
  primary key (stream, key)
) with (autovacuum_vacuum_scale_factor = 0.02);
create index dedup_expiry on pgmb.dedup (expires_at);
alter table pgmb.dedup enable row level security;

create table pgmb.schedule (
  name text primary key check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  cron text not null,
  timezone text not null default 'UTC',
  stream text not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  next_at timestamptz,
  last_at timestamptz,
  paused_at timestamptz,
  created_at timestamptz not null default now(),
  missed text not null default 'last' check (missed in ('last', 'all'))
);
create index schedule_next on pgmb.schedule (next_at) where paused_at is null;

-- Functions whose parameters changed; those that version 1 had otherwise went with version 2.
drop function pgmb.publish(text, json, text, json, text, uuid, interval, timestamptz);
drop function pgmb.publish_many(text[], json[], text[], json[], uuid[], text);
drop function pgmb.create_queue(text, text[], text, pgmb.position, interval, integer, interval, double precision,
  interval, double precision);
drop function pgmb.alter_queue(text, interval, integer, interval, double precision, interval, double precision);
drop function pgmb.fail_event(pgmb.queue, pgmb.event, integer, timestamptz, text, boolean);
drop function pgmb.receive_due(integer, integer, timestamptz, timestamptz);
drop function pgmb.settle_as_failed(uuid, bigint[], interval, text, boolean);
drop function pgmb.write_claim(pgmb.claim, bigint, "char", integer, bigint, bigint, bigint, timestamptz);
drop function if exists pgmb.batch_events(
  integer, pg_snapshot, bigint, xid8, pg_snapshot, xid8, bigint, bigint, bigint, text, bigint);
drop function pgmb.clear_settled(integer);
