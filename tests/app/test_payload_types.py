"""The table of docs/howto/payloads.md: what each type publishes, and that the same type reads it."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from pydantic import Field, SecretStr

from pgmb._core import wire
from tests.app.payload_types import CASES, Case, lines, outcome

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "payloads.md"


@pytest.mark.parametrize("case", CASES, ids=[label for label, _, _ in CASES])
def test_a_type_reads_what_it_publishes(case: Case) -> None:
    _, kind, value = case
    outcome(kind, value)


def test_the_page_has_the_table() -> None:
    # To write it anew: python -m tests.app.payload_types
    assert "\n".join(lines()) in PAGE.read_text()


class Inner(pydantic.BaseModel):
    a: int = Field(default=1, serialization_alias="outA")


class Hidden(pydantic.BaseModel):
    secret: SecretStr = Field(default=SecretStr("s"), exclude=True)


class Written(pydantic.BaseModel):
    secret: SecretStr

    @pydantic.model_serializer
    def write(self) -> dict[str, str]:
        return {"secret": self.secret.get_secret_value()}


def test_a_model_inside_another_is_refused_even_if_the_first_value_has_none() -> None:
    model = pydantic.create_model("Outer", inner=(dict[str, list[Inner | None]], ...))
    for value in ({}, {"a": [Inner()]}):
        with pytest.raises(TypeError, match="'outA', an alias that it is not read by"):
            wire.json([model(inner=value)])


def test_fields_that_are_not_written_or_written_by_the_model_are_not_refused() -> None:
    assert wire.json([Hidden(), Written(secret=SecretStr("s"))]) == b'[{},{"secret":"s"}]'
