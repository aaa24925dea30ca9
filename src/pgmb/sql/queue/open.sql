-- The next batch of a queue: where it begins and ends, and what the one after it starts from.

-- Whether no event of a batch can be late any more: all transactions up to `next`, below which events may have low numbers, had
-- finished in the snapshot.
create or replace function pgmb_internal.had_finished(next xid8, snapshot pg_snapshot)
returns boolean
language sql immutable
as $$
  select next < pg_snapshot_xmin(snapshot)
$$;

-- Whether the next batch of a queue starts where the one before started, not where it ended. Publishers were at work when
-- the last batch was opened, so that some of their numbers lie below its end: events that committed since would be late
-- ones, each found by its transaction. Where nothing below the start of the last batch was unfinished, and that start is
-- not far away for what is new, to walk over those numbers again costs less. `last`: the last number of the log.
create or replace function pgmb_internal.rereads(
  done_seq bigint, done_next xid8, batch_next xid8, batch_snapshot pg_snapshot, upto bigint, last bigint
)
returns boolean
language sql immutable
as $$
  select not pgmb_internal.had_finished(batch_next, batch_snapshot) and pgmb_internal.had_finished(done_next, batch_snapshot)
    and upto - done_seq <= 64 + 4 * (last - upto)
$$;

-- Whether the batch after the present one starts from the pair of the batch before (pgmb_internal.note_pair): publishers are
-- at work, none of them since before that pair, and the present batch did not start from it.
create or replace function pgmb_internal.keeps_pair(done_next xid8, batch_next xid8, batch_snapshot pg_snapshot)
returns boolean
language sql volatile
as $$
  select done_next < batch_next and pgmb_internal.had_finished(batch_next, batch_snapshot)
    and pg_snapshot_xmin(batch_snapshot) < pg_current_xact_id()
$$;

-- The transaction id before another.
create or replace function pgmb_internal.xid_before(xid xid8)
returns xid8
language sql immutable
as $$
  select (xid::text::bigint - 1)::text::xid8
$$;

-- A queue's position with the next batch opened: it begins where the one before ended, and ends here and now. In this
-- call alone until a claim is written: looking costs no xid. Late events come first, so that its place is 0. `again`: it may
-- begin where the one before began (pgmb_internal.rereads); snapshots tell what was read.
create or replace function pgmb_internal.open_batch(base pgmb.claim, numbers regclass, again boolean default false)
returns pgmb.claim
language plpgsql
as $$
declare
  present record;
begin
  present := pgmb_internal.boundary(open_batch.numbers);
  if not open_batch.again
    or not pgmb_internal.rereads(base.done_seq, base.done_next, base.batch_next, base.batch_snapshot, base.upto, present.last)
  then
    base.done_seq := base.batch_seq;
    base.done_next := base.batch_next;
  end if;
  base.done_snapshot := base.batch_snapshot;
  base.batch_snapshot := present.snapshot;
  base.read_before := greatest(base.read_before, nullif(base.upto, 0));
  base.upto := greatest(present.last, base.done_seq);
  base.place := 0;
  return base;
end $$;

-- A queue's position with what the batch after this one starts from: a number of the log and a transaction id, so that
-- every transaction with a higher id takes higher numbers only. `noted` is the sequence before this transaction had an
-- xid, which is the id then. A transaction that had one before (`noted` null) takes the end of the batch, which was read
-- earlier in this call, and an id that no transaction has yet; not for a short batch, which is as soon read again.
-- `again`: the pair before may stay (pgmb_internal.keeps_pair).
create or replace function pgmb_internal.note_pair(base pgmb.claim, noted bigint, again boolean default false)
returns pgmb.claim
language plpgsql
as $$
begin
  if noted is not null then
    if not (note_pair.again and pgmb_internal.keeps_pair(base.done_next, base.batch_next, base.batch_snapshot)) then
      base.batch_next := greatest(pgmb_internal.xid_before(pg_current_xact_id()), base.batch_next);
      base.batch_seq := greatest(note_pair.noted, base.batch_seq);
    end if;
  elsif base.upto - base.batch_seq >= pgmb_internal.worth_a_claim() then
    base.batch_next := greatest(pgmb_internal.xid_before(pgmb_internal.unused_xid()), base.batch_next);
    base.batch_seq := base.upto;
  end if;
  return base;
end $$;

-- A transaction id that no transaction has yet: the next one, or one not far above it. pg_xact_status() refuses those,
-- while a snapshot's xmax may lie below the ids of transactions that are open.
create or replace function pgmb_internal.unused_xid()
returns xid8
language plpgsql
as $$
declare
  candidate bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
  step bigint := 1;
begin
  loop
    begin
      perform pg_xact_status(candidate::text::xid8);
    exception when invalid_parameter_value then
      return candidate::text::xid8;
    end;
    candidate := candidate + step;
    step := step * 2;
  end loop;
end $$;
