"""pgmb install, upgrade, uninstall, schema emit, version."""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Annotated

import psycopg
import typer

from pgmb import schema
from pgmb.cli import output
from pgmb.cli.confirmation import confirm
from pgmb.cli.options import AsJson, Dsn, Yes
from pgmb.errors import PgmbError

scripts = typer.Typer(help="The schema as SQL.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.command()(install)
    app.command()(upgrade)
    app.command()(uninstall)
    app.command()(version)
    scripts.command()(emit)
    app.add_typer(scripts, name="schema")


def install(dsn: Dsn = "") -> None:
    """Install the schema pgmb, or upgrade it; nothing happens when it is up to date."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        before = schema.installed_version(conn)
        schema.install(conn)
    if before == schema.VERSION:
        output.line(f"Schema pgmb is at version {schema.VERSION}; its functions were applied again.")
    elif before is None:
        output.line(f"Installed schema pgmb, version {schema.VERSION}.")
    else:
        output.line(f"Upgraded schema pgmb from version {before} to {schema.VERSION}.")


def upgrade(dsn: Dsn = "") -> None:
    """Upgrade the schema pgmb; fails where it is not installed."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        if schema.installed_version(conn) is None:
            missing = PgmbError("schema pgmb is not installed")
            missing.advise("Run `pgmb install`.")
            raise missing
    install(dsn)


def uninstall(dsn: Dsn = "", yes: Yes = False) -> None:
    """Remove the schema pgmb with every event in it. Roles stay: other databases may use them."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        confirm(f"Drop every event in database {conn.info.dbname}?", yes)
        schema.uninstall(conn)
    output.line("Removed schema pgmb.")


def emit(
    uninstall: Annotated[bool, typer.Option("--uninstall", help="The script that removes it.")] = False,
) -> None:
    """Print the SQL that installs or upgrades the schema, for psql -f."""
    output.line(schema.emit_uninstall() if uninstall else schema.emit())


def version(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Print the package's version, the schema version it works with, and the database's if there is one."""
    found = schema.installed_version(dsn) if dsn else None
    if as_json:
        output.json({"pgmb": package_version("pgmb"), "schema": schema.VERSION, "database": found})
        return
    output.line(f"pgmb {package_version('pgmb')}, schema {schema.VERSION}")
    if dsn:
        output.line(f"database: {'not installed' if found is None else f'schema {found}'}")
