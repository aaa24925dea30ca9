-- What became of an event: where it stands in every queue and at every endpoint. Look-ups are by an index or by a bounded
-- range of numbers, so that neither a long log nor a backlog makes them slower.

-- Whether an event that a queue's position has passed waits because its tenant lags.
create or replace function pgmb_internal.is_lagging(q pgmb.queue, newest pgmb.claim, event pgmb.event, xid xid8)
returns boolean
language plpgsql stable
as $$
declare
  lags boolean := false;
begin
  if (newest).lagging is not null then
    execute 'select exists (select from (select ($1).*, $2 xid) e where true' || pgmb_internal.lagging(q, newest) || ')'
      into lags using event, is_lagging.xid;
  end if;
  return lags;
end $$;

-- Whether a claim leased an event of the log, settled or not.
create or replace function pgmb_internal.is_of_claim(claim pgmb.claim, seq bigint)
returns boolean
language sql immutable
as $$
  select seq > (claim).lo and seq <= (claim).hi and ((claim).seqs is null or seq = any ((claim).seqs))
$$;

-- The newest claim of a queue that leased an event of the log: one that is open, or one of the last moments. Claims that were
-- settled and whose lease would have expired by now are not looked at.
create or replace function pgmb_internal.claim_of(queue integer, newest pgmb.claim, event pgmb.event, xid xid8)
returns pgmb.claim
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  now timestamptz := clock_timestamp();
  found_claim pgmb.claim;
begin
  select (leased.claim).* into found_claim
  from (
    select c claim from pgmb.claim c
    where c.queue + 0 = claim_of.queue and c.expires_at > least((newest).swept, now) and c.expires_at < 'infinity'
    union all
    -- Those that expired while a transaction was settling them, and those that were made shorter.
    select c from unnest((newest).held || array(
      select s.claim from pgmb.shortened s where s.queue = claim_of.queue and s.ends_at <= now)) one (id)
    join pgmb.claim c on c.queue = claim_of.queue and c.id = one.id
  ) leased
  where (leased.claim).state in ('leased', 'settled', 'expired')
    and pgmb_internal.is_of_claim(leased.claim, (event).seq)
    and not pgmb_internal.is_void((leased.claim).queue, (leased.claim).id)
  order by (leased.claim).state = 'leased' desc, (leased.claim).id desc limit 1;
  return found_claim;
end $$;

-- Whether a queue takes an event by its patterns, filter and condition; null if the filter raises or the payload cannot be read
-- (it is null then).
create or replace function pgmb_internal.takes(q pgmb.queue, event pgmb.event)
returns boolean
language plpgsql stable
as $$
declare
  taken boolean;
begin
  execute 'select exists (select from (select ($1).*) e where true' || q.matching || ')' into taken using event;
  if taken and pgmb_internal.asks(q) then
    if (event).payload is null then
      return null;
    end if;
    if pgmb_internal.needs_timeout(q) then
      perform pgmb_internal.assert_timeout();
    end if;
    execute 'select exists (select from (select ($1).*) e where true' || pgmb_internal.asking(q) || ')' into taken using event;
  end if;
  return taken;
exception when others then
  if sqlstate = 'MB024' or pgmb_internal.servers_trouble(sqlstate) then
    raise;
  end if;
  return null;
end $$;

-- Whether an event that a queue has passed matched what the queue asked for then. Null: the patterns were changed since it was
-- published, and it matches some of those.
create or replace function pgmb_internal.was_taken(q pgmb.queue, event pgmb.event)
returns boolean
language plpgsql stable
as $$
declare
  asked pgmb.binding;
  last pgmb.queue := q;
  verdict boolean := coalesce(pgmb_internal.takes(q, event), true);
begin
  for asked in select b.* from pgmb.binding b where b.queue = q.id and b.version <= q.bindings order by b.version desc loop
    -- A conversion changes the lanes, but not what the queue takes.
    last.matching := pgmb_internal.lane_matching(asked.patterns, q.lanes, q.shards, q.lane);
    last.equals := asked.equals;
    last.filter := asked.filter;
    last.condition := asked.condition;
    last.params := asked.params;
    if asked.version < q.bindings and verdict is distinct from coalesce(pgmb_internal.takes(last, event), true) then
      return null;
    end if;
    exit when asked.since <= (event).published_at;
  end loop;
  return verdict;
