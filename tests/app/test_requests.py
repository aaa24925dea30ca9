"""Request and reply: what a handler returns or raises comes back to whoever asked, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import retries_waiting
from harness.waiting import until
from tests.app.stage import settled, working


class Price(pgmb.PgmbError): ...


def prices(dsn: str) -> pgmb.App:
    app = pgmb.App(dsn)

    @app.answer("price.quote", queue="quote", concurrency=8)
    async def quote(order: dict[str, int]) -> dict[str, int]:
        return {"total": order["pieces"] * 3}

    @app.answer("price.plain")
    def plain(event: pgmb.Delivery[int]) -> list[Any]:
        return [event.payload, event.topic]

    @app.answer("price.wrong.*")
    async def wrong(payload: int) -> object:
        if payload == 0:
            raise ValueError("nothing to price")
        if payload == 1:
            raise Price("no such price")
        if payload == 2:
            return object()
        raise pgmb.Reject("never")

    return app


@asynccontextmanager
async def asking(dsn: str) -> AsyncIterator[pgmb.App]:
    """An app in another process, as far as the database can tell."""
    app = pgmb.App(dsn)
    try:
        yield app
    finally:
        await app.aclose()


async def test_what_a_handler_returns_comes_back_to_whoever_asked(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    app = prices(dsn)
    async with working(app) as broker, asking(dsn) as one, asking(dsn) as two:
        assert await one.request("price.plain", 7) == [7, "price.plain"], "a function in a thread"
        ask = [asker.request("price.quote", {"pieces": n}) for n in range(20) for asker in (one, two)]
        assert await asyncio.gather(*ask) == [{"total": n * 3} for n in range(20) for _ in range(2)]
        await one.apublish("price.quote", {"pieces": 1})
        await until(lambda: settled(broker, "quote"))
    await app.aclose()
    sent = db.execute("select count(*), count(distinct topic) from pgmb.log_replies").fetchone()
    assert sent == (41, 2), "one answer a request, none to what was only published"
    assert db.execute("select count(*) from pgmb.dead").fetchone() == (0,)


async def test_what_a_handler_raises_is_raised(dsn: str, db: psycopg.Connection[Any]) -> None:
    app = prices(dsn)
    async with working(app), asking(dsn) as one:
        with pytest.raises(pgmb.RequestFailed, match=r"^ValueError: nothing to price$") as raised:
            await one.request("price.wrong.value", 0)
        cause = raised.value
        assert cause.kind == "ValueError"
        assert 'raise ValueError("nothing to price")' in cause.trace
        assert "pgmb/app" not in cause.trace
        with pytest.raises(pgmb.RequestFailed, match=r"^Price: no such price$") as failed:
            await one.request("price.wrong.kind", 1)
        assert failed.value.kind == "Price"
        with pytest.raises(pgmb.RequestFailed, match=r"^TypeError: object"):
            await one.request("price.wrong.result", 2)
        with pytest.raises(pgmb.RequestFailed, match="never"):
            await one.request("price.wrong.reject", 3)
        with pytest.raises(pgmb.RequestFailed, match="Expected `int`"):
            await one.request("price.wrong.payload", "x")
        await until(lambda: db.execute("select count(*) from pgmb.dead").fetchone() == (2,))
    await app.aclose()
    assert retries_waiting(db) == 0


async def test_without_an_answer_in_time(dsn: str) -> None:
    async with asking(dsn) as one:
        with pytest.raises(pgmb.NoAnswer, match=r"^no answer to 'nobody' within 0\.2 s$") as missing:
            await one.request("nobody", 1, timeout=0.2)
        assert isinstance(missing.value, TimeoutError)
        with pytest.raises(pgmb.InvalidArgument, match="without 'pgmb-request'"):
            await one.request("nobody", 1, headers={"pgmb-request": 1})
    with pytest.raises(pgmb.InvalidArgument, match="no batch"):
        pgmb.App("").answer("t", batch=3)  # type: ignore[call-arg]


async def test_a_request_is_answered_once_though_its_lease_was_lost(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """The first worker takes longer than its lease, the second answers, and the first cannot."""
    app, calls, released = pgmb.App(dsn), list[int](), asyncio.Event()

    @app.answer("slow", queue="slow")
    async def slow(event: pgmb.Delivery[int]) -> int:
        calls.append(event.attempt)
        if event.attempt == 1:
            await event.extend(0)
            await released.wait()
        return event.attempt

    async with working(app, concurrency=2), asking(dsn) as one:
        assert await one.request("slow", 1) == 2
        released.set()
    await app.aclose()
    assert calls == [1, 2]
    assert db.execute("select count(*) from pgmb.log_replies").fetchone() == (1,)


async def test_an_answer_that_is_committed_out_of_turn(dsn: str, db: psycopg.Connection[Any]) -> None:
    """It has a lower number than one that came before it."""
    asked = "select headers -> 'pgmb-request' from pgmb.log_main where payload::text = %s"
    answer = """
        select pgmb.publish(
            %s, json_build_object('request', %s::text, 'result', %s::int), stream => 'replies')
    """

    async def header(number: int) -> dict[str, str]:
        await until(lambda: db.execute(asked, [str(number)]).fetchone() is not None)
        (found,) = db.execute(asked, [str(number)]).fetchone() or ({},)
        return dict(found)

    with psycopg.connect(dsn) as late:
        async with asking(dsn) as one, asyncio.TaskGroup() as group:
            first, second = (group.create_task(one.request("by-hand", number)) for number in (1, 2))
            for number, conn in ((1, late), (2, db)):
                to = await header(number)
                conn.execute(answer, (to["topic"], to["id"], number * 10))
            assert await second == 20
            assert not first.done()
            late.commit()
            assert await first == 10
