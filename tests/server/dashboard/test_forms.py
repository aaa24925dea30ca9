"""Queues and endpoints are created and changed by forms; what is refused is shown at the form."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb.webhooks.secrets import generate_key
from tests.server.dashboard.visitor import Visitor, check, visiting

DB = psycopg.Connection[Any]
QUEUE, ENDPOINT = "/ui/queue/edit", "/ui/endpoint/edit"


class Fields(HTMLParser):
    """What a browser would send if somebody opened a form and sent it as it is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self.area: str | None = None
        self.choosing: str | None = None
        self.within = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "form":
            self.within = (given.get("action") or "").endswith("/edit")
        if not self.within:
            return
        if tag == "input":
            self.values[name] = given.get("value") or ""
        elif tag == "textarea":
            self.area = name
            self.values[name] = ""
        elif tag == "select":
            self.choosing = name
        elif tag == "option" and self.choosing and (self.choosing not in self.values or "selected" in given):
            self.values[self.choosing] = given.get("value") or ""
            self.area = self.choosing if "value" not in given else None

    def handle_data(self, data: str) -> None:
        if self.area is not None:
            self.values[self.area] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("textarea", "option"):
            self.area = None


async def sent(visitor: Visitor, path: str, of: str | None = None, **typed: str) -> Any:
    """Opens a form, types into it as a browser would, and sends it."""
    page = await visitor.get(path, params={"name": of} if of else {})
    assert page.status_code == 200
    fields = Fields(page.text).values
    assert set(typed) <= set(fields), set(typed) - set(fields)
    del fields["csrf"]
    texts = {key: text.replace("\n", "\r\n") for key, text in {**fields, **typed}.items()}
    return await visitor.send(path, **texts)


def settings(db: DB, name: str) -> dict[str, Any]:
    row = db.execute("select pgmb.queue_settings(%s)", (name,)).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


def recorded(db: DB) -> list[tuple[Any, ...]]:
    return db.execute("select action, subject, detail from pgmb.audit order by id").fetchall()


@pytest.fixture
def broker(dsn: str) -> Any:
    with pgmb.connect(dsn, max_size=1) as made:
        yield made


