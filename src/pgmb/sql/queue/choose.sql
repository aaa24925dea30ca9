-- Filters and conditions of queues: asked once an event, when it is claimed.

-- Which events of a batch with lo < seq <= hi match a queue and pass its filter and condition, about `most`, and how far
-- that looked: not to `hi` where it has used up a good part of the caller's statement_timeout, so that a slow condition
-- still moves. One that raises, or takes longer than that, pauses the queue, with what it said; then `chosen` is null.
create or replace function pgmb_internal.choose(
  q pgmb.queue, batch pgmb.batch, lo bigint, hi bigint, most bigint, out chosen bigint[], out upto bigint
)
language plpgsql
as $$
declare
  began timestamptz := clock_timestamp();
  timeout interval := nullif(current_setting('statement_timeout'), '0')::interval;
  -- The first events tell how long the others will take.
  page bigint := case when not pgmb_internal.needs_timeout(q) then least(greatest(most, 16), 1024) else 16 end;
  asking text;
  asked text;
  looked record;
begin
  asking := pgmb_internal.asking(q);
  asked := asking;
  chosen := '{}';
  upto := lo;
  loop
    begin
      execute 'select count(*) events, max(e.seq) last, coalesce(array_agg(e.seq) filter (where true ' || asked || '), ''{}'') passed
        from pgmb_internal.batch_events($1, $2, $3, $4, $5, $6, true) e'
      into looked
      using q.stream, batch, upto, hi, q.matching, page;
    exception when data_corrupted or index_corrupted then
      if asked = '' then
        raise;
      end if;
      -- An event that cannot be read may match: it passes, and becomes a dead letter as in other queues (bury_unreadable).
      asked := case when page = 1 then '' else asking end;
      page := greatest(page / 4, 1);
      continue;
    end;
    asked := asking;
    chosen := chosen || looked.passed;
    upto := case when looked.events < page then hi else looked.last end;
    exit when upto >= hi or cardinality(chosen) >= most;
    exit when clock_timestamp() >= pgmb_internal.deadline();
    -- Limited, so that these alone do not use up the time.
    page := case when clock_timestamp() - began > timeout / 64 then page else least(page * 4, 1024) end;
  end loop;
exception
  when query_canceled then
    -- Cancelled by the timeout, which this used up, or by a user?
    if timeout is null or clock_timestamp() < began + timeout / 2 or clock_timestamp() < statement_timestamp() + timeout * 0.9 then
      raise;
    end if;
    perform pgmb_internal.pause_failing(q, 'took longer than ' || current_setting('statement_timeout'));
    chosen := null;
  when others then
    if pgmb_internal.servers_trouble(sqlstate) then
      raise;
    end if;
    perform pgmb_internal.pause_failing(q, pgmb_internal.error_without_values(sqlerrm, sqlstate));
    chosen := null;
end $$;

-- Those of some events of a queue's stream that pass its filter and condition, with those that cannot be read.
create or replace function pgmb_internal.passing(q pgmb.queue, numbers bigint[])
returns bigint[]
language plpgsql
as $$
declare
  asking text := pgmb_internal.asking(q);
begin
  if asking = '' then
    return numbers;
  end if;
  return array(select e.seq from pgmb_internal.numbered_events(q.stream, numbers, asking, true) e);
exception when data_corrupted or index_corrupted then
  if cardinality(numbers) = 1 then
    return numbers;
  end if;
  return array(
    select unnest(pgmb_internal.passing(q, h.half)) from pgmb_internal.halves(numbers) h);
end $$;

-- Pauses a queue whose filter or condition failed, unless another session is changing it.
create or replace function pgmb_internal.pause_failing(q pgmb.queue, error text)
returns void
language sql
as $$
  update pgmb.queue head
  set paused_at = clock_timestamp(),
    paused_reason = case when q.condition is null then 'filter' else 'condition' end || ' failed: ' || error
  where head.paused_at is null
    -- Nothing would end a wait: the statement's timeout is over.
    and head.id = any (array(
      select one.id from pgmb.queue one where one.id = coalesce(q.lane_of, q.id) for no key update skip locked))
$$;
