-- Matching: which subscriptions of a group ask for which events, by as few statements as there are kinds of shapes.

-- What a shape asks of a document's topic, as an SQL expression.
create or replace function pgmb_internal.shape_topics(shape pgmb.shape)
returns text
language sql immutable
as $$
  select case when (shape).topics is not null then format('e.topic = any (%L)', (shape).topics)
    when (shape).regex is not null then format('e.topic ~ %L', (shape).regex) else 'true' end
$$;

-- The values that the fields of a shape have in document e, as SQL expressions: null where a field is missing.
create or replace function pgmb_internal.shape_values(shape pgmb.shape)
returns text[]
language sql immutable
set standard_conforming_strings = on
as $$
  select array_agg(case p.path[1]
      when 'topic' then 'to_jsonb(e.topic)'
      when 'key' then 'coalesce(to_jsonb(e.key), ''null'')'
      -- A number would be a place in a list, where it is to be a field's name.
      else case when array_to_string(p.path, '.') ~ '\.-?\d+(\.|$)'
        then format('case when not exists (select from generate_series(0, %s) n where jsonb_typeof(e.%I #> (%L::text[])[:n]) <> ''object'') then e.%2$I #> %3$L end',
          cardinality(p.path) - 2, p.path[1], p.path[2:])
        else format('e.%I #> %L', p.path[1], p.path[2:]) end
    end order by f.place)
  from unnest((shape).fields) with ordinality f (path, place), lateral (select f.path::text[] path) p
$$;