async def test_a_queue_is_created(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.publish("order.paid", 1)
    async with visiting(dsn) as visitor:
        assert f'href="{QUEUE}"' in await visitor.page("/ui/queues")
        typed = {"lease_for": "1m30s", "max_attempts": "3", "backoff_base": "500ms", "rps": "2.5"}
        asked = {"name": "a/b", "patterns": "order.*\nrefund.#", "filter": "$.payload > 0"}
        answer = await sent(visitor, QUEUE, starting="earliest", **asked, **typed)
        assert "a/b is created" in answer.text
        assert answer.url.path == "/ui/queue"
    made = settings(db, "a/b")
    assert (made["lease_for"], made["max_attempts"], made["backoff_base"]) == ("PT1M30S", 3, "PT0.5S")
    assert (made["filter"], made["rps"], made["ordered"]) == ("$.payload > 0", 2.5, False)
    assert (made["max_in_flight"], made["ttl"], made["fair_by"]) == (None, None, None)
    assert broker.queue_status()[0].patterns == ["order.*", "refund.#"]
    assert broker.queue_depth("a/b") == 1
    ((action, subject, detail),) = recorded(db)
    assert (action, subject, detail["lease_for"]) == ("create_queue", "a/b", "1m30s")
    assert detail["patterns"] == ["order.*", "refund.#"]


async def test_order_and_tenants_are_chosen_at_creation(dsn: str, db: DB) -> None:
    async with visiting(dsn) as visitor:
        await sent(visitor, QUEUE, name="ordered", ordered="yes")
        await sent(visitor, QUEUE, name="fair", fair_by="header:tenant")
        assert "ordered" not in Fields((await visitor.get(QUEUE, params={"name": "fair"})).text).values
    assert (settings(db, "ordered")["ordered"], settings(db, "fair")["fair_by"]) == (True, "header:tenant")


async def test_only_what_was_typed_is_changed(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.create_queue(
        "q", ["a", "b"], lease_for=3723.5, ttl=60, equals={"payload": {"x": 1}}, filter="$.payload.y > $z",
        params={"z": 2},
    )  # fmt: skip
    before = settings(db, "q")
    async with visiting(dsn) as visitor:
        assert "Nothing was changed." in (await sent(visitor, QUEUE, "q")).text
        assert (settings(db, "q"), recorded(db)) == (before, [])
        assert "q is changed" in (await sent(visitor, QUEUE, "q", max_attempts="4", ttl="")).text
        assert settings(db, "q") == {**before, "max_attempts": 4, "ttl": None}
        await sent(visitor, QUEUE, "q", patterns="b\nc")
        assert broker.queue_status()[0].patterns == ["b", "c"]
        assert settings(db, "q") == {**before, "max_attempts": 4, "ttl": None}
        await sent(visitor, QUEUE, "q", filter="", lease_for="5m")
        found = settings(db, "q")
    assert (found["filter"], found["equals"], found["lease_for"]) == (None, {"payload": {"x": 1}}, "PT5M")
    assert recorded(db) == [
        ("alter_queue", "q", {"max_attempts": 4, "ttl": 0}),
        ("bind", "q", {"patterns": ["b", "c"]}),
        ("bind", "q", {"filter": ""}),
        ("alter_queue", "q", {"lease_for": "5m"}),
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"name": "q"}, "queue &#39;q&#39; exists already"),
        ({"name": "q", "patterns": "b"}, "exists with"),
        ({"name": "n", "patterns": "a.b#"}, "pattern"),
        ({"name": "n", "filter": "$.payload ="}, "invalid filter"),
        ({"name": "n", "fair_by": "tenant"}, "key takes the event&#39;s key"),
        ({"name": "n", "max_attempts": "0"}, "max_attempts must be at least 1"),
        ({"name": "n", "max_attempts": "many"}, "must be a whole number, got &#39;many&#39;"),
        ({"name": "n", "rps": "fast"}, "must be a number"),
        ({"name": "n", "lease_for": "soon"}, "Write 30s, 5m, 2h or 7d."),
        ({"name": "n", "stream": "gone"}, "stream &#39;gone&#39; does not exist"),
        ({"name": ""}, "Name is missing"),
    ],
)
async def test_what_is_refused_is_said_at_the_form_and_stays_typed(
    dsn: str, db: DB, broker: pgmb.Broker, typed: dict[str, str], said: str
) -> None:
    broker.create_queue("q")
    async with visiting(dsn) as visitor:
        answer = await sent(visitor, QUEUE, **typed, max_in_flight="7")
        assert answer.status_code in (404, 409, 422)
        assert said in answer.text
        check(QUEUE, answer.text)
        kept = Fields(answer.text).values
        assert {name: kept[name] for name in typed} == typed
        assert kept["max_in_flight"] == "7"
    assert [one.queue for one in broker.queue_status()] == ["q"]
    assert recorded(db) == []


async def test_what_is_refused_of_a_change_stays_typed_and_can_be_sent_again(
    dsn: str, db: DB, broker: pgmb.Broker
) -> None:
    broker.create_queue("q", ["a"], lanes=["b"])
    async with visiting(dsn) as visitor:
        answer = await sent(visitor, QUEUE, "q", max_length="5", max_attempts="7", patterns="c")
        assert (answer.status_code, "Queues with lanes or a filter have no max_length" in answer.text) == (
            422,
            True,
        )
        assert broker.queue_status()[0].patterns == ["a"], "all of it or nothing"
        again = Fields(answer.text).values
        del again["csrf"]
        assert (again["max_attempts"], again["patterns"], again["of"]) == ("7", "c", "q")
        assert "q is changed" in (await visitor.send(QUEUE, **{**again, "max_length": ""})).text
        assert (await sent(visitor, QUEUE, "q", lease_for="")).status_code == 422
    assert settings(db, "q")["max_attempts"] == 7
    assert broker.queue_status()[0].patterns == ["c"]


