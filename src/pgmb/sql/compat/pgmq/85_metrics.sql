-- What is in a queue, counted exactly.

-- The messages that nobody has read yet, at most `max`, in the order of their numbers but for those that committed
-- late. Takes no lock. Internal.
create or replace function pgmq.unread(queue pgmq.queue, max bigint default 9223372036854775807)
returns setof pgmb.event
language plpgsql
as $$
#variable_conflict use_variable
declare
  q pgmb.queue;
  newest pgmb.claim;
  last bigint;
  part bigint;
  -- So many may be met and left out.
  more bigint := (select count(*) from pgmq.passed_over o where o.queue = (unread.queue).id);
  own xid8 := pg_current_xact_id_if_assigned();
begin
  max := least(max, 9223372036854775807 - more);
  select * into q from pgmb.queue where id = (unread.queue).id;
  select * into newest from pgmb.claim c where c.queue = q.id order by c.id desc limit 1;
  last := pgmb.last_seq(q.stream_name);
  if newest.place < newest.upto then
    return query
    select e.* from pgmb.batch_events(q.stream, newest.done_snapshot, newest.done_seq, newest.done_next,
      newest.batch_snapshot, newest.own, newest.own_seq, newest.place, newest.upto, '', max + more) e
    where not exists (select from pgmq.passed_over o where o.queue = q.id and o.msg_id = e.seq)
    limit max;
    get diagnostics part = row_count;
    max := max - part;
  end if;
  if max > 0 then
    return query
    select e.* from pgmb.batch_events(q.stream, newest.batch_snapshot, newest.batch_seq, newest.batch_next,
      pgmb.snapshot(), newest.own, newest.own_seq, 0, last, '', max + more) e
    where not exists (select from pgmq.passed_over o where o.queue = q.id and o.msg_id = e.seq)
    limit max;
    get diagnostics part = row_count;
    max := max - part;
  end if;
  if own is not null and max > 0 then
    return query execute format('select %s from %s e where e.xid = $1 and e.seq + 0 > $2
        and not exists (select from pgmq.passed_over o where o.queue = $3 and o.msg_id = e.seq) limit $4',
        pgmb.event_columns((select s.salt from pgmb.stream s where s.id = q.stream)), (unread.queue).log)
      using own, case when newest.own = own then newest.own_seq else 0 end, q.id, max;
  end if;
end $$;

-- Every message of a queue; bodies: with message and headers. Internal.
create or replace function pgmq.contents(queue pgmq.queue, bodies boolean)
returns setof pgmq.message_record
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  held pgmq.reading;
begin
  return query
  select p.msg_id, p.read_ct, p.enqueued_at, p.last_read_at, p.vt, p.message, p.headers
  from pgmq.parked p where p.queue = (contents.queue).id;
  for held in select * from pgmq.reading r where r.queue = (contents.queue).id order by r.lo loop
    return query
    select e.seq, 1, e.published_at, held.read_at, held.vt,
      case when bodies then e.payload::jsonb end, case when bodies then e.headers::jsonb end
    from pgmq.claim_of(held) c, pgmb.claim_events(c) e
    where c.id is not null and e.seq > held.lo and e.seq <= held.hi and (held.ids is null or e.seq = any (held.ids));
  end loop;
  return query
  select e.seq, 0, e.published_at, null::timestamptz, e.published_at,
    case when bodies then e.payload::jsonb end, case when bodies then e.headers::jsonb end
  from pgmq.unread(contents.queue) e;
  return query
  select t.seq, t.attempt - 1, t.published_at, null::timestamptz, t.due_at,
    case when bodies then t.payload::jsonb end, case when bodies then t.headers::jsonb end
  from pgmb.retry t where t.queue = (contents.queue).id;
end $$;

-- Every message of a queue, as the view pgmq.q_<name> shows it. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.messages(queue_name text)
returns setof pgmq.message_record
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query select * from pgmq.contents(pgmq.queue_for_reader(queue_name), true);
end $$;

-- How many messages a queue holds, how many of them may be read now, the ages of the newest and the oldest, and how many
-- were ever sent to it. Reads them all. Errors: 42P01 no such queue, 42501.
create or replace function pgmq.metrics(queue_name text)
returns pgmq.metrics_result
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  asked pgmq.queue := pgmq.queue_for_reader(metrics.queue_name);
  last bigint := pgmb.last_seq(asked.stream);
  counted pgmq.metrics_result;
begin
  select asked.queue_name, count(*), extract(epoch from clock_timestamp() - max(m.enqueued_at))::integer,
    extract(epoch from clock_timestamp() - min(m.enqueued_at))::integer, 0, clock_timestamp(),
    count(*) filter (where m.vt <= clock_timestamp()), null
  into counted
  from pgmq.contents(asked, false) m;
  -- Numbers begin anew at each segment.
  select sum(coalesce(g.last_seq, case when g.number = last >> 40 then last end) - (g.number::bigint << 40))
  into counted.total_messages
  from pgmb.segment g join pgmb.stream s on s.id = g.stream
  where s.name = asked.stream and g.number <= last >> 40;
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
