"""Finding an app by the name that a command line gives it: module:app."""

from __future__ import annotations

import importlib
import sys
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
            raise
        raise _refused(
            f"there is no module {error.name!r} in {here} or among the installed packages",
            "Name it as Python imports it, from the directory where it lies: package.module:app.",
        ) from error
    except (ValueError, TypeError) as error:
        raise _refused(f"not a module: {module_name!r}", "Say package.module:app.") from error
    found: object = module
    for part in (name or "app").split("."):
        found = getattr(found, part, None)
    if isinstance(found, App):
        return found
    apps = [known for known, value in vars(module).items() if isinstance(value, App)]
    what = "is not there" if found is None else f"is a {type(found).__name__}, not a pgmb.App"
    raise _refused(
        f"{name or 'app'} in {module_name} {what}",
        f"It has {', '.join(f'{module_name}:{known}' for known in apps)}."
        if apps
        else "Say which: module:name.",
    )


def _refused(message: str, hint: str) -> InvalidArgument:
    refused = InvalidArgument(message)
    refused.advise(hint)
    return refused
