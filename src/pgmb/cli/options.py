"""Options that commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Dsn: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dsn",
        envvar=["PGMB_DSN", "DATABASE_URL"],
        help="Connection string or URL; what it leaves out comes from PGHOST and the like.",
        show_default=False,
    ),
]
Stream: TypeAlias = Annotated[str, typer.Option(help="The stream.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
