-- Names that people give.

-- Refuses what cannot be the name of a queue, a group, a schedule or a worker. Errors: MB003.
create or replace function pgmb_internal.assert_name(kind text, name text)
returns void
language plpgsql immutable
as $$
begin
  if name is null or name !~ '^[^\x01-\x20\x7f]([^\x01-\x1f\x7f]{0,98}[^\x01-\x20\x7f])?$' then
    raise exception 'invalid % name: %', kind, coalesce(quote_literal(name), 'null') using errcode = 'MB003',
      hint = 'Up to 100 characters, none of them control characters, no space at either end.';
  end if;
end $$;
