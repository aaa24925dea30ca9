-- Streams and their segments. A stream's log is the partitioned table pgmb.log_<name>, created with it:
-- see pgmb.create_stream. Segment n holds the events with seq in [n << 40, (n + 1) << 40), so a number
-- taken from the sequence names its segment and rotation is one setval.

-- What the log and every table that feeds it accept as an event's topic and key. Ordered queues index the key: an index row
-- holds 2,704 bytes. Domains, because a table's CHECK is prepared again by every statement: 14 of 80 µs an insert.
-- Constraints are named by what they demand, because callers read the name in an error message. They call few functions:
-- preparing a call, once per transaction, costs more than the call.
create domain pgmb.event_topic as text
  constraint "a topic must have 1 to 255 bytes" check (value <> '' and octet_length(value) <= 255)
  constraint "a topic must have no * and no #" check (value not like '%*%' and value not like '%#%');
create domain pgmb.event_key as text
  constraint "a key must have at most 1000 bytes" check (octet_length(value) <= 1000);
-- An event must fit into one message to a client and into a row that SQL makes of it, both of which end at 1 GB; conditions
-- and deliveries need several copies. Payload and headers together have at most 64 MiB, as text. The size of a stored value
-- says enough for nearly all: pglz compresses to a 91st at most, lz4 to a 255th. Only what is larger is looked at as text.
create domain pgmb.event_payload as json
  constraint "a payload must have at most 48 MiB"
    check (pg_column_size(value) <= 196608 or octet_length(value::text) <= 50331648);
create domain pgmb.event_headers as json
  constraint "headers must have at most 16 MiB"
    check (pg_column_size(value) <= 65536 or octet_length(value::text) <= 16777216);

create table pgmb.stream (
  id integer generated always as identity (maxvalue 16777215) primary key,
  name text not null unique,
  -- Added to seq to derive ids: distinct streams and installations get distinct ids.
  salt bigint not null,
  rotate_every interval,
  rotate_events bigint,
  keep_for interval,
  drop_unread boolean not null default false,
  archive boolean not null default false,
  -- Null: as many as the types of payload and headers allow.
  max_event_bytes bigint constraint "max_event_bytes must be between 1024 and 67108864"
    check (max_event_bytes between 1024 and 67108864),
  created_at timestamptz not null default clock_timestamp(),
  constraint "a stream must have a name" check (name ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$')
);

create table pgmb.segment (
  stream integer not null references pgmb.stream on delete cascade,
  number integer not null,
  attached_at timestamptz not null default clock_timestamp(),
  attached_xid xid8 not null default pg_current_xact_id(),
  -- Transactions that may not see the segment: they held the log when it was first seen attached. It opens when
  -- they have ended.
  writers text[],
  -- Set when the next segment opened: no transaction with a higher xid can have a number of this one.
  closed_at timestamptz,
  closed_xid xid8,
  last_seq bigint,
  -- Set when every transaction at or below closed_xid has let go of the log; last_seq is then exact.
  sealed_at timestamptz,
  max_xid xid8,
  last_published_at timestamptz,
  archived_at timestamptz,
  -- Emptied by retention. The table is detached and dropped when no transaction uses it.
  dropped_at timestamptz,
  primary key (stream, number)
);
create index segment_unsealed on pgmb.segment (stream, number) where sealed_at is null;
create index segment_latest on pgmb.segment
  ((greatest(closed_at, sealed_at, last_published_at, archived_at, dropped_at)));
create index segment_kept on pgmb.segment (stream, number) where dropped_at is null;

-- A row for each stream, to be locked: by retention FOR UPDATE before it looks which segments it may drop, by a
-- transaction that moves a queue or durable reader to a position FOR SHARE before it looks whether its history is kept.
create table pgmb.history (
  stream integer primary key references pgmb.stream on delete cascade
);

-- Events published with a delay wait here, however long, and enter the log when due.

create table pgmb.delayed (
  id uuid not null,
  stream text not null,
  due_at timestamptz not null,
  -- When due_at was decided; null: it was given as a time.
  decided_at timestamptz,
  topic pgmb.event_topic not null,
  key pgmb.event_key,
  payload pgmb.event_payload not null,
  headers pgmb.event_headers
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index delayed_due on pgmb.delayed (stream, due_at);
create index delayed_decided on pgmb.delayed (decided_at) where decided_at is not null;
create index delayed_id on pgmb.delayed (id);
-- Keys and what may quote a payload are not sampled: pg_statistic would keep them after an erasure.
alter table pgmb.delayed alter column key set statistics 0;
alter table pgmb.delayed enable row level security;

-- Deduplication keys: a publish under one that is remembered returns the first event's id and publishes
-- nothing.

create table pgmb.dedup (
  stream text not null,
  key text not null constraint "a dedup_key must have 1 to 500 characters" check (length(key) between 1 and 500),
  id uuid not null,
  taken_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  primary key (stream, key)
) with (autovacuum_vacuum_scale_factor = 0.02);
create index dedup_expiry on pgmb.dedup (expires_at);
alter table pgmb.dedup alter column key set statistics 0;
alter table pgmb.dedup enable row level security;