end $$;

-- Why a queue that has passed an event never had it: it was created later, or moved past the event. Null if it was not.
create or replace function pgmb_internal.why_skipped(q pgmb.queue, event pgmb.event, xid xid8)
returns text
language plpgsql stable
as $$
declare
  moved record;
  old pgmb.claim;
begin
  for moved in
    select m.one ->> 'at' moved_at, (m.one ->> 'to')::pg_snapshot target, (m.one ->> 'done')::pg_snapshot done,
      (m.one ->> 'batch')::pg_snapshot batch, (m.one ->> 'place')::bigint place, (m.one ->> 'lagging')::pgmb.lag[] lagging
    from jsonb_array_elements(q.moves) with ordinality m (one, nth) order by m.nth desc
  loop
    if not pg_visible_in_snapshot(why_skipped.xid, moved.target) then
      return null;
    elsif moved.done is null then
      return 'the queue began after it';
    end if;
    old.done_snapshot := moved.done;
    old.batch_snapshot := moved.batch;
    old.place := moved.place;
    old.lagging := moved.lagging;
    if not pgmb_internal.is_passed(old, (event).seq, why_skipped.xid)
      or pgmb_internal.is_lagging(q, old, event, why_skipped.xid)
    then
      return 'the queue was moved past it at ' || moved.moved_at;
    end if;
  end loop;
  return null;
end $$;

-- Notes that a queue was created at, or moved to, a position: its first note and the last 20.
create or replace function pgmb_internal.note_move(queue integer, target pg_snapshot, base pgmb.claim default null)
returns void
language sql
as $$
  update pgmb.queue q
  set moves = (
    select jsonb_agg(m.one order by m.nth)
    from (select m.one, m.nth, count(*) over () total
      from jsonb_array_elements(coalesce(q.moves, '[]') || jsonb_build_object('at', clock_timestamp(), 'to', target::text,
        'done', (base).done_snapshot::text, 'batch', (base).batch_snapshot::text, 'place', (base).place, 'lagging', (base).lagging::text, 'claim', (base).id)) with ordinality m (one, nth)) m
    where m.nth = 1 or m.nth > m.total - 20)
  where q.id = note_move.queue
$$;

-- Notes that events with these numbers may have left a queue unhandled: their dead letters were dropped, they were leased or
-- waited to be retried when the queue was moved past them, or a full queue dropped them. Of more than 100 ranges only where they
-- begin and end is kept.
create or replace function pgmb_internal.note_untraced(queue integer, numbers int8multirange)
returns void
language sql
as $$
  update pgmb.queue q
  set untraced = (
    select case when (select count(*) from unnest(total) one) > 100 then int8multirange(range_merge(total)) else total end
    from (select coalesce(q.untraced, '{}') + note_untraced.numbers total) added)
  where q.id = note_untraced.queue and not coalesce(q.untraced, '{}') @> note_untraced.numbers
$$;

-- The numbers of the events that a queue's leases hold, and of those that wait to be tried again.
create or replace function pgmb_internal.unsettled_numbers(queue integer)
returns int8multirange
language sql stable
as $$
  select coalesce(range_agg(int8range(held.seq, held.seq, '[]')), '{}')
  from (
    select unnest(pgmb_internal.unsettled(c)) from pgmb.claim c where c.queue = unsettled_numbers.queue and c.state = 'leased'
    union all
    select r.seq from pgmb.retry r where r.queue = unsettled_numbers.queue
    union all
    select d.seq from pgmb.delivery d where d.queue = unsettled_numbers.queue) held (seq)
$$;

