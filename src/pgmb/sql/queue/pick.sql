-- Which events of a queue with a policy may be delivered now, and what becomes of those that may not.

-- The origin of the first row of pgmb.retry of an ordered queue, but for dead letters that were put back; null: there is
-- none. Exact, unlike a scan for due rows: an event that another one of its key must follow is never overlooked.
create or replace function pgmb_internal.lowest_origin(base pgmb.claim)
returns bigint
language plpgsql
as $$
begin
  return (
    select r.origin from pgmb.retry r
    where r.queue = (base).queue and r.ordered and r.origin >= coalesce((base).first_origin, 1)
    order by r.origin limit 1);
end $$;

-- The events of a key in pgmb.retry, from where the queue's position says that they begin.
create or replace function pgmb_internal.events_of_key(base pgmb.claim, key text)
returns setof pgmb.retry
language sql stable
as $$
  select r.* from pgmb.retry r
  where r.queue = (base).queue and r.ordered and r.key = events_of_key.key
    and (r.origin, r.seq) >= (
      greatest((base).passed_origins[array_position((base).passed_keys, events_of_key.key)], (base).first_origin, 1),
      case when (base).passed_origins[array_position((base).passed_keys, events_of_key.key)]
          >= coalesce((base).first_origin, 1)
        then (base).passed_seqs[array_position((base).passed_keys, events_of_key.key)] else 0 end)
$$;

-- The first event of a key in pgmb.retry. Dead letters that were put back have the origin 0 and come before others.
create or replace function pgmb_internal.first_of_key(base pgmb.claim, key text)
returns setof pgmb.retry
language sql stable
as $$
  select * from (
    (select r.* from pgmb.retry r
    where r.queue = (base).queue and r.ordered and r.key = first_of_key.key and r.origin = 0
    order by r.origin, r.seq limit 1)
    union all
    (select r.* from pgmb_internal.events_of_key(base, first_of_key.key) r order by r.origin, r.seq limit 1)) first
  order by first.origin, first.seq limit 1
$$;

-- A queue's position with where the keys of rows of pgmb.retry begin, which are about to be leased and are the first of
-- their keys. It keeps 64 keys, those that were leased last. No row can come to lie before: only a lease that holds a key
-- returns its events to an earlier place, and dead letters that are put back have a place of their own.
create or replace function pgmb_internal.pass_keys(base pgmb.claim, leased bigint[])
returns pgmb.claim
language plpgsql
as $$
begin
  with begun as (
    select distinct on (r.key) r.key, r.origin, r.seq from pgmb.retry r
    where r.id = any (leased) and r.key is not null and r.origin > 0
    order by r.key, r.origin, r.seq
  )
  select array_agg(k.key), array_agg(k.origin), array_agg(k.seq)
  into base.passed_keys, base.passed_origins, base.passed_seqs
  from (
    select b.key, b.origin, b.seq, 0 age from begun b
    union all
    select o.key, o.origin, o.seq, o.age
    from unnest(base.passed_keys, base.passed_origins, base.passed_seqs) with ordinality o (key, origin, seq, age)
    where o.key not in (select b.key from begun b)
    order by age limit 64) k;
  return base;
end $$;

-- As lease_due, in an ordered queue: of each key the first event that waits, if it is due and no lease holds
-- the key, and those behind it. The next of each key that stays is due from now on, and only blocked: nothing has to
-- wake it when those ahead are settled, and so no settlement can miss it.
create or replace function pgmb_internal.lease_due_in_order(
  base pgmb.claim, max integer, first timestamptz, now timestamptz, expires_at timestamptz,
  max_attempts integer, token bigint, busy integer[]
)
returns bigint
language plpgsql
as $$
declare
  -- How many due rows are looked at: more than are wanted, because hundreds may have the same key.
  most bigint := greatest(max * 4, 1000);
  noted constant boolean := pgmb_internal.has_noted(base.flight);
  looked bigint;
  leased bigint[];
  events bigint;
