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
