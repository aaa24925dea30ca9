-- Applied after the grants: the functions that run SQL conditions. They belong to pgmb_matcher, which may do nothing
-- but read the params of subscriptions, and so does all that a condition does. Where that role cannot be had,
-- everything but conditions works.

do $matcher$
declare
  acting text := current_setting('role');
  owner name := current_user;
  may_act boolean := false;
begin
  if to_regrole('pgmb_matcher') is null then
    return;
  end if;
  begin
    perform set_config('role', 'pgmb_matcher', true);
    may_act := true;
  exception when insufficient_privilege or invalid_parameter_value then null;
  end;
  perform set_config('role', acting, true);
  begin
    if not may_act then
      execute format('grant pgmb_matcher to %I', owner);
    end if;
    execute 'grant usage on schema pgmb to pgmb_matcher';
    execute 'grant select on pgmb.subscription to pgmb_matcher';
    -- One that was restored without its owner would run conditions with the rights of whoever restored it.
    if exists (
      select from pg_namespace n left join pg_proc p on p.pronamespace = n.oid
      where n.nspname = 'pgmb_condition' and ('pgmb_matcher'::regrole not in (n.nspowner, p.proowner)
        or p.proowner <> n.nspowner))
    then
      execute 'drop schema pgmb_condition cascade';
    end if;
    if to_regnamespace('pgmb_condition') is null then
      execute 'create schema pgmb_condition authorization pgmb_matcher';
    end if;
    perform set_config('role', 'pgmb_matcher', true);
  exception when insufficient_privilege or invalid_parameter_value or invalid_grant_operation then
    perform set_config('role', acting, true);
    return;
  end;

  -- Checks that a text is one expression over e and s, of type boolean, that calls nothing but functions of the
  -- server itself which change nothing, ask nothing about the database and run no code of others. Gives it as the server
  -- writes it, and makes the function of that condition. Settings that decide how literals are written and read are
  -- pinned here as where conditions run: what was checked is what runs.
  create or replace function pgmb_condition.compile(condition text)
  returns text
  language plpgsql security definer
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
    probe refcursor;
    trial text := format('pgmb_condition.trial_%s(pgmb.document, pgmb.subscriber)', pg_backend_pid());
    checked regprocedure;
    tree text;
    forbidden text;
    expression text;
    name text;
  begin
    if condition !~ '\S' or octet_length(condition) > 4000 then
      raise exception 'a condition has 1 to 4000 bytes' using errcode = 'MB010';
    end if;
    begin
      -- A cursor takes one statement and refuses a second before it runs any. Of one that explains it plans none either,
      -- which would run functions of constants.
      open probe for execute format('explain select case when (%s) then 1 end from (select (null::pgmb.document).*) e,
        (select (null::pgmb.subscriber).*) s', E'\n' || condition || E'\n');
      close probe;
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
      execute format('create function pgmb_condition.trial_%s(e pgmb.document, s pgmb.subscriber)
        returns boolean language sql stable return (%s)', pg_backend_pid(), E'\n' || condition || E'\n');
      -- Reading a literal may have run code (the check of a domain), as this role: it has set nothing that lasts.
      perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    exception when others then
      raise exception 'not a condition: %', sqlerrm using errcode = 'MB010',
        hint = 'One boolean expression over e (topic, key, payload, headers, id, published_at) and s.params.';
    end;
    checked := to_regprocedure(trial);
    select p.prosqlbody::text into tree from pg_proc p where p.oid = checked;
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
      and not (d.refclassid = 'pg_namespace'::regclass and d.refobjid = 'pgmb_condition'::regnamespace)
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
    execute 'drop function ' || trial;
    name := pgmb.condition_name(expression);
    -- Others may be about to make the same.
    perform pg_advisory_xact_lock(28749, hashtext(name));
    if to_regprocedure(format('pgmb_condition.%I(pgmb.document, pgmb.subscriber)', name)) is null then
      execute format('create function pgmb_condition.%I(e pgmb.document, s pgmb.subscriber) returns boolean
        language plpgsql stable security definer set search_path = pg_catalog, pg_temp set standard_conforming_strings = on
        set datestyle = ''ISO, YMD'' set intervalstyle = ''postgres'' set timezone = ''UTC'' as %L',
        name, format('begin return %s; end', expression));
      execute format('revoke all on function pgmb_condition.%I from public', name);
      execute format('grant execute on function pgmb_condition.%I to %I', name,
        (select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'pgmb'));
    end if;
    return expression;
  end $$;

  -- Runs a statement of pgmb.match_statement: conditions of subscriptions, against documents $1 for group $2 of
  -- stream $3, and for the subscriptions $4 alone if there are any.
  create or replace function pgmb_condition.match(
    statement text, documents pgmb.document[], group_id text, stream integer, subscriptions uuid[],
    out seqs bigint[], out matching uuid[]
  )
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp
  set standard_conforming_strings = on
  set datestyle = 'ISO, YMD'
  set intervalstyle = 'postgres'
  set timezone = 'UTC'
  set work_mem = '64MB'
  set jit = off
  set enable_nestloop = off
  as $$
  begin
    execute statement into seqs, matching using documents, group_id, stream, subscriptions;
  end $$;

  -- Drops the functions of conditions other than these.
  create or replace function pgmb_condition.forget(kept text[])
  returns void
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp
  as $$
  declare
    unused regprocedure;
  begin
    for unused in
      select p.oid from pg_proc p
      where p.pronamespace = 'pgmb_condition'::regnamespace and p.proname ~ '^c_[0-9a-f]{40}$' and p.proname <> all (kept)
    loop
      execute 'drop function ' || unused;
    end loop;
  end $$;

  execute format('grant usage on schema pgmb_condition to %I', owner);
  revoke all on all functions in schema pgmb_condition from public;
  execute format('grant execute on all functions in schema pgmb_condition to %I', owner);
  perform set_config('role', acting, true);
  grant execute on function pgmb.condition_name(text) to pgmb_matcher;
  -- What is asked already, as this version writes it.
  perform pgmb_condition.compile(asked.condition)
  from (select h.condition from pgmb.shape h union select b.condition from pgmb.binding b) asked
  where asked.condition is not null
    and to_regproc('pgmb_condition.' || pgmb.condition_name(asked.condition)) is null;
end $matcher$;
