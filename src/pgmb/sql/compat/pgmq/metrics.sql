-- What is in a queue, counted exactly.

-- The unread messages, at most `max`, in the order of their numbers but for those that committed
-- late. Takes no lock.
create or replace function pgmq.unread(queue pgmq.queue, max bigint default 9223372036854775807)
returns setof pgmb.event
language plpgsql
as $$
declare
  q pgmb.queue;
    newest pgmb.claim;
  pending pgmb.pending;
  part bigint;
  -- The number of messages that may be skipped.
  more bigint := (select count(*) from pgmq.passed_over o where o.queue = (unread.queue).id);
begin
  max := least(max, 9223372036854775807 - more);
  select * into q from pgmb.queue where id = (unread.queue).id;
    select * into newest from pgmb_internal.queue_position(q.id);
  for pending in select * from pgmb_internal.pending(q, newest, pgmb_internal.snapshot_with_own(), 9223372036854775807) loop
    return query
    select e.* from pgmb_internal.batch_events(q.stream, pending.batch, pending.lo, pending.hi, '', max + more) e
    where not exists (select from pgmq.passed_over o where o.queue = q.id and o.msg_id = e.seq)
    limit max;
    get diagnostics part = row_count;
    max := max - part;
    exit when max <= 0;
  end loop;
end $$;

-- The number of unread messages, and when the first and the last of them were sent. As pgmq.unread, but reads
-- no message.
create or replace function pgmq.count_unread(
  queue pgmq.queue, out messages bigint, out oldest timestamptz, out newest timestamptz
)
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  q pgmb.queue;
  at pgmb.claim;
begin
  select * into q from pgmb.queue where id = (count_unread.queue).id;
  select * into at from pgmb_internal.queue_position(q.id);
  -- The rest of the batch that is being read, what committed late in it, what came after it, what committed late there; with
  -- what this transaction sent.
  execute format('select count(*), min(u.published_at), max(u.published_at)
    from (
      select e.seq, e.published_at from %1$s e
      where e.seq > greatest($8, $5) and e.seq <= $2 and pg_visible_in_snapshot(e.xid, $3)
        and (e.xid >= pg_snapshot_xmax($4) or not pg_visible_in_snapshot(e.xid, $4))
      union all
      select e.seq, e.published_at
      from pgmb_internal.batch_events($7, row($4, $5, $6, $3)::pgmb.batch, $8, least($2, $5), '''', $1, true) e where $8 < $2
      union all
      select e.seq, e.published_at from %1$s e
      where e.seq > $9 and (e.xid >= pg_snapshot_xmax($3) or not pg_visible_in_snapshot(e.xid, $3))
      union all
      select e.seq, e.published_at
      from pgmb_internal.batch_events($7, row($3, $9, $10, pgmb_internal.snapshot_with_own())::pgmb.batch, 0, $9, '''', $1, true) e
    ) u %2$s',
    (count_unread.queue).log,
    case when pgmq.has_passed_over(q.id)
      then 'where not exists (select from pgmq.passed_over o where o.queue = $11 and o.msg_id = u.seq)' else '' end)
  into messages, oldest, newest
  using 9223372036854775807, at.upto, at.batch_snapshot, at.done_snapshot, at.done_seq, at.done_next,
    q.stream, at.place, at.batch_seq, at.batch_next, q.id;
end $$;

-- Every message of a queue that was read, delayed or hidden; bodies: with message and headers.
create or replace function pgmq.touched(queue pgmq.queue, bodies boolean)
returns setof pgmq.message_record
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  held pgmq.reading;
begin
  return query
  select p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, pgmq.visible_from(p.vt, p.enqueued_at), p.message, p.headers
  from pgmq.parked p where p.queue = (touched.queue).id;
  for held in select * from pgmq.reading r where r.queue = (touched.queue).id order by r.lo loop
    return query
    select e.seq, 1, e.published_at, held.read_at, held.vt,
      case when bodies then e.payload::jsonb end, case when bodies then e.headers::jsonb end
    from pgmq.claim_of(held) c, pgmb_internal.claim_events(c) e
    where c.id is not null and e.seq > held.lo and e.seq <= held.hi and (held.ids is null or e.seq = any (held.ids));
  end loop;
  return query
  select t.seq, t.attempt - 1, t.published_at, null::timestamptz, t.due_at,
    case when bodies then t.payload::jsonb end, case when bodies then t.headers::jsonb end
  from pgmb.retry t where t.queue = (touched.queue).id;
end $$;

-- Every message of a queue.
create or replace function pgmq.contents(queue pgmq.queue)
returns setof pgmq.message_record
language sql
as $$
  select * from pgmq.touched(contents.queue, true)
  union all
  select e.seq, 0, e.published_at, null::timestamptz, e.published_at, e.payload::jsonb, e.headers::jsonb
  from pgmq.unread(contents.queue) e
$$;

-- Every message of a queue, as the view pgmq.q_<name> shows it. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.messages(queue_name text)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query select * from pgmq.contents(pgmq.queue_for_reader(queue_name));
end $$;

-- How many messages a queue holds, how many of them may be read now, the ages of the newest and the oldest, and how many
-- were ever sent to it. Counts them all. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.metrics(queue_name text)
returns pgmq.metrics_result
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmq.queue := pgmq.queue_for_reader(metrics.queue_name);
  last bigint := pgmb_internal.last_seq(asked.stream);
  counted pgmq.metrics_result;
begin
  select asked.queue_name, t.messages + u.messages,
    extract(epoch from clock_timestamp() - greatest(t.newest, u.newest))::integer,
    extract(epoch from clock_timestamp() - least(t.oldest, u.oldest))::integer, 0, clock_timestamp(),
    t.visible + u.messages, null
  into counted
  from pgmq.count_unread(asked) u, (
    select count(*) messages, count(*) filter (where m.vt <= statement_timestamp()) visible,
      min(m.enqueued_at) oldest, max(m.enqueued_at) newest
    from pgmq.touched(asked, false) m) t;
  -- Each segment begins at its own number.
  select sum(coalesce(g.last_seq, case when g.number = pgmb_internal.segment_of(last) then last end) - pgmb_internal.first_number(g.number))
  into counted.total_messages
  from pgmb.segment g join pgmb.stream s on s.id = g.stream
  where s.name = asked.stream and g.number <= pgmb_internal.segment_of(last);
  return counted;
end $$;

-- The metrics of every queue that the caller may read.
create or replace function pgmq.metrics_all()
returns setof pgmq.metrics_result
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  listed text;
begin
  for listed in select l.queue_name from pgmq.list_queues() l loop
    begin
      return next pgmq.metrics(listed);
    exception when insufficient_privilege then
      null;
    end;
  end loop;
end $$;
