-- Queues: create, change, drop, and where they stand.

-- Compiles topic patterns: words separated by dots, * is one word, # any number of words. Returns exact
-- topics, or one regular expression, or neither if all topics match. Called by pgmb.matches and Spark's source. Errors: MB007
-- invalid pattern. Support.
create or replace function pgmb.compile_patterns(patterns text[], out topics text[], out regex text)
language plpgsql immutable parallel safe
as $$
declare
  pattern text;
  words text[];
  word text;
  compiled text;
  alternatives text[] := '{}';
  wild boolean := false;
begin
  if coalesce(cardinality(patterns), 0) = 0 then
    raise exception 'a queue needs at least one pattern' using errcode = 'MB007',
      hint = 'The pattern # matches every topic.';
  end if;
  foreach pattern in array patterns loop
    words := string_to_array(pattern, '.');
    if coalesce(pattern, '') = '' or exists (select from unnest(words) w where w ~ '[*#]' and length(w) > 1) then
      raise exception 'invalid pattern: %', coalesce(quote_literal(pattern), 'null') using errcode = 'MB007',
        hint = '* and # stand for whole words: order.*, order.#, *.created.';
    end if;
    wild := wild or pattern ~ '[*#]';
    compiled := '';
    while cardinality(words) > 0 and words[1] = '#' loop
      words := words[2:];
      compiled := '(?:[^.]*\.)*';
    end loop;
    if cardinality(words) = 0 and compiled <> '' then
      topics := null;
      regex := null;
      return;
    end if;
    for position in 1 .. cardinality(words) loop
      word := words[position];
      compiled := compiled || case
        when word = '#' then '(?:\.[^.]*)*'
        else case when position = 1 then '' else '\.' end
          || case when word = '*' then '[^.]*' else regexp_replace(word, '([^[:alnum:]_])', '\\\1', 'g') end
      end;
    end loop;
    alternatives := alternatives || compiled;
  end loop;
  if wild then
    regex := '^(?:' || array_to_string(alternatives, '|') || ')$';
  else
    topics := patterns;
  end if;
end $$;

-- The condition on an event e that patterns make, to be added to a WHERE clause.
create or replace function pgmb_internal.matching(patterns text[])
returns text
language sql immutable parallel safe
as $$
  select case
    when c.topics is not null then format(' and e.topic = any (%L)', c.topics)
    when c.regex is not null then format(' and e.topic ~ %L', c.regex)
    else ''
  end
  from pgmb.compile_patterns(patterns) c
$$;

-- Whether a topic matches a pattern.
create or replace function pgmb.matches(pattern text, topic text)
returns boolean
language sql immutable parallel safe
as $$
  select case
    when c.topics is not null then topic = any (c.topics)
    when c.regex is not null then topic ~ c.regex
    else true
  end
  from pgmb.compile_patterns(array[pattern]) c
$$;

-- The queue that a caller names; a row of nulls if there is none. The rows of lanes and shards have names too, but a call on one
-- of them would pass the limits of the queue, or act on a part of its keys. Errors: MB004 it is a lane or shard.
create or replace function pgmb_internal.queue_named(name text)
returns pgmb.queue
language plpgsql stable
as $$
declare
  found_queue pgmb.queue;
  head text;
begin
  select * into found_queue from pgmb.queue q where q.name = queue_named.name;
  if found_queue.lane_of is not null then
    select q.name into head from pgmb.queue q where q.id = found_queue.lane_of;
    raise exception '% is a % of queue %', quote_literal(name), case when found_queue.shards > 1 then 'shard' else 'lane' end,
      quote_literal(head) using errcode = 'MB004', hint = format('Name the queue: %s.', head);
  end if;
  return found_queue;
end $$;

-- The queue of that name, if the caller may consume it. Errors: MB002 no such queue, MB004 it is a lane or shard, 42501.
create or replace function pgmb_internal.queue_for_consumer(name text)
returns pgmb.queue
language plpgsql stable
as $$
declare
  found_queue pgmb.queue := pgmb_internal.queue_named(name);
begin
  if found_queue.id is null then
    raise exception 'queue % does not exist', coalesce(quote_literal(name), 'null')
      using errcode = 'MB002', hint = 'Create it with pgmb.create_queue(name, patterns).';
  end if;
  perform pgmb_internal.assert_consumer(found_queue.id, found_queue.name);
  return found_queue;
