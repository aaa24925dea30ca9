"""How the log looks: a line for people, or one of JSON for machines."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

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
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(form: LogFormat = LogFormat.TEXT) -> None:
    """Have the process log to stderr in this form. For programs, not for applications that mount ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
