"""Parses requests strictly: path, query, body, and points in a stream. Anything undeclared is refused."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

import msgspec
from msgspec.inspect import IntType, Type, UnionType, type_info
from starlette.requests import ClientDisconnect, Request

from pgmb._async.broker import AsyncBroker
from pgmb.errors import ClusterChanged, ReaderBehind
from pgmb.server.limits import read_body, too_large
from pgmb.server.problems import Problem, invalid
from pgmb.types import Position

JSON: Final = "application/json"

_LONGEST: Final = timedelta(days=36_525)
_LONGEST_DETAIL: Final = 300
_GZIP: Final = 31
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,30})")


def checked(read: Callable[[], Any], what: str) -> Any:
    """The result of `read`. Raises Problem 422 for invalid input."""
    try:
        given = read()
    except RecursionError as error:
        raise invalid(f"the {what} is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        # The message names the field and does not quote the input.
        said = "not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise invalid(f"invalid {what}", said[:_LONGEST_DETAIL]) from error
    _check_durations(given)
    return given


def path_value(name: str, text: str, kind: Any) -> Any:
    return checked(lambda: msgspec.convert(text, kind), f"path's {name}")


def query_values(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise invalid("a query parameter is given twice", name[:_LONGEST_DETAIL])
        given[name] = value
    if kind is None:
        if given:
            raise invalid("unknown query parameter", next(iter(given))[:_LONGEST_DETAIL])
        return None
    integers = _integers(kind)
    values = {name: _integer(value) if name in integers else value for name, value in given.items()}
    return checked(lambda: msgspec.convert(values, kind), "query")


@cache
def _integers(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names of integer parameters. All others are parsed from text."""

    def is_integer(told: Type) -> bool:
        several = told.types if isinstance(told, UnionType) else (told,)
        return any(isinstance(one, IntType) for one in several)

    fields = msgspec.structs.fields(kind)
    return frozenset(field.encode_name for field in fields if is_integer(type_info(field.type)))


def _integer(text: str) -> int | str:
    return int(text) if _INTEGER.fullmatch(text) else text


def media_type(request: Request) -> str:
    """The content type in lower case, without parameters; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported(accepted: Mapping[str, Any] | tuple[str, ...]) -> Problem:
    hint = f"This takes {', '.join(accepted)}."
    return Problem(415, "unsupported_media_type", "unsupported content type", hint=hint)


async def body_bytes(request: Request, most: int) -> bytes:
    try:
        body = await read_body(request, most)
    except ClientDisconnect as error:
        raise Problem(400, "disconnected", "the client disconnected") from error
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Problem(415, "unsupported_encoding", "unsupported content encoding", hint="This takes gzip.")
    return _unzipped(body, most)


async def json_body(request: Request, decoder: msgspec.json.Decoder[Any], most: int) -> Any:
    body = await body_bytes(request, most)
    named = media_type(request)
    if named != JSON and (body or named):
        raise unsupported((JSON,))
    return checked(lambda: decoder.decode(body or b"{}"), "body")


def _unzipped(body: bytes, most: int) -> bytes:
    unzip = zlib.decompressobj(_GZIP)
    try:
        plain = unzip.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid("the body is not gzip") from error
    if len(plain) > most:
        raise too_large(most)
    if not unzip.eof or unzip.unused_data:
        raise invalid("the body is not gzip")
    return plain


def _check_durations(given: Any) -> None:
    for one in _within(given):
        if not timedelta() <= one <= _LONGEST:
            raise invalid("invalid duration: it must be between 0 and 100 years")


def _within(given: Any) -> Iterator[timedelta]:
    """The durations in parsed input."""
    if isinstance(given, timedelta):
        yield given
    elif isinstance(given, msgspec.Struct):
        fields: tuple[str, ...] = given.__struct_fields__
        for name in fields:
            yield from _within(getattr(given, name))
    elif given.__class__ is list:
        for one in given:
            yield from _within(one)


def position(text: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise invalid("invalid position") from error


async def point(broker: AsyncBroker, stream: str, text: str) -> Position:
    """The position for `earliest`, `latest`, a time or a position."""
    if text == "earliest":
        return await broker.earliest(stream)
    if text == "latest":
        return await broker.position(stream)
    if text.startswith("("):
        return position(text)
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        raise invalid("invalid position", "Use earliest, latest, a time, or a position.") from None
    return await broker.position_at(stream, at)


@contextmanager
def taken_elsewhere() -> Generator[None]:
    """Turn errors about a position that the client sent into 410 responses instead of 503."""
    try:
        yield
    except ClusterChanged as error:
        raise Problem(410, "cluster_changed", str(error), hint=error.hint) from error
    except ReaderBehind as error:
        raise Problem(410, "position_ahead", str(error), hint=error.hint) from error
