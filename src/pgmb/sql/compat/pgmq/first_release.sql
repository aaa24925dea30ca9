-- The functions of PGMQ's first release, which its README calls without a schema. They stand in `public`, where the
-- search_path finds them, if the installing role may create there.

-- Creates a queue.
create or replace function public.pgmq_create(queue_name text)
returns void
language sql
as $$
  select pgmq.create(queue_name)
$$;

-- Every queue and when it was created.
create or replace function public.pgmq_list_queues()
returns table (queue_name text, created_at timestamptz)
language sql
as $$
  select l.queue_name, l.created_at from pgmq.list_queues() l
$$;

-- Sends a message and returns its number.
create or replace function public.pgmq_send(queue_name text, message jsonb)
returns bigint
language sql
as $$
  select pgmq.send(queue_name, message)
$$;

-- Reads at most qty messages and hides them for vt seconds.
create or replace function public.pgmq_read(queue_name text, vt integer default 30, qty integer default 1)
returns table (msg_id bigint, read_ct integer, vt timestamptz, enqueued_at timestamptz, message jsonb)
language sql
as $$
  select r.msg_id, r.read_ct, r.vt, r.enqueued_at, r.message from pgmq.read(queue_name, $2, qty) r
$$;

-- Reads a message and removes it from the queue.
create or replace function public.pgmq_pop(queue_name text)
returns table (msg_id bigint, read_ct integer, vt timestamptz, enqueued_at timestamptz, message jsonb)
language sql
as $$
  select r.msg_id, r.read_ct, r.vt, r.enqueued_at, r.message from pgmq.pop(queue_name) r
$$;

-- Moves a message to the archive. True if it was in the queue.
create or replace function public.pgmq_archive(queue_name text, msg_id bigint)
returns boolean
language sql
as $$
  select pgmq.archive(queue_name, msg_id)
$$;

-- Deletes a message. True if it was in the queue.
create or replace function public.pgmq_delete(queue_name text, msg_id bigint)
returns boolean
language sql
as $$
  select pgmq.delete(queue_name, msg_id)
$$;

do $$
declare
  one regprocedure;
  holder record;
begin
  for one in
    select p.oid::regprocedure from pg_proc p
    where p.pronamespace = 'public'::regnamespace and p.proname = any (
      '{pgmq_create,pgmq_list_queues,pgmq_send,pgmq_read,pgmq_pop,pgmq_archive,pgmq_delete}')
  loop
    execute format('comment on function %s is ''pgmb compat pgmq''', one);
    execute format('revoke all on function %s from public', one);
    for holder in
      select role from unnest('{pgmb_publisher,pgmb_consumer,pgmb_admin}'::text[]) role where to_regrole(role) is not null
    loop
      execute format('grant execute on function %s to %I', one, holder.role);
    end loop;
  end loop;
end $$;
