-- Generations: the lock of a queue, and how consumers supersede a transaction that keeps it.

-- A claim's id contains its generation. PostgreSQL inlines these functions, and is_leased.
create or replace function pgmb_internal.claim_id(generation bigint, number bigint)
returns bigint
language sql immutable parallel safe
as $$
  select (generation << 40) + number
$$;

create or replace function pgmb_internal.generation_of(claim bigint)
returns bigint
language sql immutable parallel safe
as $$
  select claim >> 40
$$;

create or replace function pgmb_internal.number_in_generation(claim bigint)
returns bigint
language sql immutable parallel safe
as $$
  select claim & 1099511627775
$$;

create or replace function pgmb_internal.is_leased(state pgmb.claim_state)
returns boolean
language sql immutable parallel safe
as $$
  select state in ('leased', 'leased_retries')
$$;

-- Takes the queue's lock until the transaction ends and returns its newest claim, the queue's position.
-- Errors: MB002 the queue was dropped meanwhile, MB013 no generation can be opened.
create or replace function pgmb_internal.lock_queue(queue integer)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
  hint record;
begin
  -- The common way: no generation was opened since the last claim.
  select q.generation, q.lock_key into hint from pgmb.queue q where q.id = lock_queue.queue;
  if pg_try_advisory_xact_lock(hint.lock_key) then
    select * into base from pgmb.claim c where c.queue = lock_queue.queue order by c.id desc limit 1;
    if base.openings = pg_sequence_last_value('pgmb.opening'::regclass) and pgmb_internal.generation_of(base.id) = hint.generation then
      return base;
    end if;
  end if;
  return pgmb_internal.lock_newest(lock_queue.queue);
end $$;

-- The same where generations were opened, or where the queue is locked. A receive in a transaction that stays open would
-- hold up all others. So a caller that sees one transaction hold the lock for a whole second opens a new generation at the
-- last committed position, and that transaction's claim is void. A crowd is no such transaction: while the lock passes from
-- hand to hand, callers wait, for five minutes at most. The more wait, the less of the processor the holder may get: a hundred
-- callers allow it another second. In time: a caller leaves the short way after 0.2 s; after about 1.3 s one caller opens the next
-- generation, and others get the same events. The holder may still commit. Its lease is void then, and an ack of it raises MB011; or
-- its commit raises MB011, where it settled that lease or wrote what rests on it (pgmb_internal.refuse_void).
-- Errors: MB002 the queue was dropped meanwhile, MB013 two transactions in a row stay open, or the crowd is too large.
create or replace function pgmb_internal.lock_newest(queue integer)
returns pgmb.claim
language plpgsql
set lock_timeout = '100ms'
as $$
declare
  base pgmb.claim;
  newest record;
  wanted integer;
  key bigint;
  before bigint;                             -- the newest claim when this wait began
  at_rest boolean := false;                  -- none was committed during the last wait
  holders text[];                            -- the lock's holders when this wait began; null: nobody looked
  waiters integer;
  patience integer := 1000;                  -- milliseconds of the next wait in a crowd
  stalled integer := 0;
  given_up integer := -1;
  openings bigint;
  until timestamptz := clock_timestamp() + interval '5 minutes';
