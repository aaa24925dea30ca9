-- Reading for a group: events with the ids of the subscriptions that they match.

-- As receive, from the queue that has the group's name: the next events that match a subscription of the group, each with
-- the ids of all of them. Others are passed over and settled, for half a second at most in one call. A subscription matches
-- what is received after it was made. Errors: as receive; MB024 the group has an SQL condition and no statement_timeout is set.
create or replace function pgmb.receive_group(
  group_id text, max integer default 1000, lease_for interval default null, ack uuid default null,
  durable boolean default true
)
returns table (lease uuid, seq bigint, id uuid, topic text, key text, payload json, headers json,
  published_at timestamptz, attempt integer, subscriptions uuid[])
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  given uuid;
  events pgmb.event[];
  attempts integer[];
  seqs bigint[];
  matching text[];
  source pgmb.stream;
begin
  select s.* into source from pgmb_internal.queue_for_consumer(receive_group.group_id) q join pgmb.stream s on s.id = q.stream;
  loop
    select min(r.lease::text)::uuid, array_agg((r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at)::pgmb.event),
      array_agg(r.attempt)
    into given, events, attempts
    from pgmb.receive(receive_group.group_id, receive_group.max, receive_group.lease_for, receive_group.ack,
      receive_group.durable, raw => true) r;
    if given is null then
      return;
    end if;
    select array_agg(m.seq), array_agg(m.subscriptions::text) into seqs, matching
    from pgmb_internal.match(receive_group.group_id, source.id, events) m;
    if seqs is not null then
      if cardinality(seqs) < cardinality(events) then
        perform pgmb_internal.narrow_lease(given, seqs, array(select e.seq from unnest(events) e except select unnest(seqs)));
      end if;
      return query
      select given, e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, source.salt)), e.topic::text, e.key::text, e.payload,
        e.headers, e.published_at, e.attempt, matched.subscriptions::uuid[]
      from unnest(seqs, matching) matched (seq, subscriptions)
      join unnest(events, attempts) e (seq, id, topic, key, payload, headers, published_at, attempt)
        on e.seq = matched.seq
      order by e.seq;
      return;
    end if;
    receive_group.ack := null;
    perform pgmb_internal.ack_lease(given, pgmb_internal.caller_at_low_cost());
    -- A caller that gets nothing waits, although events that match may lie further on. As in receive, it gets nothing only at
    -- the deadline, and what was passed over stays settled.
    exit when clock_timestamp() >= pgmb_internal.deadline();
  end loop;
end $$;

-- Takes events out of a lease that was just given: they are settled, whatever becomes of the others.
create or replace function pgmb_internal.narrow_lease(lease uuid, kept bigint[], passed bigint[])
returns void
language plpgsql
as $$
begin
  update pgmb.claim c set seqs = case c.state when 'leased' then kept end, events = c.events - cardinality(passed)
  where c.queue = pgmb_internal.lease_queue(lease) and c.id = pgmb_internal.lease_claim(lease) and c.token = pgmb_internal.lease_token(lease)
    and c.state in ('leased', 'leased_retries');
  perform pgmb_internal.ack_retried(pgmb_internal.lease_queue(lease), pgmb_internal.lease_claim(lease), passed);
end $$;

-- As between, for a group: the events between two positions that match a subscription of the group, each with the
-- ids of all of them. The last event examined is always returned, without ids if no subscription matches: the next
-- call continues after it. max: how many events are examined. Errors: as between, and MB024.
create or replace function pgmb.between_group(
  group_id text, stream text, after pgmb.position, upto pgmb.position, after_seq bigint default 0,
  max bigint default 1000
)
returns table (seq bigint, id uuid, topic text, key text, payload json, headers json, published_at timestamptz,
  subscriptions uuid[])
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  events pgmb.event[] := array(
    select e from pgmb.between(between_group.stream, between_group.after, between_group.upto, between_group.after_seq,
      between_group.max) e);
begin
  perform pgmb_internal.assert_reader(between_group.stream);
  return query
  select e.seq, e.id, e.topic::text, e.key::text, e.payload, e.headers, e.published_at, coalesce(matched.subscriptions, '{}')
  from unnest(events) e
  left join pgmb_internal.match(between_group.group_id, pgmb.stream_id(between_group.stream), events) matched
    on matched.seq = e.seq
  where matched.seq is not null or e.seq = events[cardinality(events)].seq
  order by e.seq;
end $$;
