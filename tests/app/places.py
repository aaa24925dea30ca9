"""Programs that use pgmb where Python runs: event loops, threads, children of all kinds, servers, shells.

    python -m tests.app.places DSN DIRECTORY

Each writes its observations to a file of the directory, a JSON list each: column and outcome. What it leaves
pending in publishers has the topic PLACE.COLUMN.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pgmb

BROKER, ABROKER, APP = "`connect`", "`aconnect`", "`App`"
PUBLISHER, APUBLISHER = "`Publisher`", "`AsyncPublisher`"

place = dsn = ""
directory = Path()
_left: list[object] = []


class Before:
    """What a program made before it came to the place, and used there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.broker = pgmb.connect(dsn)
        self.abroker = self.loop.run_until_complete(pgmb.aconnect(dsn))
        self.app = pgmb.App(dsn)
        self.broker.publish("before", 1)
        self.loop.run_until_complete(self.abroker.publish("before", 2))
        self.loop.run_until_complete(self.app.apublish("before", 3))
        self.app.publish("before", 4)


def observe(column: str, outcome: str) -> None:
    with (directory / place).open("a") as file:
        file.write(json.dumps([column, outcome]) + "\n")


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except pgmb.PgmbError as error:
        return "error" if error.hint else f"an error without a hint: {error}"
    return "works"


async def aoutcome_of(call: Coroutine[Any, Any, Any]) -> str:
    try:
        async with asyncio.timeout(20):
            await call
    except pgmb.PgmbError as error:
        return "error" if error.hint else f"an error without a hint: {error}"
    return "works"


def leave_pending() -> None:
    publisher = pgmb.connect(dsn).publisher(flush_every=3600)
    _left.append(publisher)
    for number in range(3):
        publisher.enqueue(f"{place}.{PUBLISHER.strip('`')}", number)


async def aleave_pending() -> None:
    publisher = (await pgmb.aconnect(dsn)).publisher(flush_every=3600)
    _left.append(publisher)
    for number in range(3):
        await publisher.enqueue(f"{place}.{APUBLISHER.strip('`')}", number)


def visit(before: Before) -> None:
    """In a place without an event loop."""
    observe(BROKER, outcome_of(lambda: before.broker.publish("there", 1)))
    observe(ABROKER, asyncio.run(aoutcome_of(before.abroker.publish("there", 2))))
    observe(
        APP,
        outcome_of(lambda: (before.app.publish("there", 3), asyncio.run(before.app.apublish("there", 4)))),
    )
    leave_pending()
    asyncio.run(aleave_pending())


async def avisit(before: Before) -> None:
    """In an event loop."""
    observe(BROKER, outcome_of(lambda: before.broker.publish("there", 1)))
    observe(ABROKER, await aoutcome_of(before.abroker.publish("there", 2)))
    observe(APP, await aoutcome_of(before.app.apublish("there", 3)))
    leave_pending()
    await aleave_pending()


def visit_anew(at: str, server: str, folder: Path) -> None:
    """In a process that imports the program's modules again: whatever they make is its own."""
    settle_in(at, server, folder)
    before = Before()
    observe(BROKER, outcome_of(lambda: before.broker.publish("there", 1)))
    observe(ABROKER, before.loop.run_until_complete(aoutcome_of(before.abroker.publish("there", 2))))
    observe(APP, outcome_of(lambda: before.app.publish("there", 3)))
    leave_pending()
    asyncio.run(aleave_pending())


def settle_in(at: str, server: str, folder: Path) -> None:
    global place, dsn, directory
    place, dsn, directory = at, server, folder


# -- event loops and threads


def runs() -> None:
    before = Before()
    for _ in range(2):
        asyncio.run(avisit(before))


def threads() -> None:
    before = Before()
    visitors = [threading.Thread(target=lambda: asyncio.run(avisit(before))) for _ in range(2)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()


def async_to_sync() -> None:
    before = Before()
    call: Any = importlib.import_module("asgiref.sync").async_to_sync(avisit)
    call(before)
    call(before)


# -- children


def fork() -> None:
    before = Before()
    child = os.fork()
    if child == 0:
        visit(before)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before.broker.publish("after", 1)


def process(module: Any, method: str, target: Callable[..., None], arguments: Iterable[object]) -> None:
    child = module.get_context(method).Process(target=target, args=tuple(arguments))
    child.start()
    child.join()
    assert child.exitcode == 0


def mp_fork() -> None:
    before = Before()
    process(multiprocessing, "fork", visit, [before])
    before.broker.publish("after", 1)


def mp_spawn() -> None:
    process(multiprocessing, "spawn", visit_anew, [place, dsn, directory])


def mp_forkserver() -> None:
    process(multiprocessing, "forkserver", visit_anew, [place, dsn, directory])


def celery() -> None:
    """Celery's prefork makes its children with this package."""
    before = Before()
    process(importlib.import_module("billiard"), "fork", visit, [before])
    before.broker.publish("after", 1)


# -- servers, shells, tests


def gunicorn() -> None:
    address = directory / "gunicorn.socket"
    settings = {"preload_app": True, "workers": 1, "loglevel": "warning", "bind": f"unix:{address}"}
    base: Any = importlib.import_module("gunicorn.app.base").BaseApplication

    def configure(self: Any) -> None:
        for name, value in settings.items():
            self.cfg.set(name, value)

    def request() -> None:
        _get(address)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=request).start()
    type("Application", (base,), {"load_config": configure, "load": lambda _: preloaded()})().run()


