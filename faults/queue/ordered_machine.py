"""A state machine that does to an ordered queue what can be done to it. The model judges what comes of it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any, ClassVar

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faults.queue.model import Delivered, Lost, Wrong
from faults.queue.ordered_model import OrderedModel
from harness.states import age_waiting, holds_retries

PATIENCE = 0.11
"""Until leases are no longer young, and expiries are looked at again."""

keys = st.lists(st.sampled_from(("a", "a", "b", "c", "", None)), min_size=1, max_size=6)
pick = st.integers(0, 6)
"""Which of the leases so far, counted from the newest."""
subset = st.none() | st.integers(1, 255)
"""Which events of a lease, by bits; none for all of them."""

_numbers = itertools.count(1)


class OrderedMachine(RuleBasedStateMachine):
    """One ordered queue of a stream of its own."""

    done: ClassVar[Counter[str]]
    _main: ClassVar[psycopg.Connection[Any]]
    _second: ClassVar[psycopg.Connection[Any]]

    @initialize(max_attempts=st.integers(1, 3), shards=st.just(1))
    def begin(self, max_attempts: int, shards: int) -> None:
        number = next(_numbers)
        self.stream, self.queue = f"o{number}", f"oq{number}"
        self.model = OrderedModel(max_attempts)
        self.leases: list[str] = []
        self.seqs: dict[int, int] = {}
        self.name = 0
        self.open: list[int] | None = None
        self.value("select pgmb.create_stream(%s)", self.stream)
        self.value(
            "select pgmb.create_queue(%s, stream => %s, lease_for => '1 hour', max_attempts => %s,"
            " ordered => true, shards => %s)",
            self.queue,
            self.stream,
            max_attempts,
            shards,
        )
        type(self).done["examples"] += 1

    # -- publishing ------------------------------------------------------------------------------------------

    @rule(keys=keys)
    def publish(self, keys: list[str | None]) -> None:
        names = self.fresh(len(keys))
        self.send(self._main, names, keys)
        self.model.publish(names, keys)

    @precondition(lambda self: self.open is None)
    @rule(keys=keys)
    def second_session_publishes(self, keys: list[str | None]) -> None:
        self.open = self.fresh(len(keys))
        self._second.execute("begin")
        self.send(self._second, self.open, keys)
        self.model.publish(self.open, keys, committed=False)

    @precondition(lambda self: self.open is not None)
    @rule(commits=st.booleans())
    def second_session_ends(self, commits: bool) -> None:
        assert self.open is not None
        self._second.execute("commit" if commits else "rollback")
        if commits:
            self.model.commit(self.open)
        else:
            self.model.roll_back(self.open)
        self.open = None

    @rule()
    def hours_pass(self) -> None:
        age_waiting(self._main, "2 hours", self.queue)
        self.model.hours_pass()

    # -- receiving -------------------------------------------------------------------------------------------

    @rule(limit=st.sampled_from((1, 2, 3, 20)))
    def receive(self, limit: int) -> None:
        self.take(limit)

    def take(self, limit: int) -> str | None:
        """One receive, and its lease."""
        time.sleep(PATIENCE)
        rows = [
            Delivered(*row)
            for row in self._main.execute(
                "select lease::text, seq, payload::text::int, topic, attempt from pgmb.receive(%s, %s)",
                [self.queue, limit],
            ).fetchall()
        ]
        type(self).done["receives"] += 1
        type(self).done["deliveries"] += len(rows)
        retried = bool(rows) and holds_retries(self._main, rows[0].lease)
        self.model.receive(rows, limit, retried=retried)
        self.seqs |= {row.name: row.seq for row in rows}
        self.look_at_the_dead()
        if not rows:
            return None
        self.leases.append(rows[0].lease)
        return rows[0].lease

    @rule(
        limit=st.sampled_from((1, 3, 20)),
        how=st.sampled_from(("ack", "ack", "retry", "bury", "release", "lapse")),
        bits=subset,
        later=st.booleans(),
    )
    def receive_and_settle(self, limit: int, how: str, bits: int | None, later: bool) -> None:
        """What most consumers do."""
        if self.take(limit) is None:
            return
        if how == "lapse":
            self.lapse(0)
        else:
            self.settle(0, how, bits, later)

    # -- settling --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(
        which=pick,
        how=st.sampled_from(("ack", "retry", "bury", "release")),
        bits=subset,
        later=st.sampled_from((False, False, True)),
    )
    def settle(self, which: int, how: str, bits: int | None, later: bool) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        names: set[int] | None = None
        if bits is not None:
            held = self.model.leases[lease].names
            names = {name for place, name in enumerate(held) if bits >> place & 1}
            if not names:
                return
        seqs = None if names is None else [self.seqs[name] for name in names]
        after = ", after => %s::interval" if how == "retry" else ""
        parameters = [lease, seqs, *(["1 hour" if later else "0"] if after else [])]
        try:
            settled = self.value(f"select pgmb.{how}(%s, %s::bigint[]{after})", *parameters)
        except psycopg.Error as error:
            self.refused(error, lease)
            return
        type(self).done["settled"] += 1
        try:
            expected = self.model.settle(lease, names, how, later=later)
        except Lost:
            raise Wrong(f"lease {lease} is lost, but was taken") from None
        if settled != expected:
            raise Wrong(f"{how} settled {settled}, the model {expected}")
        self.look_at_the_dead()

    @precondition(lambda self: self.leases)
    @rule(which=pick)
    def lapse(self, which: int) -> None:
        lease = self.leases[-1 - which % len(self.leases)]
        try:
            self.value("select pgmb.extend(%s, '1 microsecond')", lease)
        except psycopg.Error as error:
            self.refused(error, lease)
            return
        try:
            self.model.lapse(lease)
        except Lost:
            raise Wrong(f"lease {lease} is lost, but was extended") from None

    @rule()
    def redrive(self) -> None:
        assert self.value("select pgmb.redrive(%s)", self.queue) == self.model.redrive()

    @rule()
    def rotate(self) -> None:
        self.value("select pgmb.rotate(%s)", self.stream)

    @invariant()
    def counted(self) -> None:
        type(self).done["steps"] += 1

    # -- the end ---------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everything that is not held comes to its end."""
        if not hasattr(self, "model"):
            return
        try:
            if self.open is not None:
                self.second_session_ends(True)
            for place in range(len(self.leases)):
                self.lapse(place)
            self.hours_pass()
            empty = 0
            while empty < 3:
                lease = self.take(20)
                self.hours_pass()
                empty = empty + 1 if lease is None else 0
                if lease is not None:
                    self.settle(0, "ack", None, False)
            left = self.model.unfinished()
            if left:
                raise Wrong(f"never came: {left}")
        finally:
            self._main.rollback()
            self._second.rollback()
            self.value("select pgmb.drop_queue(%s)", self.queue)
            self.value("select pgmb.drop_stream(%s)", self.stream)

    # -- means -----------------------------------------------------------------------------------------------

    def fresh(self, count: int) -> list[int]:
        self.name += count
        return list(range(self.name - count + 1, self.name + 1))

    def value(self, statement: Any, *parameters: Any, **named: Any) -> Any:
        row = self._main.execute(statement, named or parameters).fetchone()
        assert row is not None
        return row[0]

    def send(self, connection: psycopg.Connection[Any], names: list[int], keys: list[str | None]) -> None:
        for name, key in zip(names, keys, strict=True):
            connection.execute(
                "select pgmb.publish('t', %s::text::json, key => %s, stream => %s)",
                [str(name), key, self.stream],
            )

    def refused(self, error: psycopg.Error, lease: str) -> None:
        type(self).done["refused"] += 1
        if error.sqlstate != "MB011":
            raise error
        held = self.model.leases[lease]
        if held.lost or held.closed:
            return
        raise Wrong(f"lease {lease} was refused, but is held")

    def look_at_the_dead(self) -> None:
        found = self._main.execute(
            "select payload::text::int, attempt from pgmb.dead_letters(%s, max => 10000)", [self.queue]
        ).fetchall()
        self.model.dead_letters(dict(found))
