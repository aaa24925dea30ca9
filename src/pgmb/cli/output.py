"""What commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text


def fail(message: str, hint: str | None) -> NoReturn:
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("Error: ", "bold red"), message))
    if hint:
        console.print(Text.assemble(("Hint: ", "bold"), hint))
    sys.exit(1)


def line(text: str) -> None:
    # Flushed: what is settled after it was printed must have been printed.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json(value: Any) -> None:
    """One line of JSON, times and durations as ISO 8601 has them."""
    line(msgspec.json.encode(value).decode())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    shown = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        shown.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        shown.add_row(*(Text(_cell(value)) for value in row))
    # Where the output goes to a file or a pipe there is no width to fit into.
    Console(width=None if sys.stdout.isatty() else 200).print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds())))
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