begin
  loop
    with due as materialized (
      select later.id, later.key from pgmb.retry later
      where later.queue = (lease_due_in_order.base).queue
        and later.due_at >= lease_due_in_order.first and later.due_at <= lease_due_in_order.now
        and (later.key is null or pgmb_internal.key_hash(later.key) <> all (lease_due_in_order.busy)
          and (not noted or not pgmb_internal.is_noted(base.queue, base.flight, pgmb_internal.key_hash(later.key))))
      order by later.due_at
      limit most
    ), head as materialized (
      select later.id, later.key, later.due_at, later.origin, later.seq,
        pgmb_internal.weight(later.payload) + coalesce(pgmb_internal.weight(later.headers), 0) weight,
        pgmb_internal.comes_alone(later, lease_due_in_order.max_attempts) alone
      from pgmb.retry later
      -- By id alone: with a condition on due_at, a plan made while the table was small reads all that is due.
      where later.id = any (array(
        select d.id from due d where d.key is null
        union all
        select ahead.id from (select distinct d.key from due d where d.key is not null) waiting
        cross join lateral pgmb_internal.first_of_key(lease_due_in_order.base, waiting.key) ahead
        where ahead.due_at <= lease_due_in_order.now))
        and later.lease is null
      order by later.due_at
      limit lease_due_in_order.max
      for update skip locked
    ), chosen as (
      select c.id, c.key, c.origin, c.seq, c.due_at, c.weight
      from (
        select h.*, row_number() over w place, bool_or(h.alone) over w stopped
        from head h
        window w as (order by h.due_at, h.id)) c
      where c.place = 1 or not c.stopped
    ), behind as (
      select b.id, c.due_at, b.origin, b.seq, b.weight
      from chosen c
      cross join lateral (
        select r.id, r.origin, r.seq,
          pgmb_internal.weight(r.payload) + coalesce(pgmb_internal.weight(r.headers), 0) weight,
          -- One that was tried waits by its own backoff, even behind one that is due.
          bool_and(r.lease is null and (r.attempt = 1 or r.due_at <= lease_due_in_order.now))
            over (order by r.origin, r.seq) free
        from (
          select * from pgmb.retry one
          where one.queue = (lease_due_in_order.base).queue and one.ordered and one.key = c.key
            and (one.origin, one.seq) > (c.origin, c.seq)
          order by one.origin, one.seq
          limit lease_due_in_order.max) r) b
      where b.free and not exists (select from head h where h.alone)
    )
    select array_agg(t.id), (select count(*) from due) into leased, looked
    from (
      select taken.id, row_number() over w place, sum(taken.weight) over w - taken.weight before
      from (
        select c.id, c.due_at, c.origin, c.seq, c.weight from chosen c
        union all
        select b.id, b.due_at, b.origin, b.seq, b.weight from behind b) taken
      window w as (order by taken.due_at, taken.origin, taken.seq)
      -- Heads first sort before what is behind them: a limit never parts a key's first from its second.
      order by place
      limit lease_due_in_order.max) t
    where t.before < pgmb_internal.batch_bytes();
    exit when leased is not null;
    if looked < most then
      return 0;
    end if;
    most := most * 8;
  end loop;
  base := pgmb_internal.pass_keys(base, leased);
  events := pgmb_internal.lease_retried(base, leased, lease_due_in_order.expires_at,
    lease_due_in_order.token, lease_due_in_order.now);
  if events > 0 then
    perform pgmb_internal.wake_first(base, array(
      select distinct t.key from pgmb.retry t where t.id = any (leased) and t.key is not null), lease_due_in_order.now);
  end if;
  return events;
end $$;

-- Makes the first event of each key that waits in pgmb.retry due from now on; one that was tried waits by its own backoff.
create or replace function pgmb_internal.wake_first(base pgmb.claim, keys text[], now timestamptz)
returns void
language plpgsql
as $$
begin
  update pgmb.retry r set due_at = wake_first.now, decided_at = wake_first.now
  -- By id alone: a join would read the whole table for each key.
  where r.id = any (array(
    select waiting.id
    from unnest(keys) woken (key)
    cross join lateral (
      select * from pgmb_internal.events_of_key(base, woken.key) first
      where first.lease is null order by first.origin, first.seq limit 1) waiting
    where waiting.attempt = 1 and waiting.due_at > wake_first.now));
