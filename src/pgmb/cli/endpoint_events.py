"""pgmb endpoints attempts, resend, replay, redrive, test: what was posted to one, and is again."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from pgmb import aconnect, connect
from pgmb._core.endpoints import sealing_key
from pgmb.cli import output
from pgmb.cli.changes import change
from pgmb.cli.filters import FilterBy
from pgmb.cli.options import AsJson, Dsn, Endpoint
from pgmb.cli.posting import Time, time
from pgmb.cli.serve import Allow, EgressProxy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgmb.webhooks.client import AttemptResult


def register(endpoints: typer.Typer) -> None:
    for command in (attempts, resend, replay, redrive):
        endpoints.command()(command)
    endpoints.command("test")(fire)


def attempts(
    endpoint: Endpoint,
    dsn: Dsn = "",
    max: Annotated[int, typer.Option(help="Maximum number.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List delivery attempts, newest first: failures, or all attempts of endpoints with `--log all`."""
    with connect(dsn, max_size=1) as broker:
        found = broker.attempts(endpoint, max)
    if as_json:
        output.json(found)
        return
    if not found:
        output.line("No attempts.")
        return
    columns = ("at", "event", "topic", "attempt", "status", "seconds", "error", "detail")
    rows = [
        (
            one.at,
            one.event_id,
            one.topic,
            one.attempt,
            one.status,
            round(one.seconds, 3),
            one.error,
            one.detail,
        )
        for one in found
    ]
    output.table(f"Attempts of {endpoint}", columns, rows)


def resend(
    endpoint: Endpoint,
    ids: Annotated[list[UUID], typer.Argument(help="Ids of events.", show_default=False)],
    dsn: Dsn = "",
) -> None:
    """Send events from the log to an endpoint again, by id."""
    with connect(dsn, max_size=1) as broker:
        found = change(broker.resend, endpoint, ids)
    output.line(f"Sending {_events(found)} again.")
    if found < len(set(ids)):
        output.note(f"{len(set(ids)) - found} were not found in the log.")


def replay(
    endpoint: Endpoint,
    since: Time,
    dsn: Dsn = "",
    until: Time = None,
    topic: Annotated[str | None, typer.Option(help="Only topics that match this pattern.")] = None,
    filter: FilterBy = None,
    max: Annotated[int, typer.Option(help="Maximum number, oldest first.", min=1)] = 10_000,
) -> None:
    """Send all matching events of a time span to an endpoint again."""
    with connect(dsn, max_size=1) as broker:
        found = change(broker.replay, endpoint, time(since), time(until), topic=topic, filter=filter, max=max)
    output.line(f"Sending {_events(found)} again.")
    if found == max:
        output.note("There may be more: --max")


def redrive(endpoint: Endpoint, dsn: Dsn = "", since: Time = None) -> None:
    """Send an endpoint its dead letters again, and retry its waiting deliveries now."""
    with connect(dsn, max_size=1) as broker:
        found = change(broker.redrive_failed, endpoint, time(since))
    output.line(f"Sending {_events(found)} again.")


def fire(
    endpoint: Endpoint,
    dsn: Dsn = "",
    allow: Allow = None,
    egress_proxy: EgressProxy = None,
    as_json: AsJson = False,
) -> None:
    """Post a test event (topic pgmb.test) to an endpoint once and print the result."""
    found = asyncio.run(_fire(dsn, endpoint, allow or (), egress_proxy))
    shown = {
        "status": found.status,
        "seconds": round(found.latency, 3),
        "error": found.error_class,
        "detail": found.detail,
        "response": found.response,
    }
    if as_json:
        output.json(shown)
    else:
        output.record(f"Endpoint {endpoint}", shown)
    if found.error_class == "refused_address":
        output.note("For a private network pass --allow CIDR, here and to the dispatcher.")
    if found.error_class is not None:
        sys.exit(1)


async def _fire(dsn: str, endpoint: str, allow: Sequence[str], egress_proxy: str | None) -> AttemptResult:
    from pgmb.webhooks.client import WebhookClient
    from pgmb.webhooks.egress import Guard
    from pgmb.webhooks.sender import try_endpoint

    key = sealing_key()
    async with (
        await aconnect(dsn, max_size=1) as broker,
        WebhookClient(Guard(allow), connections=1, proxy=egress_proxy) as poster,
    ):
        return await try_endpoint(broker, endpoint, poster, key)


def _events(count: int) -> str:
    return f"{count:,} event{'' if count == 1 else 's'}"
