"""Promise: the order of tick ids is the order of what the ticks cover, whoever makes them."""

from __future__ import annotations

import itertools

from harness.sessions import Sessions

PUBLISH = "select pgmb.publish('t', to_json(%s::int))"


def test_a_reader_that_goes_from_tick_to_tick_reads_every_event_once(sessions: Sessions) -> None:
    """One ticker looks at the log first and writes its tick last: the other one's tick covers more."""
    slow, fast, publisher = sessions.open("slow", "fast", "publisher")
    publisher.run(PUBLISH, [1])
    publisher.run("select pgmb.tick()")
    publisher.run(PUBLISH, [2])
    fast.run("begin")
    # Writes of others wait; the session's own do not.
    fast.run("lock table pgmb.tick in share mode")
    late = slow.start("select pgmb.tick()").blocked()
    publisher.run(PUBLISH, [3])
    assert fast.value("select pgmb.tick()") is not None
    fast.run("commit")
    assert late.result() != [(None,)]
    publisher.run(PUBLISH, [4])
    assert publisher.value("select pgmb.tick()") is not None

    ticks = [position for (position,) in publisher.run("select position::text from pgmb.tick order by id")]
    assert len(ticks) == 4
    earliest = publisher.value("select pgmb.earliest()::text")
    read = [
        publisher.run("select payload from pgmb.between('main', %s::pgmb.position, %s::pgmb.position)", pair)
        for pair in itertools.pairwise([earliest, *ticks])
    ]
    assert [payload for batch in read for (payload,) in batch] == [1, 2, 3, 4]
