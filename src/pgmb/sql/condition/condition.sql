-- Conditions: what trusted roles ask of an event in SQL, an expression over e (pgmb.document) and s (pgmb.subscriber).
-- The text is refused if it names a type or function that is not PostgreSQL's own, parsed as pgmb_parser, checked as a
-- tree, and runs as pgmb_matcher. Neither role has rights: see matcher.sql and docs/adr/0015.

-- The message of an error of a filter or condition as a reason that is kept: without what PostgreSQL quotes of an event, which an
-- erasure of the event would leave there. From the first quotation mark to the last, whatever the quoted text holds.
create or replace function pgmb_internal.error_without_values(message text, code text)
returns text
language sql immutable
as $$
  select format('%s (%s)', left(regexp_replace(message, '["''`«»‹›„“”‚‘’「」『』].*["''`«»‹›„“”‚‘’「」『』]', '"…"'), 2000), code)
$$;

-- An event as conditions see it.
create or replace function pgmb_internal.document(
  seq bigint, id uuid, topic text, key text, payload json, headers json, published_at timestamptz
)
returns pgmb.document
language plpgsql stable
as $$
declare
  event jsonb := pgmb_internal.event_document(topic, key, payload, headers);
begin
  if event is null then
    -- One of the two may be readable.
    return (seq, id::text, topic, key, pgmb_internal.readable(payload), pgmb_internal.readable(headers), pgmb_internal.readable(headers),
      published_at, event);
  end if;
  return (seq, id::text, topic, key, event -> 'payload', event -> 'headers', event -> 'headers', published_at, event);
end $$;

-- Whether conditions can run here: pgmb_matcher and pgmb_parser exist and the schema's owner may act for them.
create or replace function pgmb_internal.conditions_available()
returns boolean
language sql stable
as $$
  select to_regproc('pgmb_condition.match') is not null and to_regproc('pgmb_parser.parse') is not null
$$;

-- Refuses callers who were not granted to write conditions: being an admin is not enough.
create or replace function pgmb_internal.assert_author()
returns void
language plpgsql
as $$
begin
  if not (pgmb_internal.caller_is_owner() or pgmb_internal.caller_is('pgmb_conditions')) then
    raise exception 'role % may not write SQL conditions', pgmb_internal.caller() using errcode = '42501',
      hint = 'Grant it pgmb_conditions, or use a filter.';
  end if;
  if not pgmb_internal.conditions_available() then
    raise exception 'SQL conditions are not available here' using errcode = 'MB025',
      hint = 'Create the roles pgmb_matcher and pgmb_parser, grant both to the owner of schema pgmb, and run `pgmb upgrade`.';
  end if;
end $$;

-- Checks a condition and gives it as the server understands it. Errors: MB010 invalid condition, MB025 none can run
-- here, 42501.
create or replace function pgmb_internal.compile_condition(condition text)
returns text
language plpgsql
as $$
declare
  compiled text;
begin
  if condition is null then
    return null;
  end if;
  perform pgmb_internal.assert_author();
  -- Until this commits none is forgotten: see expire_subscriptions.
  perform pg_advisory_xact_lock_shared(pgmb_internal.lock_key('conditions'));
  select c.compiled into compiled from pgmb.condition c where c.digest = sha256(convert_to(condition, 'UTF8'));
  -- A transaction with an old snapshot may see one whose function is gone.
  if compiled is null or to_regproc('pgmb_condition.' || pgmb_internal.condition_name(compiled)) is null then
    compiled := pgmb_internal.make_condition(condition);
    insert into pgmb.condition (digest, compiled) values (sha256(convert_to(condition, 'UTF8')), compiled)
    on conflict do nothing;
  end if;
  return compiled;
end $$;

-- The name of the function that a compiled condition has.
create or replace function pgmb_internal.condition_name(condition text)
returns text
language sql immutable parallel safe
as $$
  select 'c_' || left(encode(sha256(convert_to(condition, 'UTF8')), 'hex'), 40)
$$;

-- A text as SQL reads it: its tokens without blanks and comments. kinds: name (texts has it as resolved), string, number,
-- or the character itself, with :: as one. Errors: MB010 a quote or comment does not end, or it is written in a way that
-- this does not follow.
create or replace function pgmb_internal.sql_tokens(source text, out kinds text[], out texts text[])
language plpgsql immutable
as $$
declare
  rest text := source;
  token text;
  kind text;
  name text;
  depth integer;
