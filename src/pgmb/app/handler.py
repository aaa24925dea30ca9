"""A handler: a function, what it takes, and how its failures are dealt with."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args, get_origin, get_type_hints

from pgmb._core import loggers
from pgmb._core.durations import optional_seconds, seconds
from pgmb._core.patterns import compiled
from pgmb.app.delivery import Delivery
from pgmb.app.outcome import Reject, Retry, describe, trace, waiting
from pgmb.app.payload import Decode, decoder, shape
from pgmb.app.progress import Failure, LeaseProgress, SplitBy
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, Event

logger = loggers.logger("pgmb.app")

_MAIN = "__main__"
# multiprocessing imports the main module under the second name in a process that it spawns.
_MAINS = (_MAIN, "__mp_main__")
_LONGEST_NAME = 100

Backoff: TypeAlias = Callable[[int], Duration] | Sequence[Duration] | Duration | None
"""How long to wait after a failed attempt: a function of its number, a list of times, after the last of which
it is given up, a time, or None for the queue's own."""

Prepare: TypeAlias = Callable[[Event, LeaseProgress], Any]
"""Makes of an event what a handler takes."""

Respond: TypeAlias = Callable[[Delivery[Any], Callable[[], Awaitable[Any]]], Awaitable[None]]
"""Calls a handler and does something with what it returns or raises."""

Take: TypeAlias = Callable[[Delivery[Any]], Any]
"""Makes the same of a delivery that passed middleware."""


class Handler:
    def __init__(
        self,
        function: Callable[[Any], Any],
        patterns: Sequence[str],
        *,
        timeout: Duration | None = None,
        retry: Backoff = None,
        batch: int | None = None,
        together: bool = False,
        split_by: SplitBy | None = None,
        localns: Mapping[str, Any] | None = None,
        unannotated: Any = Any,
        respond: Respond | None = None,
    ) -> None:
        """`localns` are names that the annotation may use besides the function's globals.

        With `together` a batch that failed is tried again as the same set. `unannotated` is what a function
        takes that does not say. `respond` calls it and publishes what it returns or raises.
        """
        for pattern in patterns:
            compiled(pattern)
        _refuse_options(patterns, timeout, retry, batch)
        self.function = function
        self.name = getattr(function, "__qualname__", None) or repr(function)
        self.full_name = f"{module_of(function)}.{self.name}"
        """With the module: two programs may have functions of one name."""
        self.patterns = tuple(patterns)
        self.timeout = optional_seconds(timeout)
        self.backoff = retry
        self.batch = batch
        self.together = together
        self.split_by = split_by
        self.respond = respond
        self.asynchronous = _is_asynchronous(function)
        annotation = _annotation(function, self.name, localns or {})
        if batch is not None:
            annotation = _element(annotation, self.name)
        if annotation is Any:
            annotation = unannotated
        self.shape = shape(_payload(annotation))
        """What payloads must be."""
        self.decode, self.prepare, self.take = _taking(annotation, self.name)

    @property
    def attempts(self) -> int | None:
        """How often an event is tried, where the backoff says so."""
        return attempts(self.backoff)

    def failure(self, event: Event, error: BaseException) -> Failure:
        """What becomes of an event on which this handler raised."""
        text = describe(error)
        if isinstance(error, Reject):
            return Failure(True, None, text)
        try:
            return Failure(False, self._after(event.attempt, error), text, detail=trace(error))
        except BaseException:
            logger.exception(
                "%s: its backoff failed at attempt %s, the queue's serves", self.name, event.attempt
            )
            return Failure(False, None, text, detail=trace(error))

    def failures(self, batch: Sequence[Event], error: BaseException) -> dict[int, Failure]:
        """What becomes of a batch on which this handler raised, by seq."""
        if not self.together:
            return {event.seq: self.failure(event, error) for event in batch}
        # They may have been tried more or less often, where some lost their lease; but wait as one.
        oldest = max(batch, key=lambda event: event.attempt)
        failure = self.failure(oldest, error)._replace(together=batch[0].seq)
        return {event.seq: failure for event in batch}

    def _after(self, attempt: int, error: BaseException) -> float | None:
        after = error.after if isinstance(error, Retry) else None
        if after is None:
            after = self._backoff(attempt)
        return None if after is None else waiting(after)

    def _backoff(self, attempt: int) -> Duration | None:
        if callable(self.backoff):
            return self.backoff(attempt)
        if isinstance(self.backoff, Sequence) and not isinstance(self.backoff, str):
            # After the last it is given up, unless the queue was given more attempts.
            return self.backoff[min(attempt, len(self.backoff)) - 1] if self.backoff else None
        return self.backoff


