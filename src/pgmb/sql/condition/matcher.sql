-- Applied after the grants: what parses and runs SQL conditions. pgmb_parser owns one function, which parses; pgmb_matcher
-- owns those that run conditions, and may read the params of subscriptions. Neither has other rights, and what is parsed
-- or run has theirs alone. Where the roles cannot be had, everything but conditions works.

do $matcher$
declare
  acting text := current_setting('role');
  owner name := current_user;
  lesser text;
  may_act boolean;
begin
  if to_regrole('pgmb_matcher') is null or to_regrole('pgmb_parser') is null then
    return;
  end if;
  begin
    foreach lesser in array '{pgmb_matcher,pgmb_parser}'::text[] loop
      may_act := false;
      begin
        perform set_config('role', lesser, true);
        may_act := true;
      exception when insufficient_privilege or invalid_parameter_value then null;
      end;
      perform set_config('role', acting, true);
      if not may_act then
        execute format('grant %I to %I', lesser, owner);
        perform set_config('role', lesser, true);
        perform set_config('role', acting, true);
      end if;
      execute format('grant usage on schema pgmb to %I', lesser);
    end loop;
    execute 'grant select on pgmb.subscription to pgmb_matcher';
    -- One that was restored without its owner would run conditions with the rights of the role that restored it.
    if exists (
      select from pg_namespace n left join pg_proc p on p.pronamespace = n.oid
      where n.nspname in ('pgmb_condition', 'pgmb_parser') and (pg_get_userbyid(n.nspowner) <> owner
        or pg_get_userbyid(p.proowner) <> case n.nspname when 'pgmb_parser' then 'pgmb_parser' else 'pgmb_matcher' end))
    then
      execute 'drop schema if exists pgmb_condition cascade';
      execute 'drop schema if exists pgmb_parser cascade';
    end if;
    if to_regnamespace('pgmb_condition') is null then
      execute 'create schema pgmb_condition';
    end if;
    if to_regnamespace('pgmb_parser') is null then
      execute 'create schema pgmb_parser';
    end if;
    execute 'grant usage, create on schema pgmb_condition to pgmb_matcher';
    execute 'grant usage, create on schema pgmb_parser to pgmb_parser';
    perform set_config('role', 'pgmb_parser', true);
  exception when insufficient_privilege or invalid_parameter_value or invalid_grant_operation then
    perform set_config('role', acting, true);
    return;
  end;

  -- Has the server parse a condition, and returns the name of the function whose body is its parse tree. Code that runs
  -- while the server reads the text has no rights and owns nothing that others rely on.
  create or replace function pgmb_parser.parse(condition text)
  returns text
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp
  set standard_conforming_strings = on
  set transform_null_equals = off
  set datestyle = 'ISO, YMD'
  set intervalstyle = 'postgres'
  set timezone = 'UTC'
  as $$
  declare
    probe refcursor;
  begin
    -- A cursor takes one statement and refuses a second before it runs any. Of one that explains it plans none either,
    -- which would run functions of constants.
    open probe for execute format('explain select case when (%s) then 1 end from (select (null::pgmb.document).*) e,
      (select (null::pgmb.subscriber).*) s', E'\n' || condition || E'\n');
    close probe;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    execute format('create function pgmb_parser.trial_%s(e pgmb.document, s pgmb.subscriber)
      returns boolean language sql stable return (%s)', pg_backend_pid(), E'\n' || condition || E'\n');
    return format('pgmb_parser.trial_%s(pgmb.document, pgmb.subscriber)', pg_backend_pid());
  exception when others then
    raise exception 'invalid condition: %', sqlerrm using errcode = 'MB010',
      hint = 'One boolean expression over e (topic, key, payload, headers, id, published_at) and s.params.';
  end $$;
  revoke all on function pgmb_parser.parse from public;
  execute format('grant execute on function pgmb_parser.parse to %I', owner);

  perform set_config('role', acting, true);
  perform set_config('role', 'pgmb_matcher', true);
  -- Runs a statement of pgmb_internal.match_statement: conditions of subscriptions, against documents $1 for group $2 of
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
  revoke all on function pgmb_condition.match from public;
  execute format('grant execute on function pgmb_condition.match to %I', owner);

  perform set_config('role', acting, true);
  -- What is asked already, as this version writes it.
  perform pgmb_internal.make_condition(asked.condition)
  from (select h.condition from pgmb.shape h union select b.condition from pgmb.binding b) asked
  where asked.condition is not null
    and to_regproc('pgmb_condition.' || pgmb_internal.condition_name(asked.condition)) is null;
end $matcher$;
