-- Length caps that refuse: a trigger on the log of a stream that has a queue with max_length and
-- when_full 'refuse', and on no other, so that publishing elsewhere costs nothing. (when_full 'drop_oldest' is
-- receive's work.)

-- Gives a stream's log the trigger that refuses events when a queue is full, or takes it away, as its queues
-- need it. Lock: SHARE ROW EXCLUSIVE on the log to create, ACCESS EXCLUSIVE to drop, to the end of the
-- transaction; waits for it 50 ms at a time, so that publishers queued behind never wait longer. A trigger that
-- cannot be dropped now refuses nothing, and maintain() tries again, once. Errors: MB004 the log is in use.
create or replace function pgmb_internal.guard_stream(stream text, attempts integer default 30)
returns void
language plpgsql
set lock_timeout = '50ms'
as $$
declare
  log text := format('pgmb.%I', 'log_' || stream);
  wanted boolean := exists (select from pgmb.queue q
    where q.stream_name = guard_stream.stream and q.max_length is not null and q.when_full = 'refuse');
begin
  -- Without haste to drop: it refuses nothing any more.
  for attempt in 1 .. case when wanted then attempts else least(attempts, 3) end loop
    exit when wanted = exists (select from pg_trigger t where t.tgrelid = log::regclass and t.tgname = 'refuse_full');
    begin
      if wanted then
        -- What release_due brings was accepted before. Only the owner can pass this way.
        execute format('create trigger refuse_full before insert on %s for each statement
          when (current_user <> %L or current_setting(''pgmb.releasing'', true) is distinct from ''on'')
          execute function pgmb_internal.refuse_full(%s)', log,
          (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = log::regclass), pgmb.stream_id(stream));
      else
        execute format('drop trigger refuse_full on %s', log);
      end if;
    exception when lock_not_available then
      if attempt < attempts then
        perform pg_sleep(0.05 + random() * 0.1);
      elsif wanted and attempts > 1 then
        raise exception 'stream % is in use: its log could not be locked to cap a queue', quote_literal(stream)
          using errcode = 'MB004', hint = 'A transaction that published to it is still open. Try again when it has ended.';
      end if;
    end;
  end loop;
end $$;

-- An upper bound of how many events wait in a queue: retries, and numbers of the log whatever their topic, which costs the same for any
-- backlog. Only where that reaches `most` are events counted. Neither has leased events, nor the few that committed late.
create or replace function pgmb_internal.waiting_upto(queue pgmb.queue, most bigint)
returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  newest pgmb.claim;
  last bigint := pgmb_internal.last_seq((queue).stream_name);
  lagging pgmb.pending;
  place bigint;
  retries bigint;
  estimate bigint;
  waiting bigint;
  leaf text;
  part bigint;
begin
  select * into newest from pgmb_internal.queue_position((waiting_upto.queue).id);
  place := pgmb_internal.reached(newest);
  select count(*) into retries from (
    select from pgmb.retry r where r.queue = (waiting_upto.queue).id and r.lease is null limit most) unleased;
  estimate := retries
    + pgmb_internal.numbers_between((queue).stream, least(place, (select min(l.place) from unnest(newest.lagging) l)), last);
  if estimate < most then
    return estimate;
  end if;
  waiting := retries;
  if newest.lagging is not null then
    select * into lagging from pgmb_internal.lagging_range(queue, newest);
    waiting := waiting + (pgmb_internal.count_newest((queue).stream, (lagging.batch).done, (lagging.batch).seen, lagging.lo,
      lagging.hi, (queue).matching || lagging.matching, most - waiting)).counted;
  end if;
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
    where s.stream = (queue).stream and s.number between pgmb_internal.segment_of(place) and pgmb_internal.segment_of(last) and s.dropped_at is null
    order by s.number
  loop
    exit when waiting >= most;
    execute 'select count(*) from (select from ' || leaf || ' e where e.seq > $1 and e.seq <= $2'
                || ' and not pgmb_internal.is_passed($3, e.seq, e.xid)' || (queue).matching || ' limit $4) matching'
      into part using place, last, newest, most - waiting;
    waiting := waiting + part;
  end loop;
  return waiting;
end $$;

-- Refuses events for a stream of which a queue is full: the trigger that guard_stream makes, once a statement.
-- A statement may bring any number of events, and several publishers may find room at once: a queue can so
-- come to hold more than its max_length. Errors: MB040 a queue is full.
create or replace function pgmb_internal.refuse_full()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  capped pgmb.queue;
  waiting bigint;
  last bigint;
  room text;
  secret text := (select i.secret from pgmb.installation i);
begin
  for capped in
    select q.* from pgmb.queue q
    where q.stream = tg_argv[0]::integer and q.max_length is not null and q.when_full = 'refuse'
  loop
    -- A session that found room need not look again before that many numbers are gone. It could set this itself, and so
    -- the note is signed.
    room := current_setting('pgmb.room_' || capped.id, true);
    last := pgmb_internal.last_seq(capped.stream_name);
    continue when split_part(room, '/', 1) = capped.max_length::text
      and split_part(room, '/', 3) = md5(concat_ws('/', secret, capped.uid, capped.max_length, split_part(room, '/', 2)))
      and split_part(room, '/', 2)::bigint > last;
    waiting := pgmb_internal.waiting_upto(capped, capped.max_length);
    if waiting >= capped.max_length then
      raise exception 'queue % is full: % events wait, max_length is %', quote_literal(capped.name), waiting, capped.max_length
        using errcode = 'MB040',
          hint = 'Consume it, purge it, or raise max_length with pgmb.alter_queue(queue, max_length => …).';
    end if;
    last := last + capped.max_length - waiting;
    perform set_config('pgmb.room_' || capped.id, concat_ws('/', capped.max_length, last,
      md5(concat_ws('/', secret, capped.uid, capped.max_length, last))), false);
  end loop;
  return null;
end $$;
