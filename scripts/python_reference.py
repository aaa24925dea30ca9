"""The reference of the Python package, from its signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pgmb
from pgmb import errors, testing

INTRODUCTION = """\
# Python reference

Made from the docstrings by `make docs`; do not edit. Names are in module `pgmb` unless a heading says where
they are. `await pgmb.aconnect(…)` gives an `AsyncBroker`, whose methods, and those of `AsyncLease`,
`AsyncPublisher` and `AsyncGroup`, are the ones below, awaitable. Durations are seconds or a `timedelta`.
"""

CLASSES = ("Broker", "Lease", "Publisher", "Group", "App", "Delivery")
RAISED = ("Retry", "Reject")
_WIDEST = 100


def render() -> str:
    shown = {*CLASSES, *RAISED, "connect", "aconnect", "errors", "schema"}
    records = [
        name
        for name in pgmb.__all__
        if name not in shown and not name.startswith("Async") and not hasattr(errors, name)
    ]
    parts = [INTRODUCTION, "## Connect\n", _entry("connect", pgmb.connect), _entry("aconnect", pgmb.aconnect)]
    for name in CLASSES:
        parts += _class(name, getattr(pgmb, name))
    parts += ["## Raised by handlers\n", *(_entry(name, getattr(pgmb, name)) for name in RAISED)]
    parts += ["## Records\n", *(_record(name, getattr(pgmb, name)) for name in records)]
    parts += ["## Errors, in pgmb.errors\n", "```text\n" + _tree() + "\n```\n"]
    parts += ["## Installing the schema, in pgmb.schema\n"]
    parts += [
        _entry(name, getattr(pgmb.schema, name)) for name in ("install", "uninstall", "installed_version")
    ]
    parts += ["## Testing your code, in pgmb.testing\n"]
    parts += [_entry(name, getattr(testing, name)) for name in testing.__all__]
    return "\n".join(parts).rstrip() + "\n"


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## {name}\n\n{_prose(kind)}"
    for method, function in _methods(kind):
        yield _entry(f"{name}.{method}", function, level=3)


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """In the order of the source: those of the class, then of what it inherits."""
    seen = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("pgmb"):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                seen.add(name)
                yield name, value


def _entry(name: str, value: Any, level: int = 3) -> str:
    heading = f"{'#' * level} {name}\n"
    if isinstance(value, property):
        return f"{heading}\n```text\n{name}{_returns(value.fget)}\n```\n\n{_prose(value)}"
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return f"{heading}\n```text\n{_call(name, function)}\n```\n\n{_prose(value)}"


def _call(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    given = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    written: list[str] = []
    for number, one in enumerate(given):
        if one.kind is one.KEYWORD_ONLY and (
            not number or given[number - 1].kind is one.POSITIONAL_OR_KEYWORD
        ):
            written.append("*")
        written.append(_parameter(one))
    returns = "" if inspect.isclass(function) else _returns(function)
    line = f"{name}({', '.join(written)}){returns}"
    if len(line) <= _WIDEST:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in written) + f"){returns}"


def _parameter(one: inspect.Parameter) -> str:
    stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
    hint = "" if one.annotation is one.empty else f": {_written(one.annotation)}"
    # A default that only says that nothing was given has no text of its own.
    default = "…" if repr(one.default).startswith("<") else repr(one.default)
    return f"{stars}{one.name}{hint}" + ("" if one.default is one.empty else f" = {default}")


def _returns(function: Any) -> str:
    found = inspect.signature(function).return_annotation
    return "" if found is inspect.Signature.empty else f" -> {_written(found)}"


def _record(name: str, kind: Any) -> str:
    heading = f"### {name}\n"
    if not inspect.isclass(kind):
        return f"{heading}\n`{_written(kind)}`\n"
    fields = {field: hint for owner in reversed(kind.__mro__) for field, hint in _annotations(owner).items()}
    lines = "\n".join(f"- `{field}: {_written(hint)}`" for field, hint in fields.items())
    return f"{heading}\n{_prose(kind)}\n{lines}\n" if fields else f"{heading}\n{_prose(kind)}"


def _annotations(owner: type) -> dict[str, Any]:
    found = vars(owner).get("__annotations__", {}) if owner.__module__.startswith("pgmb") else {}
    return {field: hint for field, hint in found.items() if not field.startswith("_")}


def _tree() -> str:
    assert errors.__doc__ is not None
    return errors.__doc__.partition("\n\n")[2].rstrip()


def _written(annotation: Any) -> str:
    """An annotation as the source has it, without modules."""
    text = getattr(annotation, "__forward_arg__", annotation)
    text = text if isinstance(text, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text)


def _prose(value: Any) -> str:
    return (inspect.getdoc(value) or "").strip() + "\n"
