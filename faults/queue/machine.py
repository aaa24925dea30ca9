"""A state machine that does to a queue whatever can be done to it. The model judges what comes of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import getrandbits
from typing import Any, ClassVar
from uuid import UUID

import psycopg
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faults.database import database
from faults.queue.model import Delivered, Lost, Model, Wrong
from harness.segments import rotated
from harness.states import age_waiting, claiming
from pgmb._core import statements
from pgmb._core.lease import LeaseNumbers

TOPICS = ("a", "a.b", "a.b.c", "b", "c.d")
PATTERNS = (["#"], ["a.#"], ["a.*", "b"], ["a.b", "b"], ["*.b.#", "c.d"])
SWEEP = 0.055
"""Expiries and delays are looked at every 50 ms."""

topics = st.lists(st.sampled_from(TOPICS), min_size=1, max_size=6)
pick = st.integers(0, 30)
"""Which of the leases or positions so far, counted from the newest."""
subset = st.none() | st.integers(0, 255)
"""Which events of a lease, by bits; none for all of them."""

_numbers = itertools.count(1)


class QueueMachine(RuleBasedStateMachine):
    """One queue of a stream of its own."""

    done: ClassVar[Counter[str]]
    model_of: ClassVar[type[Model]] = Model
    arguments: ClassVar[str] = ""
    """Of the queue, as arguments of create_queue."""
    _main: ClassVar[psycopg.Connection[Any]]
    _second: ClassVar[psycopg.Connection[Any]]
    _third: ClassVar[psycopg.Connection[Any]]

    @initialize(max_attempts=st.integers(1, 3), patterns=st.sampled_from(PATTERNS), claims=st.booleans())
    def begin(self, max_attempts: int, patterns: list[str], claims: bool) -> None:
        number = next(_numbers)
        self.stream, self.queue = f"s{number}", f"q{number}"
        self.leases: list[str] = []
        self.names_of: dict[str, dict[int, int]] = {}
        self.positions: list[tuple[str, frozenset[int]]] = []
        self.taken_in_open: list[tuple[str, frozenset[int]]] = []
        """Positions of the second session's transaction: their ticks are there once it commits, or never."""
        self.name = 0
        self.open: list[int] | None = None
        self.superseded = False
        self.claims = claims and not self.arguments
        if self.claims:
            patterns = PATTERNS[0]
        self.model = self.model_of(max_attempts, patterns)
        self.value("select pgmb.create_stream(%s)", self.stream)
        if self.claims:
            # The first numbers of a segment are left to receive.
            self.skip()
        self.value(
            "select pgmb.create_queue(%s, %s, %s, lease_for => '1 hour', max_attempts => %s"
            f"{self.arguments})",
            self.queue,
            patterns,
            self.stream,
            max_attempts,
        )
        type(self).done["examples"] += 1

    # -- publishing ------------------------------------------------------------------------------------------

    @rule(topics=topics, way=st.sampled_from(("one", "many", "copy")), commits=st.booleans())
    def publish(self, topics: list[str], way: str, commits: bool) -> None:
        names = self.fresh(len(topics))
        with self.transaction(self._main, commits):
            self.send(self._main, names, topics, way)
        if commits:
            self.model.publish(names, topics)

    @rule(topic=st.sampled_from(TOPICS))
    def publish_delayed(self, topic: str) -> None:
        (name,) = self.fresh(1)
        self.value(
            "select pgmb.publish(%s, %s::text::json, key => %s, stream => %s, delay => '1 hour')",
            topic,
            str(name),
            topic,
            self.stream,
        )
        self.model.delay(name, topic)

    @rule()
    def hours_pass(self) -> None:
        self._main.execute(
            "update pgmb.delayed set due_at = due_at - interval '2 hours' where stream = %s", [self.stream]
        )
        age_waiting(self._main, "2 hours", self.queue)
        if self.model.delayed:
            time.sleep(SWEEP)
        self.model.hours_pass()

    @precondition(lambda self: self.open is None)
    @rule(topics=topics, early=st.booleans())
    def second_session_publishes(self, topics: list[str], early: bool) -> None:
        self.open = self.fresh(len(topics))
        self._second.execute("begin")
        if early:
            self._second.execute("select pg_current_xact_id()")
        self.send(self._second, self.open, topics, "many")
        self.model.publish(self.open, topics, committed=False)

    @precondition(lambda self: self.open is not None)
    @rule(topics=topics)
    def second_session_publishes_more(self, topics: list[str]) -> None:
        assert self.open is not None
        names = self.fresh(len(topics))
        self.send(self._second, names, topics, "one")
        self.model.publish(names, topics, committed=False)
        self.open += names

    @precondition(lambda self: self.open is not None)
    @rule(commits=st.booleans())
    def second_session_ends(self, commits: bool) -> None:
        assert self.open is not None
        self._second.execute("commit" if commits else "rollback")
        if commits:
            self.positions += self.taken_in_open
            self.model.commit(self.open)
        else:
            self.model.roll_back(self.open)
        self.taken_in_open = []
        self.open = None

    # -- receiving -------------------------------------------------------------------------------------------

    @rule(limit=st.sampled_from((1, 2, 3, 5, 20)))
    def receive(self, limit: int) -> None:
        self.judge(self.fetch(limit), limit)

    @rule(
        limit=st.sampled_from((1, 3, 20)),
        how=st.sampled_from(("ack", "retry", "bury", "release", "expire", "expire")),
        bits=subset,
        later=st.booleans(),
    )
    def receive_and_settle(self, limit: int, how: str, bits: int | None, later: bool) -> None:
        """What most consumers do."""
        rows = self.fetch(limit)
        self.judge(rows, limit)
        if not rows:
            return
        if how == "ack":
            self.ack(0, bits)
        elif how == "retry":
            self.retry(0, bits, later, "failed")
        elif how == "bury":
            self.bury(0, bits, "broken")
        elif how == "release":
            self.release(0, bits)
        else:
            self.expire(0)

    @rule(topics=topics, limit=st.sampled_from((2, 5)))
    def publish_then_receive(self, topics: list[str], limit: int) -> None:
        self.publish(topics, "copy", True)
        self.judge(self.fetch(limit), limit)

    @rule(
        parts=st.lists(st.tuples(topics, st.booleans()), min_size=2, max_size=4),
        limit=st.sampled_from((1, 2, 3)),
        acks=st.booleans(),
    )
    def receive_in_the_middle(self, parts: list[tuple[list[str], bool]], limit: int, acks: bool) -> None:
        """A backlog with gaps, a few events at a time."""
        for topics, commits in parts:
            self.publish(topics, "many", commits)
        lease = None
        for _ in range(5):
            rows = self.fetch(limit, lease)
            if lease is not None:
                self.model.ack(lease, None)
            self.judge(rows, limit)
            lease = rows[0].lease if rows and acks else None

    @precondition(lambda self: self.open is None)
    @rule(
        late=topics,
        topics=topics,
        first=st.sampled_from((1, 20)),
        limits=st.lists(st.sampled_from((1, 2, 3, 5, 20)), min_size=2, max_size=4),
        more=st.booleans(),
    )
    def receive_around_a_late_commit(
        self, late: list[str], topics: list[str], first: int, limits: list[int], more: bool
    ) -> None:
        """Numbers that were read lie above those that were not."""
        self.second_session_publishes(late, False)
        self.publish(topics, "many", True)
        self.judge(self.fetch(first), first)
        self.second_session_ends(True)
        for limit in limits:
            if more:
                self.publish(topics[:1], "one", True)
            self.judge(self.fetch(limit), limit)

    @precondition(lambda self: self.leases)
    @rule(limit=st.sampled_from((1, 5)), which=pick)
    def ack_and_receive(self, limit: int, which: int) -> None:
        lease = self.lease(which)
        try:
            rows = self.fetch(limit, lease)
        except psycopg.Error as error:
            self.refused(error, lease)
            return
        self.agrees(lease, None, lambda: self.model.ack(lease, None))
        self.judge(rows, limit)

    @rule(
        topics=topics,
        between=st.none() | st.sampled_from(TOPICS),
        more=topics,
        limit=st.sampled_from((1, 3, 20)),
        acks=st.booleans(),
        commits=st.booleans(),
    )
    def publish_and_receive(
        self, topics: list[str], between: str | None, more: list[str], limit: int, acks: bool, commits: bool
    ) -> None:
        """Publishes, receives and publishes in one transaction, which gets its own events after its commit.

        Meanwhile, in `between`, a younger transaction may begin and end.
        """
        names, other, later = self.fresh(len(topics)), self.fresh(1), self.fresh(len(more))
        with self.transaction(self._main, commits):
            self.send(self._main, names, topics, "many")
            before, known = self.model.copy(), dict(self.names_of)
            self.model.publish(names, topics)
            if between is not None:
                self.send(self._third, other, [between], "one")
                for model in (self.model, before):
                    model.publish(other, [between])
            rows = self.fetch(limit)
            self.judge(rows, limit, names)
            if rows and acks:
                settled = self.value("select pgmb.ack(%s)", rows[0].lease)
                assert settled == self.model.ack(rows[0].lease, None)
            self.send(self._main, later, more, "one")
            self.model.publish(later, more)
        if not commits:
            before.seqs = {name: seq for name, seq in self.model.seqs.items() if name in before.log}
            self.model = before
            self.names_of = {lease: known.get(lease, {}) for lease in self.names_of}
        else:
            self.model.commit([*names, *later])  # not before now, for everybody else
        self.look_at_the_dead()

    @precondition(lambda self: self.open is None and not self.superseded and self.model.quiet())
    @rule(topics=topics, limit=st.sampled_from((1, 3, 20)), commits=st.booleans(), chance=st.integers(0, 5))
    def supersede(self, topics: list[str], limit: int, commits: bool, chance: int) -> None:
        """A receive in a transaction that stays open: others have its events after a second."""
        if chance:
            return
        self.superseded = True
        self.publish(topics, "many", True)
        self._second.execute("begin")
        rows = self._second.execute(
            "select lease::text, seq, payload::text::int from pgmb.receive(%s, %s)", [self.queue, limit]
        ).fetchall()
        self.judge(self.fetch(limit), limit)
        self._second.execute("commit" if commits else "rollback")
        if rows:
            self.leases.append(rows[0][0])
            self.names_of[rows[0][0]] = {name: seq for _, seq, name in rows}
            self.model.lose(rows[0][0])

    @rule(topics=topics)
    def exhaust(self, topics: list[str]) -> None:
        """Leases that expire after a last attempt, so that the next receive finds many of them."""
        self.publish(topics, "many", True)
        for _ in range(self.model.max_attempts):
            rows = self.fetch(20)
            self.judge(rows, 20)
            if not rows:
                return
            if rows[0].attempt < self.model.max_attempts:
                self.retry(0, None, False, "again")
        self.expire(0)

    @rule(topics=topics, times=st.integers(2, 3))
    def expire_again_and_again(self, topics: list[str], times: int) -> None:
        """Until what is left is suspect."""
        self.publish(topics, "many", True)
        for _ in range(times):
            rows = self.fetch(20)
            self.judge(rows, 20)
            if not rows:
                return
            self.expire(0)

    # -- settling --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(which=pick, bits=subset)
    def ack(self, which: int, bits: int | None) -> None:
        lease = self.lease(which)
        names = self.choose(lease, bits)
        self.settle("select pgmb.ack(%s, %s)", lease, names, lambda: self.model.ack(lease, names))

    @precondition(lambda self: self.leases)
    @rule(which=pick, bits=subset, later=st.booleans(), error=st.sampled_from((None, "no", "never")))
    def retry(self, which: int, bits: int | None, later: bool, error: str | None) -> None:
        lease = self.lease(which)
        names = self.choose(lease, bits)
        self.settle(
            "select pgmb.retry(%s, %s, after => %s, error => %s)",
            lease,
            names,
            lambda: self.model.fail(lease, names, later=later, error=error, final=False),
            "1 hour" if later else "0",
            error,
        )
        self.look_at_the_dead()

    @precondition(lambda self: self.leases)
    @rule(which=pick, bits=subset, error=st.sampled_from((None, "hopeless")))
    def bury(self, which: int, bits: int | None, error: str | None) -> None:
        lease = self.lease(which)
        names = self.choose(lease, bits)
        self.settle(
            "select pgmb.bury(%s, %s, error => %s)",
            lease,
            names,
            lambda: self.model.fail(lease, names, later=False, error=error, final=True),
            error,
        )
        self.look_at_the_dead()

    @precondition(lambda self: self.leases)
    @rule(which=pick, bits=subset)
    def release(self, which: int, bits: int | None) -> None:
        lease = self.lease(which)
        names = self.choose(lease, bits)
        self.settle("select pgmb.release(%s, %s)", lease, names, lambda: self.model.give_back(lease, names))

    @precondition(lambda self: self.leases)
    @rule(which=pick)
    def extend(self, which: int) -> None:
        lease = self.lease(which)
        self.settle("select 0 from pgmb.extend(%s)", lease, None, lambda: self.prolong(lease, lapse=False))

    @precondition(lambda self: self.leases)
    @rule(which=pick, less=st.sampled_from(("1 microsecond", "0 seconds", "-1 minute")))
    def expire(self, which: int, less: str = "1 microsecond") -> None:
        lease = self.lease(which)
        self.settle(
            f"select 0 from pgmb.extend(%s, '{less}')",
            lease,
            None,
            lambda: self.prolong(lease, lapse=True),
        )
        time.sleep(SWEEP)

    @precondition(lambda self: self.open is None)
    @rule(topics=topics, how=st.sampled_from(("lapse", "lapse", "extend", "ack", "retry")))
    def settle_beside_an_extend(self, topics: list[str], how: str) -> None:
        """Two sessions at one lease that has expired: one extends it, the other waits and stays open."""
        self.publish(topics, "many", True)
        rows = self.fetch(5, lease_for="1 ms")
        self.judge(rows, 5)
        if not rows:
            return
        lease = rows[0].lease
        self._second.execute("begin")
        self._second.execute("select 0 from pgmb.extend(%s, '1 hour')", [lease])
        self.agrees(lease, 0, lambda: self.prolong(lease, lapse=False))
        statement, expected = {
            "lapse": ("select 0 from pgmb.extend(%s, '0 s')", lambda: self.prolong(lease, lapse=True)),
            "extend": ("select 0 from pgmb.extend(%s)", lambda: self.prolong(lease, lapse=False)),
            "ack": ("select pgmb.ack(%s)", lambda: self.model.ack(lease, None)),
            "retry": (
                "select pgmb.retry(%s, after => '0 s')",
                lambda: self.model.fail(lease, None, later=False, error=None, final=False),
            ),
        }[how]
        with ThreadPoolExecutor(1) as beside:
            self._third.execute("begin")
            waiting = beside.submit(lambda: self._third.execute(statement, [lease]).fetchone())
            while not self.value(
                "select cardinality(pg_blocking_pids(%s)) > 0", self._third.info.backend_pid
            ):
                assert not waiting.done(), "two sessions changed one lease at once"
                time.sleep(0.001)
            self._second.execute("commit")
            settled = waiting.result()
        time.sleep(SWEEP)
        # A sweep passes the end that the other session has set and not committed, and a lease notes it.
        self.publish(list(TOPICS), "many", True)
        self.judge(self.fetch(5), 5)
        self._third.execute("commit")
        assert settled is not None
        self.agrees(lease, settled[0], expected)
        type(self).done["settled beside an extend"] += 1
        time.sleep(SWEEP)
        self.look_at_the_dead()

    # -- the operator ----------------------------------------------------------------------------------------

    @rule(pattern=st.none() | st.sampled_from(PATTERNS))
    def redrive(self, pattern: list[str] | None) -> None:
        one = None if pattern is None else pattern[:1]
        moved = self.value("select pgmb.redrive(%s, topic => %s)", self.queue, one and one[0])
        expected = self.model.redrive(one)
        assert moved == expected, f"redrive moved {moved}, the model {expected}"

    @rule(how=st.sampled_from(("position", "tick", "second session")))
    def take_position(self, how: str) -> None:
        behind = frozenset(self.model.committed())
        if how == "second session" and self.open is not None:
            row = self._second.execute("select pgmb.position(%s)::text", [self.stream]).fetchone()
            assert row is not None
            self.taken_in_open.append((row[0], behind))
        elif how == "tick":
            tick = self.value("select pgmb.tick(%s)", self.stream)
            self.model.release()
            if tick is not None:
                named = self.value("select pgmb.position_of(%s, %s)::text", self.stream, tick)
                self.positions.append((named, behind))
        else:
            self.positions.append((self.value("select pgmb.position(%s)::text", self.stream), behind))

    @rule(which=pick)
    def seek(self, which: int) -> None:
        """To an earlier position, to the beginning, or past all that waits."""
        if which < len(self.positions):
            position, behind = self.positions[-1 - which]
            self.value("select pgmb.seek(%s, %s)", self.queue, position)
            self.model.seek(behind)
        elif which % 3:
            self.value("select pgmb.seek(%s, pgmb.earliest(%s))", self.queue, self.stream)
            self.model.seek(())
        else:
            self.value("select pgmb.purge(%s)", self.queue)
            self.model.seek(self.model.committed())

    @rule(after=pick, upto=pick)
    def read_between(self, after: int, upto: int) -> None:
        """Two positions have the same events between them whenever they are read."""
        if not self.positions:
            return
        begin, seen = (str(self.value("select pgmb.earliest(%s)::text", self.stream)), frozenset[int]())
        if after < len(self.positions):
            begin, seen = self.positions[-1 - after]
        end, behind = self.positions[-1 - upto % len(self.positions)]
        expected = sorted(behind - seen, key=lambda name: self.model.log[name].published)
        rows = self._main.execute(
            "select payload::text::int from pgmb.between(%s, %s, %s)", [self.stream, begin, end]
        ).fetchall()
        assert [name for (name,) in rows] == expected, (begin, end)

    @rule(patterns=st.sampled_from(PATTERNS))
    def bind(self, patterns: list[str]) -> None:
        self.value("select pgmb.bind(%s, %s)", self.queue, patterns)
        self.model.patterns = patterns

    @rule(stays=st.sampled_from((False, False, True)))
    def pause(self, stays: bool) -> None:
        self.value("select pgmb.pause(%s)", self.queue)
        self.model.paused = True
        self.judge(self.fetch(5), 5)
        if not stays:
            self.resume()

    @precondition(lambda self: self.model.paused)
    @rule()
    def resume(self) -> None:
        self.value("select pgmb.resume(%s)", self.queue)
        self.model.paused = False

    @rule(rotates=st.booleans())
    def maintain(self, rotates: bool) -> None:
        if rotates:
            rotated(self._main, self.stream)
            if self.claims:
                self.skip()
        self.value("select pgmb.maintain()")
        self.model.release()
        self.model.forgotten = True

    @invariant()
    def counted(self) -> None:
        type(self).done["steps"] += 1

    # -- the end ---------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            if self.open is not None:
                self._second.execute("rollback")
                self.model.roll_back(self.open)
            self.resume()
            for _ in range(200):
                rows = self.fetch(50)
                self.judge(rows, 50)
                if not rows:
                    break
                assert self.value("select pgmb.ack(%s)", rows[0].lease) == self.model.ack(rows[0].lease, None)
            else:
                raise Wrong("the queue never ran dry")
        finally:
            self._main.rollback()
            self._second.rollback()
            self._third.rollback()
            self.value("select pgmb.drop_queue(%s)", self.queue)
            self.value("select pgmb.drop_stream(%s)", self.stream)

    # -- means -----------------------------------------------------------------------------------------------

    def fresh(self, count: int) -> list[int]:
        self.name += count
        return list(range(self.name - count + 1, self.name + 1))

    def value(self, statement: Any, *parameters: Any) -> Any:
        row = self._main.execute(statement, parameters).fetchone()
        assert row is not None
        return row[0]

    @contextlib.contextmanager
    def transaction(self, connection: psycopg.Connection[Any], commits: bool) -> Iterator[None]:
        connection.execute("begin")
        yield
        connection.execute("commit" if commits else "rollback")

    def send(
        self, connection: psycopg.Connection[Any], names: list[int], topics: list[str], way: str
    ) -> None:
        if way == "one":
            for name, topic in zip(names, topics, strict=True):
                connection.execute(
                    "select pgmb.publish(%s, %s::text::json, key => %s, stream => %s)",
                    [topic, str(name), topic, self.stream],
                )
        elif way == "many":
            connection.execute(
                "select pgmb.publish_many(topics => %s, payloads => %s::text[]::json[], keys => %s,"
                " stream => %s)",
                [topics, [str(name) for name in names], topics, self.stream],
            )
        else:
            with (
                connection.cursor() as cursor,
                cursor.copy(f"copy pgmb.log_{self.stream} (topic, key, payload) from stdin") as copy,
            ):
                for name, topic in zip(names, topics, strict=True):
                    copy.write_row((topic, topic, str(name)))

    def skip(self) -> None:
        numbers = f"pgmb.seq_{self.stream}"
        self._main.execute(
            "select setval(%s, (coalesce(pg_sequence_last_value(%s), 0) >> 40 << 40) + 5000)"
            " where coalesce(pg_sequence_last_value(%s), 0) & 1099511627775 < 5000",
            [numbers] * 3,
        )

    def fetch(self, limit: int, ack: str | None = None, lease_for: str | None = None) -> list[Delivered]:
        """As the client does: by the statement that claims and reads, where that is not refused.

        What is due again the client looks for by receive: here the model knows what that is.
        """
        if self.claims and not self.model.due() and lease_for is None:
            stream, segment, queue, known, start, ended = claiming(self._main, self.queue)
            for one in self.leases[-1:]:
                if LeaseNumbers.of(UUID(one).bytes).claim == known:
                    start = max(self.names_of[one].values(), default=start)
            lease = LeaseNumbers(queue, known, getrandbits(40))
            acked = None if ack is None else LeaseNumbers.of(UUID(ack).bytes)
            for opens in (True,) if ended else (False, True):
                text, parameters = statements.claim(
                    lease, limit, None, acked, stream=stream, segment=segment, start=start, opens=opens
                )
                rows = self._main.execute(text, parameters).fetchall()
                claimed = rows[0][-1]
                if claimed == 0:
                    type(self).done["claims of nothing"] += 1
                    return []
                if claimed is None:
                    continue
                made = str(UUID(bytes=bytes(lease._replace(claim=abs(claimed)))))
                type(self).done["claims"] += 1
                type(self).done["claims that open"] += opens
                type(self).done["claims that open more"] += claimed < 0
                type(self).done["claims that open over a rest"] += opens and not ended
                return [
                    Delivered(made, seq, name, topic, attempt)
                    for seq, _, topic, _, name, _, _, attempt, _ in rows
                ]
        rows = self._main.execute(
            "select lease::text, seq, payload::text::int, topic, attempt"
            " from pgmb.receive(%s, %s, %s::interval, %s)",
            [self.queue, limit, lease_for, ack],
        ).fetchall()
        return [Delivered(*row) for row in rows]

    def judge(self, rows: list[Delivered], limit: int, own: Iterable[int] = ()) -> None:
        type(self).done["receives"] += 1
        type(self).done["deliveries"] += len(rows)
        self.model.receive(rows, limit, own)
        if rows:
            self.leases.append(rows[0].lease)
            self.names_of[rows[0].lease] = {row.name: row.seq for row in rows}
        self.look_at_the_dead()

    def lease(self, which: int) -> str:
        return self.leases[-1 - which % len(self.leases)]

    def prolong(self, lease: str, *, lapse: bool) -> int:
        self.model.extend(lease, lapse=lapse)
        return 0

    def choose(self, lease: str, bits: int | None) -> set[int] | None:
        if bits is None:
            return None
        return {name for place, name in enumerate(self.names_of[lease]) if bits >> place & 1}

    def settle(self, statement: Any, lease: str, names: set[int] | None, expected: Any, *rest: Any) -> None:
        parameters: list[Any] = [lease]
        if statement.count("%s") > 1:
            # Numbers that are none of the lease's change nothing.
            others = {seq for held in self.names_of.values() for seq in held.values()}
            others -= set(self.names_of[lease].values())
            chosen = None if names is None else [0, *others, *(self.names_of[lease][name] for name in names)]
            parameters.append(chosen)
        try:
            settled = self.value(statement, *parameters, *rest)
        except psycopg.Error as error:
            self.refused(error, lease)
            return
        self.agrees(lease, settled, expected)

    def agrees(self, lease: str, settled: int | None, expected: Any) -> None:
        type(self).done["settled"] += 1
        try:
            wanted = expected()
        except Lost:
            raise Wrong(f"lease {lease} is lost, but was taken") from None
        if settled is not None and settled != wanted:
            raise Wrong(f"settled {settled}, the model {wanted}")

    def refused(self, error: psycopg.Error, lease: str) -> None:
        type(self).done["refused"] += 1
        if error.sqlstate != "MB011":
            raise error
        held = self.model.leases.get(lease)
        if held is not None and held.settled and self.model.forgotten:
            return
        try:
            self.model.copy().extend(lease, lapse=False)
        except Lost:
            return
        raise Wrong(f"lease {lease} was refused, but is held")

    def look_at_the_dead(self) -> None:
        self.model.dead_letters(
            self._main.execute(
                "select payload::text::int, attempt, error from pgmb.dead_letters(%s, max => 10000)",
                [self.queue],
            ).fetchall()
        )


