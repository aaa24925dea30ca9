-- The installation: which schema version stands here, and on which cluster its xids are valid.

create schema pgmb;

create table pgmb.installation (
  only_one boolean primary key default true check (only_one),
  version integer not null,
  -- xid8 values belong to one cluster. When the system identifier differs from the running server's,
  -- the data was restored or copied elsewhere: readers refuse until pgmb.rebase() raises the epoch.
  epoch integer not null default 1,
  system_identifier bigint not null,
  -- Signs what a session remembers in its settings, which it could set itself: see refuse_full.
  secret uuid not null default gen_random_uuid(),
  installed_at timestamptz not null default now(),
  upgraded_at timestamptz not null default now()
);
