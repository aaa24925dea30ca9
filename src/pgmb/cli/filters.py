"""Options that say what an event must hold beside its topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias, cast

import msgspec
import typer

from pgmb.errors import InvalidArgument

Equals: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUE", help="Require a field's value: payload.status=paid. May be repeated."
    ),
]
FilterBy: TypeAlias = Annotated[
    str | None,
    typer.Option(help="A jsonpath predicate over topic, key, payload and headers: $.payload.total > $least"),
]
Condition: TypeAlias = Annotated[
    str | None,
    typer.Option(help="An SQL expression over e (the event) and s.params. Needs the role pgmb_conditions."),
]
Params: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=VALUE", help="A variable of the filter. May be repeated."),
]


def given(
    equals: Iterable[str] | None, filter: str | None, condition: str | None, params: Iterable[str] | None
) -> dict[str, Any]:
    """What was named, as the broker takes it."""
    fields: dict[str, Any] = {}
    for text in equals or ():
        name, value = _pair(text, "payload.status=paid")
        _put(fields, name.split("."), value)
    variables = dict(_pair(text, "least=100") for text in params or ())
    asked = {"equals": fields or None, "filter": filter, "condition": condition, "params": variables or None}
    return {name: value for name, value in asked.items() if value is not None}


def _pair(text: str, example: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        refused = InvalidArgument(f"not NAME=VALUE: {text!r}")
        refused.advise(f"For example: {example}. A value is JSON, or else text.")
        raise refused
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _put(fields: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for name in parents:
        inside = fields.setdefault(name, dict[str, Any]())
        if not isinstance(inside, dict):
            raise InvalidArgument(f"field {'.'.join(path)} lies inside another that has a value")
        fields = cast("dict[str, Any]", inside)
    fields[last] = value
