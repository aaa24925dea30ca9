-- How far a queue has come: its position, and what of the log waits behind it.

-- The batch that a queue at this position reads, or of which a claim leases events.
create or replace function pgmb_internal.batch_of(at pgmb.claim)
returns pgmb.batch
language sql immutable
as $$
  select row((at).done_snapshot, (at).done_seq, (at).done_next, (at).batch_snapshot, (at).own, (at).own_seq)::pgmb.batch
$$;
