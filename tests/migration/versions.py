"""A next version of the schema, made of this one: what an upgrade is tested with before there is a second."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from pgmb import schema

TABLES = """\
alter table pgmb.queue add column note text not null default 'none';
create table pgmb.extra (id bigint generated always as identity primary key, seq bigint not null);
create index extra_seq on pgmb.extra (seq);
"""
"""What version 2 changes in the tables."""

# As a version does whose functions have other parameters: drops them, for the install to create again.
_DROPS = """\
do $$
declare
  gone regprocedure;
begin
  for gone in
    select p.oid from pg_proc p
    where p.pronamespace = 'pgmb'::regnamespace and p.proname in ('publish', 'publish_many', 'receive', 'ack')
  loop
    execute format('drop function %s', gone);
  end loop;
end $$;
"""

_FUNCTION = """\
create or replace function pgmb.extras()
returns bigint
language sql stable
begin atomic
  select count(*) from pgmb.extra;
end;
"""


def next_version(folder: Path) -> Path:
    """The SQL of this package with one version more, for `become`."""
    made = folder / "sql"
    with as_file(files("pgmb") / "sql") as ours:
        shutil.copytree(ours, made)
    (made / "extra").mkdir()
    (made / "extra" / "tables.sql").write_text(TABLES)
    (made / "extra" / "extra.sql").write_text(_FUNCTION)
    with (made / "manifest.txt").open("a") as manifest:
        manifest.write("extra/tables.sql what version 2 adds\nextra/extra.sql what counts it\n")
    add_migration(made, schema.VERSION + 1, TABLES + _DROPS)
    return made


def add_migration(sql: Path, number: int, text: str) -> None:
    (sql / "migrations").mkdir(exist_ok=True)
    (sql / "migrations" / f"{number:04}_next.sql").write_text(text)


def become(patch: pytest.MonkeyPatch, sql: Path, version: int) -> None:
    """From here on this process is the package of that version."""
    patch.setattr(schema, "_SQL", sql)
    patch.setattr(schema, "VERSION", version)