-- The process behind a server process that received, at that time: what the database knows of its session, and the worker or
-- dispatcher that named it in its heartbeat. gone: the session has ended. detailed: with its role and address.
create or replace function pgmb_internal.holder(pid integer, "at" timestamptz, detailed boolean)
returns jsonb
language sql stable
as $$
  select jsonb_strip_nulls(jsonb_build_object('backend', holder.pid, 'host', named.host, 'pid', named.pid,
    'application', coalesce(named.application, nullif(a.application_name, '')),
    'worker', named.id, 'gone', case when a.pid is null then true end,
    'role', case when holder.detailed then a.usename end, 'address', case when holder.detailed then host(a.client_addr) end))
  from (select) one
  left join pg_stat_activity a on a.pid = holder.pid and coalesce(a.backend_start <= holder."at", true)
  left join lateral (
    select w.id, w.host, w.pid, w.application, w.heartbeat_at from pgmb.worker w
    where holder.pid = any (w.backends) and w.started_at <= holder."at"
    union all
    select d.id, d.host, d.pid, 'pgmb serve', d.heartbeat_at from pgmb.dispatcher d
    where holder.pid = any (d.backends) and d.started_at <= holder."at"
    order by heartbeat_at desc limit 1) named on true
  where holder.pid is not null
$$;

-- Where a message of a PGMQ queue stands that the queue of pgmb has passed: PGMQ's functions keep that in tables of their own.
-- Null for other queues, and for one that was deleted or archived.
create or replace function pgmb_internal.pgmq_fate(queue integer, seq bigint, claim bigint)
returns jsonb
language plpgsql stable
as $$
declare
  found_fate jsonb;
begin
  if to_regclass('pgmq.parked') is null then
    return null;
  end if;
  execute 'select jsonb_build_object(''state'', case when held.vt > clock_timestamp() then ''leased'' else ''waiting'' end,
      ''attempt'', nullif(held.reads, 0), ''at'', held.read_at, ''until'', case when held.vt > clock_timestamp() then held.vt end)
    from (
      select p.vt, p.read_ct reads, p.last_read_at read_at from pgmq.parked p where p.queue = $1 and p.msg_id = $2
      union all
      select r.vt, 1, r.read_at from pgmq.reading r join pgmb.claim c on c.queue = r.queue and c.id = r.claim
      where r.queue = $1 and r.claim = $3 and r.lo < $2 and r.hi >= $2 and (r.ids is null or $2 = any (r.ids))
        and c.state = ''leased''
        and not exists (select from pgmb.settlement s where s.queue = $1 and s.claim = $3 and s.seq = $2)) held
    limit 1'
  into found_fate using pgmq_fate.queue, pgmq_fate.seq, pgmq_fate.claim;
  return found_fate;
end $$;

-- Where an event stands in a queue, or in one lane of it. xid: of the event in the log; null if the log has it no more: then
-- null where nothing but the log could tell. detailed: with roles and addresses of the sessions.
create or replace function pgmb_internal.lane_fate(q pgmb.queue, event pgmb.event, xid xid8, detailed boolean)
returns jsonb
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  newest pgmb.claim;
  claim pgmb.claim;
  later pgmb.retry;
  dead pgmb.dead;
    passed boolean;
  reached bigint;
  taken boolean;
  reason text;
  fate jsonb;
  paused text := case when q.paused_at is not null then 'the queue is paused' || coalesce(': ' || q.paused_reason, '') end;
  now timestamptz := clock_timestamp();