begin
  loop
    newest := pgmb_internal.newest_generation(lock_newest.queue);
    wanted := greatest(newest.opened, newest.opening, given_up + 1);
    key := pgmb_internal.queue_lock(lock_newest.queue, wanted);
    if not pg_try_advisory_xact_lock(key) then
      select c.id into before from pgmb.claim c where c.queue = lock_newest.queue order by c.id desc limit 1;
      -- One caller a second looks: that reads all locks of the server.
      holders := null;
      if at_rest and pg_try_advisory_xact_lock(pgmb_internal.lock_key(
        'watch ' || key || ' at ' || extract(epoch from clock_timestamp())::bigint))
      then
        select s.holders, s.waiters into holders, waiters from pgmb_internal.lock_state(key) s;
        perform set_config('lock_timeout', (1000 + 10 * waiters)::text, true);
      end if;
      begin
        perform pg_advisory_xact_lock(key);
      exception
        when lock_not_available then
          if clock_timestamp() >= until then
            perform pgmb_internal.raise_held(lock_newest.queue);
          end if;
          at_rest := not exists (select from pgmb.claim c where c.queue = lock_newest.queue and c.id > before);
          perform set_config('lock_timeout', case when at_rest then 1000 else patience end::text, true);
          patience := case when at_rest then 1000 else pgmb_internal.longer_wait(patience) end;
          -- Locks are granted in the order of arrival: who held this one before the wait and holds it after, did so all
          -- the time.
          continue when not at_rest or not coalesce(holders && (pgmb_internal.lock_state(key)).holders, false);
          given_up := wanted;
        when deadlock_detected then
          given_up := wanted;
      end;
      if given_up = wanted then
        stalled := stalled + 1;
        if stalled > 1 then
          perform pgmb_internal.raise_held(lock_newest.queue);
        end if;
        continue;
      end if;
    end if;
    -- Looked at again under the lock: whoever opens a generation from here on sees what was committed before. Those
    -- whose number is drawn by now have marked theirs before.
    openings := pg_sequence_last_value('pgmb.opening'::regclass);
    newest := pgmb_internal.newest_generation(lock_newest.queue);
    continue when greatest(newest.opened, newest.opening) > wanted;
    if newest.opened = wanted then
      select * into base from pgmb.claim c where c.queue = lock_newest.queue order by c.id desc limit 1;
    else
      base := pgmb_internal.open_generation(lock_newest.queue, wanted, clock_timestamp() + interval '1 second');
    end if;
    exit when base.id is not null;
  end loop;
  base.openings := openings;
  return base;
end $$;

-- The processes that hold an advisory lock, or the transactions that are prepared and do; and how many wait for it.
create or replace function pgmb_internal.lock_state(key bigint, out holders text[], out waiters integer)
language sql volatile
as $$
  select array_agg(coalesce(l.pid::text, l.virtualtransaction)) filter (where l.granted), count(*) filter (where not l.granted)
  from pg_locks l
  where l.locktype = 'advisory' and l.objsubid = 1
    and l.classid = (key >> 32 & 4294967295)::oid and l.objid = (key & 4294967295)::oid
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
$$;

-- Lets a statement wait for a lock until that time, from 50 to `patience` milliseconds, in a function with a lock_timeout
-- of its own.
create or replace function pgmb_internal.wait_until(until timestamptz, patience integer default 1000)
returns void
language sql volatile
as $$
  select set_config('lock_timeout', greatest(50,
    least(patience, floor(extract(epoch from (until - clock_timestamp())) * 1000)))::integer::text, true)
$$;

-- Waits for the lock of a queue's generation, while it passes from hand to hand, and returns whether it got it. Not where
-- one transaction keeps it: that is for lock_newest.
create or replace function pgmb_internal.try_lock(queue integer, generation integer, key bigint)
returns boolean
language plpgsql
set lock_timeout = '200ms'
as $$
declare
  before bigint;
  patience integer := 200;
begin
  loop
    -- A long transaction keeps this generation, and others have opened a newer one.
    if exists (select from pgmb.generation g
      where g.queue = try_lock.queue and g.number > try_lock.generation and g.base is not null)
    then
      return false;
    end if;
    select c.id into before from pgmb.claim c where c.queue = try_lock.queue order by c.id desc limit 1;
    begin
      perform pg_advisory_xact_lock(key);
      return true;
    exception when lock_not_available or deadlock_detected then
      if not exists (select from pgmb.claim c where c.queue = try_lock.queue and c.id > before) then
        return false;
      end if;
      patience := pgmb_internal.longer_wait(patience);
      perform set_config('lock_timeout', patience::text, true);
    end;
  end loop;
end $$;

-- How long to wait next for a lock that passes from hand to hand, in milliseconds. Locks are granted in the order of arrival,
-- and whoever gives up a wait goes to the end of the line: with waits of one length the unlucky would never get it. Newcomers
-- wait shortly, so that somebody sees soon whether it is kept.
create or replace function pgmb_internal.longer_wait(patience integer)
returns integer
language sql immutable
as $$
  select least(patience * 5, 5000)
$$;

