"""A browser's own EventSource, while the server is killed and started again: each event comes, once."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from playwright.async_api import Page

import pgmb
from harness.browser import chromium
from harness.serving import serving
from pgmb import aconnect
from pgmb.server.access import COOKIE, Access
from tests.server.asking import make_key

KEYS = 5
RESTARTS = 3

OPEN = """() => {
  window.seen = [];
  window.opened = 0;
  window.resets = 0;
  window.source = new EventSource('/v1/streams/main/events?topic=browser.%23');
  source.onopen = () => { window.opened += 1; };
  source.onmessage = (event) => { window.seen.push(JSON.parse(event.data).payload); };
  source.addEventListener('reset', () => { window.resets += 1; });
}"""


@contextmanager
def publishing(dsn: str) -> Iterator[list[int]]:
    """Some fifty events a second, in turns of the keys, until the end; how many there are."""
    stop = threading.Event()
    published = [0]

    def publish() -> None:
        with pgmb.connect(dsn, max_size=1) as broker:
            for number in count():
                if stop.wait(0.02):
                    return
                key = f"k{number % KEYS}"
                broker.publish(f"browser.{key}", {"key": key, "number": number}, key=key)
                published[0] = number + 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield published
    finally:
        stop.set()
        thread.join()


async def until(page: Page, condition: str, argument: Any) -> None:
    """Until the page says so. Asked from here: the page may wait for its connection."""
    async with asyncio.timeout(120):
        while not await page.evaluate(condition, argument):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def session_of(dsn: str, key: str) -> str:
    async with await aconnect(dsn, max_size=1) as broker:
        given = await Access(broker).login(key)
    assert given is not None
    return given[0]


async def test_an_eventsource_misses_nothing_while_the_server_restarts(dsn: str) -> None:
    session = await session_of(dsn, make_key(dsn, "browser", "read:main"))
    roles = ("serve", "--services", "http,ticker")
    async with chromium() as browser:
        with ExitStack() as feed:
            with serving(dsn, *roles) as served:
                url, port = served.url, served.port
                context = await browser.new_context()
                await context.add_cookies([{"name": COOKIE, "value": session, "url": url}])
                page = await context.new_page()
                await page.goto(f"{url}/livez")
                await page.evaluate(OPEN)
                await until(page, "() => opened === 1", None)
                published = feed.enter_context(publishing(dsn))
                await until(page, "() => seen.length > 20", None)
            # The end of `with` has killed it, in the middle of everything.
            for turn in range(RESTARTS):
                with serving(dsn, *roles, port=port) as served:
                    await until(page, "(turn) => opened === turn + 2", turn)
                    await until(page, "(most) => seen.at(-1).number > most", published[0])
                    if turn == 1:
                        # Once in good order.
                        served.process.terminate()
                        await asyncio.to_thread(served.process.wait, 60)
            feed.close()
            with serving(dsn, *roles, port=port):
                await until(page, "(total) => seen.length >= total", published[0])
                seen = await page.evaluate("() => seen")
                assert await page.evaluate("() => resets") == 0
    assert sorted(event["number"] for event in seen) == list(range(published[0])), "each of them, once"
    by_key: dict[str, list[int]] = defaultdict(list)
    for event in seen:
        by_key[event["key"]].append(event["number"])
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert len(by_key) == KEYS
