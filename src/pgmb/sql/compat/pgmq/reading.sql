-- What lies between the log and a read: readings, and how they end. Functions here run inside definer functions that
-- have asked who calls.

-- The lease of pgmb under which a reading holds its messages.
create or replace function pgmq.lease(reading pgmq.reading)
returns uuid
language sql immutable
as $$
  select pgmb_internal.lease_of((reading).queue, (reading).claim, (reading).token)
$$;

-- The claim of a reading, if it still holds its messages.
create or replace function pgmq.claim_of(reading pgmq.reading)
returns pgmb.claim
language sql stable
as $$
  select c from pgmb.claim c
  where c.queue = (reading).queue and c.id = (reading).claim and c.token = (reading).token and c.state = 'leased'
    and not pgmb_internal.is_void(c.queue, c.id)
$$;

-- Notes that the newest claim of a queue, which this transaction just made, is a read whose messages come back at vt.
create or replace function pgmq.note_reading(queue integer, vt timestamptz, read_at timestamptz)
returns void
language plpgsql
as $$
declare
  claimed pgmb.claim;
  ids bigint[];
begin
  select * into claimed from pgmb.claim c where c.queue = note_reading.queue order by c.id desc limit 1;
  if claimed.seqs is not null then
    -- Numbers were left out, by a transaction that rolled back or has not committed yet.
    ids := array(select one from unnest(claimed.seqs) one order by one);
    claimed.lo := ids[1] - 1;
    claimed.hi := ids[cardinality(ids)];
    if claimed.events = claimed.hi - claimed.lo then
      ids := null;
    end if;
  end if;
  insert into pgmq.reading (queue, claim, token, lo, hi, ids, events, vt, read_at)
  values (claimed.queue, claimed.id, claimed.token, claimed.lo, claimed.hi, ids, claimed.events, note_reading.vt,
    note_reading.read_at);
end $$;

-- Settles a reading with all that it holds. Returns how many messages that settled now; null if another transaction
-- was first. Lock: the row of the reading.
create or replace function pgmq.end_reading(reading pgmq.reading)
returns bigint
language plpgsql
as $$
begin
  delete from pgmq.reading r
  where r.queue = (end_reading.reading).queue and r.lo = (end_reading.reading).lo and r.claim = (end_reading.reading).claim;
  if not found then
    return null;
  end if;
  return pgmb.ack(pgmq.lease(end_reading.reading));
end $$;

-- For how long one call moves messages to pgmq.parked before it leaves the rest to the next call. A reader that kept the
-- queue's lock for a second would be superseded by the others (pgmb_internal.lock_newest), and all that it moved would be
-- rolled back.
create or replace function pgmq.part_of_a_call()
returns interval
language sql stable
as $$
  select pgmb_internal.deadline(interval '200 milliseconds') - statement_timestamp()
$$;

-- Moves what readings hold whose vt is not after `upto` to pgmq.parked, where each message has a row, until `stop_at`; at
-- least one reading. Those that another transaction is settling are left.
create or replace function pgmq.park_readings(queue pgmq.queue, upto timestamptz, stop_at timestamptz)
returns void
language plpgsql
as $$
declare
  ended pgmq.reading;
  held pgmb.claim;
begin
  for ended in
    select * from pgmq.reading r
    where r.queue = (park_readings.queue).id and r.vt <= park_readings.upto order by r.vt for update skip locked
  loop
    held := pgmq.claim_of(ended);
    if held.id is null then
      delete from pgmq.reading r where r.queue = ended.queue and r.lo = ended.lo and r.claim = ended.claim;
      continue;
    end if;
    continue when held.xid <> pg_current_xact_id() and pgmb_internal.may_be_void(held.queue, held.id);
    insert into pgmq.parked (queue, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers, fifo)
    select ended.queue, e.seq, 1, e.published_at, ended.read_at, ended.vt, e.payload::jsonb, e.headers::jsonb,
      pgmq.fifo_of(e.headers::jsonb)
    from pgmb_internal.claim_events(held) e
    where e.seq > ended.lo and e.seq <= ended.hi and (ended.ids is null or e.seq = any (ended.ids));
    perform pgmq.end_reading(ended);
    exit when clock_timestamp() >= stop_at;
  end loop;
end $$;

-- Moves what pgmb itself would try again to pgmq.parked, and says whether there was any: after a rebase only.
create or replace function pgmq.park_retried(queue integer)
returns boolean
language plpgsql
as $$
begin
  if not exists (select from pgmb.retry r where r.queue = park_retried.queue) then
    return false;
  end if;
  with back as (
    delete from pgmb.retry r where r.queue = park_retried.queue
    returning r.seq, r.attempt - 1 read_ct, r.published_at, r.due_at, r.payload, r.headers
  ), dropped as (
    delete from pgmq.passed_over o using back b
    where o.queue = park_retried.queue and o.msg_id = b.seq
    returning o.msg_id
  )
  insert into pgmq.parked (queue, msg_id, read_ct, enqueued_at, vt, message, headers, fifo)
  select park_retried.queue, b.seq, b.read_ct, b.published_at, b.due_at, b.payload::jsonb, b.headers::jsonb,
    pgmq.fifo_of(b.headers::jsonb)
  from back b
  where not exists (select from dropped d where d.msg_id = b.seq)
    and not exists (select from pgmq.parked p where p.queue = park_retried.queue and p.msg_id = b.seq);
  return true;