begin
  select r.* into later from pgmb.retry r where r.event_id = (event).id and r.queue = q.id
  order by r.lease is null, r.attempt desc, r.id desc limit 1;
  select d.* into dead from pgmb.dead d where d.event_id = (event).id and d.queue = q.id and d.endpoint is null
  order by d.id desc limit 1;
  if later.id is not null then
    if later.lease is not null then
      select c.* into claim from pgmb.claim c where c.queue = q.id and c.id = later.lease;
    end if;
    return jsonb_build_object(
      'state', case when later.lease is not null then 'leased'
        when later.attempt > 1 or later.error is not null then 'retrying' else 'waiting' end,
      'reason', case
        when claim.expires_at <= now then 'the lease has expired: the next receive retries the event'
        when later.lease is null and paused is not null then paused
        when later.lease is null and later.due_at = 'infinity' then 'behind an earlier event of its key' end,
      'attempt', later.attempt, 'at', claim.at,
      'until', case when later.lease is null then nullif(later.due_at, 'infinity') else claim.expires_at end,
      'error', later.error, 'errors', later.errors, 'holder', pgmb_internal.holder(claim.pid, claim.at, lane_fate.detailed));
  end if;
  if lane_fate.xid is not null then
    select * into newest from pgmb_internal.queue_position(q.id);
    passed := pgmb_internal.is_passed(newest, (event).seq, lane_fate.xid);
        reached := pgmb_internal.reached(newest);
    if passed and pgmb_internal.is_lagging(q, newest, event, lane_fate.xid) then
      passed := false;
      reached := (select min(l.place) from unnest(newest.lagging) l);
    end if;
    if not passed then
      taken := pgmb_internal.takes(q, event);
      return case when taken then jsonb_build_object('state', 'waiting', 'reason', paused,
                    'ahead', greatest(0, pgmb_internal.numbers_between(q.stream, reached, (event).seq) - 1), 'dead_letter', dead.id)
        when taken is null then jsonb_build_object('state', 'waiting', 'reason', coalesce(paused, 'the filter fails on this event'))
        else jsonb_build_object('state', 'not taken', 'reason',
          case when (event).topic is null then 'the event was erased' else 'patterns or filter do not match' end) end;
    end if;
    claim := pgmb_internal.claim_of(q.id, newest, event, lane_fate.xid);
    if claim.state = 'expired' and exists (
      select from jsonb_array_elements(q.moves) m where m ->> 'done' is not null and (m ->> 'at')::timestamptz >= claim.at)
    then
      -- Moving the queue ended that lease. It says nothing of what came afterwards.
      claim := null;
    end if;
    fate := pgmb_internal.pgmq_fate(q.id, (event).seq, claim.id);
    if fate is not null then
      return fate;
    end if;
    if claim.state = 'leased' and not exists (
      select from pgmb.settlement s where s.queue = q.id and s.claim = claim.id and s.seq = (event).seq)
    then
      return jsonb_build_object('state', 'leased', 'attempt', 1, 'at', claim.at, 'until', claim.expires_at,
        'reason', case when claim.expires_at <= now then 'the lease has expired: the next receive retries the event' end,
        'holder', pgmb_internal.holder(claim.pid, claim.at, lane_fate.detailed), 'dead_letter', dead.id);
    end if;
  end if;
  if dead.id is not null then
    return jsonb_build_object('state', 'dead', 'attempt', dead.attempt, 'at', dead.died_at, 'error', dead.error,
      'errors', dead.errors, 'dead_letter', dead.id);
  elsif lane_fate.xid is null then
    return null;
  end if;
  -- The queue has passed the event and has nothing of it. It is done if it can only have been received and settled.
  if claim.id is null then
    reason := pgmb_internal.why_skipped(q, event, lane_fate.xid);
    if reason is not null then
      return jsonb_build_object('state', 'not taken', 'reason', reason);
    end if;
    taken := pgmb_internal.was_taken(q, event);
    if not taken and (event).topic is not null then
      return jsonb_build_object('state', 'not taken', 'reason', 'patterns or filter do not match');
    end if;
    reason := case when (event).topic is null then 'the event was erased'
      when taken is null then 'done or not taken: the patterns or the filter were changed since it was published'
      when q.max_length is not null and q.when_full = 'drop_oldest' then 'done, or dropped because the queue was full' end;
  end if;
  if reason is null and q.untraced @> (event).seq then
    reason := 'done, or given up: dead letters were dropped, the queue was moved while it held events, or a full queue dropped them';
  end if;
  if reason is not null then
    return jsonb_build_object('state', 'unknown', 'reason', reason, 'received_at', claim.at);
  end if;
  -- The time at which its lease was settled, unless the event was settled apart, or may have been retried and leased again:
  -- a lease of retried events (an empty range) that is younger is cleared no earlier.
  return jsonb_build_object('state', 'done', 'received_at', claim.at,
    'at', case when claim.state = 'settled' and current_setting('track_commit_timestamp') = 'on' then (
      select pg_xact_commit_timestamp(c.xmin) from pgmb.claim c where c.queue = q.id and c.id = claim.id
        and not exists (select from pgmb.settlement s where s.queue = q.id and s.claim = claim.id and s.seq = (event).seq)
        and not exists (select from pgmb.claim r where r.queue = q.id and r.id > claim.id and r.lo = r.hi and r.events > 0)) end);
