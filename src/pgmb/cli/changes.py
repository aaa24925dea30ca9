"""Changes that are written down in the audit, in the transaction that makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import msgspec
from psycopg import Connection

from pgmb import Broker
from pgmb._core.masking import masked_url
from pgmb.errors import PermissionDenied, translated

Options = ParamSpec("Options")
Result = TypeVar("Result")

_UNTOLD: Final = frozenset({"secret", "headers", "payload", "params", "metadata", "url"})
"""What may hold something secret, or be long."""
_MOST_ITEMS: Final = 20
"""Of a list; of a longer one the number is told."""


def change(
    method: Callable[Concatenate[str, Options], Result],
    subject: str,
    *arguments: Options.args,
    **options: Options.kwargs,
) -> Result:
    """Call a method of a broker's that changes something, and write that down.

    A role that may make the change and not write to the audit, which is for admins, makes it all the same.
    """
    broker: Broker = cast("Any", method).__self__
    call: Callable[..., Any] = method
    with translated(), broker.own_connection() as conn, conn.transaction():
        given: Result = call(subject, *arguments, **options, conn=conn)
        # A schedule that was there is changed; elsewhere it means that nothing was.
        if cast("object", given) is not False or method.__name__ == "create_schedule":
            with suppress(PermissionDenied), conn.transaction():
                _record(broker, conn, method, subject, arguments, options)
    return given


def _record(
    broker: Broker,
    conn: Connection[Any],
    method: Callable[..., Any],
    subject: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    row = conn.execute("select session_user").fetchone()
    named = inspect.signature(method).bind(subject, *arguments, **options).arguments
    detail = {
        name: masked_url(value) if name == "url" else _told(value)
        for name, value in list(named.items())[1:]
        if value is not None and name not in _UNTOLD
    }
    actor = f"cli:{row[0] if row else ''}"
    broker.record(actor, method.__name__, subject, msgspec.to_builtins(detail, enc_hook=str), conn=conn)


def _told(value: Any) -> Any:
    if isinstance(value, Sized) and not isinstance(value, str) and len(value) > _MOST_ITEMS:
        return f"{len(value)} of them"
    return value