async def test_an_endpoint_is_created_and_its_secret_shown_once(
    dsn: str, db: DB, broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGMB_SECRET_KEY", generate_key())
    async with visiting(dsn) as visitor:
        assert f'href="{ENDPOINT}"' in await visitor.page("/ui/endpoints")
        asked = {"name": "hook", "url": "https://a.example/x?token=t", "patterns": "order.*"}
        answer = await sent(
            visitor, ENDPOINT, **asked, retry_after="5s 5m", timeout="2s", keep_response="yes"
        )
        assert "whsec_" in answer.text
        assert "not shown again" in answer.text
        assert "whsec_" not in await visitor.page("/ui/endpoint?name=hook")
        again = await sent(visitor, ENDPOINT, **{**asked, "url": "https://b.example/"})
        assert (again.status_code, "exists already" in again.text) == (409, True)
    made = broker.endpoint("hook")
    assert (made.url, made.patterns, made.secrets) == (asked["url"], ["order.*"], 1)
    assert [wait.total_seconds() for wait in made.retry_after or []] == [5, 300]
    assert (made.timeout.total_seconds(), made.keep_response, made.batch) == (2, True, 1)
    ((action, subject, detail),) = recorded(db)
    assert (action, subject) == ("create_endpoint", "hook")
    assert "token=t" not in str(detail)
    assert "whsec_" not in str(detail)


async def test_an_endpoint_is_changed(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.create_endpoint("hook", "https://a.example/", ["a"], secret=None, rps=5, headers={"x": "y"})
    before = broker.endpoint("hook")
    async with visiting(dsn) as visitor:
        assert "Nothing was changed." in (await sent(visitor, ENDPOINT, "hook")).text
        typed = {"url": "https://b.example/?token=t", "rps": "", "log": "all"}
        assert "hook is changed" in (await sent(visitor, ENDPOINT, "hook", **typed)).text
        await sent(visitor, ENDPOINT, "hook", patterns="b", filter="$.payload > 1")
        refused = await sent(visitor, ENDPOINT, "hook", batch="5")
        assert (refused.status_code, "has no queue of its own" in refused.text) == (409, True)
        assert Fields(refused.text).values["batch"] == "5"
        refused = await sent(visitor, ENDPOINT, "hook", url="nowhere")
        assert refused.status_code == 422
    found = broker.endpoint("hook")
    assert (found.url, found.rps, found.log, found.patterns) == (typed["url"], None, "all", ["b"])
    assert (found.filter, found.headers) == ('($."payload" > 1)', ["x"])
    assert found.retry_after == before.retry_after
    assert [(action, sorted(detail)) for action, _, detail in recorded(db)] == [
        ("alter_endpoint", ["log", "rps", "url"]),
        ("bind_endpoint", ["filter", "patterns"]),
    ]
    assert "token=t" not in str(recorded(db))


async def test_readers_neither_see_the_forms_nor_send_them(dsn: str, broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.create_endpoint("hook", "https://a.example/?token=t", secret=None)
    async with visiting(dsn, "inspect") as visitor:
        for path, name in ((QUEUE, "q"), (ENDPOINT, "hook")):
            assert path not in await visitor.page(path.removesuffix("/edit") + "s")
            assert path not in await visitor.page(path.removesuffix("/edit") + f"?name={name}")
            for address in (path, f"{path}?name={name}"):
                answer = await visitor.get(address)
                assert (answer.status_code, "token" in answer.text) == (403, False)
            assert (await visitor.send(path, name="new", url="https://c.example")).status_code == 403
            assert (await visitor.send(path, of=name, patterns="x")).status_code == 403
    async with visiting(dsn) as visitor:
        fields = {"name": "new", "stream": "main", "patterns": "#"}
        assert (await visitor.client.post(QUEUE, data=fields)).status_code == 403
        assert (await visitor.get(f"{QUEUE}?name=gone")).status_code == 404
        assert (await visitor.get(f"{ENDPOINT}?name=gone")).status_code == 404
    assert [one.queue for one in broker.queue_status()][-1:] != ["new"]
    assert [one.name for one in broker.endpoints()] == ["hook"]
