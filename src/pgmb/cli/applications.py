"""Finding the App that `module:name` means."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from pgmb.app import App


def load(text: str) -> App:
    """Import it, from the current directory too. Wrong usage if it is not there, or is no App."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"not MODULE:NAME: {text!r}. For example shop.events:app")
    here = os.getcwd()  # noqa: PTH109 - an entry of sys.path is a string
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise typer.BadParameter(f"there is no module {module!r} here or on the path") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, App):
        raise typer.BadParameter(f"{text!r} is no pgmb.App")
    return found
