"""Asking before something is destroyed."""

from __future__ import annotations

import sys

import typer

from pgmb.cli import output


def confirm(question: str, yes: bool) -> None:
    """Go on if the answer is yes; where nobody can be asked, only with --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        output.fail(
            f"{question} Nobody can be asked: standard input is not a terminal.", "Add --yes.", code=2
        )
    typer.confirm(output.printable(question), abort=True, err=True)