-- The newest generation of a queue that was opened, and the newest that another transaction is opening at this moment or
-- has just opened. Errors: MB002 the queue was dropped.
create or replace function pgmb_internal.newest_generation(queue integer, out opened integer, out opening integer)
language plpgsql
as $$
begin
  select coalesce(max(g.number) filter (where g.base is not null), q.generation),
    max(g.number) filter (where g.base is null and g.xmax <> '0'::xid and pgmb_internal.fate(g.xmax) <> 'aborted')
  into opened, opening
  from pgmb.queue q left join pgmb.generation g on g.queue = q.id and g.number >= q.generation
  where q.id = newest_generation.queue
  group by q.id;
  if opened is null then
    perform pgmb_internal.raise_dropped();
  end if;
end $$;

-- What became of a transaction, by the 32 bits that a row shows of its id: in progress, committed or aborted.
create or replace function pgmb_internal.fate(xid xid)
returns text
language sql volatile
as $$
  -- Within 2^31 of the next one, on either side: a snapshot may be older than the row.
  select coalesce(pg_xact_status((near.next
    + ((fate.xid::text::bigint - near.next + 2147483648) & 4294967295) - 2147483648)::text::xid8), 'aborted')
  from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint next) near
$$;

-- Opens a generation under its lock and returns its first claim, the queue's position; null if a newer one is there by
-- now. First its row is marked, which every session sees; then transactions that are committing what they received are
-- waited for; then the position is read. So a claim that this does not find was not committed when it was marked. Waits
-- until that time. Errors: MB013.
create or replace function pgmb_internal.open_generation(queue integer, number integer, until timestamptz)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim;
begin
  -- Looked at before the mark, too: a mark that appears for a moment can make the call's commit fail.
  if pgmb_internal.is_administered(open_generation.queue) then
    perform pgmb_internal.raise_administered(open_generation.queue);
  end if;
  begin
    perform pgmb_internal.wait_until(open_generation.until);
    perform from pgmb.generation g
    where g.queue = open_generation.queue and g.number = open_generation.number and g.base is null
    for no key update;
    if not found then
      perform pgmb_internal.raise_held(open_generation.queue);
    end if;
    perform nextval('pgmb.opening');
    -- An administrative call takes its lock first and looks for marks later. So either this session sees the lock, or the
    -- call sees the mark.
    if pgmb_internal.is_administered(open_generation.queue) then
      perform pgmb_internal.raise_administered(open_generation.queue);
    end if;
    perform pgmb_internal.wait_until(open_generation.until);
    perform pgmb_internal.await_commits(open_generation.queue);
    select * into base from pgmb.claim c where c.queue = open_generation.queue order by c.id desc limit 1;
    if base.id is null or pgmb_internal.generation_of(base.id) >= open_generation.number then
      -- The mark goes with this block.
      raise exception 'overtaken' using errcode = 'MB099';
    end if;
    update pgmb.generation g set base = base.id, opened_at = clock_timestamp()
    where g.queue = open_generation.queue and g.number = open_generation.number;
    -- Rows for the next ones must have committed before they are marked: while this transaction stays open, others take
    -- those that were added earlier.
    insert into pgmb.generation (queue, number) values (open_generation.queue, open_generation.number + 8)
    on conflict do nothing;
    if not exists (select from pgmb.generation g
      where g.queue = open_generation.queue and g.number = open_generation.number + 1)
    then
      perform pgmb_internal.add_generations(open_generation.queue);
    end if;
  exception
    when sqlstate 'MB099' then
      return null;
    when lock_not_available then
      perform pgmb_internal.raise_held(open_generation.queue);
  end;
  -- The new generation's first claim is written at once, whatever the caller finds to receive: without
  -- it the void claim, once committed, would be the newest and so the queue's position.
  base.id := pgmb_internal.claim_id(open_generation.number, pgmb_internal.number_in_generation(base.id));
  perform pgmb_internal.write_position(base);
  base.id := base.id + 1;
  return base;
end $$;

-- The advisory lock of administrative calls on a queue, which its lanes and shards share.
create or replace function pgmb_internal.administration_lock(queue integer)
returns bigint
language sql stable
as $$
  select pgmb_internal.lock_key('administer queue ' || coalesce(q.lane_of, q.id)) from pgmb.queue q
  where q.id = administration_lock.queue
$$;

