"""An app brings its queues to what its handlers ask for, where its role may."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import queue_settings, times_bound
from harness.waiting import until
from tests.app.stage import working


def an_app(dsn: str, *patterns: str, **settings: Any) -> pgmb.App:
    app = pgmb.App(dsn)
    app.queue("q", **settings)

    @app.on(*patterns, queue="q")
    async def handle(payload: Any) -> None: ...

    return app


def row(db: psycopg.Connection[Any]) -> Any:
    shown = db.execute(
        "select (pgmb.queue_settings(queue) ->> 'lease_for')::interval,"
        " (pgmb.queue_settings(queue) ->> 'max_attempts')::int,"
        " (pgmb.queue_settings(queue) ->> 'ordered')::boolean,"
        " (pgmb.queue_settings(queue) ->> 'rps')::float8, patterns from pgmb.queue_status where queue = 'q'"
    ).fetchone()
    return shown and (*shown, times_bound(db))


@pytest.fixture
def consumer_role(db: psycopg.Connection[Any]) -> Generator[str]:
    role = f"plain_{db.info.backend_pid}"
    db.execute(f"create role {role} login in role pgmb_consumer")
    yield role
    db.execute(f"drop owned by {role}")
    db.execute(f"drop role {role}")


async def test_queues_are_created_bound_and_altered_as_declared(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with working(an_app(dsn, "a", "b.*", lease_for=5, max_attempts=3, rps=7, ordered=True)):
        assert row(db) == (timedelta(seconds=5), 3, True, 7, ["a", "b.*"], 1)
    async with working(an_app(dsn, "b.*", "a", lease_for=timedelta(seconds=5), max_attempts=3, rps=7)):
        # The same again: nothing is written.
        assert row(db) == (timedelta(seconds=5), 3, True, 7, ["a", "b.*"], 1)
    async with working(an_app(dsn, "c", lease_for=6)):
        # Patterns are added; settings that no code declares go back to their defaults.
        assert row(db) == (timedelta(seconds=6), 10, True, None, ["a", "b.*", "c"], 2)


async def test_many_processes_may_start_at_once(dsn: str, db: psycopg.Connection[Any]) -> None:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(an_app(dsn, "a", "b").work(stop)) for _ in range(5)]
    await until(lambda: row(db) is not None)
    stop.set()
    await asyncio.gather(*tasks)
    assert row(db)[-2:] == (["a", "b"], 1)


async def test_a_queue_that_is_dropped_while_it_is_declared_is_created_again(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    create, drops = pgmb.AsyncBroker.create_queue, ["select pgmb.drop_queue('q')"]

    async def dropped(broker: pgmb.AsyncBroker, *args: Any, **options: Any) -> Any:
        created = await create(broker, *args, **options)
        if drops:
            db.execute(drops.pop())
        return created

    monkeypatch.setattr(pgmb.AsyncBroker, "create_queue", dropped)
    async with working(an_app(dsn, "a", lease_for=5)):
        assert not drops
        assert row(db)[0] == timedelta(seconds=5)


async def test_the_stream_of_a_queue_is_created_with_it(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with working(an_app(dsn, "a", stream="other")):
        assert queue_settings(db)["stream_name"] == "other"


def test_publishing_creates_the_stream_of_a_queue(dsn: str) -> None:
    app = an_app(dsn, "a", stream="other")
    app.publish("a", 1, stream="other")
    assert app.broker.queue_depth("q") == 1
    app.close()


async def test_a_queue_of_another_stream_or_order_is_a_conflict(dsn: str) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_stream("other")
        await broker.create_queue("q", ["a"], stream="other")
    with pytest.raises(pgmb.Conflict, match='stream = "other", the code declares "main"'):
        await an_app(dsn, "a").work(asyncio.Event())
    with pytest.raises(pgmb.Conflict, match="ordered = false, the code declares true"):
        await an_app(dsn, "a", stream="other", ordered=True).work(asyncio.Event())


async def test_a_role_that_may_not_uses_a_queue_as_it_is(
    dsn: str, db: psycopg.Connection[Any], consumer_role: str, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("select pgmb.create_queue('q', '{a,b}', max_attempts => 4)")
    app = pgmb.App(f"{dsn} user={consumer_role}")
    seen: list[Any] = []

    @app.on("a", queue="q", max_attempts=9)
    async def handle(payload: Any) -> None:
        seen.append(payload)

    stop = asyncio.Event()
    task = asyncio.create_task(app.work(stop))
    db.execute("select pgmb.publish('a', '1')")
    await until(lambda: seen == [1])
    stop.set()
    await task
    assert row(db)[1] == 4
    assert "queue q: using its existing settings" in caplog.text


async def test_a_missing_queue_that_may_not_be_created_names_the_fix(dsn: str, consumer_role: str) -> None:
    with pytest.raises(pgmb.NotFound, match="does not exist, and this role may not create it") as raised:
        await an_app(f"{dsn} user={consumer_role}", "a", "b").work(asyncio.Event())
    assert raised.value.hint is not None
    assert "select pgmb.create_queue('q', '{a,b}')" in raised.value.hint


def test_handlers_of_one_queue_must_agree() -> None:
    app = pgmb.App("")
    app.on("a", queue="q", max_attempts=3)(lambda event: None)
    with pytest.raises(pgmb.InvalidArgument, match="max_attempts is 3 already, not 4"):
        app.on("a", queue="q", max_attempts=4)(lambda event: None)


async def test_an_app_without_handlers_or_queues_of_that_name_says_so() -> None:
    with pytest.raises(pgmb.InvalidArgument, match="no handlers"):
        await pgmb.App("").work()
    with pytest.raises(pgmb.InvalidArgument, match="no handler of queue 'x'") as raised:
        await an_app("", "a").work(queues=["x"])
    assert raised.value.hint == "Its queues are q."


async def test_only_the_queues_that_are_named_are_worked_on(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[str]()
    app.on("a", queue="one")(lambda event: seen.append("one"))
    app.on("a", queue="two")(lambda event: seen.append("two"))
    async with await pgmb.aconnect(dsn) as broker:
        for name in ("one", "two"):
            await broker.create_queue(name, ["a"])
        await broker.publish("a", 1)
        async with working(app, queues=["two"]):
            await until(lambda: bool(seen))
        assert await broker.queue_depth("one") == 1
    assert seen == ["two"]


def test_a_queue_without_a_name_has_that_of_module_and_function() -> None:
    app = pgmb.App("")

    @app.on("a")
    async def notify(payload: Any) -> None: ...

    class Shop:
        @staticmethod
        def mail(payload: Any) -> None: ...

    app.on("a")(Shop.mail)

    assert [*app.queues] == ["tests.app.test_declaring.notify", "tests.app.test_declaring.Shop.mail"]


@pytest.mark.parametrize(
    ("run", "queue"),
    [
        (("shop.py",), "shop.notify"),
        (("-m", "shop"), "shop.notify"),
        (("-m", "store"), "store.notify"),
        (("-m", "cProfile", "-o", os.devnull, "shop.py"), "shop.notify"),
    ],
)
def test_the_queue_of_a_program_has_the_name_of_its_file(
    tmp_path: Path, run: tuple[str, ...], queue: str
) -> None:
    source = "import pgmb\napp = pgmb.App('')\n@app.on('a')\ndef notify(payload): ...\nprint(*app.queues)\n"
    (tmp_path / "store").mkdir()
    for name in ("shop.py", "store/__main__.py"):
        (tmp_path / name).write_text(source)
    printed = subprocess.run(
        [sys.executable, *run], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed == f"{queue}\n"


@pytest.mark.parametrize("run", [("shop.py",), ("-m", "shop")])
def test_a_spawned_process_has_the_queues_of_its_parent(tmp_path: Path, run: tuple[str, ...]) -> None:
    source = (
        "import multiprocessing, pgmb\napp = pgmb.App('')\n@app.on('a')\ndef notify(payload): ...\n"
        "def child(): print(*app.queues)\nif __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=child).start()\n"
    )
    (tmp_path / "shop.py").write_text(source)
    printed = subprocess.run(
        [sys.executable, *run], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "shop.notify\n"


TYPES = """
    import dataclasses
    from typing import Annotated
    import pydantic, pgmb

    CURRENCIES = ("EUR",)

    def known(currency: str) -> str:
        if currency not in CURRENCIES:
            raise ValueError("unknown currency")
        return currency

    class Model(pydantic.BaseModel):
        currency: str
        tags: set[str] = {"a", "b", "c", "d"}
        _known = pydantic.field_validator("currency")(known)

    @dataclasses.dataclass
    class Data:
        currency: str
        def __post_init__(self) -> None:
            known(self.currency)
