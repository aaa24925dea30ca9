-- Table events. Statement triggers publish what was inserted, updated, deleted and truncated in a table, in the
-- transaction that wrote it. They run with the owner's rights, so that roles that write to the table need none here.

-- Has a table publish its mutations to a stream, as <schema>.<table>.insert, .update, .delete and .truncate, in lower
-- case; in the names, dots, blanks, * and # become _. payload: the row (of an update the new one); key: its primary
-- key; an update's headers: {"old": the old row, "changed": the fields that changed, with their new values}. Called
-- again, changes what is published, and where. The caller is an admin with the right TRIGGER on the table, or owns the
-- table and may publish to the stream: once it may no longer, writes to the table fail (42501). Lock: SHARE ROW EXCLUSIVE on the table, ACCESS EXCLUSIVE to publish less than
-- before. Errors: MB001 no such stream, MB005 not a table, 42501.
create or replace function pgmb.push_table_mutations(
  tabl regclass, insert boolean default true, update boolean default true, delete boolean default true,
  truncate boolean default true, stream text default 'main'
)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  target pg_class;
  wanted record;
begin
  select * into target from pg_class c where c.oid = push_table_mutations.tabl;
  if target.relkind is null or target.relkind not in ('r', 'p') or target.relpersistence = 't'
    or target.relnamespace = any ('{pgmb,pg_catalog}'::regnamespace[])
  then
    raise exception 'not a table that can publish its mutations: %', coalesce(push_table_mutations.tabl::text, 'null')
      using errcode = 'MB005', hint = 'A table or a partitioned table, not temporary, and none of pgmb''s own.';
  end if;
  if exists (
    select from pg_partition_tree(target.oid) part join pg_class c on c.oid = part.relid where c.relkind = 'f')
  then
    raise exception 'foreign tables are among the partitions of %', push_table_mutations.tabl using errcode = 'MB005',
      hint = 'PostgreSQL cannot tell a trigger what it wrote there.';
  end if;
  if to_regclass('pgmb.' || quote_ident('log_' || push_table_mutations.stream)) is null then
    raise exception 'stream % does not exist', coalesce(quote_literal(push_table_mutations.stream), 'null')
      using errcode = 'MB001', hint = 'Create it with pgmb.create_stream(name).';
  end if;
  for wanted in
    select given.op, coalesce(given.flag, false) flag, t.oid is not null made,
      t.tgargs in (convert_to(push_table_mutations.stream, 'UTF8') || '\x00',
        convert_to(push_table_mutations.stream, 'UTF8') || '\x00' || convert_to(current_user, 'UTF8') || '\x00')
      and t.tgenabled <> 'D' as same
    from (values ('insert', push_table_mutations.insert), ('update', push_table_mutations.update),
      ('delete', push_table_mutations.delete), ('truncate', push_table_mutations.truncate)) given (op, flag)
    left join pg_trigger t on t.tgrelid = target.oid and t.tgname = 'pgmb_' || given.op and not t.tgisinternal
  loop
    if wanted.flag and wanted.same is not true then
      -- For the owner of pgmb, which needs no checks.
      if has_schema_privilege('pgmb_internal', 'usage') then
        execute pgmb_internal.mutation_trigger(target.oid, wanted.op, push_table_mutations.stream);
      else
        perform pgmb.attach_mutations(target.oid, wanted.op, push_table_mutations.stream);
      end if;
    elsif wanted.made and not wanted.flag then
      execute format('drop trigger %I on %s', 'pgmb_' || wanted.op, target.oid::regclass);
    end if;
  end loop;
end $$;

-- Has a table publish its mutations no longer. True if it did. The caller owns the table. Lock: ACCESS EXCLUSIVE on
-- the table.
create or replace function pgmb.stop_table_mutations(tabl regclass)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  made name;
  stopped boolean := false;
begin
  for made in
    select t.tgname from pg_trigger t
    -- By its row: the caller may not look up a name in schema pgmb_internal.
    where t.tgrelid = stop_table_mutations.tabl and not t.tgisinternal and t.tgfoid = (select p.oid from pg_proc p
      where p.proname = 'publish_mutations' and p.pronamespace = 'pgmb_internal'::regnamespace)
  loop
    execute format('drop trigger %I on %s', made, stop_table_mutations.tabl);
    stopped := true;
  end loop;
  return stopped;
end $$;

