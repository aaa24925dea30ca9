-- Queues: what they read (queue, binding), how far they are and what is leased (claim), what of a lease
-- was settled on its own (settlement).

create table pgmb.queue (
  -- Three bytes of every lease. The numbers of dropped queues are given again (pgmb_internal.next_queue_number).
  id integer generated always as identity (maxvalue 16777215 cycle) primary key,
  name text not null unique,
  stream integer not null references pgmb.stream,
  -- What receive needs, in one row: the stream's name, the present binding and its condition, and the generation to try first. That
  -- may be old: maintain() raises it, and until then receives take the loop.
  stream_name text not null,
  -- The sequence that numbers the stream's events.
  numbers regclass not null,
  bindings integer not null default 1,
  generation integer not null default 0,
  -- The advisory lock of that generation (pgmb_internal.queue_lock).
  lock_key bigint,
  paused_at timestamptz,
  paused_reason text constraint "a reason must have at most 8192 bytes" check (octet_length(paused_reason) <= 8192),
  lease_for interval not null default interval '30 seconds'
    constraint "lease_for must be more than 0" check (lease_for > interval '0'),
  max_attempts integer not null default 10 constraint "max_attempts must be at least 1" check (max_attempts > 0),
  backoff_base interval not null default interval '1 second'
    constraint "backoff_base must be 0 or more" check (backoff_base >= interval '0'),
  backoff_factor double precision not null default 2
    constraint "backoff_factor must be at least 1" check (backoff_factor >= 1),
  backoff_max interval not null default interval '1 hour',
  backoff_jitter double precision not null default 0.2
    constraint "backoff_jitter must be between 0 and 1" check (backoff_jitter between 0 and 1),
  created_at timestamptz not null default now(),
  matching text not null default '',
  -- The patterns compiled (pgmb.compile_patterns), which `matching` says too.
  topics text[],
  regex text,
  -- What makes a queue more than plain: see create_queue. A plain one takes receive's short ways.
  ordered boolean not null default false,
  max_in_flight integer constraint "max_in_flight must be at least 1" check (max_in_flight > 0),
  rps double precision constraint "rps must be more than 0" check (rps > 0),
  ttl interval constraint "ttl must be more than 0" check (ttl > interval '0'),
  max_length bigint constraint "max_length must be at least 1" check (max_length > 0),
  when_full text not null default 'refuse'
    constraint "when_full must be refuse or drop_oldest" check (when_full in ('refuse', 'drop_oldest')),
  -- Priority: the patterns of the lanes, the most urgent first. Each but the first lane is a queue of its own
  -- behind the one that the user named, lane_of.
  lanes text[],
  lane integer not null default 0,
  lane_of integer references pgmb.queue on delete cascade,
  -- The number of lanes over which an ordered queue spreads its keys. Consumers take from them in any order.
  shards integer not null default 1,
  -- What names the tenant of an event, where tenants are served in turn: key, or header:NAME.
  fair_by text,
  -- What an event must hold beside its topic (see the folder condition): fields that equal these values, a jsonpath
  -- predicate, an SQL condition; params are for the latter two.
  equals jsonb,
  filter text,
  condition text,
  params jsonb,
  -- What identifies a queue to callers who know ids alone, and the endpoint that it feeds.
  uid uuid not null default gen_random_uuid() unique,
  endpoint uuid,
  plain boolean not null generated always as (not ordered and max_in_flight is null and rps is null
    and ttl is null and max_length is null and lanes is null and lane_of is null
    and fair_by is null and equals is null and filter is null and condition is null) stored,
  -- Where it began and was moved to (pgmb_internal.note_move). Behind what receive reads.
  moves jsonb,
  -- The numbers of events that may have left the queue unhandled and without a trace (pgmb_internal.note_untraced).
  untraced int8multirange,
  constraint "a queue must have a name" check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$')
);
create index queue_stream on pgmb.queue (stream);
create index queue_endpoint on pgmb.queue (endpoint) where endpoint is not null;
create index queue_lane_of on pgmb.queue (lane_of) where lane_of is not null;

-- What a queue asked for, by version: event_fate says by it whether an event of an earlier time was taken.
create table pgmb.binding (
  queue integer not null references pgmb.queue on delete cascade,
  version integer not null,
  patterns text[] not null,
  since timestamptz not null default now(),
  -- The condition on an event e that the patterns make, as pgmb_internal.matching writes it.
  matching text not null default '',
  equals jsonb,
  filter text,
  condition text,
  params jsonb,
  primary key (queue, version)
);

