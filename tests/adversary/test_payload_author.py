"""The author of an event tries to be more than text where it is shown, followed, posted or logged."""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote
from uuid import UUID

import psycopg
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import pgmb
from harness.answers import OK, saying
from harness.receiver import Receiver
from harness.server import Server
from pgmb import Event, cli
from pgmb._core.logs import TEXT, JsonLines, TextLines
from pgmb.server.dashboard.formats import curl
from pgmb.server.sse.frames import ResumeToken
from pgmb.server.sse.matching import Entry
from pgmb.telemetry.metrics import families_of
from pgmb.telemetry.snapshot import BrokerStatus, Snapshot, Stream
from pgmb.webhooks.client import WebhookClient
from pgmb.webhooks.egress import Guard
from pgmb.webhooks.request import Endpoint, WebhookEvent, build_request
from tests.adversary.payloads import TEXTS, UNREADABLE
from tests.server.dashboard.visitor import PAGES, Visitor, check, hostile_pages, visiting

pytestmark = pytest.mark.once

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
OF_THE_CONNECTION = ("reset", "error", "open")
"""What a browser, or the server, tells a reader of server-sent events about its connection."""


class Case(NamedTuple):
    """An event as its author wrote it, and the error that its consumer made of it."""

    topic: str
    key: str
    payload: str
    headers: str
    error: str


def of_text(text: str) -> Case:
    written = json.dumps(text, ensure_ascii=False)
    headers = json.dumps({text: text}, ensure_ascii=False)
    # A topic has no wildcard.
    topic = text.replace("*", "+").replace("#", "+")
    return Case(topic, text, f"{{{written}: [{written}]}}", headers, text)


def decoded(written: str) -> Any:
    """Numbers as they are written: Python reads none of 5,000 digits."""
    return json.loads(written, parse_int=str, parse_float=str)


CASES = {
    **{text: of_text(text) for text in TEXTS},
    **{name: Case("t", "k", payload, "{}", "failed") for name, payload in UNREADABLE.items()},
}
each = pytest.mark.parametrize("name", CASES, ids=ascii)
together = pytest.mark.asyncio(loop_scope="module")


class Published(NamedTuple):
    """The events of all cases, and the dead letters that they became."""

    events: dict[str, Event]
    dead: dict[str, int]


@pytest.fixture(scope="module")
def published(module_dsn: str) -> Published:
    assert len(CASES) >= 90
    with psycopg.connect(module_dsn, autocommit=True) as db:
        db.execute("select pgmb.create_queue('q')")
        for case in CASES.values():
            db.execute(
                "select pgmb.publish(%s, %s::json, %s, headers => %s::json)",
                [case.topic, case.payload, case.key, case.headers],
            )
    with pgmb.connect(module_dsn) as broker:
        lease = broker.receive("q", max=1000)
        events = dict(zip(CASES, lease, strict=True))
        for name, event in events.items():
            assert event.raw.decode() == CASES[name].payload
            broker.bury(lease, [event.seq], error=CASES[name].error)
        letters = {letter.event.seq: letter.id for letter in broker.dead_letters("q", max=1000)}
    return Published(events, {name: letters[event.seq] for name, event in events.items()})


# -- the dashboard -----------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def visitor(module_dsn: str, published: Published) -> AsyncIterator[Visitor]:
    async with visiting(module_dsn) as signed_in:
        yield signed_in


@each
@together
async def test_it_is_text_on_its_pages(published: Published, visitor: Visitor, name: str) -> None:
    for path in (
        f"/ui/event?stream=main&seq={published.events[name].seq}",
        f"/ui/dead-letter?id={published.dead[name]}",
    ):
        check(path, await visitor.page(path))


@together
@pytest.mark.parametrize("path", ["/ui/events?stream=main", "/ui/dead?queue=q"])
async def test_lists_show_them_as_text(visitor: Visitor, path: str) -> None:
    check(path, await visitor.page(path))


@together
async def test_the_download_of_a_payload_is_no_page(published: Published, visitor: Visitor) -> None:
    event = published.events["<script>alert(1)</script>"]
    answer = await visitor.get(f"/ui/event/raw?stream=main&seq={event.seq}")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile(
    server: Server, module_db: psycopg.Connection[Any]
) -> AsyncIterator[tuple[Visitor, dict[str, str]]]:
    """A broker in which everything has a hostile name, and where its pages are."""
    dsn = server.dsn(module_db.info.dbname)
    pages = hostile_pages(dsn)
    async with visiting(dsn) as signed_in:
        yield signed_in, pages


