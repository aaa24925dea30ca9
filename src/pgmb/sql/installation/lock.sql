-- Advisory locks. Their keys are made from a secret of this installation: a role that can connect, and do nothing else,
-- cannot compute one and hold the lock. pg_locks shows a key while it is held; see docs/explanation/leases.md.

-- The key of an advisory lock, by what it is for.
create or replace function pgmb_internal.lock_key(purpose text)
returns bigint
language sql stable
as $$
  select ('x' || left(encode(sha256(s.secret || convert_to(lock_key.purpose, 'UTF8')), 'hex'), 16))::bit(64)::bigint
  from pgmb.lock_secret s
$$;

-- Takes an advisory lock for the session and returns whether it got it. Waits for up to 2 s: the server process of a client
-- that has just exited keeps its locks for a moment longer.
create or replace function pgmb_internal.try_session_lock(purpose text)
returns boolean
language plpgsql
as $$
declare
  key bigint := pgmb_internal.lock_key(try_session_lock.purpose);
begin
  for look in 1 .. 40 loop
    if pg_try_advisory_lock(key) then
      return true;
    end if;
    perform pg_sleep(0.05);
  end loop;
  return false;
end $$;

-- Lets one erasure or replay begin at a time, until the end of the transaction. Each is refused while the other is unfinished,
-- and must see it.
create or replace function pgmb_internal.lock_beginnings()
returns void
language sql volatile
as $$
  select pg_advisory_xact_lock(pgmb_internal.lock_key('erasures and replays begin'))
$$;
