"""What was changed, by whom."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.gate import Visit
from pgmb.server.dashboard.queues import moment_of

_SHOWN = 100

_ENTRIES = (
    "select id, at, actor, action, subject, detail from pgmb.audit"
    " where id < coalesce(%(before)s, 9223372036854775807)"
    " and (%(actor)s::text is null or actor = %(actor)s)"
    " and (%(action)s::text is null or action = %(action)s)"
    " and (%(subject)s::text is null or strpos(subject, %(subject)s) > 0)"
    " and (%(since)s::timestamptz is null or at >= %(since)s)"
    " and (%(until)s::timestamptz is null or at < %(until)s)"
    " order by id desc limit %(max)s"
)


async def search(desk: Desk, visit: Visit) -> Response:
    asked = {name: visit.given(name) for name in ("actor", "action", "subject", "since", "until")}
    entries = await desk.rows(
        _ENTRIES,
        {
            **asked,
            "since": moment_of(asked["since"]),
            "until": moment_of(asked["until"]),
            "before": visit.number("before"),
            "max": _SHOWN + 1,
        },
    )
    for entry in entries:
        entry["told"] = {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in entry["detail"].items()
        }
    return desk.render(
        visit,
        "audit.html",
        asked=asked,
        searching=any(asked.values()),
        entries=entries[:_SHOWN],
        next=entries[_SHOWN - 1]["id"] if len(entries) > _SHOWN else None,
        before=visit.number("before"),
    )
