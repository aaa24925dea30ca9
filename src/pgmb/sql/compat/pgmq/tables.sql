-- PGMQ's interface on pgmb's log: what it keeps beside the log. A PGMQ queue is a stream with one queue of pgmb
-- reading it. A message that was only sent, or read once with many others, is not stored here: the log has it, and
-- pgmq.reading one row for all that the read gave out. What has a fate of its own is in pgmq.parked.

create schema pgmq;

-- What says that this schema is pgmb's, and which version of it.
create table pgmq.installation (
  only_one boolean primary key default true check (only_one),
  version integer not null
);
insert into pgmq.installation (version) values (1);

create table pgmq.queue (
  -- That of the queue of pgmb, which has the stream's name.
  id integer primary key references pgmb.queue on delete cascade,
  queue_name varchar not null unique,
  stream text not null,
  -- The stream's log and the table of archived messages, to be used in a statement.
  log text not null,
  archive text not null,
  is_partitioned boolean not null,
  is_unlogged boolean not null,
  created_at timestamptz not null default now()
);
create unique index queue_lower_name on pgmq.queue (lower(queue_name));

-- What PGMQ calls its own list of queues.
create view pgmq.meta as
select queue_name, is_partitioned, is_unlogged, created_at from pgmq.queue;

-- Roles that may send to one queue. Only they and the owner write to its stream: other events may not be valid jsonb.
create table pgmq.sender (
  queue integer not null references pgmq.queue on delete cascade,
  role name not null,
  role_id oid not null,
  primary key (queue, role)
);

-- A read of fresh messages: it holds those of claim `claim` in (lo, hi], or `ids` where these are not all of that
-- range, until vt. Settled with the claim, or taken apart into pgmq.parked.
create table pgmq.reading (
  queue integer not null,
  claim bigint not null,
  token bigint not null,
  lo bigint not null,
  hi bigint not null,
  ids bigint[],
  events integer not null,
  vt timestamptz not null,
  read_at timestamptz not null
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create unique index reading_lo on pgmq.reading (queue, lo, claim);
create index reading_vt on pgmq.reading (queue, vt);

-- Messages that the log's reader has passed and that are still in their queue, or that never were in the log:
-- given out by a small read or waiting for the next one, delayed, not settled before their vt, given a vt of their own,
-- not what a condition asked for, read by group. vt is -infinity for a message that waits and was never hidden, so that an
-- index gives these in the order of their numbers; its vt for callers is enqueued_at (pgmq.visible_from).
create table pgmq.parked (
  queue integer not null,
  msg_id bigint not null,
  read_ct integer not null default 0,
  enqueued_at timestamptz not null default now(),
  last_read_at timestamptz,
  vt timestamptz not null,
  message jsonb,
  headers jsonb,
  -- pgmq.fifo_of(headers). Not generated: PostgreSQL would parse its expression at every read that hides a message.
  fifo bigint not null
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
-- Not unique: a read must not wait for another that stays open with the same messages. That one is superseded and cannot
-- commit (pgmb_internal.refuse_void).
create index parked_number on pgmq.parked (queue, msg_id);
create index parked_vt on pgmq.parked (queue, vt, msg_id);
create index parked_fifo on pgmq.parked (queue, fifo, msg_id);
-- Not sampled: pg_statistic would keep what was erased.
alter table pgmq.parked alter column message set statistics 0, alter column headers set statistics 0;

-- Messages that were taken out of the log's way before they were read. The read that reaches one removes it here.
create table pgmq.passed_over (
  queue integer not null,
  msg_id bigint not null,
  primary key (queue, msg_id)
);

create table pgmq.topic_bindings (
  pattern text not null,
  queue_name text not null references pgmq.queue (queue_name) on delete cascade,
  bound_at timestamptz not null default now(),
  compiled_regex text not null,
  constraint topic_bindings_unique_pattern_queue unique (pattern, queue_name)
);
create index topic_bindings_queue on pgmq.topic_bindings (queue_name);

create table pgmq.notify_insert_throttle (
  queue_name varchar primary key references pgmq.queue (queue_name) on delete cascade,
  throttle_interval_ms integer not null default 0,
  last_notified_at timestamptz not null default to_timestamp(0)
);

create type pgmq.message_record as (
  msg_id bigint,
  read_ct integer,
  enqueued_at timestamptz,
  last_read_at timestamptz,
  vt timestamptz,
  message jsonb,
  headers jsonb
);

create type pgmq.queue_record as (
  queue_name varchar,
  is_partitioned boolean,
  is_unlogged boolean,
  created_at timestamptz
);

create type pgmq.metrics_result as (
  queue_name text,
  queue_length bigint,
  newest_msg_age_sec integer,
  oldest_msg_age_sec integer,
  total_messages bigint,
  scrape_time timestamptz,
  queue_visible_length bigint,
  default_partition_length bigint
);
