"""`pgmb work` with real processes: what kills one spares the rest, and a signal ends it in good order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

import pgmb
from harness.waiting import until_true
from pgmb.app import loading
from tests.app.stage import Workers

APP = """
    import asyncio, os, time
    import pgmb

    app = pgmb.App(DSN, grace=20)
    app.queue("q", lease_for=1, max_attempts=3, backoff_base=0.05, backoff_factor=1)

    def note(line, name="seen.txt"):
        with open(name, "a") as file:
            file.write(f"{line}\\n")

    @app.on("a", queue="q", concurrency=4, timeout=0.5, retry=0.05)
    async def handle(event: pgmb.Delivery[dict]) -> None:
        kind, number = event.payload["kind"], event.payload["number"]
        note(f"{kind} {number} {event.attempt}", "tried.txt")
        if kind == "exit":
            os._exit(7)
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "slow":
            await asyncio.sleep(event.payload["seconds"])
        note(number)

    @app.on("typed", queue="q")
    async def typed(number: int) -> None: ...
"""


@pytest.fixture
def workers(tmp_path: Path, dsn: str, db: psycopg.Connection[Any]) -> Workers:
    db.execute(
        "select pgmb.create_queue('q', '{a,typed}', lease_for => '1s', max_attempts => 3,"
        " backoff_base => '50ms', backoff_factor => 1)"
    )
    return Workers(tmp_path, dsn, APP)


def test_a_worker_removes_patterns_that_nobody_declares_if_told_to(
    workers: Workers, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.bind('q', '{a,typed,old}')")
    with workers.running("--prune"):
        until_true(lambda: "working on q" in workers.logged(), 90)
    assert "queue q: removing old: no live worker declares it" in workers.logged()
    assert db.execute("select patterns from pgmb.queue_status").fetchone() == (["a", "typed"],)


def test_poison_a_hang_and_an_exit_spare_the_rest(workers: Workers, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        events = [pgmb.NewEvent("a", {"kind": "fine", "number": number}) for number in range(60)]
        events[10] = pgmb.NewEvent("a", {"kind": "exit", "number": -1})
        events[20] = pgmb.NewEvent("a", {"kind": "hang", "number": -2})
        events[30] = pgmb.NewEvent("typed", "not a number")
        broker.publish_many(events)
        with workers.running("--processes", "2"):
            until_true(lambda: len(broker.dead_letters("q")) == 3, 90)
            until_true(lambda: len(set(workers.lines())) == 57, 90)
            # The others still work on.
            broker.publish("a", {"kind": "fine", "number": 1000})
            until_true(lambda: "1000" in workers.lines(), 90)
        letters = {str(letter.event.payload): letter for letter in broker.dead_letters("q")}
    assert len(letters) == 3
    poison = letters["not a number"]
    assert (poison.attempt, poison.error) == (1, "payload does not fit int: Expected `int`, got `str`")
    hung = letters[str({"kind": "hang", "number": -2})]
    # Where a neighbour's exit ended one of its attempts, that is told instead.
    assert hung.attempt == 3
    exited = letters[str({"kind": "exit", "number": -1})]
    assert exited.attempt == 3
    assert exited.error is not None
    assert exited.error.startswith("lease expired")
    assert sorted(line for line in workers.lines("tried.txt") if line.startswith("exit")) == [
        f"exit -1 {attempt}" for attempt in (1, 2, 3)
    ]
    assert workers.logged().count("exit code 7") == 3


def test_sigterm_finishes_what_runs_and_hands_back_the_rest(workers: Workers, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.alter_queue("q", lease_for=60)
        workers.folder.joinpath("shop.py").write_text(
            workers.folder.joinpath("shop.py")
            .read_text()
            .replace("lease_for=1", "lease_for=60")
            .replace("0.5", "60")
        )
        broker.publish_many("a", [{"kind": "slow", "seconds": 1.0, "number": number} for number in range(12)])
        with workers.running() as process:
            until_true(lambda: len(workers.lines("tried.txt")) == 4)
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
        begun = workers.lines("tried.txt")
        assert len(begun) < 12
        assert len(workers.lines()) == len(begun)
        # At once, not when a lease of a minute has expired, and as if never tried.
        left = [event for _ in range(3) for event in broker.receive("q")]
    assert {event.attempt for event in left} == {1}
    assert len(left) == 12 - len(begun)


def test_a_second_signal_ends_it_at_once(workers: Workers, dsn: str) -> None:
    workers.folder.joinpath("shop.py").write_text(
        workers.folder.joinpath("shop.py").read_text().replace("timeout=0.5", "timeout=500")
    )
    with pgmb.connect(dsn) as broker:
        broker.publish("a", {"kind": "hang", "number": 1})
        with workers.running() as process:
            until_true(lambda: workers.lines("tried.txt"))
            process.send_signal(signal.SIGINT)
            until_true(lambda: "SIGINT: waiting for running handlers" in workers.logged())
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_signals_all_processes_of_a_unit_lets_handlers_finish(
    workers: Workers, dsn: str, number: signal.Signals
) -> None:
    workers.folder.joinpath("shop.py").write_text(
        workers.folder.joinpath("shop.py").read_text().replace("timeout=0.5", "timeout=500")
    )
    with pgmb.connect(dsn) as broker, workers.running(services=True) as parent:
        broker.alter_queue("q", lease_for=60)
        broker.publish_many("a", [{"kind": "slow", "seconds": 2.0, "number": number} for number in range(3)])
        until_true(lambda: len(workers.lines("tried.txt")) == 3)
        for process in [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]:
            process.send_signal(number)
        assert parent.wait(40) == 0
        assert sorted(workers.lines()) == ["0", "1", "2"]
        (status,) = broker.queue_status()
        assert (status.leases, status.retries, broker.queue_depth("q")) == (0, 0, 0)


def test_sigterm_that_a_launcher_repeats_lets_handlers_finish(workers: Workers, dsn: str) -> None:
    workers.folder.joinpath("shop.py").write_text(
        workers.folder.joinpath("shop.py").read_text().replace("timeout=0.5", "timeout=500")
    )
    with pgmb.connect(dsn) as broker, workers.running() as process:
        broker.publish("a", {"kind": "slow", "seconds": 1.0, "number": 1})
        until_true(lambda: workers.lines("tried.txt"))
        process.send_signal(signal.SIGTERM)
        until_true(lambda: "SIGTERM: waiting for running handlers" in workers.logged())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert workers.lines() == ["1"]


def test_ctrl_c_twice_ends_all_processes_at_once(workers: Workers, dsn: str) -> None:
    workers.folder.joinpath("shop.py").write_text(
        workers.folder.joinpath("shop.py").read_text().replace("timeout=0.5", "timeout=500")
    )
    with pgmb.connect(dsn) as broker:
        broker.publish("a", {"kind": "hang", "number": 1})
        with workers.running("--processes", "2", services=True) as parent:
            until_true(lambda: workers.lines("tried.txt"))
            until_true(lambda: len(psutil.Process(parent.pid).children()) == 3)
            children = psutil.Process(parent.pid).children()
            os.killpg(parent.pid, signal.SIGINT)
            until_true(lambda: "waiting for running handlers" in workers.logged())
            os.killpg(parent.pid, signal.SIGINT)
            assert parent.wait(10) == 128 + signal.SIGINT
            assert not any(child.is_running() and child.status() != "zombie" for child in children)


def test_a_parent_passes_signals_on_and_restarts_who_dies(workers: Workers, dsn: str) -> None:
    with pgmb.connect(dsn) as broker, workers.running("--processes", "2") as parent:
        until_true(lambda: workers.logged().count("working on q") == 2)
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        children[0].kill()
        until_true(lambda: workers.logged().count("working on q") == 3)
        assert "ended (SIGKILL); restarting in" in workers.logged()
        broker.publish("a", {"kind": "fine", "number": 5})
        until_true(lambda: workers.lines() == ["5"])
        family = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(40) == 0
        assert not any(child.is_running() and child.status() != "zombie" for child in family)


def test_children_end_when_their_parent_is_killed(workers: Workers) -> None:
    with workers.running("--processes", "2") as parent:
        until_true(lambda: workers.logged().count("working on q") == 2)
        children = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=40)
        for child in alive:
            child.kill()
        assert not alive
        assert "the parent is gone" in workers.logged()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nowhere:app", r"there is no module 'nowhere'"),
        ("shop:nothing", r"module shop has no nothing.*It has shop:app"),
        ("shop:note", r"is a function, not a pgmb.App"),
        ("shop.py:app", r"is a file, not a module.*Say shop:app"),
        ("./shop.py", r"is a file, not a module.*Say shop:app"),
        ("broken:app", r"No module named 'not_installed'"),
        ("..:app", r"not a module"),
        ("", r"not a module"),
    ],
)
def test_a_wrong_path_says_what_is_wrong(
    target: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shop_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("import pgmb\napp = pgmb.App()\ndef note(): ...\n")
    (tmp_path / "broken.py").write_text("import not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((pgmb.InvalidArgument, ModuleNotFoundError)) as raised:
        loading.load(target.replace("shop", name))
    hint = getattr(raised.value, "hint", None)
    assert re.search(told, f"{raised.value} {hint}".replace(name, "shop"))


def test_an_app_is_found_by_its_name_or_as_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"shop_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("import pgmb\napp = pgmb.App()\nclass a: b = pgmb.App('x')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert loading.load(name) is loading.load(f"{name}:app")
    assert loading.load(f"{name}:a.b").dsn == "x"


def test_several_processes_give_up_on_a_wrong_path(workers: Workers) -> None:
    with workers.running("--processes", "3", target="nowhere:app") as parent:
        assert parent.wait(60) == 2
    assert "there is no module 'nowhere'" in workers.logged()


def test_a_queue_that_the_app_has_not_is_refused(workers: Workers) -> None:
    with workers.running("--queue", "other") as process:
        assert process.wait(60) == 2
    assert "the app has no handler of queue 'other'" in workers.logged()


def test_options_choose_queue_concurrency_and_database(workers: Workers, dsn: str) -> None:
    shop = workers.folder / "shop.py"
    shop.write_text(shop.read_text().replace(repr(dsn), "'host=nowhere.invalid'"))
    with pgmb.connect(dsn) as broker:
        broker.publish("a", {"kind": "fine", "number": 5})
        options = ["--dsn", dsn, "--queue", "q", "--concurrency", "1", "--processes", "2", "--grace", "1"]
        with workers.running(*options) as parent:
            until_true(lambda: workers.lines() == ["5"])
            commands = [" ".join(child.cmdline()) for child in psutil.Process(parent.pid).children()]
            assert not any(dsn in command for command in commands)
            assert all("--concurrency=1" in command for command in commands)


def test_a_process_leaves_nothing_on_stderr_when_it_only_published(dsn: str, tmp_path: Path) -> None:
    script = f"import pgmb\napp = pgmb.App({dsn!r})\napp.publish('a', 1)\nprint('done')\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONDEVMODE": ""},
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_process_that_worked_is_restarted_whatever_its_exit_code(workers: Workers, dsn: str) -> None:
    source = workers.folder / "shop.py"
    right = source.read_text()
    source.write_text(right.replace("os._exit(7)", "os._exit(2)"))
    with pgmb.connect(dsn) as broker, workers.running("--processes", "2") as process:
        until_true(lambda: workers.logged().count("working on q") == 2, 90)
        # A file that is half deployed when the process starts again.
        source.write_text("import not_there_yet\n")
        broker.publish("a", {"kind": "exit", "number": 1})
        until_true(lambda: workers.logged().count("ended (exit code 2); restarting") >= 2, 90)
        assert process.poll() is None
        source.write_text(right)
        broker.publish("a", {"kind": "fine", "number": 2})
        until_true(lambda: "2" in workers.lines(), 90)