-- The tables that publish their mutations: which, to which stream, and the topic without its last word. A trigger that
-- was disabled counts as none.
create or replace function pgmb.table_mutations(
  out tabl regclass, out insert boolean, out update boolean, out delete boolean, out truncate boolean,
  out stream text, out topic text
)
returns setof record
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select t.tgrelid::regclass,
    coalesce(bool_or(t.tgtype & 4 <> 0), false), coalesce(bool_or(t.tgtype & 16 <> 0), false),
    coalesce(bool_or(t.tgtype & 8 <> 0), false), coalesce(bool_or(t.tgtype & 32 <> 0), false),
    to_.stream, pgmb.table_topic(n.nspname, c.relname)
  from pg_trigger t
  join pg_class c on c.oid = t.tgrelid
  join pg_namespace n on n.oid = c.relnamespace
  cross join lateral (select convert_from(substr(t.tgargs, 1, position('\x00'::bytea in t.tgargs) - 1), 'UTF8')) to_ (stream)
  where t.tgenabled <> 'D' and not t.tgisinternal and t.tgfoid = (select p.oid from pg_proc p
    where p.proname = 'publish_mutations' and p.pronamespace = 'pgmb_internal'::regnamespace)
  group by t.tgrelid, to_.stream, n.nspname, c.relname
  order by n.nspname, c.relname, to_.stream
$$;

-- The topic of a table's events, without the operation. Called by pgmb.table_mutations. Support.
create or replace function pgmb.table_topic(schema name, tabl name)
returns text
language plpgsql immutable
as $$
begin
  return regexp_replace(lower(schema::text collate "C"), '[.*#[:space:][:cntrl:]]', '_', 'g') || '.'
    || regexp_replace(lower(tabl::text collate "C"), '[.*#[:space:][:cntrl:]]', '_', 'g');
end $$;

-- The statement that makes a table's trigger for an operation. publisher: the role that must be allowed to publish to the
-- stream whenever it fires; null: an admin made it.
create or replace function pgmb_internal.mutation_trigger(tabl regclass, op text, stream text, publisher text default null)
returns text
language sql stable
as $$
  select format('create or replace trigger %I after %s on %s%s for each statement'
      ' execute function pgmb_internal.publish_mutations(%L%s)',
    'pgmb_' || op, op, tabl, case op
      when 'insert' then ' referencing new table as new_rows'
      when 'update' then ' referencing old table as old_rows new table as new_rows'
      when 'delete' then ' referencing old table as old_rows'
      else '' end, stream, ', ' || quote_literal(publisher))
$$;

-- Makes the trigger for a caller other than the owner of pgmb: a role that could execute the trigger's function could put
-- it on a table in ways that this does not. The caller owns the table and may publish to the stream, or is an admin with
-- the right TRIGGER on the table. Called by pgmb.push_table_mutations. Errors: MB001, MB005, 42501. Support.
create or replace function pgmb.attach_mutations(tabl regclass, op text, stream text)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  caller name := pgmb_internal.caller();
  admin boolean := pgmb_internal.caller_is_owner() or pgmb_internal.caller_is('pgmb_admin');
begin
  if attach_mutations.op is null or attach_mutations.op <> all ('{insert,update,delete,truncate}') then
    raise exception 'invalid mutation: %', coalesce(quote_literal(attach_mutations.op), 'null') using errcode = 'MB005';
  end if;
  perform pgmb.stream_id(attach_mutations.stream);
  if not (admin and has_table_privilege(caller, attach_mutations.tabl, 'trigger') or exists (
    select from pg_class c where c.oid = attach_mutations.tabl and pg_has_role(caller, c.relowner, 'usage')))
  then
    raise exception 'role % does not own table %', caller, attach_mutations.tabl using errcode = '42501',
      hint = 'A table''s owner, or an admin with the right TRIGGER on it, has it publish its mutations.';
  end if;
  if not admin then
    perform pgmb_internal.assert_publisher(attach_mutations.stream);
  end if;
  if not has_table_privilege(attach_mutations.tabl, 'trigger')
    or not has_schema_privilege((select c.relnamespace from pg_class c where c.oid = attach_mutations.tabl), 'usage')
  then
    raise exception 'role %, which owns pgmb, may not create triggers on table %', current_user, attach_mutations.tabl
      using errcode = '42501', hint = (
        select format('grant usage on schema %s to %I; grant trigger on table %s to %2$I;'
            ' call again; revoke both if you like.', c.relnamespace::regnamespace, current_user, attach_mutations.tabl)
        from pg_class c where c.oid = attach_mutations.tabl);
  end if;
  execute pgmb_internal.mutation_trigger(attach_mutations.tabl, attach_mutations.op, attach_mutations.stream,
    case when not admin then caller end);
