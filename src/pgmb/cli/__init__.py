"""The command line: parse, call, print. One module a group of commands."""

from __future__ import annotations

import sys

import psycopg
import typer
from psycopg_pool import PoolTimeout

from pgmb.cli import events, output, roles, schema, status
from pgmb.errors import PgmbError

app = typer.Typer(
    name="pgmb",
    help="A message broker and event log inside PostgreSQL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (schema, status, events, roles):
    group.register(app)


def main() -> None:
    """The entry point: errors become a message, a hint and exit code 1."""
    try:
        app()
    except PgmbError as error:
        output.fail(str(error), error.hint)
    except (psycopg.Error, PoolTimeout) as error:
        output.fail(str(error).strip(), None)
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)


__all__ = ["app", "main"]
