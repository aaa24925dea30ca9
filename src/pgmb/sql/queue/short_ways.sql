-- Shorter ways to receive from plain queues, in receive.sql and claim_next.sql. They refuse whatever they are not sure of, and the loop
-- (claim.sql) decides it.

-- Whether receives take them. Tests replace this function to see that the loop alone does everything. Inlined.
create or replace function pgmb_internal.takes_short_ways()
returns boolean
language sql immutable parallel safe
as $$
  select true
$$;
