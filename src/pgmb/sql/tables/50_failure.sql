-- Failures: what is to be tried again, and what was given up. Rows carry the event itself, so that
-- neither holds back retention.

create table pgmb.retry (
  id bigint generated always as identity primary key,
  queue integer not null,
  -- When to try again; while leased infinity, and the claim (pgmb.claim.id) that holds the row.
  due_at timestamptz not null,
  lease bigint,
  attempt integer not null,
  error text,
  seq bigint not null,
  event_id uuid not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  published_at timestamptz not null,
  -- In an ordered queue, rows of one key are delivered in the order of the claim that met the event first,
  -- then of its number, and none before those ahead of it are settled.
  ordered boolean not null default false,
  origin bigint not null default 0,
  -- How often in a row its lease expired: whoever held it may have died of it.
  expiries integer not null default 0,
  -- Rows with the same number here failed together and are tried together, by themselves.
  together bigint
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index retry_due on pgmb.retry (queue, due_at);
create index retry_lease on pgmb.retry (queue, lease) where lease is not null;
create index retry_key on pgmb.retry (queue, key, origin, seq) where ordered;

create table pgmb.dead (
  id bigint generated always as identity primary key,
  queue integer not null references pgmb.queue on delete cascade,
  died_at timestamptz not null default clock_timestamp(),
  attempt integer not null,
  error text,
  seq bigint not null,
  event_id uuid not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  published_at timestamptz not null,
  -- Of a queue that many endpoints share: the one that it did not reach.
  endpoint uuid
);
create index dead_endpoint on pgmb.dead (endpoint, id) where endpoint is not null;
create index dead_queue on pgmb.dead (queue, id);
