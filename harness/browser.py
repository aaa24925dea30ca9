"""Chromium, as the tests and the screenshots use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

EXECUTABLE = "/usr/bin/chromium"


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """A browser without windows."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
