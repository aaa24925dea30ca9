-- Projections: typed tables of archived events. A projector reads segments that are verified in the lake, writes rows with typed
-- columns to a Delta table, and commits them with the number of the last segment as version, so that each event is in the
-- table once (docs/adr/0037-a-projection-follows-the-lake.md).

-- Declares a projection of the events of a stream whose topics match a pattern. columns: a JSON array of {"name", "type", "path",
-- "required"}, which the projector reads; bad: what becomes of payloads that do not fit, rescue, drop or fail; url: of the table,
-- by default the lake's with the name at its end. The same declaration again changes nothing, and with `replace` another one takes its
-- place, for which the table has to be rebuilt. Returns the URL. Errors: MB001 no such stream, MB003, MB004 it is declared
-- differently, or its table would lie in the folder of another one, MB007, MB061 the stream has no lake.
create or replace function pgmb.create_projection(
  name text, stream text, patterns text[], columns jsonb, bad text default 'rescue', url text default null,
  replace boolean default false
)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  lake record;
  installed uuid;
  wanted_url text;
  found_one pgmb.lake_projection;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(create_projection.stream);
  select * into lake from pgmb.lake_of(create_projection.stream);
  perform pgmb.compile_patterns(create_projection.patterns);
  if jsonb_typeof(create_projection.columns) is distinct from 'array' or create_projection.columns = '[]' then
    raise exception 'a projection needs at least one column' using errcode = 'MB003',
      hint = 'For example [{"name": "total", "type": "decimal(10,2)"}].';
  end if;
  perform pgmb_internal.lock_places();
  select i.identity into installed from pgmb.installation i;
  wanted_url := coalesce(create_projection.url, rtrim(lake.url, '/') || '_' || create_projection.name);
  insert into pgmb.lake_projection (name, stream, url, identity, patterns, columns, bad)
  values (create_projection.name, stream_number, wanted_url, installed, create_projection.patterns,
    create_projection.columns, create_projection.bad)
  on conflict on constraint lake_projection_pkey do nothing;
  select * into found_one from pgmb.lake_projection p where p.name = create_projection.name for update;
  if found_one.stream <> stream_number or found_one.url <> wanted_url and create_projection.url is not null
    or found_one.identity <> installed
  then
    raise exception 'projection % exists, of stream % at %', found_one.name,
      (select s.name from pgmb.stream s where s.id = found_one.stream), found_one.url
      using errcode = 'MB004', hint = 'Drop it first: pgmb lake project drop NAME. Its files stay.';
  end if;
  if (found_one.patterns, found_one.columns, found_one.bad)
    is distinct from (create_projection.patterns, create_projection.columns, create_projection.bad)
  then
    if not create_projection.replace then
      raise exception 'projection % is declared differently', found_one.name using errcode = 'MB004',
        hint = 'Replace the declaration with --replace, then rebuild the table: pgmb lake project backfill NAME.';
    end if;
    update pgmb.lake_projection p
    set patterns = create_projection.patterns, columns = create_projection.columns, bad = create_projection.bad,
      generation = p.generation + 1, segment = null, lake_version = null, table_version = null, rows = 0, rescued = 0,
      dropped = 0, moved_at = null
    where p.name = create_projection.name;
    delete from pgmb.lake_field f where f.projection = create_projection.name;
  end if;
  perform pgmb_internal.assert_places();
  return found_one.url;
end $$;

-- Forgets a projection. Returns the URL of its table, whose files stay; null: there was none.
create or replace function pgmb.drop_projection(name text)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  dropped_url text;
begin
  perform pgmb_internal.assert_admin();
  delete from pgmb.lake_projection p where p.name = drop_projection.name returning p.url into dropped_url;
  return dropped_url;
end $$;

