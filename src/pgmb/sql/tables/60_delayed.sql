-- Events published with a delay wait here, however long, and enter the log when due.

create table pgmb.delayed (
  id uuid not null,
  stream text not null,
  due_at timestamptz not null,
  topic pgmb.event_topic not null,
  key pgmb.event_key,
  payload json not null,
  headers json
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index delayed_due on pgmb.delayed (stream, due_at);
create index delayed_id on pgmb.delayed (id);
alter table pgmb.delayed enable row level security;
