"""The OpenAPI document: of the code, served to all, and kept by every answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pgmb.server import rest
from pgmb.server.limits import Limits
from tests.server.asking import bearer, make_key
from tests.server.hosting import serving
from tests.server.rest.api import opened

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
THERE = {"stream": "main", "queue": "q", "endpoint": "e"}
"""What there is, so that not everything is asked of what is not."""
PLAIN = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


async def test_it_is_served_to_all_and_names_every_operation(dsn: str) -> None:
    async with opened(dsn) as api:
        answer = await api.ask("GET", "/v1/openapi.json", key=None)
    assert answer.json() == rest.document()
    told = {
        operation["operationId"] for path in answer.json()["paths"].values() for operation in path.values()
    }
    assert told == {operation.name for operation in rest.OPERATIONS}
    assert len(told) == len(rest.OPERATIONS)


@pytest.mark.once
def test_it_is_an_openapi_document() -> None:
    schemathesis.openapi.from_dict(rest.document()).validate()


@pytest.fixture
def address(dsn: str) -> Iterator[str]:
    limits = Limits(requests_per_second=1e6, burst=1e6)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_queue('q'), pgmb.create_endpoint('e', 'https://e.example')")
    with serving(dsn, limits) as address:
        yield address


class Examiner:
    """Asks what a strategy gives, and holds every answer to the document."""

    def __init__(
        self, address: str, headers: dict[str, str], session: requests.Session, examples: int
    ) -> None:
        self.address = address
        self.examples = examples
        self.headers = headers
        self.session = session
        self.asked = 0

    def examine(self, strategy: SearchStrategy[Any], *checks: Any) -> None:
        @settings(PLAIN, max_examples=self.examples)
        @given(case=strategy)
        def ask(case: Any) -> None:
            self.asked += 1
            _without_waiting(case)
            answer = case.call(base_url=self.address, session=self.session, headers=self.headers)
            # What is odd in a query may be lost on the way: an empty list is no parameter.
            refused = checks if ParameterLocation.QUERY not in _wrong(case) else ()
            case.validate_response(answer, checks=[*CHECKS, *refused])

        ask()


def test_no_answer_contradicts_it(dsn: str, address: str) -> None:
    some = {operation.name for operation in random.sample(rest.OPERATIONS, 6)}
    _examine(address, bearer(make_key(dsn, "operator", "operate")), some, 3)


@pytest.mark.minutes
def test_no_answer_of_any_operation_contradicts_it(dsn: str, address: str) -> None:
    every = {operation.name for operation in rest.OPERATIONS}
    _examine(address, bearer(make_key(dsn, "operator", "operate")), every, 25)


def _examine(address: str, headers: dict[str, str], names: set[str], examples: int) -> None:
    schema = schemathesis.openapi.from_dict(_without_keys(rest.document()))
    with requests.Session() as session:
        examiner = Examiner(address, headers, session, examples)
        for found in schema.get_all_operations():
            operation: Any = found
            operation = operation.ok()
            if operation.definition.raw["operationId"] not in names:
                continue
            examiner.examine(operation.as_strategy())
            if operation.path_parameters or operation.query or operation.body:
                wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
                examiner.examine(wrong, negative_data_rejection)
            named = {name: value for name, value in THERE.items() if f"{{{name}}}" in operation.path}
            if named and "{lease}" not in operation.path and operation.method != "delete":
                examiner.examine(operation.as_strategy(path_parameters=named))
    assert examiner.asked > len(names)


def _wrong(case: Any) -> set[ParameterLocation]:
    return {place for place, told in case.meta.components.items() if told.mode is GenerationMode.NEGATIVE}


def _without_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Keys are tested elsewhere: here one that may do all is always sent."""
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    for described in (*operations, document["components"]):
        described.pop("security", None)
        described.pop("securitySchemes", None)
    return document


def _without_waiting(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("wait"), int | float):
        case.body["wait"] = min(case.body["wait"], 0)
