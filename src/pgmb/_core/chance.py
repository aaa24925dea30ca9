"""Randomness of the package's own: a program that seeds `random`, or forks, repeats none of it.

Ids and lease tokens that two processes share would make one take the other's events for its own.
"""

from __future__ import annotations

import random
from typing import Final

# It asks the operating system each time, and has no state that a fork could copy.
_SYSTEM: Final = random.SystemRandom()

bits: Final = _SYSTEM.getrandbits
between: Final = _SYSTEM.uniform
whole: Final = _SYSTEM.randint
fraction: Final = _SYSTEM.random
