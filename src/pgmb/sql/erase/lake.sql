-- Erasures in the lake. The client writes files again and commits them; the database compares digests, as it does for archives
-- (docs/adr/0032, docs/adr/0036).

-- The segments of a stream that an erasure has begun to change in the table, and what they hold before and after. Support.
create or replace function pgmb.lake_erasures(stream text)
returns table (segment integer, epoch integer, events bigint, digest bytea, erased_digest bytea)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  return query
  select a.segment, a.epoch, a.events, a.digest, a.erased_digest
  from pgmb.archived a join pgmb.stream s on s.id = a.stream
  where s.name = lake_erasures.stream and a.verified_at is not null order by a.segment;
end $$;

-- Notes what verified segments of a stream will hold once an erasure has replaced their files: digests[n], where the table holds
-- what it should now. To be called before the commit, so that the table is never without an answer. Errors: MB004, MB062 a
-- segment is not verified with this digest. Support.
create or replace function pgmb.expect_erased(
  erasure uuid, keys text[], stream text, segments integer[], digests_before bytea[], digests_after bytea[]
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  other integer;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(expect_erased.erasure, expect_erased.keys);
  stream_number := pgmb.stream_id(expect_erased.stream);
  select given.segment into other
  from unnest(expect_erased.segments, expect_erased.digests_before) given (segment, digest)
  where not exists (select from pgmb.archived a where a.stream = stream_number and a.segment = given.segment
    and a.verified_at is not null and a.digest = given.digest)
  order by given.segment limit 1;
  if other is not null then
    raise exception 'segment % of stream % is not in the table as it was verified', other, expect_erased.stream
      using errcode = 'MB062', hint = 'Run pgmb lake verify. Repair the table before you erase.';
  end if;
  update pgmb.archived a set erased_digest = given.digest
  from unnest(expect_erased.segments, expect_erased.digests_after) given (segment, digest)
  where a.stream = stream_number and a.segment = given.segment;
end $$;

-- Records that version lake_version of a stream's table holds segments as expect_erased() said: digests[n] are what was read back.
-- Of a segment that the log has, the log's own digest must be the same, if it is of the present epoch. Errors: MB062 they differ, MB004. Support.
create or replace function pgmb.record_erased(
  erasure uuid, keys text[], stream text, segments integer[], digests bytea[], lake_version bigint
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  given record;
  own bytea;
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(record_erased.erasure, record_erased.keys);
  stream_number := pgmb.stream_id(record_erased.stream);
  -- A drop that is under way is waited for.
  perform from pgmb.history h where h.stream = stream_number for share;
  for given in
    -- A rebase() after the archive has changed the log's xids.
    select g.segment, g.digest, a.erased_digest, s.dropped_at is null and a.epoch = i.epoch kept
    from unnest(record_erased.segments, record_erased.digests) g (segment, digest)
    left join pgmb.archived a on a.stream = stream_number and a.segment = g.segment
    left join pgmb.segment s on s.stream = stream_number and s.number = g.segment
    cross join pgmb.installation i
  loop
    own := null;
    if given.kept then
      select d.digest into own from pgmb_internal.digest_leaf(stream_number, given.segment) d;
    end if;
    if given.digest is distinct from given.erased_digest or given.digest <> own then
      raise exception 'segment % of stream % is not in the table as the erasure left it', given.segment, record_erased.stream
        using errcode = 'MB062', hint = 'Run pgmb lake verify.';
    end if;
    update pgmb.archived a
    set digest = given.digest, erased_digest = null, lake_version = record_erased.lake_version
    where a.stream = stream_number and a.segment = given.segment;
  end loop;
end $$;

-- Removes what the database knows of erased events of the lake by their ids: responses of endpoints, deduplication keys. Support.
create or replace function pgmb.erase_lake_traces(erasure uuid, keys text[], stream text, ids uuid[])
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(erase_lake_traces.erasure, erase_lake_traces.keys);
  perform pgmb_internal.erase_traces(erase_lake_traces.erasure, s, erase_lake_traces.ids)
  from pgmb.stream s where s.name = erase_lake_traces.stream;
end $$;

-- Notes files of a table of the lake that an erasure is about to replace, and how many rows of each it erases; files that were
-- noted before do not count again. done: the old files are gone. Support.
create or replace function pgmb.note_lake_erasure(
  erasure uuid, keys text[], stream text, url text, files text[], events bigint[], done boolean default false
)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.erasure_of(note_lake_erasure.erasure, note_lake_erasure.keys);
  insert into pgmb.erasure_table (erasure, name, stream, in_lake)
  values (note_lake_erasure.erasure, note_lake_erasure.url, note_lake_erasure.stream, true)
  on conflict do nothing;
  update pgmb.erasure_table t
  set events = t.events + fresh.events, files = t.files || fresh.files,
    rewritten_at = case when note_lake_erasure.done then clock_timestamp() end
  from (
    select coalesce(sum(g.events), 0) events, coalesce(array_agg(g.file), '{}') files
    from unnest(note_lake_erasure.files, note_lake_erasure.events) g (file, events)
    where not exists (select from pgmb.erasure_table known
      where known.erasure = note_lake_erasure.erasure and known.name = note_lake_erasure.url and g.file = any (known.files))
  ) fresh
  where t.erasure = note_lake_erasure.erasure and t.name = note_lake_erasure.url;
end $$;
