"""A next version of the package, made of this one: upgrades are tested with it before there is a second."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pgmb
from pgmb import schema

_PACKAGE = Path(pgmb.__file__).parent

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
    """The SQL of this package with one version more."""
    made = folder / "sql"
    shutil.copytree(_PACKAGE / "sql", made)
    (made / "extra").mkdir()
    (made / "extra" / "tables.sql").write_text(TABLES)
    (made / "extra" / "extra.sql").write_text(_FUNCTION)
    with (made / "manifest.txt").open("a") as manifest:
        manifest.write("extra/tables.sql what version 2 adds\nextra/extra.sql what counts it\n")
    add_migration(made, schema.VERSION + 1, TABLES + _DROPS)
    return made


def next_package(folder: Path) -> Path:
    """This package with the SQL of the next version, for PYTHONPATH."""
    made = folder / "pgmb"
    shutil.copytree(_PACKAGE, made, ignore=shutil.ignore_patterns("sql", "__pycache__"))
    next_version(made)
    module = made / "schema.py"
    text, count = re.subn(
        r"^VERSION = \d+$", f"VERSION = {schema.VERSION + 1}", module.read_text(), flags=re.MULTILINE
    )
    assert count == 1
    module.write_text(text)
    return folder


def add_migration(sql: Path, number: int, text: str) -> None:
    (sql / "migrations").mkdir(exist_ok=True)
    (sql / "migrations" / f"{number:04}_next.sql").write_text(text)
