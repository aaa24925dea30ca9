"""Events in Spark: `format("pgmb")`, at rest and in motion, and short ways to read and decode them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgmb.spark.frames import decode, read, read_stream

__all__ = ["decode", "read", "read_stream"]


def __getattr__(name: str) -> object:
    # Spark imports this package in every Python worker, which needs none of these.
    if name in __all__:
        from pgmb.spark import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
