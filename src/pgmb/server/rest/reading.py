"""What a request brings, read strictly: whatever is not as declared is refused, and nothing is guessed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, cast

import msgspec
from starlette.requests import ClientDisconnect, Request

from pgmb.server.limits import read_body, too_large
from pgmb.server.problems import Problem, invalid

JSON: Final = "application/json"

_LONGEST: Final = timedelta(days=36_525)
_SAID: Final = 300
_GZIP: Final = 31


def checked(read: Callable[[], Any], what: str) -> Any:
    """What `read` gives; a problem document where it finds that it cannot be."""
    try:
        given = read()
    except RecursionError as error:
        raise invalid(f"the {what} is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        # Of what was sent nothing is repeated but the place.
        said = "not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise invalid(f"the {what} is not as it should be", said[:_SAID]) from error
    _check_durations(given)
    return given


def path_value(name: str, text: str, kind: Any) -> Any:
    return checked(lambda: msgspec.convert(text, kind, strict=False), f"path's {name}")


def query_values(request: Request, kind: type[msgspec.Struct] | None) -> Any:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise invalid("a query parameter is given twice", name[:_SAID])
        given[name] = value
    if kind is None:
        if given:
            raise invalid("there are no query parameters here", next(iter(given))[:_SAID])
        return None
    return checked(lambda: msgspec.convert(given, kind, strict=False), "query")


def media_type(request: Request) -> str:
    """The content type without its parameters, in lower case; empty where there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported(accepted: Mapping[str, Any] | tuple[str, ...]) -> Problem:
    hint = f"This takes {', '.join(accepted)}."
    return Problem(415, "unsupported_media_type", "not a content type of this", hint=hint)


async def body_bytes(request: Request, most: int) -> bytes:
    try:
        body = await read_body(request, most)
    except ClientDisconnect as error:
        raise Problem(400, "disconnected", "the client went away") from error
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Problem(415, "unsupported_encoding", "not a content encoding of this", hint="This takes gzip.")
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
    if isinstance(given, msgspec.Struct):
        fields: tuple[str, ...] = given.__struct_fields__
        for name in fields:
            value = getattr(given, name)
            if isinstance(value, timedelta):
                _check_duration(name, value)
            elif isinstance(value, list):
                _check_durations(value)
    elif isinstance(given, list):
        for one in cast("list[Any]", given):
            if isinstance(one, timedelta):
                _check_duration("duration", one)
            else:
                _check_durations(one)


def _check_duration(name: str, value: timedelta) -> None:
    if not timedelta() <= value <= _LONGEST:
        raise invalid("not a duration: less than nothing, or more than a hundred years", name)
