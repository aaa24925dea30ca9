-- The views that show a queue's messages: pgmb.<queue>_queue and the like (pgmb_internal.create_queue_views).
create table pgmb.queue_view (
  queue integer not null references pgmb.queue on delete cascade,
  name name not null unique,
  primary key (queue, name)
);
