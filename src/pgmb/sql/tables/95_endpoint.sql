-- Endpoints: HTTP destinations that queues feed (pgmb.queue.endpoint).

create table pgmb.endpoint (
  id uuid primary key default gen_random_uuid(),
  name text not null unique check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  url text not null,
  rps integer check (rps > 0),
  created_at timestamptz not null default now()
);
