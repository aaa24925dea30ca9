-- Filters: what an event must hold beside its topic, asked without SQL. A filter sees the document
-- {topic, key, payload, headers}; what jsonb cannot hold matches none.

-- The document of an event, or null where jsonb cannot hold it (\u0000, numbers out of range) or it is larger or nested
-- more deeply than a filter looks.
create or replace function pgmb_internal.event_document(topic text, key text, payload json, headers json)
returns jsonb
language plpgsql immutable
as $$
declare
  document jsonb := null;
begin
  document := pgmb_internal.event_text(topic, key, payload, headers)::jsonb;
  if (pgmb_internal.may_be_deep(payload::text) or pgmb_internal.may_be_deep(headers::text)) and pgmb_internal.is_deep(document) then
    return null;
  end if;
  return document;
exception when others then
  if pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
    raise;
  end if;
  return null;
end $$;

-- The same before it is read, null where it is too large: written as text and read once, it costs half of what
-- building it from parts does. Inlined.
create or replace function pgmb_internal.event_text(topic text, key text, payload json, headers json)
returns text
language sql stable
as $$
  select case when octet_length(payload::text) + coalesce(octet_length(headers::text), 0) <= 1048576 then
    '{"topic":' || to_json(topic) || ',"key":' || coalesce(to_json(key)::text, 'null')
    || ',"payload":' || payload || ',"headers":' || coalesce(headers::text, '{}') || '}' end
$$;

-- Whether a json text has enough brackets to be nested too deeply.
create or replace function pgmb_internal.may_be_deep(value text)
returns boolean
language sql immutable
as $$
  select octet_length(value) > 2000
    and octet_length(value) - octet_length(replace(replace(value, '[', ''), '{', '')) >= 1000
$$;

-- Whether it is: a path that descends as far (`$.**`) might exhaust the server's stack, and so raise.
create or replace function pgmb_internal.is_deep(document jsonb)
returns boolean
language sql immutable
as $$
  select jsonb_path_exists(document, 'strict $.**{1000}')
$$;

-- What `equals` asks of an event, field by field: the path of each, starting with topic, key, payload or headers,
-- and the value.
create or replace function pgmb_internal.equal_fields(equals jsonb)
returns table (path text[], value jsonb)
language sql immutable
as $$
  with recursive field (path, value) as (
    select array[f.key], f.value from jsonb_each(case jsonb_typeof(equals) when 'object' then equals else '{}' end) f
    union all
    select field.path || f.key, f.value
    from field, jsonb_each(case jsonb_typeof(field.value) when 'object' then field.value else '{}' end) f
  )
  select path, value from field where jsonb_typeof(value) <> 'object' or value = '{}' order by path
$$;

-- Refuses what is not a filter. Errors: MB009.
create or replace function pgmb_internal.assert_filter(equals jsonb, filter text, params jsonb)
returns void
language plpgsql immutable
as $$
declare
  path jsonpath;
  missing text;
  variables jsonb;
begin
  if equals is not null and (
    jsonb_typeof(equals) <> 'object' or octet_length(equals::text) > 8000 or equals = '{}' or exists (
      select from pgmb_internal.equal_fields(equals) f
      where f.path[1] not in ('topic', 'key', 'payload', 'headers') or jsonb_typeof(f.value) in ('object', 'array')
        or (f.path[1] in ('topic', 'key')) <> (cardinality(f.path) = 1)
        or cardinality(f.path) = 1 and jsonb_typeof(f.value) <> 'string' and not (f.path = '{key}' and f.value = 'null')))
  then
    raise exception 'invalid equals: %', left(equals::text, 100) using errcode = 'MB009',
      hint = 'An object of topic and key, which are texts, payload and headers with single values: {"payload": {"status": "paid"}}.';
  end if;
  if params is not null and (jsonb_typeof(params) <> 'object' or octet_length(params::text) > 8000) then
    raise exception 'params are an object of at most 8000 bytes' using errcode = 'MB009';
  end if;
  if filter is null then
    return;
  end if;
  if octet_length(filter) > 4000 then
    raise exception 'a filter has at most 4000 bytes' using errcode = 'MB009';
  end if;
  begin
    path := filter::jsonpath;
    -- One that is not given would raise at the first event: name it now.
    select string_agg('$' || name, ', ') into missing
    from pgmb_internal.filter_variables(path) name where not coalesce(params, '{}') ? name;
    -- Without the values of params: over those alone a filter can run for hours.
    select jsonb_object_agg(name, null) into variables from pgmb_internal.filter_variables(path) name;
    perform jsonb_path_exists('{}', path, coalesce(variables, '{}'), true);
  exception when others then
    raise exception 'invalid filter: %', sqlerrm using errcode = 'MB009',
      hint = 'A jsonpath predicate over topic, key, payload and headers: $.payload.amount > $least.';
  end;
  if missing is not null then
    raise exception 'the filter names %, which params do not give', missing using errcode = 'MB009';
  end if;
end $$;

-- A filter as a predicate: a path that is none (it finds items instead of saying yes or no) asks whether it finds
-- any.
create or replace function pgmb_internal.predicate(filter text)
returns jsonpath
language plpgsql immutable
as $$
declare
  path jsonpath := filter;
  variables jsonb;