end $$;

-- Where an event stands in a queue: in that of its lanes which has it.
create or replace function pgmb_internal.queue_fate(head pgmb.queue, event pgmb.event, xid xid8, detailed boolean)
returns jsonb
language plpgsql stable
as $$
declare
  lane pgmb.queue;
  fate jsonb;
  found_fate jsonb;
begin
  for lane in select q.* from pgmb.queue q where q.id = head.id or q.lane_of = head.id order by q.lane loop
    lane.paused_at := head.paused_at;
    lane.paused_reason := head.paused_reason;
    fate := pgmb_internal.lane_fate(lane, event, queue_fate.xid, queue_fate.detailed);
    -- After a conversion the first lane has passed events that wait in another one, so what it passed does not end the search.
    found_fate := case
      when found_fate is null or found_fate ->> 'state' = 'not taken' or fate ->> 'state' not in ('done', 'unknown', 'not taken')
      then coalesce(fate, found_fate) else found_fate end;
    exit when fate ->> 'state' not in ('done', 'unknown', 'not taken');
  end loop;
  return found_fate;
end $$;

-- Where an event of a shared queue stands at its endpoints: at those that want it, and those that something is known of. `fate`
-- is where it stands in the queue. At most `max`.
create or replace function pgmb_internal.endpoint_fates(q pgmb.queue, event pgmb.event, fate jsonb, max integer)
returns setof jsonb
language plpgsql stable
set jit = off
as $$
declare
  matched uuid[];
  now timestamptz := clock_timestamp();
  received_at timestamptz := fate ->> 'received_at';
begin
  if (event).topic is not null then
    select m.subscriptions into matched from pgmb_internal.match(q.name, q.stream, array[event]) m;
  end if;
  return query
  select jsonb_build_object('kind', 'endpoint', 'name', e.name, 'queue', q.name) || case
    when d.lease is not null then jsonb_build_object('state', 'leased', 'attempt', d.attempt, 'until', d.due_at,
      'reason', case when d.due_at <= now then 'the lease has expired: a dispatcher retries the event' end,
      'error', d.error, 'errors', d.errors, 'holder', pgmb_internal.holder(d.pid, d.due_at, true))
    when d.id is not null then jsonb_build_object(
      'state', case when d.attempt > 1 or d.error is not null then 'retrying' else 'waiting' end,
      'attempt', d.attempt, 'until', d.due_at, 'error', d.error, 'errors', d.errors,
      'reason', case when e.state <> 'active' then 'the endpoint is ' || e.state || coalesce(': ' || e.reason, '') end)
    when (event).seq <= e.after_seq and x.id is null and posted.at is null
      then jsonb_build_object('state', 'not taken', 'reason', 'the endpoint was created after the event was published')
    when fate ->> 'state' in ('waiting', 'leased', 'retrying') then case when e.state = 'disabled' and fate ->> 'state' <> 'leased'
      then jsonb_build_object('state', 'not taken', 'reason', 'the endpoint is disabled' || coalesce(': ' || e.reason, ''))
      else fate - 'dead_letter' end
    when x.id is not null then jsonb_build_object('state', 'dead', 'attempt', x.attempt, 'at', x.died_at, 'error', x.error,
      'errors', x.errors, 'dead_letter', x.id)
    when posted.at is not null then jsonb_build_object('state', 'done', 'at', posted.at, 'attempt', posted.attempt)
    when fate ->> 'state' in ('not taken', 'dead', 'unknown') then fate
    -- The queue has passed the event. It was sent if the endpoint wanted it at that moment.
    when e.unchanged_since > (event).published_at and e.unchanged_since > coalesce(received_at, '-infinity')
      then jsonb_build_object('state', 'unknown', 'reason', case when e.created_at > (event).published_at
        then 'done or not taken: the endpoint was created after the event was published'
        else 'done or not taken: since it was published, the endpoint''s patterns or filter were changed, or it was disabled' end)
    when e.state = 'disabled'
      then jsonb_build_object('state', 'not taken', 'reason', 'the endpoint is disabled' || coalesce(': ' || e.reason, ''))
    else jsonb_build_object('state', 'done', 'received_at', received_at) end
  from (
    select e.id from pgmb.endpoint e where e.subscription = any (matched)
    union
    select d.endpoint from pgmb.delivery d where d.event_id = (event).id and d.queue = q.id
    union
    select x.endpoint from pgmb.dead x where x.event_id = (event).id and x.queue = q.id and x.endpoint is not null) known
  join pgmb.endpoint e on e.id = known.id
  left join lateral (
    select d.* from pgmb.delivery d where d.event_id = (event).id and d.endpoint = e.id
    order by d.lease is null, d.attempt desc limit 1) d on true
  left join lateral (
    select x.* from pgmb.dead x where x.event_id = (event).id and x.endpoint = e.id order by x.id desc limit 1) x on true
  left join lateral (
    select a.at, a.attempt from pgmb.attempt a
    where a.event_id = (event).id and a.endpoint = e.id and a.error is null order by a.id desc limit 1) posted on true
  order by e.name limit endpoint_fates.max;
