"""`pgmb work --metrics-port` serves what the handlers do and where the queues stand, on one port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

import pgmb
from harness.waiting import until_true
from tests.app.stage import Workers
from tests.telemetry.test_prometheus import Samples, parsed

pytestmark = pytest.mark.once(15)

SHOP = """
    import os
    import pgmb

    app = pgmb.App(DSN)

    @app.on("order.*", queue="billing", concurrency=1)
    async def charge(order: int) -> None:
        with open("seen.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(port: int) -> Samples:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            return parsed(answer.read().decode())
    except OSError:
        return {}


HANDLED = ("pgmb_handler_events_total", "done", "billing")


@pytest.mark.parametrize("processes", [1, 3])
def test_one_port_serves_all_processes(dsn: str, tmp_path: Path, processes: int) -> None:
    workers, port = Workers(tmp_path, dsn, SHOP), free_port()
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.*"])
        broker.publish_many("order.paid", range(50))
        with workers.running("--metrics-port", str(port), "--processes", str(processes)) as process:
            until_true(lambda: fetch(port).get(HANDLED) == 50)
            until_true(lambda: fetch(port).get(("pgmb_queue_leases", "billing", "main")) == 0)
            samples = fetch(port)
            assert samples["pgmb_up",] == 1
            assert samples["pgmb_handler_duration_seconds_count", "billing"] == 50
            if processes > 1:
                # What a worker had counted stays when it dies and another takes its place.
                victim = psutil.Process(int(workers.lines()[0]))
                os.kill(victim.pid, signal.SIGKILL)
                broker.publish_many("order.paid", range(10))
                until_true(lambda: fetch(port).get(HANDLED) == 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, workers.logged()
    assert fetch(port) == {}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_is_taken_is_said_in_one_line(dsn: str, tmp_path: Path, processes: int) -> None:
    Workers(tmp_path, dsn, SHOP)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pgmb",
                "work",
                "shop:app",
                f"--metrics-port={port}",
                f"--processes={processes}",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert f"cannot serve metrics on port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_it_says_what_to_install(dsn: str, tmp_path: Path) -> None:
    Workers(tmp_path, dsn, SHOP)
    # Found before the installed one, and as good as none.
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError(name='prometheus_client')")
    done = subprocess.run(
        [sys.executable, "-m", "pgmb", "work", "shop:app", "--metrics-port=9100"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "pgmb[prometheus]" in done.stderr
    assert "Traceback" not in done.stderr
