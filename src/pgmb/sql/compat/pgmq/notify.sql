-- Notifications of new messages, on channel "pgmq.q_<name>.INSERT". They come with the ticks of the queue's stream:
-- a sender takes no lock for them and sends none itself.

-- Has the ticks of a queue's stream notify of new messages, at most every throttle_interval_ms. Needs the rights of
-- pgmb_admin. Errors: 22023 a negative interval, 42P01 no such queue, 42501.
create or replace function pgmq.enable_notify_insert(queue_name text, throttle_interval_ms integer default 250)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  if enable_notify_insert.throttle_interval_ms < 0 then
    raise exception 'throttle_interval_ms must be non-negative, got: %', enable_notify_insert.throttle_interval_ms
      using errcode = '22023';
  end if;
  insert into pgmq.notify_insert_throttle as t (queue_name, throttle_interval_ms)
  values ((pgmq.queue_named(enable_notify_insert.queue_name)).queue_name, enable_notify_insert.throttle_interval_ms)
  on conflict on constraint notify_insert_throttle_pkey do update
  set throttle_interval_ms = excluded.throttle_interval_ms, last_notified_at = excluded.last_notified_at;
end $$;

-- Ends the notifications of a queue. Needs the rights of pgmb_admin. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.disable_notify_insert(queue_name text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  delete from pgmq.notify_insert_throttle t
  where t.queue_name = (pgmq.queue_named(disable_notify_insert.queue_name)).queue_name;
end $$;

-- Changes how often a queue notifies. Needs the rights of pgmb_admin. Errors: 22023 a negative interval, 42P01 no such
-- queue, 55000 it does not notify, 42501.
create or replace function pgmq.update_notify_insert(queue_name text, throttle_interval_ms integer)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  if update_notify_insert.throttle_interval_ms < 0 then
    raise exception 'throttle_interval_ms must be non-negative, got: %', update_notify_insert.throttle_interval_ms
      using errcode = '22023';
  end if;
  update pgmq.notify_insert_throttle t
  set throttle_interval_ms = update_notify_insert.throttle_interval_ms, last_notified_at = to_timestamp(0)
  where t.queue_name = (pgmq.queue_named(update_notify_insert.queue_name)).queue_name;
  if not found then
    raise exception 'Queue "%" does not have notify_insert enabled', update_notify_insert.queue_name using errcode = '55000',
      hint = 'Enable it first using pgmq.enable_notify_insert().';
  end if;
end $$;

-- The queues that notify, how often at most, and when they last did.
create or replace function pgmq.list_notify_insert_throttles()
returns table (queue_name text, throttle_interval_ms integer, last_notified_at timestamptz)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select t.queue_name, t.throttle_interval_ms, t.last_notified_at from pgmq.notify_insert_throttle t order by t.queue_name
$$;

-- Sends a queue's notification when its stream ticks: a trigger on pgmb.tick.
create or replace function pgmq.notify_queue_listeners()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  listened text;
  now timestamptz := clock_timestamp();
begin
  update pgmq.notify_insert_throttle t set last_notified_at = now
  from pgmq.queue q join pgmb.stream s on s.name = q.stream
  where s.id = new.stream and t.queue_name = q.queue_name
    and t.last_notified_at <= now - t.throttle_interval_ms * interval '1 millisecond'
  returning t.queue_name into listened;
  if listened is not null then
    perform pg_notify('pgmq.' || pgmq.format_table_name(listened, 'q') || '.INSERT', '');
  end if;
  return null;
end $$;

do $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = 'pgmb.tick'::regclass and t.tgname = 'pgmq_notify') then
    create trigger pgmq_notify after insert on pgmb.tick
      for each row execute function pgmq.notify_queue_listeners();
  end if;
end $$;
