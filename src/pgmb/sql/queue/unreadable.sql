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
  claim bigint;
  retried bigint;
  stored text;
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
  select * into q from pgmb.queue lane where lane.id = pgmb_internal.lease_queue(given.lease);
  claim := pgmb_internal.lease_claim(given.lease);
  select r.id into retried from pgmb.retry r where r.queue = q.id and r.lease = claim;
  stored := case when retried is null
    then format('pgmb.segment_%s_%s e where e.seq = %s', q.stream, pgmb_internal.segment_of(given.seq), given.seq)
    else format('pgmb.retry e where e.id = %s', retried) end;
  begin
    execute 'select octet_length(e.payload::text) + coalesce(octet_length(e.headers::text), 0) from ' || stored into bytes;
  exception when others then
    if pgmb_internal.servers_trouble(sqlstate) then
      raise;
    end if;
  end;
  if bytes <= 67108864 then
    perform pgmb.release(given.lease);
    return null;
  end if;
  if retried is null then
    perform pgmb_internal.fail_events(q, array[given.seq], 0, bury_unreadable.attempts, null, null, damage => bury_unreadable.error);
  else
    perform pgmb_internal.bury_retried(array[retried], null, damage => bury_unreadable.error);
  end if;
  perform pgmb.ack(given.lease);
  return given.seq;
end $$;
