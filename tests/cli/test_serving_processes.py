"""`pgmb serve` runs what strangers, receivers and the log need in processes of their own."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from harness.serving import Served, serving

_PARTS = {"http", "dispatcher", "upkeep"}


def _until(holds: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _parts(served: Served) -> dict[str, int]:
    """The newest process of each part, by the log."""
    return {name: int(pid) for name, pid in re.findall(r"(\w+) runs in process (\d+)", served.log)}


def _lives(served: Served) -> str:
    try:
        return httpx.get(f"{served.url}/livez", timeout=5).text
    except httpx.TransportError as error:
        return repr(error)


def test_a_part_that_is_killed_comes_back_and_the_others_stay(dsn: str) -> None:
    with serving(dsn, "serve") as served:
        _until(lambda: _lives(served) == "ok\n")
        for name in sorted(_PARTS):
            before = _parts(served)
            assert set(before) == _PARTS
            psutil.Process(before[name]).kill()
            _until(lambda name=name, before=before: _parts(served)[name] != before[name])  # type: ignore[misc]
            _until(lambda: _lives(served) == "ok\n")
            assert f"{name} ended (SIGKILL); restarting" in served.log
            after = _parts(served)
            assert {part: pid for part, pid in after.items() if part != name} == {
                part: pid for part, pid in before.items() if part != name
            }
        served.process.send_signal(signal.SIGTERM)
        log = served.ended()
    assert served.process.returncode == 0, log
    assert not any(map(psutil.pid_exists, _parts(served).values()))


def test_a_part_that_hangs_is_named(dsn: str) -> None:
    with serving(dsn, "serve") as served:
        _until(lambda: _lives(served) == "ok\n")
        upkeep = psutil.Process(_parts(served)["upkeep"])
        upkeep.suspend()
        _until(lambda: _lives(served) == "no progress: upkeep\n")
        ready = httpx.get(f"{served.url}/readyz", timeout=5).json()
        assert ready["checks"]["services"] == {"ok": False, "detail": "no progress: upkeep"}
        upkeep.resume()
        _until(lambda: _lives(served) == "ok\n")
        assert "restarting" not in served.log


def test_the_parts_end_when_their_supervisor_is_killed(dsn: str) -> None:
    with serving(dsn, "serve") as served:
        _until(lambda: _lives(served) == "ok\n")
        parts = [psutil.Process(pid) for pid in _parts(served).values()]
        served.process.kill()
        _, alive = psutil.wait_procs(parts, timeout=30)
        assert not alive


@pytest.mark.parametrize("arguments", [("--in-one-process",), ("--services", "http")])
def test_one_process_needs_no_supervisor(dsn: str, arguments: tuple[str, ...]) -> None:
    with serving(dsn, "serve", *arguments) as served:
        _until(lambda: _lives(served) == "ok\n")
        assert served.processes == [psutil.Process(served.process.pid)]
        served.process.send_signal(signal.SIGTERM)
        served.ended()
    assert served.process.returncode == 0
