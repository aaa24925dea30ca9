-- Status: what stands where. Everything here is counted by bounded look-ups, so that it costs the same with a backlog of
-- ten or of ten million, and says where a figure is a bound; queue_depth counts exactly, on request.

-- Where a figure of status that is counted ends: at_least names it then.
create or replace function pgmb_internal.counted_upto()
returns integer
language sql immutable parallel safe
as $$
  select 10000
$$;

-- How many sequence numbers of a stream lie between two of them, by what its segments hold.
create or replace function pgmb_internal.numbers_between(stream integer, lo bigint, hi bigint)
returns bigint
language sql stable
as $$
  select coalesce(sum(greatest(0, least(hi, coalesce(s.last_seq,
    case when s.number = pgmb_internal.segment_of(hi) then hi else pgmb_internal.last_in_segment(s.stream, s.number) end))
    - greatest(lo, pgmb_internal.first_number(s.number)))), 0)::bigint
  from pgmb.segment s
  where s.stream = numbers_between.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi) and s.dropped_at is null
$$;

-- The last number in a segment, of one that a rotation is just closing: the sequence moves on before it commits.
create or replace function pgmb_internal.last_in_segment(stream integer, number integer)
returns bigint
language plpgsql stable
as $$
declare
  last bigint;
begin
  execute format('select max(e.seq) from pgmb.segment_%s_%s e', stream, number) into last;
  return coalesce(last, pgmb_internal.first_number(number));
end $$;

-- The number of a stream's newest event, or where its newest segment begins. Not the sequence's last value: after a crash or a
-- failover that is ahead of every event, and what is not committed yet counts.
create or replace function pgmb_internal.newest_number(stream integer, name text)
returns bigint
language plpgsql stable
as $$
declare
  newest integer := pgmb_internal.segment_of(pgmb_internal.last_seq(newest_number.name));
begin
  if to_regclass(format('pgmb.segment_%s_%s', newest_number.stream, newest)) is null then
    return pgmb_internal.first_number(newest);
  end if;
  return pgmb_internal.last_in_segment(newest_number.stream, newest);
end $$;

-- Of a PGMQ queue, up to about `bound` of each: the messages that pgmb's queue has passed and that may be read, and since when;
-- those that a read of less than 20 holds; and the reads of 20 and more whose vt has passed, which hold a lease of pgmb that
-- does not end. oldest_read: since when the first message that is hidden was read.
create or replace function pgmb_internal.pgmq_counts(
  queue integer, now timestamptz, bound integer,
  out visible bigint, out oldest timestamptz, out hidden bigint, out ended_reads bigint, out ended_events bigint,
  out oldest_read timestamptz
)
language plpgsql stable
as $$
declare
  held record;
begin
  execute 'select count(*), min(case when p.vt > ''-infinity'' then p.vt else p.enqueued_at end)
      from (select p.vt, p.enqueued_at from pgmq.parked p where p.queue = $1 and p.vt <= $2 order by p.vt, p.msg_id limit $3 + 1) p'
    into visible, oldest using pgmq_counts.queue, pgmq_counts.now, bound;
  -- What was sent with a delay was never read.
  execute 'select count(*) filter (where p.read_ct > 0), min(p.last_read_at)
      from (select p.read_ct, p.last_read_at from pgmq.parked p where p.queue = $1 and p.vt > $2 order by p.vt limit $3 + 1) p'
    into hidden, oldest_read using pgmq_counts.queue, pgmq_counts.now, bound;
  execute 'select count(*) filter (where r.ended) reads, coalesce(sum(r.events) filter (where r.ended), 0) events,
        min(r.vt) filter (where r.ended) since, min(r.read_at) filter (where not r.ended) read_at
      from (
        select r.vt <= $2 ended, r.vt, r.read_at, c.events - (
          select count(*) from pgmb.settlement s where s.queue = c.queue and s.claim = c.id) events
        from pgmq.reading r
        join pgmb.claim c on c.queue = r.queue and c.id = r.claim and c.token = r.token and c.state = ''leased''
        where r.queue = $1 and not pgmb_internal.is_void(c.queue, c.id)) r
      where r.events > 0'
    into held using pgmq_counts.queue, pgmq_counts.now;
  visible := visible + held.events;
  oldest := least(oldest, held.since);
  ended_reads := held.reads;
  ended_events := held.events;
  oldest_read := least(oldest_read, held.read_at);
