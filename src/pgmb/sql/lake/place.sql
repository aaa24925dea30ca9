-- Places: the URLs of the tables of lakes, dead letters and projections. No table lies inside another one's folder, because
-- whatever cares for a table treats the files below its URL as that table's.

-- A URL as places are compared: one spelling of the scheme, no empty or dot segments, and a slash at the end. Errors: MB003 it has
-- a segment "..".
create or replace function pgmb_internal.place_of(url text)
returns text
language plpgsql immutable
as $$
declare
  place text := regexp_replace(regexp_replace(place_of.url, '^file://', ''), '^s3[an]://', 's3://', 'i');
  scheme text := lower(coalesce(substring(place from '^[A-Za-z][A-Za-z0-9+.-]*://'), ''));
  path text := substr(place, length(scheme) + 1) || '/';
begin
  if path ~ '(^|/)\.\.(/|$)' then
    raise exception 'the URL % has a segment ".."', quote_literal(place_of.url) using errcode = 'MB003',
      hint = 'Name the folder without "..".';
  end if;
  return scheme || regexp_replace(regexp_replace(path, '/(\./)+', '/', 'g'), '/+', '/', 'g');
end $$;

-- Locks all places to the end of the transaction: of two tables that are declared at once, the second one is compared with the first.
create or replace function pgmb_internal.lock_places()
returns void
language plpgsql
as $$
begin
  perform pg_advisory_xact_lock(pgmb_internal.lock_key('lake places'));
end $$;

-- Raises MB004 if a table of a lake, of dead letters or of a projection lies in the folder of another one, or two have one URL.
-- Tables of archived segments count too, also those of the database that this one is a copy of.
create or replace function pgmb_internal.assert_places()
returns void
language plpgsql
as $$
declare
  nested record;
begin
  with recursive archived (url) as (
    (select a.url from pgmb.archived a where a.url is not null order by a.url limit 1)
    union all
    select (select a.url from pgmb.archived a where a.url > before.url order by a.url limit 1)
    from archived before where before.url is not null
  ), places as (
    select l.url, 'the events of stream ' || s.name holds from pgmb.lake l join pgmb.stream s on s.id = l.stream
    union all
    select l.dead_url, 'the dead letters of stream ' || s.name from pgmb.lake l join pgmb.stream s on s.id = l.stream
    union all
    select p.url, 'projection ' || p.name from pgmb.lake_projection p
    union all
    select a.url, 'archived segments' from archived a
    where a.url is not null and not exists (select from pgmb.lake l where l.url = a.url)
  ), named as materialized (
    select p.*, pgmb_internal.place_of(p.url) place from places p
  )
  select inside.url, inside.holds, outside.url other_url, outside.holds other_holds into nested
  from named outside
  join named inside on starts_with(inside.place, outside.place) and (inside.place, inside.holds) <> (outside.place, outside.holds)
  order by outside.place, inside.place, inside.holds limit 1;
  if found then
    raise exception '% at % would lie in the folder of %, %', nested.holds, nested.url, nested.other_holds, nested.other_url
      using errcode = 'MB004', hint = 'Give each table a folder of its own, beside the others.';
  end if;
end $$;
