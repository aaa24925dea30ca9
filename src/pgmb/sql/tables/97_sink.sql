-- What many tasks of one application publish together, exactly once: Spark's sink.

-- The last version that an application has published. That one and earlier ones publish nothing when repeated.
create table pgmb.ledger (
  app text not null,
  stream integer not null references pgmb.stream on delete cascade,
  version bigint not null,
  events bigint not null,
  committed_at timestamptz not null default clock_timestamp(),
  primary key (app, stream)
);
create index ledger_stream on pgmb.ledger (stream);

-- Tasks that published on their own (direct): of a version that is under way, and of the last one. All of a version
-- must be cut into as many tasks: a task of another cut would hold other events.
create table pgmb.ledger_task (
  app text not null,
  stream integer not null references pgmb.stream on delete cascade,
  version bigint not null,
  task integer not null,
  layout text not null,
  events bigint not null,
  committed_at timestamptz not null default clock_timestamp(),
  primary key (app, stream, version, task)
);
create index ledger_task_stream on pgmb.ledger_task (stream);

-- Unlogged tables pgmb.stage_<number>, into which one task at a time writes what the application publishes as a
-- whole later. A stage belongs to one role and is used again and again; app null: it is free.
create table pgmb.stage (
  number integer generated always as identity primary key,
  role name not null,
  app text,
  version bigint,
  claimed_at timestamptz
);
create index stage_app on pgmb.stage (app) where app is not null;
