"""Options and arguments that commands share. Names are completed from the database."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from pgmb.cli import completion

Dsn: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dsn",
        envvar=completion.ENVIRONMENT,
        help="Connection string or URL; what it leaves out comes from PGHOST and the like.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Queue: TypeAlias = Annotated[str, typer.Argument(help="The queue.", autocompletion=completion.queues)]
Endpoint: TypeAlias = Annotated[
    str, typer.Argument(help="The endpoint.", autocompletion=completion.endpoints)
]
StreamName: TypeAlias = Annotated[str, typer.Argument(help="The stream.", autocompletion=completion.streams)]
Stream: TypeAlias = Annotated[
    str, typer.Option("--stream", help="The stream.", autocompletion=completion.streams)
]
