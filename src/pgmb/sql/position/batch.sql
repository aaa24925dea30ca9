-- Batches: what lies between two snapshots, read from the segments in the order of numbers. What receive,
-- between and takeovers share.

-- The present snapshot, with the caller's own transaction unfinished in it, as it is. pg_current_snapshot()
-- leaves it out of its list, so that once a later transaction has finished it would count as finished too,
-- and what it publishes from now on as read. Inlined.
create or replace function pgmb_internal.snapshot()
returns pg_snapshot
language sql volatile
as $$
  select case when pg_catalog.pg_current_xact_id_if_assigned() is null then pg_catalog.pg_current_snapshot()
    else pgmb_internal.with_own(pg_catalog.pg_current_snapshot(), pg_catalog.pg_current_xact_id()) end
$$;

-- A snapshot with the transaction `own` unfinished in it; as it is where `own` is null.
create or replace function pgmb_internal.with_own(taken pg_snapshot, own xid8)
returns pg_snapshot
language sql immutable
as $$
  select case
    when own is null or not pg_catalog.pg_visible_in_snapshot(own, taken) then taken
    else pg_catalog.format('%s:%s:%s', pg_catalog.pg_snapshot_xmin(taken), pg_catalog.pg_snapshot_xmax(taken), (
      select pg_catalog.string_agg(x::text, ',' order by x)
      from (select pg_catalog.pg_snapshot_xip(taken) union all select own) unfinished (x)))::pg_snapshot
  end
$$;

-- The present snapshot, with what the caller's own transaction wrote visible in it.
create or replace function pgmb_internal.snapshot_with_own()
returns pg_snapshot
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  own xid8 := pg_current_xact_id_if_assigned();
  taken pg_snapshot := pg_current_snapshot();
begin
  if own is null or pg_visible_in_snapshot(own, taken) then
    return taken;
  end if;
  -- What has an id between the newest that ended and our own is unfinished like those listed.
  return format('%s:%s:%s', pg_snapshot_xmin(taken), own::text::bigint + 1, (
    select string_agg(x::text, ',' order by x)
    from (
      select pg_snapshot_xip(taken)
      union all
      select g::text::xid8 from generate_series(pg_snapshot_xmax(taken)::text::bigint, own::text::bigint - 1) g
    ) unfinished (x)));
end $$;

-- What is committed by now, as the end of a batch: the present snapshot, and a number above which it shows no event. The
-- sequence is read after the snapshot. The other way round, events whose numbers were given out in between would lie above the
-- batch, and the next one would count them as read.
create or replace function pgmb_internal.boundary(numbers regclass, out snapshot pg_snapshot, out last bigint)
language plpgsql volatile
as $$
begin
  snapshot := pgmb_internal.snapshot();
  last := coalesce(pg_sequence_last_value(boundary.numbers), 0);
end $$;

-- The SQL that reads from one segment the main part of a batch: $1 < seq <= $2, visible in $3 and not in
-- $5. The two xid comparisons spare the snapshot look-ups for all but a few events.
create or replace function pgmb_internal.main_part(leaf text, columns text, matching text)
returns text
language sql immutable parallel safe
as $$
  select 'select ' || columns || ' from ' || leaf || ' e where e.seq > $1 and e.seq <= $2'
    || ' and (e.xid < $4 or pg_visible_in_snapshot(e.xid, $3))'
    || ' and (e.xid >= $6 or not pg_visible_in_snapshot(e.xid, $5))' || matching || ' order by e.seq'
$$;

