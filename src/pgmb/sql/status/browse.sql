-- Browsing. The log and the dead letters, newest first. Every call looks at a bounded number of rows and returns where it
-- stopped, so that a search that finds little goes on from there instead of reading a large log in one call.

-- The newest events of a stream that match: {events, looked, next}. Each event comes with the beginning of its payload
-- and how many bytes it has. At most `max` (200) events are returned and `look` (100000) are looked at; `next`, unless
-- null, is what to pass as `before` to go on. Of a time span, events that a publisher dated back, or that came last of a
-- statement which ran for more than a minute, may be passed over. Errors: MB001, MB005, MB007 invalid pattern, 42501. For admins.
create or replace function pgmb.browse(
  stream text default 'main', topic text default null, key text default null, id uuid default null,
  since timestamptz default null, until timestamptz default null,
  before bigint default null, max integer default 50, look integer default 20000
)
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  most integer := least(browse.max, 200);
  budget bigint := least(browse.look, 100000);
  looked bigint := 0;
  asked pgmb.stream;
  upper bigint;
  floor bigint := -1;
  leaf record;
  lowest bigint;
  seen bigint;
  asking text := '';
  shown text;
  part json[];
  events json[] := '{}';
  last_shown bigint;
  next bigint;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(browse.stream);
  if not coalesce(browse.max > 0 and browse.look > 0, false) then
    raise exception 'max and look must be at least 1' using errcode = 'MB005';
  end if;
  select * into asked from pgmb.stream s where s.name = browse.stream;
  shown := 'json_build_object(''seq'', v.seq, ''id'', v.id, ''topic'', v.topic, ''key'', v.key,'
    || ' ''payload'', left(v.payload::text, 300), ''bytes'', octet_length(v.payload::text), ''published_at'', v.published_at)';
  if browse.id is not null and browse.before is null then
    execute format('select array(select %s from (select %s from pgmb.%I e where e.seq = any ($1)) v
        where v.id = $2 limit 1)', shown, replace(pgmb_internal.event_columns(asked.salt), ', e.topic', ' id, e.topic'), 'log_' || asked.name)
    into events
    using pgmb_internal.numbers_of_id(asked.salt, browse.id), browse.id;
    if cardinality(events) > 0 then
      return json_build_object('events', to_json(events), 'looked', 1, 'next', null);
    end if;
  end if;

  upper := coalesce(browse.before, pgmb_internal.last_seq(asked.name) + 1);
  if browse.until is not null then
    upper := least(upper, coalesce((
      select (t.position).seq + 1 from pgmb.tick t
      where t.stream = asked.id and t.at >= browse.until + interval '1 minute' order by t.at, t.id limit 1), upper));
  end if;
  if browse.since is not null then
    floor := coalesce((
      select (t.position).seq from pgmb.tick t
      where t.stream = asked.id and t.at <= browse.since order by t.at desc, t.id desc limit 1), floor);
  end if;
  if browse.topic is not null then
    asking := pgmb_internal.matching(array[browse.topic]);
  end if;

  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number) name, s.last_published_at
    from pgmb.segment s
    where s.stream = asked.id and s.dropped_at is null
      and s.number between pgmb_internal.segment_of(greatest(floor, 0)) and pgmb_internal.segment_of(upper - 1)
    order by s.number desc
  loop
    continue when leaf.last_published_at < browse.since;
    if looked >= budget then
      next := coalesce(lowest, upper);
      exit;
    end if;
    execute format('select min(v.seq), count(*) from (
        select e.seq from %s e where e.seq > $1 and e.seq < $2 order by e.seq desc limit $3) v', leaf.name)
    into lowest, seen using floor, upper, budget - looked;
    continue when seen = 0;
    looked := looked + seen;
    execute format('select array_agg(%s order by v.seq desc), min(v.seq) from (
        select %s from %s e
        where e.seq >= $1 and e.seq < $2 and ($3 is null or e.key = $3) and ($4 is null or e.published_at >= $4)
          and ($5 is null or e.published_at < $5) and ($6 is null or e.id = $6) %s
        order by e.seq desc limit $7) v',
      shown, replace(pgmb_internal.event_columns(asked.salt), ', e.topic', ' id, e.topic'), leaf.name, asking)
    into part, last_shown
    using lowest, upper, browse.key, browse.since, browse.until, browse.id, most - cardinality(events);
    events := events || coalesce(part, '{}');
    if cardinality(events) >= most then
      next := last_shown;
      exit;
    end if;
    upper := lowest;
    next := case when looked >= budget then lowest end;
  end loop;
  return json_build_object('events', to_json(events), 'looked', looked, 'next', next);
end $$;

-- The numbers under which an event of this id may be found: the one that the id was derived from, those of attempts.
create or replace function pgmb_internal.numbers_of_id(salt bigint, id uuid)
returns bigint[]
language sql stable
as $$
  select array(
    select ((('x' || right(replace(numbers_of_id.id::text, '-', ''), 16))::bit(64)::bigint & 4611686018427387903)
      - numbers_of_id.salt) & 4611686018427387903
    union
    select a.seq from pgmb.attempt a where a.event_id = numbers_of_id.id and a.seq is not null)
$$;

