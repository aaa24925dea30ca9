"""The areas of the scorecard. A new area adds its list of parts here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.score.core import CORE
from bench.score.correctness import CORRECTNESS
from bench.score.delivery import DELIVERY
from bench.score.experience import EXPERIENCE
from bench.score.house import HOUSE
from bench.score.lake import LAKE
from bench.score.matching import MATCHING
from bench.score.operations import OPERATIONS
from bench.score.part import Part
from bench.score.python import PYTHON
from bench.score.security import SECURITY
from bench.score.server import SERVER
from bench.score.spark import SPARK

AREAS: Mapping[str, Sequence[Part]] = {
    "core": CORE,
    "correctness": CORRECTNESS,
    "python": PYTHON,
    "matching": MATCHING,
    "spark": SPARK,
    "lake": LAKE,
    "delivery": DELIVERY,
    "server": SERVER,
    "house": HOUSE,
    "security": SECURITY,
    "operations": OPERATIONS,
    "experience": EXPERIENCE,
}
