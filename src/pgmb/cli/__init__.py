"""The command line: parse, call, print. One module a group of commands."""

from __future__ import annotations

import copy
import logging
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from psycopg_pool import PoolTimeout
from typer.core import TyperCommand, TyperGroup

import pgmb
from pgmb.cli import (
    demo,
    dlq,
    doctor,
    endpoints,
    erase,
    event,
    hints,
    keys,
    lake,
    output,
    publish,
    queues,
    receive,
    route,
    schedules,
    schema,
    serve,
    spark,
    status,
    streams,
    tail,
    top,
    up,
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
    demo,
    doctor,
    status,
    top,
    streams,
    queues,
    endpoints,
    publish,
    receive,
    tail,
    event,
    dlq,
    route,
    schedules,
    keys,
    up,
    work,
    spark,
    lake,
    erase,
    serve,
):
    group.register(app)


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    """For help, which would show a type beside a flag that takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


def _show(group: typer.Typer) -> None:
    group.info.cls = _Group
    for command in group.registered_commands:
        command.cls = _Command
    for below in group.registered_groups:
        if below.typer_instance is not None:
            _show(below.typer_instance)


_show(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.line(f"pgmb {pgmb.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: errors become a message, a hint and exit code 1; wrong usage is 2."""
    _open_closed_streams()
    # What the pool has to say while it tries again belongs to a log, not between a command's lines.
    logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is written out instead of failing.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _asked(*sys.argv[1:2])(prog_name="pgmb")
    except PgmbError as error:
        output.fail(str(error), hints.similar(error, sys.argv[1:]) or hints.in_commands(error.hint))
    except (psycopg.Error, PoolTimeout) as error:
        output.fail(*_told(error))
    except ModuleNotFoundError as error:
        extras = hints.extras_with(error.name or "")
        if not extras:
            raise
        wanted = " or ".join(f"pip install 'pgmb[{extra}]'" for extra in extras)
        output.fail(f"this command needs {error.name}, which is not installed", f"Run {wanted}.")
    except UnicodeEncodeError as error:
        output.fail(f"not text: {error.object!a}", "Names, topics and keys are UTF-8.")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        output.fail(str(error), None)


def _asked(name: str = "") -> typer.Typer:
    """The app with the named command alone, because Typer builds every command that an app has at each start.
    The whole app if there is no such command, or if a shell asks for completions."""
    chosen = copy.copy(app)
    chosen.registered_groups = [group for group in app.registered_groups if group.name == name]
    chosen.registered_commands = [
        command
        for command in app.registered_commands
        if command.callback and name == (command.name or command.callback.__name__)
    ]
    found = chosen.registered_groups or chosen.registered_commands
    return chosen if found and "_PGMB_COMPLETE" not in os.environ else app


def _open_closed_streams() -> None:
    """A shell may close them (`<&-`), and Python then has none; nothing is read or written instead."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - to the end


def _told(error: Exception) -> tuple[str, str | None]:
    """What an error of the driver or the server says, without the context around it."""
    if not isinstance(error, psycopg.Error):
        return str(error), "The server may be down, or have no connection left."
    if error.diag.message_primary is None:
        # The other one: a connection string that cannot be read.
        if isinstance(error, (psycopg.OperationalError, psycopg.ProgrammingError)):
            return hints.connection_failure(error)
        return str(error).strip() or type(error).__name__, None
    detail = f" ({error.diag.message_detail})" if error.diag.message_detail else ""
    return error.diag.message_primary + detail, hints.in_commands(error.diag.message_hint)


__all__ = ["app", "main"]
