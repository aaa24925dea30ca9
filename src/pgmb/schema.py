"""Install, upgrade, verify and uninstall the schema `pgmb`, and `pgmb_internal` beside it.

One script does both install and upgrade, the same whether Python, the command line or `psql -f` runs it:
pending migrations, then every function, in one transaction under one advisory lock.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import errors, pq

from pgmb._core.connecting import connect
from pgmb.errors import InvalidArgument, SchemaVersionError, translated

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

VERSION = 1
"""The schema version that this package installs."""

_LOCK_TIMEOUT = "200ms"
_RETRY_SECONDS = 1.0

_SQL = files("pgmb") / "sql"


LOOK = "select version, pg_backend_pid() from pgmb.installation"
"""What a client asks first: the schema's version, and whom it really talks to."""


COMPATIBLE = ("pgmq",)
"""Whose functions can be installed beside our own: each in a schema of its name."""

_ON_REQUEST = tuple(f"compat/{name}/" for name in COMPATIBLE)


def emit(compat: Sequence[str] = ()) -> str:
    """The script that installs the schema into an empty database, or upgrades the one that is there."""
    return f"begin;\n{_body(compat)}\ncommit;\n"


def _body(compat: Sequence[str]) -> str:
    if unknown := set(compat) - set(COMPATIBLE):
        raise InvalidArgument(f"no compatible schema is named {', '.join(sorted(unknown))}")
    ours = [path for path in manifest() if not path.startswith(_ON_REQUEST)]
    tables = _read(_tables(ours))
    digest = _digest_of(tables)
    return "\n".join(
        (
            _HEADER.format(version=VERSION, lock_timeout=_LOCK_TIMEOUT, tables=digest),
            _guarded(
                "to_regnamespace('pgmb') is null",
                *tables,
                "insert into pgmb.installation (version, system_identifier, tables) "
                f"select {VERSION}, c.system_identifier, '{digest}' from pg_control_system() c;",
            ),
            *(
                _guarded(
                    f"(select version from pgmb.installation) < {number}",
                    text,
                    f"update pgmb.installation set version = {number}, upgraded_at = now(),"
                    f" tables = '{digest}';",
                )
                for number, text in _migrations()
            ),
            *_read(_functions(ours)),
            *(step for name in COMPATIBLE for step in _compat(name, name in compat)),
        )
    )


def _compat(name: str, wanted: bool) -> list[str]:
    """The steps that install a compatible schema if it is wanted, and upgrade it where it is."""
    theirs = [path for path in manifest() if path.startswith(f"compat/{name}/")]
    tables = _read(_tables(theirs))
    *functions, unqualified = _read(_functions(theirs))
    present = f"to_regclass('{name}.installation') is not null"
    return [
        *([_FOREIGN.format(name=name), _guarded(f"not ({present})", *tables)] if wanted else []),
        _guarded(present, *functions),
        _guarded(f"{present} and has_schema_privilege(to_regnamespace('public'), 'create')", unqualified),
    ]


def emit_uninstall() -> str:
    """The script that removes the schema with every event in it. Roles stay: other databases may use them."""
    return (
        "set client_min_messages = warning;\n"
        "drop schema if exists pgmb, pgmb_internal cascade;\n"
        "drop schema if exists pgmb_condition cascade;\n"
        "drop schema if exists pgmb_parser cascade;\n"
        + "".join(_REMOVAL.format(name=name) for name in COMPATIBLE)
    )


def install(
    target: str | psycopg.Connection[Any], compat: Sequence[str] = (), *, patience: float = 60.0
) -> None:
    """Install the schema, or upgrade it. If it is up to date, its functions are applied again, without locks.

    compat: also the functions of others (`pgmq`), over our log. Once there, they are upgraded with it.
    patience: seconds to retry while open transactions hold locks that the upgrade needs. No attempt waits for
    a lock longer than 0.2 s, because publishers and consumers wait behind it.
    """
    _run(target, _body(compat), patience)


upgrade = install


def uninstall(target: str | psycopg.Connection[Any]) -> None:
    """Remove the schema with every event in it."""
    _run(target, emit_uninstall())


def installed_version(target: str | psycopg.Connection[Any]) -> int | None:
    """The version of the schema in the database, or None where it is not installed."""
    with _connection(target) as conn, translated():
        if conn.execute("select to_regclass('pgmb.installation')").fetchone() == (None,):
            return None
        row = cast("tuple[int]", conn.execute("select version from pgmb.installation").fetchone())
        return row[0]


def works_with(found: int | None) -> bool:
    """Whether this package works with a schema version: its own, the one before it and the one after it."""
    return found is not None and max(1, VERSION - 1) <= found <= VERSION + 1


def check(found: int | None) -> None:
    """Raise SchemaVersionError unless this package works with the version found."""
    if not works_with(found):
        raise SchemaVersionError(found, VERSION)


def verify(target: str | psycopg.Connection[Any]) -> None:
    """Raise SchemaVersionError unless this package works with the version in the database."""
    check(installed_version(target))


