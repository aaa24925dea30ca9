"""What commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pgmb import Event, FailedAttempt
from pgmb._core import masking
from pgmb.cli import durations

# Where the output goes to a file or a pipe there is no width to fit into.
_UNWRAPPED_COLUMNS = 100_000
# Payloads are printed as they were published. A line end in one stands between its tokens.
_ON_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")

printable = masking.printable


def fail(message: str, hint: str | None, code: int = 1) -> NoReturn:
    """One line, and one for the hint; never a traceback."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("Error: ", "bold red"), printable(" ".join(message.split()))))
    if hint:
        console.print(Text.assemble(("Hint: ", "bold"), printable(" ".join(hint.split()))))
    sys.exit(code)


def note(text: str) -> None:
    """Something worth knowing, beside the output."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Note: ", "bold"), printable(text)))


def line(text: str) -> None:
    # Flushed: what is settled after it was printed must have been printed.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json(value: Any) -> None:
    """One line of JSON in UTF-8, times and durations as ISO 8601 has them; to a terminal without control
    characters.
    """
    encoded = msgspec.json.encode(value).translate(_ON_ONE_LINE)
    if sys.stdout.isatty():
        encoded = masking.printable_json(encoded.decode()).encode()
    encoded += b"\n"
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:
        sys.stdout.write(encoded.decode())
    else:
        sys.stdout.flush()
        binary.write(encoded)
    sys.stdout.flush()


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _UNWRAPPED_COLUMNS)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    console().print(tabulate(title, columns, rows))


def tabulate(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table whose first column is a name; numbers and durations stand to the right."""
    found = [list(row) for row in rows]
    shown = Table(title=printable(title), title_justify="left")
    for number, name in enumerate(columns):
        values = [row[number] for row in found if row[number] is not None]
        right = bool(values) and all(_is_measure(value) for value in values)
        shown.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in found:
        shown.add_row(*(Text(cell(value)) for value in row))
    return shown


class Bound(NamedTuple):
    """A count that may be higher (`+`) or lower (`<=`) than it says."""

    value: int | timedelta
    at_least: bool


def bounded(one: Any, field: str) -> Any:
    """A field of a queue's or stream's status, as a bound where it is one."""
    value = getattr(one, field)
    if value is None:
        return None
    if field in one.at_least:
        return Bound(value, at_least=True)
    return Bound(value, at_least=False) if field in getattr(one, "at_most", ()) else value


def _is_measure(value: Any) -> bool:
    return isinstance(value, (int, float, timedelta, Bound)) and not isinstance(value, bool)


def record(title: str, values: Mapping[str, Any]) -> None:
    """One thing: a property a row, of as many lines as its text has."""
    # A title is wrapped to the width of its table.
    shown = printable(title)
    grid = Table(title=shown, title_justify="left", show_header=False, min_width=min(len(shown), 80))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        lines = value.split("\n") if isinstance(value, str) else [value]
        grid.add_row(name.replace("_", " "), Text("\n".join(map(cell, lines))))
    console().print(grid)


def attempts(title: str, failed: Sequence[FailedAttempt]) -> None:
    """Failed attempts, and the last one's traceback; nothing if there are none."""
    if not failed:
        return
    table(title, ("attempt", "at", "error"), [(str(one.attempt), one.at, one.error) for one in failed])
    if (trace := failed[-1].detail) is not None:
        line("\n".join(map(printable, trace.rstrip().split("\n"))))


def cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case timedelta():
            return durations.show(value)
        case datetime():
            return value.astimezone().isoformat(sep=" ", timespec="seconds")
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
        case Bound():
            return f"{cell(value.value)}+" if value.at_least else f"<={cell(value.value)}"
        case list() | tuple():
            return " ".join(map(cell, cast("Sequence[Any]", value))) or "-"
        case _:
            return printable(str(value))


def event_document(event: Event) -> dict[str, Any]:
    """An event as a JSON document. The payload is the text that was published."""
    return {
        "seq": event.seq,
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "payload": msgspec.Raw(event.raw),
        "headers": event.headers,
        "published_at": event.published_at,
        "attempt": event.attempt,
        "stream": event.stream,
    }
