-- Deduplication keys: a publish under one that is remembered returns the first event's id and publishes
-- nothing.

create table pgmb.dedup (
  stream text not null,
  key text not null check (length(key) between 1 and 500),
  id uuid not null,
  expires_at timestamptz not null,
  primary key (stream, key)
) with (autovacuum_vacuum_scale_factor = 0.02);
create index dedup_expiry on pgmb.dedup (expires_at);
alter table pgmb.dedup enable row level security;
