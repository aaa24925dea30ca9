"""Options and arguments that commands share. The shell completes names from the database."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, LiteralString, TypeAlias

import typer

from pgmb._core.connecting import connect

ENVIRONMENT = ["PGMB_DSN", "DATABASE_URL"]
"""Where the connection string comes from if it is not given."""

_SHORT_TIMEOUTS = "-c statement_timeout=1000 -c lock_timeout=100"


def _queues(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select queue from pgmb.queue_status")


def _streams(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select stream from pgmb.stream_status")


def _endpoints(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select name from pgmb.endpoints")


def _names(ctx: typer.Context, incomplete: str, query: LiteralString) -> list[str]:
    return [name for name in names(query, ctx.params.get("dsn") or "") if name.startswith(incomplete)]


def of_environment() -> str:
    """The connection string where none is given."""
    return next((os.environ[name] for name in ENVIRONMENT if os.environ.get(name)), "")


def names(query: LiteralString, dsn: str = "") -> list[str]:
    """What the database knows, for a shell that completes words or a hint: none if it cannot tell at once."""
    dsn = dsn or of_environment()
    try:
        with connect(dsn, "pgmb cli", connect_timeout=2, options=_SHORT_TIMEOUTS) as conn:
            return sorted(name for (name,) in conn.execute(query))
    except Exception:
        return []


Dsn: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dsn",
        envvar=ENVIRONMENT,
        help="Connection string or URL. Missing parts come from the PG* variables.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Queue: TypeAlias = Annotated[str, typer.Argument(help="The queue.", autocompletion=_queues)]
Endpoint: TypeAlias = Annotated[str, typer.Argument(help="The endpoint.", autocompletion=_endpoints)]
StreamName: TypeAlias = Annotated[str, typer.Argument(help="The stream.", autocompletion=_streams)]
Stream: TypeAlias = Annotated[str, typer.Option("--stream", help="The stream.", autocompletion=_streams)]

StorageOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the storage, such as AWS_ENDPOINT_URL. The environment gives the others.",
        show_default=False,
    ),
]


def storage_options(given: Sequence[str] | None) -> dict[str, str]:
    """The options by their names."""
    options: dict[str, str] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter("not an option of a storage. Write NAME=VALUE.")
        options[name.strip()] = value
    return options
