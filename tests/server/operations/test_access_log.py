"""What the log says of a request: enough to find it again, and nothing that is secret."""

from __future__ import annotations

import logging

import msgspec
import pytest

from pgmb._core.logs import JsonLines
from pgmb.server import create_app
from tests.server.asking import asking, bearer, make_key


def of_access(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Other loggers may have something to say on a busy machine."""
    return [record for record in caplog.records if record.name == "pgmb.access"]


async def test_a_request_is_one_line_without_its_query(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    key = make_key(dsn, "scraper", "inspect")
    caplog.set_level(logging.DEBUG, "pgmb.access")
    async with asking(create_app(dsn)) as client:
        told = await client.get("/metrics?ticket=hush", headers={**bearer(key), "X-Request-Id": "abc-1"})
        assert told.headers["x-request-id"] == "abc-1"
        odd = await client.get("/private/path?x=hush", headers={"X-Request-Id": "a\tb" + "c" * 200})
        assert len(odd.headers["x-request-id"]) == 32, "made, not taken over"
    first, second = records = of_access(caplog)
    fields = first.__dict__["fields"]
    assert (fields["method"], fields["route"], fields["status"]) == ("GET", "/metrics", 200)
    assert (fields["key"], fields["request_id"]) == ("scraper", "abc-1")
    assert fields["bytes"] == len(told.content)
    assert second.__dict__["fields"]["route"] == "unmatched"
    for record in records:
        line = JsonLines().format(record)
        assert msgspec.json.decode(line)["logger"] == "pgmb.access"
        for secret in ("hush", key, "private"):
            assert secret not in line
            assert secret not in record.getMessage()


async def test_what_is_asked_all_day_is_logged_where_it_fails(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgmb.access")
    application = create_app(dsn)
    async with asking(application) as client:
        await client.get("/livez")
        await client.get("/readyz")
        assert not of_access(caplog)
        await application.drain()
        await client.get("/readyz")
    assert [record.__dict__["fields"]["status"] for record in of_access(caplog)] == [503]


def test_an_error_is_part_of_its_line() -> None:
    try:
        raise ValueError("odd\nthing")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "%s", ("failed\n",), (ValueError, error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "ValueError: odd" in msgspec.json.decode(line)["error"]
