"""Loggers that never raise: handlers, filters and logged errors are other people's code.

`logging` catches what a handler's `emit` raises only if the handler does so itself, filters not at all, and a
record with an exception calls that exception's `__str__` and `__cause__`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Guarded(_Adapter):
    """A logger that reports on stderr what its handlers raise."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if not self.isEnabledFor(level):
            return
        # The caller's place is the record's, not this one.
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        try:
            self.logger.log(level, msg, *args, **options)
        except BaseException as error:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"pgmb: {type(error).__name__} while logging to {self.logger.name}: {msg}\n")


def logger(name: str) -> Guarded:
    return Guarded(logging.getLogger(name), {})
