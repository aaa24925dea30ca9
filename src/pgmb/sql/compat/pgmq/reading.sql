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
  where c.queue = (reading).queue and c.id = (reading).claim and c.token = (reading).token and c.state in ('l', 'o')
    and not pgmb_internal.is_void(c.queue, c.id)
$$;

-- Notes that the newest claim of a queue, which this transaction just made, is a read whose messages come back at vt.
-- ids: those read, where they are not all of the claim.
create or replace function pgmq.note_reading(queue integer, ids bigint[], vt timestamptz, read_at timestamptz)
returns void
language plpgsql
as $$
declare
  claimed pgmb.claim;
begin
  select * into claimed from pgmb.claim c where c.queue = note_reading.queue order by c.id desc limit 1;
  if ids is null and claimed.events <> claimed.hi - claimed.lo then
    -- Numbers were left out, by a transaction that rolled back or has not committed yet.
    ids := array(select e.seq from pgmb_internal.claim_events(claimed) e order by e.seq);
  end if;
  if ids is not null then
    claimed.lo := ids[1] - 1;
    claimed.hi := ids[cardinality(ids)];
    claimed.events := cardinality(ids);
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

-- Moves what readings hold whose vt is not after `upto` to pgmq.parked, where each message has a row. Those that
-- another transaction is settling are left.
create or replace function pgmq.park_readings(queue pgmq.queue, upto timestamptz)
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
    insert into pgmq.parked (queue, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers)
    select ended.queue, e.seq, 1, e.published_at, ended.read_at, ended.vt, e.payload::jsonb, e.headers::jsonb
    from pgmb_internal.claim_events(held) e
    where e.seq > ended.lo and e.seq <= ended.hi and (ended.ids is null or e.seq = any (ended.ids));
    perform pgmq.end_reading(ended);
  end loop;
end $$;

-- Moves what pgmb itself would try again to pgmq.parked: after a rebase only.
create or replace function pgmq.park_retried(queue pgmq.queue)
returns void
language sql
as $$
  with back as (
    delete from pgmb.retry r where r.queue = (park_retried.queue).id
    returning r.seq, r.attempt - 1 read_ct, r.published_at, r.due_at, r.payload, r.headers
  ), dropped as (
    delete from pgmq.passed_over o using back b
    where o.queue = (park_retried.queue).id and o.msg_id = b.seq
    returning o.msg_id
  )
  insert into pgmq.parked (queue, msg_id, read_ct, enqueued_at, vt, message, headers)
  select (park_retried.queue).id, b.seq, b.read_ct, b.published_at, b.due_at, b.payload::jsonb, b.headers::jsonb
  from back b
  where not exists (select from dropped d where d.msg_id = b.seq)
  on conflict do nothing
$$;

-- Settles the newest claim of a queue, which this transaction just made.
create or replace function pgmq.settle_newest(queue integer)
returns void
language plpgsql
as $$
declare
  claimed pgmb.claim;
begin
  select * into claimed from pgmb.claim c where c.queue = settle_newest.queue order by c.id desc limit 1;
  perform pgmb.ack(pgmb_internal.lease_of(claimed.queue, claimed.id, claimed.token));
end $$;

-- Whether messages were taken out of the log's way.
create or replace function pgmq.has_passed_over(queue integer)
returns boolean
language sql stable
as $$
  select exists (select from pgmq.passed_over o where o.queue = has_passed_over.queue)
$$;

-- The next messages of the log, at most `max`, that contain `conditional`. popped: they leave the queue at once;
-- otherwise they come back at vt. Those passed over leave the log, those that do not contain it go to pgmq.parked,
-- where they may be read at once. Lock: the queue's, as pgmb.receive.
create or replace function pgmq.take_fresh(
  queue pgmq.queue, max integer, conditional jsonb, vt timestamptz, read_at timestamptz, popped boolean
)
returns setof pgmq.message_record
language plpgsql
as $$
declare
  claimed pgmb.claim;
  fresh pgmb.event[];
  left_out bigint[];
  unasked bigint[];
  given bigint[];
begin
  while max > 0 loop
    select array_agg((r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event order by r.seq)
    into fresh
    from pgmb.receive((take_fresh.queue).stream,
      case when take_fresh.conditional = '{}' then take_fresh.max else greatest(take_fresh.max, 500) end, interval '1000 years') r;
    exit when fresh is null;
    select * into claimed from pgmb.claim c where c.queue = (take_fresh.queue).id order by c.id desc limit 1;
    with dropped as (
      delete from pgmq.passed_over o
      where o.queue = (take_fresh.queue).id and o.msg_id in (select f.seq from unnest(fresh) f)
      returning o.msg_id
    )
    select coalesce(array_agg(d.msg_id), '{}') into left_out from dropped d;
    select coalesce(array_agg(f.seq), '{}') into given
    from (
      select f.seq from unnest(fresh) f
      where f.seq <> all (left_out)
        and (take_fresh.conditional = '{}' or f.payload::jsonb @> take_fresh.conditional)
      order by f.seq limit take_fresh.max) f;
    with kept as (
      insert into pgmq.parked (queue, msg_id, enqueued_at, vt, message, headers)
      select (take_fresh.queue).id, f.seq, f.published_at, f.published_at, f.payload::jsonb, f.headers::jsonb
      from unnest(fresh) f
      where f.seq <> all (left_out) and f.seq <> all (given)
      returning msg_id
    )
    select coalesce(array_agg(k.msg_id), '{}') into unasked from kept k;
    if popped or cardinality(given) = 0 then
      perform pgmb.ack(pgmb_internal.lease_of(claimed.queue, claimed.id, claimed.token));
    else
      if cardinality(given) < cardinality(fresh) then
        perform pgmb.ack(pgmb_internal.lease_of(claimed.queue, claimed.id, claimed.token), left_out || unasked);
      end if;
      perform pgmq.note_reading((take_fresh.queue).id, given, take_fresh.vt, take_fresh.read_at);
    end if;
    return query
    select f.seq, case when popped then 0 else 1 end, f.published_at, case when popped then null else take_fresh.read_at end,
      case when popped then f.published_at else take_fresh.vt end, f.payload::jsonb, f.headers::jsonb
    from unnest(fresh) f where f.seq = any (given);
    max := max - cardinality(given);
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
