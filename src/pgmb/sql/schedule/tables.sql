-- Recurring events. The scheduler reads the cron expression; the row says when it is due next, and
-- moving it on is what makes each due time publish once.

create table pgmb.schedule (
  name text primary key
    constraint "a schedule must have a name" check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  cron text not null,
  timezone text not null default 'UTC',
  stream text not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  -- Null: its expression never matches again.
  next_at timestamptz,
  last_at timestamptz,
  paused_at timestamptz,
  created_at timestamptz not null default now(),
  -- Which due times missed while no scheduler ran are published: the last, or all.
  missed text not null default 'last' constraint "missed must be last or all" check (missed in ('last', 'all'))
);
create index schedule_next on pgmb.schedule (next_at) where paused_at is null;