-- A projection as its readers and projectors need it: its declaration, the name under which it commits, the table of the
-- stream's events, and `upto`, the last segment that is verified there with all before it (null: none). For roles that
-- may read the stream. Errors: 42501, MB066 no such projection, or that of the database that this one is a copy of. Support.
create or replace function pgmb.projection_of(
  name text, out stream text, out url text, out source text, out lake_url text, out lake_source text, out patterns text[],
  out columns jsonb, out bad text, out generation integer, out upto integer
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  found_one pgmb.lake_projection;
  installed uuid;
begin
  select * into found_one from pgmb.lake_projection p where p.name = projection_of.name;
  select i.identity into installed from pgmb.installation i;
  if found_one.name is null or found_one.identity <> installed then
    raise exception 'there is no projection %', projection_of.name using errcode = 'MB066',
      hint = case when found_one.name is null then 'List them: pgmb lake project list.'
        else 'This database is a copy: drop the projection and declare it with another URL.' end;
  end if;
  select s.name, format('pgmb:%s:%s', installed, s.salt), l.url into stream, lake_source, lake_url
  from pgmb.stream s left join pgmb.lake l on l.stream = s.id where s.id = found_one.stream;
  perform pgmb_internal.assert_reader(stream);
  url := found_one.url;
  source := format('%s:%s', lake_source, found_one.name);
  patterns := found_one.patterns;
  columns := found_one.columns;
  bad := found_one.bad;
  generation := found_one.generation;
  select max(a.segment) into upto from pgmb.archived a
  where a.stream = found_one.stream and a.verified_at is not null and a.segment < coalesce((
    select min(g.number) from pgmb.segment g
    where g.stream = found_one.stream and g.dropped_at is null and not exists (
      select from pgmb.archived v where v.stream = g.stream and v.segment = g.number and v.verified_at is not null)), 2147483647);
end $$;

-- Every projection: its declaration, the URL of its table, and where it stood when a projector last recorded it. upto: the last
-- segment of its stream that it could have.
create or replace function pgmb.describe_projections(
  out name text, out stream text, out url text, out patterns text[], out columns jsonb, out bad text, out generation integer,
  out segment integer, out upto integer, out lake_version bigint, out table_version bigint, out rows bigint, out rescued bigint,
  out dropped bigint, out moved_at timestamptz, out created_at timestamptz
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select p.name, s.name, p.url, p.patterns, p.columns, p.bad, p.generation, p.segment,
    case when p.identity = i.identity then (select o.upto from pgmb.projection_of(p.name) o) end,
    p.lake_version, p.table_version, p.rows, p.rescued, p.dropped, p.moved_at, p.created_at
  from pgmb.lake_projection p join pgmb.stream s on s.id = p.stream cross join pgmb.installation i
  order by p.name;
end $$;

-- The fields at the top of the payloads that a projection has seen, with each JSON type that they had (string, number, boolean,
-- object, array, null), from which event to which. Errors: MB066. Support.
create or replace function pgmb.describe_fields(
  projection text, out field text, out kind text, out first_seq bigint, out last_seq bigint, out first_at timestamptz,
  out last_at timestamptz
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.projection_of(describe_fields.projection);
  return query
  select f.field, f.kind, f.first_seq, f.last_seq, f.first_at, f.last_at
  from pgmb.lake_field f where f.projection = describe_fields.projection order by f.field, f.kind;
end $$;

-- Lets one projector at a time work on a projection: whether this session holds the lock now, after waiting for up to
-- 2 s. It ends with the session. As with lock_lake(), it only saves work: the table's commits are what is safe. Errors: MB066.
-- Support.
create or replace function pgmb.lock_projection(name text)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb.projection_of(lock_projection.name);
  return pgmb_internal.try_session_lock('projection ' || lock_projection.name);
end $$;

-- Records what version table_version of a projection's table says of itself. It can be repeated, and an older version changes
-- nothing. Returns whether it was recorded. Support.
create or replace function pgmb.record_projection(
  name text, generation integer, segment integer, lake_version bigint, table_version bigint, rows bigint, rescued bigint,
  dropped bigint
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  update pgmb.lake_projection p
  set segment = record_projection.segment, lake_version = record_projection.lake_version,
    table_version = record_projection.table_version, rows = record_projection.rows, rescued = record_projection.rescued,
    dropped = record_projection.dropped, moved_at = clock_timestamp()
  where p.name = record_projection.name and p.generation = record_projection.generation
    and (p.table_version is null or p.table_version <= record_projection.table_version);
  return found;
end $$;

-- Records fields of payloads and their JSON types, from which event to which. It can be repeated. Of undeclared fields at most
-- 200 are kept: payloads may have names that are data. Support.
create or replace function pgmb.record_fields(
  projection text, generation integer, fields text[], kinds text[], first_seqs bigint[], last_seqs bigint[],
  first_times timestamptz[], last_times timestamptz[]
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  -- Locks the declaration: fields of another one are not recorded.
  perform from pgmb.lake_projection p
  where p.name = record_fields.projection and p.generation = record_fields.generation for update;
  if not found then
    return;
  end if;
  insert into pgmb.lake_field as f (projection, field, kind, first_seq, last_seq, first_at, last_at)
  select record_fields.projection, left(given.field, 200), given.kind, min(given.first_seq), max(given.last_seq),
    min(given.first_at), max(given.last_at)
  from unnest(record_fields.fields, record_fields.kinds, record_fields.first_seqs, record_fields.last_seqs,
    record_fields.first_times, record_fields.last_times) given (field, kind, first_seq, last_seq, first_at, last_at)
  group by 2, 3
  on conflict on constraint lake_field_pkey do update
  set first_seq = least(f.first_seq, excluded.first_seq), last_seq = greatest(f.last_seq, excluded.last_seq),
    first_at = least(f.first_at, excluded.first_at), last_at = greatest(f.last_at, excluded.last_at);
  delete from pgmb.lake_field f
  where f.projection = record_fields.projection and f.field in (
    select o.field from pgmb.lake_field o
    where o.projection = record_fields.projection and not exists (
      select from pgmb.lake_projection p, jsonb_array_elements(p.columns) c
      where p.name = o.projection and coalesce(c -> 'path' ->> 0, c ->> 'name') = o.field)
    group by o.field order by min(o.first_seq), o.field offset 200);
end $$;
