"""Dead letters: find them, look at them, send them back or drop them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from pgmb.errors import InvalidArgument
from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.document import read
from pgmb.server.dashboard.events import download
from pgmb.server.dashboard.formats import plural
from pgmb.server.dashboard.gate import Form, Visit
from pgmb.server.dashboard.queues import moment_of
from pgmb.server.problems import Problem, invalid

_SHOWN = 50
_LOOKED_AT = 20_000
_COMPARED = 2000
"""The newest so many tell what is common."""
_BATCH = 500
_MOST_AT_ONCE = 10_000

_FIND = (
    "select ids, looked, next from pgmb.find_dead(queue => %(queue)s, topic => %(topic)s, error => %(error)s,"
    " since => %(since)s, until => %(until)s, before => %(before)s, max => %(max)s, look => %(look)s)"
)


class Asked(msgspec.Struct, frozen=True):
    """Which dead letters are meant."""

    queue: str | None = None
    topic: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None

    def parameters(self, before: int | None, most: int) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "topic": self.topic,
            "error": self.error,
            "since": moment_of(self.since),
            "until": moment_of(self.until),
            "before": before,
            "max": most,
            "look": _LOOKED_AT,
        }

    @property
    def given(self) -> dict[str, str]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


async def search(desk: Desk, visit: Visit) -> Response:
    asked = Asked(*(visit.given(name) for name in Asked.__struct_fields__))
    before = visit.number("before")
    sample = await desk.sampler.latest(2.0)
    found: dict[str, Any] = {"ids": [], "looked": 0, "next": None}
    refused = None
    try:
        found = (await desk.rows(_FIND, asked.parameters(before, _SHOWN)))[0]
    except (InvalidArgument, Problem) as error:
        refused = str(error)
    letters = await desk.rows("select * from pgmb.browse_dead(%s)", (found["ids"],))
    common: list[dict[str, Any]] = []
    if before is None and not asked.error and len(letters) > 1:
        newest = (await desk.rows(_FIND, asked.parameters(None, _COMPARED)))[0]
        common = await desk.rows("select * from pgmb.common_errors(%s)", (newest["ids"],))
    return desk.render(
        visit,
        "dead.html",
        status=422 if refused else 200,
        refused=refused,
        asked=asked,
        before=before,
        letters=letters,
        found=found,
        common=common,
        compared=_COMPARED,
        queues=[queue for queue in sample.queues if queue["dead"] or queue["queue"] == asked.queue],
        upto=found["ids"][0] if found["ids"] else None,
    )


async def show(desk: Desk, visit: Visit) -> Response:
    letter = await _one(desk, visit)
    return desk.render(
        visit,
        "letter.html",
        letter=letter,
        payload=read(letter["payload"]),
        headers=read(letter["headers"]) if letter["headers"] else None,
    )


async def raw(desk: Desk, visit: Visit) -> Response:
    letter = await _one(desk, visit)
    return download(letter["payload"], f"dead-letter-{letter['id']}")


async def _one(desk: Desk, visit: Visit) -> dict[str, Any]:
    rows = await desk.rows("select * from pgmb.browse_dead(array[%s]::bigint[], true)", (visit.number("id"),))
    if not rows:
        raise Problem(
            404, "not_found", "there is no such dead letter", hint="It was sent back or dropped meanwhile."
        )
    return rows[0]


async def change(desk: Desk, visit: Visit, form: Form) -> Response:
    """Redrive or drop: those that were chosen, or all that match."""
    action = form.get("action")
    asked = Asked(*(form.get(name) for name in Asked.__struct_fields__))
    back = "/ui/dead" + (f"?{urlencode(asked.given)}" if asked.given else "")
    verb, _, which = (action or "").partition("-")
    if verb not in ("redrive", "drop") or which not in ("chosen", "matching"):
        raise invalid("there is no such action")
    if verb == "drop" and form.get("confirm") != "yes":
        raise invalid("this needs to be confirmed")
    if which == "chosen":
        ids = _ids(form)
        if not ids:
            return desk.done(visit, back, "Nothing was chosen.")
        count, more = await _settle(desk, visit, verb, ids, {"ids": ids[:100]}), False
    else:
        count, more = await _settle_matching(desk, visit, verb, asked, form)
    said = f"{plural(count, 'dead letter')} {'sent back' if verb == 'redrive' else 'dropped'}."
    return desk.done(visit, back, said + (" More match: do it again for the rest." if more else ""))


async def _settle_matching(desk: Desk, visit: Visit, verb: str, asked: Asked, form: Form) -> tuple[int, bool]:
    """In batches, each its own transaction; what died after the page was made is left alone."""
    upto = form.get("upto") or ""
    if not upto.isdecimal():
        raise invalid("the form does not say up to which dead letter")
    before: int | None = int(upto) + 1
    count = 0
    while before is not None and count < _MOST_AT_ONCE:
        found = (await desk.rows(_FIND, asked.parameters(before, _BATCH)))[0]
        if found["ids"]:
            count += await _settle(desk, visit, verb, found["ids"], {"matching": asked.given})
        before = found["next"]
    return count, before is not None


async def _settle(desk: Desk, visit: Visit, verb: str, ids: list[int], detail: dict[str, Any]) -> int:
    statement = "select pgmb.redrive_dead(%s)" if verb == "redrive" else "select pgmb.drop_dead_letters(%s)"
    async with desk.changing(visit, f"{verb}_dead", detail.get("matching", {}).get("queue"), detail) as conn:
        cursor = await conn.execute(statement.encode(), (ids,))
        row = await cursor.fetchone()
        detail["count"] = int(row[0]) if row else 0
    return int(detail["count"])


def _ids(form: Form) -> list[int]:
    chosen = form.all("id")
    if not all(text.isascii() and text.isdecimal() and len(text) < 19 for text in chosen):
        raise invalid("not the id of a dead letter")
    return [int(text) for text in chosen]
