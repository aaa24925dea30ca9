"""A state machine that does to a fair queue what can be done to it. The tenant of an event is its topic."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from faults.queue.machine import TOPICS, QueueMachine
from faults.queue.model import NEVER, Delivered, Lease, Model, require
from harness.states import holds_retries, lagging_tenants


@dataclass
class FairModel(Model):
    """A queue that may give tenants in any order, and of each tenant the events in the order of the log."""

    retried: bool = False
    """Whether the rows that are judged are of a lease of retried events, which take turns with fresh ones."""

    def _in_order(self, rows: Sequence[Delivered]) -> bool:
        """A lease may hold two batches: what committed late comes after what was published before that.
        Retried events have no order."""
        return self.retried or all(
            a.seq <= b.seq or self.log[b.name].committed > self.log[a.name].published
            for own in _by_tenant(rows).values()
            for a, b in itertools.pairwise(own)
        )

    def _takes_due(self, rows: Sequence[Delivered]) -> bool:
        return bool(self.due()) and (self.retried or not rows)

    def _receive_fresh(self, rows: Sequence[Delivered], own: set[int]) -> None:
        waiting = self.waiting() - own
        required = waiting - self.doubtful
        got = {row.name for row in rows}
        require(len(got) == len(rows), "twice in one lease", rows)
        require(got <= waiting, "not to be delivered", got - waiting)
        require(bool(got) or not required, "nothing although something waits", required)
        for row in rows:
            require(row.attempt == 1, "a first delivery", row)
            require(row.topic == self.log[row.name].topic, "another topic than published", row)
        last = {
            tenant: max(self.log[row.name].published for row in own_rows)
            for tenant, own_rows in _by_tenant(rows).items()
        }
        passed_by = {
            name
            for name in self.committed() - self.passed - own - got
            if self.log[name].committed < last.get(self.log[name].topic, -NEVER)
        }
        require(not passed_by & required, "overtaken by a later event of its tenant", (passed_by, rows))
        self.passed |= got
        # What did not match is passed with a later event of its tenant, or when nothing is left.
        self.passed |= passed_by | (set() if got else waiting & self.doubtful)
        self.doubtful |= self.committed() - self.passed - required - own
        self.doubtful -= self.passed
        if rows:
            self.leases[rows[0].lease] = Lease(got, events=len(got))


class FairMachine(QueueMachine):
    """One fair queue of a stream of its own. Bursts of one tenant make it lag."""

    model_of: ClassVar[type[Model]] = FairModel
    arguments: ClassVar[str] = ", fair_by => 'key'"

    @rule(
        topic=st.sampled_from(TOPICS),
        count=st.integers(10, 60),
        rest=st.lists(st.sampled_from(TOPICS), max_size=6),
    )
    def burst(self, topic: str, count: int, rest: list[str]) -> None:
        self.publish([topic] * count + rest, "many", True)

    def judge(self, rows: list[Delivered], limit: int, own: Iterable[int] = ()) -> None:
        assert isinstance(self.model, FairModel)
        self.model.retried = bool(rows) and holds_retries(self._main, rows[0].lease)
        if lagging_tenants(self._main, self.queue):
            type(self).done["lagging"] += 1
        super().judge(rows, limit, own)


class LimitedFairMachine(FairMachine):
    """One fair queue with limits that are never reached, each of which takes part in every receive."""

    arguments: ClassVar[str] = (
        ", fair_by => 'key', max_in_flight => 100000, rps => 1000000, ttl => '1 day',"
        " max_length => 100000, when_full => 'drop_oldest'"
    )


class FilteredFairMachine(FairMachine):
    """One fair queue with a filter that all events pass, which is asked of each that is taken."""

    arguments: ClassVar[str] = ", fair_by => 'key', filter => '$.payload > 0'"


def _by_tenant(rows: Sequence[Delivered]) -> dict[str, list[Delivered]]:
    found: dict[str, list[Delivered]] = defaultdict(list)
    for row in rows:
        found[row.topic].append(row)
    return found
