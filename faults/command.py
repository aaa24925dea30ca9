"""Declares the commands of `python -m faults`, in the module `commands` of each subject's folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Run: TypeAlias = Callable[[argparse.Namespace], bool]
"""Runs a program once, prints its figures and returns whether its promise held."""


class Option(NamedTuple):
    """The arguments of `ArgumentParser.add_argument`."""

    name: str
    settings: dict[str, Any]


class Command(NamedTuple):
    run: Run
    about: str
    options: tuple[Option, ...]


COMMANDS: dict[str, Command] = {}
"""The commands of the modules that were imported, by name."""


def option(name: str, **settings: Any) -> Option:
    """Declare an option of a command, or a positional argument."""
    return Option(name, settings)


def command(name: str, about: str, *options: Option) -> Callable[[Run], Run]:
    """Make a function a command of `python -m faults`. Each also has the options --pg and --seed."""

    def declare(run: Run) -> Run:
        COMMANDS[name] = Command(run, about, options)
        return run

    return declare
