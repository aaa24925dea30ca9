"""The command line: parse, call, print. One module a group of commands."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import psycopg
import typer
from psycopg_pool import PoolTimeout

from pgmb.cli import (
    dlq,
    doctor,
    output,
    publish,
    queues,
    receive,
    roles,
    route,
    schedules,
    schema,
    status,
    streams,
    tail,
    top,
    work,
)
from pgmb.errors import PgmbError

app = typer.Typer(
    name="pgmb",
    help="A message broker and event log inside PostgreSQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (
    schema,
    doctor,
    status,
    top,
    streams,
    queues,
    publish,
    receive,
    tail,
    dlq,
    route,
    schedules,
    work,
    roles,
):
    group.register(app)


def main() -> None:
    """The entry point: errors become a message, a hint and exit code 1; wrong usage is 2."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is written out instead of failing.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="pgmb")
    except PgmbError as error:
        output.fail(str(error), error.hint)
    except (psycopg.Error, PoolTimeout) as error:
        output.fail(*_told(error))
    except UnicodeEncodeError as error:
        output.fail(f"not text: {error.object!a}", "Names, topics and keys are UTF-8.")
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)


def _told(error: Exception) -> tuple[str, str | None]:
    """What an error of the driver or the server says, without the context around it."""
    if not isinstance(error, psycopg.Error):
        return str(error), "The server may be down, or have no connection left."
    if error.diag.message_primary is None:
        is_address = isinstance(error, psycopg.OperationalError)
        hint = "Is the server running, and the address right? --dsn, PGMB_DSN or DATABASE_URL name it."
        return str(error).strip() or type(error).__name__, hint if is_address else None
    detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
    return error.diag.message_primary + detail, error.diag.message_hint


__all__ = ["app", "main"]
