-- Dead letters in the lake: a table of their own for each stream, to which the archiver adds them in batches. It is a history
-- of deaths: a dead letter that is sent back or dropped afterwards stays there, and one that dies again is added again
-- (docs/explanation/lake.md).

-- What an archiver has to know of a stream's dead letters: the URL of their table, the name under which they are committed,
-- the last batch that was verified in this table, and the last one that was planned (null: none). Errors: those of lake_of.
-- Support.
create or replace function pgmb.dead_lake_of(
  stream text, out url text, out source text, out verified bigint, out planned bigint
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  select l.source || ':dead' into dead_lake_of.source from pgmb.lake_of(dead_lake_of.stream) l;
  select l.dead_url, (
    select max(b.number) from pgmb.dead_batch b
    where b.stream = l.stream and b.url = l.dead_url and b.verified_at is not null),
    (select max(b.number) from pgmb.dead_batch b where b.stream = l.stream)
  into dead_lake_of.url, dead_lake_of.verified, dead_lake_of.planned
  from pgmb.lake l where l.stream = pgmb.stream_id(dead_lake_of.stream);
end $$;

-- Plans the next batch: the oldest dead letters of a stream's queues that are not archived, at most `max` of them and about
-- `bytes` bytes of payload and headers, each with the number of the batch. Where there are none, nothing, or with `empty` an
-- empty batch: its number alone. Support.
create or replace function pgmb.plan_dead(
  stream text, max integer default 50000, bytes bigint default 67108864, empty boolean default false
)
returns table (
  batch bigint, id bigint, queue text, died_at timestamptz, attempt integer, error text, seq bigint, event_id text,
  topic text, key text, payload text, headers text, published_at timestamptz, endpoint text
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  next_number bigint;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  perform pgmb_internal.assert_primary();
  stream_number := pgmb.stream_id(plan_dead.stream);
  -- One planner at a time numbers batches.
  perform from pgmb.lake l where l.stream = stream_number for update;
  select coalesce(pg_catalog.max(b.number), 0) + 1 into next_number from pgmb.dead_batch b where b.stream = stream_number;
  -- The table may have the batch as soon as this is committed: its plan must not be lost.
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;
  -- In one statement: dead letters may be sent back or dropped at any time.
  return query
  with letter as materialized (
    select d.id, coalesce(head.name, q.name) queue, d.died_at, d.attempt, d.error, d.seq, d.event_id::text event_id, d.topic,
      d.key, d.payload::text payload, d.headers::text headers, d.published_at, d.endpoint::text endpoint,
      sum(octet_length(d.payload::text) + coalesce(octet_length(d.headers::text), 0)) over (order by d.id)
        - octet_length(d.payload::text) - coalesce(octet_length(d.headers::text), 0) bytes_before
    from (
      select unarchived.* from pgmb.dead unarchived join pgmb.queue of on of.id = unarchived.queue
      where unarchived.archived_at is null and of.stream = stream_number
      order by unarchived.id limit plan_dead.max) d
    join pgmb.queue q on q.id = d.queue
    left join pgmb.queue head on head.id = q.lane_of
  ), chosen as materialized (
    select * from letter l where l.bytes_before < plan_dead.bytes
  ), planned as (
    insert into pgmb.dead_batch (stream, number, ids, events, digest)
    select stream_number, next_number, array_agg(c.id order by c.id), count(*),
      sha256(coalesce(string_agg(sha256(record_send(row(c.id, c.queue, c.died_at, c.attempt, c.error, c.seq, c.event_id, c.topic,
        c.key, c.payload, c.headers, c.published_at, c.endpoint))), '' order by c.id), ''))
    from chosen c having count(*) > 0 or plan_dead.empty
    returning number
  )
  select p.number, c.id, c.queue, c.died_at, c.attempt, c.error, c.seq, c.event_id, c.topic, c.key, c.payload, c.headers,
    c.published_at, c.endpoint
  from planned p left join chosen c on true order by c.id;
end $$;

-- Records that version lake_version of the table of dead letters holds a batch as it was planned: `events` and `digest` are
-- what was read back. From then on its dead letters count as archived. Returns whether it was recorded by this call; false: it
-- had been before. Errors: MB062 they differ, or no such batch was planned here, MB001, MB061.
create or replace function pgmb.record_dead(
  stream text, batch bigint, events bigint, digest bytea, lake_version bigint
)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stream_number integer;
  lake record;
  planned pgmb.dead_batch;
begin
  perform pgmb_internal.assert_read_committed();
  perform pgmb_internal.assert_admin();
  stream_number := pgmb.stream_id(record_dead.stream);
  select * into lake from pgmb.dead_lake_of(record_dead.stream);
  select * into planned from pgmb.dead_batch b
  where b.stream = stream_number and b.number = record_dead.batch for update;
  if planned.number is null then
    raise exception 'batch % of dead letters of stream % was not planned by this database', record_dead.batch,
      record_dead.stream using errcode = 'MB062',
      hint = 'The table is newer than this database, which was restored from an older backup.';
  elsif (planned.events, planned.digest) is distinct from (record_dead.events, record_dead.digest) then
    raise exception 'batch % of dead letters of stream % was planned with % of them, and % are in the table%',
      record_dead.batch, record_dead.stream, planned.events, coalesce(record_dead.events::text, 'none'),
      case when planned.events = record_dead.events then ', whose digests differ' else '' end
      using errcode = 'MB062',
        hint = 'They stay in the database. Run pgmb lake archive --repair to write them again.';
  elsif planned.verified_at is not null then
    return false;
  end if;
  update pgmb.dead d set archived_at = clock_timestamp() where d.id = any (planned.ids);
  update pgmb.dead_batch b
  set ids = null, url = lake.url, lake_version = record_dead.lake_version, verified_at = clock_timestamp()
  where b.stream = stream_number and b.number = record_dead.batch;
  -- Batches that were planned before and never committed.
  delete from pgmb.dead_batch b
  where b.stream = stream_number and b.number < record_dead.batch and b.verified_at is null;
  return true;
end $$;

-- Deletes dead letters that are verified in the lake and older than its keep_dead, and returns how many.
create or replace function pgmb_internal.drop_archived_dead(max integer default 10000)
returns bigint
language plpgsql
as $$
declare
  gone bigint;
  now timestamptz := clock_timestamp();
begin
  if not exists (select from pgmb.lake l where l.keep_dead is not null) then
    return 0;
  end if;
  with dropped as (
    delete from pgmb.dead d
    where d.id = any (array(
      select old.id
      from pgmb.lake l
      join pgmb.queue q on q.stream = l.stream
      join pgmb.dead old on old.queue = q.id
      where old.archived_at is not null and old.died_at + l.keep_dead < now
      limit drop_archived_dead.max for update of old skip locked))
    returning d.queue, d.seq
  ), noted as (
    select pgmb_internal.note_untraced(d.queue, range_agg(int8range(d.seq, d.seq, '[]'))) from dropped d group by d.queue
  )
  select count(*) into gone from dropped cross join (select count(*) from noted) once;
  return gone;
end $$;