end $$;

-- The time of the first event of a stream above a number.
create or replace function pgmb_internal.first_published(stream integer, above bigint, upto bigint)
returns timestamptz
language plpgsql stable
as $$
declare
  leaf text;
  found_at timestamptz;
begin
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
    where s.stream = first_published.stream and s.number between pgmb_internal.segment_of(above) and pgmb_internal.segment_of(upto) and s.dropped_at is null
    order by s.number
  loop
    execute format('select e.published_at from %s e where e.seq > $1 and e.seq <= $2 order by e.seq limit 1', leaf)
      into found_at using above, upto;
    exit when found_at is not null;
  end loop;
  return found_at;
end $$;

-- Every queue that the caller may consume:
--   waiting         events that match and were not received yet, or whose delivery did not count as an attempt (released events,
--                   events of a dispatcher's lease that expired), without those that the queue's ttl or length gives up; of a
--                   PGMQ queue all messages that may be read
--   oldest_age      for how long the first event that could be received now has waited: since it was published, since its retry
--                   was due, or since its lease expired
--   leases          leases that hold unsettled events, leased_events their number, oldest_lease_age since the oldest was given
--   retries         events to be delivered again: after a retry, or because their lease expired
--   dead            dead letters
--   received_per_second   over the last ten seconds
--   behind          numbers of the stream after the queue's position, whatever they match
--   at_least        the columns that end at their bound: retries and dead at 10000, waiting where so many events were looked
--                   at that did not match or wait, 10000 or fewer where there are more than twenty queues
--   at_most         the columns that count too much: waiting and oldest_age where the queue has an SQL condition, a costly
--                   filter or one that raises, which is not asked
create or replace function pgmb.describe_queues(
  out queue text, out stream text, out patterns text[], out paused_at timestamptz, out paused_reason text,
  out waiting bigint, out oldest_age interval, out leases bigint, out leased_events bigint,
  out retries bigint, out dead bigint, out received_per_second double precision, out oldest_lease_age interval,
  out behind bigint, out at_least text[], out at_most text[]
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  q record;
  lane pgmb.queue;
    newest pgmb.claim;
  last bigint;
  part record;
  now timestamptz := clock_timestamp();
  bound constant integer := pgmb_internal.counted_upto();
  -- Shared by all queues, so that many of them do not make the whole dear.
  most bigint := greatest(1000, least(bound, 200000 / (select greatest(count(*), 1) from pgmb.queue h where h.lane_of is null)));
  oldest timestamptz;
  oldest_lease timestamptz;
begin
  for q in
    select head.*, b.patterns, (select count(*) from pgmb.queue l where l.lane_of = head.id) + 1 lane_count
    from pgmb.queue head
    join pgmb.binding b on b.queue = head.id and b.version = head.bindings
    where head.lane_of is null
    order by head.name
  loop
    continue when not pgmb_internal.may_consume(q.id);
    last := pgmb_internal.newest_number(q.stream, q.stream_name);
    queue := q.name;
    stream := q.stream_name;
    patterns := q.patterns;
    paused_at := q.paused_at;
    paused_reason := q.paused_reason;
    waiting := 0;
    oldest := null;
    leases := 0;
    leased_events := 0;
    oldest_lease := null;
    retries := 0;
    dead := 0;
    received_per_second := 0;
    behind := 0;
    at_least := '{}';
    at_most := '{}';
    for lane in select l.* from pgmb.queue l where l.id = q.id or l.lane_of = q.id loop
      select * into newest from pgmb_internal.queue_position(lane.id);
      behind := greatest(behind, pgmb_internal.numbers_between(lane.stream,
        least(pgmb_internal.reached(newest), (select min(l.place) from unnest(newest.lagging) l)), last));

      part := pgmb_internal.waiting_of(lane, newest, greatest(1000, most / q.lane_count));
      waiting := waiting + part.waiting;
      oldest := least(oldest, part.oldest);
      if not part.complete then
        at_least := at_least || 'waiting'::text;
      end if;
      if not part.all_asked then
        at_most := '{waiting,oldest_age}';
      end if;

      part := pgmb_internal.lease_counts(lane.id, newest, now);
      leases := leases + part.leases;
      leased_events := leased_events + part.events;
      oldest_lease := least(oldest_lease, part.oldest);
      retries := retries + part.lapsed;
      received_per_second := received_per_second + part.received / 10.0;
      oldest := least(oldest, pgmb_internal.due_since(lane, newest, now));
      if pgmb_internal.is_pgmqs(lane.id) then
        part := pgmb_internal.pgmq_counts(lane.id, now, bound);
        waiting := waiting + part.visible;
        oldest := least(oldest, part.oldest);
        -- Of the leases, which do not end, those whose messages may be read count as waiting.
        leases := leases - part.ended_reads + part.hidden;
        leased_events := leased_events - part.ended_events + part.hidden;
        oldest_lease := part.oldest_read;
        if part.visible > bound or part.hidden > bound then
          at_least := at_least || '{waiting}'::text[];
        end if;
      end if;

      -- In an ordered queue, those of the first attempt wait for others of their key. In any queue, a conversion left untried
      -- events here, due at once.
      select count(*) filter (where not r.parked) retries, count(*) filter (where r.parked) parked,
        min(r.published_at) filter (where r.parked) oldest
      into part
      from (
        select r.attempt = 1 and (r.ordered or r.error is null and r.due_at <= now) parked, r.published_at from pgmb.retry r
        where r.queue = lane.id and r.lease is null and (r.fresh and r.published_at <= now - lane.ttl) is not true
        limit bound + 1) r;
      waiting := waiting + part.parked;
      oldest := least(oldest, part.oldest);
      retries := retries + part.retries;
      if part.parked + part.retries > bound then
        at_least := at_least || '{waiting,retries}'::text[];
      end if;
      select count(*) filter (where d.lease is null or d.due_at <= now) waiting, count(*) filter (where d.lease is not null and d.due_at > now) leased,
        count(distinct d.lease) filter (where d.due_at > now) leases
      into part from (select d.lease, d.due_at from pgmb.delivery d where d.queue = lane.id limit bound + 1) d;
      retries := retries + part.waiting;
      leases := leases + part.leases;
      leased_events := leased_events + part.leased;
      dead := dead + (select count(*) from (select from pgmb.dead d where d.queue = lane.id limit bound + 1) counted);
    end loop;
    at_least := array(select distinct one from unnest(at_least || case when retries > bound then '{retries}'::text[] end
      || case when dead > bound then '{dead}'::text[] end) one where one <> all (at_most));
    retries := least(retries, bound);
    dead := least(dead, bound);
    oldest_age := now - oldest;
    oldest_lease_age := now - oldest_lease;
    return next;
  end loop;
end $$;

-- As pgmb_internal.count_waiting, by all that the queue asks, or by its patterns alone where the rest cannot be asked.
create or replace function pgmb_internal.waiting_of(
  q pgmb.queue, newest pgmb.claim, most bigint, out waiting bigint, out oldest timestamptz, out complete boolean, out all_asked boolean
)
language plpgsql stable
as $$
declare
  asked record := pgmb_internal.askable(q);
  counted record;
  deliverable text := pgmb_internal.deliverable(q, clock_timestamp());
begin
  all_asked := asked.all_asked;
  newest := pgmb_internal.kept_from(q, newest, most);
  if asked.condition = q.matching then
    counted := pgmb_internal.count_waiting(q, newest, q.matching || deliverable, most);
  else
    begin
      counted := pgmb_internal.count_waiting(q, newest, asked.condition || deliverable, most);
    exception when others then
      if pgmb_internal.servers_trouble(sqlstate) then
        raise;
      end if;
      all_asked := false;
      counted := pgmb_internal.count_waiting(q, newest, q.matching || deliverable, most);
    end;
  end if;
  waiting := case when q.when_full = 'drop_oldest' and q.max_length > most then least(counted.waiting, q.max_length) else counted.waiting end;
  oldest := counted.oldest;
  complete := counted.complete or not all_asked;
  if not (counted.complete or all_asked) then
        waiting := pgmb_internal.numbers_between(q.stream,
      (select min(greatest(p.lo, (p.batch).done_seq)) from pgmb_internal.pending(q, newest) p),
      pgmb_internal.newest_number(q.stream, q.stream_name));
  end if;
end $$;

-- The leases of a queue: how many hold unsettled events, how many events, since when; how many events more are in leases
-- that expired and were not swept yet (lapsed), and how many were received within ten seconds.
create or replace function pgmb_internal.lease_counts(
  queue integer, newest pgmb.claim, now timestamptz,
  out leases bigint, out events bigint, out oldest timestamptz, out lapsed bigint, out received bigint
)
language plpgsql stable
as $$
begin
  with given as (
    select c.queue, c.id, c.state, c.at, c.events, c.expires_at from pgmb.claim c
    where c.queue + 0 = lease_counts.queue and c.expires_at > least((newest).swept, lease_counts.now - interval '10 seconds')
      and c.expires_at < 'infinity'
    union
    -- The sweep has passed these.
    select c.queue, c.id, c.state, c.at, c.events, c.expires_at from pgmb.claim c
    where c.queue = lease_counts.queue
      and c.id = any ((newest).held || array(
        select s.claim from pgmb.shortened s where s.queue = lease_counts.queue and s.ends_at <= lease_counts.now))
  ), held as materialized (
    select c.at, c.expires_at > lease_counts.now live, case c.state
      when 'leased_retries' then (select count(*) from pgmb.retry r where r.queue = c.queue and r.lease = c.id)
      else c.events - (select count(*) from pgmb.settlement s where s.queue = c.queue and s.claim = c.id) end events
    from given c
    where c.state = 'leased_retries'
      or c.state = 'leased' and (pgmb_internal.generation_of(c.id) = pgmb_internal.generation_of((newest).id) or not pgmb_internal.is_void(c.queue, c.id))
  )
  select count(*) filter (where h.live), coalesce(sum(h.events) filter (where h.live), 0), min(h.at) filter (where h.live),
    coalesce(sum(h.events) filter (where not h.live), 0),
    (select coalesce(sum(c.events), 0) from given c where c.at > lease_counts.now - interval '10 seconds')
  into leases, events, oldest, lapsed, received
  from held h where h.events > 0;
end $$;

-- Every stream: its segments, how many events they hold by their numbers, so that what was rolled back counts, how many
-- wait to be published later (up to 10000: then at_least names it), and how many were published over the last ten seconds.
create or replace function pgmb.describe_streams(
  out stream text, out segments bigint, out unsealed bigint, out unarchived bigint, out events bigint,
  out delayed bigint, out published_per_second double precision, out last_tick_age interval, out bytes bigint,
  out at_least text[]
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
  last bigint;
  ticked pgmb.tick;
  earlier record;
  span interval;
  now timestamptz := clock_timestamp();
  bound constant integer := pgmb_internal.counted_upto();
begin
  for s in select * from pgmb.stream order by name loop
    stream := s.name;
    last := pgmb_internal.newest_number(s.id, s.name);
    select count(*) filter (where g.number <= pgmb_internal.segment_of(last) and g.dropped_at is null),
      count(*) filter (where g.closed_at is not null and g.sealed_at is null),
      count(*) filter (where s.archive and g.sealed_at is not null and g.archived_at is null),
      sum(pg_total_relation_size(to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number))))
    into segments, unsealed, unarchived, bytes
    from pgmb.segment g where g.stream = s.id;
    events := pgmb_internal.numbers_between(s.id, 0, last);
    select count(*) into delayed from (select from pgmb.delayed d where d.stream = s.name limit bound + 1) counted;
    at_least := case when delayed > bound then '{delayed}' else '{}' end;
    delayed := least(delayed, bound);
    select * into ticked from pgmb.tick t where t.stream = s.id order by t.id desc limit 1;
    last_tick_age := now - ticked.at;
    -- What was published since the last tick before those seconds. While the ticker runs, that tick has all that came
    -- before them; otherwise what there is since that tick is spread over the time since then.
    select t.at, (t.position).seq into earlier
    from pgmb.tick t where t.stream = s.id and t.at <= now - interval '10 seconds' order by t.at desc limit 1;
    span := case when ticked.at > now - interval '10 seconds' then interval '10 seconds'
      else greatest(interval '10 seconds', now - coalesce(earlier.at, s.created_at)) end;
    published_per_second := pgmb_internal.numbers_between(s.id, coalesce(earlier.seq, 0), last) / extract(epoch from span);
    return next;
  end loop;
end $$;

-- How many bytes the events of a stream between two of its numbers take, by what its segments hold and take on disk
-- without their indexes. `last`: the stream's last number.
create or replace function pgmb_internal.bytes_between(stream integer, lo bigint, hi bigint, last bigint)
returns bigint
language sql stable
as $$
  select coalesce(sum(
    pg_table_size(to_regclass(format('pgmb.segment_%s_%s', s.stream, s.number)))
      * greatest(0, least(hi, coalesce(s.last_seq, last)) - greatest(lo, pgmb_internal.first_number(s.number)))::double precision
      / nullif(coalesce(s.last_seq, last) - pgmb_internal.first_number(s.number), 0)), 0)::bigint
  from pgmb.segment s
  where s.stream = bytes_between.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi) and s.dropped_at is null
    and (s.last_seq is not null or s.number = pgmb_internal.segment_of(last))
