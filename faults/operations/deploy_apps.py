"""The programs of a rolling deploy: an app before and after it, and another with a function of one name."""

from __future__ import annotations

_BEGINNING = '''
import asyncio
import inspect
import os

import msgspec
import psycopg

import pgmb

DSN = os.environ["DEPLOY_DSN"]
NAMED = "name" in inspect.signature(pgmb.App).parameters
app = pgmb.App(DSN, **({"name": __name__} if NAMED else {}))
locked = asyncio.Lock()
opened = []


async def done(number, by):
    """An effect: one row an event, whoever handles it and however often."""
    async with locked:
        if not opened:
            opened.append(await psycopg.AsyncConnection.connect(DSN, autocommit=True))
        await opened[0].execute(
            "insert into effect (number, by) values (%s, %s) on conflict do nothing", [number, by]
        )


class Numbered(msgspec.Struct):
    number: int
'''

_OLD = """
app.queue("orders", max_attempts=3, lease_for=5)


class Order(msgspec.Struct):
    number: int
    amount: int


@app.on("order.created", queue="orders")
async def created(order: Order):
    await done(order.number, "created, old")


@app.on("invoice.due", queue="remind")
async def remind(invoice: Numbered):
    await done(invoice.number, "remind, old")


@app.on("shop.message")
async def notify(message: Numbered):
    await done(message.number, "shop")
"""

_NEW = """
app.queue("orders", max_attempts=5, lease_for=6)


class Order(msgspec.Struct):
    number: int
    amount: int | str


@app.on("order.created", queue="orders")
async def created(order: Order):
    await done(order.number, "created, new")


@app.on("order.refunded", "order.cancelled", queue="orders")
async def ended(order: Numbered):
    await done(order.number, "ended")


@app.on("invoice.due", queue="remind")
async def send_reminder(invoice: Numbered):
    await done(invoice.number, "remind, new")


@app.on("shop.message")
async def notify(message: Numbered):
    await done(message.number, "shop")
"""

_OFFICE = """
@app.on("office.message")
async def notify(message: Numbered):
    await done(message.number, "office")
"""

PROGRAMS = {
    "old": ("shop", _BEGINNING + _OLD),
    "new": ("shop", _BEGINNING + _NEW),
    "office": ("office", _BEGINNING + _OFFICE),
}
"""The module of each, and its text."""
