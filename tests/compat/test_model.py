"""Promise: whatever is done to a queue by PGMQ's functions, it does what a model in plain Python does.

PGMQ itself is held to the model by the same steps. Times are either past or an hour away, so that nothing
depends on a clock. Where a read takes fewer messages than it might, the model does not ask which.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

STEPS = 150
GROUP = "x-pgmq-group"


@dataclass
class Message:
    number: int
    kind: str
    group: str
    visible: bool
    read_ct: int = 0


class Model:
    """A queue, and what each of PGMQ's functions must answer."""

    def __init__(self, connection: psycopg.Connection[Any], queue: str, seed: int) -> None:
        self.connection = connection
        self.queue = queue
        self.chance = random.Random(seed)
        self.last = 0
        self.messages: dict[int, Message] = {}
        self.archived: set[int] = set()

    def ask(self, statement: str, *arguments: Any) -> list[Any]:
        return self.connection.execute(statement.encode(), arguments).fetchall()

    def some_numbers(self) -> list[int]:
        known = list(range(1, self.last + 3))
        return self.chance.sample(known, min(len(known), self.chance.randint(1, 6)))

    def visible(self) -> list[int]:
        return sorted(m.number for m in self.messages.values() if m.visible)

    # What can be done

    def send(self) -> None:
        count = self.chance.randint(1, 5)
        delay = self.chance.choice([0, 0, 3600])
        kinds = [self.chance.choice("ab") for _ in range(count)]
        groups = [self.chance.choice("xyz") for _ in range(count)]
        if count == 1:
            sent = self.ask(
                "select pgmq.send(%s, jsonb_build_object('kind', %s::text),"
                " jsonb_build_object(%s::text, %s::text), %s)",
                *(self.queue, kinds[0], GROUP, groups[0], delay),
            )
        else:
            sent = self.ask(
                "select pgmq.send_batch(%s,"
                " array(select jsonb_build_object('kind', k) from unnest(%s::text[]) k),"
                " array(select jsonb_build_object(%s::text, g) from unnest(%s::text[]) g), %s)",
                *(self.queue, kinds, GROUP, groups, delay),
            )
        numbers = [number for (number,) in sent]
        assert numbers == sorted(numbers)
        assert numbers[0] > self.last
        self.last = numbers[-1]
        for number, kind, group in zip(numbers, kinds, groups, strict=True):
            self.messages[number] = Message(number, kind, group, delay == 0)

    def read(self) -> None:
        vt, qty = self.chance.choice([0, 3600]), self.chance.choice([1, 3, 1000])
        kind = self.chance.choice(["", "", "", "a"])
        condition = f'{{"kind": "{kind}"}}' if kind else "{}"
        got = self.ask(
            "select msg_id, read_ct, vt > clock_timestamp(), message ->> 'kind', last_read_at is not null"
            " from pgmq.read(%s, %s, %s, %s)",
            *(self.queue, vt, qty, condition),
        )
        could = [n for n in self.visible() if kind in ("", self.messages[n].kind)]
        self.took([number for number, *_ in got], could, qty)
        for number, read_ct, hidden, said, was_read in got:
            message = self.messages[number]
            message.read_ct += 1
            message.visible = vt == 0
            assert (read_ct, hidden, said, was_read) == (message.read_ct, vt > 0, message.kind, True)

    def took(self, numbers: list[int], could: list[int], qty: int) -> None:
        assert len(set(numbers)) == len(numbers) == min(qty, len(could))
        assert set(numbers) <= set(could)

    def pop(self) -> None:
        qty = self.chance.choice([1, 2])
        got = self.ask("select msg_id, read_ct from pgmq.pop(%s, %s)", self.queue, qty)
        self.took([number for number, _ in got], self.visible(), qty)
        for number, read_ct in got:
            assert self.messages.pop(number).read_ct == read_ct

    def remove(self) -> None:
        way = self.chance.choice(["delete", "archive"])
        numbers = self.some_numbers()
        if len(numbers) == 1:
            [(removed,)] = self.ask(f"select pgmq.{way}(%s, %s::bigint)", self.queue, numbers[0])
            gone = {numbers[0]} if removed else set()
        else:
            answer = [n for (n,) in self.ask(f"select pgmq.{way}(%s, %s::bigint[])", self.queue, numbers)]
            gone = set(answer)
            assert len(gone) == len(answer)
        assert gone == set(numbers) & set(self.messages)
        for number in gone:
            del self.messages[number]
        if way == "archive":
            self.archived |= gone

    def remove_read(self) -> None:
        """What one read gave, settled together: the way most clients go."""
        got = [n for (n,) in self.ask("select msg_id from pgmq.read(%s, 3600, 1000)", self.queue)]
        assert sorted(got) == self.visible()
        if self.chance.random() < 0.3 and got:
            assert self.ask("select pgmq.delete(%s, %s::bigint)", self.queue, got[0]) == [(True,)]
            assert self.ask("select count(*) from pgmq.set_vt(%s, %s::bigint[], 60)", self.queue, got) == [
                (len(got) - 1,)
            ]
            del self.messages[got[0]]
        answer = self.ask("select pgmq.delete(%s, %s::bigint[])", self.queue, got)
        assert {n for (n,) in answer} == set(got) & set(self.messages)
        for number in got:
            self.messages.pop(number, None)

    def set_vt(self) -> None:
        vt, numbers = self.chance.choice([0, 3600]), self.some_numbers()
        got = self.ask(
            "select msg_id, read_ct from pgmq.set_vt(%s, %s::bigint[], %s)", self.queue, numbers, vt
        )
        assert {n for n, _ in got} == set(numbers) & set(self.messages)
        for number, read_ct in got:
            assert self.messages[number].read_ct == read_ct
            self.messages[number].visible = vt == 0

    def read_by_group(self) -> None:
        way = self.chance.choice(["read_grouped", "read_grouped_rr", "read_grouped_head"])
        qty = self.chance.choice([1, 2, 5])
        got = self.ask(f"select msg_id, read_ct from pgmq.{way}(%s, 3600, %s)", self.queue, qty)
        heads: dict[str, int] = {}
        for number in sorted(self.messages):
            heads.setdefault(self.messages[number].group, number)
        free = [n for n in heads.values() if self.messages[n].visible]
        numbers = [n for n, _ in got]
        assert len(set(numbers)) == len(numbers) <= qty
        assert bool(numbers) == bool(free)
        if way == "read_grouped_head":
            assert len(numbers) == min(qty, len(free))
        for number, read_ct in got:
            message = self.messages[number]
            assert heads[message.group] in numbers
            message.read_ct += 1
            message.visible = False
            assert message.read_ct == read_ct

    def purge(self) -> None:
        if self.chance.random() < 0.2:
            assert self.ask("select pgmq.purge_queue(%s)", self.queue) == [(len(self.messages),)]
            self.messages.clear()

    def measure(self) -> None:
        [(length, visible)] = self.ask(
            "select queue_length, queue_visible_length from pgmq.metrics(%s)", self.queue
        )
        assert length == len(self.messages)
        # PGMQ measures by the time at which the transaction began.
        if self.connection.info.transaction_status == TransactionStatus.IDLE:
            assert visible == len(self.visible())
        assert self.ask(f"select msg_id, read_ct from pgmq.q_{self.queue} order by 1") == [
            (m.number, m.read_ct) for _, m in sorted(self.messages.items())
        ]
        assert {n for (n,) in self.ask(f"select msg_id from pgmq.a_{self.queue}")} == self.archived

    def step(self, *, sending: bool = True) -> None:
        often = [self.send, self.read, self.remove] if sending else [self.read, self.remove]
        rarely = [self.pop, self.remove_read, self.set_vt, self.read_by_group, self.purge, self.measure]
        self.chance.choice([*often, *often, *rarely])()

    def in_transaction(self) -> None:
        """Some steps at once, which happen together or not at all. Sends come last."""
        before = copy.deepcopy((self.messages, self.archived))
        kept = self.chance.random() < 0.6
        with self.connection.transaction(force_rollback=not kept):
            for _ in range(self.chance.randint(1, 6)):
                self.step(sending=False)
            self.measure()
            if self.chance.random() < 0.5:
                self.send()
                self.measure()
        if not kept:
            self.messages, self.archived = before


@pytest.mark.parametrize("seed", range(8))
def test_a_queue_does_what_the_model_does(
    sql: psycopg.Connection[Any], new_queue: Callable[[], str], seed: int
) -> None:
    model = Model(sql, new_queue(), seed)
    for _ in range(STEPS):
        if model.chance.random() < 0.15:
            model.in_transaction()
        else:
            model.step()
    model.measure()
