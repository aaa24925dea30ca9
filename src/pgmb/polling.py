"""How long to pause between looks when nothing is there. No I/O."""

from __future__ import annotations

from typing import Final

FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.5
RELYING_PAUSE: Final = 1.0
"""Between looks at a queue whose news a listener announces: retries that fall due are not announced."""


class Pace:
    """Short pauses after something was found, each twice the one before until the longest."""

    def __init__(self, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def found(self) -> None:
        """Something was there: look again soon."""
        self._next = self._first

    @property
    def at_rest(self) -> bool:
        """Whether nothing was found for so long that the pauses grow no more."""
        return self._next >= self._longest

    def pause(self) -> float:
        """How long to wait now, in seconds."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return pause