end $$;

-- Publishes a statement's mutations: the trigger that push_table_mutations makes, once a statement. What it writes does
-- not depend on the writer's settings. Errors: MB040 a queue is full; 42501 the table's owner may no longer publish to
-- the stream; 40001 the writer's snapshot is older than the table as it is; whatever the serialiser raises.
create or replace function pgmb_internal.publish_mutations()
returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set intervalstyle = 'postgres'
set bytea_output = 'hex'
set extra_float_digits = 1
set plan_cache_mode = force_generic_plan
as $$
declare
  topic text := pgmb.table_topic(tg_table_schema, tg_table_name) || '.';
  few constant integer := 20;
  olds bigint := 0;
  news bigint := 0;
  shape record;
  as_seen boolean;
  events refcursor;
  event record;
begin
  if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    -- The snapshot may not show the trigger itself, and what is asked below would be answered wrongly.
    if not exists (select from pg_trigger t where t.tgrelid = tg_relid and t.tgname = tg_name) then
      perform pgmb_internal.raise_table_changed(tg_relid);
    end if;
    if tg_op <> 'TRUNCATE' then
      begin
        execute pgmb_internal.comparison_with_snapshot(tg_relid, case tg_op when 'DELETE' then 'old' else 'new' end) into as_seen;
      exception when undefined_column then
        as_seen := false;
      end;
      if not as_seen then
        perform pgmb_internal.raise_table_changed(tg_relid);
      end if;
    end if;
  end if;
  -- Without its transition tables, new_rows would be found by name: a view of the caller's, run as the owner.
  if tg_level <> 'STATEMENT' or tg_when <> 'AFTER' or not exists (
    select from pg_trigger t
    where t.tgrelid = tg_relid and t.tgname = tg_name and not t.tgisinternal
      and t.tgnewtable is not distinct from case when tg_op in ('INSERT', 'UPDATE') then 'new_rows'::name end
      and t.tgoldtable is not distinct from case when tg_op in ('UPDATE', 'DELETE') then 'old_rows'::name end)
  then
    raise exception 'trigger % was not made by pgmb.push_table_mutations', tg_name using errcode = '42501',
      hint = 'Drop it, and call pgmb.push_table_mutations(tabl).';
  end if;
  if tg_nargs > 1 and not coalesce(has_any_column_privilege(to_regrole(quote_ident(tg_argv[1])),
    format('pgmb.%I', 'log_' || tg_argv[0]), 'insert'), false)
  then
    raise exception 'role %, which has table % publish its mutations, may not publish to stream %',
      tg_argv[1], tg_relid::regclass, tg_argv[0] using errcode = '42501',
      hint = 'Stop it with pgmb.stop_table_mutations(tabl), or grant it with pgmb.grant_publish(stream, role).';
  end if;
  if tg_op = 'TRUNCATE' then
    perform pgmb.publish(topic || 'truncate', 'null', stream => tg_argv[0]);
    return null;
  end if;
  -- An upsert fires the triggers of both its operations, though one of them may have done nothing.
  if tg_op <> 'INSERT' then
    select count(*) into olds from (select from old_rows limit few + 1) first;
  end if;
  if tg_op <> 'DELETE' then
    select count(*) into news from (select from new_rows limit few + 1) first;
  end if;
  if olds + news = 0 then
    return null;
  end if;
  if tg_op = 'UPDATE' and exists (select from pg_class c where c.oid = tg_relid and c.relkind = 'p') then
    select count(*) into olds from old_rows;
    select count(*) into news from new_rows;
    -- On their way to another partition some rows were stopped by a trigger there; which of the old ones is unknown.
    if olds <> news then
      execute pgmb_internal.mutation_statement(tg_relid, 'delete', tg_argv[0]) using topic || 'delete', tg_relid, 'DELETE';
      execute pgmb_internal.mutation_statement(tg_relid, 'insert', tg_argv[0]) using topic || 'insert', tg_relid, 'INSERT';
      return null;
    end if;
  end if;
  topic := topic || lower(tg_op);
  shape := pgmb_internal.shape_of_rows(tg_relid);
  -- To plan a statement for this table costs more than to publish a few rows one by one, by statements that any table
  -- can use and that are planned once a session.
  if greatest(olds, news) > few or not shape.plain then
    execute pgmb_internal.mutation_statement(tg_relid, lower(tg_op), tg_argv[0]) using topic, tg_relid, tg_op;
    return null;
  elsif tg_op = 'INSERT' then
    open events for select row_to_json(n.*) as row, null::json as headers from new_rows n;
  elsif tg_op = 'DELETE' then
    open events for select row_to_json(o.*) as row, null::json as headers from old_rows o;
  else
    open events for
      select n.row, json_build_object('old', o.row, 'changed', ('{' || (
        select string_agg(to_json(now.key) || ':' || now.value, ',')
        from json_each(n.row) now join json_each(o.row) was using (key)
        where now.value::text <> was.value::text
      ) || '}')::json) as headers
      from (select row_number() over () place, row_to_json(o.*) as row from old_rows o) o
      join (select row_number() over () place, row_to_json(n.*) as row from new_rows n) n using (place)
      where o.row::text <> n.row::text
      order by place;
  end if;
  loop
    fetch events into event;
    exit when not found;
    if tg_argv[0] = 'main' then
      insert into pgmb.log_main (topic, key, payload, headers)
      values (topic, pgmb_internal.key_of_row(event.row, shape.keys), event.row, event.headers);
    else
      perform pgmb.publish(topic, event.row, pgmb_internal.key_of_row(event.row, shape.keys), event.headers, tg_argv[0]);
    end if;
  end loop;
  close events;
  return null;
