"""Filters that Spark pushes down, as conditions on an event e. Pure.

Only those that mean the same here and there: text is compared for equality, since its order differs.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from psycopg import sql
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

_TEXT: Final = ("topic", "key")
_ORDERED: Final = {"published_at": datetime, "seq": int}
_COMPARED: Final[dict[type[Filter], str]] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition(asked: Filter) -> str | None:
    """The condition, or None where Spark must do it."""
    match asked:
        case Not(child=inner):
            inside = condition(inner)
            return None if inside is None else f"not ({inside})"
        case IsNull(attribute=(name,)) if name in (*_TEXT, *_ORDERED):
            return f"e.{name} is null"
        case IsNotNull(attribute=(name,)) if name in (*_TEXT, *_ORDERED):
            return f"e.{name} is not null"
        case StringStartsWith(attribute=(name,), value=value) if name in _TEXT and _fits(name, value):
            return f"starts_with(e.{name}, {_literal(value)})"
        case EqualTo(attribute=(name,), value=value) if _fits(name, value):
            return f"e.{name} = {_literal(value)}"
        case In(attribute=(name,), value=values) if values and all(_fits(name, value) for value in values):
            return f"e.{name} in ({', '.join(_literal(value) for value in values)})"
        case _ if type(asked) in _COMPARED:
            name, value = asked.attribute[0], asked.value  # type: ignore[attr-defined]
            if len(asked.attribute) == 1 and name in _ORDERED and _fits(name, value):  # type: ignore[attr-defined]
                return f"e.{name} {_COMPARED[type(asked)]} {_literal(value)}"
            return None
        case _:
            return None


def _fits(name: str, value: Any) -> bool:
    if name in _TEXT:
        return isinstance(value, str) and "\0" not in value
    if name == "seq":
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return name in _ORDERED and isinstance(value, datetime) and value.tzinfo is not None


def _literal(value: Any) -> str:
    return sql.Literal(value).as_string()