-- Keeps others from superseding this transaction in a queue, and from converting the queue, until the transaction ends. Calls
-- that write the position of a queue or delete its leases take it before the lock of any lane: a call that was superseded
-- would delete retries and leave the position where it was. `shared`: keeps only conversions and such calls out. Calls that
-- add events to a queue take it before they read the queue's lanes. Errors: MB013 another call holds the lock for 5 s.
create or replace function pgmb_internal.administer(queue integer, shared boolean default false)
returns void
language plpgsql
set lock_timeout = '5s'
as $$
declare
  key bigint := pgmb_internal.administration_lock(administer.queue);
begin
  if shared then
    perform pg_advisory_xact_lock_shared(key);
  else
    perform pg_advisory_xact_lock(key);
  end if;
exception when lock_not_available then
  perform pgmb_internal.raise_administered(administer.queue);
end $$;

-- Whether another transaction administers a queue. Takes no lock that stays.
create or replace function pgmb_internal.is_administered(queue integer)
returns boolean
language plpgsql
as $$
begin
  -- Null: the queue, or its lane, is gone.
  if pg_try_advisory_xact_lock_shared(pgmb_internal.administration_lock(is_administered.queue)) is not false then
    raise exception 'free' using errcode = 'MB099';
  end if;
  return true;
exception when sqlstate 'MB099' then
  return false;
end $$;

create or replace function pgmb_internal.raise_administered(queue integer)
returns void
language plpgsql
as $$
begin
  raise exception 'queue % is held by an administrative call', quote_literal(
      (select coalesce(head.name, q.name) from pgmb.queue q left join pgmb.queue head on head.id = q.lane_of
      where q.id = raise_administered.queue))
    using errcode = 'MB013',
      hint = 'A transaction that called seek, purge, convert_queue or redrive is still open, or waits. Try again when it has ended.';
end $$;

-- Waits until no transaction is committing that settled what it received of a queue.
create or replace function pgmb_internal.await_commits(queue integer)
returns void
language plpgsql
as $$
begin
  perform from pgmb.generation g where g.queue = await_commits.queue and g.number = -1 for update;
  -- Rolled back at once: others who open a generation must not wait for this transaction.
  raise exception 'waited' using errcode = 'MB099';
exception when sqlstate 'MB099' then
  null;
end $$;

-- Gives a queue rows for its next generations.
create or replace function pgmb_internal.add_generations(queue integer)
returns void
language sql
as $$
  insert into pgmb.generation (queue, number)
  select add_generations.queue, ahead
  from (select coalesce(max(g.number), -1) last from pgmb.generation g
    where g.queue = add_generations.queue and (g.base is not null or g.number = -1)) newest,
    generate_series(greatest(newest.last, 0) + 1, greatest(newest.last, 0) + 8) ahead
  on conflict do nothing
$$;

create or replace function pgmb_internal.raise_dropped()
returns void
language plpgsql
as $$
begin
  raise exception 'the queue was dropped' using errcode = 'MB002';
end $$;

-- Raises that a queue can neither be received from nor be taken over at this moment.
create or replace function pgmb_internal.raise_held(queue integer)
returns void
language plpgsql
as $$
declare
  name text := (select coalesce(head.name, q.name) from pgmb.queue q left join pgmb.queue head on head.id = q.lane_of
    where q.id = raise_held.queue);
begin
  if name is null then
    perform pgmb_internal.raise_dropped();
  end if;
  raise exception 'queue % is held by transactions that stay open', quote_literal(name)
    using errcode = 'MB013',
      hint = 'One received and settled and is prepared: commit or roll it back (pg_prepared_xacts). Or several received and stay open.';
end $$;

-- The advisory lock of a queue's generation. A stranger who saw it in pg_locks and holds it delays receivers for a
-- second: then they open the next generation, which has another.
create or replace function pgmb_internal.queue_lock(queue integer, generation integer)
returns bigint
language sql stable
as $$
  select pgmb_internal.lock_key('queue ' || queue || ' generation ' || generation)
$$;

-- Whether a claim was made void: a newer generation that counts went on from a claim before it. The newest generation
-- counts, and so does each that the base of one that counts belongs to.
create or replace function pgmb_internal.is_void(queue integer, claim bigint)
returns boolean
language sql stable
as $$
  with recursive counting (number, base) as (
    (select g.number, g.base from pgmb.generation g
    where g.queue = is_void.queue and g.number > pgmb_internal.generation_of(is_void.claim) and g.base is not null
    order by g.number desc limit 1)
    union all
    select g.number, g.base from counting c
    join pgmb.generation g on g.queue = is_void.queue and g.number = pgmb_internal.generation_of(c.base) and g.base is not null
    where g.number > pgmb_internal.generation_of(is_void.claim)
  )
  select exists (select from counting c where c.base < is_void.claim)
