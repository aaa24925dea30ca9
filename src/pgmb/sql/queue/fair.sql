-- Fair queues: tenants are served in turn (docs/adr/0038). A receive reads on in the log and passes over the events of
-- tenants that have many waiting. Such a tenant lags: pgmb.claim.lagging, which is part of the queue's position, says from
-- where on its events wait, and later receives take them from there.

-- The tenant of an event e, as an SQL expression: a hash of what fair_by names. Events without it are one tenant.
create or replace function pgmb_internal.tenant_of(fair_by text)
returns text
language sql immutable parallel safe
as $$
  select 'coalesce(hashtext(' || case when fair_by = 'key' then 'e.key'
    -- json holds escapes that text cannot (\u0000), and what is stored apart may be damaged; to find that out costs more, and
    -- few headers have any of it.
    else format('case when pg_column_size(e.headers) < 500 and strpos(e.headers::text, %L) = 0 then e.headers ->> %L
      else pgmb_internal.tenant_in(e.headers, %L) end', '\u', substr(fair_by, 8), substr(fair_by, 8)) end || '), 0)'
$$;

-- A header as text; null where it cannot be read, so that the event is taken like others and can become a dead letter.
create or replace function pgmb_internal.tenant_in(headers json, name text)
returns text
language plpgsql immutable
as $$
begin
  return pgmb_internal.readable(headers) ->> name;
exception when data_corrupted or index_corrupted then
  return null;
end $$;

-- Errors: MB005 fair_by names nothing that an event has, or the queue has settings that exclude it.
create or replace function pgmb_internal.assert_fair(fair_by text, excluded text)
returns void
language plpgsql immutable
as $$
begin
  if fair_by is null then
    return;
  end if;
  if fair_by !~ '^(key|header:.+)$' then
    raise exception 'fair_by must be key or header:NAME, got %', quote_literal(fair_by) using errcode = 'MB005',
      hint = 'key takes the event''s key for the tenant, header:tenant its header "tenant".';
  end if;
  if excluded is not null then
    raise exception 'fair_by cannot be combined with %', excluded using errcode = 'MB005',
      hint = case excluded
        when 'ordered' then 'An ordered queue serves its keys in parallel; a fair one keeps no order while events are retried.'
        when 'lanes' then 'Create a separate queue for urgent events.'
        when 'max_length' then 'To limit how long events wait, set ttl.'
        else 'Filter in the consumer, or publish to topics that patterns can tell apart.' end;
  end if;
end $$;

-- The condition that an event e waits because its tenant lags, of a queue that is at `newest`. Holds for events that are
-- visible in the batch of that position.
create or replace function pgmb_internal.lagging(q pgmb.queue, newest pgmb.claim)
returns text
language sql immutable
as $$
  select format(' and (e.seq <= %s or pg_visible_in_snapshot(e.xid, %L)) and exists (select from unnest(%L::pgmb.lag[]) l
      where l.tenant = %s and e.seq > l.place and e.seq <= l.upto and not pg_visible_in_snapshot(e.xid, l.since))',
    (newest).place, (newest).done_snapshot, (newest).lagging, pgmb_internal.tenant_of(q.fair_by))
$$;

-- Which of the events that lie ahead are to be taken, at most `room`: `seqs`, of `tenants`. Those up to `ending` are passed, at
-- most `until`; more: others are left that could be taken. `slow` are the tenants that lag from now on: they have more than a
-- sixteenth of `ahead` events, and there is more than can be taken. `lags`: those that lag already; they and the others
-- share, by head, and `turn` decides what cannot be divided. done: the snapshot of what was consumed before.
create or replace function pgmb_internal.judge(
  numbers bigint[], named integer[], room bigint, ahead bigint, lags integer[], turn bigint, done pg_snapshot, until bigint,
  out seqs bigint[], out tenants integer[], out more boolean, out ending bigint, out slow pgmb.lag[]
)
language plpgsql
as $$
declare
  parties record;
  share bigint;
  slow_tenants integer[] := '{}';
