"""Dead letters go to a table of their own: each once, verified, and kept when they leave the database."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars
import psycopg
import pytest
from deltalake import DeltaTable

from harness.lake import DEAD_STEPS, Killed, MortalDead
from harness.segments import fill
from harness.states import forget_archiving, queue_names, queue_number
from pgmb.errors import Conflict, ForeignTable, VerificationFailed
from pgmb.lake.archive import init
from pgmb.lake.dead import DeadArchived, DeadArchiver, dead_lake, digest_of
from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database]

COLUMNS = ["id", "queue", "died_at", "attempt", "error", "seq", "event_id", "topic", "key", "payload"]
COLUMNS += ["headers", "published_at", "endpoint"]


class Dead:
    """The queues q and r of a stream with a lake, whose events die."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.db = lake, lake.db
        self.url = f"{lake.url}_dead"
        self.db.execute("select pgmb.create_queue('q', '{#}'), pgmb.create_queue('r', '{order.1}')")

    def die(self, events: int, queue: str = "q") -> None:
        fill(self.db, events)
        self.db.execute(
            "select pgmb.bury(lease, error => 'it failed: ключ')"
            " from (select distinct lease from pgmb.receive(%s, 10000)) leases",
            [queue],
        )

    def archive(self, **options: Any) -> list[DeadArchived]:
        return list(DeadArchiver(self.lake.dsn, "main", **options).archive())

    def in_database(self, where: str = "true") -> list[tuple[Any, ...]]:
        names = {queue_number(self.db, name): name for name in queue_names(self.db)}
        rows = self.db.execute(
            "select d.id, d.queue, d.died_at, d.attempt, d.error, d.seq, d.event_id::text, d.topic, d.key,"
            " d.payload::text, d.headers::text, d.published_at, d.endpoint::text"
            f" from pgmb.dead d where {where} order by d.id".encode()
        ).fetchall()
        return [(id, names[queue], *rest) for id, queue, *rest in rows]

    def in_table(self) -> list[tuple[Any, ...]]:
        """By a reader that shares no code with the archiver."""
        return polars.read_delta(self.url).select(COLUMNS).sort("id").rows()

    def count(self, where: str) -> int:
        return int(self.lake.value(f"select count(*) from pgmb.dead where {where}"))


@pytest.fixture
def dead(lake: Lake) -> Dead:
    return Dead(lake)


def test_dead_letters_of_all_queues_are_in_the_table_once(dead: Dead) -> None:
    assert dead.archive() == []
    dead.die(200)
    dead.die(0, "r")
    wanted = dead.in_database()
    assert {row[1] for row in wanted} == {"q", "r"}
    done = dead.archive(batch_letters=90)
    assert [(one.batch, one.dead_letters, one.adopted) for one in done] == [
        (1, 90, False),
        (2, 90, False),
        (3, len(wanted) - 180, False),
    ]
    assert dead.in_table() == wanted
    assert dead.count("archived_at is null") == 0
    assert dead.archive() == []
    dead.die(5)
    assert [one.dead_letters for one in dead.archive()] == [5]
    assert dead.in_table() == dead.in_database()
    assert dead.in_database()[0][9] == wanted[0][9]


def test_a_letter_that_dies_in_a_long_transaction_is_in_a_later_batch(dead: Dead, connect: Any) -> None:
    """Ids are drawn before commits: the highest one that is archived says nothing of lower ones."""
    fill(dead.db, 3)
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute(
        "select pgmb.bury(lease, error => 'late') from (select distinct lease from pgmb.receive('q', 2)) l"
    )
    dead.die(0, "r")
    dead.die(20, "r")
    assert dead.archive()
    lowest = min(row[0] for row in dead.in_table())
    late.commit()
    dead.archive()
    assert min(row[0] for row in dead.in_table()) < lowest
    assert dead.in_table() == dead.in_database()


def test_what_is_sent_back_or_dropped_stays_in_the_table_and_dies_again_as_another(dead: Dead) -> None:
    dead.die(4)
    first, second, third, fourth = (row[0] for row in dead.in_database())
    dead.db.execute("select pgmb.redrive('q', %s)", [[first]])
    dead.db.execute("select pgmb.drop_dead('q', %s)", [[second]])
    before = dead.in_database()
    dead.archive()
    assert dead.in_table() == before, "what left before is not in it"
    dead.db.execute("select pgmb.drop_dead('q', %s)", [[third]])
    dead.db.execute("select pgmb.redrive('q', %s)", [[fourth]])
    assert dead.archive() == []
    assert dead.in_table() == before
    dead.die(0)
    again = dead.in_database()
    assert len(again) == 2
    assert {row[0] for row in again}.isdisjoint({first, second, third, fourth})
    dead.archive()
    assert dead.in_table() == [*before, *again]


def test_only_what_is_verified_is_dropped(dead: Dead) -> None:
    dead.die(10)
    init(dead.lake.dsn, "main", dead.lake.url, keep_dead="0 s")
    dead.db.execute("select pgmb.maintain()")
    assert dead.count("true") == 10
    dead.archive()
    wanted = dead.in_database()
    dead.die(3)
    dead.db.execute("select pgmb.maintain()")
    assert dead.count("true") == 3
    assert dead.in_table() == wanted
    # Without a limit the database keeps them.
    init(dead.lake.dsn, "main", dead.lake.url, keep_dead="-1 s")
    dead.archive()
    dead.db.execute("select pgmb.maintain()")
    assert dead.count("archived_at is not null") == 3


