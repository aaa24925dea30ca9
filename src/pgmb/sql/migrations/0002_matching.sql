-- A binding keeps the condition that it puts on events, ready to run, instead of what it is made from.

alter table pgmb.queue add column matching text not null default '';
alter table pgmb.binding add column matching text not null default '';
update pgmb.binding set matching = pgmb.matching(topics, regex);
update pgmb.queue q set matching = b.matching
from pgmb.binding b where b.queue = q.id and b.version = q.bindings;
alter table pgmb.queue drop column topics, drop column regex, drop constraint queue_name_check,
  -- The same in every locale.
  add constraint queue_name check (name ~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$');
alter table pgmb.binding drop column topics, drop column regex;

drop function pgmb.matching(text[], text);
drop function pgmb.batch_events(
  integer, pg_snapshot, bigint, xid8, pg_snapshot, xid8, bigint, bigint, bigint, text[], text, bigint);
drop function pgmb.lease_parts(uuid);
drop function pgmb.is_retry_lease(bigint);