begin
  select jsonb_object_agg(name, null) into variables from pgmb_internal.filter_variables(path) name;
  -- A predicate says yes, no or unknown of every document, even of this one.
  if jsonb_path_query_array('{}', path, coalesce(variables, '{}'), true) <@ '[true, false, null]'
    and jsonb_path_exists('{}', path, coalesce(variables, '{}'), true)
  then
    return path;
  elsif path::text like 'strict %' then
    return 'strict exists(' || substr(path::text, 8) || ')';
  end if;
  return 'exists(' || path || ')';
end $$;

-- The names of the variables that a filter asks params for.
create or replace function pgmb_internal.filter_variables(filter jsonpath)
returns setof text
language sql immutable
set standard_conforming_strings = on
as $$
  -- Names and strings come in quotes, a variable's with a $ before them.
  select distinct substr(quoted[1], 2)::jsonb #>> '{}'
  from regexp_matches(filter::text, '(\$?"(?:[^"\\]|\\.)*")', 'g') quoted
  where quoted[1] like '$%'
$$;

-- Whether a filter may take more than a few steps for each item of a document, so that it runs under a statement_timeout
-- only: `.**`, a filter inside a filter that starts again at the root, lists compared with lists, params or alternatives
-- that multiply to more than 64, patterns with back references, bounds or lookahead.
create or replace function pgmb_internal.is_costly(filter jsonpath, params jsonb)
returns boolean
language plpgsql immutable
set standard_conforming_strings = on
as $$
declare
  -- Without names and strings: ' stands for one of those, $' for a variable.
  bare text := regexp_replace(filter::text, '(\$?)"(?:[^"\\]|\\.)*"', '\1''', 'g');
  weight numeric;
  variable text;
  items bigint;
begin
  if bare is null then
    return false;
  end if;
  weight := (select count(*) from regexp_matches(bare, '&&|\|\|', 'g')) + 1;
  for variable in
    select substr(name[1], 2)::jsonb #>> '{}' from regexp_matches(filter::text, '(\$?"(?:[^"\\]|\\.)*")', 'g') name
    where name[1] like '$%'
  loop
    select count(*) into items from jsonb_path_query(params -> variable, 'strict $.**');
    weight := weight * greatest(items, 1);
    exit when weight > 64;
  end loop;
  return weight > 64
    or bare ~ '\*\*'
    or bare ~ '\?.*\$(?!'')'
    or exists (
      select from regexp_split_to_table(bare, '&&|\|\|') part
      where part ~ '@.*@' or part ~ '\?.*\?' or part ~ '\$(?!'').*\$(?!'')')
    or filter::text ~ 'like_regex "(?:[^"\\]|\\.)*(\{|\(\?|\\\\[0-9])';
end $$;

-- Whether an error is the server's or the session's own, and no filter is to blame: lost locks and conflicts, too little
-- memory or disk, a cancel.
create or replace function pgmb_internal.servers_trouble(state text)
returns boolean
language sql immutable parallel safe
as $$
  select left(state, 2) in ('40', '53', '55', '57', '58')
$$;

-- Whether an error says that stored values are damaged: the same statement fails again.
create or replace function pgmb_internal.is_damage(state text)
returns boolean
language sql immutable parallel safe
as $$
  select state in ('XX001', 'XX002')
$$;

-- A predicate on events as one on their payloads, null if it asks about more than those. To read the payload alone costs
-- half.
create or replace function pgmb_internal.payload_predicate(filter jsonpath)
returns jsonpath
language sql immutable
set standard_conforming_strings = on
as $$
  -- What is left of it without that root, names and strings may hold no other root.
  select case when regexp_replace(replace(filter::text, '$."payload"', ''), '\$?"(?:[^"\\]|\\.)*"', '', 'g') !~ '\$'
    then replace(filter::text, '$."payload"', '$')::jsonpath end
$$;

-- A payload or headers as jsonb, or null as event_document has it.
create or replace function pgmb_internal.readable(value json)
returns jsonb
language plpgsql immutable
as $$
begin
  if octet_length(value::text) > 1048576 or pgmb_internal.may_be_deep(value::text) and pgmb_internal.is_deep(value::jsonb) then
    return null;
  end if;
  return value::jsonb;
exception when others then
  if pgmb_internal.servers_trouble(sqlstate) or pgmb_internal.is_damage(sqlstate) then
    raise;
  end if;
  return null;
end $$;

-- The condition on an event e of a log that fields and a filter make, to be added to a WHERE clause. The filter is asked
-- about those events alone whose fields are equal.
create or replace function pgmb_internal.filtering(equals jsonb, filter text, params jsonb)
returns text
language sql immutable
as $$
  select case when filter is null then fields.equal else format(' and case when true%s then jsonb_path_match(%s, %L, %L, true) else false end',
    fields.equal,
    case when pgmb_internal.payload_predicate(pgmb_internal.predicate(filter)) is null
      then 'pgmb_internal.event_document(e.topic, e.key, e.payload, e.headers)' else 'pgmb_internal.readable(e.payload)' end,
    coalesce(pgmb_internal.payload_predicate(pgmb_internal.predicate(filter)), pgmb_internal.predicate(filter)), coalesce(params, '{}')) end
  from (select case when equals ? 'topic' then format(' and e.topic = %L', equals ->> 'topic') else '' end
    || case when equals ->> 'key' is not null then format(' and e.key = %L', equals ->> 'key')
      when equals ? 'key' then ' and e.key is null' else '' end
    || case when equals ? 'headers' then format(' and pgmb_internal.readable(e.headers) @> %L', equals -> 'headers') else '' end
    || case when equals ? 'payload' then format(' and pgmb_internal.readable(e.payload) @> %L', equals -> 'payload') else '' end
    ) fields (equal)
$$;