def test_what_a_killed_archiver_left_is_taken_up(dead: Dead) -> None:
    init(dead.lake.dsn, "main", dead.lake.url, keep_dead="0 s")
    kept: list[tuple[Any, ...]] = []
    for step in DEAD_STEPS:
        dead.die(30)
        wanted = dead.in_database()
        end_after(dead, step)
        dead.db.execute("select pgmb.maintain()")
        ended = step == "settle"
        assert dead.count("true") == (0 if ended else len(wanted)), "only what was verified is dropped"
        # One of them leaves the database before the next run.
        gone = [] if ended else [wanted[0][0]]
        dead.db.execute("select pgmb.drop_dead('q', %s::bigint[])", [gone])
        adopted = step in ("commit", "verify")
        assert [one.adopted for one in dead.archive()] == ([] if ended else [adopted]), step
        kept += wanted if adopted or ended else wanted[1:]
        assert dead.in_table() == kept, step
        assert dead.lake.value("select count(*) from pgmb.dead_batch where verified_at is null") == 0
        dead.db.execute("select pgmb.maintain()")
        assert dead.count("true") == 0


def end_after(dead: Dead, step: str) -> None:
    """By SIGKILL where the table and the database differ, otherwise in this process."""
    if step == "commit":
        command = [sys.executable, "-m", "harness.lake", dead.lake.dsn, "main", "--dead", "--die-after", step]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    else:
        archiver = MortalDead(dead.lake.dsn, "main")
        archiver.die_after, archiver.here = step, True
        with pytest.raises(Killed):
            list(archiver.archive())
    dead.lake.await_end_of_archivers()


def test_of_two_archivers_one_commits(dead: Dead) -> None:
    """Each planned the same dead letters; the table refuses the second."""
    dead.die(6)
    other = DeadArchiver(dead.lake.dsn, "main")
    done: list[bool] = []

    class First(DeadArchiver):
        def commit(self, *given: Any) -> bool:
            if not done:
                # Without the lock, which this one holds.
                done.append(_commit(other, dead))
            return super().commit(*given)

    assert [(one.batch, one.adopted) for one in First(dead.lake.dsn, "main").archive()] == [(2, True)]
    assert done == [True]
    assert dead.in_table() == dead.in_database()


def _commit(archiver: DeadArchiver, dead: Dead) -> bool:
    table = archiver.open(dead_lake(dead.db, "main"))
    batch = archiver.plan(dead.db)
    assert batch is not None
    return archiver.commit(table, batch, archiver.write(table.storage, batch))


def test_a_file_that_is_damaged_keeps_its_dead_letters_in_the_database(dead: Dead) -> None:
    init(dead.lake.dsn, "main", dead.lake.url, keep_dead="0 s")
    dead.die(40)

    class Damaging(DeadArchiver):
        def commit(self, *given: Any) -> bool:
            done = super().commit(*given)
            for path in Path(dead.url).glob("date=*/*.parquet"):
                data = bytearray(path.read_bytes())
                data[len(data) // 3] ^= 255
                path.write_bytes(data)
            return done

    with pytest.raises(VerificationFailed):
        list(Damaging(dead.lake.dsn, "main").archive())
    with pytest.raises(VerificationFailed):
        dead.archive()
    dead.db.execute("select pgmb.maintain()")
    assert dead.count("archived_at is null") == 40
    wanted = dead.in_database()
    done = list(DeadArchiver(dead.lake.dsn, "main").archive(repair=True))
    assert [(one.batch, one.dead_letters) for one in done] == [(2, 40)]
    assert dead.in_table() == wanted
    # Nothing may be left of such a batch.
    dead.die(2)
    with pytest.raises(VerificationFailed):
        list(Damaging(dead.lake.dsn, "main").archive())
    dead.db.execute("select pgmb.drop_dead('q')")
    damaged = list(DeadArchiver(dead.lake.dsn, "main").archive(repair=True))
    assert [one.dead_letters for one in damaged] == [0]
    assert dead.archive() == []


def test_a_database_from_a_backup_and_another_table_are_refused(dead: Dead, tmp_path: Path) -> None:
    dead.die(3)
    dead.archive()
    dead.db.execute("delete from pgmb.dead_batch")
    forget_archiving(dead.db)
    with pytest.raises(ForeignTable, match="did not plan"):
        list(DeadArchiver(dead.lake.dsn, "main").archive(repair=True))
    assert len(dead.in_table()) == 3
    dead.db.execute("select pgmb.create_stream('other')")
    with pytest.raises(Conflict, match="would lie in the folder"):
        init(dead.lake.dsn, "other", str(tmp_path / "other"), dead_url=dead.url)
    assert DeltaTable(dead.url).metadata().description == "Dead letters of stream main, archived by pgmb"


def test_the_database_compares_what_was_read_back_with_its_plan(dead: Dead) -> None:
    dead.die(3)
    batch = DeadArchiver(dead.lake.dsn, "main").plan(dead.db)
    assert batch is not None
    right = digest_of(batch.letters)
    for number, count, digest in ((1, 3, b"other"), (1, 2, right), (1, 0, b""), (2, 3, right)):
        with pytest.raises(psycopg.Error) as refused:
            dead.db.execute("select pgmb.record_dead('main', %s, %s, %s, 0)", [number, count, digest])
        assert refused.value.sqlstate == "MB062"
    assert dead.count("archived_at is null") == 3
    for recorded in (True, False):
        row = dead.db.execute("select pgmb.record_dead('main', 1, 3, %s, 0)", [right]).fetchone()
        assert row == (recorded,)
    assert dead.count("archived_at is null") == 0
