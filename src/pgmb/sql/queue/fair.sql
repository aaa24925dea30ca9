-- The policy of fair queues: tenants are served in turn (docs/adr/0038). A receive reads on in the log and passes over the events of
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

-- Errors: MB005 fair_by names nothing that an event has.
create or replace function pgmb_internal.assert_fair(fair_by text)
returns void
language plpgsql immutable
as $$
begin
  if fair_by !~ '^(key|header:.+)$' then
    raise exception 'fair_by must be key or header:NAME, got %', quote_literal(fair_by) using errcode = 'MB005',
      hint = 'key takes the event''s key for the tenant, header:tenant its header "tenant".';
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
    select array_agg((n.tenant, n.place, judge.ending, judge.done, 0)::pgmb.lag order by n.place) into slow
    from (
      select n.tenant, min(n.seq) - 1 place from unnest(numbers, named) n (seq, tenant)
      where n.tenant = any (slow_tenants)
      group by n.tenant) n
    where n.place < judge.ending;
  end if;
end $$;

-- The condition that an event e of a batch is not of a tenant that lags, or committed late below the place of one and was not
-- passed over.
create or replace function pgmb_internal.not_lagging(fair_by text, base pgmb.claim)
returns text
language plpgsql immutable
as $$
declare
  tenant text := pgmb_internal.tenant_of(fair_by);
begin
  if base.place >= (select max(l.place) from unnest(base.lagging) l) then
    return format(' and %s <> all (%L)', tenant, array(select l.tenant from unnest(base.lagging) l));
  end if;
  return format(' and not exists (select from unnest(%L::pgmb.lag[]) l where l.tenant = %s and e.seq > l.place)', base.lagging, tenant);
end $$;

-- How many events of tenants that do not lag a receive of `max` events judges at once.
create or replace function pgmb_internal.judged_at_once(max bigint)
returns bigint
language sql immutable parallel safe
as $$
  select greatest(max + max / 4, 200)
$$;

-- As pgmb_internal.pick, for a fair queue: of the events above its position and up to `hi` that match q.matching, which leaves
-- out tenants that lag. With the `numbers` that the receive took before, at most `max`; the part of it that those that lag are
-- due is reserved. A tenant that has more than a sixteenth of the events ahead lags from there on, if there is more than the
-- receive can take. `tenants` are those of `taken`. enough: others are left that could be taken.
create or replace function pgmb_internal.pick_in_turn(
  q pgmb.queue, inout base pgmb.claim, hi bigint, max bigint, now timestamptz, numbers bigint[],
  out taken bigint[], out tenants integer[], out looked bigint, out wrote boolean, out enough boolean
)
language plpgsql
as $$
declare
  ahead bigint := pgmb_internal.judged_at_once(max);
  columns text := 'e.seq, ' || pgmb_internal.tenant_of(q.fair_by) || ' tenant, e.published_at';
  room bigint := max - cardinality(numbers);
  lags integer[] := array(select l.tenant from unnest(base.lagging) l);
  ending timestamptz := now - q.ttl;
  read record;
  judged record;
  fits integer;
