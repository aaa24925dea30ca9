-- Erasures: which keys were removed from streams and their tables, when, by whom and why.

-- It does not hold the keys: `digests` has, for each key, the SHA-256 of this row's id and the key. That is enough to tell
-- whether a key was erased, and whether a repeated command continues this erasure.
create table pgmb.erasure (
  id uuid primary key default gen_random_uuid(),
  role name not null,
  reason text not null constraint "an erasure must have a reason" check (reason <> ''),
  digests bytea[] not null,
  -- Of all streams that there were, or of those that were named.
  all_streams boolean not null,
  begun_at timestamptz not null default clock_timestamp(),
  ended_at timestamptz
);
create index erasure_unfinished on pgmb.erasure (begun_at) where ended_at is null;

-- The streams of an erasure. It covers all events in segments up to `border`, which are sealed before it looks at them;
-- those up to `scanned` are erased in the log.
create table pgmb.erasure_stream (
  erasure uuid not null references pgmb.erasure on delete cascade,
  stream text not null,
  border integer,
  scanned integer not null default -1,
  primary key (erasure, stream)
);

-- What an erasure has changed: rows of tables of the database (their names in schema pgmb) and of the lake (their URLs), and
-- which files of the latter it replaced. rewritten_at: when nothing was left of the old rows in the table's files.
create table pgmb.erasure_table (
  erasure uuid not null references pgmb.erasure on delete cascade,
  name text not null,
  stream text,
  in_lake boolean not null default false,
  events bigint not null default 0,
  files text[] not null default '{}',
  rewritten_at timestamptz,
  primary key (erasure, name)
);