begin
  kinds := '{}';
  texts := '{}';
  while rest <> '' loop
    token := substring(rest from '^(?:[ \t\n\r\f\v]+|--[^\n\r]*)');
    if token is not null then
      rest := substr(rest, length(token) + 1);
      continue;
    end if;
    if starts_with(rest, '/*') then
      depth := 0;
      loop
        -- Comments nest.
        token := substring(rest from '^(?:/\*|\*/|.)');
        if token is null then
          raise exception 'invalid condition: a comment does not end' using errcode = 'MB010';
        end if;
        rest := substr(rest, length(token) + 1);
        depth := depth + case token when '/*' then 1 when '*/' then -1 else 0 end;
        exit when depth = 0;
      end loop;
      continue;
    end if;
    kind := 'string';
    name := null;
    if rest ~ '^[uU]&["'']' then
      raise exception 'a condition may not use U& escapes' using errcode = 'MB010';
    elsif rest ~ '^[eE]''' then
      token := substring(rest from '^[eE]''(?:[^''\\]|\\.|'''')*''');
    elsif rest ~ '^[bBxXnN]?''' then
      token := substring(rest from '^[bBxXnN]?''(?:[^'']|'''')*''');
    elsif rest ~ '^\$(?:[A-Za-z_][A-Za-z_0-9]*)?\$' then
      name := substring(rest from '^\$(?:[A-Za-z_][A-Za-z_0-9]*)?\$');
      token := case when strpos(substr(rest, length(name) + 1), name) > 0
        then left(rest, 2 * length(name) - 1 + strpos(substr(rest, length(name) + 1), name)) end;
    elsif rest ~ '^"' then
      kind := 'name';
      token := substring(rest from '^"(?:[^"]|"")+"');
      name := replace(substr(token, 2, length(token) - 2), '""', '"');
    elsif rest ~ '^[A-Za-z_]' then
      kind := 'name';
      token := substring(rest from '^[A-Za-z_][A-Za-z_0-9$]*');
      name := lower(token);
    elsif rest ~ '^\.?[0-9]' then
      kind := 'number';
      token := substring(rest from '^\.?[0-9][0-9A-Za-z_.]*');
    else
      token := substring(rest from '^(?:::|.)');
      kind := token;
      if ascii(token) > 127 then
        token := null;
      end if;
    end if;
    if token is null then
      raise exception 'invalid condition: cannot read %', quote_literal(left(rest, 20)) using errcode = 'MB010',
        hint = 'Quotes must end, and letters outside quotes must be ASCII.';
    end if;
    -- The server would join the two, and read the second as it reads the first.
    if kind = 'string' and kinds[cardinality(kinds)] = 'string' then
      raise exception 'invalid condition: two strings in a row' using errcode = 'MB010', hint = 'Join them with ||.';
    end if;
    kinds := kinds || kind;
    texts := texts || coalesce(name, token);
    rest := substr(rest, length(token) + 1);
  end loop;
end $$;

-- Refuses a condition that could name a type, function or operator that is not PostgreSQL's own: parsing it may run code
-- of their owner, as reading '{1}'::evil[] runs the checks of the domain evil. Errors: MB010.
create or replace function pgmb_internal.assert_own_names(condition text)
returns void
language plpgsql
as $$
declare
  tokens record := pgmb_internal.sql_tokens(condition);
  refused text;
begin
  select case when t.before_kind = '.' then t.qualifier || '.' else '' end || t.text into refused
  from (
    select given.kind, given.text::name::text as text, lag(given.kind) over along before_kind,
      lag(given.text, 2) over along qualifier, lower(lag(given.text, 3) over along) ahead,
      lead(given.kind) over along after_kind
    from unnest(tokens.kinds, tokens.texts) with ordinality given (kind, text, place)
    window along as (order by given.place)
  ) t
  where
    -- A type in the session's own pg_temp, which every search path has.
    t.kind = 'name' and t.before_kind is distinct from '.' and t.after_kind is distinct from '.'
      and exists (select from pg_type y where y.typnamespace = pg_my_temp_schema() and y.typname = t.text)
    or t.before_kind = '.' and t.kind <> 'number' and not coalesce(
      -- Fields of a value in brackets.
      t.qualifier in (')', ']')
      or t.ahead is distinct from '.' and (t.qualifier = 'pg_catalog'
        -- Columns. A schema may be named e or s, too: so not where a type, a function or an operator could stand.
        or t.qualifier in ('e', 's') and t.kind in ('name', '*')
          and (t.ahead is null or t.ahead not in ('::', 'as', 'returning', 'collate', 'operator'))
          and (t.after_kind is null or t.after_kind not in ('(', 'string', '.'))), false)
  limit 1;
  if refused is not null then
    raise exception 'a condition may not use %', refused using errcode = 'MB010',
      hint = 'Types, functions and operators of PostgreSQL itself, and the columns of e and s.';
  end if;
