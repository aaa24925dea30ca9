"""pgmb endpoints: list, show, create, alter, bind, drop, pause, resume, disable, and rotate-secret, key."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import msgspec
import typer

from pgmb import connect
from pgmb._core.endpoints import AUTO, GENERATE
from pgmb.cli import durations, endpoint_events, filters, output, posting, status
from pgmb.cli.changes import change
from pgmb.cli.filters import Condition, Equals, FilterBy, Params
from pgmb.cli.options import AsJson, Dsn, Endpoint, Stream, Yes
from pgmb.cli.posting import (
    Batch,
    BodyOf,
    Description,
    GzipAbove,
    Headers,
    KeepResponse,
    LogOf,
    MaxInFlight,
    Metadata,
    RetryAfter,
    Rps,
    SecretFile,
    Timeout,
)
from pgmb.cli.terminal import confirm
from pgmb.errors import InvalidArgument

endpoints = typer.Typer(help="Endpoints: URLs to which webhooks are posted.", no_args_is_help=True)

_UNSIGNED = (
    "PGMB_SECRET_KEY is not set, so requests to this endpoint are not signed. To sign them, set it to a key"
    " from `pgmb endpoints key`, here and where `pgmb serve` runs, and run `pgmb endpoints rotate-secret {}`."
)
_ONCE = "It is not shown again: give it to whoever verifies the requests."


def register(app: typer.Typer) -> None:
    endpoints.command("list")(list_endpoints)
    for command in (show, create, alter, bind, drop, pause, resume, disable, rotate_secret, key):
        endpoints.command()(command)
    endpoint_events.register(endpoints)
    app.add_typer(endpoints, name="endpoints")


def list_endpoints(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List endpoints with state, counts and backlog."""
    with connect(dsn, max_size=1) as broker:
        found = broker.endpoints()
    if as_json:
        output.json(found)
        return
    columns = (
        *("name", "state", "url", "patterns", "waiting", "oldest_age", "delivered", "failed", "delivered_at"),
        "error",
    )
    rows = [[output.bounded(one, column) for column in columns] for one in found]
    output.table("Endpoints", [column.replace("_", " ") for column in columns], rows)


