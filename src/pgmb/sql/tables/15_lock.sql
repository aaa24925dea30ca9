-- Advisory locks are open to every role that can connect. What goes into their keys is kept here, so that a key cannot be
-- computed by others: only the owner reads this table (see pgmb_internal.lock_key).
create table pgmb.lock_secret (
  only_one boolean primary key default true check (only_one),
  secret bytea not null
);
insert into pgmb.lock_secret (secret)
values (sha256(convert_to(gen_random_uuid()::text || gen_random_uuid()::text, 'UTF8')));