def _get(address: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert "visited" in client.makefile().read()
            return
        time.sleep(0.1)


def preloaded() -> Any:
    before = Before()

    def serve(_: object, start: Any) -> list[bytes]:
        visit(before)
        start("200 OK", [])
        return [b"visited"]

    return serve


def ipython() -> None:
    shell: Any = importlib.import_module("IPython.core.interactiveshell").InteractiveShell.instance()
    cells = f"""
import pgmb, tests.app.places as places
places.settle_in({place!r}, {dsn!r}, __import__("pathlib").Path({str(directory)!r}))
broker, abroker, app = pgmb.connect(places.dsn), await pgmb.aconnect(places.dsn), pgmb.App(places.dsn)
places.observe(places.BROKER, places.outcome_of(lambda: broker.publish("there", 1)))
places.observe(places.ABROKER, await places.aoutcome_of(abroker.publish("there", 2)))
places.observe(places.APP, await places.aoutcome_of(app.apublish("there", 3)))
places.leave_pending()
await places.aleave_pending()
"""
    for cell in cells.strip().splitlines():
        shell.run_cell(cell).raise_error()


def xdist() -> None:
    test = directory / "test_visit.py"
    test.write_text(
        "import pathlib, tests.app.places as places\n"
        f"def test_visit(): places.visit_anew({place!r}, {dsn!r}, pathlib.Path({str(directory)!r}))\n"
    )
    # Every plugin that is installed takes half a second to import, in two processes.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = [
        "-q",
        "-n1",
        "-p",
        "xdist",
        "-p",
        "no:cacheprovider",
        f"--rootdir={directory}",
        "--noconftest",
        "-c",
        os.devnull,
    ]
    assert importlib.import_module("pytest").main([*options, str(test)]) == 0


# -- ends of a process


def _opened() -> list[object]:
    name = f"{dsn} application_name={place}"
    return [pgmb.connect(name), pgmb.App(name)]


async def _stay(end: Callable[[], None]) -> None:
    _left.extend(_opened())
    leave_pending()
    await aleave_pending()
    end()
    await asyncio.sleep(20)


def end_by_return() -> None:
    _left.extend(_opened())
    leave_pending()
    asyncio.run(aleave_pending())


def end_by_exception() -> None:
    def fail() -> None:
        raise SystemExit(1)

    asyncio.run(_stay(fail))


def end_by_sigterm() -> None:
    asyncio.run(_stay(lambda: os.kill(os.getpid(), signal.SIGTERM)))


def end_by_own_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asyncio.run(_stay(lambda: os.kill(os.getpid(), signal.SIGTERM)))


def end_of_terminated_child() -> None:
    child = multiprocessing.get_context("fork").Process(target=end_by_sigterm)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode


def end_by_os_exit() -> None:
    asyncio.run(_stay(lambda: os._exit(1)))


PLACES: dict[str, Callable[[], None]] = {
    "`asyncio.run`, again and again": runs,
    "Threads, each with an event loop": threads,
    "asgiref's `async_to_sync` (Django, Flask)": async_to_sync,
    "Child of `os.fork`": fork,
    "`multiprocessing`, fork": mp_fork,
    "`multiprocessing`, spawn": mp_spawn,
    "`multiprocessing`, forkserver": mp_forkserver,
    "gunicorn `--preload`": gunicorn,
    "Celery, prefork (billiard)": celery,
    "IPython": ipython,
    "pytest-xdist": xdist,
}
ENDS: dict[str, Callable[[], None]] = {
    "Return, `sys.exit`": end_by_return,
    "Exception": end_by_exception,
    "SIGTERM": end_by_sigterm,
    "SIGTERM, handled by the program": end_by_own_handler,
    "`Process.terminate()` of multiprocessing": end_of_terminated_child,
    "`os._exit`, SIGKILL": end_by_os_exit,
}

AT_ONCE = 3


def visit_all() -> None:
    """Each place in a fork of this process, which spends most of a place's time on imports once."""
    running: dict[int, str] = {}
    for program in (*PLACES.values(), *ENDS.values()):
        while len(running) >= AT_ONCE:
            del running[os.wait()[0]]
        child = os.fork()
        if child == 0:
            settle_in(program.__name__, sys.argv[1], Path(sys.argv[2]))
            output = os.open(directory / f"{place}.output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            program()
            sys.exit()
        running[child] = program.__name__
    while running:
        del running[os.wait()[0]]


if __name__ == "__main__":
    visit_all()