$$;

-- The first event above a position's number that the position has not passed. At most 10000 events of a segment are
-- looked at; where it has passed them all, the last of them stands for it.
create or replace function pgmb_internal.first_unread(
  stream integer, after pgmb.position, upto bigint, out seq bigint, out published_at timestamptz
)
language plpgsql stable
as $$
declare
  leaf text;
begin
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) from pgmb.segment s
    where s.stream = first_unread.stream and s.number between pgmb_internal.segment_of((after).seq) and pgmb_internal.segment_of(upto)
      and s.dropped_at is null and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin((after).snapshot))
    order by s.number
  loop
    execute format(
        'select near.seq, near.published_at from (
          select e.seq, e.xid, e.published_at from %s e where e.seq > $1 and e.seq <= $2 order by e.seq limit 10000
        ) near where not pg_visible_in_snapshot(near.xid, $3) order by near.seq limit 1', leaf)
      into seq, published_at using (after).seq, upto, (after).snapshot;
    exit when seq is not null;
    execute format(
        'select e.seq, e.published_at from %s e where e.seq > $1 and e.seq <= $2 order by e.seq offset 9999 limit 1',
        leaf)
      into seq, published_at using (after).seq, upto;
    exit when seq is not null;
  end loop;
end $$;

-- Every durable reader (pgmb.confirm) of the streams that the caller may read. waiting: events after its position, by
-- their numbers from the first unread one on, so that what was rolled back since or is not yet committed counts;
-- waiting_bytes: their share of what the segments take; lag: the age of the first unread event, null where there is
-- none. held_segments, held_for: what retention would have dropped but for this reader, and for how long. lost: what
-- it has not read was dropped all the same (drop_unread), and between() will refuse its position. most: only so many, those of
-- each stream that are furthest behind; null: all, by name.
create or replace function pgmb.describe_readers(
  most integer default null, out reader text, out stream text, out "position" pgmb.position, out confirmed_at timestamptz,
  out waiting bigint, out waiting_bytes bigint, out lag interval,
  out held_segments bigint, out held_for interval, out lost boolean
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  s pgmb.stream;
  r pgmb.reader;
  last bigint;
  late record;
  first record;
  readable integer[] := array(select st.id from pgmb.stream st where pgmb_internal.may_read(st.name) order by st.name);
begin
  for r in
    select known.* from pgmb.reader known
    cross join lateral (select array_position(readable, known.stream) stream) place
    where place.stream is not null
    order by case when describe_readers.most is null then 0 else row_number() over (
      partition by known.stream order by (known.position).seq) end, place.stream, known.name
    limit describe_readers.most
  loop
    if s.id is distinct from r.stream then
      select * into s from pgmb.stream st where st.id = r.stream;
      last := pgmb_internal.last_seq(s.name);
    end if;
    reader := r.name;
    stream := s.name;
    position := r.position;
    confirmed_at := r.updated_at;
    late := pgmb_internal.stragglers(s.id, r.position, pg_current_snapshot(), 0, (r.position).seq);
    first := pgmb_internal.first_unread(s.id, r.position, last);
    waiting := late.events;
    waiting_bytes := pgmb_internal.bytes_between(s.id, (r.position).seq - late.events, (r.position).seq, last);
    if first.seq is not null then
      waiting := waiting + pgmb_internal.numbers_between(s.id, first.seq - 1, last);
      waiting_bytes := waiting_bytes + pgmb_internal.bytes_between(s.id, first.seq - 1, last, last);
    end if;
    lag := clock_timestamp() - least(late.oldest, first.published_at);
    select count(*), clock_timestamp() - min(old.due_at) into held_segments, held_for
    from (
      select coalesce(g.last_published_at, g.closed_at) + s.keep_for due_at
      from pgmb.segment g
      where g.stream = s.id and g.dropped_at is null and g.sealed_at is not null and not s.drop_unread
        and (not s.archive or g.archived_at is not null)
        and g.max_xid >= pg_snapshot_xmin((r.position).snapshot)
    ) old
    where old.due_at < statement_timestamp();
    lost := pg_snapshot_xmin((r.position).snapshot) > '3' and exists (
      select from pgmb.segment g where g.stream = s.id and g.dropped_at is not null
        and g.max_xid >= pg_snapshot_xmin((r.position).snapshot));
    return next;
  end loop;
end $$;

-- Every application that publishes by versions, as Spark's sink does, to the streams that the caller may publish to or
-- read: the last version that it published (null: none yet), with how many events and when; how many stages it holds,
-- of a version under way or left over by one that failed, and since when.
create or replace function pgmb.describe_sinks(
  out app text, out stream text, out version bigint, out events bigint, out committed_at timestamptz,
  out stages bigint, out staged_at timestamptz
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  select coalesce(l.app, held.app), s.name, l.version, l.events, l.committed_at, coalesce(held.stages, 0), held.staged_at
  from pgmb.ledger l
  full join (
    select g.app, g.stream, count(*) stages, min(g.claimed_at) staged_at
    from pgmb.stage g where g.app is not null group by g.app, g.stream
  ) held on held.app = l.app and held.stream = l.stream
  join pgmb.stream s on s.id = coalesce(l.stream, held.stream)
  cross join (select pgmb_internal.caller() as role offset 0) c
  where pg_has_role(c.role, current_user, 'usage') or pgmb_internal.acts_for(c.role, 'pgmb_admin')
    or pgmb_internal.acts_for(c.role, 'pgmb_consumer')
    or has_table_privilege(c.role, format('pgmb.%I', 'log_' || s.name), 'select')
    or has_any_column_privilege(c.role, format('pgmb.%I', 'log_' || s.name), 'insert')
  order by 2, 1;
end $$;

-- What keeps segments that are older than keep_for, in the streams that the caller may read: a queue or reader that has not
-- passed them, or the archive. For how long, and how many segments.
create or replace function pgmb.describe_retention(
  out stream text, out kind text, out holder text, out segments bigint, out held_for interval
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  now timestamptz := clock_timestamp();
begin
  return query
  select s.name, held.kind, held.name, count(*), now - min(due.due_at)
  from pgmb.stream s
  join pgmb.segment g on g.stream = s.id and g.dropped_at is null and g.sealed_at is not null
  cross join lateral (select coalesce(g.last_published_at, g.closed_at) + s.keep_for as due_at) due
  cross join lateral (
    select h.kind, h.name from pgmb_internal.segment_holders(g) h where not s.drop_unread
    union all
    select 'archive', 'archive' where s.archive and g.archived_at is null
  ) held
  where due.due_at < now and pgmb_internal.may_read(s.name)
  group by s.name, held.kind, held.name
  order by 5 desc;
end $$;

-- The broker as a whole: how many dead letters there were since the server's statistics began (those that were rolled back count;
-- a crash or failover begins them again), since when maintain()
-- has not ended (null: never), how many dispatchers are alive, how many endpoints need one, since when the stream main is
-- there, and which steps of maintain() fail, with their errors, and since when the first of them.
create or replace function pgmb.describe_broker(
  out dead_letters bigint, out maintained_age interval, out dispatchers bigint, out endpoints bigint,
  out age interval, out failing text[], out failing_for interval
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Not the sequence of their ids: after a crash that is ahead, as if there had been more.
  dead_letters := pg_stat_get_tuples_inserted('pgmb.dead'::regclass);
  -- A time that has not come was written while the clock was ahead: since then nothing is known.
  maintained_age := clock_timestamp() - to_timestamp(pg_sequence_last_value('pgmb.maintained') / 1000.0);
  if maintained_age < interval '-1 second' then
    maintained_age := null;
  end if;
  dispatchers := pgmb_internal.live_dispatchers();
  select count(*) into endpoints from pgmb.endpoint e where e.state <> 'disabled';
  select clock_timestamp() - s.created_at into age from pgmb.stream s where s.name = 'main';
  select array_agg(f.step || ': ' || f.error order by f.step), clock_timestamp() - min(f.since) into failing, failing_for
  from pgmb.maintenance_failure f;
end $$;

-- Exactly how many events wait in a queue: reads every one of them. Null where that cannot be known: its filter or
-- condition raises, or needs a statement_timeout and none is set.
create or replace function pgmb.queue_depth(queue text)
returns bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  q pgmb.queue;
    newest pgmb.claim;
  depth bigint := 0;
  part bigint;
begin
  for q in select * from pgmb_internal.lanes_for_consumer(queue) loop
    select * into newest from pgmb_internal.queue_position(q.id);
        begin
      if pgmb_internal.needs_timeout(q) then
        perform pgmb_internal.assert_timeout();
      end if;
      q.matching := q.matching || pgmb_internal.asking(q) || pgmb_internal.deliverable(q, clock_timestamp());
      newest := pgmb_internal.kept_from(q, newest, 9223372036854775807);
            select count(*) into part
      from pgmb_internal.pending(q, newest) p
      cross join lateral pgmb_internal.batch_events(q.stream, p.batch, p.lo, p.hi, q.matching || p.matching, raw => true);
    exception when others then
      if q.plain or pgmb_internal.servers_trouble(sqlstate) then
        raise;
      end if;
      return null;
    end;
    if pgmb_internal.is_pgmqs(q.id) then
      part := part + (pgmb_internal.pgmq_counts(q.id, clock_timestamp(), 2147483646)).visible;
    end if;
    depth := depth + part + (select count(*) from pgmb.retry r where r.queue = q.id and r.lease is null)
      + (select count(*) from pgmb.delivery d where d.queue = q.id and d.lease is null);
  end loop;
  return depth;
end $$;

-- Every queue that the caller may consume, as describe_queues() tells.
create or replace view pgmb.queue_status as
select * from pgmb.describe_queues();

-- Every stream, as describe_streams() tells.
create or replace view pgmb.stream_status as
select * from pgmb.describe_streams();

-- Every durable reader of the streams that the caller may read, as describe_readers() tells.
create or replace view pgmb.reader_status as
select * from pgmb.describe_readers();

-- Every application that publishes by versions, as describe_sinks() tells.
create or replace view pgmb.sink_status as
select * from pgmb.describe_sinks();

-- Who keeps old row versions alive, and segments from being sealed: sessions with a snapshot or a transaction id, prepared
-- transactions, replication slots. xids: how many transactions have begun since. pgmb's speed does not depend on it; the
-- rest of the database may.
create or replace view pgmb.xmin_holders as
select 'session' kind, a.pid::text name, a.usename::text owner, a.state, now() - a.xact_start age,
  greatest(age(a.backend_xmin), age(a.backend_xid)) xids, left(a.query, 80) query
from pg_stat_activity a
-- One that is idle in a transaction has no snapshot, but the id under which it wrote.
where (a.backend_xmin is not null or a.backend_xid is not null) and a.pid <> pg_backend_pid()
union all
select 'prepared', p.gid, p.owner::text, null, now() - p.prepared, age(p.transaction), null
from pg_prepared_xacts p where p.database = current_database()
union all
select 'slot', s.slot_name::text, null, case when s.active then 'active' else 'inactive' end, null,
  greatest(age(s.xmin), age(s.catalog_xmin)), null
from pg_replication_slots s where s.xmin is not null or s.catalog_xmin is not null;