end $$;

-- The condition of one lane: the queue's patterns, the lane's own, and none of a lane before it. What matches
-- no lane is in one more, the last. Of an ordered queue a lane is a share of the keys; events without one are
-- dealt out.
create or replace function pgmb_internal.lane_matching(patterns text[], lanes text[], shards integer, lane integer)
returns text
language sql immutable parallel safe
as $$
  select pgmb_internal.matching(patterns)
    || case when lanes[lane + 1] is null then '' else pgmb_internal.matching(array[lanes[lane + 1]]) end
    || coalesce((
      select string_agg(format(' and not (%s)', coalesce(nullif(substr(pgmb_internal.matching(array[before]), 6), ''), 'true')), ''
        order by place)
      from unnest(lanes[:lane]) with ordinality l (before, place)), '')
    || case when shards = 1 then '' else format(
      ' and case when e.key is null then e.seq else hashtext(e.key)::bigint end & %s = %s', shards - 1, lane) end
$$;

-- A number for a new queue: one that no queue has and no row of a queue that was dropped (clear_dropped_queues).
-- Errors: 54000 all are taken.
create or replace function pgmb_internal.next_queue_number()
returns integer
language plpgsql
as $$
declare
  number integer;
begin
  for attempt in 1 .. 1000000 loop
    number := nextval('pgmb.queue_id_seq');
    if not exists (select from pgmb.queue q where q.id = number)
      and not exists (select from pgmb.claim c where c.queue = number)
      and not exists (select from pgmb.retry r where r.queue = number)
    then
      return number;
    end if;
  end loop;
  raise exception 'no number is free for another queue' using errcode = '54000',
    hint = 'A database has at most 16777215 queues. Each lane and each shard of a queue is one.';
end $$;


