-- The lake: open tables outside the database, one for each stream, which keep its history.

create table pgmb.lake (
  stream integer primary key references pgmb.stream on delete cascade,
  url text not null constraint "a lake must have a URL" check (url <> ''),
  -- Of the installation that writes the table. A copy of this database has another one and must not write there.
  identity uuid not null,
  -- The table of dead letters, and how long the database keeps those that are archived; null: without limit.
  dead_url text not null,
  keep_dead interval,
  created_at timestamptz not null default clock_timestamp(),
  constraint "dead letters must have a table of their own" check (dead_url <> '' and dead_url <> url)
);

-- The copies of segments. `events` and `digest` are the log's own, computed by digest_segment() after the segment was sealed.
-- verified_at: when a reader found the same two in the table, of which that was version lake_version.
create table pgmb.archived (
  stream integer not null references pgmb.stream on delete cascade,
  segment integer not null,
  -- Of the installation when the digest was computed. rebase() changes xids, and with them the digest of what is not verified.
  epoch integer not null,
  events bigint not null,
  digest bytea not null,
  -- What the table holds as soon as an erasure that is under way has committed its files to it.
  erased_digest bytea,
  max_xid xid8,
  url text,
  lake_version bigint,
  verified_at timestamptz,
  -- Of the ticks that retention deleted when it dropped the segment: by them it is known that a position belongs to this
  -- history (docs/adr/0025-positions-name-a-proven-tick.md). Null: not dropped.
  proofs bigint[],
  -- Why the table did not hold the segment when it was last read, and since when. Null once it was verified.
  failed_at timestamptz,
  failure text,
  primary key (stream, segment),
  constraint "a segment must be archived or not" check (num_nulls(url, lake_version, verified_at) in (0, 3))
);

-- Batches of dead letters for the lake. The number is the version of the commit to the table. `events` and `digest` are the
-- database's own, of the dead letters as they were when the batch was planned; ids until it is verified. A batch that is
-- planned and never committed is followed by another one with the same dead letters.
create table pgmb.dead_batch (
  stream integer not null references pgmb.stream on delete cascade,
  number bigint not null,
  ids bigint[],
  events bigint not null,
  digest bytea not null,
  url text,
  lake_version bigint,
  planned_at timestamptz not null default clock_timestamp(),
  verified_at timestamptz,
  primary key (stream, number),
  constraint "a batch must be verified or not" check (num_nulls(url, lake_version, verified_at) in (0, 3))
);

-- Replays of history into one queue or stream. What lies between two positions, `after` and `upto`, does not change, so the
-- number of the last event that was passed, `seq`, is all that a replay has to remember. It moves on in the transaction that
-- inserts the events.
create table pgmb.lake_replay (
  id uuid primary key default gen_random_uuid(),
  stream integer not null references pgmb.stream on delete cascade,
  -- The target: one of these.
  queue integer references pgmb.queue on delete cascade,
  into_stream integer references pgmb.stream on delete cascade,
  after pgmb.position not null,
  upto pgmb.position not null,
  -- No event before `upto` has a higher number.
  last bigint not null,
  patterns text[],
  since timestamptz,
  until timestamptz,
  equals jsonb,
  filter text,
  params jsonb,
  seq bigint not null default 0,
  events bigint not null default 0,
  bytes bigint not null default 0,
  created_at timestamptz not null default clock_timestamp(),
  moved_at timestamptz,
  ended_at timestamptz,
  constraint "a replay must have one target" check (num_nonnulls(queue, into_stream) = 1)
);
-- One replay at a time into a target: a command that is repeated after a crash must not begin a second one.
create unique index lake_replay_queue on pgmb.lake_replay (queue) where ended_at is null;
create unique index lake_replay_into on pgmb.lake_replay (into_stream) where ended_at is null;
create index lake_replay_stream on pgmb.lake_replay (stream);

-- Projections: tables outside the database with typed columns, made of the payloads of a stream's archived events. The
-- declaration is kept here, and what lies at `url` follows it. See projection.sql.
create table pgmb.lake_projection (
  name text primary key constraint "a projection's name must be letters, digits and underscores"
    check (name ~ '^[A-Za-z_][A-Za-z0-9_]{0,62}$'),
  stream integer not null references pgmb.stream on delete cascade,
  url text not null unique constraint "a projection must have a URL" check (url <> ''),
  -- Of the installation that writes the table, as in pgmb.lake.
  identity uuid not null,
  patterns text[] not null,
  columns jsonb not null,
  bad text not null constraint "bad must be rescue, drop or fail" check (bad in ('rescue', 'drop', 'fail')),
  -- Each change of patterns, columns or bad is another one, for which the table is rebuilt.
  generation integer not null default 1,
  -- Where the table stood when a projector last recorded it: the last segment, the versions of the lake's table and its own,
  -- and the counts of all its commits in this generation.
  segment integer,
  lake_version bigint,
  table_version bigint,
  rows bigint not null default 0,
  rescued bigint not null default 0,
  dropped bigint not null default 0,
  moved_at timestamptz,
  created_at timestamptz not null default clock_timestamp()
);
create index lake_projection_stream on pgmb.lake_projection (stream);

-- The fields at the top of projected payloads, and the JSON types that they had: from which event to which.
create table pgmb.lake_field (
  projection text not null references pgmb.lake_projection on delete cascade,
  field text not null,
  kind text not null,
  first_seq bigint not null,
  last_seq bigint not null,
  first_at timestamptz not null,
  last_at timestamptz not null,
  primary key (projection, field, kind)
);
