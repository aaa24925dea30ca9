"""pydantic models as payloads: refused where the same model would not read what it writes. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args
from weakref import WeakSet

_SERIALIZERS: Final = {"PlainSerializer", "WrapSerializer"}

_readable: WeakSet[type] = WeakSet()


def refuse_unreadable(model: type) -> None:
    """Raise TypeError for a model whose JSON it would refuse, or read otherwise. Works once a class."""
    if model not in _readable:
        for problem in _problems(model, set()):
            raise TypeError(f"{model.__qualname__} would not read what it publishes: {problem}")
        _readable.add(model)


def _problems(part: Any, seen: set[int]) -> Iterator[str]:
    if id(part) in seen:
        return
    seen.add(id(part))
    for argument in get_args(part):
        yield from _problems(argument, seen)
    if not isinstance(part, type):
        return
    if hasattr(part, "get_secret_value"):
        yield f"{part.__name__} is written as stars; give its field a field_serializer, or publish a str"
    decorators = getattr(part, "__pydantic_decorators__", None)
    if decorators is None or decorators.model_serializers:
        return
    custom = {name for one in decorators.field_serializers.values() for name in one.info.fields}
    fields: dict[str, Any] = getattr(part, "__pydantic_fields__", {})
    for name, field in fields.items():
        if field.exclude:
            continue
        if (written := field.serialization_alias or field.alias or name) not in _read(name, field):
            yield f"{name} is written as {written!r}, an alias that it is not read by; use Field(alias=...)"
        if not ({name, "*"} & custom or any(type(one).__name__ in _SERIALIZERS for one in field.metadata)):
            yield from _problems(field.annotation, seen)
    if decorators.computed_fields and getattr(part, "model_config", {}).get("extra") == "forbid":
        yield f"{part.__qualname__} forbids extra fields, and writes computed ones"


def _read(name: str, field: Any) -> set[str]:
    """The names by which a field is read, with those that pydantic knows as aliases."""
    alias = field.validation_alias
    choices = getattr(alias, "choices", [alias])
    return {name, field.alias, *(one for one in choices if isinstance(one, str))}
