"""Hints in the terms of the command line: the command to type, and what is wrong with a connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, LiteralString

import psycopg

from pgmb.cli.options import names
from pgmb.errors import (
    EndpointNotFound,
    NotFound,
    PgmbError,
    QueueNotFound,
    ScheduleNotFound,
    StreamNotFound,
)

_REQUIREMENT: Final = re.compile(r"(?P<package>[\w-]+).*\bextra == ['\"](?P<extra>\w+)['\"]")

COMMANDS: Final = {
    "alter_queue": "pgmb queues alter NAME",
    "alter_stream": "pgmb streams alter NAME",
    "bind": "pgmb queues bind NAME PATTERN",
    "bind_endpoint": "pgmb endpoints bind NAME PATTERN",
    "create_endpoint": "pgmb endpoints create NAME URL",
    "create_queue": "pgmb queues create NAME PATTERN",
    "create_schedule": "pgmb schedules create NAME",
    "create_stream": "pgmb streams create NAME",
    "drop_api_key": "pgmb keys drop NAME",
    "drop_endpoint": "pgmb endpoints drop NAME",
    "drop_queue": "pgmb queues drop NAME",
    "drop_schedule": "pgmb schedules drop NAME",
    "hand_over": "pgmb queues hand-over NAME APP",
}
"""The command that calls a function of the schema pgmb, for functions that the database's hints name."""

_CALL: Final = re.compile(r"\bpgmb\.(?P<function>[a-z_]+)(?:\((?P<arguments>[^()]*)\))?")
_NAMED: Final = re.compile(r"(?P<name>[a-z_]+) => (?P<value>[^,]+)")

_ADDRESS: Final = "--dsn, PGMB_DSN or DATABASE_URL"
_CAUSES: Final = (
    (
        r"Connection refused|No such file or directory",
        f"No PostgreSQL server listens there. Start it, or correct host and port in {_ADDRESS}.",
    ),
    (
        r"resolve host|translate host name|Name or service not known",
        f"No such host. Correct its name in {_ADDRESS}.",
    ),
    (
        r"timeout expired|timed out|No route to host|Network is unreachable",
        f"The host does not answer. Check host and port in {_ADDRESS}, and firewalls in between.",
    ),
    (
        r'database "(?P<name>[^"]*)" does not exist',
        "Create the database (createdb {name}), or name another one in " + _ADDRESS + ".",
    ),
    (
        r'role "(?P<name>[^"]*)" does not exist',
        "Create the role (createuser {name}), or name another user in " + _ADDRESS + ".",
    ),
    (
        r"password authentication failed|no password supplied|authentication failed",
        f"Correct the user and the password in {_ADDRESS}, PGPASSWORD or ~/.pgpass.",
    ),
    (
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        "The server refuses such connections: add a line to its pg_hba.conf, or try sslmode=require.",
    ),
    (
        r"too many clients|remaining connection slots|too many connections",
        "The server has no connection left: close some, raise max_connections, or connect through a pooler.",
    ),
    (
        r"does not support SSL|SSL error|certificate",
        f"Correct sslmode, or the certificates, in {_ADDRESS}.",
    ),
    (r"starting up|shutting down|in recovery mode", "The server is not ready. Try again in a moment."),
)


_KINDS: Final[dict[type[NotFound], LiteralString]] = {
    QueueNotFound: "select queue from pgmb.queue_status",
    StreamNotFound: "select stream from pgmb.stream_status",
    EndpointNotFound: "select name from pgmb.endpoints",
    ScheduleNotFound: "select name from pgmb.schedules()",
}


def similar(error: PgmbError, words: Sequence[str]) -> str | None:
    """Of what was not found: the name that a word of the command line may have meant."""
    query = _KINDS.get(type(error)) if isinstance(error, NotFound) else None
    missing = [word for word in words if f"'{word}'" in str(error)]
    if query is None or not missing:
        return None
    close = get_close_matches(missing[0], names(query, _dsn(words)), 1)
    return f"Did you mean {close[0]!r}?" if close else None


def _dsn(words: Sequence[str]) -> str:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--dsn" or word.startswith("--dsn="):
            return word.partition("=")[2] or following
    return ""


def in_commands(hint: str | None) -> str | None:
    """A hint of the database with each call of a function replaced by the command that does the same."""
    return None if hint is None else _CALL.sub(_command, hint)


def _command(call: re.Match[str]) -> str:
    command = COMMANDS.get(call["function"])
    if command is None:
        return call[0]
    options = [
        f"--{found['name'].replace('_', '-')} {found['value']}"
        for found in _NAMED.finditer(call["arguments"] or "")
    ]
    return f"`{' '.join([command, *options])}`"


def connection_failure(error: Exception) -> tuple[str, str]:
    """Why a connection was not made, and what to do about it."""
    said = str(error).strip() or "the connection was lost"
    if isinstance(error, psycopg.ProgrammingError):
        # It quotes the connection string, or the part that cannot be read, with the password.
        said = re.sub('".*"', '"…"', said, flags=re.DOTALL)
        return f"not a connection string: {said}", (
            f"{_ADDRESS} is a URL, postgresql://user@host:5432/database, or pairs, host=… dbname=… user=…"
        )
    for pattern, hint in _CAUSES:
        if found := re.search(pattern, said):
            return said, hint.format(**found.groupdict())
    return said, f"Check that the server is running and that {_ADDRESS} is right."


def extras_with(module: str) -> list[str]:
    """The extras of pgmb that bring a module, as the package's metadata names them."""
    from importlib.metadata import requires  # of no use to a command that works

    name = module.partition(".")[0]
    found = [_REQUIREMENT.match(requirement) for requirement in requires("pgmb") or ()]
    return sorted({one["extra"] for one in found if one and one["package"].replace("-", "_") == name})