def module_of(function: Callable[..., Any]) -> str:
    """The module of a function; of a program's main module, the name that others import it by."""
    while isinstance(function, functools.partial):
        function = function.func
    module = str(getattr(function, "__module__", None) or _MAIN)
    if module not in _MAINS:
        return module
    # The globals, not sys.modules: below `python -m cProfile`, __main__ is the profiler.
    names: Mapping[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    if names.get("__name__") != module:
        names = vars(sys.modules.get(module, sys.modules[_MAIN]))
    # Run as `python -m package.module`, or `python -m package`.
    spec, file = names.get("__spec__"), names.get("__file__")
    if spec is not None and spec.name not in _MAINS:
        return str(spec.name).removesuffix(f".{_MAIN}")
    return _MAIN if file is None else Path(file).stem


def default_queue(function: Callable[..., Any]) -> str:
    """The queue of a function that names none: its module and name."""
    name = str(getattr(function, "__qualname__", "")).rpartition("<locals>.")[2]
    module = module_of(function)
    queue = f"{module}.{name}"
    if not name or "<" in name or module == _MAIN or len(queue) > _LONGEST_NAME:
        refused = InvalidArgument(f"{name or function!r} of module {module} has no name for its queue")
        refused.advise(
            "Pass queue=...: functions of a module have a name, up to 100 characters long with the module's;"
            " lambdas and functions of an interactive session have none."
        )
        raise refused
    return queue


def _refuse_options(
    patterns: Sequence[str], timeout: Duration | None, retry: Backoff, batch: int | None
) -> None:
    if not patterns:
        raise InvalidArgument("a handler needs at least one pattern")
    if timeout is not None and not seconds(timeout) > 0:
        raise InvalidArgument(f"timeout must be positive, got {timeout}")
    if batch is not None and batch < 1:
        raise InvalidArgument(f"batch must be at least 1, got {batch}")
    refuse_backoff(retry)


def attempts(backoff: Backoff) -> int | None:
    """How often an event is tried by a list of delays."""
    if backoff is None or callable(backoff) or isinstance(backoff, int | float | timedelta | str):
        return None
    return len(backoff) + 1


def refuse_backoff(retry: Backoff) -> None:
    if retry is None or callable(retry):
        return
    several = isinstance(retry, Sequence) and not isinstance(retry, str)
    for one in cast("Sequence[Duration]", retry if several else [retry]):
        try:
            right = seconds(one) >= 0
        except InvalidArgument:
            right = False
        if not right:
            raise InvalidArgument(f"retry delays must be durations of at least 0, got {one!r}")


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - not whether, but what
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"a handler must not yield: {function!r}")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _annotation(function: Callable[..., Any], name: str, localns: Mapping[str, Any]) -> Any:
    """The type of the only argument, Any without one."""
    if not callable(function):
        raise TypeError(f"a handler must be a function, got {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    positional = [
        one
        for one in parameters
        if one.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [
        one
        for one in parameters
        if one.default is inspect.Parameter.empty
        and one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if not positional or len(needed) > 1 or (needed and needed[0] is not positional[0]):
        raise TypeError(
            f"{name}{inspect.signature(function)}: a handler is called with one argument: the payload, a"
            " pgmb.Delivery, or with batch= a list of them"
        )
    annotation = positional[0].annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str) and not get_args(annotation):
        return annotation
    try:
        hints = get_type_hints(_written(function), localns=dict(localns), include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{name}: the annotation {annotation!r} cannot be resolved ({error}); define or import it in the"
            " handler's module before the handler, and not for type checkers alone, or pass localns=locals()"
        ) from error
    except TypeError:
        return annotation
    return hints.get(positional[0].name, annotation)


def _written(function: Any) -> Any:
    """What the annotations were written at: behind partials and objects that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _element(annotation: Any, name: str) -> Any:
    if annotation is Any or annotation is list:
        return Any
    if get_origin(annotation) in (list, Sequence):
        return get_args(annotation)[0]
    raise TypeError(f"{name}: with batch= a handler takes a list, not {annotation!r}")


def _payload(annotation: Any) -> Any:
    """The payload's type."""
    if annotation is Event:
        return Any
    if annotation is Delivery or get_origin(annotation) is Delivery:
        return next(iter(get_args(annotation)), Any)
    return annotation


def _taking(annotation: Any, name: str) -> tuple[Decode, Prepare, Take]:
    decode = _decoder(_payload(annotation), name)
    if annotation is Event:
        return decode, whole_event, lambda delivery: delivery.event
    if annotation is Delivery or get_origin(annotation) is Delivery:
        if _payload(annotation) in (Any, object):
            return decode, delivering(decode), lambda delivery: delivery
        return decode, fitting(decode), fitted
    return decode, lambda event, progress: decode(event.raw), lambda delivery: delivery.payload


def delivering(decode: Decode) -> Prepare:
    # A partial, not a function: a Python frame would add a tenth to what a handler costs per event.
    return functools.partial(
        cast("Callable[[Decode, Event, LeaseProgress], Delivery[Any]]", Delivery), decode
    )


def fitting(decode: Decode) -> Prepare:
    """Decodes at once, so that a handler does not begin with a payload that does not fit."""
    return lambda event, progress: Delivery(decode, event, progress, decode(event.raw))


def fitted(delivery: Delivery[Any]) -> Delivery[Any]:
    """Decode the payload of a delivery that passed middleware."""
    _ = delivery.payload
    return delivery


def whole_event(event: Event, progress: LeaseProgress) -> Event:
    return event


def _decoder(annotation: Any, name: str) -> Decode:
    try:
        return decoder(annotation)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
