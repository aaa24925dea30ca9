"""pgmb serve and pgmb http: where it serves, how it ends, and what it says where it cannot."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from harness.serving import serving
from pgmb.cli import parts
from pgmb.services import SERVICES
from tests.cli.conftest import Run


def test_all_roles_and_http_in_one_process(dsn: str) -> None:
    with serving(dsn, "serve", "--log-format", "json", "--drain-for", "2s") as served:
        process, url = served.process, served.url
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/livez").text == "ok\n"
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            assert client.get("/metrics").status_code == 401
            assert "server" not in ready.headers
            process.send_signal(signal.SIGTERM)
            while (ended := client.get("/readyz")).status_code == 200:
                time.sleep(0.02)
            assert ended.json()["checks"]["staying"]["ok"] is False
        log = served.ended()
        assert process.returncode == 0, log
        assert served.said == [], "JSON is all that it says"
        told = [msgspec.json.decode(line) for line in log.splitlines()]
        assert told[0]["message"].startswith("Serving ")
        assert any("pgmb keys create" in line["message"] for line in told)
        assert {"GET"} == {line["method"] for line in told if line["logger"] == "pgmb.access"}
        assert "/metrics" in {line["route"] for line in told if line["logger"] == "pgmb.access"}


def test_http_alone_ends_when_interrupted_with_a_connection_open(dsn: str) -> None:
    with (
        serving(dsn, "http", "--metrics-public", "--no-access-log") as served,
        httpx.Client(base_url=served.url, timeout=30) as client,
    ):
        process = served.process
        assert client.get("/metrics").status_code == 200
        assert client.get("/nothing").status_code == 404
        process.send_signal(signal.SIGINT)
        log = served.ended()
        assert process.returncode == 0, log
        assert "Traceback" not in log
        assert "GET" not in log


def test_a_port_that_is_taken_is_one_line_and_a_hint(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = run("serve", "--services", "http", "--port", str(taken.getsockname()[1]))
    assert (outcome.code, outcome.out) == (1, "")
    assert "cannot listen on 127.0.0.1 port" in outcome.err
    assert "--port" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_certificate_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    odd = tmp_path / "odd.pem"
    odd.write_text("not a certificate")
    for name in (str(odd), str(tmp_path / "missing.pem")):
        outcome = run("http", "--port", "0", "--ssl-certfile", name)
        assert (outcome.code, f"cannot use {name}" in " ".join(outcome.err.split())) == (1, True)
        assert "Traceback" not in outcome.err


def test_without_the_extra_http_is_left_out_unless_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert sorted(set(SERVICES) - set(parts.installed())) == ["http"]
    outcome = run("serve", "--services", "ticker,http")
    assert outcome.code == 1
    assert "the service http needs starlette, uvicorn" in outcome.err
    assert "pgmb[server]" in outcome.err