end $$;

-- The number that an id was derived from, if it was one of this stream (pgmb.derive_id) and the number has been drawn.
create or replace function pgmb_internal.derived_number(stream pgmb.stream, id uuid)
returns bigint
language sql volatile
as $$
  select d.number
  from (select replace(id::text, '-', '') hex) h
  cross join lateral (
    select ((('x' || right(h.hex, 16))::bit(64)::bigint & 4611686018427387903) - (stream).salt) & 4611686018427387903 number) d
  where substr(h.hex, 13, 4) = '7' || substr(to_hex((stream).salt | (-9223372036854775808)::bigint), 14)
    and d.number between 1 and pgmb_internal.last_seq((stream).name)
$$;

-- The number of an event in a stream's log by its id, with its transaction; nothing if it is not there. An id that was derived
-- names its number, and so do rows of failures. Any other is looked for among `look` events around a time: the one that a
-- version 7 UUID holds, or `around`; without a time, among the newest.
create or replace function pgmb_internal.find_event(
  stream pgmb.stream, id uuid, around timestamptz, look integer, out event pgmb.event, out xid xid8, out looked bigint
)
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  hex text := replace(id::text, '-', '');
  reading text := format('select v.* from (select %s, e.xid from pgmb.%I e where e.seq = $1)
    v (seq, id, topic, key, payload, headers, published_at, xid) where v.id = $2',
    pgmb_internal.event_columns(stream.salt), 'log_' || stream.name);
  number bigint;
  got record;
  since bigint;
  until bigint;
  hi bigint := pgmb_internal.last_seq(stream.name);