-- The columns of pgmb.event out of a log, ids derived where none was given (pgmb.derive_id).
create or replace function pgmb_internal.event_columns(salt bigint)
returns text
language sql immutable parallel safe
as $$
  select 'e.seq, coalesce(e.id, '
    || '(substr(to_hex(greatest(0, least(date_part(''epoch'', e.published_at) * 1000, 281474976710655))::bigint'
    || ' | 281474976710656), 2) || ''7' || substr(to_hex(salt | (-9223372036854775808)::bigint), 14)
    || ''' || to_hex(((e.seq + ' || salt || ') & 4611686018427387903) | (-9223372036854775808)::bigint))::uuid)'
    || ', e.topic::text, e.key::text, e.payload::json, e.headers::json, e.published_at'
$$;

-- The columns by which a receive gives events of a stream. raw: ids that nobody gave stay null.
create or replace function pgmb_internal.columns_of(stream integer, raw boolean)
returns text
language plpgsql stable
as $$
begin
  if raw then
    return 'e.seq, e.id, e.topic::text, e.key::text, e.payload::json, e.headers::json, e.published_at';
  end if;
  return pgmb_internal.event_columns((select s.salt from pgmb.stream s where s.id = columns_of.stream));
end $$;

-- The body of a function by which a receive reads a few events of a segment, planned once in a session: those of a batch, as
-- pgmb_internal.main_part, or those with some `numbers`, in their order.
create or replace function pgmb_internal.reader_body(stream integer, number bigint, numbered boolean)
returns text
language sql stable
as $$
  select string_agg(format('
    %1$s
      return query
      select given, e.seq, %2$s, e.topic::text, e.key::text, e.payload::json, e.headers::json, e.published_at, 1
      from %3$s;', one.condition, one.id, case when numbered
      then format('unnest(numbers) with ordinality n (number, nth)
        cross join lateral (select * from pgmb.segment_%s_%s s where s.seq = n.number limit 1) e order by n.nth', stream, number)
      else format('pgmb.segment_%s_%s e
      where e.seq > lo and e.seq <= hi
        and (e.xid < batch_xmin or pg_visible_in_snapshot(e.xid, batch))
        and (e.xid >= done_xmax or not pg_visible_in_snapshot(e.xid, done))
        and (topics is null or e.topic = any (topics)) and (regex is null or e.topic ~ regex)
      order by e.seq', stream, number) end), '' order by one.condition desc) || '
    end if;'
  from (values ('if raw then', 'e.id'),
    ('else', format('coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, (select s.salt from pgmb.stream s where s.id = %s)))',
      stream))) one (condition, id)
$$;

-- The body of a function that gives the numbers of a batch's events in (lo, hi], a range of this segment.
create or replace function pgmb_internal.numbers_body(stream integer, number bigint)
returns text
language sql immutable
as $$
  select format('
      return array(
        select e.seq from pgmb.segment_%s_%s e
        where e.seq > lo and e.seq <= hi
          and (e.xid < batch_xmin or pg_visible_in_snapshot(e.xid, batch))
          and (e.xid >= done_xmax or not pg_visible_in_snapshot(e.xid, done))
          and (topics is null or e.topic = any (topics)) and (regex is null or e.topic ~ regex)
        order by e.seq);', stream, number)
$$;

-- The body of a function that tells whether each number of (lo, hi], a range of this segment, is an event of a batch.
create or replace function pgmb_internal.dense_body(stream integer, number bigint)
returns text
language sql immutable
as $$
  select format('
      return (
        select count(*) = hi - lo from pgmb.segment_%s_%s e
        where e.seq > lo and e.seq <= hi
          and (e.xid < batch_xmin or pg_visible_in_snapshot(e.xid, batch))
          and (e.xid >= done_xmax or not pg_visible_in_snapshot(e.xid, done)));', stream, number)
$$;

-- The body of a function that gives the next events of a batch in (lo, hi], a range of this segment, for a queue with a policy.
-- mask: 0, or the number of the queue's shards less one; shard: the one that is read.
create or replace function pgmb_internal.candidates_body(stream integer, number bigint)
returns text
language sql immutable
as $$
  select format('
      return query
      select e.seq, e.key::text, e.published_at from pgmb.segment_%s_%s e
      where e.seq > lo and e.seq <= hi
        and (e.xid < batch_xmin or pg_visible_in_snapshot(e.xid, batch))
        and (e.xid >= done_xmax or not pg_visible_in_snapshot(e.xid, done))
        and (topics is null or e.topic = any (topics)) and (regex is null or e.topic ~ regex)
        and (mask = 0 or case when e.key is null then e.seq else hashtext(e.key)::bigint end & mask = shard)
      order by e.seq limit most;', stream, number)
$$;

-- Creates the functions by which a receive reads a few events of a segment, of a batch or by their numbers; the numbers of a
-- batch; and candidates for a queue with a policy. topics, regex: the queue's patterns, compiled.
create or replace function pgmb_internal.create_reader(stream integer, number integer)
returns void
language plpgsql
as $$
begin
  execute format('create or replace function pgmb_internal.read_%1$s_%2$s(
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, given uuid, raw boolean,
      topics text[], regex text)
    returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
      published_at timestamptz, attempt integer)
    language plpgsql
    as $read$
    begin %3$s
    end $read$;
    create or replace function pgmb_internal.numbers_%1$s_%2$s(
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, topics text[], regex text)
    returns bigint[]
    language plpgsql
    as $read$
    begin %4$s
    end $read$;
    create or replace function pgmb_internal.dense_%1$s_%2$s(
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8)
    returns boolean
    language plpgsql
    as $read$
    begin %7$s
    end $read$;
    create or replace function pgmb_internal.candidates_%1$s_%2$s(
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, topics text[], regex text,
      mask integer, shard integer, most bigint)
    returns table (seq bigint, key text, published_at timestamptz)
    language plpgsql
    as $read$
    begin %5$s
    end $read$;
    create or replace function pgmb_internal.numbered_%1$s_%2$s(numbers bigint[], given uuid, raw boolean)
    returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
      published_at timestamptz, attempt integer)
    language plpgsql
    as $read$
    begin %6$s
    end $read$;
    revoke all on function pgmb_internal.read_%1$s_%2$s, pgmb_internal.numbers_%1$s_%2$s, pgmb_internal.candidates_%1$s_%2$s,
      pgmb_internal.numbered_%1$s_%2$s, pgmb_internal.dense_%1$s_%2$s from public',
    stream, number, pgmb_internal.reader_body(stream, number, false), pgmb_internal.numbers_body(stream, number),
    pgmb_internal.candidates_body(stream, number), pgmb_internal.reader_body(stream, number, true),
    pgmb_internal.dense_body(stream, number));
end $$;

-- Creates the functions by which receives and claims read a few events of the stream main, anew for each segment that opens:
-- they read that one without dynamic SQL, which would be a fifth of a receive of one event, and the others by their own functions.
create or replace function pgmb_internal.create_main_reader(stream integer, number bigint)
returns void
language plpgsql
as $$
begin
  execute format('create or replace function pgmb_internal.read_main(segment bigint,
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, given uuid, raw boolean,
      topics text[], regex text)
    returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
      published_at timestamptz, attempt integer)
    language plpgsql
    as $read$
    begin
      if segment <> %2$s then
        return query execute ''select * from pgmb_internal.read_%1$s_'' || segment || ''($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)''
        using lo, hi, batch, batch_xmin, done, done_xmax, given, raw, topics, regex;
        return;
      end if; %3$s
    end $read$;
    create or replace function pgmb_internal.numbers_main(segment bigint,
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, topics text[], regex text)
    returns bigint[]
    language plpgsql
    as $read$
    begin
      if segment <> %2$s then
        return pgmb_internal.numbers_in(%1$s, segment, lo, hi, batch, done, topics, regex);
      end if; %4$s
    end $read$;
    create or replace function pgmb_internal.dense_main(segment bigint,
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8)
    returns boolean
    language plpgsql
    as $read$
    begin
      if segment <> %2$s then
        return pgmb_internal.dense_in(%1$s, segment, lo, hi, batch, done);
      end if; %7$s
    end $read$;
    create or replace function pgmb_internal.candidates_main(segment bigint,
      lo bigint, hi bigint, batch pg_snapshot, batch_xmin xid8, done pg_snapshot, done_xmax xid8, topics text[], regex text,
      mask integer, shard integer, most bigint)
    returns table (seq bigint, key text, published_at timestamptz)
    language plpgsql
    as $read$
    begin
      if segment <> %2$s then
        return query execute
          ''select * from pgmb_internal.candidates_%1$s_'' || segment || ''($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)''
        using lo, hi, batch, batch_xmin, done, done_xmax, topics, regex, mask, shard, most;
        return;
      end if; %5$s
    end $read$;
    create or replace function pgmb_internal.numbered_main(segment bigint, numbers bigint[], given uuid, raw boolean)
    returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
      published_at timestamptz, attempt integer)
    language plpgsql
    as $read$
    begin
      if segment <> %2$s then
        return query execute ''select * from pgmb_internal.numbered_%1$s_'' || segment || ''($1, $2, $3)''
        using numbers, given, raw;
        return;
      end if; %6$s
    end $read$;
    revoke all on function pgmb_internal.read_main, pgmb_internal.numbers_main, pgmb_internal.candidates_main,
      pgmb_internal.numbered_main, pgmb_internal.dense_main from public',
    stream, number, pgmb_internal.reader_body(stream, number, false), pgmb_internal.numbers_body(stream, number),
    pgmb_internal.candidates_body(stream, number), pgmb_internal.reader_body(stream, number, true),
    pgmb_internal.dense_body(stream, number));
end $$;

-- The numbers of a batch's events in (lo, hi], a range of one segment.
create or replace function pgmb_internal.numbers_in(
  stream integer, segment bigint, lo bigint, hi bigint, batch pg_snapshot, done pg_snapshot, topics text[], regex text
)
returns bigint[]
language plpgsql
as $$
declare
  numbers bigint[];
begin
  execute format('select pgmb_internal.numbers_%s_%s($1, $2, $3, $4, $5, $6, $7, $8)', stream, segment)
  into numbers
  using lo, hi, batch, pg_snapshot_xmin(batch), done, pg_snapshot_xmax(done), topics, regex;
  return numbers;
end $$;

-- Whether each number of (lo, hi], a range of one segment, is an event of a batch.
create or replace function pgmb_internal.dense_in(
  stream integer, segment bigint, lo bigint, hi bigint, batch pg_snapshot, done pg_snapshot
)
returns boolean
language plpgsql
as $$
declare
  dense boolean;
begin
  execute format('select pgmb_internal.dense_%s_%s($1, $2, $3, $4, $5, $6)', stream, segment)
  into dense
  using lo, hi, batch, pg_snapshot_xmin(batch), done, pg_snapshot_xmax(done);
  return dense;
end $$;

-- Drops the functions that read segments which are gone.
create or replace function pgmb_internal.drop_readers()
returns void
language plpgsql
as $$
declare
  gone regprocedure;
begin
  for gone in
    select p.oid from pg_proc p
    where p.pronamespace = 'pgmb_internal'::regnamespace and p.proname ~ '^(read|numbers|candidates|numbered|dense)_[0-9]+_[0-9]+$'
      and to_regclass('pgmb.segment_' || substring(p.proname from '[0-9]+_[0-9]+$')) is null
  loop
    execute format('drop function %s', gone);
  end loop;
end $$;

-- The batch between two positions.
create or replace function pgmb_internal.batch_between(after pgmb.position, upto pgmb.position)
returns pgmb.batch
language sql immutable
as $$
  select row((after).snapshot, (after).seq, (after).next, (upto).snapshot)::pgmb.batch
$$;

-- The events of a batch with lo < seq <= hi, in seq order, at most `max`. Stragglers, transactions unfinished in its `done`,
-- are found by xid at or below done_seq; above it the log is walked. raw: ids that the publisher did not set stay null.
create or replace function pgmb_internal.batch_events(
  stream integer, batch pgmb.batch, lo bigint, hi bigint, matching text, max bigint default 9223372036854775807,
  raw boolean default false
)
returns setof pgmb.event
language plpgsql volatile
as $$
declare
  columns text := pgmb_internal.columns_of(stream, raw);
  unfinished xid8[];
  seg record;
  got bigint := 0;
  part bigint;
  place bigint;
begin
  if lo < batch.done_seq then
    unfinished := array(select x from pg_snapshot_xip(batch.done) x
      where x <= batch.done_next and pg_visible_in_snapshot(x, batch.seen));
    for seg in
      select format('pgmb.segment_%s_%s', s.stream, s.number) leaf, pgmb_internal.first_number(s.number) first
      from pgmb.segment s
      where (cardinality(unfinished) > 0 or batch.done_next >= pg_snapshot_xmax(batch.done))
        and s.stream = batch_events.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(least(hi, batch.done_seq))
        and s.dropped_at is null and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin(batch.done))
      order by s.number
    loop
      exit when got >= max;
      place := lo;
      -- A transaction that wrote much is met in the middle of it from the second call on: there, and where little is
      -- asked for, the numbers are walked. Its events by xid would be all of them, each time.
      while place > seg.first and place < least(hi, batch.done_seq) and got < max loop
        return query execute format(
            'select %1$s from %2$s e where e.seq > $2 and e.seq <= $3'
            ' and (e.xid = any ($1) or e.xid >= $4 and e.xid <= $5 and pg_visible_in_snapshot(e.xid, $6)) %3$s'
            ' order by e.seq limit $7', columns, seg.leaf, matching)
          using unfinished, place, least(place + 2000, hi, batch.done_seq), pg_snapshot_xmax(batch.done), batch.done_next, batch.seen, max - got;
        get diagnostics part = row_count;
        got := got + part;
        place := place + 2000;
        exit when part = 0;
      end loop;
      continue when got >= max or place >= least(hi, batch.done_seq);
      -- seq + 0, so that a table never analyzed is not walked by seq instead.
      return query execute format(
          'select * from (select %1$s from %2$s e where e.xid = any ($1) and e.seq + 0 > $2 and e.seq + 0 <= $3 %3$s'
          ' union all'
          ' select %1$s from %2$s e where e.xid >= $4 and e.xid <= $5'
          '   and pg_visible_in_snapshot(e.xid, $6) and e.seq + 0 > $2 and e.seq + 0 <= $3 %3$s'
          ') straggler order by seq limit $7',
          columns, seg.leaf, matching)
        using unfinished, place, least(hi, batch.done_seq), pg_snapshot_xmax(batch.done), batch.done_next, batch.seen, max - got;
      get diagnostics part = row_count;
      got := got + part;
    end loop;
  end if;
  for seg in
    select format('pgmb.segment_%s_%s', s.stream, s.number) leaf
    from pgmb.segment s
    where s.stream = batch_events.stream and hi > batch.done_seq
      and s.number between pgmb_internal.segment_of(greatest(lo, batch.done_seq)) and pgmb_internal.segment_of(hi) and s.dropped_at is null
      and (s.max_xid is null or s.max_xid >= pg_snapshot_xmin(batch.done))
    order by s.number
  loop
    exit when got >= max;
    return query execute pgmb_internal.main_part(seg.leaf, columns, matching) || ' limit $7'
      using greatest(lo, batch.done_seq), hi, batch.seen, pg_snapshot_xmin(batch.seen), batch.done, pg_snapshot_xmax(batch.done),
        max - got;
    get diagnostics part = row_count;
    got := got + part;
  end loop;
end $$;

-- The rows e of a segment that have the numbers $1 and match, in their order: the end of a SELECT, from its FROM clause on. Where
-- the numbers are in order and close together, all between are walked. ascend: they are in order; null: not known.
create or replace function pgmb_internal.numbered_rows(
  leaf text, numbers bigint[], matching text, ascend boolean default null
)
returns text
language plpgsql immutable
as $$
declare
  first bigint := numbers[1];
  last bigint := numbers[cardinality(numbers)];
begin
  if first = last then
    -- A single event, which most retries are, costs less to plan.
    return format(' from %s e where e.seq = ($1)[1] %s', leaf, matching);
  elsif last - first < 8 * cardinality(numbers) and coalesce(ascend, pgmb_internal.ascend(numbers)) then
    return format(' from %s e where e.seq >= ($1)[1] and e.seq <= ($1)[cardinality($1)]%s %s order by e.seq', leaf,
      case when last - first >= cardinality(numbers) then ' and e.seq + 0 = any ($1)' end, matching);
  end if;
  -- Each by itself, whatever the planner believes of the table.
  return format(' from (select number from unnest($1) n (number) order by number) n
    cross join lateral (select * from %s s where s.seq = n.number limit 1) e where true %s order by n.number', leaf, matching);
end $$;

-- Whether numbers are in order.
create or replace function pgmb_internal.ascend(numbers bigint[])
returns boolean
language plpgsql immutable
as $$
begin
  return numbers = array(select one from unnest(numbers) one order by one);
end $$;

-- The events of a stream that have these numbers, in their order. raw: ids that the publisher did not set stay null.
create or replace function pgmb_internal.numbered_events(stream integer, numbers bigint[], matching text default '', raw boolean default false)
returns setof pgmb.event
language plpgsql volatile
as $$
declare
  columns text := pgmb_internal.columns_of(stream, raw);
  leaf text;
begin
  for leaf in
    select format('pgmb.segment_%s_%s', s.stream, s.number)
    from pgmb.segment s, (select pgmb_internal.segment_of(min(one)) first, pgmb_internal.segment_of(max(one)) last from unnest(numbers) one) n
    where s.stream = numbered_events.stream and s.number between n.first and n.last and s.dropped_at is null
    order by s.number
  loop
    return query execute 'select ' || columns || pgmb_internal.numbered_rows(leaf, numbers, matching) using numbers;
  end loop;
end $$;

-- Whether transactions unfinished in the `done` of a batch have finished in it and wrote events with lo < seq <= hi: a cheap
-- look before batch_events reads them.
create or replace function pgmb_internal.has_stragglers(stream integer, batch pgmb.batch, lo bigint, hi bigint)
returns boolean
language plpgsql
as $$
declare
  first xid8 := pg_snapshot_xmin(batch.done);
  last xid8 := pg_snapshot_xmax(batch.done);
  finished xid8[];
  leaf text;
  straggling boolean;
begin
  if first = last and batch.done_next < last then
    return false;
  end if;
  -- A REPEATABLE READ caller's snapshot may be long past: too many to list.
  if batch.done_next::text::bigint - last::text::bigint > 10000 then
    return true;
  end if;
  finished := array(
    select x from pg_snapshot_xip(batch.done) x where x <= batch.done_next and pg_visible_in_snapshot(x, batch.seen)
    union all
    select g::text::xid8 from generate_series(last::text::bigint, batch.done_next::text::bigint) g
    where pg_visible_in_snapshot(g::text::xid8, batch.seen));
  if cardinality(finished) = 0 then
    return false;
  end if;
  for leaf in
    select 'pgmb.segment_' || s.stream || '_' || s.number from pgmb.segment s
    where s.stream = has_stragglers.stream and s.number between pgmb_internal.segment_of(lo) and pgmb_internal.segment_of(hi)
      and s.dropped_at is null and (s.max_xid is null or s.max_xid >= first)
  loop
    execute 'select exists (select from ' || leaf || ' e where e.xid = any ($1)'
        || ' and e.seq + 0 > $2 and e.seq + 0 <= $3)'
      into straggling using finished, lo, hi;
    if straggling then
      return true;
    end if;
  end loop;
  return false;
end $$;