-- A tenant of a fair queue that lags: its events numbered (place, upto] were passed over and wait, those that the queue's
-- position has passed and that `since` does not show. It is owed this many events of its turn; 0: its next turn has not begun.
create type pgmb.lag as (
  tenant integer,
  place bigint,
  upto bigint,
  since pg_snapshot,
  owed integer
);

-- Events that wait in a queue: those of a batch with lo < seq <= hi that match, and match this condition besides.
create type pgmb.pending as (
  batch pgmb.batch,
  lo bigint,
  hi bigint,
  matching text
);

-- An event that could be received now, with the attempt that comes; of one that is due again, since when and after which error.
create type pgmb.receivable as (
  event pgmb.event,
  attempt integer,
  due_at timestamptz,
  error text
);

-- What pgmb.claim_next leased: its claim's id, and (lo, hi] of one segment. A type of its own: PostgreSQL puts a record of OUT
-- parameters together again at every call.
create type pgmb.claimed as (
  id bigint,
  lo bigint,
  hi bigint
);

-- Leases in flight of a queue that limits or orders (sql/queue/flight.sql). Those after the claim `noted` are among the newest
-- claims, which a receive reads. Older ones have rows of pgmb.noted_lease with first <= nr < next: they hold at most `events`
-- events, and none of them is older than the claim `oldest`.
create type pgmb.flight as (
  noted bigint,
  first bigint,
  next bigint,
  events bigint,
  oldest bigint
);

create type pgmb.claim_state as enum (
  'leased',          -- events of the log
  'leased_retries',  -- the rows of pgmb.retry that name the claim
  'settled',
  'expired',         -- its rest went to pgmb.retry or the dead letters
  'position'         -- no lease: the queue moved on
);

-- The newest claim of a queue is its position. Append-only but for the one update that settles it: a
-- pinned xmin does not slow it. id carries a generation in its high bits (see pgmb.generation).
--   done_snapshot, batch_snapshot
--                     the batch being read: events visible in the second and not in the first
--   done_seq, done_next
--                     where the batch begins: no transaction above done_next has a number up to done_seq
--   batch_seq, batch_next
--                     the same pair for the batch after this one
--   upto              no event of the batch lies above it
--   place             of the batch, everything up to here is consumed or leased
--   lo, hi, seqs      the events that this claim leases: those numbered `seqs`, or all numbers of (lo, hi]
--   read_before       no event above this number was read before this batch; null: not known
--   swept, held       leases that expired up to swept were examined, except `held`: their rows were locked by a transaction that
--                     settled them
create table pgmb.claim (
  queue integer not null,
  id bigint not null,
  token bigint not null,
  xid xid8 not null default pg_current_xact_id(),
  state pgmb.claim_state not null,
  events integer not null,
  lo bigint not null,
  hi bigint not null,
  place bigint not null,
  upto bigint not null,
  done_seq bigint not null,
  done_next xid8 not null,
  batch_seq bigint not null,
  batch_next xid8 not null,
  read_before bigint,
  at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  -- When expires_at was decided, if not at the claim.
  extended_at timestamptz,
  swept timestamptz not null,
  done_snapshot pg_snapshot not null,
  batch_snapshot pg_snapshot not null,
  held bigint[],
  -- The hashes of the keys that this lease holds (pgmb_internal.key_hash). Of ordered and limited queues: which leases are in
  -- flight. When the rate limit will have been paid for.
  keys integer[],
  flight pgmb.flight,
  paid_until timestamptz,
  -- Of an ordered queue: where its rows of pgmb.retry begin, by their origin; and keys that were leased lately out of
  -- pgmb.retry, with the origin and number of the first event of each. Rows before these are gone for good, so that no
  -- look-up has to pass them. Dead letters that were put back have the origin 0.
  first_origin bigint,
  passed_keys text[],
  passed_origins bigint[],
  passed_seqs bigint[],
  -- The numbers that this lease holds, in the order in which they were given; null: all of (lo, hi].
  seqs bigint[],
  -- Of a fair queue: the tenants that lag, the next to be served first.
  lagging pgmb.lag[],
  -- The last number of pgmb.opening before the claim was made. While it has not changed, no generation is being opened.
  openings bigint not null default 0,
  -- The server process that received: see pgmb.worker.
  pid integer default pg_backend_pid()
) with (
  fillfactor = 60,
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_insert_scale_factor = 0.2,
  autovacuum_analyze_scale_factor = 0.5,
  vacuum_truncate = false
);
create unique index claim_newest on pgmb.claim (queue, id);
-- On an expression, so that no statement that looks a claim up by its id can be planned to walk this one.
create index claim_expiry on pgmb.claim ((queue + 0), expires_at);
-- Keys and what may quote a payload are not sampled: pg_statistic would keep them after an erasure.
alter table pgmb.claim alter column passed_keys set statistics 0;
-- Numbers are read as a whole: to compress them would cost more than it saves.
alter table pgmb.claim alter column seqs set storage external;

