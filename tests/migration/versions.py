"""A test's process as the package of another version."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgmb import schema


def become(patch: pytest.MonkeyPatch, sql: Path, version: int) -> None:
    """From here on this process is the package of that version, with that SQL."""
    patch.setattr(schema, "_SQL", sql)
    patch.setattr(schema, "VERSION", version)
