-- The schema of the functions that only functions of schema pgmb call, with the owner's rights (docs/adr/0026). Code
-- there runs as the owner of pgmb: it must belong to that role.

do $pgmb_internal$
declare
  owner regrole := (select n.nspowner from pg_namespace n where n.nspname = 'pgmb');
  found_owner regrole := (select n.nspowner from pg_namespace n where n.nspname = 'pgmb_internal');
begin
  if found_owner is null then
    create schema pgmb_internal;
  elsif found_owner <> owner then
    raise exception 'schema pgmb_internal belongs to %, but schema pgmb to %', found_owner, owner using errcode = 'MB006',
      hint = 'Drop it (drop schema pgmb_internal cascade) and run this again.';
  end if;
end $pgmb_internal$;
