"""The dashboard in a real browser, over a real server: failure to redrive; by keys, small, dark."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.async_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

import pgmb
from harness.browser import chromium
from harness.demo import key, seed
from harness.waiting import until
from pgmb.server import dashboard
from pgmb.server.application import Application
from pgmb.server.dashboard.rendering import THEME_COOKIE
from tests.server.hosting import served

PHONE = {"width": 375, "height": 740}
PATIENCE = 60_000
"""Milliseconds, on a machine that is busy with other things."""
PATHS = [
    "",
    "/streams",
    "/stream?name=main",
    "/queues",
    "/queue?name=billing",
    "/events",
    "/dead",
    "/endpoints",
]
PATHS += ["/endpoint?name=partner-feed", "/workers", "/schedules", "/keys", "/audit", "/nothing"]
PATHS += ["/queue/edit", "/queue/edit?name=billing", "/endpoint/edit", "/endpoint/edit?name=partner-feed"]
PATHS += ["/schedule?name=nightly report"]

expect.set_options(timeout=PATIENCE)


class Browsing:
    """A server, a browser, and what the browser complained about."""

    def __init__(self, browser: Browser, url: str, operator: str) -> None:
        self.browser, self.url, self.operator = browser, url, operator
        self.complaints: list[str] = []

    async def open(self, **options: Any) -> Page:
        """A page of a context of its own, with nobody signed in."""
        context = await self.browser.new_context(**options)
        page = await context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        return page

    async def enter(self, **options: Any) -> Page:
        page = await self.open(**options)
        await page.goto(f"{self.url}/ui/login")
        await page.fill("[name=key]", self.operator)
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"{self.url}/ui")
        return page


@asynccontextmanager
async def browsing(dsn: str, root: str = "") -> AsyncGenerator[Browsing]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        operator = key(connection, "operator", "operate")
    application = Application(dsn, parts=[dashboard.routes], max_size=4)
    mounted = Starlette(routes=[Mount(root, application)], lifespan=application.lifespan)
    async with served(mounted) as port, chromium() as browser:
        try:
            yield Browsing(browser, f"http://127.0.0.1:{port}{root}", operator)
        finally:
            await application.drain()


async def test_a_failing_message_appears_is_inspected_redriven_and_gone(dsn: str) -> None:
    async with browsing(dsn) as visit, await pgmb.aconnect(dsn, max_size=1) as broker:
        await broker.create_queue("orders/eu", ["order.*"])
        page = await visit.enter()
        await page.keyboard.press("g")
        await page.keyboard.press("d")
        await page.wait_for_url(f"{visit.url}/ui/dead")
        await expect(page.get_by_text("No dead letters")).to_be_visible()
        await expect(page.locator("#live")).to_have_text("live")

        await broker.publish("order.paid", {"order": 42, "lines": [{"sku": "<b>"}]}, key="customer-7")
        lease = await broker.receive("orders/eu", max=1)
        await broker.bury(lease, error="TimeoutError: no answer from <bank>", detail="File <stdin>, line 7")
        # Nobody loads the page again.
        await expect(page.locator("td.error")).to_have_text("TimeoutError: no answer from <bank>")
        await expect(page.locator("[data-badge=dead]")).to_have_text("1")

        await page.keyboard.press("j")
        await expect(page.locator("tr.current")).to_have_count(1)
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("order.paid")
        await expect(page.locator(".wrong pre")).to_have_text("TimeoutError: no answer from <bank>")
        await expect(page.locator(".tree").first).to_contain_text("<b>")

        # What became of the event, and back.
        await page.locator(".facts a code").click()
        await expect(page.locator("#consumers .state")).to_have_text("dead")
        await page.get_by_text("Traceback").click()
        await expect(page.locator(".wrong pre")).to_have_text("File <stdin>, line 7")
        await page.locator("#consumers").get_by_role("link", name="dead letter").click()

        await page.get_by_role("button", name="Redrive").click()
        await expect(page.locator(".note")).to_have_text("1 dead letter sent back.")
        await expect(page.locator("#letters")).to_contain_text("No dead letter matches")
        again = await broker.receive("orders/eu", max=1)
        assert [event.payload["order"] for event in again] == [42]
        await page.keyboard.press("g")
        await page.keyboard.press("a")
        await expect(page.locator("#entries")).to_contain_text("redrive_dead")

        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url(f"{visit.url}/ui/login")
        await page.goto(f"{visit.url}/ui/audit")
        await expect(page.get_by_label("API key")).to_be_focused()
        assert visit.complaints == []


async def test_pages_fit_a_phone(dsn: str) -> None:
    seed(dsn)
    async with browsing(dsn, "/broker") as visit:
        page = await visit.enter(viewport=PHONE)
        for path in [*PATHS, *fill_with_long_words(dsn)]:
            await page.goto(f"{visit.url}/ui{path}")
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 375, path
            await check_accessible(page, path)
            if path == "/queues":
                # What matters most stands in the last column.
                await expect(page.locator("#queues td[data-label=Dead]").first).to_be_visible()
                ends = "(cells) => cells.map((cell) => cell.getBoundingClientRect().right)"
                assert max(await page.locator("#queues tbody td").evaluate_all(ends)) <= 375
        assert [one for one in visit.complaints if "404" not in one] == []


async def has_theme(page: Page) -> bool:
    return THEME_COOKIE in [cookie["name"] for cookie in await page.context.cookies()]


async def test_dark_by_keyboard_and_without_scripts_under_a_prefix(dsn: str) -> None:
    seed(dsn)
    async with browsing(dsn, "/broker") as visit:
        page = await visit.enter(viewport=PHONE, color_scheme="dark")
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.keyboard.press("t")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        # The browser stores what a script sets as a cookie a moment later.
        await until(partial(has_theme, page))
        await page.goto(f"{visit.url}/ui")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == light

        await expect(page.locator("[data-chart=waiting] path.line")).not_to_have_count(0)
        chart = page.locator("[data-chart=waiting] svg")
        await chart.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("[data-chart=waiting] .tip")).to_be_visible()
        await chart.blur()
        await page.keyboard.press("?")
        await expect(page.locator("#help")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.goto(f"{visit.url}/ui/dead")
        await page.keyboard.press("/")
        await expect(page.locator("[data-search]")).to_be_focused()
        await page.keyboard.press("Escape")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await page.keyboard.press("x")
        await expect(page.locator("[data-chosen]")).to_have_text("1 chosen")
        await use_without_scripts(visit)
        assert visit.complaints == []


def fill_with_long_words(dsn: str) -> list[str]:
    """Words without a place to break in everything that is shown; the pages that show them."""
    name = "W" * 100
    with pgmb.connect(dsn, max_size=1) as broker:
        broker.create_queue(name, ["t" * 200, "#"])
        for _ in range(2):
            broker.publish("T" * 255, {"N" * 900: "V" * 9000}, key="K" * 900)
        lease = broker.receive(name, max=1)
        seq = next(iter(lease)).seq
        broker.bury(lease, error="E" * 9000)
        broker.pause(name, "R" * 900)
        letter = broker.dead_letters(name)[0].id
        broker.create_schedule(name, "0 3 * * *", "T" * 255, "V" * 900, key="K" * 900)
    shown = ("queue", "queue/edit", "schedule")
    return [
        *(f"/{page}?name={name}" for page in shown),
        f"/event?stream=main&seq={seq}",
        f"/dead-letter?id={letter}",
    ]


async def check_accessible(page: Page, path: str) -> None:
    found = await page.evaluate(
        """() => ({
          headings: document.querySelectorAll("h1").length,
          unnamed: [...document.querySelectorAll("input:not([type=hidden]), select, button, a")]
            .filter((one) => !one.closest("[hidden]") && !(one.labels && one.labels.length)
              && !one.getAttribute("aria-label") && !one.textContent.trim())
            .map((one) => one.outerHTML),
          repeated: [...document.querySelectorAll("[id]")].map((one) => one.id)
            .filter((id, place, all) => all.indexOf(id) !== place),
          language: document.documentElement.lang,
        })"""
    )
    assert found == {"headings": 1, "unnamed": [], "repeated": [], "language": "en"}, path


async def use_without_scripts(visit: Browsing) -> None:
    page = await visit.enter(java_script_enabled=False)
    await page.get_by_role("link", name="Queues").first.click()
    await page.get_by_role("link", name="billing", exact=True).click()
    await page.get_by_text("Pause…").click()
    await page.get_by_label("Reason").fill("because")
    await page.get_by_role("button", name="Pause").click()
    await expect(page.locator(".note")).to_have_text("billing is paused")
    await page.get_by_role("button", name="Resume").click()
    await expect(page.locator(".note")).to_have_text("billing is resumed")


SHEET = Path(dashboard.__file__).parent / "static" / "style.css"
GROUNDS = ("ground", "panel", "raised", "current", "row")
PAIRS = [
    *((text, ground) for text in ("text", "soft", "accent") for ground in GROUNDS),
    *((text, "panel") for text in ("good", "warn", "bad", *(f"series-{n}" for n in range(8)))),
    ("bad", "row"),
    ("good", "good-ground"),
    ("warn", "warn-ground"),
    ("bad", "bad-ground"),
    ("on-accent", "accent-ground"),
    ("on-accent", "bad-button"),
]


@pytest.mark.once
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(dark: bool) -> None:
    pattern = r"--([a-z0-9-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\)"
    colours = {name: (light, night)[dark] for name, light, night in re.findall(pattern, SHEET.read_text())}

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for text, ground in PAIRS:
        lighter, darker = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, ground)