begin
  if cardinality(numbers) > room then
    slow_tenants := array(
      select n.tenant from unnest(named) n (tenant)
      where n.tenant <> all (lags)
      group by n.tenant having count(*) > judge.ahead / 16
      order by count(*) desc limit greatest(0, 64 - cardinality(lags)));
  end if;
  if cardinality(slow_tenants) = 0 then
    seqs := numbers;
    tenants := named;
  else
    select coalesce(array_agg(n.seq order by n.seq), '{}'), array_agg(n.tenant order by n.seq) into seqs, tenants
    from unnest(numbers, named) n (seq, tenant)
    where n.tenant <> all (slow_tenants);
  end if;
  share := room;
  if cardinality(lags) + cardinality(slow_tenants) > 0 then
    select cardinality(judge.lags) + cardinality(slow_tenants) lags, count(distinct n.tenant) others into parties
    from unnest(tenants) n (tenant);
    -- At least one while no other lags: those that lag from here on may lie behind it, and the receive would find nothing.
    share := greatest(room - (room * parties.lags + turn % (parties.lags + parties.others)) / (parties.lags + parties.others),
      case when cardinality(judge.lags) = 0 then 1 else 0 end);
  end if;
  more := cardinality(seqs) > share;
  ending := case when more then seqs[share + 1] - 1 else until end;
  seqs := seqs[:share];
  tenants := tenants[:share];
  if cardinality(slow_tenants) > 0 then
    select array_agg((n.tenant, n.place, judge.ending, judge.done)::pgmb.lag order by n.place) into slow
    from (
      select n.tenant, min(n.seq) - 1 place from unnest(numbers, named) n (seq, tenant)
      where n.tenant = any (slow_tenants)
      group by n.tenant) n
    where n.place < judge.ending;
  end if;
end $$;

-- Reads on from a queue's position and takes at most `max` events of tenants that do not lag; what those that lag leave of
-- it is reserved for them. A tenant that has more than a sixteenth of the events ahead lags from there on, if there is more
-- than this receive can take. `tenants` are those of the events; opened: a batch was opened; passed: over how many numbers,
-- about 20,000, or as many as it can within 50 ms.
create or replace function pgmb_internal.take_fresh(
  q pgmb.queue, max bigint, inout base pgmb.claim, out seqs bigint[], out tenants integer[], out opened boolean, out passed bigint
)
language plpgsql
as $$
declare
  tenant text := pgmb_internal.tenant_of(q.fair_by);
  -- How many events of tenants that do not lag are judged at once.
  ahead bigint := greatest(max + max / 4, 200);
  ending timestamptz := clock_timestamp() + interval '50 milliseconds';
  before pgmb.claim;
  hi bigint;
  others text;
  source text;
  lags integer[];
  room bigint;
  read record;
  found_events record;