$$;

-- How a committed claim stands: `holds`, whatever happens; `void`; `undecided`: a transaction is opening a generation and
-- may not have seen it. Asked after the claim committed, `holds` stays true: a generation that is opened later goes on from
-- this claim or a later one. Errors: 40001 by the caller's snapshot this cannot be told.
create or replace function pgmb_internal.standing(queue integer, claim bigint)
returns text
language plpgsql
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  newer record;
begin
  loop
    select bool_or(g.base is not null) opened, bool_or(g.base is null and pgmb_internal.fate(g.xmax) = 'in progress') opening,
      bool_or(g.base is null and pgmb_internal.fate(g.xmax) = 'committed') unseen
    into newer
    from pgmb.generation g
    where g.queue = standing.queue and g.number > pgmb_internal.generation_of(standing.claim)
      and (g.base is not null or g.xmax <> '0'::xid);
    exit when newer.unseen is not true;
    -- It committed after this statement's snapshot: the next statement sees it, unless they share one.
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
      perform pgmb_internal.raise_moved_on();
    end if;
  end loop;
  -- A queue without generations was dropped, or was a lane that a conversion removed: that delivers the lane's events again.
  if newer.opened and pgmb_internal.is_void(standing.queue, standing.claim)
    or not exists (select from pgmb.generation g where g.queue = standing.queue and g.number = -1)
  then
    return 'void';
  end if;
  -- A later claim of the same generation by another transaction was made after this one committed, and looked for
  -- openers first: whoever opens now saw it.
  if newer.opening and not exists (
    select from pgmb.claim later
    where later.queue = standing.queue and later.id > standing.claim
      and later.id < pgmb_internal.claim_id(pgmb_internal.generation_of(standing.claim) + 1, 0)
      and later.xid <> (select own.xid from pgmb.claim own where own.queue = standing.queue and own.id = standing.claim))
  then
    return 'undecided';
  end if;
  return 'holds';
end $$;

-- Whether a claim was made void or may be.
create or replace function pgmb_internal.may_be_void(queue integer, claim bigint)
returns boolean
language sql volatile
as $$
  select pgmb_internal.standing(may_be_void.queue, may_be_void.claim) <> 'holds'
$$;

-- A transaction that received and settled in one go may have been superseded while it stayed open: it must
-- not commit then, or its effects would happen twice. A deferred constraint trigger on pgmb.claim (access/grants.sql), which fires where
-- a transaction writes a claim's xid again (pgmb_internal.recheck_at_commit). Holds a row that whoever opens a generation
-- waits for (pgmb_internal.await_commits), so that nobody supersedes between this check and the commit.
create or replace function pgmb_internal.refuse_void()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.hold_generation(new.queue);
  -- Whoever begins to open a generation after this look waits for this transaction (see pgmb.opening).
  if new.openings <> pg_sequence_last_value('pgmb.opening'::regclass) and pgmb_internal.may_be_void(new.queue, new.id) then
    if pg_backend_pid()::text = any ((pgmb_internal.lock_state(pgmb_internal.administration_lock(new.queue))).holders) then
      perform pgmb_internal.raise_held(new.queue);
    end if;
    raise exception 'the lease was superseded: this transaction stayed open for too long after its receive'
      using errcode = 'MB011', hint = 'Receive in a transaction of its own, or finish within a second.';
  end if;
  return null;
end $$;

-- Keeps generations of a queue from being opened until this transaction ends, but for those that are marked already.
create or replace function pgmb_internal.hold_generation(queue integer)
returns void
language sql
set enable_seqscan = off
set jit = off
as $$
  select from pgmb.generation g where g.queue = hold_generation.queue and g.number = -1 for share
$$;

-- Raises that another session moved the queue's position behind this transaction's snapshot.
create or replace function pgmb_internal.raise_moved_on()
returns void
language plpgsql
as $$
begin
  raise exception 'the queue moved on after this transaction''s snapshot' using errcode = '40001',
    hint = 'Try the transaction again.';
end $$;