end $$;

-- A statement that tells whether a table is what the transaction's snapshot shows of it, null where nothing was written. Which
-- columns are published, and whether their types are safe, is asked by that snapshot, but rows are written as the table is now:
-- without this, a column that was added after the snapshot is missing in the events, or its type calls a function of its owner.
-- Rights, definitions and types of values are asked of the present. Another default serialiser counts, too.
create or replace function pgmb_internal.comparison_with_snapshot(tabl oid, side text)
returns text
language plpgsql stable
as $$
declare
  serialiser oid := to_regprocedure('pgmb.serialise_record_for_event(oid, text, record)');
  primary_key record;
  fields record;
begin
  select i.indexrelid, c.relreplident = 'd' and coalesce(i.indimmediate, true) told into primary_key
  from pg_class c left join pg_index i on i.indrelid = c.oid and i.indisprimary
  where c.oid = comparison_with_snapshot.tabl;
  select coalesce(max(a.attnum), 0) last,
    coalesce(string_agg(format('pg_typeof(w.%I)::oid = %s', a.attname, a.atttypid), ' and ') filter (where not a.attisdropped), 'true') same
  into fields
  from pg_attribute a where a.attrelid = comparison_with_snapshot.tabl and a.attnum > 0;
  return case
    when primary_key.told is null
      or primary_key.told and pg_get_replica_identity_index(comparison_with_snapshot.tabl) is distinct from primary_key.indexrelid
      or has_column_privilege(comparison_with_snapshot.tabl, (fields.last + 1)::smallint, 'select') is not null
      or serialiser is not null and not exists (
        select from pg_proc p where p.oid = serialiser and strpos(pg_get_functiondef(p.oid), p.prosrc) > 0)
    then 'select false'
    else format('select %s from %s_rows w limit 1', fields.same, comparison_with_snapshot.side) end;
end $$;

create or replace function pgmb_internal.raise_table_changed(tabl regclass)
returns void
language plpgsql
as $$
begin
  raise exception 'table % changed after this transaction''s snapshot', raise_table_changed.tabl using errcode = '40001',
    hint = 'Try the transaction again.';
end $$;

-- How rows of a table are published: the columns of its primary key; whether their JSON can be taken apart again: no
-- serialiser of the user's, no virtual columns, no types that might be foreign, and no values of type json, also inside
-- others, with \u0000 in them.
create or replace function pgmb_internal.shape_of_rows(tabl oid, out keys text[], out plain boolean)
language plpgsql stable
as $$
declare
  primary_key smallint[];
