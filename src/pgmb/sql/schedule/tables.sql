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
  payload pgmb.event_payload not null,
  headers pgmb.event_headers,
  -- Null: its expression never matches again.
  next_at timestamptz,
  -- By the clock when next_at was decided: if it lies ahead, the clock was wrong then, or is now.
  decided_at timestamptz not null default clock_timestamp(),
  -- Where next_at was decided again because the clock had gone back: when it was decided before. If the clock jumps to here, it
  -- was behind in between, and all due times up to here had their turn.
  passed_upto timestamptz,
  -- The spans of due times that were published: none of them is published again.
  published tstzmultirange not null default '{}',
  last_at timestamptz,
  paused_at timestamptz,
  created_at timestamptz not null default now(),
  -- Which due times missed while no scheduler ran are published: the last, or all.
  missed text not null default 'last' constraint "missed must be last or all" check (missed in ('last', 'all')),
  -- The app that declares it: no app of another name changes it. Null: an operator's, or of an app without a name.
  app text constraint "an app's name must have 1 to 100 characters" check (length(app) between 1 and 100)
);
create index schedule_next on pgmb.schedule (next_at) where paused_at is null;
create index schedule_decided on pgmb.schedule (decided_at) where paused_at is null;
