"""Options as Spark hands them over: text under names in any case."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Given:
    """The options of a read or a write. One that is not known is refused: it may be a typo."""

    def __init__(
        self, options: Mapping[str, str], known: Iterable[str], of_spark: Iterable[str] = ()
    ) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known}
        for name in self._options:
            if name not in names and name not in of_spark:
                near = difflib.get_close_matches(name, names, 1)
                hint = (
                    f": did you mean {names[near[0]]}?"
                    if near
                    else f"; there are {', '.join(names.values())}"
                )
                raise ValueError(f"pgmb does not know the option {name}{hint}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._options

    def text(self, name: str) -> str | None:
        return self._options.get(name.lower())

    def count(self, name: str) -> int | None:
        """A number above 0."""
        text = self.text(name)
        if text is not None and (not text.strip().isdecimal() or int(text) < 1):
            raise ValueError(f"{name} is a number above 0, not {text!r}")
        return None if text is None else int(text)

    def truth(self, name: str, default: bool) -> bool:
        return self.one_of(name, *(("true", "false") if default else ("false", "true"))) == "true"

    def one_of(self, name: str, *allowed: str) -> str:
        """One of those allowed; the first is the default."""
        value = (self.text(name) or allowed[0]).strip().lower()
        if value not in allowed:
            raise ValueError(f"{name} is {' or '.join(allowed)}, not {value!r}")
        return value

    def duration(self, name: str, default: float) -> float:
        """Seconds, from 15m, 30s, 500ms."""
        text = self.text(name)
        if text is None:
            return default
        number = text.strip().rstrip("hms")
        try:
            return float(number) * _UNITS[text.strip()[len(number) :]]
        except (KeyError, ValueError):
            raise ValueError(f"{name} is a time such as 15m, 30s or 500ms, not {text!r}") from None

    def moment(self, name: str) -> int | None:
        """Microseconds since 1970, from ISO 8601 (UTC unless it says otherwise) or Kafka's milliseconds."""
        text = self.text(name)
        if text is None:
            return None
        if text.strip().isdecimal():
            return int(text) * 1000
        try:
            at = datetime.fromisoformat(text.strip())
        except ValueError:
            raise ValueError(f"{name} is a time such as 2026-01-31T10:00:00Z, not {text!r}") from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return int(at.replace(microsecond=0).timestamp()) * 1_000_000 + at.microsecond