"""
APP = """
    import types_of_shop, pgmb
    from typing import Annotated
    import pydantic

    app = pgmb.App("")
    @app.on("a", queue="model")
    def model(payload: list[types_of_shop.Model]): ...
    @app.on("a", queue="data")
    def data(payload: types_of_shop.Data): ...
    @app.on("a", queue="annotated")
    def annotated(payload: Annotated[str, pydantic.AfterValidator(types_of_shop.known)]): ...
    @app.on("a", queue="plain")
    def plain(payload: dict[str, int]): ...
    print(*(app.queues[name].code for name in ("model", "data", "annotated", "plain")))
"""


def test_code_differs_by_validators_and_not_by_process(tmp_path: Path) -> None:
    def codes(seed: str) -> list[str]:
        printed = subprocess.run(
            [sys.executable, "shop.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return printed.split()

    (tmp_path / "shop.py").write_text(textwrap.dedent(APP))
    types = tmp_path / "types_of_shop.py"
    types.write_text(textwrap.dedent(TYPES))
    old = codes("1")
    assert codes("2") == old
    types.write_text(textwrap.dedent(TYPES).replace('("EUR",)', '("EUR", "USD")'))
    new = codes("1")
    assert [a != b for a, b in zip(old, new, strict=True)] == [True, True, True, False]


def test_a_lambda_and_a_function_of_a_console_need_a_queue() -> None:
    with pytest.raises(pgmb.InvalidArgument, match="no name for its queue"):
        pgmb.App("").on("a")(lambda event: None)
    with pytest.raises(pgmb.InvalidArgument, match="no name for its queue"):
        pgmb.App("").on("a")(type("x" * 100, (), {"__call__": lambda self, event: None})())
    source = "import pgmb\n@pgmb.App('').on('a')\ndef notify(payload): ..."
    console = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "no name for its queue" in console.stderr


async def test_lifespan_is_around_the_work_and_publishing_needs_no_worker(dsn: str) -> None:
    from contextlib import asynccontextmanager

    seen: list[Any] = []

    @asynccontextmanager
    async def lifespan(app: pgmb.App):
        seen.append("begin")
        yield
        seen.append("end")

    app = pgmb.App(dsn, lifespan=lifespan)

    @app.on("a", queue="q")
    async def handle(number: int) -> None:
        seen.append(number)
        if number < 3:
            await app.apublish("a", number + 1)

    async with working(app):
        await asyncio.to_thread(app.publish, "a", 1)
        await until(lambda: 3 in seen)
    await app.aclose()
    assert seen == ["begin", 1, 2, 3, "end"]