@together
@pytest.mark.parametrize("page", PAGES, ids=[page.partition("%")[0] for page in PAGES])
async def test_hostile_names_are_text_on_every_page(
    hostile: tuple[Visitor, dict[str, str]], page: str
) -> None:
    visitor, pages = hostile
    path = pages[page]
    answer = await visitor.get(path)
    assert answer.status_code == 200, answer.text[:400]
    check(path, answer.text)
    assert len(answer.content) < 500_000
    headers = answer.headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    fragment = await visitor.page(path, headers={"X-Pgmb-Fragment": "1"})
    assert "<html" not in fragment
    assert "<h1" in fragment


@each
def test_the_command_to_copy_is_one_command(name: str) -> None:
    """A terminal acts on control characters while a command is pasted; the shell sees one argument."""
    case = CASES[name]
    event = {"topic": case.topic, "key": case.key, "payload": case.payload, "headers": None}
    command = curl("https://pgmb.example", "main", event)
    if command is None:
        assert len(case.payload) > 100_000
        return
    command = command.replace("\\\n", "")
    assert CONTROL.findall(command) == []
    words = shlex.split(command)
    assert words[:4] == ["curl", "-X", "POST", "https://pgmb.example/v1/streams/main/events"]
    assert len(words) == 10
    sent = decoded(words[-1])
    assert (sent["topic"], sent["key"], sent["payload"]) == (case.topic, case.key, decoded(case.payload))


# -- server-sent events ------------------------------------------------------------------------------------


@each
def test_it_is_one_frame_with_the_fields_that_we_write(published: Published, name: str) -> None:
    event, case = published.events[name], CASES[name]
    for named in (False, True):
        # As the specification cuts it.
        lines = re.split(r"\r\n|\r|\n", Entry(event, ResumeToken(1, 2, 3, 4, 5)).frame(named).decode())
        assert lines[-2:] == ["", ""]
        fields = [line.partition(":") for line in lines[:-2]]
        counts = Counter(field for field, _, _ in fields)
        assert counts.keys() <= {"id", "event", "data"}
        assert (counts["id"], counts["event"]) == (1, named and event.topic not in OF_THE_CONNECTION)
        values = {field: value.removeprefix(" ") for field, _, value in fields}
        assert values["id"] == "1-2-3-4-5"
        assert values.get("event") not in OF_THE_CONNECTION
        got = decoded("\n".join(value.removeprefix(" ") for field, _, value in fields if field == "data"))
        assert (got["topic"], got["key"], got["payload"]) == (case.topic, case.key, decoded(case.payload))


# -- the command line --------------------------------------------------------------------------------------


class Screen(io.TextIOWrapper):
    """Keeps what is printed. It is a terminal, or says so."""

    def __init__(self, terminal: bool) -> None:
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding="utf-8", newline="")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def printed(dsn: str, *arguments: str, terminal: bool = False) -> str:
    screen = Screen(terminal)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PGMB_DSN", dsn)
        patched.setattr(sys, "argv", ["pgmb", *arguments])
        patched.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        screen.flush()
    assert not ended.value.code
    return screen.kept.getvalue().decode()


TAIL = ("tail", "--since", "earliest", "--no-follow")


@pytest.fixture(scope="module")
def followed(module_dsn: str, published: Published) -> dict[str, str]:
    """The line of each event as `pgmb tail` prints it."""
    return dict(zip(CASES, printed(module_dsn, *TAIL).removesuffix("\n").split("\n"), strict=True))


@pytest.fixture(scope="module")
def documents(module_dsn: str, published: Published) -> dict[str, str]:
    """The same as JSON, to a terminal."""
    text = printed(module_dsn, *TAIL, "--json", terminal=True)
    return dict(zip(CASES, text.removesuffix("\n").split("\n"), strict=True))


@pytest.fixture(scope="module")
def piped(module_dsn: str, published: Published) -> dict[str, str]:
    """The same to a pipe."""
    text = printed(module_dsn, *TAIL, "--json")
    return dict(zip(CASES, text.removesuffix("\n").split("\n"), strict=True))


@each
def test_it_is_one_line_of_the_tail(
    followed: dict[str, str], documents: dict[str, str], piped: dict[str, str], name: str
) -> None:
    assert CONTROL.findall(followed[name]) == []
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} ", followed[name])
    assert CONTROL.findall(documents[name]) == []
    case = CASES[name]
    for line in (documents[name], piped[name]):
        shown = decoded(line)
        assert (shown["topic"], shown["key"], shown["payload"]) == (
            case.topic,
            case.key,
            decoded(case.payload),
        )


