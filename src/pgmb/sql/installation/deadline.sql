-- When a call that works in parts stops and leaves the rest to the next one.

-- `longest` after the statement began, or a quarter of a shorter statement_timeout or transaction_timeout. A call that was
-- cancelled instead would lose its progress, and the next one would be cancelled at the same place.
create or replace function pgmb_internal.deadline(longest interval default '500 milliseconds')
returns timestamptz
language sql stable
as $$
  select statement_timestamp() + least(longest,
    nullif(current_setting('statement_timeout'), '0')::interval / 4,
    -- Since PostgreSQL 17.
    nullif(current_setting('transaction_timeout', true), '0')::interval / 4)
$$;
