-- Who comes over HTTP: keys and what they may do, what was handed out on their behalf, and what was changed.

-- A key is known by its digest alone: whoever reads this table cannot use one.
create table pgmb.api_key (
  id integer generated always as identity primary key,
  name text not null unique,
  digest bytea not null unique check (octet_length(digest) = 32),
  scopes text[] not null,
  created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz,
  -- To the minute.
  used_at timestamptz
);

-- What stands for a key for a while: a browser's session, or a ticket that is good for one request.
create table pgmb.pass (
  digest bytea primary key check (octet_length(digest) = 32),
  api_key integer not null references pgmb.api_key on delete cascade,
  kind text not null check (kind in ('session', 'ticket')),
  -- At most what the key may.
  scopes text[] not null,
  expires_at timestamptz not null
);
create index pass_expires on pgmb.pass (expires_at);
create index pass_api_key on pgmb.pass (api_key);

-- What was changed over HTTP or by the command line, by whom.
create table pgmb.audit (
  id bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  actor text not null,
  action text not null,
  subject text,
  detail jsonb not null default '{}'
);
create index audit_at on pgmb.audit (at);