end $$;

-- Sets events of an ordered queue aside that lie above its position and up to `upto`: those of the keys `behind`, by their
-- hashes, that were published after `ending`. keys: which keys these are.
create or replace function pgmb_internal.park(
  q pgmb.queue, base pgmb.claim, upto bigint, behind integer[], keys text[], ending timestamptz, now timestamptz
)
returns void
language plpgsql
as $$
declare
  first bigint[];
  others bigint[];
begin
  select coalesce(array_agg(e.seq) filter (where e.first), '{}'), coalesce(array_agg(e.seq) filter (where not e.first), '{}')
  into first, others
  from (
    select k.seq, k.key_place = 1 and not exists (
      select from pgmb_internal.events_of_key(base, k.key) waiting where waiting.lease is null) first
    from (
      select parked.seq, parked.key, row_number() over (partition by parked.key order by parked.seq) key_place
      from pgmb_internal.batch_events(q.stream, pgmb_internal.batch_of(base), base.place, upto,
        q.matching || pgmb_internal.with_keys(behind)
          || case when ending is null then '' else format(' and e.published_at > %L', ending) end, raw => true) parked) k
    order by k.seq) e;
  -- The first behind a lease is due now, so that the first receive after that lease ends finds it: nothing has to wake it. The others
  -- are due at infinity until it is leased (pgmb_internal.wake_first).
  if pgmb_internal.fail_events(q, first, base.id + 1, 0, now, null) > 0 then
    perform pgmb_internal.fail_events(q, others, base.id + 1, 0, 'infinity', null);
    -- A first one became a dead letter.
    perform pgmb_internal.wake_first(base, keys, now);
  elsif cardinality(others) > 0 then
    perform pgmb_internal.fail_events(q, others, base.id + 1, 0, 'infinity', null);
  end if;
end $$;

-- The next events of a queue above its position and up to `hi`, at most `most`: what its policy decides about.
create or replace function pgmb_internal.candidates(q pgmb.queue, base pgmb.claim, hi bigint, most bigint)
returns table (seq bigint, key text, published_at timestamptz)
language plpgsql
as $$
declare
  segment bigint := pgmb_internal.segment_of(base.place);
begin
  -- The common way: one segment, no stragglers, and a condition that the functions of segments know. Planned once a session.
  if base.place >= base.done_seq and segment = pgmb_internal.segment_of(hi) and q.lanes is null and not pgmb_internal.asks(q) then
    if q.stream_name = 'main' then
      return query
      select * from pgmb_internal.candidates_main(segment, base.place, hi, base.batch_snapshot,
        pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot, pg_snapshot_xmax(base.done_snapshot), q.topics, q.regex,
        q.shards - 1, q.lane, most);
    else
      return query execute format(
          'select * from pgmb_internal.candidates_%s_%s($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)', q.stream, segment)
        using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
          pg_snapshot_xmax(base.done_snapshot), q.topics, q.regex, q.shards - 1, q.lane, most;
    end if;
    return;
  end if;
  return query
  select e.seq, e.key, e.published_at
  from pgmb_internal.batch_events(q.stream, pgmb_internal.batch_of(base), base.place, hi, q.matching, most, true) e;
end $$;

-- Which events of a queue above its position and up to `hi` are to be delivered now, at most `allowed`: those up to
-- `upto` numbered `taken`. Those older than the queue lets them live become dead letters,
-- `expired`. In an ordered queue those whose key is held wait in pgmb.retry, behind what holds it; `keys` are the
-- hashes of those taken. looked: how many were read; aside: how many of them were parked. wrote: events were parked or became
-- dead letters. waits:
-- nothing is taken, because 200 events of these keys are set aside already and the last lease is less than a second old. retried: the
-- queue may have events that wait.
create or replace function pgmb_internal.pick(
  q pgmb.queue, base pgmb.claim, hi bigint, allowed bigint, now timestamptz, busy integer[], youngest timestamptz,
  retried boolean,
  out taken bigint[], out upto bigint, out expired bigint[], out keys integer[], out looked bigint, out aside bigint, out wrote boolean,
  out waits boolean
)
language plpgsql
as $$
declare
  most bigint := allowed;
  last bigint;
  behind integer[];
  blocked_keys text[];
  ending timestamptz := now - q.ttl;
  noted constant boolean := q.ordered and pgmb_internal.has_noted(base.flight);
