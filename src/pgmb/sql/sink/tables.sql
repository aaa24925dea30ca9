-- What many tasks of one application publish together, exactly once: Spark's sink.

-- How far an application has come on a stream: the last version that it has published. That one and earlier ones
-- publish nothing when repeated.
create table pgmb.ledger (
  app text not null constraint "an app must have at most 255 bytes" check (octet_length(app) <= 255),
  stream integer not null references pgmb.stream on delete cascade,
  -- The role that began it. No other role may continue it or record a version.
  role name not null,
  -- Null until the first is published.
  version bigint,
  events bigint not null default 0,
  committed_at timestamptz,
  -- The version whose tasks publish on their own, and the run of it that may.
  under_way bigint,
  run uuid,
  begun_at timestamptz not null default clock_timestamp(),
  primary key (app, stream)
);
create index ledger_stream on pgmb.ledger (stream);
create index ledger_unpublished on pgmb.ledger (begun_at) where version is null;

-- Tasks that published on their own, of the version under way: all in one run. Another run may cut the version
-- into other tasks, so that it first has to show that it holds the same events in each of these.
create table pgmb.ledger_task (
  app text not null constraint "an app must have at most 255 bytes" check (octet_length(app) <= 255),
  stream integer not null references pgmb.stream on delete cascade,
  version bigint not null,
  task integer not null,
  run uuid not null,
  events bigint,
  -- Of the events, in any order.
  digest bigint,
  committed_at timestamptz not null default clock_timestamp(),
  primary key (app, stream, version, task)
);
create index ledger_task_stream on pgmb.ledger_task (stream);

-- What the last versions of an application held, so that one that comes again is compared before it is passed over: an older
-- checkpoint gives the same number to other events. digest: of all its events, in any order; null: not known.
create table pgmb.ledger_version (
  app text not null constraint "an app must have at most 255 bytes" check (octet_length(app) <= 255),
  stream integer not null references pgmb.stream on delete cascade,
  version bigint not null,
  events bigint not null,
  digest bigint,
  primary key (app, stream, version)
);
create index ledger_version_stream on pgmb.ledger_version (stream);

-- Unlogged tables pgmb.stage_<number>, into each of which one task at a time writes what is published as a whole
-- later. A stage belongs to one role and is used again and again; app null: it is free.
create table pgmb.stage (
  number integer generated always as identity primary key,
  role name not null,
  stream integer,
  app text constraint "an app must have at most 255 bytes" check (octet_length(app) <= 255),
  version bigint,
  claimed_at timestamptz not null default clock_timestamp()
);
create index stage_app on pgmb.stage (app) where app is not null;