def run(
    dsn: str,
    *,
    examples: int,
    steps: int,
    seed: int | None = None,
    shrink: bool = False,
    kind: Any = QueueMachine,
) -> Counter[str]:
    """Runs so many examples of so many steps and raises what goes wrong. Counts what was done.

    To `shrink` a failure takes minutes.
    """
    with (
        psycopg.connect(dsn, autocommit=True) as main,
        psycopg.connect(dsn, autocommit=True) as second,
        psycopg.connect(dsn, autocommit=True) as third,
    ):

        class Machine(kind):  # type: ignore[misc]
            done: ClassVar[Counter[str]] = Counter()
            _main = main
            _second = second
            _third = third

        chosen = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        if seed is not None:
            from hypothesis import seed as seeded

            run_state_machine_as_test(seeded(seed)(Machine), settings=chosen)
        else:
            run_state_machine_as_test(Machine, settings=chosen)
        return Machine.done


def run_in_processes(
    processes: int, *, major: int, examples: int, steps: int, seed: int, shrink: bool, kind: Any
) -> Counter[str]:
    """`run`, the examples shared by processes: most of their time they wait for a lease to expire."""
    shares = [(major, (examples + n) // processes, seed + n) for n in range(processes)]
    done: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # ends them all at the first failure
        alike = functools.partial(_run_share, steps=steps, shrink=shrink, kind=kind)
        for part in pool.imap_unordered(alike, shares):
            done += part
    return done


def _run_share(share: tuple[int, int, int], **options: Any) -> Counter[str]:
    """On a server of its own: an open transaction counts for the whole server."""
    major, examples, seed = share
    with database(major) as (_, dsn):
        return run(dsn, examples=examples, seed=seed, **options)
