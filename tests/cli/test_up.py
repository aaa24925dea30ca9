"""`pgmb up` runs handlers, webhooks, HTTP and the upkeep under one supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pgmb
from harness.serving import Served, serving
from harness.waiting import until_true

pytestmark = pytest.mark.once(15)

APP = """
import pgmb

app = pgmb.App({dsn!r})

@app.on("greet", queue="greetings")
def greet(name: str) -> None: ...
"""


def _metrics(served: Served) -> dict[tuple[str, str], float]:
    """Values by metric and process or outcome."""
    try:
        text = httpx.get(f"{served.url}/metrics", timeout=10).text
    except httpx.TransportError:
        return {}
    return {
        (sample.name, sample.labels.get("process", sample.labels.get("outcome", ""))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("pgmb_process_", "pgmb_handler_events"))
    }


def test_one_command_runs_everything(empty_dsn: str, tmp_path: Path) -> None:
    (tmp_path / "greeter.py").write_text(APP.format(dsn=empty_dsn))
    # The services connect to the app's database, whatever the environment says.
    environment = {"PYTHONPATH": str(tmp_path)}
    arguments = ("up", "greeter:app", "--processes", "2", "--install", "--metrics-public")
    with serving("postgresql://127.0.0.1:1/nowhere", *arguments, environment=environment) as served:
        names = {"worker 1", "worker 2", "http", "dispatcher", "upkeep"}
        until_true(lambda: {name for _, name in _metrics(served)} >= names)
        until_true(lambda: httpx.get(f"{served.url}/livez", timeout=5).text == "ok\n")
        with pgmb.connect(empty_dsn) as broker:
            broker.publish_many("greet", ["world"] * 7)
        until_true(lambda: _metrics(served).get(("pgmb_handler_events_total", "done")) == 7)
        assert "There is no API key yet" in "".join(served.said)
        (worker,) = [
            process
            for process in served.processes
            if "work" in process.cmdline() and process.environ().get("PGMB_WORKER") == "2"
        ]
        worker.kill()
        until_true(lambda: _metrics(served).get(("pgmb_process_restarts_total", "worker 2")) == 1)
        until_true(lambda: httpx.get(f"{served.url}/livez", timeout=5).text == "ok\n")
        told = _metrics(served)
        assert told["pgmb_handler_events_total", "done"] == 7
        assert all(told["pgmb_process_restarts_total", name] == 0 for name in names - {"worker 2"})
        assert all(told["pgmb_process_resident_memory_bytes", name] > 1 << 20 for name in names)
        below = served.processes
        served.process.send_signal(signal.SIGTERM)
        log = served.ended()
    assert served.process.returncode == 0, log
    assert not any(map(psutil.Process.is_running, below[1:]))


def test_a_mistake_in_the_app_is_told_once(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_that_exists\n")
    done = subprocess.run(
        [sys.executable, "-m", "pgmb", "up", "broken:app", "--port", "0"],
        env={**os.environ, "PGMB_DSN": dsn},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("nothing_that_exists") == 1
    assert "HTTP at" not in done.stdout
