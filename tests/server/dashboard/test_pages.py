"""Every page: complete, escaped, without anything that a browser would have to trust."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.states import age_waiting, leases_in_flight
from tests.server.dashboard.visitor import HOSTILE, Markup, Visitor, address, check, hostile_pages, visiting

DB = psycopg.Connection[Any]


@pytest.fixture
def pages(dsn: str) -> list[str]:
    return list(hostile_pages(dsn).values())


async def test_under_a_prefix_everything_stays_below_it(dsn: str, pages: list[str]) -> None:
    async with visiting(dsn, root="/broker/one") as visitor:
        for path in pages:
            check(path, await visitor.page(path), "/broker/one")
        assert visitor.client.cookies.jar is not None
        assert {cookie.path for cookie in visitor.client.cookies.jar} == {"/broker/one"}
        done = await visitor.send("/ui/queue", name=HOSTILE, action="resume")
        assert done.url.path == "/broker/one/ui/queue"
        assert 'class="note"' in done.text
        assert 'class="note"' not in await visitor.page(address("/ui/queue", name=HOSTILE))
        await visitor.send("/ui/logout")
        away = await visitor.get(address("/ui/queue", name=HOSTILE))
        assert away.headers["location"].startswith("/broker/one/ui/login?next=/ui/queue%3Fname%3D")


async def test_links_lead_where_they_say(dsn: str, pages: list[str]) -> None:
    seen: set[str] = set()
    async with visiting(dsn) as visitor:
        for path in pages:
            for one in Markup(await visitor.page(path)).addresses("href"):
                if one.startswith("/ui") and one not in seen:
                    seen.add(one)
                    answer = await visitor.get(one.partition("#")[0])
                    assert answer.status_code == 200, (path, one)
    assert len(seen) > 20


async def test_an_empty_broker_says_so_on_every_page(dsn: str) -> None:
    async with visiting(dsn, "inspect") as visitor:
        for path, said in (
            ("/ui", "No queue yet"),
            ("/ui/streams", "main"),
            ("/ui/stream?name=main", "Nobody reads it"),
            ("/ui/queues", "No queue yet"),
            ("/ui/events", "No events"),
            ("/ui/dead", "No dead letters"),
            ("/ui/endpoints", "No endpoint yet"),
            ("/ui/workers", "No workers"),
            ("/ui/schedules", "No schedules"),
            ("/ui/keys", "Only operators see keys"),
            ("/ui/audit", "Nothing was changed yet"),
        ):
            text = await visitor.page(path)
            assert said in text, path
            assert text.count("<h1") == 1, path


async def test_what_is_not_there_and_what_cannot_be_asked(dsn: str) -> None:
    async with visiting(dsn) as visitor:
        for path, status in (
            ("/ui/queue?name=gone", 404),
            ("/ui/event?id=01900000-0000-4000-8000-000000000001", 404),
            ("/ui/event?id=x", 422),
            ("/ui/queue", 404),
            ("/ui/stream?name=gone", 404),
            ("/ui/endpoint?name=gone", 404),
            ("/ui/schedule?name=gone", 404),
            ("/ui/event?stream=main&seq=1", 404),
            ("/ui/event?stream=main&seq=x", 422),
            ("/ui/event?stream=main", 404),
            ("/ui/dead-letter?id=1", 404),
            ("/ui/dead?topic=a..b%20%00", 422),
            ("/ui/events?id=nonsense", 422),
            ("/ui/events?since=yesterday", 422),
            ("/ui/events?since=0001-01-01T00:00", 422),
            ("/ui/events?before=99999999999999999999", 422),
            ("/ui/events?stream=gone", 404),
            (address("/ui/events", topic=HOSTILE), 422),
            (address("/ui/dead", topic=HOSTILE), 422),
            ("/ui/nothing", 404),
        ):
            answer = await visitor.get(path)
            assert answer.status_code == status, (path, answer.text[:300])
            assert answer.headers["content-type"].startswith("text/html"), path
            check(path, answer.text)


async def test_a_payload_is_given_to_the_letter(dsn: str, db: DB) -> None:
    letters = '{"a":1.10,  "a":2, "big":123456789012345678901234567890, "\\u0041": "\\ud83d\\ude00"}'
    db.execute("select pgmb.publish('a', %s::json)", (letters,))
    async with visiting(dsn, "inspect") as visitor:
        seq = (db.execute("select pgmb.browse() -> 'events' -> 0 ->> 'seq'").fetchone() or [0])[0]
        answer = await visitor.get(f"/ui/event/raw?stream=main&seq={seq}")
        assert answer.text == letters
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["content-type"].startswith("application/json")


async def test_static_files_are_kept_for_ever_and_pages_name_them(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        text = await visitor.page("/ui/login")
        loaded = [one for one in Markup(text).addresses() if "/static/" in one]
        assert len(loaded) >= 3
        for one in loaded:
            answer = await visitor.get(one.partition("#")[0])
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
            if one.endswith(".js"):
                assert "./regions." in answer.text
                assert '"./regions.js"' not in answer.text
        assert (await visitor.get("/ui/static/main.js")).status_code == 404
        assert (await visitor.get("/ui/static/..%2frouter.py")).status_code in (303, 404)


async def test_a_head_of_what_is_live_ends(dsn: str) -> None:
    async with visiting(dsn, "inspect") as visitor:
        answer = await visitor.client.head("/ui/live")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_reader_sees_no_controls(dsn: str, pages: list[str]) -> None:
    async def forms(visitor: Visitor) -> set[str]:
        found: set[str] = set()
        for path in pages:
            if "/edit" in path and visitor is reader:
                assert (await visitor.get(path)).status_code == 403
                continue
            for tag, attributes in Markup(await visitor.page(path)).tags:
                if tag == "button" and attributes.get("name") == "action":
                    found.add(str(attributes["value"]))
        return found

    async with visiting(dsn, "inspect") as reader:
        assert await forms(reader) == set()
    async with visiting(dsn, "operate") as operator:
        assert await forms(operator) >= {
            "resume",
            "seek",
            "purge",
            "redrive-chosen",
            "redrive-matching",
            "run",
        }


async def test_an_event_is_found_by_its_id_wherever_it_is(dsn: str, db: DB) -> None:
    """In another stream than the one searched, delayed, or as the copy that a dead letter holds."""
    db.execute("select pgmb.create_stream('orders')")
    db.execute("select pgmb.create_queue('q', stream => 'orders')")
    (elsewhere, later), *_ = db.execute(
        "select pgmb.publish('a', '1', stream => 'orders'), pgmb.publish('b', '2', delay => '1 hour')"
    ).fetchall()
    async with visiting(dsn, "inspect") as visitor:
        for event, said in ((elsewhere, "waiting"), (later, "It is delayed")):
            found = await visitor.get(address("/ui/events", stream="main", id=str(event)))
            assert (found.status_code, found.headers["location"]) == (303, f"/ui/event?id={event}")
            assert said in await visitor.page(found.headers["location"])
        db.execute("select pgmb.bury((select lease from pgmb.receive('q')), error => 'no')")
        page = await visitor.page(f"/ui/event?id={elsewhere}")
        assert "dead letter" in page
        assert "Failed attempts" in page


async def test_a_dead_letter_shows_every_attempt_with_its_traceback(dsn: str, db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('a', '1')")
    for error in ("no route to the bank", "the bank is closed"):
        retried = (
            "select pgmb.retry(lease, after => '0', error => %s, detail => 'line 7') from pgmb.receive('q')"
        )
        db.execute(retried, [error])
    db.execute("select pgmb.bury((select lease from pgmb.receive('q')), error => 'given up')")
    async with visiting(dsn, "inspect") as visitor:
        found = Markup(await visitor.page("/ui/dead")).addresses("href")
        (letter,) = {one for one in found if "/ui/dead-letter" in one}
        page = await visitor.page(letter)
    for said in ("no route to the bank", "the bank is closed", "given up", "line 7"):
        assert said in page, said


async def test_schedules_and_keys_are_listed(dsn: str, db: DB) -> None:
    db.execute(
        "select pgmb.create_schedule('nightly', '0 3 * * *', 'report.due', '{}', now() + interval '1 day')"
    )
    async with visiting(dsn, "inspect") as visitor:
        assert "report.due" in await visitor.page("/ui/schedules")
        assert "inspect</" not in await visitor.page("/ui/keys")
    async with visiting(dsn, "operate") as visitor:
        assert "operate" in await visitor.page("/ui/keys")


async def test_a_queue_shows_what_comes_next(dsn: str, db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{a}')")
    async with visiting(dsn, "inspect") as visitor:
        assert "Nothing waits" in await visitor.page("/ui/queue?name=q")
        db.execute("select pgmb.publish('a', '{\"n\": 1}'), pgmb.publish('a', '{\"n\": 2}')")
        ((lease,),) = db.execute("select lease from pgmb.receive('q', 1)").fetchall()
        db.execute("select pgmb.retry(%s, after => '0 s', error => 'it broke')", (lease,))
        text = await visitor.page("/ui/queue?name=q")
        section = text[text.index('id="next"') : text.index('id="leases"')]
        assert section.index("it broke") < section.index("&#34;n&#34;: 2")
        shown = [one for one in Markup(section).addresses("href") if "/ui/event?" in one]
        assert len(shown) == 2
        for one in shown:
            assert "Consumers" in await visitor.page(one)
        assert leases_in_flight(db) == 0
        db.execute("set statement_timeout = '5s'")
        db.execute("select pgmb.bind('q', '{a}', condition => '1 / (e.payload ->> ''n'')::int < 0')")
        db.execute("select pgmb.publish('a', '{\"n\": 0}')")
        age_waiting(db, "-1 hour")
        assert "division by zero" in await visitor.page("/ui/queue?name=q")


async def test_a_queues_page_shows_where_its_workers_disagree(dsn: str, db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{a,old}')")
    db.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'host7', 4711, '{q}')")
    async with visiting(dsn) as visitor:
        assert "Workers disagree" not in await visitor.page("/ui/queue?name=q")
        db.execute("select pgmb.declare_queue((select id from pgmb.worker), 'q', '{a}')")
        shown = await visitor.page("/ui/queue?name=q")
    assert "Workers disagree" in shown
    assert "it is bound to patterns that no live worker declares: old" in shown