def test_a_table_of_dead_letters_holds_no_control_characters(module_dsn: str, published: Published) -> None:
    shown = printed(module_dsn, "dlq", "list", "q", "--max", "1000")
    assert CONTROL.findall(shown.replace("\n", "")) == []
    assert "[bold red]rich[/]" in shown


@pytest.mark.parametrize("name", ["\x1b[2J\x1b[H", "\x9b2J"], ids=ascii)
def test_a_dead_letter_holds_no_control_characters(module_dsn: str, published: Published, name: str) -> None:
    shown = printed(module_dsn, "dlq", "show", "q", str(published.dead[name]))
    assert CONTROL.findall(shown.replace("\n", "")) == []


# -- webhooks ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def posting() -> AsyncIterator[tuple[Receiver, WebhookClient]]:
    async with Receiver(saying(OK)) as receiver, WebhookClient(Guard(["127.0.0.0/8"])) as poster:
        yield receiver, poster


@each
@together
async def test_it_adds_no_header_to_a_request_and_no_field_to_a_document(
    published: Published, posting: tuple[Receiver, WebhookClient], name: str
) -> None:
    receiver, poster = posting
    event, case = published.events[name], CASES[name]
    endpoint = Endpoint(UUID(int=1), "e", f"http://127.0.0.1:{receiver.port}/")
    posted = WebhookEvent(str(event.id), case.topic, case.key, case.payload, case.headers, event.published_at)
    request = build_request(endpoint, [posted], 1, 1)
    attempted = await poster.post(request, 30, False)
    assert attempted.kind == "delivered", attempted
    sent = receiver.requests[-1]
    assert sent.body == case.payload.encode()
    first, *lines = sent.head.decode("ascii").split("\r\n")
    assert first == "POST / HTTP/1.1"
    assert CONTROL.findall("".join(lines)) == []
    received = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
    assert len(received) == len(lines)
    assert received.keys() == {*request.headers, "host", "content-length"}
    assert unquote(received["ce-type"]) == case.topic
    assert unquote(received["ce-partitionkey"]) == case.key
    assert unquote(received["ce-pgmbheaders"]) == case.headers
    structured = Endpoint(UUID(int=1), "e", endpoint.url, body="cloudevents", batch=2)
    (document,) = decoded(build_request(structured, [posted], 1, 1).body.decode())
    assert document.keys() == {
        *("specversion", "id", "source", "type", "time", "partitionkey"),
        *("pgmbheaders", "datacontenttype", "data"),
    }
    assert (document["type"], document["data"]) == (case.topic, decoded(case.payload))


# -- metrics and logs --------------------------------------------------------------------------------------


class Collected:
    def __init__(self, stream: str) -> None:
        self._snapshot = Snapshot(
            streams=[Stream(stream, 1, 1, 1, 1, 1, 1, 1, 1)], broker=BrokerStatus(0, 0, 0, None)
        )

    def collect(self) -> Iterable[Metric]:
        return families_of(self._snapshot)


def samples_of(stream: str) -> list[tuple[str, dict[str, str]]]:
    registry = CollectorRegistry()
    registry.register(Collected(stream))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_label_is_one_label(text: str) -> None:
    harmless = samples_of("harmless")
    assert {"stream": "harmless"} in [labels for _, labels in harmless]
    assert samples_of(text) == [
        (name, {**labels, "stream": text} if "stream" in labels else labels) for name, labels in harmless
    ]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_it_forges_no_line_of_the_log(text: str) -> None:
    """A handler failed, and its error quotes the event."""
    error, said = ValueError(text), "queue %s: %s failed: %s (%s)"
    args = ("q", "handler", f"ValueError: {text}", text)
    record = logging.LogRecord("pgmb.app", logging.WARNING, "", 0, said, args, (ValueError, error, None))
    line = JsonLines().format(record)
    assert CONTROL.findall(line) == []
    assert json.loads(line)["message"] == said % args
    first, *others = TextLines(TEXT).format(record).split("\n")
    assert re.match(r"\d{4}-\d\d-\d\d .* WARNING queue q: handler failed: ", first)
    assert all(other.startswith("  ") for other in others)
    assert CONTROL.findall("".join([first, *others])) == []
