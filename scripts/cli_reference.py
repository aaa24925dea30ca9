"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from pgmb.cli import app

INTRODUCTION = """\
# Command line reference

Made from the commands by `make docs`; do not edit. [How to use it](../howto/command-line.md).

What talks to the database takes `--dsn`, by default from `PGMB_DSN` or `DATABASE_URL`; what it leaves out
comes from `PGHOST` and the like. Durations are written `500ms`, `30s`, `5m`, `2h`, `7d` or `1h30m`; points
in a stream as `earliest`, `latest`, a time, how long ago, or a position. `--json` prints JSON for programs:
times and durations as in ISO 8601.

Exit codes: 0 done; 1 an error, told in a line and a hint; 2 wrong usage, or a confirmation that nobody could
give (standard input is not a terminal and `--yes` is missing). `pgmb doctor`: 0 healthy, 1 problems found, 3
could not check.
"""


def render() -> str:
    entries = [_entry(words, command) for words, command in _commands(get_command(app), ("pgmb",))]
    return "\n".join([INTRODUCTION, *entries])


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        below = (*words, name)
        if hasattr(command, "commands"):
            yield from _commands(command, below)
        else:
            yield below, command


def _entry(words: tuple[str, ...], command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [
        one for one in command.params if one.param_type_name == "option" and one.name not in ("help", "dsn")
    ]
    usage = " ".join([*words, *map(_placeholder, arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## {' '.join(words)}", "", "```", usage, "```", "", _prose(command.help), ""]
    lines += [f"- `{_placeholder(one)}`: {_prose(one.help)}" for one in arguments if one.help]
    lines += [f"- `{_flags(one)}`: {_prose(one.help)}{_default(one)}" for one in options]
    return "\n".join(lines).rstrip() + "\n"


def _placeholder(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    if option.is_flag:
        return "/".join([*option.opts[:1], *option.secondary_opts])
    return f"{option.opts[0]} {option.metavar or option.name.upper()}"


def _default(option: Any) -> str:
    if option.required:
        return " Required."
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    if option.is_flag or shown is None or callable(shown) or shown == [] or shown == "":
        return ""
    return f" Default: `{getattr(shown, 'value', shown)}`."


def _prose(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()
