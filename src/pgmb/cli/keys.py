"""pgmb keys: list, create, drop; pgmb audit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeAlias

import typer

from pgmb import connect
from pgmb.cli import durations, output
from pgmb.cli.changes import change
from pgmb.cli.options import AsJson, Dsn, Yes
from pgmb.cli.terminal import confirm

keys = typer.Typer(help="API keys for HTTP and the dashboard.", no_args_is_help=True)

Name: TypeAlias = Annotated[str, typer.Argument(help="The key's name.")]


def register(app: typer.Typer) -> None:
    keys.command("list")(list_keys)
    for command in (create, drop):
        keys.command()(command)
    app.add_typer(keys, name="keys")
    app.command()(audit)


def list_keys(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List keys with their scopes and last use. The keys themselves are not stored."""
    with connect(dsn, max_size=1) as broker:
        found = broker.api_keys()
    if as_json:
        output.json(found)
        return
    columns = ("name", "scopes", "created_at", "expires_at", "used_at")
    rows = [[getattr(key, column) for column in columns] for key in found]
    output.table("Keys", [column.replace("_", " ") for column in columns], rows)


def create(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option(
            help="publish:STREAM, read:STREAM, consume:QUEUE (each may be *), inspect or operate;"
            " may be repeated."
        ),
    ],
    dsn: Dsn = "",
    expires: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse, metavar="DURATION", help="How long the key is valid, for example 30d."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    expires_at = None if expires is None else datetime.now(UTC) + expires
    with connect(dsn, max_size=1) as broker:
        made = change(broker.create_api_key, name, scope, expires_at=expires_at)
    if as_json:
        output.json(made)
        return
    output.line(made.key)
    output.note(f"key {name} cannot be shown again. Send it as `Authorization: Bearer KEY`.")


def drop(name: Name, dsn: Dsn = "", yes: Yes = False) -> None:
    """Revoke a key and its sessions. Servers notice within seconds."""
    with connect(dsn, max_size=1) as broker:
        confirm(f"Drop key {name}?", yes)
        dropped = change(broker.drop_api_key, name)
    shown = output.printable(name)
    output.line(f"Dropped key {shown}." if dropped else f"There is no key {shown}.")


def audit(
    dsn: Dsn = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List changes made over HTTP and on the command line, and who made them."""
    with connect(dsn, max_size=1) as broker:
        entries = broker.audit(limit)
    if as_json:
        output.json(entries)
        return
    rows = [[entry.at, entry.actor, entry.action, entry.subject, _shown(entry.detail)] for entry in entries]
    output.table("Audit", ["at", "by", "what", "of", "detail"], rows)


def _shown(detail: dict[str, Any]) -> str | None:
    return "; ".join(f"{name}: {output.cell(value)}" for name, value in detail.items()) or None
