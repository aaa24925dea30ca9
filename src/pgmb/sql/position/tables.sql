-- Positions and ticks.

-- A point in a stream's history: everything visible in `snapshot` lies before it.
--   epoch       of the installation: pgmb.rebase() raises it, and positions from before no longer apply;
--   stream      the stream's salt: a stream that is created again under its name has another;
--   tick, proof the row of pgmb.tick that was committed with the position, and a random number that only this row
--               holds. Where the row is visible, so is everything before the position: on a replica, after a crash,
--               after a failover. Where it is missing, the position belongs to a history that was lost or dropped.
--               The earliest position has neither (0);
--   seq, next   every event with xid > next has a sequence number above seq (every transaction that takes
--               positions reads seq first, then takes an xid of its own), so the walk starts above seq and only
--               transactions unfinished in the snapshot, up to next, are looked up by xid.
create type pgmb.position as (
  epoch integer,
  stream bigint,
  tick bigint,
  proof bigint,
  snapshot pg_snapshot,
  seq bigint,
  next xid8
);

-- A batch: the events of a stream that `seen` shows and `done` does not.
-- Every event with xid > done_next has a number above done_seq: below it, only what transactions unfinished in `done` wrote is
-- looked up, by xid.
create type pgmb.batch as (
  done pg_snapshot,
  done_seq bigint,
  done_next xid8,
  seen pg_snapshot
);

-- What a reader gets. seq is the event's place in its stream: reading order, and the name by which a lease
-- settles it.
create type pgmb.event as (
  seq bigint,
  id uuid,
  topic text,
  key text,
  payload json,
  headers json,
  published_at timestamptz
);

-- A tick makes a position durable and gives it a number and a time. Its id follows from its snapshot: how many
-- transactions had finished, and 16 random bits. So a tick with a higher id covers at least as much, whatever the
-- order in which sessions write their ticks. Append-only; deleted with the history that they name.
create table pgmb.tick (
  stream integer not null references pgmb.stream on delete cascade,
  id bigint not null,
  at timestamptz not null default clock_timestamp(),
  position pgmb.position not null,
  primary key (stream, id)
);
create index tick_at on pgmb.tick (stream, at);

-- Readers outside the database (Spark, the lake, a tail that must not lose its place): retention keeps
-- what the slowest of them has not confirmed.
create table pgmb.reader (
  stream integer not null references pgmb.stream on delete cascade,
  name text not null constraint "a reader's name must have at most 255 bytes" check (octet_length(name) <= 255),
  position pgmb.position not null,
  -- The role that confirmed it first: no other may move or forget it.
  role name not null,
  updated_at timestamptz not null default clock_timestamp(),
  primary key (stream, name)
);
