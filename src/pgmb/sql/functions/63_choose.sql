-- Filters and conditions of queues: asked once an event, when it is claimed.

-- Which events of a queue above its position and up to `hi` pass its filter and condition, at most `most`, and how far
-- that looked. One that raises, or takes longer than the caller's statement_timeout, pauses the queue, with what it
-- said; then `chosen` is null. Internal.
create or replace function pgmb.choose(
  q pgmb.queue, base pgmb.claim, hi bigint, most bigint, out chosen bigint[], out upto bigint
)
language plpgsql
as $$
#variable_conflict use_variable
declare
  began timestamptz := clock_timestamp();
begin
  select coalesce(array_agg(e.seq), '{}') into chosen
  from pgmb.batch_events(q.stream, base.done_snapshot, base.done_seq, base.done_next, base.batch_snapshot,
    base.own, base.own_seq, base.place, hi, q.matching || pgmb.asking(q), most, true) e;
  upto := case when cardinality(chosen) < most then hi else chosen[most] end;
exception
  when query_canceled then
    -- By the timeout that this used up, or by somebody who wants the caller to stop?
    if current_setting('statement_timeout') = '0'
      or clock_timestamp() < began + current_setting('statement_timeout')::interval / 2
    then
      raise;
    end if;
    perform pgmb.pause_failing(q, 'took longer than ' || current_setting('statement_timeout'));
  when others then
    -- The server's troubles are not the filter's.
    if left(sqlstate, 2) in ('40', '53', '55', '57', '58', 'XX') then
      raise;
    end if;
    perform pgmb.pause_failing(q, format('%s (%s)', sqlerrm, sqlstate));
end $$;

-- Pauses a queue whose filter or condition failed. Internal.
create or replace function pgmb.pause_failing(q pgmb.queue, error text)
returns void
language sql
as $$
  update pgmb.queue head
  set paused_at = clock_timestamp(),
    paused_reason = case when q.condition is null then 'filter' else 'condition' end || ' failed: ' || error
  where head.id = coalesce(q.lane_of, q.id) and head.paused_at is null
$$;