begin
  seqs := '{}';
  tenants := '{}';
  opened := false;
  passed := 0;
  loop
    if base.place >= base.upto then
      exit when opened;
      before := base;
      base := pgmb_internal.open_batch(base, q.numbers);
      -- Its patterns must be newer than the batch: what is published after a bind goes by that.
      select * into q from pgmb.queue present where present.id = q.id;
      if not pgmb_internal.has_stragglers(q.stream, pgmb_internal.batch_of(base), 0, base.done_seq) then
        base.place := base.done_seq;
        if base.upto = base.done_seq then
          base := before;
          exit;
        end if;
      end if;
      opened := true;
    end if;
    hi := pgmb_internal.window_end(q.stream, greatest(base.place, base.done_seq), base.upto, case when base.lagging is null then 5000 else 20000 end);
    lags := array(select l.tenant from unnest(base.lagging) l);
    others := q.matching || case when base.lagging is null then ''
      when base.place >= (select max(l.place) from unnest(base.lagging) l) then format(' and %s <> all (%L)', tenant, lags)
      -- What committed late below the place of a tenant that lags was not passed over.
      else format(' and not exists (select from unnest(%L::pgmb.lag[]) l where l.tenant = %s and e.seq > l.place)', base.lagging, tenant) end;
    if base.place >= base.done_seq and pgmb_internal.segment_of(base.place) = pgmb_internal.segment_of(hi) then
      source := pgmb_internal.main_part('pgmb.segment_' || q.stream || '_' || pgmb_internal.segment_of(hi), 'e.seq, ' || tenant || ' tenant', others)
        || ' limit $7';
    else
      source := 'select e.seq, ' || tenant || ' tenant
        from pgmb_internal.batch_events($8, $9, $1, $2, $10, $7, true) e';
    end if;
    -- What is planned each time is short, and the rest is planned once.
    execute 'select coalesce(array_agg(r.seq), ''{}'') seqs, array_agg(r.tenant) tenants from (' || source || ') r'
    into read
    using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
      pg_snapshot_xmax(base.done_snapshot), ahead, q.stream, pgmb_internal.batch_of(base), others;
    room := max - cardinality(seqs);
    found_events := pgmb_internal.judge(read.seqs, read.tenants, room, ahead, lags, abs(hashint8(base.id)::bigint), base.done_snapshot,
      case when cardinality(read.seqs) = ahead then read.seqs[ahead] else hi end);
    seqs := seqs || found_events.seqs;
    tenants := tenants || found_events.tenants;
    passed := passed + found_events.ending - greatest(base.place, base.done_seq);
    base.place := found_events.ending;
    if base.lagging is not null then
      base.lagging := (
        select array_agg((l.tenant, l.place, greatest(l.upto, base.place), l.since)::pgmb.lag order by l.nth)
        from unnest(base.lagging) with ordinality l (tenant, place, upto, since, nth));
    end if;
    base.lagging := base.lagging || found_events.slow;
    exit when found_events.more or cardinality(seqs) >= max or clock_timestamp() >= pgmb_internal.deadline()
      or passed >= 20000 and clock_timestamp() >= ending;
  end loop;
end $$;

-- Takes at most `max` events of tenants that lag, of each about as many. The first of them is read from where its events
-- wait on, and those with it that wait there too; then it is the last. Reads about 20,000 events at most.
create or replace function pgmb_internal.take_lagging(
  q pgmb.queue, max bigint, inout base pgmb.claim, out seqs bigint[], out tenants integer[]
)
language plpgsql
as $$
declare
  tenant text := pgmb_internal.tenant_of(q.fair_by);
  -- How many are read at once, and how many of each tenant are taken of them. Not too few: each look has its cost.
  most bigint := max + max / 4 + 16;
  share bigint := greatest(ceil(max::numeric / cardinality(base.lagging)), least(max, 8));
  looked bigint := 0;
  room bigint;
  first pgmb.lag;
  segment bigint;
  hi bigint;
  source text;
  read record;
  found_events record;
