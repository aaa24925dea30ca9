-- Isolation levels. Functions that decide by looking at rows which other sessions change need a fresh snapshot in
-- every statement: they run in READ COMMITTED (or READ UNCOMMITTED, which PostgreSQL treats the same) only.

-- Refuses a transaction whose snapshot may be older than this statement. Errors: MB029.
create or replace function pgmb_internal.assert_read_committed()
returns void
language plpgsql stable
as $$
begin
  if pg_catalog.current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    raise exception 'this function needs READ COMMITTED, the transaction is %',
      pg_catalog.upper(pg_catalog.current_setting('transaction_isolation'))
      using errcode = 'MB029',
        hint = 'Begin the transaction with isolation level READ COMMITTED, or check default_transaction_isolation.';
  end if;
end $$;