end $$;

-- Checks that a text is one expression over e and s, of type boolean, that calls nothing but functions of the server
-- itself which change nothing, ask nothing about the database and run no code of others. Returns it as the server writes
-- it, and makes the function of that condition. Settings that decide how literals are written and read are pinned here
-- as where conditions run: what was checked is what runs. Errors: MB010, MB025.
create or replace function pgmb_internal.make_condition(condition text)
returns text
language plpgsql
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
set quote_all_identifiers = off
set transform_null_equals = off
set extra_float_digits = 1
set bytea_output = hex
set datestyle = 'ISO, YMD'
set intervalstyle = 'postgres'
set timezone = 'UTC'
as $$
declare
  parsed text;
  checked regprocedure;
  tree text;
  forbidden text;
  expression text;
  name text;
begin
  if condition !~ '\S' or octet_length(condition) > 4000 then
    raise exception 'a condition has 1 to 4000 bytes' using errcode = 'MB010';
  end if;
  perform pgmb_internal.assert_own_names(condition);
  -- By name at run time: the schema may not be there.
  execute format('select %s($1)', pgmb_internal.run_as('pgmb_parser', 'pgmb_parser', 'parse')) into parsed using condition;
  checked := to_regprocedure(parsed);
  select p.prosqlbody::text into tree from pg_proc p where p.oid = checked;
  if tree is null then
    raise exception 'invalid condition' using errcode = 'MB010';
  end if;
  if tree ~ '\{(SUBLINK|AGGREF|WINDOWFUNC|NEXTVALUEEXPR|RTE|RANGETBLENTRY) ' then
    forbidden := 'a subquery or an aggregate';
  end if;
  select coalesce(forbidden, string_agg(distinct format('%s, which has effects, changes from call to call, returns a set or asks about the database', f.proname), ', '))
  into forbidden
  from (
    select n[1]::oid oid from regexp_matches(tree, ':(?:funcid|opfuncid|negfuncid|hashfuncid|elemfuncid) (\d+)', 'g') n
    union
    select o.oprcode from regexp_matches(tree, ':(?:opno|eqop) (\d+)', 'g') n join pg_operator o on o.oid = n[1]::oid
  ) called
  join pg_proc f on f.oid = called.oid
  where f.provolatile = 'v' or f.proretset
    -- Some read a table, or a value of a type, that they are given by name or number.
    or f.proname ~ '^(pg_|has_|inet_|txid_|row_security_|current_setting|current_schema|to_reg)|_to_xml'
    or exists (
      select from unnest(f.proargtypes::oid[] || f.prorettype) t join pg_type y on y.oid = t
      where y.typname ~ '^(cstring|internal|oid|oidvector|tid|xid|xid8|cid|void|reg(?!config$).*)$');
  -- What belongs to the server itself is not recorded as a dependency: whatever is, beside the parameters, is not.
  select coalesce(forbidden, string_agg(distinct pg_describe_object(d.refclassid, d.refobjid, 0), ', '))
  into forbidden
  from pg_depend d
  where d.classid = 'pg_proc'::regclass and d.objid = checked and d.deptype = 'n'
    and not (d.refclassid = 'pg_namespace'::regclass and d.refobjid = 'pgmb_parser'::regnamespace)
    and not (d.refclassid = 'pg_type'::regclass and d.refobjid in ('pgmb.document'::regtype, 'pgmb.subscriber'::regtype))
    and not (d.refclassid = 'pg_class'::regclass and d.refobjid in ('pgmb.document'::regclass, 'pgmb.subscriber'::regclass))
    -- Not so the languages of text search.
    and not (d.refclassid = 'pg_ts_config'::regclass and d.refobjid in (
      select c.oid from pg_ts_config c where c.cfgnamespace = 'pg_catalog'::regnamespace));
  -- Not every type is: JSON_VALUE returns some without.
  select coalesce(forbidden, string_agg(distinct format_type(n[1]::oid, null), ', '))
  into forbidden
  from regexp_matches(tree, ':\w*(?:type|typeid|typeId|typid) (\d+)', 'g') n
  where n[1]::bigint >= 16384 and n[1]::oid not in ('pgmb.document'::regtype, 'pgmb.subscriber'::regtype);
  if forbidden is not null then
    raise exception 'a condition may not use %', forbidden using errcode = 'MB010',
      hint = 'Operators and functions of PostgreSQL itself that are not volatile; no tables.';
  end if;
  expression := regexp_replace(pg_get_function_sqlbody(checked), '^RETURN ', '');
  execute 'drop function ' || checked;
  name := pgmb_internal.condition_name(expression);
  -- Others may be about to make the same.
  perform pg_advisory_xact_lock(pgmb_internal.lock_key('condition ' || name));
  if to_regprocedure(format('pgmb_condition.%I(pgmb.document, pgmb.subscriber)', name)) is null then
    execute format('create function pgmb_condition.%I(e pgmb.document, s pgmb.subscriber) returns boolean
      language plpgsql stable security definer set search_path = pg_catalog, pg_temp set standard_conforming_strings = on
      set datestyle = ''ISO, YMD'' set intervalstyle = ''postgres'' set timezone = ''UTC'' as %L',
      name, format('begin return %s; end', expression));
    execute format('revoke all on function pgmb_condition.%I from public', name);
    execute format('alter function pgmb_condition.%I owner to pgmb_matcher', name);
    execute format('grant execute on function pgmb_condition.%I to %I', name, current_user);
  end if;
  return expression;
