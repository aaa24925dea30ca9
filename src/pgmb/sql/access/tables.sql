-- Who comes over HTTP: keys and what they may do, what was handed out on their behalf, and what was changed.

-- Only digests of keys are stored, so readers of this table cannot use them.
create table pgmb.api_key (
  id integer generated always as identity primary key,
  name text not null unique,
  digest bytea not null unique constraint "a digest must have 32 bytes" check (octet_length(digest) = 32),
  scopes text[] not null,
  created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz,
  -- To the minute.
  used_at timestamptz
);

-- Access tokens of an API key: a browser's session, or a ticket that can be used once.
create table pgmb.access_token (
  digest bytea primary key constraint "a digest must have 32 bytes" check (octet_length(digest) = 32),
  api_key integer not null references pgmb.api_key on delete cascade,
  kind text not null constraint "kind must be session or ticket" check (kind in ('session', 'ticket')),
  -- A subset of the key's scopes.
  scopes text[] not null,
  created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null
);
create index access_token_expires on pgmb.access_token (expires_at);
create index access_token_api_key on pgmb.access_token (api_key);

-- The audit: changes made over HTTP and on the command line, and who made them.
create table pgmb.audit (
  id bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  actor text not null,
  action text not null,
  subject text,
  detail jsonb not null default '{}'
);
create index audit_at on pgmb.audit (at);