-- One event of a stream, by its number; nothing where retention dropped it. Errors: MB001, 42501. For admins.
create or replace function pgmb.browse_event(stream text, seq bigint)
returns setof pgmb.event
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.stream_id(browse_event.stream);
  return query execute format('select %s from pgmb.%I e where e.seq = $1',
    pgmb_internal.event_columns((select s.salt from pgmb.stream s where s.name = browse_event.stream)), 'log_' || browse_event.stream)
  using browse_event.seq;
end $$;

-- The ids of the newest dead letters that match, of one queue or of all: the error by a part of its text in any case,
-- died within a time span, with an id below `before`. At most `max` are returned and `look` looked at; `next` goes on.
-- Errors: MB002, MB007 invalid pattern, 42501. For admins.
create or replace function pgmb.find_dead(
  queue text default null, topic text default null, error text default null,
  since timestamptz default null, until timestamptz default null,
  before bigint default null, max integer default 500, look integer default 20000,
  out ids bigint[], out looked bigint, out next bigint
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  asked integer[] := case when find_dead.queue is not null
    then array(select q.id from pgmb_internal.lanes_for_consumer(find_dead.queue) q) end;
  upper bigint := coalesce(find_dead.before, 9223372036854775807);
  candidates bigint[];
  compiled record;
begin
  perform pgmb_internal.assert_admin();
  if find_dead.topic is not null then
    select c.topics, c.regex into compiled from pgmb.compile_patterns(array[find_dead.topic]) c;
  else
    select null::text[] topics, null::text regex into compiled;
  end if;
  if asked is null then
    candidates := array(select d.id from pgmb.dead d where d.id < upper order by d.id desc limit find_dead.look);
  else
    candidates := array(
      select d.id from unnest(asked) lane cross join lateral (
        select d.id from pgmb.dead d where d.queue = lane and d.id < upper order by d.id desc limit find_dead.look) d
      order by d.id desc limit find_dead.look);
  end if;
  looked := cardinality(candidates);
  ids := array(
    select d.id from unnest(candidates) candidate (id) join pgmb.dead d on d.id = candidate.id
    where (compiled.topics is null or d.topic = any (compiled.topics))
      and (compiled.regex is null or d.topic ~ compiled.regex)
      and (find_dead.error is null or strpos(lower(d.error), lower(find_dead.error)) > 0)
      and (find_dead.since is null or d.died_at >= find_dead.since)
      and (find_dead.until is null or d.died_at < find_dead.until)
    order by d.id desc limit find_dead.max);
  if cardinality(ids) >= find_dead.max then
    next := ids[cardinality(ids)];
  elsif looked >= find_dead.look then
    next := candidates[looked];
  end if;
end $$;

-- Dead letters by id, newest first, with the queue's name and the beginning of what they carry; `whole`: all of it. For
-- admins.
create or replace function pgmb.browse_dead(ids bigint[], whole boolean default false)
returns table (id bigint, queue text, stream text, endpoint text, died_at timestamptz, attempt integer, error text, seq bigint,
  event_id uuid, topic text, key text, payload text, bytes integer, headers text, published_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select d.id, coalesce(head.name, q.name), q.stream_name, e.name, d.died_at, d.attempt,
    case when whole then d.error else left(d.error, 300) end, d.seq, d.event_id, d.topic, d.key,
    case when whole then d.payload::text else left(d.payload::text, 300) end, octet_length(d.payload::text),
    case when whole then d.headers::text end, d.published_at
  from pgmb.dead d
  join pgmb.queue q on q.id = d.queue
  left join pgmb.queue head on head.id = q.lane_of
  left join pgmb.endpoint e on e.id = d.endpoint
  where d.id = any (browse_dead.ids)
  order by d.id desc;
end $$;

-- Sends dead letters of any queues back to be tried again, by id, and returns how many of them were there. For admins.
create or replace function pgmb.redrive_dead(ids bigint[])
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  part record;
  moved bigint := 0;
begin
  perform pgmb_internal.assert_admin();
  for part in select b.queue, array_agg(b.id) ids from pgmb.browse_dead(redrive_dead.ids) b group by b.queue order by b.queue loop
    moved := moved + pgmb.redrive(part.queue, part.ids);
  end loop;
  return moved;
end $$;

-- Deletes dead letters of any queues for good, by id, and returns how many of them were there. For admins.
create or replace function pgmb.drop_dead_letters(ids bigint[])
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  part record;
  gone bigint := 0;
begin
  perform pgmb_internal.assert_admin();
  for part in select b.queue, array_agg(b.id) ids from pgmb.browse_dead(drop_dead_letters.ids) b group by b.queue order by b.queue loop
    gone := gone + pgmb.drop_dead(part.queue, part.ids);
  end loop;
  return gone;
end $$;

-- What dead letters have in common: how their errors begin, up to the first digit, and how many of these do, the commonest
-- first. Looks at those given by id. For admins.
create or replace function pgmb.common_errors(ids bigint[], max integer default 6)
returns table (error text, letters bigint)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select case when length(said.prefix) < 8 then said.line else said.prefix end, count(*)
  from pgmb.dead d
  cross join lateral (select left(split_part(d.error, e'\n', 1), 80) line) first
  cross join lateral (select first.line, rtrim(substring(first.line from '^\D*')) prefix) said
  where d.id = any (common_errors.ids) and d.error <> ''
  group by 1 order by 2 desc, 1 limit common_errors.max;
end $$;
