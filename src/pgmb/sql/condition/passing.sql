-- Reading by a filter and a condition: which events of a stream a reader that has them may pass on.

-- The numbers of those of these events of a stream that pass a filter and an SQL condition. Without events it only checks the
-- filter and the condition. Errors: MB001, MB009, MB010, MB012 some of the events are gone, MB024 it needs a
-- statement_timeout, MB025, 42501, and what the condition raises.
create or replace function pgmb.passing_events(
  stream text, seqs bigint[], filter text default null, params jsonb default null, condition text default null
)
returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  asked pgmb.queue;
  passing bigint[] := '{}';
  found bigint;
  now timestamptz := clock_timestamp();
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
  update pgmb.condition c set kept_until = now + interval '1 hour'
  where c.digest = sha256(convert_to(passing_events.condition, 'UTF8'))
    and (c.kept_until between now + interval '30 minutes' and now + interval '1 hour') is not true;
  if cardinality(passing_events.seqs) > 0 then
    execute 'select coalesce(array_agg(e.seq) filter (where true' || pgmb_internal.asking(asked)
      || '), ''{}''), count(*) from pgmb_internal.numbered_events($1, $2, raw => true) e'
    into passing, found using asked.stream, passing_events.seqs;
    if found < cardinality(passing_events.seqs) then
      perform pgmb_internal.raise_gone();
    end if;
  end if;
  return passing;
end $$;
