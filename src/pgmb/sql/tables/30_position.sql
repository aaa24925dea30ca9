-- Positions and ticks.

-- A point in a stream's history: everything visible in `snapshot` lies before it.
--   seq, next   every event with xid > next has a sequence number above seq (whichever transaction took
--               them read seq first, then took an xid of its own), so the walk starts above seq and only
--               transactions unfinished in the snapshot, up to next, are looked up by xid;
--   lsn         the write-ahead log position by which all of it was written: a replica that has
--               replayed so far can serve it.
create type pgmb.position as (
  epoch integer,
  snapshot pg_snapshot,
  seq bigint,
  next xid8,
  lsn pg_lsn
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

-- A tick gives a position a short name and a time. Append-only; old ones are thinned by retention.
create table pgmb.tick (
  stream integer not null references pgmb.stream on delete cascade,
  id bigint not null,
  at timestamptz not null default clock_timestamp(),
  position pgmb.position not null,
  primary key (stream, id)
);
create index tick_at on pgmb.tick (stream, at);
create sequence pgmb.tick_id owned by pgmb.tick.id;

-- Readers outside the database (Spark, the lake, a tail that must not lose its place): retention keeps
-- what the slowest of them has not confirmed.
create table pgmb.reader (
  stream integer not null references pgmb.stream on delete cascade,
  name text not null,
  position pgmb.position not null,
  updated_at timestamptz not null default clock_timestamp(),
  primary key (stream, name)
);