-- A receive in a transaction that stays open would hold up the queue. The others wait a second, then open a new
-- generation at the last committed position: `base`, the claim that it goes on from. Claims of older generations above
-- base are void. Rows ahead of the newest generation exist with base null. To open one is to update its row, which every
-- session sees at once, committed or not, in the xmax of the row that it reads (pgmb_internal.standing); nothing else
-- locks these rows, and no foreign key refers to them. Row -1 is locked at commit by transactions that settled what they
-- received.
create table pgmb.generation (
  queue integer not null references pgmb.queue on delete cascade,
  number integer not null,
  base bigint,
  opened_at timestamptz,
  primary key (queue, number)
) with (autovacuum_vacuum_threshold = 10, autovacuum_vacuum_scale_factor = 0.1, vacuum_truncate = false);

-- A number for each generation of any queue that a session begins to open, drawn when its row is marked. It changes at once
-- for all sessions, so that a receive or an ack need not look at pgmb.generation where it is what it was.
create sequence pgmb.opening;
select nextval('pgmb.opening');

-- Leases whose end a sweep may have passed: extend() made them shorter and committed after the sweep, or maintain() found
-- them so. From that end on sweeps look at the lease, whatever `swept` says, until one was not kept from it by its holder.
create table pgmb.shortened (
  queue integer not null,
  claim bigint not null,
  ends_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index shortened_queue on pgmb.shortened (queue, ends_at);
create index shortened_claim on pgmb.shortened (queue, claim);

-- Events of a lease that were settled one by one.
create table pgmb.settlement (
  queue integer not null,
  claim bigint not null,
  seq bigint not null,
  primary key (queue, claim, seq)
) with (vacuum_truncate = false);

-- Leases of queues that limit or order that are in flight for longer, with the number of events that each held when it was last
-- looked at; and which keys leases hold. Append-only, but for leases found to have ended: see pgmb.flight.
create table pgmb.noted_lease (
  nr bigint not null generated always as identity,
  queue integer not null,
  claim bigint not null,
  events bigint not null
) with (vacuum_truncate = false);
create index noted_lease_queue on pgmb.noted_lease (queue, nr);
create table pgmb.noted_key (
  queue integer not null,
  hash integer not null,
  claim bigint not null
) with (vacuum_truncate = false);
create index noted_key_queue on pgmb.noted_key (queue, hash, claim);
create index noted_key_claim on pgmb.noted_key (queue, claim);

create table pgmb.queue_grant (
  queue integer not null references pgmb.queue on delete cascade,
  role name not null,
  -- A role that is created under the name of one that was dropped inherits nothing.
  role_id oid not null,
  primary key (queue, role)
);

-- Events that wait outside the order of the log: failed, released or expired ones, and those of an ordered queue that were set aside
-- behind their key and never delivered. And dead letters. Rows carry the event itself, so that neither holds back retention.

create table pgmb.retry (
  id bigint generated always as identity primary key,
  queue integer not null,
  -- When to try again. Infinity while leased: `lease` is the claim (pgmb.claim.id) that holds the row. Also infinity
  -- while parked behind another event of its key that is not leased either.
  due_at timestamptz not null,
  -- When due_at was decided. A time that lies ahead was written while the clock was (pgmb_internal.correct_times).
  decided_at timestamptz not null default clock_timestamp(),
  lease bigint,
  attempt integer not null,
  error text,
  seq bigint not null,
  event_id uuid not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  published_at timestamptz not null,
  -- In an ordered queue, rows of one key are delivered in the order of the claim that met the event first,
  -- then of its number, and none before those ahead of it are settled.
  ordered boolean not null default false,
  origin bigint not null default 0,
  -- How often in a row its lease expired: the event may have crashed its consumer.
  expiries integer not null default 0,
  -- Rows with the same number here failed together and are tried together, by themselves.
  together bigint,
  -- When a consumer that could not handle it released it first (see pgmb.release), since its last attempt.
  released_at timestamptz,
  -- The last attempts that failed, the newest last (pgmb_internal.with_error).
  errors jsonb,
  -- No consumer has received it, and it waits for no event of its key: the queue's ttl still holds for it.
  fresh boolean not null default false
) with (autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = false);
create index retry_due on pgmb.retry (queue, due_at);
create index retry_decided on pgmb.retry (decided_at) where due_at < 'infinity';
create index retry_lease on pgmb.retry (queue, lease) where lease is not null;
create index retry_key on pgmb.retry (queue, key, origin, seq) where ordered;
create index retry_origin on pgmb.retry (queue, origin) where ordered;
create index retry_event on pgmb.retry (event_id);
create index retry_fresh on pgmb.retry (queue, published_at) where fresh;
alter table pgmb.retry alter column key set statistics 0, alter column error set statistics 0,
  alter column errors set statistics 0;

create table pgmb.dead (
  id bigint generated always as identity primary key,
  queue integer not null references pgmb.queue on delete cascade,
  died_at timestamptz not null default clock_timestamp(),
  attempt integer not null,
  error text,
  seq bigint not null,
  event_id uuid not null,
  topic text not null,
  key text,
  payload json not null,
  headers json,
  published_at timestamptz not null,
  -- Of a queue that many endpoints share: the one that it did not reach.
  endpoint uuid,
  -- When it was verified in the lake.
  archived_at timestamptz,
  -- The last attempts that failed, the newest last.
  errors jsonb
);
create index dead_unarchived on pgmb.dead (id) where archived_at is null;
create index dead_endpoint on pgmb.dead (endpoint, id) where endpoint is not null;
create index dead_queue on pgmb.dead (queue, id);
create index dead_event on pgmb.dead (event_id);
alter table pgmb.dead alter column key set statistics 0, alter column error set statistics 0,
  alter column errors set statistics 0;

-- Processes that run handlers. Each says every few seconds that it lives, and which server processes are its own: by them a
-- lease's holder is known.
create table pgmb.worker (
  id uuid primary key,
  -- The role that said so first: no other may change the row.
  role name not null,
  host text not null constraint "a host must have at most 255 characters" check (length(host) <= 255),
  pid integer not null,
  application text constraint "an application must have at most 255 characters" check (length(application) <= 255),
  -- The name of its app, and whether the app shares its queues with others.
  app text constraint "an app's name must have 1 to 100 characters" check (length(app) between 1 and 100),
  shared boolean not null default false,
  queues text[] not null constraint "a worker must have at most 10000 queues" check (cardinality(queues) <= 10000)
    constraint "a worker's queues must have at most 2097152 bytes" check (pg_column_size(queues) <= 2097152),
  -- The queues that its code has handlers of, also those that it leaves to other workers.
  handled text[] not null constraint "a worker must handle at most 10000 queues" check (cardinality(handled) <= 10000)
    constraint "the queues that a worker handles must have at most 2097152 bytes" check (pg_column_size(handled) <= 2097152),
  backends integer[] not null constraint "a worker must have at most 10000 server processes" check (cardinality(backends) <= 10000),
  -- The schedules that its code declares, each with a digest of what it says.
  schedules jsonb not null default '{}' constraint "a worker's schedules must have at most 2097152 bytes"
    check (pg_column_size(schedules) <= 2097152),
  started_at timestamptz not null default clock_timestamp(),
  heartbeat_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- What a worker's code declares of a queue. settings as pgmb_internal.settings_of writes them, of those that the code names.
create table pgmb.declaration (
  queue integer not null references pgmb.queue on delete cascade,
  worker uuid not null references pgmb.worker on delete cascade,
  patterns text[] not null constraint "patterns must have at most 65536 bytes" check (pg_column_size(patterns) <= 65536),
  settings jsonb not null constraint "settings must have at most 65536 bytes" check (pg_column_size(settings) <= 65536),
  handlers text[] not null constraint "handlers must have at most 65536 bytes" check (pg_column_size(handlers) <= 65536),
  -- A digest of the handlers, their patterns and the payloads that they take.
  code text constraint "a declaration's code must have at most 255 characters" check (length(code) <= 255),
  primary key (queue, worker)
);
create index declaration_worker on pgmb.declaration (worker);

-- What outlives the workers, written by admins alone: the app that a queue belongs to until it is handed over, whether that app
-- shares its queues, its handlers as module.function, and the settings whose present values come from code and not from an
-- operator.
create table pgmb.owner (
  queue integer primary key references pgmb.queue on delete cascade,
  app text constraint "an app's name must have 1 to 100 characters" check (length(app) between 1 and 100),
  shared boolean not null default false,
  handlers text[] not null constraint "handlers must have at most 65536 bytes" check (pg_column_size(handlers) <= 65536),
  settings text[] not null default '{}'
);

-- The code that workers declared lately, and when they did last. It outlives them (pgmb.runs_other_code).
create table pgmb.recent_code (
  queue integer not null references pgmb.queue on delete cascade,
  role name not null,
  code text not null constraint "a code must have at most 255 characters" check (length(code) <= 255),
  declared_at timestamptz not null,
  primary key (queue, role, code)
);
