-- Events that the server cannot read: damaged on disk, or from a time when no bound kept them small enough for a message.

-- Makes a dead letter of the next event of a queue because it cannot be read, after as many attempts as the queue allows:
-- `attempts` says how often a receive of one event failed with `error`. The dead letter has the event's number, id, topic, key
-- and time; its payload is an object that says what is missing: {"pgmb_unreadable": error, "stored_bytes": …}. The event itself
-- stays in the log until its segment goes. An event that can be read is given back. Returns its number, or null where nothing
-- was buried. Errors: those of receive.
create or replace function pgmb.bury_unreadable(queue text, error text, attempts integer)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  q pgmb.queue;
  given record;
  lane integer;
  claim bigint;
  source text;
  stored record;
  bytes bigint;
begin
  perform pgmb_internal.assert_read_committed();
  q := pgmb_internal.queue_for_consumer(bury_unreadable.queue);
  if bury_unreadable.attempts < q.max_attempts then
    return null;
  end if;
  -- Without payload and headers: they are not touched.
  select r.lease, r.seq into given from pgmb.receive(bury_unreadable.queue, 1, raw => true) r;
  if given.lease is null then
    return null;
  end if;
  lane := pgmb_internal.lease_queue(given.lease);
  claim := pgmb_internal.lease_claim(given.lease);
  source := case when exists (select from pgmb.retry r where r.queue = lane and r.lease = claim)
    then format('select r.event_id id, r.topic, r.key, r.payload, r.headers, r.published_at from pgmb.retry r where r.queue = %s and r.lease = %s', lane, claim)
    else format('select * from pgmb.segment_%s_%s e where e.seq = %s', q.stream, pgmb_internal.segment_of(given.seq), given.seq)
  end;
  begin
    execute 'select octet_length(e.payload::text) + coalesce(octet_length(e.headers::text), 0) from (' || source || ') e'
      into bytes;
  exception when others then
    if pgmb_internal.servers_trouble(sqlstate) and sqlstate not like 'XX%' then
      raise;
    end if;
  end;
  if bytes <= 67108864 then
    perform pgmb.release(given.lease);
    return null;
  end if;
  execute 'select e.id, e.topic::text topic, e.key::text "key", e.published_at,
      pg_column_size(e.payload) + coalesce(pg_column_size(e.headers), 0) bytes from (' || source || ') e'
    into stored;
  insert into pgmb.dead (queue, attempt, error, errors, seq, event_id, topic, key, payload, published_at)
  select lane, bury_unreadable.attempts, 'cannot be read: ' || bury_unreadable.error,
    pgmb_internal.with_error(null, bury_unreadable.attempts, bury_unreadable.error), given.seq,
    coalesce(stored.id, pgmb.derive_id(given.seq, stored.published_at, s.salt)), stored.topic, stored.key,
    json_build_object('pgmb_unreadable', left(bury_unreadable.error, 500), 'stored_bytes', stored.bytes), stored.published_at
  from pgmb.stream s where s.id = q.stream;
  perform pgmb.ack(given.lease);
  return given.seq;
end $$;
