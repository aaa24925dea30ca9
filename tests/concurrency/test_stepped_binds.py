"""Promise: what is published after a bind goes by the new patterns, whenever a receive began."""

from __future__ import annotations

from typing import Any

import pytest

from harness.sessions import Sessions
from harness.waiting import until_true


@pytest.mark.parametrize(
    "settings", ["", ", ordered => true, shards => 1", ", max_in_flight => 1000", ", fair_by => 'key'"]
)
def test_a_receive_that_waited_takes_what_was_published_after_a_bind(
    sessions: Sessions, settings: str
) -> None:
    holder, waiting, admin = sessions.open("holder", "waiting", "admin")
    admin.run(f"select pgmb.create_queue('q', '{{old}}'{settings})")
    admin.run("select pgmb.publish('old', '0')")
    holder.run("begin")
    assert holder.run("select payload from pgmb.receive('q')") == [(0,)]
    received = waiting.start("select payload from pgmb.receive('q', 500)").blocked()
    admin.run("select pgmb.bind('q', '{old,new}')")
    # More than a receive that finds nothing passes without a note.
    admin.run("select pgmb.publish('new', to_json(number)) from generate_series(1, 200) number")
    holder.run("commit")
    got: list[Any] = list(received.result())

    def complete() -> bool:
        # An ordered queue reads nothing behind a lease of the last tenth of a second.
        got.extend(admin.run("select payload from pgmb.receive('q', 500)"))
        return len(got) >= 200

    until_true(complete, 10)
    assert sorted(payload for (payload,) in got) == list(range(1, 201))
