"""Records terminal sessions into docs/howto/command-line.md, by running the commands under a demo load.

A recording stands between `<!-- recorded: COMMAND -->` and `<!-- end -->`; everything between is replaced.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

import pgmb
from harness.postgres import Server
from harness.terminal import Terminal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "command-line.md"
RECORDING = re.compile(r"(<!-- recorded: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = 108
_FRAMES = 6


def main() -> int:
    with Server.start(18, name="demo", memory=True) as server, _load(server.dsn()):
        time.sleep(12)
        text = PAGE.read_text()
        PAGE.write_text(
            RECORDING.sub(lambda found: found[1] + _block(found[2], server.dsn()) + found[3], text)
        )
    return 0


def _block(command: str, dsn: str) -> str:
    env = {**os.environ, "PGMB_DSN": dsn, "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "pgmb", *command.split()[1:]]
    with Terminal(arguments, env=env, columns=COLUMNS, rows=60) as shown:
        if " top" in command:
            shown.wait_for(lambda: len(shown.frames) > _FRAMES)
            text = shown.frames[-1]
            shown.send("q")
            shown.finish()
        else:
            shown.finish()
            text = shown.text
    return f"```text\n$ {command}\n{text.strip()}\n```\n"


@contextmanager
def _load(dsn: str) -> Iterator[None]:
    """A shop at work: publisher, consumers, a paused queue, some dead letters, a forgotten transaction."""
    pgmb.schema.install(dsn)
    with pgmb.connect(dsn) as broker:
        broker.create_stream("audit", keep_for=30 * 86400)
        broker.create_queue("billing", ["order.*", "refund.#"], max_attempts=1)
        broker.create_queue("mail", ["order.paid", "user.#"])
        broker.create_queue("search")
        broker.pause("search", "reindexing")
        stop = threading.Event()
        jobs: list[Callable[[], None]] = [
            lambda: _publish(broker, stop),
            lambda: _consume(broker, stop, "billing", 0.002),
            lambda: _consume(broker, stop, "mail", 0.0),
            lambda: _read(broker, stop, "lake"),
        ]
        working = [threading.Thread(target=job) for job in jobs]
        serving = subprocess.Popen(
            [sys.executable, "-m", "pgmb", "serve", "--port", "0"],
            env={**os.environ, "PGMB_DSN": dsn},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with psycopg.connect(dsn, application_name="report") as forgotten:
            forgotten.execute("set transaction isolation level repeatable read")
            forgotten.execute("select count(*) from pg_class")
            for thread in working:
                thread.start()
            try:
                yield
            finally:
                stop.set()
                for thread in working:
                    thread.join()
                serving.terminate()
                serving.wait(30)


def _publish(broker: pgmb.Broker, stop: threading.Event) -> None:
    topics = ("order.created", "order.paid", "order.paid", "refund.asked", "user.created")
    number = 0
    while not stop.wait(0.02):
        number += 1
        topic = random.choice(topics)
        broker.publish_many(topic, [{"order": number, "item": item} for item in range(random.randint(1, 20))])
        if number % 10 == 0:
            broker.publish("login", {"user": number}, stream="audit")


def _consume(broker: pgmb.Broker, stop: threading.Event, queue: str, failing: float) -> None:
    while not stop.is_set():
        lease = broker.receive(queue, 20)
        time.sleep(0.05)
        failed = [event for event in lease if random.random() < failing]
        if failed:
            lease.bury(failed, "card declined")
        lease.ack()


def _read(broker: pgmb.Broker, stop: threading.Event, reader: str) -> None:
    """As a job does that reads a stream and keeps its place."""
    while not stop.is_set():
        broker.confirm("main", reader, broker.position())
        stop.wait(3)


if __name__ == "__main__":
    sys.exit(main())
