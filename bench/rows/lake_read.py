"""lake-read: the Python client reads history from the lake, beside the same events from the log."""

from __future__ import annotations

import contextlib
import tempfile
import time

from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave

EVENTS = {"tiny": 2_000, "brief": 100_000, "quick": 300_000, "full": 2_000_000}
ROUNDS = {"tiny": 1, "brief": 3, "quick": 4, "full": 4}
SEGMENTS = 4
STREAMS = {"log": "main", "lake": "archived"}
CHECKS = ["client: lake vs log, by CPU", "client: memory of Arrow"]
_BY_CPU = "events per second of CPU, client and server"


def run(ground: Ground, form: Form) -> Outcome:
    import pyarrow

    events = EVENTS[form.name]
    outcome = Outcome(
        "lake-read",
        f"{events:,} events of 200 bytes in {SEGMENTS} segments, read by one tail of the Python client",
    )
    with contextlib.closing(ground.site("pgmb, new log")) as site, tempfile.TemporaryDirectory() as folder:
        _fill(site, events, f"{folder}/lake")

        def measure(name: str) -> Reading:
            return _measure(site, name, events)

        for name in STREAMS:
            measure(name)  # warms up
        before = pyarrow.total_allocated_bytes()
        outcome.readings = interleave(tuple(STREAMS), ROUNDS[form.name], measure)
    lake = outcome.of("lake")
    held = max(reading.extra["held"] for reading in lake) - before
    spent = sum(one.client_cpu + one.server_cpu for one in lake) / sum(one.messages for one in lake)
    outcome.checks = [
        outcome.compare(CHECKS[0], "lake", "log", 1.0, _BY_CPU),
        # One batch of each file that overlaps, whatever the size of the history.
        Check(CHECKS[1], max(held, 1 << 16) / (1 << 20), 128, at_least=False, unit=" MB"),
    ]
    outcome.notes = [
        f"by the clock: {outcome.ratio('lake', 'log', 'per_second'):.2f}x",
        f"CPU seconds per million events from the lake, client and server: {spent * 1e6:.1f}",
    ]
    return outcome


def _fill(site: Site, events: int, place: str) -> None:
    """The same number of events in both streams; those of one are in the lake only."""
    from bench.spark.events import publish
    from harness.lake import Here
    from harness.segments import seal
    from pgmb.lake.archive import Archiver, init

    per_segment = events // SEGMENTS
    site.connection.execute("select pgmb.create_stream('archived', keep_for => '0 s')")
    for stream in STREAMS.values():
        for number in range(SEGMENTS):
            publish(site.connection, stream, number * per_segment + 1, (number + 1) * per_segment)
            seal(site.connection, stream)
    init(site.dsn, "archived", place)
    archived = sum(one.events for one in Archiver(site.dsn, "archived", Here()).archive())
    dropped = site.connection.execute("select pgmb.drop_segments('archived')").fetchone()
    if (archived, dropped) != (events, (SEGMENTS,)):
        raise AssertionError(f"{archived} of {events} events were archived, {dropped} segments dropped")
    site.connection.execute("vacuum (freeze, analyze) pgmb.log_main")
    site.connection.execute("checkpoint")


def _measure(site: Site, name: str, events: int) -> Reading:
    import pyarrow

    from pgmb import connect

    stream, held, found = STREAMS[name], 0, 0
    with connect(site.dsn, max_size=1) as broker:
        earliest = broker.earliest(stream)
        ours, theirs = cpu.of_process(cpu.MYSELF), cpu.of_server(site.server.postmaster_pid)
        started = time.perf_counter()
        with broker.tail(stream=stream, after=earliest, follow=False) as tail:
            while page := tail.read():
                found += len(page)
                held = max(held, pyarrow.total_allocated_bytes())
            while not tail.caught_up:
                found += len(tail.read())
        wall = time.perf_counter() - started
        ours = cpu.of_process(cpu.MYSELF) - ours
        theirs = cpu.of_server(site.server.postmaster_pid) - theirs
    if found != events:
        raise AssertionError(f"{found} of {events} events were read from the {name}")
    return Reading(name, events, wall, theirs, ours, {"held": float(held), _BY_CPU: events / (ours + theirs)})
