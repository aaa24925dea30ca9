-- Publishing. All of it runs with the caller's own rights: a grant on the log is the whole permission, and
-- COPY pgmb.log_<stream> (topic, payload) needs and gets the same.

-- The id of an event that was published without one: a version 7 UUID made of its time and number, the
-- same whenever it is read; times that 48 bits of milliseconds cannot hold are cut off. Called by pgmb.publish and by
-- readers of the log itself; salt: see pgmb.identify. Support.
create or replace function pgmb.derive_id(seq bigint, published_at timestamptz, salt bigint)
returns uuid
language sql stable parallel safe
as $$
  select (substr(to_hex(greatest(0, least(date_part('epoch', published_at) * 1000, 281474976710655))::bigint
      | 281474976710656), 2) || '7'
    || substr(to_hex(salt | (-9223372036854775808)::bigint), 14)
    || to_hex(((seq + salt) & 4611686018427387903) | (-9223372036854775808)::bigint))::uuid
$$;

-- A fresh version 7 UUID for an event that has no number yet. Called by pgmb.publish. Support.
create or replace function pgmb.fresh_id()
returns uuid
language sql volatile
as $$
  select ('0' || to_hex((date_part('epoch', clock_timestamp()) * 1000)::bigint) || '7'
    || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid
$$;

-- Publishes one event and returns its id. It is delivered when the caller's transaction commits.
-- delay, at: when it enters the log; no limit. dedup_key: if the stream had an event under this key within
-- dedup_for, publishes nothing and returns that event's id; waits for a transaction that is publishing
-- under the same key. Writes the stream's log, or pgmb.delayed, and pgmb.dedup. No other lock. Errors: MB001 no
-- such stream, MB005 not a key, MB040 a queue of the stream is full, 23514 a topic that is
-- empty, has more than 255 bytes, * or #, a key of more than 1,000 bytes, a payload of more than 48 MiB, headers of more
-- than 16 MiB, or more of both than the stream's max_event_bytes.
create or replace function pgmb.publish(
  topic text, payload json, key text default null, headers json default null,
  stream text default 'main', id uuid default null, delay interval default null, at timestamptz default null,
  dedup_key text default null, dedup_for interval default '1 day'
)
returns uuid
language plpgsql
as $$
declare
  given uuid;
  due timestamptz;
  number bigint;
  written_at timestamptz;
  stream_salt bigint;
begin
  if publish.stream = 'main' and publish.dedup_key is null and publish.delay is null and publish.at is null then
    -- As below, with one condition to evaluate and planned once a session.
    insert into pgmb.log_main as e (id, topic, key, payload, headers)
    values (publish.id, publish.topic, publish.key, publish.payload, publish.headers)
    returning e.seq, e.published_at, (select s.salt from pgmb.stream s where s.name = 'main')
    into number, written_at, stream_salt;
    return coalesce(publish.id, pgmb.derive_id(number, written_at, stream_salt));
  end if;
  if publish.dedup_key is not null then
    perform pgmb.stream_id(publish.stream);
    publish.id := coalesce(publish.id, pgmb.fresh_id());
    given := pgmb.claim_key(publish.stream, publish.dedup_key, publish.id, publish.dedup_for);
    if given is not null then
      return given;
    end if;
  end if;
  if publish.delay is not null or publish.at is not null then
    due := coalesce(publish.at, pg_catalog.clock_timestamp() + publish.delay);
    if due > pg_catalog.clock_timestamp() then
      perform pgmb.stream_id(publish.stream);
      given := coalesce(publish.id, pgmb.fresh_id());
      insert into pgmb.delayed (id, stream, due_at, decided_at, topic, key, payload, headers)
      values (given, publish.stream, due, case when publish.at is null then pg_catalog.clock_timestamp() end, publish.topic, publish.key, publish.payload, publish.headers);
      return given;
    end if;
  end if;
  if pg_catalog.to_regclass(pg_catalog.format('pgmb.%I', 'log_' || publish.stream)) is null then
    perform pgmb.stream_id(publish.stream);
  end if;
  execute pg_catalog.format('insert into pgmb.%I as e (id, topic, key, payload, headers) values ($1, $2, $3, $4, $5)
      returning e.seq, e.published_at, (select s.salt from pgmb.stream s where s.name = $6)', 'log_' || publish.stream)
  into number, written_at, stream_salt
  using publish.id, publish.topic, publish.key, publish.payload, publish.headers, publish.stream;
  return coalesce(publish.id, pgmb.derive_id(number, written_at, stream_salt));
end $$;

-- Publishes many events of one topic and returns their number. They come in the array's order.
create or replace function pgmb.publish_many(
  topic text, payloads json[], headers json default null, stream text default 'main'
)
returns bigint
language plpgsql
as $$
declare
  -- The type checks the topic here, once, instead of for every event.
  checked pgmb.event_topic := publish_many.topic;
  published bigint;
begin
  if publish_many.stream = 'main' then
    -- As below; planned once a session.
    insert into pgmb.log_main (topic, payload, headers)
    select checked, pg_catalog.unnest(publish_many.payloads), publish_many.headers;
    get diagnostics published = row_count;
    return published;
  end if;
  if pg_catalog.to_regclass(pg_catalog.format('pgmb.%I', 'log_' || publish_many.stream)) is null then
    perform pgmb.stream_id(publish_many.stream);
  end if;
  execute pg_catalog.format('insert into pgmb.%I (topic, payload, headers)
      select $1, pg_catalog.unnest($2), $3', 'log_' || publish_many.stream)
  using checked, publish_many.payloads, publish_many.headers;
  get diagnostics published = row_count;
  return published;
end $$;

-- Publishes many events, each with its own topic, key, headers and id, and returns their number. Omitted arrays
-- are null for every event; the others must be as long as payloads. Events whose dedup_key is taken (see publish) or
-- repeated within the array are not published and not counted.
create or replace function pgmb.publish_many(
  topics text[], payloads json[], keys text[] default null, headers json[] default null,
  ids uuid[] default null, stream text default 'main', dedup_keys text[] default null,
  dedup_for interval default '1 day'
)
returns bigint
language plpgsql
as $$
declare
  published bigint;
  events integer := pg_catalog.cardinality(publish_many.payloads);
  keyed record;
  repeated boolean[];
begin
  if pg_catalog.to_regclass(pg_catalog.format('pgmb.%I', 'log_' || publish_many.stream)) is null then
    perform pgmb.stream_id(publish_many.stream);
  end if;
  if pg_catalog.cardinality(publish_many.topics) <> events
    or coalesce(pg_catalog.cardinality(publish_many.keys), events) <> events
    or coalesce(pg_catalog.cardinality(publish_many.headers), events) <> events
    or coalesce(pg_catalog.cardinality(publish_many.ids), events) <> events
    or coalesce(pg_catalog.cardinality(publish_many.dedup_keys), events) <> events
  then
    raise exception 'arrays of different lengths' using errcode = 'MB005',
      hint = 'topics, payloads and, where given, keys, headers, ids and dedup_keys need one element per event.';
  end if;
  if publish_many.dedup_keys is not null and events > 0 then
    publish_many.ids := coalesce(array(select pg_catalog.unnest(publish_many.ids)), '{}');
    publish_many.ids[events] := publish_many.ids[events];
    repeated := pg_catalog.array_fill(false, array[events]);
    -- In the keys' order, so that no two of these wait for one another.
    for keyed in
      select given.dedup_key, given.place
      from pg_catalog.unnest(publish_many.dedup_keys) with ordinality given (dedup_key, place)
      where given.dedup_key is not null
      order by given.dedup_key collate "C", given.place
    loop
      publish_many.ids[keyed.place] := coalesce(publish_many.ids[keyed.place], pgmb.fresh_id());
      repeated[keyed.place] := pgmb.claim_key(publish_many.stream, keyed.dedup_key,
        publish_many.ids[keyed.place], publish_many.dedup_for) is not null;
    end loop;
    execute pg_catalog.format('insert into pgmb.%I (id, topic, key, payload, headers)
        select event.id, event.topic, event.key, event.payload, event.headers
        from unnest($1, $2, $3, $4, $5, $6) event (id, topic, key, payload, headers, repeated)
        where not event.repeated',
      'log_' || publish_many.stream)
    using publish_many.ids, publish_many.topics, publish_many.keys, publish_many.payloads, publish_many.headers,
      repeated;
  else
    execute pg_catalog.format('insert into pgmb.%I (id, topic, key, payload, headers)
        select event.id, event.topic, event.key, event.payload, event.headers
        from unnest($1, $2, $3, $4, $5) event (id, topic, key, payload, headers)',
      'log_' || publish_many.stream)
    using publish_many.ids, publish_many.topics, publish_many.keys, publish_many.payloads, publish_many.headers;
  end if;
  get diagnostics published = row_count;
  return published;
end $$;

-- Cancels an event that was published with a delay and is not yet due. The caller knows its id and may publish to its
-- stream. True if it was there.
create or replace function pgmb.cancel(id uuid)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from pgmb.delayed d where d.id = cancel.id and pgmb_internal.may_publish(d.stream);
  return found;
end $$;

-- The setting for scans of a stream's delayed events. Names of settings allow fewer characters than names of streams.
create or replace function pgmb_internal.delayed_setting(stream text)
returns text
language sql stable
as $$
  select 'pgmb.delayed_' || encode(convert_to(stream, 'UTF8'), 'hex')
$$;

-- Where a scan for due delayed events of a stream starts, for statements that do not call first_delayed.
create or replace function pgmb_internal.delayed_since(stream text, now timestamptz)
returns timestamptz
language sql stable
as $$
  select pgmb_internal.scan_since(pgmb_internal.delayed_setting(stream), now)
$$;

-- The due time of the first delayed event of a stream that is due; null: none is.
create or replace function pgmb_internal.first_delayed(stream text, now timestamptz)
returns timestamptz
language plpgsql volatile
as $$
declare
  setting_name text := pgmb_internal.delayed_setting(first_delayed.stream);
  read_before bigint := pgmb_internal.entries_read('pgmb.delayed_due');
  passed bigint;
  first timestamptz;
begin
  select d.due_at into first from pgmb.delayed d
  where d.stream = first_delayed.stream and d.due_at <= first_delayed.now
    and d.due_at >= pgmb_internal.scan_since(setting_name, first_delayed.now)
  order by d.due_at limit 1;
  passed := pgmb_internal.entries_read('pgmb.delayed_due') - read_before;
  if pgmb_internal.should_store_scan(setting_name, passed) then
    perform pgmb_internal.store_scan(setting_name, first_delayed.now,
      pgmb_internal.microseconds(coalesce(first, first_delayed.now)), passed);
  end if;
  return first;
end $$;

-- Moves events that are due into the log, at most `max`. Called by receive, tick and maintain; several
-- may call at once. Returns how many. Until the caller's transaction ends, nobody else can move these. topics, regex: those that a
-- receive waits for, its queue's patterns; it looks for them among the first that are due, because the others stay until a
-- tick or maintain() moves them.
create or replace function pgmb_internal.release_due(
  stream text, now timestamptz, max integer default 1000, topics text[] default null, regex text default null
)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  first timestamptz := pgmb_internal.first_delayed(release_due.stream, release_due.now);
  released bigint;
begin
  if first is null then
    return 0;
  end if;
  -- Past the caps: these events were accepted when they were published (guard_stream).
  perform set_config('pgmb.releasing', 'on', true);
  execute format('with due as (
      delete from pgmb.delayed d
      where d.ctid = any (array(
        select later.ctid from pgmb.delayed later
        where later.stream = $1 and later.due_at >= $4 and later.due_at <= $2 %s
        order by later.due_at limit $3 for update skip locked))
      returning d.id, d.topic, d.key, d.payload, d.headers, d.due_at
    )
    insert into pgmb.%I (id, topic, key, payload, headers)
    select due.id, due.topic, due.key, due.payload, due.headers from due order by due.due_at',
    case when release_due.topics is null and release_due.regex is null then '' else
      'and later.ctid = any (array(
          select near.ctid from pgmb.delayed near
          where near.stream = $1 and near.due_at >= $4 and near.due_at <= $2 order by near.due_at limit 4 * $3))
        and ($5 is null or later.topic = any ($5)) and ($6 is null or later.topic ~ $6)' end,
    'log_' || release_due.stream)
  using release_due.stream, release_due.now, release_due.max, first, release_due.topics, release_due.regex;
  get diagnostics released = row_count;
  perform set_config('pgmb.releasing', 'off', true);
  if released > 0 then
    -- Readers see the events as soon as this commits. A crash must not take that back: they would be released again.
    perform set_config('pgmb.released', 'on', true);
    if current_setting('synchronous_commit') = 'off' then
      perform set_config('synchronous_commit', c.reset_val, true) from pg_settings c where c.name = 'synchronous_commit';
    end if;
  end if;
  return released;
end $$;

-- Lets the transaction commit without waiting for the disk, unless it has released delayed events.
create or replace function pgmb_internal.commit_lazily()
returns text
language sql volatile
as $$
  select case when coalesce(current_setting('pgmb.released', true), '') = '' then set_config('synchronous_commit', 'off', true) end
$$;