end $$;

-- Drops the functions of conditions other than these.
create or replace function pgmb_internal.forget_conditions(kept text[])
returns void
language plpgsql
as $$
declare
  unused regprocedure;
begin
  for unused in
    select p.oid from pg_proc p
    where p.pronamespace = to_regnamespace('pgmb_condition') and p.proname ~ '^c_[0-9a-f]{40}$' and p.proname <> all (kept)
  loop
    execute 'drop function ' || unused;
  end loop;
end $$;

-- The name of a function that will run as a lesser role when the owner calls it. That role could change what it owns into
-- something that runs as its caller, so this looks right before the call; volatile, to see what the same statement
-- changed. Errors: MB025 it would not run as that role.
create or replace function pgmb_internal.run_as(role text, schema text, name text)
returns text
language plpgsql volatile
as $$
begin
  if (select count(*) = 1 and bool_and(p.prosecdef and p.proowner = to_regrole(run_as.role)) from pg_proc p
    where p.pronamespace = to_regnamespace(run_as.schema) and p.proname = run_as.name) is not true
  then
    raise exception 'function %.% is not as it was made', schema, name using errcode = 'MB025',
      hint = 'Run `pgmb upgrade`, and write the condition again.';
  end if;
  return format('%I.%I', schema, name);
end $$;

-- The condition on an event e of a log that a queue's fields, filter and SQL condition make. The last is asked about those
-- events alone that pass the others.
create or replace function pgmb_internal.asking(queue pgmb.queue)
returns text
language sql stable
as $$
  select case when (queue).condition is null then pgmb_internal.filtering((queue).equals, (queue).filter, (queue).params) else format(
      ' and case when true%s then %s((select pgmb_internal.document(d.seq, d.id, d.topic, d.key, d.payload, d.headers, d.published_at) '
      'from (select %s) d (seq, id, topic, key, payload, headers, published_at)), row(null, %L, %L)) else false end',
      pgmb_internal.filtering((queue).equals, (queue).filter, (queue).params),
      pgmb_internal.run_as('pgmb_matcher', 'pgmb_condition', pgmb_internal.condition_name((queue).condition)),
      (select pgmb_internal.event_columns(s.salt) from pgmb.stream s where s.id = (queue).stream),
      (queue).name, coalesce((queue).params, '{}')) end
$$;

-- Whether reading a queue needs a statement_timeout: it asks in SQL, or by a costly filter.
create or replace function pgmb_internal.needs_timeout(queue pgmb.queue)
returns boolean
language sql stable
as $$
  select (queue).condition is not null
    or (queue).filter is not null and pgmb_internal.is_costly(pgmb_internal.predicate((queue).filter), (queue).params)
$$;

-- The condition on an event of a queue as far as it can be asked without a statement_timeout; `all_asked`: that is all of it.
create or replace function pgmb_internal.askable(q pgmb.queue, out condition text, out all_asked boolean)
language sql stable
as $$
  select q.matching || case when asks.timed then '' else pgmb_internal.asking(q) end, not asks.timed
  from (select pgmb_internal.needs_timeout(q) timed) asks
$$;

-- Conditions and costly filters may take long: the caller must have said how long. Errors: MB024.
create or replace function pgmb_internal.assert_timeout()
returns void
language plpgsql stable
as $$
begin
  if current_setting('statement_timeout') = '0' then
    raise exception 'this reads by an SQL condition or a costly filter, which needs a statement_timeout' using errcode = 'MB024',
      hint = 'set local statement_timeout = ''5s'', in a statement before this one. The clients of pgmb do so.';
  end if;
end $$;