begin
  select (i.indkey::smallint[])[:i.indnkeyatts - 1] into primary_key from pg_index i
  where i.indrelid = shape_of_rows.tabl and i.indisprimary;
  select
    coalesce(array_agg(a.attname::text order by array_position(primary_key, a.attnum))
      filter (where a.attnum = any (primary_key)), '{}'),
    coalesce(bool_and(a.attgenerated <> 'v' and a.atttypid <> all ('{json,json[]}'::regtype[])
      and (a.atttypid < 16384 or (
        select t.typtype = 'e' and pg_has_role(t.typowner, current_user, 'usage')
        from pg_type t where t.oid = a.atttypid))), true)
  into keys, plain
  from pg_attribute a
  where a.attrelid = shape_of_rows.tabl and a.attnum > 0 and not a.attisdropped;
  plain := plain and not pgmb_internal.serialiser_is_custom();
end $$;

-- An ordering key that the log accepts: the key, or a digest of one that is too long.
create or replace function pgmb_internal.bounded_key(key text)
returns text
language sql immutable
as $$
  select case when octet_length(key) <= 1000 then key
    else 'sha256:' || encode(sha256(convert_to(key, 'UTF8')), 'hex') end
$$;

-- The ordering key of a row: the text of its primary key, or of an array of its columns where there are several.
create or replace function pgmb_internal.key_of_row("row" json, keys text[])
returns text
language plpgsql immutable
as $$
begin
  return pgmb_internal.bounded_key(case cardinality(keys)
    when 0 then null
    when 1 then "row" ->> keys[1]
    else (select '[' || string_agg(("row" -> k.name)::text, ', ' order by k.place) || ']'
      from unnest(keys) with ordinality k (name, place)) end);
end $$;

-- Whether the serialiser is the user's: its source is none of the defaults of any version, not even one with a line changed.
create or replace function pgmb_internal.serialiser_is_custom()
returns boolean
language plpgsql stable
as $$
declare
  defaults text[] := '{f4e29d5333c23a4f389a0d76861a9aad}';
begin
  return exists (select from pg_proc p
    where p.oid = to_regprocedure('pgmb.serialise_record_for_event(oid, text, record)')
      and md5(p.prosrc) <> all (defaults));
end $$;

-- The statement that publishes a transition table: $1 the topic, $2 the table, $3 the operation as the serialiser gets
-- it. Old and new rows of an update belong together by their place: PostgreSQL puts both away in one step
-- (docs/adr/0012). No function of the table's owner is called: see type_is_foreign.
create or replace function pgmb_internal.mutation_statement(tabl oid, op text, stream text)
returns text
language plpgsql stable
as $$
declare
  into_log text := format('insert into pgmb.%I (topic, key, payload, headers) ', 'log_' || stream);
  custom boolean := pgmb_internal.serialiser_is_custom();
  side text := case op when 'delete' then 'old' else 'new' end;
  key text;
  source text;
  fields name[];
  longest integer;
  place text;
  whole text;
  paired text;