-- Creates a queue that reads `stream` from the position `starting` on, by default from now. True if it was
-- created, false if a queue of that name exists with the same stream, patterns, order, lanes and fair_by.
--   ordered         one lease at a time holds events of a key, one or several in order; different keys in parallel
--   shards          the number of shards among which an ordered queue distributes its keys. While leases are short, a
--                   shard gives one lease at a time. A power of two, by default 4, or 1 with max_length
--   max_in_flight   maximum number of leased events;  rps: maximum number of events delivered per second
--   ttl             events older than this when they are first received become dead letters
--   max_length      maximum number of waiting events; when_full: 'refuse' makes publishers fail with MB040,
--                   'drop_oldest' skips the oldest
--   lanes           patterns of the most urgent events, of the next, and so on: a receive takes from the first
--                   lane that is not empty, and now and then from the others
--   fair_by         what names an event's tenant, 'key' or 'header:NAME': tenants are served in turn, so that one with many
--                   waiting events does not delay the others. Not with ordered
--   equals          fields of the event that must have these values: {"payload": {"status": "paid"}}
--   filter          a jsonpath predicate over {topic, key, payload, headers}, with variables from params
--   condition       an SQL expression over e, the event, and s.params; for roles that were granted pgmb_conditions
-- Errors: MB001 no such stream, MB003 invalid name, MB005 settings that exclude each other, MB006 it exists and
-- differs, MB007 invalid pattern, MB009 invalid filter, MB010 invalid condition, MB025 no conditions here, and, where it is
-- created, those of between for `starting`.
create or replace function pgmb.create_queue(
  name text, patterns text[] default '{#}', stream text default 'main', starting pgmb.position default null,
  lease_for interval default '30 seconds', max_attempts integer default 10,
  backoff_base interval default '1 second', backoff_factor double precision default 2,
  backoff_max interval default '1 hour', backoff_jitter double precision default 0.2,
  ordered boolean default false, max_in_flight integer default null, rps double precision default null,
  ttl interval default null, max_length bigint default null, when_full text default 'refuse',
  lanes text[] default null, shards integer default null,
  equals jsonb default null, filter text default null, condition text default null, params jsonb default null,
  fair_by text default null
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  made integer;
  head integer;
  -- One that has a length counts what waits in one place.
  parts integer := coalesce(create_queue.shards, case when create_queue.ordered and create_queue.max_length is null then 4 else 1 end);
  stream_number integer := pgmb.stream_id(create_queue.stream);
  start pgmb.position := coalesce(create_queue.starting, pgmb_internal.take_position(create_queue.stream));
  base pgmb.claim;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.matching(create_queue.patterns);
  perform pgmb_internal.assert_filter(create_queue.equals, create_queue.filter, create_queue.params);
  create_queue.condition := pgmb_internal.compile_condition(create_queue.condition);
  perform pgmb_internal.assert_name('queue', create_queue.name);
  perform pgmb_internal.assert_form(create_queue.ordered, parts, create_queue.lanes, create_queue.fair_by, create_queue.max_length,
    num_nonnulls(create_queue.equals, create_queue.filter, create_queue.condition) > 0);
  for nth in 0 .. greatest(cardinality(create_queue.lanes), parts - 1) loop
    insert into pgmb.queue (id, name, stream, stream_name, numbers, matching, topics, regex, lease_for, max_attempts,
      backoff_base, backoff_factor, backoff_max, backoff_jitter,
      ordered, max_in_flight, rps, ttl, max_length, when_full, lanes, lane, lane_of, shards,
      equals, filter, condition, params, fair_by)
    overriding system value
    select pgmb_internal.next_queue_number(), create_queue.name || case nth when 0 then '' else '/' || nth end, stream_number, create_queue.stream,
      format('pgmb.%I', 'seq_' || create_queue.stream)::regclass,
      pgmb_internal.lane_matching(create_queue.patterns, create_queue.lanes, parts, nth), wanted.topics, wanted.regex,
      create_queue.lease_for, create_queue.max_attempts,
      create_queue.backoff_base, create_queue.backoff_factor, create_queue.backoff_max, create_queue.backoff_jitter,
      create_queue.ordered, create_queue.max_in_flight, create_queue.rps, create_queue.ttl, create_queue.max_length,
      create_queue.when_full, create_queue.lanes, nth, head, parts,
      create_queue.equals, create_queue.filter, create_queue.condition, create_queue.params, create_queue.fair_by
    from pgmb.compile_patterns(create_queue.patterns) wanted
    -- Not left to the conflict alone, which would use up an id at every call.
    where not exists (select from pgmb.queue q where q.name = create_queue.name || case nth when 0 then '' else '/' || nth end)
    on conflict do nothing
    returning id into made;
    if made is null then
      if head is not null or not exists (
        select from pgmb.queue q join pgmb.binding b on b.queue = q.id and b.version = q.bindings
        where q.name = create_queue.name and q.stream = stream_number
          and b.patterns @> create_queue.patterns and b.patterns <@ create_queue.patterns
          and q.ordered = create_queue.ordered and q.lanes is not distinct from create_queue.lanes and q.lane_of is null
          and q.fair_by is not distinct from create_queue.fair_by
          and (q.equals, q.filter, q.condition, q.params)
            is not distinct from (create_queue.equals, create_queue.filter, create_queue.condition, create_queue.params)
      ) then
        raise exception 'queue % exists with another stream, other patterns, filter, order, lanes or fair_by',
          quote_literal(create_queue.name || case nth when 0 then '' else '/' || nth end)
          using errcode = 'MB006', hint = 'Change its patterns with pgmb.bind(queue, patterns), the rest by dropping it.';
      end if;
      return false;
    end if;
    if head is null and create_queue.starting is not null then
      perform pgmb_internal.hold_history(stream_number, start);
    end if;
    head := coalesce(head, made);
    insert into pgmb.binding (queue, version, patterns, matching, equals, filter, condition, params)
    values (made, 1, create_queue.patterns, pgmb_internal.lane_matching(create_queue.patterns, create_queue.lanes, parts, nth),
      create_queue.equals, create_queue.filter, create_queue.condition, create_queue.params);
    base := pgmb_internal.first_position(made, start);
    -- A position of the past may show events of any number.
    base.read_before := case when create_queue.starting is null then pgmb_internal.last_seq(create_queue.stream) end;
    perform pgmb_internal.write_position(base);
    update pgmb.queue q set lock_key = pgmb_internal.queue_lock(q.id, q.generation) where q.id = made;
    perform pgmb_internal.note_move(made, start.snapshot);
    insert into pgmb.generation (queue, number) values (made, -1);
    perform pgmb_internal.add_generations(made);
  end loop;
  if create_queue.max_length is not null then
    perform pgmb_internal.guard_stream(create_queue.stream);
  end if;
  return true;
end $$;

-- The queues behind a name that the caller may consume: one, or one a lane, the most urgent first.
-- Errors: MB002 no such queue, 42501.
create or replace function pgmb_internal.lanes_for_consumer(name text)
returns setof pgmb.queue
language sql stable
as $$
  select q.* from pgmb.queue q, (select (pgmb_internal.queue_for_consumer(lanes_for_consumer.name)).id) head
  where q.id = head.id or q.lane_of = head.id order by q.lane
$$;

-- Replaces a queue's patterns from its position on, and its filter if one is given: leases in flight keep what they hold.
-- Without equals, filter, condition and params the queue keeps its filter; no_filter removes it. See create_queue.
create or replace function pgmb.bind(
  queue text, patterns text[], equals jsonb default null, filter text default null, condition text default null,
  params jsonb default null, no_filter boolean default false
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  head integer;
  given boolean := num_nonnulls(bind.equals, bind.filter, bind.condition, bind.params) > 0;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  if given and bind.no_filter then
    raise exception 'no_filter cannot be combined with a filter' using errcode = 'MB005';
  end if;
  perform pgmb_internal.assert_filter(bind.equals, bind.filter, bind.params);
  bind.condition := pgmb_internal.compile_condition(bind.condition);
  head := (pgmb_internal.queue_for_consumer(bind.queue)).id;
  if not given and not bind.no_filter then
    -- A worker may change the filter at the same time.
    select q.equals, q.filter, q.condition, q.params into bind.equals, bind.filter, bind.condition, bind.params
    from pgmb.queue q where q.id = head for no key update;
  end if;
  perform pgmb_internal.write_binding(head, bind.patterns, bind.equals, bind.filter, bind.condition, bind.params);
  if given or bind.no_filter then
    perform pgmb_internal.disown(head, '{filter}');
  end if;
  -- Until a worker declares it again, no code counts as having left it behind. It still belongs to its app.
  update pgmb.owner o set handlers = '{}' where o.queue = head;
end $$;

-- Writes a new version of a queue's patterns and filter, which were checked; of all its lanes.
create or replace function pgmb_internal.write_binding(
  head integer, patterns text[], equals jsonb, filter text, condition text, params jsonb
)
returns void
language plpgsql
as $$
declare
  bound pgmb.queue;
  asked record;
begin
  -- A conversion that is under way is waited for before the lanes are read: it replaces them.
  perform from pgmb.queue q where q.id = head for no key update;
  for bound in select * from pgmb.queue q where q.id = head or q.lane_of = head order by q.lane loop
    perform from pgmb.queue q where q.id = bound.id for no key update;
    if bound.max_length is not null and num_nonnulls(equals, filter, condition) > 0 then
      raise exception 'max_length cannot be combined with a filter' using errcode = 'MB005';
    end if;
    insert into pgmb.binding (queue, version, patterns, matching, equals, filter, condition, params)
    select bound.id, max(b.version) + 1, write_binding.patterns,
      pgmb_internal.lane_matching(write_binding.patterns, bound.lanes, bound.shards, bound.lane),
      write_binding.equals, write_binding.filter, write_binding.condition, write_binding.params
    from pgmb.binding b where b.queue = bound.id
    returning version, matching into asked;
    update pgmb.queue q
    set bindings = asked.version, matching = asked.matching, topics = wanted.topics, regex = wanted.regex,
      equals = write_binding.equals, filter = write_binding.filter, condition = write_binding.condition,
      params = write_binding.params
    from pgmb.compile_patterns(write_binding.patterns) wanted
    where q.id = bound.id;
  end loop;
end $$;

-- Changes a queue's lease, retry policy and limits. Null leaves a setting as it is, 0 takes a limit away.
-- Errors: MB002 no such queue, MB005 a length where there cannot be one.
create or replace function pgmb.alter_queue(
  queue text, lease_for interval default null, max_attempts integer default null,
  backoff_base interval default null, backoff_factor double precision default null,
  backoff_max interval default null, backoff_jitter double precision default null,
  max_in_flight integer default null, rps double precision default null, ttl interval default null,
  max_length bigint default null, when_full text default null
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  altered pgmb.queue;
  set_now text[] := array(select s.name from (values
    ('lease_for', alter_queue.lease_for::text), ('max_attempts', alter_queue.max_attempts::text),
    ('backoff_base', alter_queue.backoff_base::text), ('backoff_factor', alter_queue.backoff_factor::text),
    ('backoff_max', alter_queue.backoff_max::text), ('backoff_jitter', alter_queue.backoff_jitter::text),
    ('max_in_flight', alter_queue.max_in_flight::text), ('rps', alter_queue.rps::text), ('ttl', alter_queue.ttl::text),
    ('max_length', alter_queue.max_length::text), ('when_full', alter_queue.when_full)) s (name, value)
    where s.value is not null);
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  -- A conversion that is under way is waited for before the lanes are read: it replaces them.
  perform from pgmb.queue q where q.id = (pgmb_internal.queue_for_consumer(alter_queue.queue)).id for no key update;
  for altered in select * from pgmb_internal.lanes_for_consumer(alter_queue.queue) loop
    if alter_queue.max_length > 0 and (altered.lanes is not null or altered.shards > 1
      or num_nonnulls(altered.equals, altered.filter, altered.condition) > 0)
    then
      raise exception 'max_length of queue % cannot be set now', quote_literal(alter_queue.queue) using errcode = 'MB005',
        hint = 'Queues with lanes or a filter have no max_length; an ordered queue needs it at creation.';
    end if;
    if num_nonnulls(alter_queue.max_length, alter_queue.when_full) > 0 and altered.max_length is not null
      and altered.when_full = 'drop_oldest'
    then
      perform pgmb_internal.note_untraced(altered.id,
        int8multirange(int8range(0, pgmb_internal.last_seq(altered.stream_name), '[]')));
    end if;
    update pgmb.queue q
    set lease_for = coalesce(alter_queue.lease_for, q.lease_for),
      max_attempts = coalesce(alter_queue.max_attempts, q.max_attempts),
      backoff_base = coalesce(alter_queue.backoff_base, q.backoff_base),
      backoff_factor = coalesce(alter_queue.backoff_factor, q.backoff_factor),
      backoff_max = coalesce(alter_queue.backoff_max, q.backoff_max),
      backoff_jitter = coalesce(alter_queue.backoff_jitter, q.backoff_jitter),
      max_in_flight = nullif(coalesce(alter_queue.max_in_flight, q.max_in_flight), 0),
      rps = nullif(coalesce(alter_queue.rps, q.rps), 0),
      ttl = nullif(coalesce(alter_queue.ttl, q.ttl), interval '0'),
      max_length = nullif(coalesce(alter_queue.max_length, q.max_length), 0),
      when_full = coalesce(alter_queue.when_full, q.when_full)
    where q.id = altered.id;
    perform pgmb_internal.disown(altered.id, set_now);
  end loop;
  if num_nonnulls(alter_queue.max_length, alter_queue.when_full) > 0 then
    perform pgmb_internal.guard_stream(altered.stream_name);
  end if;
end $$;

-- Drops a queue with its leases, retries, dead letters and views; waits for transactions that read those. The events
-- stay in the log. False if there is no such queue. Errors: MB004 it is a lane or shard, or it feeds endpoints.
create or replace function pgmb.drop_queue(queue text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  head pgmb.queue;
  gone pgmb.queue;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  head := pgmb_internal.queue_named(drop_queue.queue);
  if pgmb_internal.feeds_endpoints(drop_queue.queue) then
    raise exception 'queue % feeds endpoints', quote_literal(drop_queue.queue) using errcode = 'MB004',
      hint = 'Drop them first with pgmb.drop_endpoint(name): pgmb.endpoints says which they are.';
  end if;
  perform pgmb_internal.drop_queue_views(drop_queue.queue);
  for gone in select * from pgmb.queue q where q.id = head.id or q.lane_of = head.id order by q.lane desc
  loop
    -- What settling transactions have locked comes first: one that writes dead letters then needs the queue's row.
    delete from pgmb.claim c where c.queue = gone.id;
    delete from pgmb.retry r where r.queue = gone.id;
    delete from pgmb.settlement s where s.queue = gone.id;
    delete from pgmb.shortened h where h.queue = gone.id;
    delete from pgmb.noted_lease n where n.queue = gone.id;
    delete from pgmb.noted_key k where k.queue = gone.id;
    delete from pgmb.queue q where q.id = gone.id;
    -- A receive that is open at this moment may still add to them: pgmb_internal.clear_dropped_queues.
  end loop;
  if gone.max_length is not null then
    perform pgmb_internal.guard_stream(gone.stream_name);
  end if;
  return gone.id is not null;
end $$;

-- The tables that hold a queue's number without a foreign key, which would make each receive lock the queue's row.
create or replace function pgmb_internal.tables_without_key()
returns regclass[]
language sql stable
as $$
  select array_remove(array[to_regclass('pgmb.claim'), to_regclass('pgmb.settlement'), to_regclass('pgmb.shortened'),
    to_regclass('pgmb.noted_lease'), to_regclass('pgmb.noted_key'),
    to_regclass('pgmb.retry'), to_regclass('pgmq.reading'), to_regclass('pgmq.parked'), to_regclass('pgmq.passed_over')], null)
$$;

-- Deletes rows of queues that were dropped, at most `max` of each table: transactions that had received when their queue was
-- dropped, and committed later, left them. Reads one row of each queue, and passes over rows that are locked.
create or replace function pgmb_internal.clear_dropped_queues(max integer default 10000)
returns bigint
language plpgsql
as $$
declare
  holder regclass;
  part bigint;
  cleared bigint := 0;
begin
  foreach holder in array pgmb_internal.tables_without_key() loop
    execute format('
      with recursive present (queue) as (
        (select t.queue from %1$s t order by t.queue limit 1)
        union all
        select (select t.queue from %1$s t where t.queue > p.queue order by t.queue limit 1) from present p where p.queue is not null
      )
      delete from %1$s t where t.ctid = any (array(
        select row.ctid from present p
        cross join lateral (select t.ctid from %1$s t where t.queue = p.queue limit $1 for update skip locked) row
        where p.queue is not null and not exists (select from pgmb.queue q where q.id = p.queue)
        limit $1))', holder)
    using clear_dropped_queues.max;
    get diagnostics part = row_count;
    cleared := cleared + part;
  end loop;
  return cleared;
end $$;

-- The stream that a queue reads, the salt that clients derive ids with, and whether receiving needs a
-- statement_timeout (MB024). Errors: MB002 no such queue, 42501.
create or replace function pgmb.stream_of(queue text, out stream text, out salt bigint, out timed boolean)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select s.name, s.salt, pgmb_internal.needs_timeout(q)
  from pgmb_internal.queue_for_consumer(queue) q join pgmb.stream s on s.id = q.stream
$$;

-- The name of the queue that a lease belongs to, null if the queue was dropped. Called by the HTTP server. Errors: 42501.
-- Support.
create or replace function pgmb.queue_of(lease uuid)
returns text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_consumer(pgmb_internal.lease_queue(lease), null);
  return (select coalesce(head.name, q.name) from pgmb.queue q left join pgmb.queue head on head.id = q.lane_of
    where q.id = pgmb_internal.lease_queue(lease));
end $$;

-- Stops delivery: receive returns nothing until resume. Leases in flight can still be settled.
create or replace function pgmb.pause(queue text, reason text default null)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  paused pgmb.queue := pgmb_internal.queue_for_consumer(pause.queue);
begin
  update pgmb.queue q
  set paused_at = coalesce(q.paused_at, clock_timestamp()), paused_reason = pause.reason
  where q.id = paused.id;
end $$;

-- Lets a paused queue deliver again.
create or replace function pgmb.resume(queue text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  resumed pgmb.queue := pgmb_internal.queue_for_consumer(resume.queue);
begin
  update pgmb.queue q set paused_at = null, paused_reason = null where q.id = resumed.id;
end $$;

-- Moves a queue to a position: pgmb.earliest(stream), pgmb.position_at(stream, time), pgmb.position(stream).
-- Leases in flight end (settling them is stale), retries are dropped; dead letters stay. Waits for retention that is
-- dropping segments. Holds the queue until the transaction ends: consumers that wait for it get MB013 after about a second.
-- Errors: MB002 no such queue, MB013 another administrative call holds the queue, those of between.
create or replace function pgmb.seek(queue text, "to" pgmb.position)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '1s'
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.hold_history((pgmb_internal.queue_for_consumer(seek.queue)).stream, seek."to");
  perform pgmb_internal.move_queue(seek.queue, seek."to");
end $$;

-- A queue's position at a position of the log: an empty batch ends there.
create or replace function pgmb_internal.at_position(base pgmb.claim, target pgmb.position)
returns pgmb.claim
language plpgsql
as $$
begin
  base.done_snapshot := target.snapshot;
  base.done_seq := target.seq;
  base.done_next := target.next;
  base.batch_snapshot := target.snapshot;
  base.batch_seq := target.seq;
  base.batch_next := target.next;
  base.place := 0;
  base.upto := 0;
  base.read_before := null;
  base.held := null;
  base.flight := null;
  base.lagging := null;
  return base;
end $$;

-- The same for a queue that has no claim yet.
create or replace function pgmb_internal.first_position(queue integer, target pgmb.position)
returns pgmb.claim
language plpgsql
as $$
declare
  base pgmb.claim := pgmb_internal.at_position(null, target);
begin
  base.queue := first_position.queue;
  base.id := 0;
  base.swept := clock_timestamp();
  base.openings := 0;
  return base;
end $$;

-- Moves a queue to a position that was checked, or, where none is given, past all events that are committed.
create or replace function pgmb_internal.move_queue(queue text, target pgmb.position default null)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set lock_timeout = '1s'
as $$
declare
  head pgmb.queue := pgmb_internal.queue_for_consumer(move_queue.queue);
  lanes pgmb.queue[];
  bases pgmb.claim[] := '{}';
  base pgmb.claim;
  moved pgmb.queue;
  settling bigint[];
begin
  perform pgmb_internal.administer(head.id);
  -- All lanes are locked before the first is moved, so that no lane gives a lease while another is at its new position.
  lanes := array(select l from pgmb_internal.lanes_for_consumer(move_queue.queue) l);
  foreach moved in array lanes loop
    bases := bases || pgmb_internal.lock_queue(moved.id);
  end loop;
  -- Read under the locks: consumers may have passed an earlier position while this call waited for the locks.
  target := coalesce(target, pgmb_internal.take_position(head.stream_name));
  for nth in 1 .. cardinality(lanes) loop
    moved := lanes[nth];
    base := bases[nth];
    perform pgmb_internal.note_untraced(moved.id, pgmb_internal.unsettled_numbers(moved.id) * int8multirange(int8range(0, target.seq, '[]')));
    -- A receive that acks holds the row of its earlier lease, and waits for this lock: to wait for the row would be a deadlock. What
    -- becomes of leases that are being settled is known to the next sweep (pgmb_internal.end_expired).
    update pgmb.claim c set state = 'expired'
    where c.queue = moved.id and c.id = any (array(
      select leased.id from pgmb.claim leased
      where leased.queue = moved.id and pgmb_internal.is_leased(leased.state) for no key update skip locked));
    settling := array(
      select c.id from pgmb.claim c where c.queue = moved.id and pgmb_internal.is_leased(c.state) order by c.id);
    delete from pgmb.retry r where r.queue = moved.id and (r.lease = any (settling)) is not true;
    delete from pgmb.delivery d where d.queue = moved.id;
    perform pgmb_internal.note_move(moved.id, target.snapshot, base);
    base := pgmb_internal.at_position(base, target);
    base.held := nullif(settling, '{}');
    perform pgmb_internal.write_position(base);
    perform pgmb_internal.recheck_at_commit(moved.id, base.id + 1);
  end loop;
end $$;

-- Skips everything waiting in a queue: fresh events, retries and leases. Dead letters stay. A lease that its holder is settling at
-- this moment ends as the holder says: what it gives back is delivered again. Holds the queue until the transaction ends, as
-- pgmb.seek does. Errors: MB002 no such queue, MB013 another administrative call holds the queue.
create or replace function pgmb.purge(queue text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.move_queue(purge.queue);
end $$;
