"""Events in Spark: `format("pgmb")`, at rest and in motion, and short ways to read, decode and merge them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgmb.spark.frames import decode, read, read_stream
    from pgmb.spark.pipelines import border, upsert

__all__ = ["border", "decode", "read", "read_stream", "upsert"]


def __getattr__(name: str) -> object:
    # Spark imports this package in every Python worker, which needs none of these.
    if name in ("border", "upsert"):
        from pgmb.spark import pipelines

        return getattr(pipelines, name)
    if name in __all__:
        from pgmb.spark import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
