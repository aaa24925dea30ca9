"""Typed tables of archived events: each event once, whatever happens to the projector and to the lake."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

from harness.lake import PROJECTION_STEPS, Here, Killed, MortalProjector
from harness.projections import ORDERS, Rows, erase, expected_and_held, publish
from harness.segments import seal
from pgmb.erasure import Eraser
from pgmb.errors import Conflict, InvalidArgument, ProjectionNotFound, VerificationFailed
from pgmb.lake.care import Keeper
from pgmb.lake.projection.columns import parse_columns
from pgmb.lake.projection.declaration import Declaration, drop, find, projections
from pgmb.lake.projection.projector import Projected, ProjectionSizes
from pgmb.lake.projection.table import declare
from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database]


class Orders:
    """The projection orders of a lake, with events that come in all kinds."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.chance, self._published = lake, random.Random(7), 0
        self.url = declare(lake.dsn, ORDERS)

    def publish(self, events: int) -> None:
        publish(self.lake.db, self.chance, events, base=self._published)
        self._published += events
        seal(self.lake.db)
        self.lake.archive()

    def projector(self, **sizes: int) -> MortalProjector:
        return MortalProjector(self.lake.dsn, "orders", Here(), sizes=ProjectionSizes(**sizes))

    def run(self, *, rebuild: bool = False, **sizes: int) -> list[Projected]:
        return list(self.projector(**sizes).run(rebuild=rebuild))

    def killed(self, step: str, *, rebuild: bool = False) -> None:
        """In this process: faults/lake/projections.py sends SIGKILL."""
        dying = self.projector()
        dying.die_after, dying.here = step, True
        with pytest.raises(Killed):
            list(dying.run(rebuild=rebuild))

    def exact(self) -> Rows:
        """The rows of the table, which are those that DuckDB makes of the events of the lake."""
        wanted, found = expected_and_held(self.lake.url, self.url)
        assert found == wanted
        assert len(wanted) > 0
        return found

    def rows(self) -> list[dict[str, Any]]:
        return DeltaTable(self.url).to_pyarrow_table().to_pylist()


@pytest.fixture
def orders(lake: Lake) -> Orders:
    return Orders(lake)


def test_each_archived_event_is_projected_once_and_what_does_not_fit_is_rescued(orders: Orders) -> None:
    assert orders.run() == []
    orders.publish(400)
    orders.publish(0)
    orders.publish(300)
    done = orders.run(commit_bytes=1)
    assert [one.segment for one in done] == [1, 2], "a commit ends with a whole segment"
    assert orders.run() == []
    orders.publish(100)
    (last,) = orders.run()
    rows = orders.exact()
    (told,) = projections(orders.lake.dsn)
    assert (told.segment, told.upto, told.rows) == (3, 3, len(rows))
    assert told.rescued == last.rescued == sum(row[12] for row in rows) > 50
    assert told.url == f"{orders.lake.url}_orders" == orders.url
    log = "".join(path.read_text() for path in (Path(orders.url) / "_delta_log").glob("*.json"))
    assert "k1" not in log, "keys and values do not reach the table's log"
    assert "Łódź" not in log


def test_what_a_killed_projector_left_is_taken_up(orders: Orders) -> None:
    for number, step in enumerate([*PROJECTION_STEPS, "write", "commit"]):
        orders.publish(20)
        if number == len(PROJECTION_STEPS):
            Keeper(orders.lake.dsn, "main").compact(1 << 20)
        if number % 3 == 1:
            assert erase(orders.lake.url, f"k{number % 9}") > 0
        orders.killed(step, rebuild=number == 3)
    orders.run()
    orders.exact()
    assert orders.run() == []
    assert projections(orders.lake.dsn)[0].table_version == DeltaTable(orders.url).version()


def test_rows_of_erased_events_are_removed_and_others_are_left_alone(orders: Orders) -> None:
    orders.publish(200)
    orders.publish(200)
    orders.run(commit_bytes=1)
    before = set(DeltaTable(orders.url).file_uris())
    Keeper(orders.lake.dsn, "main").compact(1 << 20)
    assert [one.renewed for one in orders.run()] == [True]
    assert set(DeltaTable(orders.url).file_uris()) == before, "joined files have the same events"
    assert erase(orders.lake.url, "k3") > 0
    assert any(row["event_key"] == "k3" for row in orders.rows())
    assert [one.renewed for one in orders.run()] == [True]
    assert all(row[3] != "k3" for row in orders.exact())
    assert orders.run() == []


