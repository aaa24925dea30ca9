"""How the log looks: a line for people, or one of JSON for machines."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from pgmb._core.masking import printable, printable_json

TEXT = "%(asctime)s %(levelname)s %(message)s"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class JsonLines(logging.Formatter):
    """One object a line: when, how bad, which logger, what, and the fields that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: Any = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= fields
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return printable_json(msgspec.json.encode(line, enc_hook=str).decode())


class TextLines(logging.Formatter):
    """Further lines of a record are indented and control characters written out: what a record quotes from an
    event cannot look like another record, nor change the terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(map(printable, super().format(record).split("\n")))


def configure(form: LogFormat = LogFormat.TEXT, text: str = TEXT) -> None:
    """Have the process log to stderr in this form. For programs, not for applications that mount ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else TextLines(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
