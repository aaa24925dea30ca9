"""Numbers that JSON does not have are refused, not published as null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import pgmb
from pgmb._core import batch, wire


@dataclass
class Reading:
    value: float
    note: str | None = None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "make", [lambda n: n, lambda n: {"a": [None, {"b": n}]}, Reading, lambda n: (1, [n])]
)
def test_nan_and_infinity_are_refused(make: Any, number: float) -> None:
    with pytest.raises(pgmb.InvalidArgument, match="JSON has no number for"):
        wire.json(make(number))
    with pytest.raises(pgmb.InvalidArgument, match="JSON has no number for"):
        wire.optional_json(make(number))
    with pytest.raises(pgmb.InvalidArgument, match="JSON has no number for"):
        batch.plan("a", [1, make(number)], None, "main")


@pytest.mark.parametrize(
    "value",
    [None, {"a": None}, {"a": None, "b": 2**70}, [None, msgspec.Raw(b'{"x": null}')], "null", Reading(1.5)],
)
def test_values_with_null_are_encoded(value: Any) -> None:
    assert wire.encode_all([value, value]) == [wire.json(value)] * 2
