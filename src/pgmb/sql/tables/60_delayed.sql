-- Events published with a delay wait here, however long, and enter the log when due.

create table pgmb.delayed (
  id uuid not null,
  stream text not null,
  due_at timestamptz not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  -- As the log's: one event that the log refuses would hold up all that are due after it.
  constraint topic_size check (octet_length(topic) <= 255),
  constraint key_size check (octet_length(key) <= 1000)
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index delayed_due on pgmb.delayed (stream, due_at);
create index delayed_id on pgmb.delayed (id);
alter table pgmb.delayed enable row level security;
