"""An event that the server cannot read does not stop its queue."""

from __future__ import annotations

import psycopg
import pytest

import pgmb
from harness.damage import publish_damaged

pytestmark = pytest.mark.new_database


@pytest.mark.parametrize("options", ["", ", ordered => true"])
def test_an_unreadable_event_becomes_a_dead_letter_after_its_attempts(dsn: str, options: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        db.execute(f"select pgmb.create_queue('q', max_attempts => 3{options})")
        publish_damaged(db, key="k")
        db.execute("select pgmb.publish('whole', '1', key => 'k')")
        with pytest.raises(psycopg.errors.InternalError, match="chunk number"):
            broker.receive("q", 1)
        assert broker.bury_unreadable("q", "missing chunk", 2) is None
        assert broker.bury_unreadable("q", "missing chunk", 3) == 1
        (lease,) = broker.receive("q", 10)
        assert lease.topic == "whole"
        (dead,) = broker.dead_letters("q")
        assert (dead.event.seq, dead.event.topic, dead.event.key) == (1, "damaged", "k")
        assert dead.event.payload["pgmb_unreadable"] == "missing chunk"
        assert dead.error == "cannot be read: missing chunk"


def test_a_readable_event_is_given_back(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", max_attempts=1)
        broker.publish("a", 1)
        assert broker.bury_unreadable("q", "wrong", 1) is None
        (event,) = broker.receive("q")
        assert (event.payload, event.attempt) == (1, 1)
        assert broker.dead_letters("q") == []
