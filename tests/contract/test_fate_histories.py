"""Promise: `event_fate` is right after any history of a queue.

The test keeps its own account of what it received and settled. In the end it receives all that is
left: exactly these events were waiting. Where the database cannot tell, `unknown` is right;
the test knows where that may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.states import expire, expire_all, make_due
from tests.conftest import Connect
from tests.contract.endpoints import create, receive, settle, settle_claimed, value

DB = psycopg.Connection[Any]

TOPICS = ("a.b", "b.c")
PATTERNS = ("#", "a.*", "b.*")
KINDS = {
    "plain": "",
    "filtered": "filter => '$.payload > 20'",
    "ordered": "ordered => true",
    "sharded": "ordered => true, shards => 2",
    "lanes": "lanes => '{b.#}'",
    "fair": "fair_by => 'key'",
    "limited": "max_in_flight => 3",
    "capped": "max_length => 5, when_full => 'drop_oldest'",
}
STEPS = 60
SEEDS = range(2)
PENDING = ("waiting", "leased", "retrying")


@dataclass
class Known:
    """What the test knows of an event."""

    topic: str
    payload: int
    version: int
    """How often the queue had been bound when the event was published."""
    last: str = "new"
    """new, held, failed, returned, buried, acked, skipped, or lost: held when the queue was moved past it."""
    acked: bool = False
    """It was acked, perhaps before the queue was moved back."""
    died: bool = False
    """It has a dead letter."""
    untraced: bool = False
    """A dead letter of it was dropped, or the queue was moved past it while it was held."""


@dataclass
class History:
    db: DB
    late: DB
    kind: str
    chance: random.Random
    events: dict[UUID, Known] = field(default_factory=dict)
    leases: dict[UUID, dict[int, UUID]] = field(default_factory=dict)
    bound: list[str] = field(default_factory=lambda: ["#"])
    uncommitted: list[UUID] = field(default_factory=list)

    def ask(self, statement: str, *parameters: Any) -> list[Any]:
        return self.db.execute(statement.encode(), parameters).fetchall()

    # Steps

    def publish(self) -> None:
        late = self.chance.random() < 0.2
        db = self.late if late else self.db
        for _ in range(self.chance.randint(1, 4)):
            topic, payload = self.chance.choice(TOPICS), self.chance.randrange(100)
            key = self.chance.choice(["k", "l", None])
            made = value(db, "select pgmb.publish(%s, to_json(%s::int), key => %s)", topic, payload, key)
            self.events[made] = Known(topic, payload, len(self.bound) - 1)
            if late:
                self.uncommitted.append(made)

    def commit(self) -> None:
        self.late.commit()
        self.uncommitted.clear()

    def receive(self) -> None:
        rows = self.ask(
            "select lease, seq, id from pgmb.receive('q', %s, '1 hour')", self.chance.randint(1, 6)
        )
        for lease, seq, event in rows:
            self.leases.setdefault(lease, {})[seq] = event
            self.events[event].last = "held"

    def settle(self) -> None:
        if not self.leases:
            return
        lease = self.chance.choice(list(self.leases))
        held = self.leases[lease]
        chosen = self.chance.sample(list(held), self.chance.randint(1, len(held)))
        way = self.chance.choice(["ack", "ack", "ack all", "retry", "later", "bury", "expire"])
        if way in ("ack all", "expire"):
            chosen = list(held)
        if way == "ack":
            self.ask("select pgmb.ack(%s, %s::bigint[])", lease, chosen)
        elif way == "ack all":
            self.ask("select pgmb.ack(%s)", lease)
        elif way == "bury":
            self.ask("select pgmb.bury(%s, %s::bigint[], 'no')", lease, chosen)
        elif way == "expire":
            expire(self.db, lease)
        else:
            after = "0" if way == "retry" else "1 hour"
            self.ask("select pgmb.retry(%s, %s::bigint[], %s::interval, 'no')", lease, chosen, after)
        for seq in chosen:
            known = self.events[held.pop(seq)]
            known.last = "acked" if way.startswith("ack") else "failed"
            known.acked |= known.last == "acked"
            if way == "bury":
                known.died, known.last = True, "buried"
        if way in ("retry", "later") and self.kind in ("ordered", "sharded"):
            # The rest of their keys went back with them.
            for event in held.values():
                self.events[event].last = "returned"
            held.clear()
        if not held:
            del self.leases[lease]

    def bind(self) -> None:
        self.bound.append(self.chance.choice(PATTERNS))
        self.ask("select pgmb.bind('q', array[%s])", self.bound[-1])

    def pause(self) -> None:
        self.ask(f"select pgmb.{self.chance.choice(['pause', 'resume'])}('q')")

    def clear(self) -> None:
        self.ask("select pgmb.clear_settled()")

    def redrive(self) -> None:
        self.ask("select pgmb.redrive('q')")
        for known in self.events.values():
            if known.died and known.last == "buried":
                known.last = "failed"
            elif known.died:
                # It is sent as well as what came of a seek.
                known.last = "failed"
            known.died = False

    def drop_dead(self) -> None:
        self.ask("select pgmb.drop_dead('q')")
        for known in self.events.values():
            known.untraced |= known.died
            known.died = False

    def move(self) -> None:
        self.commit()
        back = self.chance.random() < 0.5
        self.ask("select pgmb.seek('q', pgmb.earliest())" if back else "select pgmb.purge('q')")
        for known in self.events.values():
            if back:
                known.last = "new"
            elif known.last == "new":
                known.last = "skipped"
            elif known.last in ("held", "failed", "returned"):
                known.last, known.untraced = "lost", True
        self.leases.clear()

    def run(self) -> None:
        often = [self.publish, self.receive, self.receive, self.settle, self.settle, self.settle]
        rarely = [self.commit, self.bind, self.pause, self.clear, self.redrive, self.drop_dead, self.move]
        for _ in range(STEPS):
            self.chance.choice([*often, *often, *rarely])()
        self.commit()

    # Accounts

    def fates(self) -> dict[UUID, dict[str, Any]]:
        found = {}
        for event in self.events:
            (one,) = value(self.db, "select pgmb.event_fate(%s)", event)["consumers"]
            found[event] = one
        return found

    def may_be_unknown(self, known: Known) -> bool:
        verdicts = {self.matches(pattern, known) for pattern in self.bound[known.version :]}
        return len(verdicts) > 1 or known.untraced or self.kind == "capped"

    def matches(self, pattern: str, known: Known) -> bool:
        wanted = pattern == "#" or pattern[0] == known.topic[0]
        return wanted and (self.kind != "filtered" or known.payload > 20)

    def check(self, known: Known, fate: dict[str, Any]) -> None:
        state = fate["state"]
        expected = {
            "held": {"leased"},
            # Those whose lease expired, until a receive comes.
            "failed": {"retrying", "leased"},
            "returned": {"leased", "retrying", "waiting"},
            "buried": {"dead"},
            "acked": {"done"},
            "skipped": {"not taken"},
            "lost": set(),
            "new": {"waiting", "not taken"},
        }[known.last]
        if known.acked and known.last in ("skipped", "new"):
            # Before the queue was moved back. (Whether it waits now, the end of the test finds.)
            expected = expected | {"done"}
        if known.died and known.last in ("acked", "new", "skipped", "lost"):
            expected = expected - {"done"} | {"dead"}
        if known.last not in ("held", "failed", "returned") and self.may_be_unknown(known):
            expected = expected | {"unknown"}
        if known.last == "buried" and known.untraced:
            expected = expected | {"unknown"}
        assert state in expected, (known, fate)
        if state in ("not taken", "unknown"):
            assert fate["reason"]


@pytest.fixture
def history(db: DB, connect: Connect) -> Callable[[str, int], History]:
    def start(kind: str, seed: int) -> History:
        options = f", {KINDS[kind]}" if KINDS[kind] else ""
        db.execute(f"select pgmb.create_queue('q', max_attempts => 1000{options})".encode())
        return History(db, connect(autocommit=False), kind, random.Random(seed))

    return start


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fate_of_an_event_is_what_the_history_of_its_queue_made_of_it(
    history: Callable[[str, int], History], kind: str, seed: int
) -> None:
    made = history(kind, seed)
    made.run()
    fates = made.fates()
    for event, known in made.events.items():
        made.check(known, fates[event])
    # All that is left comes now.
    made.ask("select pgmb.resume('q')")
    expire_all(made.db)
    make_due(made.db)
    left: set[UUID] = set()
    while rows := made.ask("select lease, id from pgmb.receive('q', 100)"):
        left |= {event for _, event in rows}
        made.ask("select pgmb.ack(%s)", rows[0][0])
        make_due(made.db)
    pending = {event for event, fate in fates.items() if fate["state"] in PENDING}
    if kind == "capped":
        # The receive drops the oldest.
        pending -= {event for event in pending - left if fates[event]["state"] == "waiting"}
    assert left == pending
    after = made.fates()
    for event in left:
        known = made.events[event]
        known.last = "acked"
        made.check(known, after[event])


class Deliveries:
    """A shared queue with endpoints, and what the test received for each."""

    def __init__(self, db: DB, chance: random.Random) -> None:
        self.db = db
        self.chance = chance
        self.events: dict[int, UUID] = {}
        self.names: dict[UUID, str] = {}
        self.state: dict[tuple[int, str], str] = {}
        """By event and endpoint: sent, failed, dead. Nothing: it was never received for that endpoint."""
        self.unsure: set[tuple[int, str]] = set()
        """Events that were published before their endpoint was created, bound, disabled or enabled."""

    def create(self, name: str) -> None:
        self.names[create(self.db, name, self.chance.choice(["{#}", "{a.*}"]))] = name
        self.note_change(name)

    def note_change(self, name: str) -> None:
        self.unsure |= {(event, name) for event in self.events}

    def step(self) -> None:
        way = self.chance.choice(
            ["publish"] * 3 + ["receive"] * 3 + ["again", "bind", "disable", "enable", "create"]
        )
        name = self.chance.choice(list(self.names.values()))
        if way == "publish":
            number = len(self.events)
            topic = self.chance.choice(TOPICS)
            self.events[number] = value(self.db, "select pgmb.publish(%s, to_json(%s::int))", topic, number)
        elif way == "receive":
            self.receive()
        elif way == "again":
            make_due(self.db)
            self.again()
        elif way == "bind":
            self.db.execute("select pgmb.bind_endpoint(%s, array[%s])", [name, self.chance.choice(PATTERNS)])
            self.note_change(name)
        elif way in ("disable", "enable"):
            state = "disabled" if way == "disable" else "active"
            self.db.execute("select pgmb.set_endpoint_state(%s, %s)", [name, state])
            self.note_change(name)
        elif len(self.names) < 4:
            self.create(f"endpoint {len(self.names)}")

    def receive(self) -> None:
        got = receive(self.db, max=self.chance.randint(1, 4))
        said = []
        for number, seq, _, _, endpoints in got.rows:
            for endpoint in endpoints:
                outcome = self.chance.choice(["sent", "sent", "failed", "dead"])
                self.state[number, self.names[endpoint]] = outcome
                if outcome != "sent":
                    said.append((seq, endpoint, "1 hour", "no", True, outcome == "dead"))
        if got:
            settle(self.db, got.lease, None, said)

    def again(self) -> set[tuple[int, str]]:
        """Delivers what waits for one endpoint and is due."""
        rows = self.db.execute(
            "select lease, delivery, payload::int, endpoint from pgmb.claim_deliveries(room => 1000)"
        ).fetchall()
        sent = {(number, self.names[endpoint]) for _, _, number, endpoint in rows}
        for pair in sent:
            self.state[pair] = "sent"
        if rows:
            settle_claimed(self.db, rows[0][0], [row[1] for row in rows])
        return sent

    def pending(self) -> set[tuple[int, str]]:
        return {
            (number, fate["name"])
            for number, event in self.events.items()
            for fate in value(self.db, "select pgmb.event_fate(%s)", event)["consumers"]
            if fate["state"] in PENDING
        }

    def check(self) -> None:
        for number, event in self.events.items():
            for fate in value(self.db, "select pgmb.event_fate(%s)", event)["consumers"]:
                name = fate["name"]
                known = self.state.get((number, name))
                expected = {
                    "sent": {"done"},
                    "failed": {"retrying"},
                    "dead": {"dead"},
                    None: {"waiting", "not taken"},
                }[known]
                if known in ("sent", None) and (number, name) in self.unsure:
                    expected = expected | {"unknown"}
                assert fate["state"] in expected, (number, known, fate)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fate_of_an_event_at_an_endpoint_is_what_was_received_for_it(db: DB, seed: int) -> None:
    made = Deliveries(db, random.Random(seed))
    made.create("endpoint 0")
    made.create("endpoint 1")
    for _ in range(STEPS):
        made.step()
    made.check()
    for name in made.names.values():
        db.execute("select pgmb.set_endpoint_state(%s, 'active')", [name])
        made.note_change(name)
    made.check()
    pending = made.pending()
    make_due(db)
    left = set()
    while got := receive(db):
        left |= {(number, made.names[one]) for number, *_, endpoints in got.rows for one in endpoints}
        settle(db, got.lease)
    while again := made.again():
        left |= again
    assert left == pending
