"""For tests of code that uses pgmb: what was published, handlers run on the spot, a clock that stands still.

Fixtures for pytest come with the package by themselves: see `pytest --fixtures`.
"""

from __future__ import annotations

from pgmb.app.handling import Handled
from pgmb.testing.clock import FrozenClock
from pgmb.testing.connected import aconnected, connected
from pgmb.testing.draining import Drained, adrain, drain
from pgmb.testing.published import assert_published, published

__all__ = [
    "Drained",
    "FrozenClock",
    "Handled",
    "aconnected",
    "adrain",
    "assert_published",
    "connected",
    "drain",
    "published",
]