begin
  select case count(*)
      when 0 then 'null'
      when 1 then format($sql$pgmb_internal.bounded_key(to_json(%s.%I) #>> '{}')$sql$, side, min(k.name))
      else format('pgmb_internal.bounded_key(json_build_array(%s)::text)', string_agg(format('%s.%I', side, k.name), ', ' order by k.place)) end
  into key
  from unnest((pgmb_internal.shape_of_rows(mutation_statement.tabl)).keys) with ordinality k (name, place);

  select coalesce(array_agg(c.name order by c.place), '{}'), max(length(c.name)),
    case when bool_or(c.instead is not null)
      then '(select ' || replace(string_agg(coalesce(c.instead || ' as ', '') || quote_ident(c.name), ', ' order by c.place),
        '%', '%%') || ' from %1$s_rows)'
      else '%1$s_rows' end
  into fields, longest, source
  from (
    select a.attname as name, a.attnum as place, case
      -- A transition table has no values of virtual columns, which PostgreSQL 18 brought.
      when a.attgenerated = 'v'
      then (select pg_get_expr(d.adbin, d.adrelid) from pg_attrdef d where d.adrelid = a.attrelid and d.adnum = a.attnum)
      when a.atttypid >= 16384 and pgmb_internal.type_is_foreign(a.atttypid)
      then format('case num_nulls(%1$I) when 0 then concat(%1$I) end', a.attname) end as instead
    from pg_attribute a
    where a.attrelid = mutation_statement.tabl and a.attnum > 0 and not a.attisdropped
  ) c;

  if op <> 'update' then
    source := format(source, side);
    if custom then
      return into_log || format($sql$
        select $1, %3$s, coalesce(made.serialised, 'null')::json, null
        from %2$s %1$s
        cross join lateral pgmb.serialise_record_for_event($2, $3, %1$s.*) made
        where made.emit $sql$, side, source, key);
    end if;
    return into_log || format('select $1, %3$s, row_to_json(%1$s.*), null from %2$s %1$s', side, source, key);
  end if;

  -- Names that no column has.
  place := quote_ident(rpad('place', longest + 1, '_'));
  whole := quote_ident(rpad('whole', longest + 1, '_'));
  select string_agg(format('(select row_number() over () as %2$s, %3$s as %4$s, %1$s.* from %5$s %1$s) %1$s',
      pair, place, format(case when custom then '%s.*::record' else 'row_to_json(%s.*)' end, pair), whole,
      format(source, pair)), ' join ') || ' using (' || place || ')'
  into paired
  from unnest('{old,new}'::text[]) pair;
  if custom then
    return into_log || format($sql$
      select $1, %1$s, coalesce(made.serialised, 'null')::json,
        json_build_object('old', was.serialised, 'changed', (
          select coalesce(json_object_agg(field.key, field.value), '{}')
          from jsonb_each(case jsonb_typeof(made.serialised) when 'object' then made.serialised end) field
          where case jsonb_typeof(was.serialised) when 'object'
            then field.value is distinct from was.serialised -> field.key else true end))
      from %2$s
      cross join lateral pgmb.serialise_record_for_event($2, $3, old.%3$s) was
      cross join lateral pgmb.serialise_record_for_event($2, $3, new.%3$s) made
      where record_image_ne(row(%4$s), row(%5$s)) and made.emit and made.serialised is distinct from was.serialised $sql$,
      key, paired, whole,
      (select string_agg(format('old.%I', field), ', ') from unnest(fields) field),
      (select string_agg(format('new.%I', field), ', ') from unnest(fields) field));
  end if;
  return into_log || format($sql$
    select $1, pair.key, pair.new, json_build_object('old', pair.old, 'changed', ('{' || pair.changed || '}')::json)
    from (
      select %1$s as key, new.%3$s as new, old.%3$s as old, array_to_string(array[%4$s], ',') as changed
      from %2$s
      offset 0
    ) pair
    where pair.changed <> '' $sql$,
    key, paired, whole,
    (select string_agg(format($sql$case
      when record_image_ne(row(old.%1$I), row(new.%1$I)) and to_json(old.%1$I)::text is distinct from to_json(new.%1$I)::text
      then %2$L || coalesce(to_json(new.%1$I)::text, 'null') end$sql$, field, to_json(field) || ':'), ', ')
    from unnest(fields) field));
end $$;

-- Whether JSON made of a value of this type could call a function of a role with less rights than pgmb's owner: a cast
-- to json, which the owner of a type can create at any time. The trigger would lend that function its rights. Composite
-- types are taken by their fields, which cannot change while a table has a column of the type; rows of other
-- tables, which can, by the table's owner.
create or replace function pgmb_internal.type_is_foreign(type oid)
returns boolean
language plpgsql stable
as $$
begin
  return exists (
    with recursive part (type) as (
      select type_is_foreign.type
      union
      select inner_.type
      from part
      join pg_type t on t.oid = part.type
      cross join lateral (
        select t.typelem union select t.typbasetype union
        select a.atttypid from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
      ) inner_ (type)
      where inner_.type <> 0
    )
    select from part
    join pg_type t on t.oid = part.type
    left join pg_class c on c.oid = t.typrelid
    where t.oid >= 16384 and t.typtype <> 'd' and t.typelem = 0 and c.relkind is distinct from 'c'
      and not pg_has_role(t.typowner, current_user, 'usage'));
end $$;

do $pgmb_serialiser$
begin
  if not pgmb_internal.serialiser_is_custom() then
    -- Decides whether a mutation is published, and what its payload is. Replace it to choose for yourself: an upgrade
    -- replaces the default only.
    create or replace function pgmb.serialise_record_for_event(
      tabl oid, op text, record record, serialised out jsonb, emit out boolean
    )
    language plpgsql immutable strict parallel safe
    as $$
    -- While this default stands, rows are published as row_to_json has them, and it is not called.
    begin
      serialised := to_jsonb(record);
      emit := true;
    end $$;
  end if;
end $pgmb_serialiser$;