def test_an_erasure_while_a_projector_works_reaches_its_rows_too(orders: Orders) -> None:
    orders.publish(100)
    projector = orders.projector()
    write = projector.write

    def erase_meanwhile(found: Any, parts: Any) -> Any:
        if DeltaTable(orders.lake.url).version() == 1:
            assert erase(orders.lake.url, "k4") > 0, "of files that are not read yet"
        written = write(found, parts)
        if DeltaTable(orders.lake.url).version() == 2:
            assert erase(orders.lake.url, "k5") > 0, "of files that are read"
        return written

    projector.write = erase_meanwhile  # type: ignore[method-assign]
    assert [one.renewed for one in projector.run()] == [False, True]
    orders.exact()


def test_an_erasure_reaches_projections_at_once(orders: Orders) -> None:
    strict = msgspec.structs.replace(ORDERS, bad="fail")
    orders.publish(100)
    orders.run()
    counted = {one.name: one.events for one in Eraser(orders.lake.dsn, ["k2"]).count()}
    keyed = sum(row["event_key"] == "k2" for row in orders.rows())
    assert counted[orders.url] == keyed > 0
    erased = {one.name: one.events for one in Eraser(orders.lake.dsn, ["k2"]).erase("request 17").tables}
    assert erased[orders.url] == keyed
    assert all(row[3] is not None for row in orders.exact()), "tombstones have no rows"
    files = {str(path) for path in Path(orders.url).rglob("*.parquet")}
    assert files == set(DeltaTable(orders.url).file_uris()), "the old files are removed"
    assert orders.run() == []
    working = orders.projector().run()
    orders.publish(10)
    next(working)
    with pytest.raises(Conflict, match="a projector works on orders"):
        Eraser(orders.lake.dsn, ["k3"]).erase("request 18")
    working.close()  # type: ignore[attr-defined]
    declare(orders.lake.dsn, strict, replace=True)
    Eraser(orders.lake.dsn, ["k3"]).erase("request 18")
    assert orders.rows() == [], "rows of another declaration are removed, and nothing is decoded"
    assert list(Path(orders.url).rglob("*.parquet")) == []
    declare(orders.lake.dsn, ORDERS, replace=True)
    orders.run()
    assert {row[3] for row in orders.exact()}.isdisjoint({"k3"})


def test_payloads_that_no_reader_takes_stop_neither_a_projection_nor_an_erasure(orders: Orders) -> None:
    """Years that Python does not have, nesting that it does not follow, numbers that are no double."""
    payloads = [
        '{"n": 1, "at": "0001-01-01T00:00:00+01:00"}',
        '{"n": 1, "at": "9999-12-31T23:59:59.999999-01:00"}',
        f'{{"n": 1, "extra": {"[" * 2000}{"]" * 2000}}}',
        '{"n": 1, "city": "\\ud800", "total": 1e400}',
        f'{{"n": {"9" * 5000}, "{"f" * 100_000}": 1}}',
    ]
    for payload in payloads:
        orders.lake.db.execute("select pgmb.publish('order.odd', %s, key => 'odd')", [payload])
    orders.publish(50)
    (done,) = orders.run()
    assert done.rescued >= len(payloads)
    odd = [row for row in orders.rows() if row["event_key"] == "odd"]
    assert [row["rescued"] for row in odd] == payloads
    assert all(row["rescue_reason"] for row in odd)
    Keeper(orders.lake.dsn, "main").compact(1 << 20)
    orders.run()
    Eraser(orders.lake.dsn, ["odd"]).erase("request 19")
    assert [row for row in orders.rows() if row["event_key"] == "odd"] == []
    orders.publish(50)
    assert orders.run()


def test_two_projectors_do_not_project_twice(orders: Orders) -> None:
    orders.publish(100)
    slow, fast = orders.projector(), orders.projector()
    slow.unlocked = fast.unlocked = True
    write = slow.write

    def overtaken(found: Any, parts: Any) -> Any:
        written = write(found, parts)
        list(fast.run())
        return written

    slow.write = overtaken  # type: ignore[method-assign]
    assert list(slow.run()) == []
    orders.exact()
    held_by = orders.projector().run()
    orders.publish(10)
    next(held_by)
    assert orders.run() == [], "one has the lock"


def test_another_declaration_rebuilds_the_table_in_one_commit(orders: Orders) -> None:
    orders.publish(100)
    orders.run()
    changed = msgspec.structs.replace(
        ORDERS, columns=parse_columns("n bigint, note string"), bad="drop", topics=["order.paid"]
    )
    with pytest.raises(Conflict, match="is declared differently"):
        declare(orders.lake.dsn, changed)
    assert declare(orders.lake.dsn, changed, replace=True) == orders.url
    with pytest.raises(Conflict, match="has changed"):
        orders.run()
    before = DeltaTable(orders.url).version()
    orders.killed("write", rebuild=True)
    assert DeltaTable(orders.url).version() == before
    (done,) = orders.run(rebuild=True)
    found = DeltaTable(orders.url).to_pyarrow_table()
    assert set(found.column_names) >= {"n", "note", "event_key"}
    assert "total" not in found.column_names
    assert found.num_rows == done.rows
    assert done.dropped > 0
    paid = [row for row in orders.lake.stored() if row[3] == "order.paid"]
    assert done.rows + done.dropped == len(paid)
    orders.publish(50)
    assert [one.segment for one in orders.run()] == [1]
    assert orders.run(rebuild=True)[0].rows == projections(orders.lake.dsn)[0].rows


