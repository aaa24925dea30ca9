-- Health: what stands still though it should move, and what was set. For `pgmb doctor`, `top` and `show`.

-- Whether the log belongs to the cluster that it runs on; if not, pgmb.rebase() is due.
create or replace function pgmb.cluster_health(out epoch integer, out same_cluster boolean, out in_recovery boolean)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_admin();
  select i.epoch, pgmb_internal.is_home(), pg_is_in_recovery()
  into epoch, same_cluster, in_recovery
  from pgmb.installation i;
end $$;

-- Every stream: for how long segments wait to be sealed and archived, rotation is due and events with a delay
-- are due; how many numbers were drawn since the last tick, and since when; for how long events are kept beyond keep_for; the
-- number of the segment that new events would go to, if it is missing.
create or replace function pgmb.stream_health(
  out stream text, out unsealed_for interval, out unarchived_for interval, out unrotated_for interval,
  out overdue bigint, out overdue_for interval, out unticked bigint, out unticked_for interval,
  out keep_for interval, out overkept_for interval, out missing_segment bigint
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  s pgmb.stream;
  ticked pgmb.tick;
  last bigint;
  newest bigint;
begin
  perform pgmb_internal.assert_admin();
  for s in select * from pgmb.stream order by name loop
    stream := s.name;
    keep_for := s.keep_for;
    last := pgmb_internal.last_seq(s.name);
    newest := pgmb_internal.newest_number(s.id, s.name);
    missing_segment := (select pgmb_internal.segment_of(last)
      where not exists (select from pgmb.segment g where g.stream = s.id and g.number = pgmb_internal.segment_of(last)));
    select clock_timestamp() - min(g.closed_at) filter (where g.sealed_at is null),
      clock_timestamp() - min(g.sealed_at) filter (where s.archive and g.archived_at is null),
      clock_timestamp() - (coalesce(max(g.closed_at), s.created_at) + s.rotate_every),
      clock_timestamp() - (min(coalesce(g.last_published_at, g.closed_at)) filter (where g.sealed_at is not null) + s.keep_for)
    into unsealed_for, unarchived_for, unrotated_for, overkept_for
    from pgmb.segment g where g.stream = s.id and g.closed_at is not null and g.dropped_at is null;
    -- An empty segment stays open.
    unrotated_for := case when unrotated_for > '0 s' and pgmb_internal.number_in_segment(last) > 0 then unrotated_for end;
    select count(*), clock_timestamp() - min(d.due_at) into overdue, overdue_for
    from (select due_at from pgmb.delayed d where d.stream = s.name and d.due_at < statement_timestamp()
      order by due_at limit 10000) d;
    select * into ticked from pgmb.tick t where t.stream = s.id order by t.id desc limit 1;
    unticked := pgmb_internal.numbers_between(s.id, coalesce((ticked.position).seq, 0), newest);
    unticked_for := clock_timestamp() - pgmb_internal.first_published(s.id, coalesce((ticked.position).seq, 0), newest);
    return next;
  end loop;
end $$;

-- Since when the first event that could be received from a queue now has waited, as pgmb.queue_status tells, but without a bound.
-- Where its filter cannot be asked, because it raises or needs a timeout that is not set, the oldest that its patterns match.
create or replace function pgmb_internal.first_waiting(q pgmb.queue, newest pgmb.claim)
returns timestamptz
language plpgsql stable
as $$
declare
    first timestamptz;
  part pgmb.pending;
  now timestamptz := clock_timestamp();
  deliverable text := pgmb_internal.deliverable(q, now);
  due timestamptz := pgmb_internal.due_since(q, newest, now);
  asked text := q.matching || deliverable;
begin
  if pgmb_internal.is_pgmqs(q.id) then
    due := least(due, (pgmb_internal.pgmq_counts(q.id, now, 1)).oldest);
  end if;
  newest := pgmb_internal.kept_from(q, newest, pgmb_internal.counted_upto());
  for turn in 1 .. 2 loop
    begin
      if turn = 1 and (current_setting('statement_timeout') <> '0' or not pgmb_internal.needs_timeout(q)) then
        asked := q.matching || pgmb_internal.asking(q) || deliverable;
      end if;
            for part in select * from pgmb_internal.pending(q, newest) loop
        select e.published_at into first
        from pgmb_internal.batch_events(q.stream, part.batch, part.lo, part.hi, asked || part.matching, 1) e;
        exit when first is not null;
      end loop;
      return least(first, due);
    exception when others then
      if q.plain or turn = 2 or pgmb_internal.servers_trouble(sqlstate) then
        raise;
      end if;
      asked := q.matching || deliverable;
    end;
  end loop;
end $$;

-- Every queue that the caller may consume: how long the first event that could be received has waited (this reads up to it), how
-- long a lease has been expired without a receive, how long settled claims have not been cleared, and how many events
-- are retried because their lease expired. `dispatched`: it feeds endpoints, so that its consumer is the dispatcher; with
-- the endpoint's name and state if the queue is its own.
create or replace function pgmb.queue_health(
  out queue text, out waiting_for interval, out lapsed_for interval, out uncleared_for interval,
  out expired bigint, out dispatched boolean, out endpoint text, out endpoint_state text
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
as $$
declare
  head pgmb.queue;
  q pgmb.queue;
  newest pgmb.claim;
  oldest pgmb.claim;
  first timestamptz;
begin
  for head in select * from pgmb.queue h where h.lane_of is null order by h.name loop
    continue when not pgmb_internal.may_consume(head.id);
    queue := head.name;
    waiting_for := null;
    lapsed_for := null;
    uncleared_for := null;
    expired := 0;
    for q in select * from pgmb.queue l where l.id = head.id or l.lane_of = head.id loop
      select * into newest from pgmb_internal.queue_position(q.id);
      select * into oldest from pgmb.claim c where c.queue = q.id order by c.id limit 1;
      first := pgmb_internal.first_waiting(q, newest);
      waiting_for := greatest(waiting_for, clock_timestamp() - first);
      lapsed_for := greatest(lapsed_for, (
        select clock_timestamp() - min(c.expires_at) from pgmb.claim c
        where c.queue + 0 = q.id and c.expires_at > newest.swept and c.expires_at < statement_timestamp()
          and c.state = 'leased'));
      uncleared_for := greatest(uncleared_for, case when oldest.id < newest.id and oldest.state in ('settled', 'expired', 'position')
        then clock_timestamp() - greatest(oldest.at, case when oldest.state = 'expired' then oldest.expires_at end) end);
      expired := expired + (select count(*)
        from (select from pgmb.retry r where r.queue = q.id and r.expiries > 0 limit 10000) counted);
    end loop;
    select e.name, e.state into endpoint, endpoint_state from pgmb.endpoint e where e.id = head.endpoint;
    dispatched := head.endpoint is not null or pgmb_internal.feeds_endpoints(head.name);
    return next;
  end loop;
end $$;

-- Every queue that the caller may consume: how many receives there were since it was created, and how many
-- events the latest of them took on average. What happens between two looks shows how fast it is received.
create or replace function pgmb.queue_activity(
  out queue text, out receives bigint, out events_per_receive double precision
)
returns setof record
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  head pgmb.queue;
begin
  for head in select * from pgmb.queue h where h.lane_of is null order by h.name loop
    continue when not pgmb_internal.may_consume(head.id);
    queue := head.name;
    select sum((select pgmb_internal.number_in_generation(c.id) from pgmb.claim c where c.queue = l.id order by c.id desc limit 1))
    into receives
    from pgmb.queue l where l.id = head.id or l.lane_of = head.id;
    select coalesce(avg(recent.events), 0) into events_per_receive
    from pgmb.queue l
    cross join lateral (
      select c.events from pgmb.claim c where c.queue = l.id and c.events > 0 order by c.id desc limit 20) recent
    where l.id = head.id or l.lane_of = head.id;
    return next;
  end loop;
end $$;

-- A queue's settings, one key a column of pgmb.queue, but for those that only its functions use. Errors: MB002 no such
-- queue, 42501.
create or replace function pgmb.queue_settings(queue text)
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'iso_8601'
as $$
begin
  return (select json_object_agg(s.key, s.value)
    from json_each(to_json(pgmb_internal.queue_for_consumer(queue_settings.queue))) s
    where s.key <> all ('{id,stream,numbers,bindings,generation,lock_key,matching,topics,regex,lane,lane_of,plain,moves,untraced}'));
end $$;

-- A stream's settings, one key a column of pgmb.stream. Errors: MB001 no such stream, 42501.
create or replace function pgmb.stream_settings(stream text)
returns json
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set intervalstyle = 'iso_8601'
as $$
begin
  perform pgmb.stream_id(stream_settings.stream);
  perform pgmb_internal.assert_reader(stream_settings.stream);
  return (select json_object_agg(v.key, v.value)
    from pgmb.stream s, json_each(to_json(s)) v
    where s.name = stream_settings.stream and v.key <> all ('{id,salt}'));
end $$;