begin
  seqs := '{}';
  tenants := '{}';
  loop
    room := max - cardinality(seqs);
    exit when room <= 0 or base.lagging is null or looked >= 20000;
    first := base.lagging[1];
    hi := pgmb_internal.window_end(q.stream, first.place, (select max(l.upto) from unnest(base.lagging) l), 20000);
    segment := pgmb_internal.segment_of(hi);
    if not exists (select from pgmb.segment g where g.stream = q.stream and g.number = segment and g.dropped_at is null) then
      -- Retention dropped the rest, unread.
      base.lagging := case when cardinality(base.lagging) > 1 then base.lagging[2:] end;
      continue;
    end if;
    -- Of what the position has passed.
    source := ' from pgmb.segment_' || q.stream || '_' || segment || ' e
      where e.seq > $1 and e.seq <= $2 and case when e.seq <= $3 then e.xid < $4 or pg_visible_in_snapshot(e.xid, $5)
        else pg_visible_in_snapshot(e.xid, $6) end' || q.matching;
    if cardinality(base.lagging) = 1 then
      execute 'select coalesce(array_agg(e.seq), ''{}'') seqs, array_fill($8, array[count(*)::integer]) tenants
        from (select e.seq' || source || ' and ' || tenant || ' = $8 and not pg_visible_in_snapshot(e.xid, $9)
          order by e.seq limit $7) e'
      into found_events
      using greatest(first.place, pgmb_internal.first_number(segment)), hi, base.place, pg_snapshot_xmin(base.batch_snapshot), base.batch_snapshot,
        base.done_snapshot, room, first.tenant, first.since;
      first.place := case when cardinality(found_events.seqs) = room then found_events.seqs[room] else hi end;
      base.lagging := case when first.place < first.upto then array[first] end;
      looked := looked + room;
    else
      execute 'select coalesce(array_agg(e.seq), ''{}'') seqs, array_agg(e.tenant) tenants, array_agg(e.xid) xids
        from (select e.seq, e.xid, ' || tenant || ' tenant' || source || ' and ' || tenant || ' = any ($8) order by e.seq limit $7) e'
      into read
      using greatest(first.place, pgmb_internal.first_number(segment)), hi, base.place, pg_snapshot_xmin(base.batch_snapshot), base.batch_snapshot,
        base.done_snapshot, most, array(select l.tenant from unnest(base.lagging) l where l.place >= first.place);
      if cardinality(read.seqs) = most then
        hi := read.seqs[most];
      end if;
      with near as materialized (
        select l.* from unnest(base.lagging) with ordinality l (tenant, place, upto, since, nth)
        where l.place >= first.place and (l.nth = 1 or l.place < hi)
      ), waiting as materialized (
        select r.seq, r.tenant, n.nth, row_number() over (partition by n.nth order by r.seq) turn
        from unnest(read.seqs, read.tenants, read.xids) r (seq, tenant, xid)
        join near n on n.tenant = r.tenant and r.seq > n.place and r.seq <= n.upto and not pg_visible_in_snapshot(r.xid, n.since)
      ), taken as materialized (
        select w.* from waiting w where w.turn <= share order by w.turn, w.nth limit room
      ), moved as (
        select n.nth, max(t.seq) last, count(t.seq) taken, (select count(*) from waiting w where w.nth = n.nth) waiting
        from near n left join taken t on t.nth = n.nth
        group by n.nth
      )
      select array(select t.seq from taken t order by t.turn, t.nth) seqs,
        array(select t.tenant from taken t order by t.turn, t.nth) tenants,
        (select array_agg((l.tenant, l.place, l.upto, l.since)::pgmb.lag order by l.served, l.nth)
          from (
            select l.tenant, case when m.nth is null then l.place when m.taken < m.waiting then coalesce(m.last, l.place)
              else greatest(l.place, hi) end place, l.upto, l.since, l.nth, coalesce(m.taken, 0) > 0 or l.nth = 1 served
            from unnest(base.lagging) with ordinality l (tenant, place, upto, since, nth) left join moved m on m.nth = l.nth) l
          where l.place < l.upto) lagging
      into found_events;
      base.lagging := found_events.lagging;
      looked := looked + cardinality(read.seqs);
      most := least(most * 4, 5000);
    end if;
    seqs := seqs || found_events.seqs;
    tenants := tenants || found_events.tenants;
    -- A look has its cost, whatever it finds.
    looked := looked + 100;
  end loop;
end $$;

-- Leases the next events of a fair queue: retried ones, or of each tenant about as many. `numbers`: the fresh ones, in the
-- order in which they are served. Due retries and fresh events take turns, so that a tenant whose events fail does not hold
-- up the others. Otherwise as pgmb_internal.claim_lane.
create or replace function pgmb_internal.claim_fair(
  q pgmb.queue, entry_xid xid8, noted bigint, max integer, lease_for interval,
  out lease uuid, out retried boolean, out numbers bigint[], out events bigint
)
language plpgsql
as $$
declare
  base pgmb.claim := pgmb_internal.lock_as_found(q);
  now timestamptz := clock_timestamp();
  token bigint := pgmb_internal.draw_token();
  retries integer := hashint8(base.id) & 1;  -- in which of the two turns they are looked for
  pending boolean;                           -- the position moved enough to be worth writing
  swept record;
  fresh record;
