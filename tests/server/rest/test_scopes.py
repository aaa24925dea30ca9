"""Every operation is closed to keys without its scope, and to those without a key."""

from __future__ import annotations

from uuid import UUID

from pgmb.server.rest import OPERATIONS
from pgmb.server.rest.operation import Operation
from tests.server.rest.api import opened, problem

OTHERS = [
    "publish:other",
    "read:other",
    "consume:other",
    "publish:mainx",
    "consume:",
    "publish:mine",
    "read:mine",
    "consume:main",
]
ALLOWING = {"publish:main", "read:main", "consume:mine"}
"""By which everything is allowed that is about one thing."""


def path_of(operation: Operation) -> str:
    values = {
        "stream": "main",
        "queue": "mine",
        "lease": UUID(int=1),
        "endpoint": "e",
        "key": "k",
        "event": UUID(int=1),
    }
    return operation.path.format(**values)


async def test_every_operation_is_closed_without_a_key(dsn: str) -> None:
    async with opened(dsn) as api:
        for operation in OPERATIONS:
            for given in (
                None,
                b"Bearer pgmb_key_wrong",
                b"Bearer \xe9",
                b"Bearer " + b"x" * 10_000,
                b"Basic x",
            ):
                headers = {} if given is None else {"Authorization": given}
                answer = await api.ask(operation.method, path_of(operation), key=None, headers=headers)
                if operation.needs is None:
                    assert answer.is_success
                    continue
                assert answer.status_code == 401, operation.name
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.json()["code"] == "unauthorised"


async def test_every_operation_is_closed_to_a_key_without_its_scope(dsn: str) -> None:
    async with opened(dsn) as api:
        key = api.make_key("others", *[scope for scope in OTHERS if not scope.endswith(":")])
        inspecting = api.make_key("inspecting", "inspect")
        for operation in OPERATIONS:
            if not operation.needs:
                continue
            if not any(need.some for need in operation.needs):
                refused = await api.refused(operation.method, path_of(operation), key=key)
                assert refused == (403, "forbidden"), operation.name
            if operation.method != "GET":
                refused = await api.refused(operation.method, path_of(operation), key=inspecting)
                assert refused == (403, "forbidden"), operation.name


async def test_what_is_refused_does_not_tell_whether_it_is_there(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "there"})
        key = api.make_key("mine", "consume:mine")
        texts = {
            (await api.ask("GET", f"/v1/queues/{name}", key=key)).text.replace(name, "")
            for name in ("there", "nowhere")
        }
        assert len(texts) == 1


async def test_a_scope_opens_what_it_names(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "mine"})
        key = api.make_key("mine", *ALLOWING)
        for operation in OPERATIONS:
            named = operation.needs is not None and any(need.of for need in operation.needs)
            answer = await api.ask(operation.method, path_of(operation), key=key)
            assert (answer.status_code not in (401, 403)) == (
                named or not operation.needs or any(need.some for need in operation.needs)
            ), operation.name


async def test_a_path_tells_which_methods_it_has(dsn: str) -> None:
    paths: dict[str, set[str]] = {}
    for operation in OPERATIONS:
        paths.setdefault(path_of(operation), set()).add(operation.method)
    async with opened(dsn) as api:
        for path, methods in paths.items():
            answer = await api.ask("PUT", path)
            assert problem(answer) == (405, "method_not_allowed")
            told = set(answer.headers["allow"].replace(" ", "").split(","))
            assert told == methods | ({"HEAD"} if "GET" in methods else set())
        head = await api.ask("HEAD", "/v1/queues")
        assert (head.status_code, head.content) == (200, b"")
        assert await api.refused("GET", "/v1/none") == (404, "not_found")
