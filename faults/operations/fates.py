"""An event goes through six fates, and every step is looked up in three ways: each must tell what was done.

One event is taken by five queues and an endpoint. In turn it is acked, leased, retried twice, buried,
buried and redriven and acked, and posted. After each step the command line, HTTP and the dashboard in
Chromium are read: states, attempts, errors, times, the session that holds a lease, the dead letter. What they
must tell comes from what this program did and when, not from a table of pgmb. In the end the log is made 50
times as long: what is told must not change, and the pages that the look-up reads must not grow with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import psycopg
from playwright.sync_api import Browser, Page, sync_playwright
from psycopg.conninfo import make_conninfo

import pgmb
from harness.demo import key
from harness.dispatchers import Dispatchers
from harness.explain import Explained, buffers
from harness.receiver import ReceiverProcess
from harness.serving import serving

SETTINGS = {"track_commit_timestamp": "on"}
"""So that the time of an ack is known."""
CHROMIUM = "/usr/bin/chromium"
QUEUES = ("acked", "leased", "retried", "dead", "redriven")
ENDPOINT = "shop"
SMALL, LARGE = 10_000, 500_000
"""Events in the log."""
_MOST_GROWTH = 1.5
_PATIENCE_SECONDS = 60.0
_TOLERANCE = timedelta(seconds=0.1)
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")
_FIELDS = ("reason", "attempt", "at", "until", "received_at", "ahead", "error", "dead_letter")


class Span(NamedTuple):
    """A time that lies between two moments, as far as the program knows."""

    earliest: datetime
    latest: datetime

    def after(self, seconds: float) -> Span:
        later = timedelta(seconds=seconds)
        return Span(self.earliest + later, self.latest + later)

    def holds(self, at: datetime, rounded: bool = False) -> bool:
        slack = _TOLERANCE + timedelta(seconds=1 if rounded else 0)
        return self.earliest - slack <= at <= self.latest + _TOLERANCE


class Standing(NamedTuple):
    """Where the event stands at one consumer, by what was done."""

    state: str
    facts: Mapping[str, Any] = {}
    """By the names of HTTP. Those that are not named must be null."""
    words: Sequence[str | tuple[str, Span]] = ()
    """What the command line and the dashboard say."""
    failures: Sequence[tuple[int, str]] = ()
    holder: int | None = None
    """The server process of the session that received."""


@dataclass
class Tally:
    steps: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    costs: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)
    """By the size of the log: the pages that the look-up reads, and those of each of its statements."""
    seconds: float = 0.0

    def check(self, way: str, what: str, shown: object, expected: object, rounded: bool = False) -> None:
        self.facts[way] += 1
        if isinstance(expected, Span):
            at = datetime.fromisoformat(shown) if isinstance(shown, str) else None
            right = at is not None and expected.holds(at, rounded)
        else:
            right = shown == expected
        if not right:
            self.wrong.append(f"step {self.steps}, {way}: {what} is {shown!r}, not {expected!r}")

    @property
    def growth(self) -> float:
        totals = [total for total, _ in self.costs.values()]
        return max(totals) / totals[0]

    @property
    def holds(self) -> bool:
        return (
            not self.wrong and set(self.facts) == {"CLI", "HTTP", "dashboard"} and self.growth <= _MOST_GROWTH
        )

    def __str__(self) -> str:
        lines = self.wrong[:20]
        names = list(self.costs)
        lines.append(f"{'pages read by':64}" + "".join(f"{name:>28}" for name in names))
        statements = dict.fromkeys(text for _, by in self.costs.values() for text in by)
        largest = sorted(statements, key=lambda text: -max(by.get(text, 0) for _, by in self.costs.values()))
        for text in largest[:8]:
            lines.append(
                f"{text[:62]:64}" + "".join(f"{self.costs[name][1].get(text, 0):28,}" for name in names)
            )
        totals = ", ".join(f"{total:,} pages at {name}" for name, (total, _) in self.costs.items())
        checked = ", ".join(f"{count} in {way}" for way, count in sorted(self.facts.items()))
        lines.append(
            f"fates {'hold' if self.holds else 'VIOLATED'}: six fates, {self.steps} steps, facts {checked}: "
            f"{len(self.wrong)} wrong | {totals} ({self.growth:.2f}x) | {self.seconds:.1f} s"
        )
        return "\n".join(lines)


def run(dsn: str, *, small: int = SMALL, large: int = LARGE) -> Tally:
    began = time.monotonic()
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        ReceiverProcess() as receiver,
        pgmb.connect(make_conninfo(dsn, application_name="fates"), min_size=1, max_size=1) as broker,
        serving(dsn, "http") as served,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = _signed_in(browser, served.url, key(connection, "wall", "inspect"))
            looker = _Looker(dsn, served.url, key(connection, "reader", "inspect"), page)
            story = _Story(dsn, connection, broker, looker, receiver.url)
            story.tell(receiver, small, large)
        finally:
            browser.close()
    story.tally.seconds = time.monotonic() - began
    return story.tally


def _signed_in(browser: Browser, url: str, key: str) -> Page:
    page = browser.new_page()
    page.set_default_timeout(_PATIENCE_SECONDS * 1000)
    page.goto(f"{url}/ui/login")
    page.fill("[name=key]", key)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{url}/ui")
    return page


class _Looker:
    """Reads what became of an event in each of the three ways."""

    def __init__(self, dsn: str, url: str, key: str, page: Page) -> None:
        self._environment = {**os.environ, "PGMB_DSN": dsn}
        self._url = url
        self._page = page
        self._http = httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=_PATIENCE_SECONDS)

    def http(self, event: UUID) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get(f"{self._url}/v1/events/{event}").raise_for_status().json()
        return found

    def consumers(self, event: UUID) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.http(event)["consumers"]}

    def command_line(self, event: UUID) -> tuple[dict[str, list[str]], dict[str, list[tuple[int, str]]]]:
        """The rows of `pgmb event`: state and words by consumer, and the failed attempts."""
        printed = subprocess.run(
            [sys.executable, "-m", "pgmb", "event", str(event)],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE_SECONDS,
        ).stdout
        consumers: dict[str, list[str]] = {}
        failures: dict[str, list[tuple[int, str]]] = {}
        title = ""
        for line in printed.splitlines():
            if not line.startswith(("│", "┃", "┏", "┡", "└", "┌", "├")):
                title = line.strip()
            elif line.startswith("│"):
                cells = [cell.strip() for cell in line.split("│")[1:-1]]
                if title == "Consumers":
                    consumers[cells[0]] = cells[2:]
                elif title.startswith("Failed attempts at "):
                    name = title.removeprefix("Failed attempts at ")
                    failures.setdefault(name, []).append((int(cells[0]), cells[2]))
        return consumers, failures

    def dashboard(self, event: UUID) -> tuple[dict[str, list[str]], dict[str, list[tuple[int, str]]]]:
        """The same, as Chromium shows it."""
        page = self._page
        page.goto(f"{self._url}/ui/event?id={event}")
        read = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
        rows = page.locator("#consumers tbody tr").evaluate_all(read)
        consumers = {name: [state, details] for name, state, details in rows}
        failures: dict[str, list[tuple[int, str]]] = {}
        for section in page.locator("section.wrong").all():
            name = section.locator("h2").inner_text().removeprefix("Failed attempts at ")
            found = section.locator("tbody tr").evaluate_all(read)
            failures[name] = [(int(attempt), error) for attempt, _, error in found]
        return consumers, failures


class _Story:
    """What is done to the event, and what must be told of it since then."""

    def __init__(
        self,
        dsn: str,
        connection: psycopg.Connection[Any],
        broker: pgmb.Broker,
        looker: _Looker,
        url: str,
    ) -> None:
        self.tally = Tally()
        self._dsn, self._connection, self._broker, self._looker = dsn, connection, broker, looker
        with broker.connection() as own:
            self._pid = own.info.backend_pid
        self._published = 0
        self._expected: dict[str, Standing] = {}
        for queue in QUEUES:
            broker.create_queue(queue, ["order.*"])
        # Not in the order of their names: which consumer comes first must not matter.
        broker.create_endpoint(ENDPOINT, f"{url}/hook", ["order.*"], log="all", secret=None)
        self._session = Explained(psycopg.connect(dsn, autocommit=True))

    def tell(self, receiver: ReceiverProcess, small: int, large: int) -> None:
        self._fill(small - 1)
        ahead = self._published
        event = self._broker.publish("order.paid", {"order": 42})
        waits = Standing("waiting", {"ahead": ahead}, [f"at most {ahead:,} ahead of it" if ahead else "next"])
        self._expected = dict.fromkeys((*QUEUES, ENDPOINT), waits)
        self._look(event)

        lease, received = self._receive("acked")
        self._leased("acked", received, 1)
        self._look(event)
        acked = _during(lease.ack)
        self._done("acked", received, acked)
        self._look(event)

        _, received = self._receive("leased", lease_for=3600)
        self._leased("leased", received, 1, lease_for=3600)
        self._look(event)

        failures: list[tuple[int, str]] = []
        for attempt, after in ((1, 0.0), (2, 3600.0)):
            lease, received = self._receive("retried")
            self._leased("retried", received, attempt, failures=failures)
            self._look(event)
            failures = [*failures, (attempt, f"failure {attempt}")]
            retried = _during(lambda: lease.retry(after=after, error=failures[-1][1]))  # noqa: B023
            due = retried.after(after)
            self._expected["retried"] = Standing(
                "retrying",
                {"attempt": attempt + 1, "until": due, "error": failures[-1][1]},
                [f"attempt {attempt + 1}", ("at", due)],
                failures,
            )
            self._look(event)

        self._bury(event, "dead")
        letter, received = self._bury(event, "redriven")
        redriven = _during(lambda: self._redrive(letter))
        failures = [(1, "the bank said no")]
        self._expected["redriven"] = Standing(
            "retrying",
            {"attempt": 1, "until": redriven, "error": failures[0][1]},
            ["attempt 1", ("at", redriven)],
            failures,
        )
        self._look(event)
        lease, again = self._receive("redriven")
        self._leased("redriven", again, 1, failures=failures)
        self._look(event)
        lease.ack()
        # When it was acked is known only of an event that was not retried.
        self._done("redriven", received, None)
        self._look(event)

        began = _now()
        with Dispatchers(self._dsn):
            receiver.wait_for(1)
            self._until_posted(event)
        posted = Span(began, _now())
        self._expected[ENDPOINT] = Standing("done", {"at": posted, "attempt": 1}, [("at", posted)])
        self._look(event)
        self.tally.check("HTTP", "the number of requests", receiver.count(), 1)

        self._cost(f"{small:,} events", event)
        self._fill(large - small)
        self._look(event)
        self._cost(f"{large:,} events", event)
        self._cost("behind all of them", self._broker.publish("order.paid", {"order": 43}))

    # -- doing

    def _fill(self, events: int) -> None:
        self._connection.execute(
            "insert into pgmb.log_main (topic, payload) select 'noise', '1' from generate_series(1, %s)",
            [events],
        )
        self._published += events

    def _receive(self, queue: str, lease_for: float = 30) -> tuple[pgmb.Lease, Span]:
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            began = _now()
            lease = self._broker.receive(queue, lease_for=lease_for)
            if lease.events:
                return lease, Span(began, _now())
            # A receive passes a bounded number of events that the queue does not take.
            if time.monotonic() > end:
                raise TimeoutError(f"queue {queue} gives nothing")

    def _bury(self, event: UUID, queue: str) -> tuple[int, Span]:
        lease, received = self._receive(queue)
        buried = _during(lambda: lease.bury(error="the bank said no"))
        # Its number is the database's to give. That it is the right one shows when it is redriven.
        letter = self._looker.consumers(event)[queue]["dead_letter"]
        self._expected[queue] = Standing(
            "dead",
            {"attempt": 1, "at": buried, "error": "the bank said no", "dead_letter": letter},
            [("since", buried), "1 attempt", f"dead letter {letter}", "the bank said no"],
            [(1, "the bank said no")],
        )
        self._look(event)
        return letter, received

    def _redrive(self, letter: int) -> None:
        self.tally.check("HTTP", "the dead letters redriven", self._broker.redrive("redriven", [letter]), 1)

    def _until_posted(self, event: UUID) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while {one["name"]: one for one in self._looker.http(event)["consumers"]}[ENDPOINT][
            "state"
        ] != "done":
            if time.monotonic() > end:
                return
            time.sleep(0.05)

    def _leased(
        self,
        queue: str,
        received: Span,
        attempt: int,
        failures: Sequence[tuple[int, str]] = (),
        lease_for: float = 30,
    ) -> None:
        until = received.after(lease_for)
        facts = {"attempt": attempt, "at": received, "until": until}
        if failures:
            facts["error"] = failures[-1][1]
        words: list[str | tuple[str, Span]] = [
            f"by server process {self._pid} (fates)",
            f"attempt {attempt}",
            ("until", until),
        ]
        self._expected[queue] = Standing("leased", facts, words, failures, self._pid)

    def _done(self, queue: str, received: Span, acked: Span | None) -> None:
        facts = {"received_at": received} if acked is None else {"received_at": received, "at": acked}
        words = [("received at", received)] if acked is None else [("at", acked), ("received at", received)]
        self._expected[queue] = Standing("done", facts, words)

    # -- looking

    def _look(self, event: UUID) -> None:
        self.tally.steps += 1
        self._look_by_http(event)
        for way, read in (("CLI", self._looker.command_line), ("dashboard", self._looker.dashboard)):
            consumers, failures = read(event)
            self.tally.check(way, "the consumers", set(consumers), set(self._expected))
            for name, expected in self._expected.items():
                state, words = consumers.get(name, ["", ""])
                self.tally.check(way, f"the state at {name}", state, expected.state)
                self._compare_words(way, name, words, expected)
                self.tally.check(way, f"failures at {name}", failures.get(name, []), list(expected.failures))

    def _look_by_http(self, event: UUID) -> None:
        check = self.tally.check
        found = self._looker.http(event)
        told = {one["name"]: one for one in found["consumers"]}
        check("HTTP", "the event", (found["found"], found["topic"]), ("log", "order.paid"))
        check("HTTP", "the consumers", set(told), set(self._expected))
        for name, expected in self._expected.items():
            one = told.get(name, {})
            check("HTTP", f"the state at {name}", one.get("state"), expected.state)
            for fact in _FIELDS:
                check("HTTP", f"{fact} at {name}", one.get(fact), expected.facts.get(fact))
            failed = [(failure["attempt"], failure["error"]) for failure in one.get("errors", [])]
            check("HTTP", f"failures at {name}", failed, list(expected.failures))
            holder = (one.get("holder") or {}).get("backend")
            check("HTTP", f"the holder at {name}", holder, expected.holder)

    def _compare_words(self, way: str, name: str, shown: str, expected: Standing) -> None:
        parts = shown.removeprefix("dead letter, ").split(", ")
        self.tally.check(way, f"what is said of {name} ({shown})", len(parts), len(expected.words))
        for part, wanted in zip(parts, expected.words, strict=False):
            if isinstance(wanted, str):
                self.tally.check(way, f"what is said of {name}", part, wanted)
                continue
            word, span = wanted
            at = _TIME.search(part)
            self.tally.check(way, f"the word for {name}", part[: at.start() - 1] if at else part, word)
            shown_at = f"{at[0].removesuffix(' UTC')}+00:00" if at else None
            self.tally.check(way, f"{word} at {name}", shown_at, span, rounded=True)

    def _cost(self, name: str, event: UUID) -> None:
        """Of a look-up in a session that has made some: the first ones fill its caches."""
        # As maintenance would: whether it came by must not decide.
        self._connection.execute("vacuum analyze")
        for _ in range(3):
            self._session.run("select pgmb.event_fate(%s)", event)
        by: Counter[str] = Counter()
        for text, plan in self._session.plans[:-1]:
            by[" ".join(text.split())] += buffers(plan)
        self.tally.costs[name] = (buffers(self._session.plans[-1][1]), dict(by))


def _now() -> datetime:
    return datetime.now(UTC)


def _during(act: Any) -> Span:
    """When something was done."""
    began = _now()
    act()
    return Span(began, _now())