begin
  if base.id is null then
    return;
  end if;
  swept := pgmb_internal.sweep_when_due(q, base, now);
  base := swept.base;
  pending := swept.pending;
  base := pgmb_internal.note_leases(base, q.max_in_flight is not null);
  for turn in 0 .. 1 loop
    continue when swept.stopped and (turn <> retries or clock_timestamp() >= pgmb_internal.deadline());
    if turn <> retries then
      fresh := pgmb_internal.claim_in_turn(q, base, case when entry_xid is null then noted end, max, now, now + lease_for, token,
        pending);
      base := fresh.base;
      numbers := fresh.numbers;
      events := cardinality(numbers);
    else
      events := pgmb_internal.lease_retries(q, base, max, now, now + lease_for, token);
    end if;
    if events > 0 then
      lease := pgmb_internal.lease_of(q.id, base.id + 1, token);
      retried := turn = retries;
      if retried then
        numbers := null;
      end if;
      return;
    end if;
  end loop;
  if swept.stopped then
    perform pgmb_internal.write_position(base);
  end if;
end $$;

-- Leases the next fresh events of a fair queue that is at `base`: `numbers`, in the order in which they are served. Where
-- there are none, `base` is the queue's position by now. pending: it is to be written in any case.
create or replace function pgmb_internal.claim_in_turn(
  q pgmb.queue, inout base pgmb.claim, noted bigint, max integer, now timestamptz, expires_at timestamptz, token bigint,
  pending boolean, out numbers bigint[]
)
language plpgsql
as $$
declare
  fresh record;
  slow record;
  expired boolean;
begin
  -- To come back with nothing although there is something further on would have consumers wait: only at the deadline.
  loop
    fresh := pgmb_internal.take_fresh(q, max, base);
    slow := pgmb_internal.take_lagging(q, max - cardinality(fresh.seqs), fresh.base);
    numbers := array(
      select n.seq from unnest(fresh.seqs || slow.seqs, fresh.tenants || slow.tenants) with ordinality n (seq, tenant, nth)
      order by row_number() over (partition by n.tenant order by n.nth), n.nth);
    if cardinality(pgmb_internal.fitting(q.stream, numbers)) < cardinality(numbers) then
      -- Nothing is written yet: fewer of them.
      max := greatest(cardinality(numbers) / 2, 1);
      continue;
    end if;
    if q.ttl is not null then
      numbers := pgmb_internal.without_expired(q, base.id + 1, numbers, now);
    end if;
    expired := cardinality(numbers) < cardinality(fresh.seqs) + cardinality(slow.seqs);
    exit when not pending and cardinality(numbers) = 0 and not expired and fresh.passed < pgmb_internal.worth_a_claim()
      and base.lagging is null;
    base := slow.base;
    if fresh.opened then
      base := pgmb_internal.note_pair(base, noted);
    end if;
    if cardinality(numbers) > 0 then
      perform pgmb_internal.lease_numbers(base, token, numbers, 0, claim_in_turn.expires_at, at => claim_in_turn.now);
    else
      perform pgmb_internal.write_position(base);
    end if;
    if expired then
      -- Dead letters must not outlive a superseded claim.
      perform pgmb_internal.recheck_at_commit(q.id, base.id + 1);
    end if;
    exit when cardinality(numbers) > 0;
    base.id := base.id + 1;
    pending := false;
    exit when clock_timestamp() >= pgmb_internal.deadline();
  end loop;
end $$;

-- Makes dead letters of those events that are older than a queue lets them live, and returns the numbers of the others.
create or replace function pgmb_internal.without_expired(q pgmb.queue, origin bigint, numbers bigint[], now timestamptz)
returns bigint[]
language plpgsql
as $$
declare
  expired bigint[] := array(
    select e.seq from pgmb_internal.numbered_events(q.stream, numbers, format(' and e.published_at <= %L', now - q.ttl)) e);
begin
  if expired = '{}' then
    return numbers;
  end if;
  perform pgmb_internal.fail_events(q, expired, origin, 0, now, pgmb_internal.expired(q), true);
  return array(
    select n.seq from unnest(numbers) with ordinality n (seq, nth) where n.seq <> all (expired) order by n.nth);
end $$;
