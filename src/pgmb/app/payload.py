"""Payloads as handlers want them: what decodes JSON to an annotated type, and says what does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast, get_args, get_type_hints

import msgspec

from pgmb.app.outcome import Unfit

Decode: TypeAlias = Callable[[bytes], Any]
"""Decodes a payload; raises Unfit if it does not fit."""

_SHOWN_ERRORS = 5
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What their classes do is the same in all versions of an app.
_NO_CODE_OF_APPS = sys.stdlib_module_names | {
    *("annotated_types", "msgspec", "pgmb", "pydantic", "pydantic_core", "typing_extensions"),
}


def decoder(annotation: Any) -> Decode:
    """What decodes payloads to this type. TypeError if payloads cannot become one."""
    if annotation is Any or annotation is object:
        return _by_msgspec(Any)
    if any(_is_pydantic(part) for part in _parts(annotation)):
        return _by_pydantic(annotation)
    _refuse_unknown(annotation)
    return _by_msgspec(annotation)


def shape(annotation: Any) -> str:
    """What payloads must be to become this type, as text: the same for the same code, in every process.

    The schema does not tell validators apart; the source of the modules that define the types does.
    """
    try:
        if any(_is_pydantic(part) for part in _parts(annotation)):
            import pydantic

            found = pydantic.TypeAdapter(annotation).json_schema()
        else:
            found = msgspec.json.schema(annotation)
        schema = msgspec.json.encode(_sorted(found), order="deterministic").decode()
    except Exception:
        # It has no schema, such as a type with a decoder of its own.
        schema = _ADDRESS.sub("", name_of(annotation))
    return " ".join([schema, *_sources(annotation)])


def _sorted(schema: Any) -> Any:
    """A schema with its lists in one order: those that were made of sets have another in each process."""
    if isinstance(schema, Mapping):
        return {str(key): _sorted(value) for key, value in schema.items()}
    if isinstance(schema, (list, tuple, set, frozenset)):
        parts = [_sorted(part) for part in cast("Iterable[Any]", schema)]
        return sorted(parts, key=lambda part: msgspec.json.encode(part, order="deterministic"))
    return schema


def _sources(annotation: Any) -> list[str]:
    """Digests of the modules that define a type, its bases and fields, and the functions that validate it."""
    modules: set[str] = set()
    _find_modules(annotation, modules, set())
    digests: set[str] = set()
    for name in modules:
        # A module of an interactive session, or of code that was compiled, has no source.
        with contextlib.suppress(OSError, TypeError, KeyError):
            digests.add(hashlib.sha256(inspect.getsource(sys.modules[name]).encode()).hexdigest())
    return sorted(digests)


def _find_modules(part: Any, modules: set[str], seen: set[int]) -> None:
    if id(part) in seen:
        return
    seen.add(id(part))
    module = getattr(part, "__module__", None)
    if isinstance(module, str) and module.partition(".")[0] not in _NO_CODE_OF_APPS:
        modules.add(module)
    elif isinstance(part, type):
        return
    inner: list[Any] = [*get_args(part), getattr(part, "__value__", None)]
    if isinstance(part, type):
        inner += part.__mro__
        # An annotation may name what is imported for type checkers alone.
        with contextlib.suppress(Exception):
            inner += get_type_hints(part, include_extras=True).values()
    elif dataclasses.is_dataclass(part):
        # Such as pydantic.AfterValidator(function).
        inner += [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    for one in inner:
        if one is not None:
            _find_modules(one, modules, seen)


def name_of(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


def _by_msgspec(annotation: Any) -> Decode:
    decode = msgspec.json.Decoder(annotation).decode

    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Unfit(f"payload does not fit {name_of(annotation)}: {error}") from error

    return decoded


def _by_pydantic(annotation: Any) -> Decode:
    import pydantic

    _refuse_bytes_beside_models(annotation)
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)

    def decoded(raw: bytes) -> Any:
        try:
            # By name too: so are dataclasses written, and models whose alias is for reading alone.
            return adapter.validate_json(raw, by_alias=True, by_name=True)
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False)
            shown = "; ".join(_pydantic_line(dict(one)) for one in found[:_SHOWN_ERRORS])
            more = f"; and {len(found) - _SHOWN_ERRORS} more" if len(found) > _SHOWN_ERRORS else ""
            raise Unfit(f"payload does not fit {name_of(annotation)}: {shown}{more}") from error

    return decoded


def _pydantic_line(error: dict[str, Any]) -> str:
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"])
    return f"{error['msg']} - at `${place}`"


def _refuse_bytes_beside_models(part: Any) -> None:
    """Outside of models msgspec writes bytes as Base64, which pydantic would take for the value."""
    if hasattr(part, "model_dump"):
        return
    if part in (bytes, bytearray):
        raise TypeError("payloads cannot become bytes beside pydantic types: put them into a pydantic model")
    for inner in get_args(part):
        _refuse_bytes_beside_models(inner)
    fields: Mapping[str, Any] = getattr(part, "__pydantic_fields__", {})
    for field in fields.values():
        _refuse_bytes_beside_models(field.annotation)


def _is_pydantic(part: Any) -> bool:
    # A model cannot have been defined without pydantic being imported; if it is not, neither do we.
    return "pydantic" in sys.modules and hasattr(part, "__pydantic_validator__")


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _refuse_unknown(annotation: Any) -> None:
    """msgspec takes any class and fails at the first payload; say so beforehand."""
    try:
        root = msgspec.inspect.type_info(annotation)
    except (TypeError, NameError) as error:
        raise TypeError(f"payloads cannot become {name_of(annotation)}: {error}") from error
    unknown = next(_custom_types(root, set()), None)
    if unknown is not None:
        raise TypeError(
            f"payloads cannot become {name_of(unknown)}: use a dataclass, a msgspec Struct, a pydantic model,"
            " a TypedDict, or what JSON has (dict, list, str, int, ...)"
        )


def _custom_types(node: Any, seen: set[int]) -> Iterator[Any]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, msgspec.inspect.CustomType):
        # Everything is an object, and decoded as JSON has it.
        if node.cls is not object:
            yield node.cls
    elif isinstance(node, (msgspec.inspect.Type, msgspec.inspect.Field)):
        for name in node.__struct_fields__:
            yield from _custom_types(getattr(node, name), seen)
    elif isinstance(node, tuple):
        for part in cast("Iterator[Any]", node):
            yield from _custom_types(part, seen)