_HEADER = """\
-- pgmb, schema version {version}: installs it, or upgrades what is there. Run it with psql -f, as the user
-- who shall own it; no superuser is needed.
set local client_min_messages = warning;
set local search_path = pg_catalog;
set local check_function_bodies = off;
do $pgmb_lock$ begin perform pg_advisory_xact_lock(28749); end $pgmb_lock$;
-- Publishers and consumers wait behind a lock that this waits for: rather fail, and be run again.
set local lock_timeout = '{lock_timeout}';
do $pgmb_guard$
begin
  if to_regnamespace('pgmb') is not null and to_regclass('pgmb.installation') is null then
    raise exception 'schema pgmb exists and is not of this pgmb' using errcode = 'MB006',
      hint = 'fraruiz/pgmb and @haathie/pgmb use a schema of that name, too. Rename it'
        ' (alter schema pgmb rename to old_pgmb), or install into another database.'
        ' The pages on migrating from them say how to move what is in it.';
  end if;
  if to_regclass('pgmb.installation') is not null then
    if exists (select from pgmb.installation i
      where i.version = {version} and to_jsonb(i) ->> 'tables' is distinct from '{tables}')
    then
      raise exception 'schema pgmb has the tables of another version before 0.1.0' using errcode = 'MB030',
        hint = 'Until 0.1.0 there are no upgrades. Remove the schema with its events (pgmb uninstall), then'
          ' install again.';
    end if;
    if (select version from pgmb.installation) > {version} then
      raise exception 'schema pgmb is at version %, newer than {version}',
        (select version from pgmb.installation) using errcode = 'MB030',
        hint = 'Upgrade the pgmb package, or run the script of the newer version.';
    end if;
  end if;
end $pgmb_guard$;
"""

_FOREIGN = """\
do $pgmb_foreign$
declare
  found_one text;
begin
  if to_regnamespace('{name}') is not null and to_regclass('{name}.installation') is null then
    raise exception 'schema {name} exists and is not of pgmb' using errcode = 'MB006',
      hint = 'Drop or rename it first (alter schema {name} rename to ...), or use another database.';
  end if;
  select p.oid::regprocedure into found_one from pg_proc p
  where p.pronamespace = to_regnamespace('public') and p.proname like '{name}\\_%'
    and obj_description(p.oid, 'pg_proc') is distinct from 'pgmb compat {name}' limit 1;
  if found_one is not null then
    raise exception 'function % exists and is not of pgmb', found_one using errcode = 'MB006',
      hint = 'Drop it first, or use another database.';
  end if;
end $pgmb_foreign$;
"""

_REMOVAL = """\
do $pgmb_removal$
declare
  gone regprocedure;
begin
  if to_regclass('{name}.installation') is not null then
    drop schema {name} cascade;
  end if;
  for gone in
    select p.oid from pg_proc p where obj_description(p.oid, 'pg_proc') = 'pgmb compat {name}'
  loop
    execute format('drop function %s', gone);
  end loop;
end $pgmb_removal$;
"""


def _guarded(condition: str, *statements: str) -> str:
    body = "\n".join(statements)
    return (
        f"do $pgmb_step$\nbegin\n  if {condition} then\n    execute $pgmb_sql$\n"
        f"{body}\n$pgmb_sql$;\n  end if;\nend $pgmb_step$;\n"
    )


def manifest() -> list[str]:
    """The files of the schema, in the order in which `sql/manifest.txt` lists them."""
    lines = (_SQL / "manifest.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def _tables(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path.endswith("/tables.sql")]


def _functions(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not path.endswith("/tables.sql")]


def _digest_of(tables: Sequence[str]) -> str:
    """Of what the scripts do: comments and spaces may change."""
    text = " ".join(re.sub(r"--.*", "", "\n".join(tables)).split())
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _read(paths: Sequence[str]) -> list[str]:
    return [_VIEW.sub(_if_changed, _SQL.joinpath(*path.split("/")).read_text()) for path in paths]


_VIEW = re.compile(r"^create or replace view ([\w.]+) as$.*?;$", re.MULTILINE | re.DOTALL)


def _if_changed(view: re.Match[str]) -> str:
    """Replacing a view waits for its readers. So one of the same text and schema version is left alone."""
    name, text = view[1], view[0]
    digest = hashlib.md5(f"{VERSION} {text}".encode(), usedforsecurity=False).hexdigest()
    condition = (
        f"to_regclass('{name}') is null or"
        f" (select i.views ->> '{name}' from pgmb.installation i) is distinct from '{digest}'"
    )
    note = f'update pgmb.installation i set views = i.views || \'{{"{name}": "{digest}"}}\';'
    return _guarded(condition, text, note)


def _migrations() -> list[tuple[int, str]]:
    """The migrations in order: NNNN_what.sql brings the tables from version NNNN - 1 to NNNN.

    The first version has none, and a package cannot hold an empty folder.
    """
    if not (_SQL / "migrations").is_dir():
        return []
    found = [entry for entry in (_SQL / "migrations").iterdir() if entry.name.endswith(".sql")]
    return sorted((int(entry.name.split("_")[0]), entry.read_text()) for entry in found)


@contextmanager
def _connection(target: str | psycopg.Connection[Any]) -> Generator[psycopg.Connection[Any]]:
    if isinstance(target, str):
        with connect(target) as conn:
            yield conn
    else:
        yield target


def _run(target: str | psycopg.Connection[Any], script: str, patience: float = 0.0) -> None:
    until = time.monotonic() + patience
    with _connection(target) as conn, translated():
        # The script sets the search path and more for its transaction, which must end with it.
        if conn.info.transaction_status != pq.TransactionStatus.IDLE:
            raise InvalidArgument("the connection is inside a transaction; commit or roll back first")
        while True:
            try:
                with conn.transaction():
                    conn.execute(cast("Any", script))
                return
            except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
                if time.monotonic() >= until:
                    error.add_note("Transactions that stay open hold locks: see pg_stat_activity.")
                    raise
            time.sleep(_RETRY_SECONDS)