begin
  looked := 0;
  select null::bigint seq, null::uuid id, null::text topic, null::text key, null::json payload, null::json headers,
    null::timestamptz published_at, null::xid8 xid
  into got;
  for number in
    select n from unnest(pgmb_internal.numbers_of_id(stream.salt, find_event.id)) n
    union
    select r.seq from pgmb.retry r where r.event_id = find_event.id
    union
    select d.seq from pgmb.dead d where d.event_id = find_event.id
    union
    select d.seq from pgmb.delivery d where d.event_id = find_event.id
  loop
    continue when number > hi;
    execute reading into got using number, find_event.id;
    exit when got.xid is not null;
  end loop;
  if got.xid is null and look > 0 then
    number := null;
    around := coalesce(around, case when substr(hex, 13, 1) = '7'
      then to_timestamp(('x' || substr(hex, 1, 12))::bit(48)::bigint / 1000.0) end);
    select (t.position).seq into since from pgmb.tick t
    where t.stream = (find_event.stream).id and t.at <= find_event.around - interval '1 minute' order by t.at desc, t.id desc limit 1;
    select (t.position).seq into until from pgmb.tick t
    where t.stream = (find_event.stream).id and t.at >= find_event.around + interval '1 minute' order by t.at, t.id limit 1;
    execute format('select count(*), min(v.seq) filter (where v.id = $4)
        from (select e.seq, e.id from pgmb.%I e where e.seq > $1 and e.seq <= $2 order by e.seq %s limit $3) v',
      'log_' || stream.name, case when since is null then 'desc' else '' end)
    into looked, number using coalesce(since, 0), coalesce(until, hi), look, find_event.id;
    execute reading into got using number, find_event.id;
  end if;
  if got.xid is not null then
    begin
      perform got.payload::text, got.headers::text;
    exception when data_corrupted or index_corrupted then
      got.payload := null;
      got.headers := null;
    end;
    event := (got.seq, got.id, got.topic, got.key, got.payload, got.headers, got.published_at);
    xid := got.xid;
  end if;
end $$;

-- What became of an event: {id, found, stream, seq, topic, key, published_at, payload (its beginning), bytes, consumers, more}.
-- found: log; delayed, until due_at; copy, if retention dropped it and a retry or dead letter still holds it; archived (lake: where)
-- or dropped, by retention; uncommitted, if its number was drawn and no transaction committed it; unknown. `consumers` are the
-- queues and endpoints, each with its state: waiting, leased, retrying, dead, done, not taken, or
-- unknown where what is left does not tell; and what is known of that:
-- reason, attempt, at, until, error, errors, ahead, holder, dead_letter. An id that the publisher chose is looked for among
-- `look` events around a time, the one in a version 7 UUID or `around`, of each stream. Shows queues that the caller may
-- consume, endpoints to admins, and the event to those who may read its stream or consume a queue that takes it. At most `max`
-- consumers. Errors: MB024 a queue asks by a condition and no statement_timeout is set.
create or replace function pgmb.event_fate(
  id uuid, around timestamptz default null, look integer default 20000, max integer default 1000
)
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  caller name := pgmb_internal.caller();
  admin boolean := pg_has_role(caller, current_user, 'usage') or pgmb_internal.acts_for(caller, 'pgmb_admin');
  later pgmb.delayed;
  s pgmb.stream;
  home pgmb.stream;
  q pgmb.queue;
  located record;
  event pgmb.event;
  xid xid8;
  looked bigint := 0;
  drawn bigint;
  segment pgmb.segment;
  found_in text := 'unknown';
  readable boolean;
  taken boolean := false;
  fate jsonb;
  fates jsonb[] := '{}';
  shared boolean;
