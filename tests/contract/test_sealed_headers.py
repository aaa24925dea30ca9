"""Secret headers of an endpoint are sealed before the first statement: no file of the server has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.traces import in_bytes, in_database
from pgmb._core.endpoints import endpoint_id as _endpoint_id
from pgmb.errors import InvalidArgument
from pgmb.webhooks.secrets import SealingKey, generate_key, open_headers

URL = "http://hooks.example/in"
CREATED, REPLACED, ALTERED, MISSED = (f"Bearer marker-{word}-3f9c" for word in ("a", "b", "c", "d"))


def write_ahead_log(db: psycopg.Connection[Any]) -> list[bytes]:
    row = db.execute("select current_setting('data_directory') || '/pg_wal'").fetchone()
    assert row is not None
    return [file.read_bytes() for file in Path(row[0]).iterdir() if file.is_file()]


def test_secret_headers_reach_the_server_sealed(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = generate_key()
    monkeypatch.setenv("PGMB_SECRET_KEY", key)
    with pgmb.connect(dsn) as broker:
        made = broker.create_endpoint("e", URL, headers={"authorization": CREATED, "x-plain": "plain-3f9c"})
        again = broker.create_endpoint("e", URL, headers={"Authorization": REPLACED})
        assert again.id == made.id
        broker.alter_endpoint("e", headers={"authorization": ALTERED})
        with pytest.raises(pgmb.errors.EndpointNotFound):
            broker.alter_endpoint("none", headers={"authorization": MISSED})
    # Commits of this server need not have reached the files.
    db.execute("checkpoint")
    markers = [CREATED, REPLACED, ALTERED, MISSED]
    assert in_bytes(write_ahead_log(db), [*markers, "plain-3f9c"]) == ["plain-3f9c"], (
        "the search can find one"
    )
    assert in_database(db, markers) == {}
    ((stored,),) = db.execute("select headers from pgmb.endpoint").fetchall()
    assert open_headers(SealingKey.parse(key), made.id, stored) == {"authorization": ALTERED}


def test_secret_headers_are_sealed_for_the_endpoint_that_another_session_created(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = generate_key()
    monkeypatch.setenv("PGMB_SECRET_KEY", key)
    with pgmb.connect(dsn) as broker:
        # It is not there yet when its id is looked for.
        monkeypatch.setattr("pgmb._core.endpoints.endpoint_id", lambda _: _endpoint_id("none"))
        db.execute("select pgmb.create_endpoint('e', 'http://a.example/')")
        made = broker.create_endpoint("e", URL, headers={"authorization": CREATED})
    ((id, stored),) = db.execute("select id, headers from pgmb.endpoint").fetchall()
    assert made.id == id
    assert open_headers(SealingKey.parse(key), id, stored) == {"authorization": CREATED}


@pytest.mark.parametrize(
    "headers", [{"authorization": "a\r\nx-more: b"}, {"authorization": "a\tb"}, {"host": "x"}]
)
def test_headers_are_checked_before_they_are_sealed(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    monkeypatch.setenv("PGMB_SECRET_KEY", generate_key())
    with pgmb.connect(dsn) as broker:
        with pytest.raises(InvalidArgument):
            broker.create_endpoint("e", URL, headers=headers)
        broker.create_endpoint("e", URL)
        with pytest.raises(InvalidArgument):
            broker.alter_endpoint("e", headers=headers)
