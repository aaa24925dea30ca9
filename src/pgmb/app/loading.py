"""Finding an app by the name that a command line gives it: module:app."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from pgmb.app.app import App
from pgmb.errors import InvalidArgument


def load(target: str) -> App:
    """The app that `package.module:name` means, looked for in the current directory too."""
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise _refused(f"{module_name!r} is a file, not a module", f"Say {dotted}:{name or 'app'}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if it is this module that is missing, not one that it imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(module_name, error) from error
        raise _refused(
            f"there is no module {error.name!r} in {here} or among the installed packages",
            "Name it as Python imports it, from the directory where it lies: package.module:app.",
        ) from error
    except Exception as error:
        if not isinstance(error, SyntaxError) and not _frames(error):
            raise _refused(f"not a module: {module_name!r}", "Say package.module:app.") from error
        raise _failed(module_name, error) from error
    found: object = module
    for part in (name or "app").split("."):
        found = getattr(found, part, None)
    if isinstance(found, App):
        return found
    apps = [known for known, value in vars(module).items() if isinstance(value, App)]
    kind = type(found).__name__
    raise _refused(
        f"module {module_name} has no {name or 'app'}"
        if found is None
        else f"{name or 'app'} in module {module_name} is a {kind}, not a pgmb.App",
        f"It has {', '.join(f'{module_name}:{known}' for known in apps)}."
        if apps
        else "Say which: module:name.",
    )


def _failed(module_name: str, error: Exception) -> InvalidArgument:
    """Says where the module's own code failed, which its author wants to know, and not how it was loaded."""
    where = error.filename if isinstance(error, SyntaxError) else None
    line = error.lineno if isinstance(error, SyntaxError) else None
    if where is None:
        where, line = _frames(error)[-1]
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    return _refused(
        f"module {module_name} cannot be imported: {type(error).__name__}: {what} ({where}, line {line})",
        f"All of it: python -c 'import {module_name}'",
    )


def _frames(error: Exception) -> list[tuple[str, int | None]]:
    """The files and lines on the way to the error, without those of Python's import and of this package."""
    ours = str(Path(__file__).parents[1])
    return [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, str(importlib.__file__), "<frozen"))
    ]


def _refused(message: str, hint: str) -> InvalidArgument:
    refused = InvalidArgument(message)
    refused.advise(hint)
    return refused
