"""Workers and the queues that feed them, by the calls of fraruiz/pgmb: the rows and the routing are right."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import ClientCursor

from harness.states import queue_settings

URL = "http://localhost:8080/process"


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def warned(db: psycopg.Connection[Any]) -> list[str]:
    """What the connection is warned of from now on."""
    said: list[str] = []
    db.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    return said


@pytest.fixture
def worker(db: psycopg.Connection[Any]) -> UUID:
    registered = value(db, "select pgmb.worker('w', %s, 10)", URL)
    assert isinstance(registered, UUID)
    return registered


def test_a_name_registered_again_keeps_its_id_and_takes_the_new_url_and_limit(
    db: psycopg.Connection[Any], worker: UUID
) -> None:
    again = value(db, "select pgmb.worker(name => 'w', endpoint => 'https://example.org/', rps => null)")
    assert again == worker
    other = value(db, "select pgmb.worker('v'::varchar, %s::varchar, 1::smallint)", URL)
    assert other != worker
    rows = db.execute("select id, name, rps, endpoint from pgmb.workers order by name").fetchall()
    assert rows == [(other, "v", 1, URL), (worker, "w", None, "https://example.org/")]


def test_a_name_registered_by_two_at_once_is_one_worker(dsn: str) -> None:
    registered: list[UUID] = []

    def register() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            registered.extend(value(connection, "select pgmb.worker('w', %s, 1)", URL) for _ in range(20))

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registered) == 80
    assert len(set(registered)) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "https://example.org:443/a/b?c=d#e",
        "HTTP://EXAMPLE.ORG/",
        "http://127.0.0.1:8080/process",
        "http://[::1]:8080/",
        "http://bücher.example/straße",
        "http://host?query",
        "http://host/with@sign",
    ],
)
def test_http_urls_are_taken(db: psycopg.Connection[Any], url: str) -> None:
    value(db, "select pgmb.worker('w', %s, 1)", url)
    assert value(db, "select endpoint from pgmb.workers") == url


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "localhost:8080",
        "ftp://host/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://:80/",
        "http://host:0/",
        "http://host:65536/",
        "http://host:port/",
        "http://user:secret@host/",
        "http://good.example\\@evil.example/",
        "http://host/a b",
        "http://host/\r\nx: y",
        "http://host\t/",
        " http://host/",
        "http://[::1/",
        "http://ho[st/",
        "http://host/" + "a" * 2000,
    ],
)
def test_what_is_no_http_url_is_refused(db: psycopg.Connection[Any], url: str | None) -> None:
    with pytest.raises(psycopg.Error) as refusal:
        db.execute("select pgmb.worker('w', %s, 1)", [url])
    assert refusal.value.sqlstate == "MB005"
    assert value(db, "select count(*) from pgmb.workers") == 0


@pytest.mark.parametrize(
    ("name", "rps", "sqlstate"),
    [
        (None, 1, "MB003"),
        ("", 1, "MB003"),
        (" w", 1, "MB003"),
        ("a\nb", 1, "MB003"),
        ("w" * 101, 1, "MB003"),
        ("w", 0, "MB005"),
        ("w", -1, "MB005"),
    ],
)
def test_odd_names_and_limits_are_refused(
    db: psycopg.Connection[Any], name: str | None, rps: int, sqlstate: str
) -> None:
    with pytest.raises(psycopg.Error) as refusal:
        db.execute("select pgmb.worker(%s, %s, %s)", [name, URL, rps])
    assert refusal.value.sqlstate == sqlstate


@pytest.mark.parametrize("factory", [psycopg.Cursor, ClientCursor], ids=["extended", "simple"])
@pytest.mark.parametrize(
    "call",
    [
        "pgmb.create('q', 'order.*', '{worker}', 5)",
        "pgmb.create('q', 'order.*', 5, '{worker}')",
        "pgmb.create('q', 'order.*', '{worker}')",
        "pgmb.create('q'::varchar, 'order.*'::varchar, '{worker}'::uuid, 5::smallint)",
        "pgmb.create('q'::varchar(9), 'order.*'::text, 5, '{worker}'::uuid)",
        "pgmb.create(name => 'q', binding_key => 'order.*', max_retries => 5, worker_id => '{worker}')",
        "pgmb.create(worker_id => '{worker}', max_retries => 5, binding_key => 'order.*', name => 'q')",
        "pgmb.create('q', 'order.*', worker_id => '{worker}', max_retries => 5)",
        "pgmb.create('q', 'order.*', (select id from pgmb.workers), 5)",
        "pgmb.create('q', 'order.*', 5, (select id from pgmb.workers))",
    ],
)
def test_create_takes_its_arguments_in_both_orders(
    db: psycopg.Connection[Any], connect: Any, worker: UUID, call: str, factory: Any
) -> None:
    connection: psycopg.Connection[Any] = connect(cursor_factory=factory)
    said = warned(connection)
    made = value(connection, f"select {call.format(worker=worker)}")
    rows = db.execute("select id, name, binding_key, worker_id, max_retries from pgmb.queues").fetchall()
    assert rows == [(made, "q", "order.*", worker, 5)]
    kept = queue_settings(db)
    assert [kept[name] for name in ("uid", "endpoint", "max_attempts")] == [str(made), str(worker), 6]
    assert said == []


@pytest.mark.parametrize("order", ["%(worker)s, %(retries)s", "%(retries)s, %(worker)s"])
def test_create_takes_bound_parameters_in_both_orders(
    db: psycopg.Connection[Any], worker: UUID, order: str
) -> None:
    for given in (worker, str(worker)):
        made = db.execute(
            f"select pgmb.create(%(name)s, 'a', {order})",
            {"name": f"q{type(given).__name__}", "worker": given, "retries": 3},
        ).fetchone()
        assert made is not None
    assert {row[0] for row in db.execute("select max_retries from pgmb.queues").fetchall()} == {3}


def test_a_queue_created_again_keeps_its_id_and_messages_and_takes_the_new_worker(
    db: psycopg.Connection[Any], worker: UUID
) -> None:
    made = value(db, "select pgmb.create('q', 'a.*', 5, %s)", worker)
    db.execute("select pgmb.send(gen_random_uuid(), 'a.b', '1')")
    other = value(db, "select pgmb.worker('other', %s, 1)", URL)
    assert value(db, "select pgmb.create('q', 'a.*', %s, 2)", other) == made
    assert db.execute("select worker_id, max_retries from pgmb.queues").fetchall() == [(other, 2)]
    assert value(db, "select count(*) from pgmb.q_queue where acknoledge = false") == 1
    with pytest.raises(psycopg.Error) as differs:
        db.execute("select pgmb.create('q', 'b.*', 5, %s)", [worker])
    assert differs.value.sqlstate == "MB006"


@pytest.mark.parametrize(
    ("arguments", "sqlstate"),
    [
        ("null, 'a', 5, gen_random_uuid()", "MB003"),
        ("'', 'a', 5, gen_random_uuid()", "MB003"),
        ("'q', null, 5, gen_random_uuid()", "MB007"),
        ("'q', 'order*', 5, gen_random_uuid()", "MB007"),
        ("'q', 'a', 5, null", "MB005"),
        ("'q', 'a', null, gen_random_uuid()", "MB005"),
        ("'q', 'a', -1, gen_random_uuid()", "MB005"),
        ("'q', 'a', 2147483647, gen_random_uuid()", "MB005"),
    ],
)
def test_odd_queues_are_refused_and_leave_nothing(
    db: psycopg.Connection[Any], arguments: str, sqlstate: str
) -> None:
    with pytest.raises(psycopg.Error) as refusal:
        db.execute(f"select pgmb.create({arguments})")
    assert refusal.value.sqlstate == sqlstate
    assert value(db, "select count(*) from pgmb.queues") == 0
    assert value(db, "select count(*) from pgmb.queue_view") == 0


def test_a_worker_that_nobody_registered_draws_a_warning_that_names_it(db: psycopg.Connection[Any]) -> None:
    said, stranger = warned(db), uuid4()
    value(db, "select pgmb.create('q', 'a', 5, %s)", stranger)
    assert len(said) == 1
    assert str(stranger) in said[0]
    assert value(db, "select worker_id from pgmb.queues") == stranger


@pytest.mark.parametrize(
    ("binding_key", "routing_key", "routed"),
    [
        ("order.*", "order.created", True),
        ("order.*", "order", False),
        ("order.*", "order.eu.created", False),
        ("order.*", "orderXcreated", False),
        ("order.#", "order.eu.created", True),
        ("*.created", "order.created", True),
        ("*.created", "order.eu.created", False),
        ("order.*.created", "order.eu.created", True),
        ("order_made", "orderXmade", False),
        ("order_made", "order_made", True),
        ("100%.*", "1000.x", False),
        ("100%.*", "100%.x", True),
        ("*", "order", True),
        ("*", "order.created", False),
        ("#", "order.created", True),
        ("a-b.*", "a-b.c", True),
    ],
)
def test_a_star_is_one_word_and_everything_else_is_itself(
    db: psycopg.Connection[Any], worker: UUID, binding_key: str, routing_key: str, routed: bool
) -> None:
    db.execute("select pgmb.create('q', %s, 5, %s)", [binding_key, worker])
    db.execute("select pgmb.send(gen_random_uuid(), %s, '{}')", [routing_key])
    assert value(db, "select count(*) from pgmb.q_queue") == routed
    assert value(db, "select count(*) from pgmb.receive('q')") == routed


def test_a_message_is_tried_again_max_retries_times_and_then_dead(
    db: psycopg.Connection[Any], worker: UUID
) -> None:
    db.execute("select pgmb.create('q', 'a', 2, %s)", [worker])
    message = uuid4()
    db.execute("select pgmb.send(%s, 'a', '{\"n\": 1}', '{\"h\": 2}')", [message])
    for attempt in (1, 2, 3):
        assert db.execute("select message_id, retries from pgmb.q_queue").fetchall() == [
            (message, attempt - 1)
        ]
        lease, tried = db.execute("select lease, attempt from pgmb.receive('q')").fetchall()[0]
        assert tried == attempt
        db.execute("select pgmb.retry(%s, after => '0 s', error => 'status 500')", [lease])
    assert value(db, "select count(*) from pgmb.q_queue") == 0
    dead = db.execute(
        "select message_id, acknoledge, retries, locked, routing_key, body, headers, error"
        " from pgmb.q_dead_letter_queue"
    ).fetchall()
    assert dead == [(message, False, 2, False, "a", {"n": 1}, {"h": 2}, "status 500")]


def test_without_retries_the_first_failure_is_the_last(db: psycopg.Connection[Any], worker: UUID) -> None:
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '{}')")
    db.execute("select pgmb.retry(r.lease) from pgmb.receive('q') r")
    assert value(db, "select retries from pgmb.q_dead_letter_queue") == 0


def test_queues_made_otherwise_are_listed_too(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('plain', '{a.*,b.#}', max_attempts => 10)")
    db.execute("select pgmb.create_queue('laned', lanes => '{urgent.#}')")
    rows = db.execute(
        "select name, binding_key, worker_id, max_retries from pgmb.queues order by 1"
    ).fetchall()
    assert rows == [("laned", "#", None, 9), ("plain", "a.*,b.#", None, 9)]