def test_a_rebuild_that_was_killed_is_continued(orders: Orders) -> None:
    orders.lake.db.execute("select pgmb.publish('order.paid', '{\"n\": 1}', 'once')")
    for _ in range(4):
        orders.publish(30)
    orders.run()
    steps: list[int] = []

    def rebuilding(*, die_at: int = -1) -> list[Projected]:
        """With a commit's worth of one file, so that each is a step."""
        steps.clear()
        projector = orders.projector(commit_bytes=1, file_bytes=1)
        write = projector.write

        def counted(found: Any, parts: Any) -> Any:
            if len(steps) == die_at:
                raise Killed
            steps.append(len(parts))
            return write(found, parts)

        projector.write = counted  # type: ignore[method-assign]
        return list(projector.run(rebuild=True))

    with pytest.raises(Killed):
        rebuilding(die_at=3)
    assert steps == [1, 1, 1]
    # A file of the lake is replaced, and there are new ones.
    assert erase(orders.lake.url, "once") == 1
    orders.publish(30)
    with pytest.raises(Killed):
        rebuilding(die_at=0)
    before = DeltaTable(orders.url).version()
    (done,) = rebuilding()
    assert len(steps) == 3, "two were written before, from files that the lake still has"
    assert (done.table_version, done.segment) == (before + 1, 4), "one commit"
    orders.exact()
    assert not [path for path in Path(orders.url).rglob("_pgmb_rebuild/**/*") if path.is_file()]
    # Files that a vacuum removed are written again.
    with pytest.raises(Killed):
        rebuilding(die_at=3)
    orders.projector().vacuum(0)
    (again,) = rebuilding()
    assert (len(steps), again.rows) == (5, done.rows)


def test_a_payload_that_does_not_fit_can_stop_the_projection(orders: Orders) -> None:
    strict = Declaration(name="strict", topics=["x"], columns=parse_columns("n int"), bad="fail")
    declare(orders.lake.dsn, strict)
    orders.lake.db.execute("select pgmb.publish('x', '{\"n\": 1}'), pgmb.publish('x', '{\"n\": \"one\"}')")
    orders.publish(1)
    with pytest.raises(InvalidArgument, match=r"event \d+: n: Expected `int"):
        list(MortalProjector(orders.lake.dsn, "strict", Here()).run())
    assert DeltaTable(find(orders.lake.dsn, "strict").url).version() == 0


def test_drift_names_fields_that_appear_vanish_and_change_type(orders: Orders) -> None:
    drifting = Declaration(name="drifting", topics=["d"], columns=parse_columns("a int, b string, c json"))
    declare(orders.lake.dsn, drifting)
    for given in ('{"a": 1, "b": "x", "c": null}', '{"a": "1", "c": 2, "new": [1], "also": {}}'):
        orders.lake.db.execute("select pgmb.publish('d', %s::json)", [given])
        orders.publish(1)
        list(MortalProjector(orders.lake.dsn, "drifting", Here()).run())
    told = next(one for one in projections(orders.lake.dsn) if one.name == "drifting")
    assert [(one.field, one.change, one.detail) for one in told.drift] == [
        ("a", "changed type", "string instead of number"),
        ("also", "appeared", "object"),
        ("b", "vanished", "not in the newest segment"),
        ("new", "appeared", "array"),
    ]
    assert (told.rows, told.rescued) == (2, 1)


def test_damage_and_foreign_tables_are_refused(orders: Orders) -> None:
    orders.publish(10)
    orders.lake.files()[0].unlink()
    with pytest.raises(VerificationFailed, match="cannot be read"):
        orders.run()
    assert DeltaTable(orders.url).version() == 0
    with pytest.raises(Conflict, match="would lie in the folder"):
        declare(orders.lake.dsn, msgspec.structs.replace(ORDERS, name="other", url=orders.lake.url))
    assert [one.name for one in projections(orders.lake.dsn)] == ["orders"]
    assert drop(orders.lake.dsn, "orders") == orders.url
    assert drop(orders.lake.dsn, "orders") is None
    with pytest.raises(ProjectionNotFound):
        orders.run()
