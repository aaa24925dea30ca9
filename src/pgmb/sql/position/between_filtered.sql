-- Filtered reading: between two positions, without a queue.

-- What `between` gives, by fields and a filter as create_queue takes them: a page of at most `max` events, of which
-- those that do not pass come as their seq alone, so that a page costs the same whatever passes. Without positions
-- it only checks the filter. Errors: those of between, MB009 invalid filter, MB024 the filter is costly
-- and no statement_timeout is set, 42501.
create or replace function pgmb.between_filtered(
  stream text, after pgmb.position, upto pgmb.position, after_seq bigint default 0, max bigint default 1000,
  equals jsonb default null, filter text default null, params jsonb default null, lake boolean default false
)
returns table (seq bigint, id uuid, topic text, key text, payload json, headers json, published_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pgmb_internal.assert_reader(between_filtered.stream);
  perform pgmb_internal.assert_filter(between_filtered.equals, between_filtered.filter, between_filtered.params);
  if between_filtered.filter is not null
    and pgmb_internal.is_costly(pgmb_internal.predicate(between_filtered.filter), between_filtered.params)
  then
    perform pgmb_internal.assert_timeout();
  end if;
  if between_filtered.after is null or between_filtered.upto is null then
    return;
  end if;
  return query execute
    'select e.seq, case when p.passes then e.id end, case when p.passes then e.topic end,
       case when p.passes then e.key end, case when p.passes then e.payload end,
       case when p.passes then e.headers end, case when p.passes then e.published_at end
     from pgmb.between($1, $2, $3, $4, $5, $6) e
     cross join lateral (select coalesce(true'
    || pgmb_internal.filtering(between_filtered.equals, between_filtered.filter, between_filtered.params)
    || ', false) passes offset 0) p'
  using between_filtered.stream, between_filtered.after, between_filtered.upto, between_filtered.after_seq,
    between_filtered.max, between_filtered.lake;
end $$;

-- The numbers of events that pass a filter, as between_filtered() takes it: for a reader that has them from the lake. The
-- events are given by their columns. Errors: MB009, MB024. Support.
create or replace function pgmb.passing(
  seqs bigint[], topics text[], keys text[], payloads json[], headers json[],
  equals jsonb default null, filter text default null, params jsonb default null
)
returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  passed bigint[];
begin
  perform pgmb_internal.assert_filter(passing.equals, passing.filter, passing.params);
  if passing.filter is not null
    and pgmb_internal.is_costly(pgmb_internal.predicate(passing.filter), passing.params)
  then
    perform pgmb_internal.assert_timeout();
  end if;
  execute 'select array(select e.seq from unnest($1, $2, $3, $4, $5) e (seq, topic, key, payload, headers) where true'
    || pgmb_internal.filtering(passing.equals, passing.filter, passing.params) || ')'
  into passed using passing.seqs, passing.topics, passing.keys, passing.payloads, passing.headers;
  return passed;
end $$;
