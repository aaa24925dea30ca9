-- The installation: which schema version stands here, and on which cluster its xids are valid.

create schema pgmb;

create table pgmb.installation (
  only_one boolean primary key default true check (only_one),
  version integer not null,
  -- xid8 values belong to one cluster. When the system identifier differs from the running server's and the rows of
  -- pgmb.lineage were written again, the data was restored elsewhere: readers refuse until pgmb.rebase() raises the epoch.
  epoch integer not null default 1,
  system_identifier bigint not null,
  -- Signs what a session remembers in its settings, which it could set itself: see refuse_full.
  secret uuid not null default gen_random_uuid(),
  -- What offsets of Spark name. pg_upgrade keeps it, rebase() after a restore does not.
  identity uuid not null default gen_random_uuid(),
  -- The schema version and text of each view, as md5. Views are replaced only if it changed: that takes a lock.
  views jsonb not null default '{}',
  -- The text of all files named tables.sql, as md5: until 0.1.0 tables change without a migration.
  tables text not null,
  -- What was posted to endpoints that were dropped: totals of all endpoints never fall.
  dropped_delivered bigint not null default 0,
  dropped_failed bigint not null default 0,
  installed_at timestamptz not null default now(),
  upgraded_at timestamptz not null default now()
);

-- Rows that hold the id of the transaction that wrote them, as their xmin does. pg_upgrade, a base backup and a copy by
-- CREATE DATABASE keep both alike, and the cluster's transaction ids with them. A restored dump writes the rows again: all of them
-- in one transaction, while the ids that they hold differ.
create table pgmb.lineage (
  id integer primary key,
  written xid not null
);

-- Advisory locks are open to every role that can connect. What goes into their keys is kept here, so that a key cannot be
-- computed by others: only the owner reads this table (see pgmb_internal.lock_key).
create table pgmb.lock_secret (
  only_one boolean primary key default true check (only_one),
  secret bytea not null
);
insert into pgmb.lock_secret (secret)
values (sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')));

-- When maintain() last ended, in milliseconds since 1970. A sequence, because a row that is updated each second would grow
-- old versions.
create sequence pgmb.maintained;

-- The step of maintain() that its next call begins with: the first that the last call did not reach. is_called: the steps
-- before it left work.
create sequence pgmb.maintenance_turn;

-- What maintain() saw of the clock (docs/explanation/clock.md). The row changes only when the clock steps.
create table pgmb.clock (
  only_one boolean primary key default true check (only_one),
  -- The time that has passed is what the clock shows since here: steps ahead move it, and steps back.
  zero timestamptz not null default clock_timestamp(),
  -- How much time had passed when the clock went back, or when a time that lies ahead was found: counted[n] holds for times
  -- before up_to[n] that are not before up_to[n - 1]. Of later ones nothing is known.
  up_to timestamptz[] not null default '{}',
  counted interval[] not null default '{}',
  -- What the clock showed before and after it went back last.
  back_from timestamptz,
  back_at timestamptz,
  -- How much time had passed when the clock stepped ahead.
  stepped_ahead interval,
  -- How long nobody had called maintain() then, by the clock. Null if the clock went back since.
  jumped_by interval
);
insert into pgmb.clock default values;

-- The process that each service belongs to. The others that run the service wait.
create table pgmb.leader (
  service text primary key,
  process uuid not null,
  host text not null,
  pid integer not null,
  program text not null,
  since timestamptz not null,
  expires_at timestamptz not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- The steps of maintain() that failed in its last call.
create table pgmb.maintenance_failure (
  step text primary key,
  error text not null,
  since timestamptz not null default clock_timestamp(),
  failed_at timestamptz not null
);
