-- Reading by a filter and a condition: which events of a stream a reader that has them may pass on.

-- Whether each of these events of a stream passes a filter and an SQL condition. Events that are gone are left out. Without
-- events it only checks the filter and the condition. Errors: MB001, MB009, MB010, MB025, 42501, MB024 it needs a
-- statement_timeout, and what the condition raises.
create or replace function pgmb.passing_events(
  stream text, seqs bigint[], filter text default null, params jsonb default null, condition text default null
)
returns table (seq bigint, passes boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmb.queue;
begin
  perform pgmb_internal.assert_reader(passing_events.stream);
  perform pgmb_internal.assert_filter(null, passing_events.filter, passing_events.params);
  -- As a queue would ask.
  asked.name := passing_events.stream;
  asked.stream := pgmb.stream_id(passing_events.stream);
  asked.filter := passing_events.filter;
  asked.params := passing_events.params;
  if pgmb_internal.needs_timeout(asked) or passing_events.condition is not null and cardinality(passing_events.seqs) > 0 then
    perform pgmb_internal.assert_timeout();
  end if;
  asked.condition := pgmb_internal.compile_condition(passing_events.condition);
  update pgmb.condition c set kept_until = clock_timestamp() + interval '1 hour'
  where c.digest = sha256(convert_to(passing_events.condition, 'UTF8'))
    and (c.kept_until between clock_timestamp() + interval '30 minutes' and clock_timestamp() + interval '1 hour') is not true;
  if cardinality(passing_events.seqs) = 0 then
    return;
  end if;
  return query execute 'select e.seq, coalesce(true' || pgmb_internal.asking(asked)
    || ', false) from pgmb_internal.numbered_events($1, $2) e'
  using asked.stream, passing_events.seqs;
end $$;