begin
  aside := 0;
  if retried or cardinality(busy) > 0 or noted then
    -- Besides those that can be delivered, as many are read that perhaps cannot, and not just a few: each look has its
    -- cost, and behind a lease there may be many.
    most := greatest(allowed * 2, 200);
  end if;
  if q.ordered and most = allowed then
    -- No key is held and nothing waits: all that is read may go.
    select array_agg(e.seq) filter (where not e.old), count(*), max(e.seq),
      coalesce(array_agg(e.seq) filter (where e.old), '{}'),
      array_agg(distinct e.held) filter (where not e.old)
    into taken, looked, last, expired, keys
    from (
      select c.seq, coalesce(c.published_at <= ending, false) old, pgmb_internal.key_hash(c.key) held
      from pgmb_internal.candidates(q, base, pick.hi, most) c) e;
  elsif q.ordered then
    with read as materialized (
      select c.seq, c.key is not null keyed, c.key, coalesce(c.published_at <= ending, false) old,
        pgmb_internal.key_hash(c.key) held
      from pgmb_internal.candidates(q, base, pick.hi, most) c
    ), waiting as materialized (
      select distinct k.held from (select distinct r.key, r.held from read r where r.keyed) k
      where k.held in (select unnest(busy))
        -- Most keys have no row: the function is called for the others.
        or noted and exists (
          select from pgmb.noted_key n where n.queue = q.id and n.hash = k.held and n.claim >= (base.flight).oldest)
          and pgmb_internal.is_noted(base.queue, base.flight, k.held)
        or retried and exists (select from pgmb_internal.first_of_key(base, k.key))
    ), judged as (
      select r.seq, r.key, r.held, r.old, w.held is not null behind,
        count(*) filter (where not r.old and w.held is null) over (order by r.seq) free
      from read r
      left join waiting w on w.held = r.held and r.keyed
    )
    select array_agg(j.seq order by j.seq) filter (where not j.old and not j.behind),
      array_agg(distinct j.held) filter (where not j.old and not j.behind),
      array_agg(distinct j.held) filter (where not j.old and j.behind),
      array_agg(distinct j.key) filter (where not j.old and j.behind), count(*) filter (where not j.old and j.behind),
      coalesce(array_agg(j.seq) filter (where j.old), '{}'),
      case when count(*) filter (where not j.old and not j.behind) = allowed then max(j.seq) end,
      (select count(*) from read), (select max(r.seq) from read r)
    into taken, keys, behind, blocked_keys, aside, expired, upto, looked, last
    from judged j
    where j.free < allowed or (j.free = allowed and not j.old and not j.behind);
  else
    select array_agg(c.seq) filter (where c.published_at <= ending is not true), count(*), max(c.seq),
      coalesce(array_agg(c.seq) filter (where c.published_at <= ending), '{}')
    into taken, looked, last, expired
    from pgmb_internal.candidates(q, base, pick.hi, most) c;
  end if;
  taken := coalesce(taken, '{}');
  waits := aside > 3 * cardinality(taken) and youngest > now - interval '1 second' and (
    select count(*) = 200 from (
      select from unnest(blocked_keys) one cross join lateral pgmb_internal.events_of_key(base, one) limit 200) parked);
  if waits then
    taken := '{}';
    upto := base.place;
    aside := 0;
    return;
  end if;
  upto := coalesce(upto, case when looked < most then hi else last end);
  wrote := behind is not null or cardinality(expired) > 0;
  if cardinality(expired) > 0 then
    perform pgmb_internal.fail_events(q, expired, base.id + 1, 0, now, pgmb_internal.expired(q), true);
  end if;
  if behind is not null then
    perform pgmb_internal.park(q, base, upto, behind, blocked_keys, ending, now);
  end if;
end $$;
