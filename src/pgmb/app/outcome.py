"""What a handler may raise to say how an event ends."""

from __future__ import annotations

import math
import os
import traceback
from pathlib import Path
from types import TracebackType

from pgmb._core.durations import seconds
from pgmb.types import Duration

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LONGEST_ERROR_CHARACTERS = 2000
_INNERMOST_FRAMES = 20
_LONGEST_WAIT_SECONDS = 10 * 365 * 86_400.0


class Retry(Exception):  # noqa: N818 - it is an instruction
    """Raised in a handler: try this event again, after so long or the handler's backoff."""

    def __init__(self, after: Duration | None = None, reason: str | None = None) -> None:
        super().__init__("Retry" if reason is None else reason)
        self.after = after
        self.reason = reason


class Reject(Exception):  # noqa: N818 - it is an instruction
    """Raised in a handler: this event can never be handled. It becomes a dead letter at once."""

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class Unfit(Reject):
    """The payload does not fit the handler's annotation. A worker that runs other code may take it."""


class Unhandled(Exception):  # noqa: N818 - it is an instruction
    """No handler of this process takes the event. A worker that runs other code may."""


class Late(TimeoutError):  # noqa: N818 - it is shown as a TimeoutError
    """A handler was not done within its timeout."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"not done within {timeout:g} s")


def describe(error: BaseException) -> str:
    """The error as a dead letter keeps it. Raises nothing."""
    text = message(error)
    if not isinstance(error, (Reject, Retry, Unhandled)):
        name = TimeoutError.__name__ if isinstance(error, Late) else type(error).__name__
        text = f"{name}: {text}" if text else name
    return text if len(text) <= _LONGEST_ERROR_CHARACTERS else text[: _LONGEST_ERROR_CHARACTERS - 1] + "…"


def message(error: BaseException) -> str:
    """What an error says. Its class is the user's and may raise anything instead."""
    try:
        return storable(f"{error.reason or 'Retry'}" if isinstance(error, (Reject, Retry)) else str(error))
    except BaseException as raised:
        return f"<its message raised {type(raised).__name__}>"


def trace(error: BaseException) -> str | None:
    """The end of the error's traceback, from the handler on, as a failed attempt keeps it."""
    if isinstance(error, (Reject, Retry)):
        return None
    try:
        lines = traceback.format_exception(type(error), error, own_traceback(error), limit=-_INNERMOST_FRAMES)
        return storable("".join(lines).rstrip())[-_LONGEST_ERROR_CHARACTERS:]
    except BaseException:
        # An exception whose message raises.
        return None


def storable(text: str) -> str:
    """Without what PostgreSQL cannot hold: NUL in text, and lone surrogates in UTF-8."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def own_traceback(error: BaseException) -> TracebackType | None:
    """The error's traceback without the frames of pgmb that precede the handler's."""
    try:
        whole = error.__traceback__
    except BaseException:
        # Its class is the user's.
        return None
    trace = whole
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return whole if trace is None else trace


def waiting(duration: Duration) -> float:
    """Seconds to wait, between none and ten years: a curve may leave what a timestamp can hold."""
    wanted = seconds(duration)
    if math.isnan(wanted):
        raise ValueError("a delay must be a number of seconds, got nan")
    return min(max(0.0, wanted), _LONGEST_WAIT_SECONDS)
