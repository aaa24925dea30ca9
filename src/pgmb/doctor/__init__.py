"""What is wrong with a broker, and what to do about it. Looks, judges and changes nothing; prints nothing."""

from __future__ import annotations

from pgmb.doctor.examination import CHECKS, aexamine, examine
from pgmb.doctor.finding import Finding, Level, Limits

__all__ = ["CHECKS", "Finding", "Level", "Limits", "aexamine", "examine"]
