"""Pictures of every page of the dashboard and of a report, for the documentation: `make screenshots`.

A throwaway server is filled with a shop's events, worked on for two minutes so that the charts have something
to show, and looked at with Debian's Chromium. The report is on a month with planted anomalies.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import struct
import tempfile
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import uvicorn
from playwright.async_api import Browser, Locator, Page, ViewportSize

from harness import month
from harness.browser import chromium
from harness.demo import key, orders, seed
from harness.lake import Here
from harness.postgres import Server, create_database
from harness.spark import LOCAL, session
from pgmb import NewEvent, aconnect, schema
from pgmb.server import create_app
from pgmb.services.janitor import Janitor
from pgmb.services.service import serve
from pgmb.services.ticker import Ticker

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDE = ViewportSize(width=1280, height=860)
SMALL = ViewportSize(width=375, height=780)

PAGES = {
    "overview": "/ui",
    "streams": "/ui/streams",
    "stream": "/ui/stream?name=main",
    "queues": "/ui/queues?sort=waiting&down=1",
    "queue": "/ui/queue?name=shipping",
    "events": "/ui/events?topic=order.*",
    "dead": "/ui/dead",
    "endpoints": "/ui/endpoints",
    "endpoint": "/ui/endpoint?name=partner-feed",
    "audit": "/ui/audit",
    "queue-form": "/ui/queue/edit?name=billing",
    "endpoint-form": "/ui/endpoint/edit?name=partner-feed",
    "schedule": "/ui/schedule?name=nightly report",
}

DELIVERED = """
update pgmb.endpoint_activity a set delivered = delivered + %s, delivered_at = clock_timestamp()
from pgmb.endpoint e where e.id = a.endpoint and e.state = 'active'"""

# Pixels of a PNG as places in a palette of its commonest colours: a fraction of what Chromium writes.
REDUCED = """async (encoded) => {
  const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${encoded}`)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const parts = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  const palette = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, 256).map(parts);
  const places = new Map();
  for (const pixel of counts.keys()) {
    const [r, g, b] = parts(pixel);
    let best = 0, least = Infinity;
    palette.forEach(([x, y, z], place) => {
      const apart = (r - x) ** 2 + (g - y) ** 2 + (b - z) ** 2;
      if (apart < least) { least = apart; best = place; }
    });
    places.set(pixel, best);
  }
  let text = "";
  for (const pixel of pixels) text += String.fromCharCode(places.get(pixel));
  return { width: image.width, height: image.height, palette: palette.flat(), pixels: btoa(text) };
}"""


async def write(page: Page | Locator, worker: Page, name: str, folder: Path) -> None:
    taken = await page.screenshot(animations="disabled")
    reduced = await worker.evaluate(REDUCED, base64.b64encode(taken).decode())
    pixels = base64.b64decode(reduced["pixels"])
    width, height = reduced["width"], reduced["height"]
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(reduced["palette"])),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    (folder / f"{name}.png").write_bytes(content)
    print(f"{name}.png: {len(content) / 1000:.0f} kB")


async def work(dsn: str, seconds: float) -> None:
    """Publishers in waves, and consumers that nearly keep up."""
    async with await aconnect(dsn, max_size=2) as broker:
        for turn in range(int(seconds * 2)):
            count = round(30 + 20 * math.sin(turn / 18) + 6 * math.sin(turn / 3))
            await broker.publish_many(list(orders(count, 100 + turn)))
            readings = [NewEvent("sensor.read", {"celsius": 21.5}) for _ in range(12 + turn % 9)]
            await broker.publish_many(readings, stream="telemetry")
            taken = {"billing": 40, "search-index": 46, "fraud/checks": 30, "sensors": 14, "shipping": 9}
            for queue, most in taken.items():
                lease = await broker.receive(queue, max=most)
                if lease.events:
                    await lease.ack()
            async with broker.connection() as connection:
                await connection.execute("update pgmb.dispatcher set heartbeat_at = clock_timestamp()")
                await connection.execute(DELIVERED, (count // 3,))
            await asyncio.sleep(0.5)


@asynccontextmanager
async def served(dsn: str) -> AsyncGenerator[str]:
    application = create_app(dsn, max_size=4)
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        await application.drain()
        server.should_exit = True
        await serving


async def enter(browser: Browser, url: str, text: str, **options: Any) -> Page:
    page = await (await browser.new_context(**options)).new_page()
    await page.goto(f"{url}/ui/login")
    await page.fill("[name=key]", text)
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"{url}/ui")
    return page


async def show(page: Page, address: str) -> None:
    await page.goto(address)
    # Forms do not change while somebody types.
    await page.locator("#live[data-state=live], body[data-still]").first.wait_for()
    # The numbers of the first sample are on the page then.
    await page.wait_for_timeout(700)


async def take(dsn: str, folder: Path, seconds: float) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        operator = key(connection, "on-call", "operate")
        found = connection.execute("select pgmb.browse(topic => 'order.paid') -> 'events' -> 0 ->> 'seq'")
        event = (found.fetchone() or ("",))[0]
        letter = (connection.execute("select max(id) from pgmb.dead").fetchone() or (0,))[0]
    stop = asyncio.Event()
    async with (
        served(dsn) as url,
        await aconnect(dsn, max_size=2) as broker,
        chromium() as browser,
        asyncio.TaskGroup() as beside,
    ):
        beside.create_task(serve(broker, [Ticker(), Janitor()], stop))
        working = beside.create_task(work(dsn, seconds * 3))
        worker = await browser.new_page()
        page = await browser.new_page(viewport=WIDE)
        await page.goto(f"{url}/ui/login")
        await write(page, worker, "login", folder)
        page = await enter(browser, url, operator, viewport=WIDE)
        await asyncio.sleep(seconds)
        for name, path in PAGES.items():
            await show(page, url + path)
            await write(page, worker, name, folder)
        await show(page, f"{url}/ui/event?stream=main&seq={event}")
        await write(page, worker, "event", folder)
        await show(page, f"{url}/ui/dead-letter?id={letter}")
        await write(page, worker, "dead-letter", folder)
        dark = await enter(browser, url, operator, viewport=WIDE, color_scheme="dark")
        for name in ("overview", "queue"):
            await show(dark, url + PAGES[name])
            await write(dark, worker, f"{name}-dark", folder)
        small = await enter(browser, url, operator, viewport=SMALL)
        for name in ("overview", "dead", "queue-form"):
            await show(small, url + PAGES[name])
            await write(small, worker, f"{name}-small", folder)
        working.cancel()
        stop.set()


# Of the report: the top of the page, and panels by their place.
PANELS = {"volume": 1, "failures": 3, "fields": 6}


async def take_report(page_of: str, folder: Path) -> None:
    async with chromium() as browser:
        worker = await browser.new_page()
        page = await browser.new_page(viewport=WIDE)
        await page.set_content(page_of)
        await write(page, worker, "lake-report-summary", folder)
        for name, place in PANELS.items():
            await write(page.locator(".panel").nth(place), worker, f"lake-report-{name}", folder)


def report(dsn: str, folder: Path) -> str:
    """The page of a month of which a half is in the lake."""
    from pgmb.lake.archive import Archiver, init
    from pgmb.lake.report.gather import Asked, gather
    from pgmb.lake.report.page import render

    with psycopg.connect(dsn, autocommit=True) as connection:
        month.fill(connection, planted=True, segments=2)
        month.request(connection)
    init(dsn, "main", str(folder / "lake"))
    list(Archiver(dsn, "main", Here()).archive())
    with session(folder / "spark", LOCAL, {}) as spark:
        return render(gather(spark, dsn, Asked(since=month.BEGIN, until=month.END)))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", choices=["dashboard", "report"])
    options.add_argument("--seconds", type=float, default=120, help="how much there is in the charts")
    asked = options.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server.start(18, name="screenshots", settings={"fsync": "on"}) as server,
    ):
        for kind, place in (("dashboard", IMAGES / "dashboard"), ("report", IMAGES)):
            if asked.only not in (None, kind):
                continue
            dsn = server.dsn(create_database(server))
            schema.install(dsn)
            taken = Path(folder) / kind
            taken.mkdir()
            if kind == "dashboard":
                seed(dsn)
                asyncio.run(take(dsn, taken, asked.seconds))
            else:
                asyncio.run(take_report(report(dsn, Path(folder)), taken))
            place.mkdir(parents=True, exist_ok=True)
            for picture in taken.iterdir():
                (place / picture.name).write_bytes(picture.read_bytes())


if __name__ == "__main__":
    main()