begin
  if q.fair_by = 'key' and base.lagging is null then
    -- The common way: planned once a session.
    select coalesce(array_agg(c.seq), '{}') seqs, array_agg(coalesce(hashtext(c.key), 0)) tenants,
      array_agg(c.seq) filter (where c.published_at <= ending) old
    into read
    from pgmb_internal.candidates(q, base, pick_in_turn.hi, ahead) c;
  else
    execute 'select coalesce(array_agg(r.seq), ''{}'') seqs, array_agg(r.tenant) tenants,
        array_agg(r.seq) filter (where r.published_at <= $11) old from (' ||
      case when base.place >= base.done_seq and pgmb_internal.segment_of(base.place) = pgmb_internal.segment_of(hi)
        then pgmb_internal.main_part('pgmb.segment_' || q.stream || '_' || pgmb_internal.segment_of(hi), columns, q.matching) || ' limit $7'
        else 'select ' || columns || ' from pgmb_internal.batch_events($8, $9, $1, $2, $10, $7, true) e' end || ') r'
    into read
    using base.place, hi, base.batch_snapshot, pg_snapshot_xmin(base.batch_snapshot), base.done_snapshot,
      pg_snapshot_xmax(base.done_snapshot), ahead, q.stream, pgmb_internal.batch_of(base), q.matching, ending;
  end if;
  looked := cardinality(read.seqs);
  loop
    judged := pgmb_internal.judge(read.seqs, read.tenants, room, ahead, lags, abs(hashint8(base.id)::bigint), base.done_snapshot,
      case when looked = ahead then read.seqs[ahead] else hi end);
    fits := pgmb_internal.fitting_more(q.stream, pgmb_internal.segment_of(hi), numbers, judged.seqs);
    exit when fits = cardinality(judged.seqs);
    -- Nothing is written yet: fewer of them.
    room := fits;
    if fits = 0 then
      taken := '{}';
      tenants := '{}';
      wrote := false;
      enough := true;
      return;
    end if;
  end loop;
  taken := judged.seqs;
  tenants := judged.tenants;
  enough := judged.more;
  base.place := judged.ending;
  if base.lagging is not null then
    base.lagging := (
      select array_agg((l.tenant, l.place, greatest(l.upto, base.place), l.since, l.owed)::pgmb.lag order by l.nth)
      from unnest(base.lagging) with ordinality l (tenant, place, upto, since, owed, nth));
  end if;
  base.lagging := base.lagging || judged.slow;
  wrote := coalesce(taken && read.old, false);
  if wrote then
    select without.numbers, without.tenants into taken, tenants
    from pgmb_internal.without_expired(q, base.id + 1, taken, tenants, read.old, pick_in_turn.now) without;
  end if;
end $$;

-- Gives tenants that lag their turns: at most `room` of these events of theirs, which are all that they have from the place of the
-- first of them on, up to `hi`. Without tenants and xids: all are of the first, as many as there is room for. share: what a
-- turn is worth. `seqs` are the events given, of `tenants`; `lagging`: who lags then.
create or replace function pgmb_internal.serve(
  inout lagging pgmb.lag[], numbers bigint[], named integer[], xids xid8[], hi bigint, room bigint, share bigint,
  out seqs bigint[], out tenants integer[]
)
language plpgsql
as $$
declare
  first pgmb.lag := lagging[1];
begin
  if cardinality(lagging) = 1 then
    seqs := numbers[:room];
    tenants := array_fill(first.tenant, array[cardinality(seqs)]);
    first.place := case when cardinality(seqs) = room then coalesce(seqs[room], first.place) else hi end;
    first.owed := 0;
    lagging := case when first.place < first.upto then array[first] end;
    return;
  end if;
  with near as materialized (
    select l.*, coalesce(nullif(l.owed, 0), share) turns
    from unnest(serve.lagging) with ordinality l (tenant, place, upto, since, owed, nth)
    where l.place >= first.place and (l.nth = 1 or l.place < hi)
  ), waiting as materialized (
    select r.seq, r.tenant, n.nth, n.turns, row_number() over (partition by n.nth order by r.seq) turn
    from unnest(serve.numbers, serve.named, serve.xids) r (seq, tenant, xid)
    join near n on n.tenant = r.tenant and r.seq > n.place and r.seq <= n.upto and not pg_visible_in_snapshot(r.xid, n.since)
  ), given as materialized (
    select w.* from waiting w where w.turn <= w.turns order by w.turn, w.nth limit room
  ), moved as (
    select n.nth, n.turns, max(g.seq) last, count(g.seq) given, (select count(*) from waiting w where w.nth = n.nth) waiting
    from near n left join given g on g.nth = n.nth
    group by n.nth, n.turns
  )
  select array(select g.seq from given g order by g.turn, g.nth),
    array(select g.tenant from given g order by g.turn, g.nth),
    (select array_agg((l.tenant, l.place, l.upto, l.since, l.owed)::pgmb.lag order by l.goes_last, l.nth)
      from (
        select l.tenant, l.upto, l.since, l.nth,
          case when m.nth is null then l.place when m.given < m.waiting then coalesce(m.last, l.place)
            else greatest(l.place, hi) end place,
          case when m.nth is null then l.owed else m.turns - m.given end owed,
          -- One with nothing here goes last, too: its events may be far away.
          m.nth is not null and (m.given = m.turns or l.nth = 1 and m.given = 0) goes_last
        from unnest(serve.lagging) with ordinality l (tenant, place, upto, since, owed, nth) left join moved m on m.nth = l.nth) l
      where l.place < l.upto)
  into seqs, tenants, lagging;
end $$;

-- Takes at most `max` events of tenants that lag, in turn (deficit round robin): a turn is worth about as many events as each tenant
-- has of `max`. One that got fewer, because the receive was full, is owed the rest of its turn by the next one. The first is read
-- from where its events wait on, and those with it that wait there too; when its turn is over it is the last. Reads about 20,000
-- events, and more only if it finds none. numbers: what the receive took before.
create or replace function pgmb_internal.take_lagging(
  q pgmb.queue, inout base pgmb.claim, max bigint, now timestamptz, numbers bigint[],
  out taken bigint[], out tenants integer[], out wrote boolean
)
language plpgsql
as $$
declare
  tenant text := pgmb_internal.tenant_of(q.fair_by);
  -- How many are read at once. Not too few: each look has its cost, and so has each tenant's turn.
  most bigint := max + max / 4 + 16;
  share bigint := greatest(ceil(max::numeric / cardinality(base.lagging)), least(max, 8));
  looked bigint := 0;
  room bigint;
  first pgmb.lag;
  segment bigint;
  lo bigint;
  hi bigint;
  matching text;
  source text;
  asked pgmb.queue;
  choice record;
  near pgmb.claim;
  read record;
  served record;
  fits integer;
begin
  taken := '{}';
  tenants := '{}';
  wrote := false;
  loop
    room := max - cardinality(taken);
    exit when room <= 0 or base.lagging is null or looked >= 20000 and (numbers <> '{}' or taken <> '{}')
      or looked > 0 and clock_timestamp() >= pgmb_internal.deadline();
    first := base.lagging[1];
    hi := pgmb_internal.window_end(q.stream, first.place, (select max(l.upto) from unnest(base.lagging) l), 20000);
    segment := pgmb_internal.segment_of(hi);
    if not exists (select from pgmb.segment g where g.stream = q.stream and g.number = segment and g.dropped_at is null) then
      -- Retention dropped the rest, unread.
      base.lagging := case when cardinality(base.lagging) > 1 then base.lagging[2:] end;
      continue;
    end if;
    lo := greatest(first.place, pgmb_internal.first_number(segment));
    matching := q.matching;
    if pgmb_internal.asks(q) then
      near := base;
      near.lagging := array(select l from unnest(base.lagging) l where l.place >= first.place and l.place < hi);
      asked := q;
      asked.matching := q.matching || pgmb_internal.lagging(q, near);
      choice := pgmb_internal.choose(asked, row('3:3:', 0, '3', base.batch_snapshot)::pgmb.batch, lo, hi, most);
      exit when choice.chosen is null;
      hi := choice.upto;
      matching := pgmb_internal.among(choice.chosen);
    end if;
    -- Of what the position has passed.
    source := ' from pgmb.segment_' || q.stream || '_' || segment || ' e
      where e.seq > $1 and e.seq <= $2 and case when e.seq <= $3 then e.xid < $4 or pg_visible_in_snapshot(e.xid, $5)
        else pg_visible_in_snapshot(e.xid, $6) end' || matching || ' and ' || tenant;
    if cardinality(base.lagging) = 1 then
      -- The common way: all of it is of one tenant.
      execute 'select coalesce(array_agg(e.seq), ''{}'') seqs, null::integer[] tenants, null::xid8[] xids,
          array_agg(e.seq) filter (where e.published_at <= $8) old
        from (select e.seq, e.published_at' || source || ' = $9 and not pg_visible_in_snapshot(e.xid, $10) order by e.seq limit $7) e'
      into read
      using lo, least(hi, first.upto), base.place, pg_snapshot_xmin(base.batch_snapshot), base.batch_snapshot, base.done_snapshot,
        room, take_lagging.now - q.ttl, first.tenant, first.since;
    else
      execute 'select coalesce(array_agg(e.seq), ''{}'') seqs, array_agg(e.tenant) tenants, array_agg(e.xid) xids,
          array_agg(e.seq) filter (where e.published_at <= $8) old
        from (select e.seq, e.xid, e.published_at, ' || tenant || ' tenant' || source || ' = any ($9) order by e.seq limit $7) e'
      into read
      using lo, hi, base.place, pg_snapshot_xmin(base.batch_snapshot), base.batch_snapshot, base.done_snapshot, most,
        take_lagging.now - q.ttl, array(select l.tenant from unnest(base.lagging) l where l.place >= first.place);
      if cardinality(read.seqs) = most then
        hi := read.seqs[most];
      end if;
    end if;
    loop
      served := pgmb_internal.serve(base.lagging, read.seqs, read.tenants, read.xids, hi, room, share);
      fits := pgmb_internal.fitting_more(q.stream, segment, numbers || taken, served.seqs);
      exit when fits = cardinality(served.seqs);
      -- The lease is full.
      room := fits;
      max := cardinality(taken) + fits;
    end loop;
    base.lagging := served.lagging;
    if served.seqs && read.old then
      wrote := true;
      select without.numbers seqs, without.tenants, served.lagging into served
      from pgmb_internal.without_expired(q, base.id + 1, served.seqs, served.tenants, read.old, take_lagging.now) without;
    end if;
    if served.seqs = '{}' then
      most := least(most * 4, 5000);
    end if;
    taken := taken || served.seqs;
    tenants := tenants || served.tenants;
    -- A look has its cost, whatever it finds.
    looked := looked + cardinality(read.seqs) + 100;
  end loop;
end $$;

-- Numbers of events of these tenants, one of each in turn.
create or replace function pgmb_internal.in_turn(numbers bigint[], tenants integer[])
returns bigint[]
language plpgsql immutable
as $$
begin
  return array(
    select n.seq from unnest(numbers, tenants) with ordinality n (seq, tenant, nth)
    order by row_number() over (partition by n.tenant order by n.nth), n.nth);
end $$;

-- Makes dead letters of those events that are among the `old`, which outlived the queue's ttl, and returns the others.
create or replace function pgmb_internal.without_expired(
  q pgmb.queue, origin bigint, inout numbers bigint[], inout tenants integer[], old bigint[], now timestamptz
)
language plpgsql
as $$
begin
  perform pgmb_internal.fail_events(q, array(select one from unnest(numbers) one where one = any (old)), origin, 0, now,
    pgmb_internal.expired(q), true);
  select coalesce(array_agg(n.seq order by n.nth), '{}'), coalesce(array_agg(n.tenant order by n.nth), '{}') into numbers, tenants
  from unnest(numbers, tenants) with ordinality n (seq, tenant, nth)
  where n.seq <> all (old);
end $$;
