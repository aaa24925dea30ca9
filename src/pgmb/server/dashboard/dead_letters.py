"""Pages of dead letters: search, show, redrive and drop."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from pgmb.errors import InvalidArgument
from pgmb.server.dashboard.auth import Form, Visit
from pgmb.server.dashboard.events import download
from pgmb.server.dashboard.formats import parse_json, plural
from pgmb.server.dashboard.queues import moment_of
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import Problem, invalid

_LETTERS_PER_PAGE = 50
_MOST_EXAMINED = 20_000
_MOST_COMPARED = 2000
"""Newest dead letters that are grouped by common errors."""
_BATCH = 500
_MOST_PER_CHANGE = 10_000

_FIND = (
    "select ids, looked, next from pgmb.find_dead(queue => %(queue)s, topic => %(topic)s, error => %(error)s,"
    " since => %(since)s, until => %(until)s, before => %(before)s, max => %(max)s, look => %(look)s)"
)


class DeadLetterQuery(msgspec.Struct, frozen=True):
    """The search criteria."""

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
            "look": _MOST_EXAMINED,
        }

    @property
    def given(self) -> dict[str, str]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


async def search(router: PageRouter, visit: Visit) -> Response:
    asked = DeadLetterQuery(*(visit.given(name) for name in DeadLetterQuery.__struct_fields__))
    before = visit.number("before")
    sample = await router.sampler.latest(2.0)
    found: dict[str, Any] = {"ids": [], "looked": 0, "next": None}
    refused = None
    try:
        found = (await router.rows(_FIND, asked.parameters(before, _LETTERS_PER_PAGE)))[0]
    except (InvalidArgument, Problem) as error:
        refused = str(error)
    letters = await router.rows("select * from pgmb.browse_dead(%s)", (found["ids"],))
    common: list[dict[str, Any]] = []
    if before is None and not asked.error and len(letters) > 1:
        newest = (await router.rows(_FIND, asked.parameters(None, _MOST_COMPARED)))[0]
        common = await router.rows("select * from pgmb.common_errors(%s)", (newest["ids"],))
    return router.render(
        visit,
        "dead.html",
        status=422 if refused else 200,
        refused=refused,
        asked=asked,
        before=before,
        letters=letters,
        found=found,
        common=common,
        compared=_MOST_COMPARED,
        queues=[queue for queue in sample.queues if queue["dead"] or queue["queue"] == asked.queue],
        upto=found["ids"][0] if found["ids"] else None,
    )


async def show(router: PageRouter, visit: Visit) -> Response:
    letter = await _one(router, visit)
    found = await router.broker.dead_letters(letter["queue"], after=letter["id"] - 1, max=1)
    return router.render(
        visit,
        "letter.html",
        letter=letter,
        errors=found[0].errors if found and found[0].id == letter["id"] else [],
        payload=parse_json(letter["payload"]),
        headers=parse_json(letter["headers"]) if letter["headers"] else None,
    )


async def raw(router: PageRouter, visit: Visit) -> Response:
    letter = await _one(router, visit)
    return download(letter["payload"], f"dead-letter-{letter['id']}")


async def _one(router: PageRouter, visit: Visit) -> dict[str, Any]:
    rows = await router.rows(
        "select * from pgmb.browse_dead(array[%s]::bigint[], true)", (visit.number("id"),)
    )
    if not rows:
        raise Problem(
            404, "not_found", "there is no such dead letter", hint="It was sent back or dropped meanwhile."
        )
    return rows[0]


async def change(router: PageRouter, visit: Visit, form: Form) -> Response:
    """Redrive or drop the selected dead letters, or all that match."""
    action = form.get("action")
    asked = DeadLetterQuery(*(form.get(name) for name in DeadLetterQuery.__struct_fields__))
    back = "/ui/dead" + (f"?{urlencode(asked.given)}" if asked.given else "")
    verb, _, which = (action or "").partition("-")
    if verb not in ("redrive", "drop") or which not in ("chosen", "matching"):
        raise invalid("unknown action")
    if verb == "drop" and form.get("confirm") != "yes":
        raise invalid("this needs to be confirmed")
    if which == "chosen":
        ids = _ids(form)
        if not ids:
            return router.done(visit, back, "Nothing was chosen.")
        count, more = await _settle(router, visit, verb, ids, {"ids": ids[:100]}), False
    else:
        count, more = await _settle_matching(router, visit, verb, asked, form)
    said = f"{plural(count, 'dead letter')} {'sent back' if verb == 'redrive' else 'dropped'}."
    return router.done(visit, back, said + (" More match: do it again for the rest." if more else ""))


async def _settle_matching(
    router: PageRouter, visit: Visit, verb: str, asked: DeadLetterQuery, form: Form
) -> tuple[int, bool]:
    """Settle matching letters in batches, one transaction each, up to the newest that the page showed."""
    upto = form.get("upto") or ""
    if not upto.isdecimal():
        raise invalid("the form does not say up to which dead letter")
    before: int | None = int(upto) + 1
    count = 0
    while before is not None and count < _MOST_PER_CHANGE:
        found = (await router.rows(_FIND, asked.parameters(before, _BATCH)))[0]
        if found["ids"]:
            count += await _settle(router, visit, verb, found["ids"], {"matching": asked.given})
        before = found["next"]
    return count, before is not None


async def _settle(router: PageRouter, visit: Visit, verb: str, ids: list[int], detail: dict[str, Any]) -> int:
    statement = "select pgmb.redrive_dead(%s)" if verb == "redrive" else "select pgmb.drop_dead_letters(%s)"
    async with router.changing(
        visit, f"{verb}_dead", detail.get("matching", {}).get("queue"), detail
    ) as conn:
        cursor = await conn.execute(statement.encode(), (ids,))
        row = await cursor.fetchone()
        detail["count"] = int(row[0]) if row else 0
    return int(detail["count"])


def _ids(form: Form) -> list[int]:
    chosen = form.all("id")
    if not all(text.isascii() and text.isdecimal() and len(text) < 19 for text in chosen):
        raise invalid("not the id of a dead letter")
    return [int(text) for text in chosen]