end $$;

-- Settles the newest claim of a queue if this transaction made it after claim `after` and has not settled it. Returns its
-- id, or null. The transaction cannot commit if it is superseded meanwhile (pgmb_internal.refuse_void).
-- An earlier claim of the transaction belongs to a reading: a receive that finds nothing writes no claim, and settling the
-- newest one would lose the messages of that reading.
create or replace function pgmq.settle_newest(queue integer, after bigint)
returns bigint
language plpgsql
as $$
declare
  settled bigint;
begin
  update pgmb.claim c set state = 'settled', xid = c.xid
  where c.queue = settle_newest.queue and c.state = 'leased' and c.xid = pg_current_xact_id_if_assigned()
    and c.id = (select newest.id from pgmb.claim newest where newest.queue = settle_newest.queue order by newest.id desc limit 1)
    and c.id > settle_newest.after
  returning c.id into settled;
  return settled;
end $$;

-- Whether messages were taken out of the log's way.
create or replace function pgmq.has_passed_over(queue integer)
returns boolean
language sql stable
as $$
  select exists (select from pgmq.passed_over o where o.queue = has_passed_over.queue)
$$;

-- When a message of pgmq.parked may be read, as callers see it.
create or replace function pgmq.visible_from(vt timestamptz, enqueued_at timestamptz)
returns timestamptz
language sql immutable
as $$
  select case when vt = '-infinity' then enqueued_at else vt end
$$;

-- Moves the next messages of the log, `most` at a time, to pgmq.parked, except for those passed over, which leave the
-- queue. Returns the first `wanted` of them that contain `conditional`: they are hidden until vt, or popped: they leave the
-- queue too. The others may be read at once: small reads cost less by the row than by the range, and share the cost of
-- the range. Stops after pgmq.part_of_a_call(); the next call goes on from there. Lock: the queue's, as pgmb.receive.
create or replace function pgmq.take_fresh(
  queue pgmq.queue, most integer, wanted integer, conditional jsonb, vt timestamptz, read_at timestamptz, popped boolean
)
returns setof pgmq.message_record
language plpgsql
as $$
declare
  given integer;
  stop_at timestamptz := clock_timestamp() + pgmq.part_of_a_call();
  -- The newest claim before the receive.
  newest bigint := (select c.id from pgmb_internal.queue_position((take_fresh.queue).id) c);
begin
  loop
    return query
    with fresh as materialized (
      select r.seq, r.published_at, r.payload::jsonb message, r.headers::jsonb headers
      from pgmb.receive((take_fresh.queue).stream, take_fresh.most, interval '1000 years', raw => true) r
    ), dropped as (
      delete from pgmq.passed_over o using fresh f
      where o.queue = (take_fresh.queue).id and o.msg_id = f.seq
      returning o.msg_id
    ), sorted as materialized (
      select f.seq, f.published_at, f.message, f.headers,
        m.matches and row_number() over (partition by m.matches order by f.seq) <= take_fresh.wanted given
      from fresh f
      cross join lateral (
        select case when take_fresh.conditional = '{}' then true else f.message @> take_fresh.conditional end matches) m
      where not exists (select from dropped d where d.msg_id = f.seq)
    ), kept as (
      insert into pgmq.parked (queue, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers, fifo)
      select (take_fresh.queue).id, s.seq, s.given::integer, s.published_at, case when s.given then take_fresh.read_at end,
        case when s.given then take_fresh.vt else '-infinity' end, s.message, s.headers, pgmq.fifo_of(s.headers)
      from sorted s
      where not (s.given and take_fresh.popped)
    )
    select s.seq, (not popped)::integer, s.published_at, case when not popped then take_fresh.read_at end,
      case when popped then s.published_at else take_fresh.vt end, s.message, s.headers
    from sorted s where s.given order by s.seq;
    get diagnostics given = row_count;
    newest := pgmq.settle_newest((take_fresh.queue).id, newest);
    exit when newest is null;
    wanted := wanted - given;
    exit when wanted <= 0 or clock_timestamp() >= stop_at;
  end loop;
end $$;

-- A read in a transaction that stayed open for too long may have been superseded, and others have its messages: then it
-- must not commit. Runs at commit, as pgmb_internal.refuse_void.
create or replace function pgmq.refuse_superseded()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.hold_generation(new.queue);
  if pgmb_internal.may_be_void(new.queue, new.claim) then
    raise exception 'the read was superseded: this transaction stayed open for too long after it'
      using errcode = 'MB011', hint = 'Read in a transaction of its own, or finish within a second.';
  end if;
  return null;
end $$;

do $$
begin
  if not exists (
    select from pg_trigger t where t.tgrelid = 'pgmq.reading'::regclass and t.tgname = 'refuse_superseded'
  ) then
    create constraint trigger refuse_superseded after insert on pgmq.reading
      deferrable initially deferred
      for each row execute function pgmq.refuse_superseded();
  end if;
end $$;