def show(endpoint: Endpoint, dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Show one endpoint: settings, state and counts."""
    with connect(dsn, max_size=1) as broker:
        found = broker.endpoint(endpoint)
    if as_json:
        output.json(found)
        return
    shown = msgspec.structs.asdict(found)
    for name in ("equals", "params", "metadata"):
        shown[name] = msgspec.json.encode(shown[name]).decode() if shown[name] else None
    output.record(f"Endpoint {endpoint}", shown)


def create(
    endpoint: Annotated[str, typer.Argument(help="A name of up to 100 characters.")],
    url: Annotated[str, typer.Argument(help="The URL to post events to, http or https.")],
    patterns: Annotated[
        list[str], typer.Argument(help="Topics: * is one word, # any number of words.", show_default=False)
    ] = ["#"],  # noqa: B006 - typer copies it
    dsn: Dsn = "",
    stream: Stream = "main",
    equals: Equals = None,
    filter: FilterBy = None,
    condition: Condition = None,
    param: Params = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Post events with the same key one at a time.")
    ] = False,
    batch: Batch = None,
    body: BodyOf = None,
    rps: Rps = None,
    max_in_flight: MaxInFlight = None,
    timeout: Timeout = None,
    header: Headers = None,
    gzip_above: GzipAbove = None,
    retry_after: RetryAfter = None,
    log: LogOf = None,
    keep_response: KeepResponse = None,
    description: Description = None,
    metadata: Metadata = None,
    queue: Annotated[
        str | None, typer.Option(help="The queue shared with other endpoints. [default: webhooks]")
    ] = None,
    secret_file: SecretFile = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Do not sign requests.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create an endpoint, or replace the settings of an existing one.

    It gets a secret if PGMB_SECRET_KEY is set and it has none.
    """
    given = posting.given(
        header,
        batch=batch,
        body=body,
        rps=rps,
        max_in_flight=max_in_flight,
        timeout=timeout,
        gzip_above=gzip_above,
        retry_after=retry_after,
        log=log,
        keep_response=keep_response,
        description=description,
        metadata=metadata,
    )
    with connect(dsn, max_size=1) as broker:
        made = change(
            broker.create_endpoint,
            endpoint,
            url,
            patterns,
            stream=stream,
            ordered=ordered,
            queue=queue,
            secret=None if unsigned else posting.read_secret(secret_file) or AUTO,
            **given,
            **filters.given(equals, filter, condition, param),
        )
        if not unsigned and made.secret is None and broker.endpoint(endpoint).secrets == 0:
            output.note(_UNSIGNED.format(endpoint))
        undelivered = status.idle(broker).get("dispatcher")
    if as_json:
        output.json(made)
        return
    output.line(f"Endpoint {output.printable(endpoint)} gets {', '.join(patterns)}.")
    if made.secret is not None and secret_file is None:
        output.line(f"Secret: {made.secret}")
        output.note(_ONCE)
    if made.public_key is not None:
        output.line(f"Public key: {made.public_key}")
    if undelivered is not None:
        output.note(undelivered)


def alter(
    endpoint: Endpoint,
    dsn: Dsn = "",
    url: Annotated[str | None, typer.Option(help="The URL to post events to.")] = None,
    batch: Batch = None,
    body: BodyOf = None,
    rps: Rps = None,
    max_in_flight: MaxInFlight = None,
    timeout: Timeout = None,
    header: Headers = None,
    gzip_above: GzipAbove = None,
    retry_after: RetryAfter = None,
    log: LogOf = None,
    keep_response: KeepResponse = None,
    description: Description = None,
    metadata: Metadata = None,
) -> None:
    """Change single settings of an endpoint. --rps 0 removes the rate limit."""
    given = posting.given(
        header,
        url=url,
        batch=batch,
        body=body,
        rps=rps,
        max_in_flight=max_in_flight,
        timeout=timeout,
        gzip_above=gzip_above,
        retry_after=retry_after,
        log=log,
        keep_response=keep_response,
        description=description,
        metadata=metadata,
    )
    if not given:
        refused = InvalidArgument("nothing to change: no setting was given")
        refused.advise("For example: pgmb endpoints alter NAME --rps 50. Patterns: pgmb endpoints bind")
        raise refused
    with connect(dsn, max_size=1) as broker:
        change(broker.alter_endpoint, endpoint, **given)
    output.line(f"Changed endpoint {output.printable(endpoint)}.")


def bind(
    endpoint: Endpoint,
    patterns: Annotated[
        list[str], typer.Argument(help="Topics: * is one word, # any number of words.", show_default=False)
    ],
    dsn: Dsn = "",
    equals: Equals = None,
    filter: FilterBy = None,
    condition: Condition = None,
    param: Params = None,
) -> None:
    """Replace an endpoint's patterns and filter."""
    with connect(dsn, max_size=1) as broker:
        change(broker.bind_endpoint, endpoint, patterns, **filters.given(equals, filter, condition, param))
    output.line(f"Endpoint {output.printable(endpoint)} gets {', '.join(patterns)}.")


def drop(endpoint: Endpoint, dsn: Dsn = "", yes: Yes = False) -> None:
    """Drop an endpoint with its waiting deliveries, attempts and dead letters."""
    with connect(dsn, max_size=1) as broker:
        found = broker.endpoint(endpoint)
        confirm(f"Drop endpoint {endpoint} with {found.waiting:,} events that wait for it?", yes)
        change(broker.drop_endpoint, endpoint)
    output.line(f"Dropped endpoint {output.printable(endpoint)}.")


Reason = Annotated[str | None, typer.Option(help="A reason to show in the status.")]


def pause(endpoint: Endpoint, dsn: Dsn = "", reason: Reason = None) -> None:
    """Pause an endpoint. Its events wait."""
    with connect(dsn, max_size=1) as broker:
        change(broker.pause_endpoint, endpoint, reason)
    output.line(f"Paused endpoint {output.printable(endpoint)}.")


def resume(endpoint: Endpoint, dsn: Dsn = "") -> None:
    """Resume an endpoint that was paused, throttled, tripped or disabled."""
    with connect(dsn, max_size=1) as broker:
        change(broker.resume_endpoint, endpoint)
    output.line(f"Resumed endpoint {output.printable(endpoint)}.")


def disable(endpoint: Endpoint, dsn: Dsn = "", reason: Reason = None) -> None:
    """Disable an endpoint. It does not receive events published meanwhile."""
    with connect(dsn, max_size=1) as broker:
        change(broker.disable_endpoint, endpoint, reason)
    output.line(f"Disabled endpoint {output.printable(endpoint)}.")


def rotate_secret(
    endpoint: Endpoint,
    dsn: Dsn = "",
    overlap: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="How long requests are also signed with the old secret. [default: 1d]",
        ),
    ] = None,
    secret_file: SecretFile = None,
) -> None:
    """Create a new signing secret. The old one remains valid for a while."""
    with connect(dsn, max_size=1) as broker:
        made = change(
            broker.rotate_secret,
            endpoint,
            posting.read_secret(secret_file) or GENERATE,
            overlap=overlap,
        )
    output.line(f"Endpoint {output.printable(endpoint)} has a new secret.")
    if secret_file is None:
        output.line(f"Secret: {made}")
        output.note(_ONCE)


def key() -> None:
    """Print a new key for PGMB_SECRET_KEY, which encrypts the secrets in the database."""
    from pgmb.webhooks.secrets import generate_key

    output.line(generate_key())
