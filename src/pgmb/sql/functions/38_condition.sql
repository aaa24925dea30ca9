-- Conditions: what trusted roles ask of an event in SQL, an expression over e (pgmb.document) and s (pgmb.subscriber).
-- They are compiled and run in schema pgmb_condition, whose functions belong to pgmb_matcher, a role without rights:
-- see matcher.sql.

-- An event as conditions see it. Internal.
create or replace function pgmb.document(
  seq bigint, id uuid, topic text, key text, payload json, headers json, published_at timestamptz
)
returns pgmb.document
language plpgsql stable
as $$
declare
  event jsonb := pgmb.event_document(topic, key, payload, headers);
begin
  if event is null then
    -- One of the two may be readable.
    return (seq, id::text, topic, key, pgmb.readable(payload), pgmb.readable(headers), pgmb.readable(headers),
      published_at, event);
  end if;
  return (seq, id::text, topic, key, event -> 'payload', event -> 'headers', event -> 'headers', published_at, event);
end $$;

-- Whether conditions can run here: pgmb_matcher exists and the schema's owner may act for it. Internal.
create or replace function pgmb.conditions_available()
returns boolean
language sql stable
as $$
  select to_regprocedure('pgmb_condition.compile(text)') is not null
$$;

-- Refuses callers who were not granted to write conditions: being an admin is not enough. Internal.
create or replace function pgmb.assert_author()
returns void
language plpgsql stable
as $$
begin
  if not (pgmb.caller_is_owner() or pgmb.caller_is('pgmb_conditions')) then
    raise exception 'role % may not write SQL conditions', pgmb.caller() using errcode = '42501',
      hint = 'Grant it pgmb_conditions, or use a filter.';
  end if;
  if not pgmb.conditions_available() then
    raise exception 'SQL conditions are not available here' using errcode = 'MB025',
      hint = 'They run as the role pgmb_matcher: create it, grant it to the owner of schema pgmb, and run `pgmb upgrade`.';
  end if;
end $$;

-- Checks a condition and gives it as the server understands it. Errors: MB010 not a condition, MB025 none can run
-- here, 42501. Internal.
create or replace function pgmb.compile_condition(condition text)
returns text
language plpgsql
as $$
#variable_conflict use_variable
declare
  compiled text;
begin
  if condition is null then
    return null;
  end if;
  perform pgmb.assert_author();
  -- Until this commits none is forgotten: see expire_subscriptions.
  perform pg_advisory_xact_lock_shared(28749, 4);
  select c.compiled into compiled from pgmb.condition c where c.digest = sha256(convert_to(condition, 'UTF8'));
  -- A transaction with an old snapshot may see one whose function is gone.
  if compiled is null or to_regproc('pgmb_condition.' || pgmb.condition_name(compiled)) is null then
    -- By name at run time: the schema may not be there.
    execute 'select pgmb_condition.compile($1)' into compiled using condition;
    insert into pgmb.condition (digest, compiled) values (sha256(convert_to(condition, 'UTF8')), compiled)
    on conflict do nothing;
  end if;
  return compiled;
end $$;

-- The name of the function that a compiled condition has. Internal.
create or replace function pgmb.condition_name(condition text)
returns text
language sql immutable parallel safe
as $$
  select 'c_' || left(encode(sha256(convert_to(condition, 'UTF8')), 'hex'), 40)
$$;

-- The name of a function of schema pgmb_condition that will run as pgmb_matcher, whoever calls it. Errors: MB025 it would
-- not. Internal.
create or replace function pgmb.run_as_matcher(name text)
returns text
language plpgsql stable
as $$
begin
  -- What that role owns it could change; then the caller, the owner of all this, would run it with its own rights.
  if (select count(*) = 1 and bool_and(p.prosecdef and p.proowner = to_regrole('pgmb_matcher')) from pg_proc p
    where p.pronamespace = to_regnamespace('pgmb_condition') and p.proname = run_as_matcher.name) is not true
  then
    raise exception 'function pgmb_condition.% is not as it was made', name using errcode = 'MB025',
      hint = 'Run `pgmb upgrade`, and write the condition again.';
  end if;
  return format('pgmb_condition.%I', name);
end $$;

-- The condition on an event e of a log that a queue's fields, filter and SQL condition make. The last is asked about those
-- events alone that pass the others. Internal.
create or replace function pgmb.asking(queue pgmb.queue)
returns text
language sql stable
as $$
  select case when (queue).condition is null then pgmb.filtering((queue).equals, (queue).filter, (queue).params) else format(
      ' and case when true%s then %s((select pgmb.document(d.seq, d.id, d.topic, d.key, d.payload, d.headers, d.published_at) '
      'from (select %s) d (seq, id, topic, key, payload, headers, published_at)), row(null, %L, %L)) else false end',
      pgmb.filtering((queue).equals, (queue).filter, (queue).params),
      pgmb.run_as_matcher(pgmb.condition_name((queue).condition)),
      (select pgmb.event_columns(s.salt) from pgmb.stream s where s.id = (queue).stream),
      (queue).name, coalesce((queue).params, '{}')) end
$$;

-- Whether reading a queue needs a statement_timeout: it asks in SQL, or by a costly filter. Internal.
create or replace function pgmb.needs_timeout(queue pgmb.queue)
returns boolean
language sql stable
as $$
  select (queue).condition is not null
    or (queue).filter is not null and pgmb.is_costly(pgmb.predicate((queue).filter), (queue).params)
$$;

-- Conditions and costly filters may take long: the caller must have said how long. Errors: MB024. Internal.
create or replace function pgmb.assert_timeout()
returns void
language plpgsql stable
as $$
begin
  if current_setting('statement_timeout') = '0' then
    raise exception 'this reads by an SQL condition or a costly filter, which needs a statement_timeout' using errcode = 'MB024',
      hint = 'set local statement_timeout = ''5s'', in a statement before this one. The clients of pgmb do so.';
  end if;
end $$;
