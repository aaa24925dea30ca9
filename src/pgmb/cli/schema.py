"""pgmb install, upgrade, uninstall, schema emit, version."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

import pgmb
from pgmb import schema
from pgmb._core.connecting import connect
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn, Yes
from pgmb.cli.terminal import confirm
from pgmb.errors import PgmbError

scripts = typer.Typer(help="Print the schema as SQL.", no_args_is_help=True)

Compat: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--compat",
        help=f"Also the functions of {' or '.join(schema.COMPATIBLE)}, in a schema of its name.",
        show_default=False,
        autocompletion=lambda: list(schema.COMPATIBLE),
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(install)
    app.command()(upgrade)
    app.command()(uninstall)
    app.command()(version)
    scripts.command()(emit)
    app.add_typer(scripts, name="schema")


def install(dsn: Dsn = "", compat: Compat = None) -> None:
    """Install the schema pgmb, or upgrade it. Safe to repeat."""
    with connect(dsn, "pgmb cli") as conn:
        before = schema.installed_version(conn)
        schema.install(conn, compat or ())
    if before == schema.VERSION:
        output.line(f"Schema pgmb is at version {schema.VERSION}; its functions were applied again.")
    elif before is None:
        output.line(f"Installed schema pgmb, version {schema.VERSION}.")
        output.line(
            "Events are kept for 7 days, unread ones longer:"
            " `pgmb streams alter main --keep-for …` changes it."
        )
    else:
        output.line(f"Upgraded schema pgmb from version {before} to {schema.VERSION}.")
    for name in compat or ():
        output.line(f"Schema {name} is there, over pgmb's log; it is upgraded with schema pgmb.")


def upgrade(dsn: Dsn = "") -> None:
    """Upgrade the schema pgmb. Fails if it is not installed."""
    with connect(dsn, "pgmb cli") as conn:
        if schema.installed_version(conn) is None:
            missing = PgmbError("schema pgmb is not installed")
            missing.advise("Run `pgmb install`.")
            raise missing
    install(dsn)


def uninstall(dsn: Dsn = "", yes: Yes = False) -> None:
    """Remove the schema pgmb with all its events. Roles are kept, because other databases may use them."""
    with connect(dsn, "pgmb cli") as conn:
        if schema.installed_version(conn) is None:
            output.line("Schema pgmb is not installed.")
            return
        confirm(f"Drop every event in database {conn.info.dbname}?", yes)
        schema.uninstall(conn)
    output.line("Removed schema pgmb.")


def emit(
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Print the script that removes it.")] = False,
    compat: Compat = None,
) -> None:
    """Print the SQL that installs or upgrades the schema, for psql -f."""
    output.line(schema.emit_uninstall() if uninstall else schema.emit(compat or ()))


def version(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Print the versions of the package and of the schema in the database."""
    found = schema.installed_version(dsn) if dsn else None
    if as_json:
        output.json({"pgmb": pgmb.__version__, "schema": schema.VERSION, "database": found})
        return
    output.line(f"pgmb {pgmb.__version__}, schema {schema.VERSION}")
    if dsn:
        output.line(f"database: {'not installed' if found is None else f'schema {found}'}")
