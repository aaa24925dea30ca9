-- Endpoints: HTTP destinations that queues feed (pgmb.queue.endpoint).

create table pgmb.endpoint (
  id uuid primary key default gen_random_uuid(),
  name text not null unique check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$'),
  url text not null,
  rps integer check (rps > 0),
  created_at timestamptz not null default now()
);

-- The views that show a queue's messages: pgmb.<queue>_queue and the like (pgmb.create_queue_views).
create table pgmb.queue_view (
  queue integer not null references pgmb.queue on delete cascade,
  name name not null unique,
  primary key (queue, name)
);
