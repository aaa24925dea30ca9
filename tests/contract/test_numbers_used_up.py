"""Numbers of leases and queues that are used up: an error that says so, and a warning long before."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.states import (
    drain,
    hold_leases,
    publish,
    queue_number,
    receive,
    use_up_lease_numbers,
    use_up_queue_numbers,
)
from pgmb import doctor
from tests.conftest import Connect

pytestmark = pytest.mark.new_database

Connection = psycopg.Connection[Any]


@pytest.mark.parametrize("options", ["", ", max_in_flight => 10"], ids=["plain", "limited"])
def test_a_queue_without_lease_numbers_refuses_to_be_received_from(
    db: Connection, connect: Connect, options: str
) -> None:
    db.execute(f"select pgmb.create_queue('q'{options})")
    publish(db, 10)
    use_up_lease_numbers(db, left=2)
    hold_leases(db, 2)
    beside = connect(autocommit=False)
    for consumer in (db, beside):
        consumer.execute("set statement_timeout = '20 s'")
        with pytest.raises(psycopg.errors.CheckViolation, match="lease numbers are used up"):
            receive(consumer)


def test_doctor_warns_long_before_lease_numbers_are_used_up(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")

    def warnings() -> list[str]:
        return [one.message for one in doctor.examine(db) if one.problem and one.check == "lease numbers"]

    assert warnings() == []
    use_up_lease_numbers(db, left=400_000_000_000)
    (warning,) = warnings()
    assert "queue q has used 64% of its lease numbers" in warning


def test_numbers_of_dropped_queues_are_given_again(db: Connection) -> None:
    db.execute("select pgmb.create_queue('kept'), pgmb.create_queue('dropped')")
    kept, dropped = queue_number(db, "kept"), queue_number(db, "dropped")
    db.execute("select pgmb.drop_queue('dropped')")
    use_up_queue_numbers(db)
    db.execute("select pgmb.create_queue('q')")
    publish(db, 3)
    assert drain(db) == 1
    assert (queue_number(db, "kept"), queue_number(db, "q")) == (kept, dropped)