-- That part of a condition which the index on params serves: the comparison s.params @> ..., if that is all of it or one
-- of several that must all hold. Null if there is none. The text is as the server writes it.
create or replace function pgmb_internal.indexed_part(condition text)
returns text
language sql immutable
set standard_conforming_strings = on
as $$
  with token as (
    select t.nth, t.token[1] token,
      sum(case t.token[1] when '(' then 1 when ')' then -1 else 0 end) over (order by t.nth)
        + case t.token[1] when ')' then 1 else 0 end depth
    from regexp_matches(condition, '(''(?:[^'']|'''')*''|"(?:[^"]|"")*"|[()]|[^()''"]+)', 'g') with ordinality t (token, nth)
  ), part as (
    select string_agg(p.token, '' order by p.nth) part
    from (
      -- The parts are what stands in brackets within those of the whole.
      select k.nth, k.token, k.depth,
        count(*) filter (where k.depth = 2 and k.token = '(') over (order by k.nth) place
      from token k) p
    where p.depth >= 2
    group by p.place
  )
  select case
    when condition !~ '\(\(s\)\.params @[>?@] ' then null
    when not exists (select from token k where k.depth = 1 and k.token not in ('(', ')', ' AND ')) then (
      select p.part from part p where p.part ~ '^\(\(s\)\.params @[>?@] ' limit 1)
    -- Only the comparison itself has more than that there: ((s).params @> x).
    when condition ~ '^\(\(s\)\.params @[>?@] ' and not exists (
      select from token k where k.depth = 1 and k.token ~ ' (AND|OR) ') then condition
  end
$$;

-- The statement that matches documents with the subscriptions of some shapes, for pgmb_condition.match. Where values are
-- looked up by an index, that is the only way in, and the rest is asked of those alone that are meant: what others ask
-- for costs the others nothing. Otherwise the group's subscriptions are gathered first.
create or replace function pgmb_internal.match_statement(shapes pgmb.shape[])
returns text
language sql immutable
as $$
  select 'with doc as materialized (select * from unnest($1))'
    || ' select array_agg(seq), array_agg(id) from (' || string_agg(format(
      'select e.seq, s.id from (select * from doc e where %s offset 0) e', pgmb_internal.shape_topics(shape))
      || case when found.way is not null
      then format(' cross join lateral (select s.id from pgmb.subscription s where %1$s and case when'
        ' s.shape = %2$s and s.group_id = $2 and s.stream = $3 and s.paused_at is null'
        ' and case when $4 is null then not s.costly else s.id = any ($4) end'
        ' and %1$s then %3$s else false end offset 0) s', found.way, (shape).id, asked.rest)
      else format(' join (select s.id, s.group_id, s.params from pgmb.subscription s'
        ' where s.shape = %s and s.group_id = $2 and s.stream = $3 and s.paused_at is null'
        ' and case when $4 is null then not s.costly else s.id = any ($4) end offset 0) s on %s',
        (shape).id, asked.rest)
      end, ' union all ') || ') matched'
  from unnest(shapes) shape
  cross join lateral (select case when (shape).fields <> '{}'
    then format('s.equals = jsonb_build_array(%s) and s.equals <> ''[]'' and num_nulls(%1$s) = 0',
      array_to_string(pgmb_internal.shape_values(shape), ', '))
    else pgmb_internal.indexed_part((shape).condition) end way) found
  cross join lateral (select case
    when (shape).filter is null then coalesce((shape).condition, 'true')
    else format('case when %s then %s else false end',
      coalesce('jsonb_path_match(e.payload, ' || quote_literal((shape).payload_filter) || ', s.params, true)',
        'jsonb_path_match(e.event, ' || quote_literal((shape).filter) || ', s.params, true)'),
      coalesce((shape).condition, 'true')) end rest) asked
$$;

-- Which subscriptions of a group match which events.
create or replace function pgmb_internal.match(group_id text, stream integer, events pgmb.event[])
returns table (seq bigint, subscriptions uuid[])
language plpgsql
set work_mem = '64MB'
set jit = off
set enable_seqscan = on
set enable_bitmapscan = on
-- The planner has no statistics on the number of each shape and would wrongly choose a nested loop over all.
set enable_nestloop = off
set plan_cache_mode = auto
set standard_conforming_strings = on
as $$
declare
  asked record;
  part pgmb.shape[];
  seqs bigint[];
  ids uuid[];
  found_here record;
  documents pgmb.document[];
begin
  with recursive present (id) as (
    select min(s.shape) from pgmb.subscription s where s.stream = match.stream and s.group_id = match.group_id
    union all
    select (select min(s.shape) from pgmb.subscription s
      where s.stream = match.stream and s.group_id = match.group_id and s.shape > present.id)
    from present where present.id is not null
  )
  select array_agg(h order by h.id) shapes,
    -- Those that neither look values up nor ask in SQL.
    coalesce(array_agg(h order by h.id) filter (where h.condition is null and h.fields = '{}'), '{}') plain,
    bool_or(h.condition is not null) conditions,
    bool_or(h.payload_filter is not null or h.condition is not null or h.fields <> '{}') payloads,
    -- A condition may look at e.event, or at e as a whole.
    bool_or(h.filter is not null and h.payload_filter is null
      or regexp_replace(h.condition, '\(e\)\.(seq|id|topic|key|payload|headers|metadata|published_at)\M', '', 'g') ~ '\me\M') whole,
    exists (select from pgmb.subscription s
      where s.stream = match.stream and s.group_id = match.group_id and s.costly) costly
  into asked
  from present join pgmb.shape h on h.id = present.id;
  if asked.shapes is null or cardinality(match.events) = 0 then
    return;
  end if;
  if asked.conditions or asked.costly then
    perform pgmb_internal.assert_timeout();
  end if;
  documents := pgmb_internal.documents(match.events, asked.payloads, coalesce(asked.whole, false),
    salt => case when asked.conditions then (select t.salt from pgmb.stream t where t.id = match.stream) end);
  -- The plain ones all at once; those that look up, some at a time; conditions one by one, so that it shows which took too
  -- long.
  found_here := pgmb_internal.match_shapes(match.group_id, match.stream, documents, asked.plain);
  seqs := found_here.seqs;
  ids := found_here.matching;
  if cardinality(asked.plain) < cardinality(asked.shapes) then
    for part in
      select array_agg(h.shape) from (
        select h shape, row_number() over (partition by h.condition is null order by h.id) place
        from unnest(asked.shapes) h
        where h.condition is not null or h.fields <> '{}') h
      group by (h.shape).condition is null, case when (h.shape).condition is null then h.place / 50 else h.place end
    loop
      found_here := pgmb_internal.match_shapes(match.group_id, match.stream, documents, part);
      seqs := seqs || found_here.seqs;
      ids := ids || found_here.matching;
    end loop;
  end if;
  if asked.costly then
    found_here := pgmb_internal.match_costly(match.group_id, match.stream, documents, asked.shapes);
    seqs := seqs || found_here.seqs;
    ids := ids || found_here.matching;
  end if;
  return query
  select pair.seq, array_agg(pair.id order by pair.id) from unnest(seqs, ids) pair (seq, id) group by pair.seq;
end $$;

-- As match, for the subscriptions with a costly filter, one at a time. Together they have half of the statement's time:
-- one that has used more than its share of it when it is over is paused, and so are those that it left no time for.
create or replace function pgmb_internal.match_costly(
  group_id text, stream integer, documents pgmb.document[], shapes pgmb.shape[], out seqs bigint[], out matching uuid[]
)
language plpgsql
as $$
declare
  began timestamptz := clock_timestamp();
  turn timestamptz;
  budget interval := nullif(current_setting('statement_timeout'), '0')::interval / 2;
  costly record;
  half record;
  slow uuid[] := '{}';
  late uuid[] := '{}';
begin
  seqs := '{}';
  matching := '{}';
  for costly in
    select s.id, h shape, count(*) over () among
    from pgmb.subscription s join unnest(match_costly.shapes) h on h.id = s.shape
    where s.stream = match_costly.stream and s.group_id = match_costly.group_id and s.costly and s.paused_at is null
    order by s.created_at, s.id
  loop
    turn := clock_timestamp();
    if turn > began + budget then
      late := late || costly.id;
      continue;
    end if;
    half := pgmb_internal.match_shapes(match_costly.group_id, match_costly.stream, match_costly.documents,
      array[costly.shape], array[costly.id]);
    seqs := seqs || half.seqs;
    matching := matching || half.matching;
    if clock_timestamp() - turn > budget / costly.among then
      slow := slow || costly.id;
    end if;
  end loop;
  if clock_timestamp() > began + budget then
    perform pgmb_internal.pause_subscriptions(slow, 'its filter took too long');
    perform pgmb_internal.pause_subscriptions(late, 'the costly filters of the group took too long');
  end if;
end $$;

-- As match, for some shapes of one kind, and for the subscriptions named alone if any are. Where something raises, each
-- half is tried by itself, until the subscription that cannot be matched stands alone: it is paused, with what it
-- said.
create or replace function pgmb_internal.match_shapes(
  group_id text, stream integer, documents pgmb.document[], shapes pgmb.shape[], named uuid[] default null,
  out seqs bigint[], out matching uuid[]
)
language plpgsql
as $$
declare
  began timestamptz := clock_timestamp();
  timeout interval;
  error text;
  half record;
  middle integer;
begin
  if cardinality(match_shapes.shapes) = 0 then
    seqs := '{}';
    matching := '{}';
    return;
  end if;
  begin
    if match_shapes.shapes[1].condition is not null then
      execute format('select * from %s($1, $2, $3, $4, $5)', pgmb_internal.run_as('pgmb_matcher', 'pgmb_condition', 'match')) into seqs, matching
      using pgmb_internal.match_statement(match_shapes.shapes), match_shapes.documents, match_shapes.group_id, match_shapes.stream,
        match_shapes.named;
    elsif match_shapes.shapes[1].fields <> '{}' then
      execute pgmb_internal.match_statement(match_shapes.shapes) into seqs, matching
      using match_shapes.documents, match_shapes.group_id, match_shapes.stream, match_shapes.named;
    else
      with doc as materialized (select d.seq, d.topic, d.payload, d.event from unnest(match_shapes.documents) d),
      interest as materialized (
        select h.id, h.filter, h.payload_filter, t.topic
        from (select distinct d.topic from doc d) t
        join unnest(match_shapes.shapes) h
          on t.topic = any (h.topics) or t.topic ~ h.regex or (h.topics is null and h.regex is null))
      select array_agg(d.seq), array_agg(s.id) into seqs, matching
      from interest i
      join pgmb.subscription s on s.shape = i.id and s.group_id = match_shapes.group_id
        and s.stream = match_shapes.stream and s.paused_at is null
        and case when match_shapes.named is null then not s.costly else s.id = any (match_shapes.named) end
      join doc d on d.topic = i.topic
      where case when i.payload_filter is not null then jsonb_path_match(d.payload, i.payload_filter, s.params, true)
        when i.filter is not null then jsonb_path_match(d.event, i.filter, s.params, true) else true end;
    end if;
    seqs := coalesce(seqs, '{}');
    matching := coalesce(matching, '{}');
    return;
  exception
    when query_canceled then
      -- Cancelled by the timeout, of which this shape used more than its share, or by a user?
      timeout := nullif(current_setting('statement_timeout'), '0')::interval;
      if timeout is null or cardinality(match_shapes.shapes) > 1
        or clock_timestamp() < statement_timestamp() + timeout * 0.9
        or clock_timestamp() < began + timeout / (2 * (
          select count(distinct s.shape) from pgmb.subscription s
          where s.group_id = match_shapes.group_id and s.stream = match_shapes.stream and s.paused_at is null))
      then
        raise;
      end if;
      -- Nothing would end a second try.
      perform pgmb_internal.pause_subscriptions(array(
        select s.id from pgmb.subscription s
        where s.shape = match_shapes.shapes[1].id and s.group_id = match_shapes.group_id and s.stream = match_shapes.stream
          and (match_shapes.named is null or s.id = any (match_shapes.named))),
        'took longer than ' || current_setting('statement_timeout'));
      seqs := '{}';
      matching := '{}';
      return;
    when others then
      if pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
        raise;
      end if;
      error := pgmb_internal.error_without_values(sqlerrm, sqlstate);
  end;
  seqs := '{}';
  matching := '{}';
  middle := cardinality(match_shapes.shapes) / 2;
  if middle > 0 then
    for nth in 0 .. 1 loop
      half := pgmb_internal.match_shapes(match_shapes.group_id, match_shapes.stream, match_shapes.documents,
        case nth when 0 then match_shapes.shapes[:middle] else match_shapes.shapes[middle + 1:] end);
      seqs := seqs || half.seqs;
      matching := matching || half.matching;
    end loop;
    return;
  end if;
  if match_shapes.named is null then
    match_shapes.named := array(
      select s.id from pgmb.subscription s
      where s.shape = match_shapes.shapes[1].id and s.group_id = match_shapes.group_id and s.stream = match_shapes.stream
        and s.paused_at is null
      order by s.id);
  end if;
  middle := cardinality(match_shapes.named) / 2;
  -- An event that cannot be matched with any subscription fails with each one tried. Ids are random, so the sample is too.
  if middle > 0 and (middle < 16 or not (
    select bool_and(pgmb_internal.match_fails(match_shapes.group_id, match_shapes.stream, match_shapes.documents, match_shapes.shapes,
      match_shapes.named[1 + nth * (cardinality(match_shapes.named) - 1) / 9:1 + nth * (cardinality(match_shapes.named) - 1) / 9]))
    from generate_series(0, 9) nth))
  then
    for nth in 0 .. 1 loop
      half := pgmb_internal.match_shapes(match_shapes.group_id, match_shapes.stream, match_shapes.documents, match_shapes.shapes,
        case nth when 0 then match_shapes.named[:middle] else match_shapes.named[middle + 1:] end);
      seqs := seqs || half.seqs;
      matching := matching || half.matching;
    end loop;
    return;
  end if;
  perform pgmb_internal.pause_subscriptions(match_shapes.named, error);
end $$;

-- Pauses subscriptions that could not be matched, except those that another session is changing.
create or replace function pgmb_internal.pause_subscriptions(ids uuid[], reason text)
returns void
language sql
as $$
  update pgmb.subscription s
  set paused_at = clock_timestamp(), paused_reason = pause_subscriptions.reason
  where s.id = any (array(
    select one.id from pgmb.subscription one
    where one.id = any (pause_subscriptions.ids) and one.paused_at is null for no key update skip locked))
$$;

-- Whether matching these subscriptions raises.
create or replace function pgmb_internal.match_fails(
  group_id text, stream integer, documents pgmb.document[], shapes pgmb.shape[], named uuid[]
)
returns boolean
language plpgsql
as $$
begin
  if shapes[1].condition is not null then
    execute format('select %s($1, $2, $3, $4, $5)', pgmb_internal.run_as('pgmb_matcher', 'pgmb_condition', 'match'))
    using pgmb_internal.match_statement(shapes), documents, group_id, stream, named;
  else
    perform from unnest(documents) d, pgmb.subscription s
    where s.id = any (named) and case when shapes[1].payload_filter is null
      then jsonb_path_match(d.event, shapes[1].filter, s.params, true)
      else jsonb_path_match(d.payload, shapes[1].payload_filter, s.params, true) end;
  end if;
  return false;
exception when others then
  if pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
    raise;
  end if;
  return true;
end $$;

-- Events as filters and conditions see them, as far as they look. All are read at once; if jsonb cannot hold one of
-- them, each by itself. salt: to derive ids with, where those are looked at.
create or replace function pgmb_internal.documents(events pgmb.event[], payloads boolean, whole boolean, salt bigint default null)
returns pgmb.document[]
language plpgsql stable
as $$
begin
  if not payloads and not whole then
    return array(select (e.seq, null, e.topic, null, null, null, null, null, null)::pgmb.document from unnest(events) e);
  end if;
  -- What is short is neither too large nor nested too deeply.
  return array(
    select (e.seq, case when salt is not null then coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, salt))::text end,
      e.topic, e.key, case when octet_length(e.payload::text) <= 2000 then e.payload::jsonb else pgmb_internal.readable(e.payload) end,
      h.headers, h.headers, e.published_at,
      case when not whole then null
        when octet_length(e.payload::text) + coalesce(octet_length(e.headers::text), 0) <= 2000
        then pgmb_internal.event_text(e.topic, e.key, e.payload, e.headers)::jsonb
        else pgmb_internal.event_document(e.topic, e.key, e.payload, e.headers) end)::pgmb.document
    from unnest(events) e
    cross join lateral (select case when octet_length(e.headers::text) > 2000 then pgmb_internal.readable(e.headers)
      else e.headers::jsonb end headers) h);
exception when others then
  if pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
    raise;
  end if;
  return array(
    select pgmb_internal.document(e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, salt)), e.topic, e.key, e.payload,
      e.headers, e.published_at)
    from unnest(events) e);
end $$;