begin
  select d.* into later from pgmb.delayed d where d.id = event_fate.id limit 1;
  if later.id is not null and pgmb_internal.may_read(later.stream) then
    return json_build_object('id', event_fate.id, 'found', 'delayed', 'stream', later.stream, 'topic', later.topic, 'key', later.key,
      'due_at', case when later.due_at < '9999-12-31' then later.due_at end, 'payload', left(later.payload::text, 300), 'bytes', octet_length(later.payload::text),
      'consumers', '[]'::json, 'more', false);
  end if;
  -- The log, first of the stream whose salt the id holds.
  for s in
    select one.* from pgmb.stream one
    order by pgmb_internal.derived_number(one, event_fate.id) is null, one.id
  loop
    if pgmb_internal.derived_number(s, event_fate.id) is not null then
      -- It was made of this number: there is nothing to look for.
      event_fate.look := 0;
    end if;
    continue when not pgmb_internal.may_read(s.name) and not exists (
      select from pgmb.queue one where one.stream = s.id and pgmb_internal.may_consume(one.id, caller));
    located := pgmb_internal.find_event(s, event_fate.id, event_fate.around, least(event_fate.look, 100000));
    looked := looked + located.looked;
    if located.xid is not null then
      home := s;
      event := located.event;
      xid := located.xid;
      found_in := 'log';
      exit;
    end if;
  end loop;
  -- Rows of failures hold a copy.
  if xid is null then
    select of.stream, c.* into located
    from (
      select r.queue, r.seq, r.event_id, r.topic, r.key, r.payload, r.headers, r.published_at from pgmb.retry r where r.event_id = event_fate.id
      union all
      select d.queue, d.seq, d.event_id, d.topic, d.key, d.payload, d.headers, d.published_at from pgmb.dead d where d.event_id = event_fate.id
      union all
      select d.queue, d.seq, d.event_id, d.topic, d.key, d.payload, d.headers, d.published_at from pgmb.delivery d where d.event_id = event_fate.id
    ) c
    join pgmb.queue of on of.id = c.queue
    order by pgmb_internal.may_consume(of.id, caller) desc limit 1;
    if located.event_id is not null then
      select one.* into home from pgmb.stream one where one.id = located.stream;
      event := (located.seq, located.event_id, located.topic, located.key, located.payload, located.headers, located.published_at);
      found_in := 'copy';
    end if;
  end if;
  if home.id is not null then
    for q in
      select one.* from pgmb.queue one where one.stream = home.id and one.lane_of is null order by one.name
    loop
      continue when not pgmb_internal.may_consume(q.id, caller);
      shared := q.endpoint is null and exists (
        select from pgmb.subscription u join pgmb.endpoint e on e.subscription = u.id
        where u.stream = q.stream and u.group_id = q.name);
      continue when cardinality(fates) > event_fate.max or (q.endpoint is not null or shared) and not admin;
      fate := pgmb_internal.queue_fate(q, event, xid, admin);
      if shared then
        fates := fates || array(select f from pgmb_internal.endpoint_fates(q, event, fate, event_fate.max + 1) f);
      elsif fate is not null then
        fates := fates || (jsonb_build_object('kind', case when q.endpoint is null then 'queue' else 'endpoint' end,
          'name', coalesce((select e.name from pgmb.endpoint e where e.id = q.endpoint), q.name),
          'queue', case when q.endpoint is not null then q.name end) || fate);
      end if;
      -- Where it is not known that the queue took the event, its consumers may not read it.
      taken := taken or coalesce(fate ->> 'state' not in ('not taken', 'unknown'), false);
    end loop;
    readable := pgmb_internal.may_read(home.name) or taken;
    if readable then
      return json_build_object('id', event_fate.id, 'found', found_in, 'stream', home.name, 'seq', (event).seq, 'topic', (event).topic,
        'key', (event).key, 'published_at', (event).published_at, 'payload', left((event).payload::text, 300),
        'bytes', octet_length((event).payload::text),
        'consumers', to_jsonb(array(select jsonb_strip_nulls(f) from unnest(fates[:event_fate.max]) f)),
        'more', cardinality(fates) > event_fate.max);
    end if;
  end if;
  -- A derived id names a number that is not in the log.
  for s in select one.* from pgmb.stream one where pgmb_internal.derived_number(one, event_fate.id) is not null loop
    continue when home.id is not null or not pgmb_internal.may_read(s.name);
    drawn := pgmb_internal.derived_number(s, event_fate.id);
    select g.* into segment from pgmb.segment g where g.stream = s.id and g.number = pgmb_internal.segment_of(drawn);
    continue when segment.number is null;
    select a.url, a.lake_version, a.verified_at into located from pgmb.archived a
    where a.stream = s.id and a.segment = segment.number and a.verified_at is not null;
    return json_build_object('id', event_fate.id, 'stream', s.name, 'seq', drawn,
      'found', case when segment.dropped_at is null then 'uncommitted' when segment.archived_at is not null then 'archived' else 'dropped' end,
      'dropped_at', segment.dropped_at,
      'lake', case when segment.dropped_at is not null and located.url is not null
        then json_build_object('url', located.url, 'version', located.lake_version) end,
      'consumers', '[]'::json, 'more', false);
  end loop;
  return json_build_object('id', event_fate.id, 'found', 'unknown', 'looked', looked, 'consumers', '[]'::json, 'more', false);
end $$;
