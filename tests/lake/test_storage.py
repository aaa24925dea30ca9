"""The lake on S3: the same promises as on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars
import pytest

import pgmb
from harness.lake import Here
from harness.s3 import BUCKET, bucket
from pgmb.errors import VerificationFailed
from pgmb.lake.dead import DeadArchiver
from pgmb.lake.storage import Storage
from tests.lake.conftest import DB, Lake

pytestmark = [pytest.mark.new_database]


@pytest.fixture
def on_s3(dsn: str, db: DB, s3_options: dict[str, str], request: pytest.FixtureRequest) -> Lake:
    return Lake(dsn, db, f"s3://{BUCKET}/{request.node.name}", s3_options)


def test_events_and_dead_letters_are_archived_on_s3_and_read_from_there(on_s3: Lake) -> None:
    db = on_s3.db
    db.execute("select pgmb.create_queue('q', '{order.1}')")
    on_s3.publish(100)
    on_s3.publish(50)
    db.execute("select pgmb.bury(lease, error => 'no') from (select lease from pgmb.receive('q') limit 1) l")
    letters = db.execute("select id, seq, payload::text from pgmb.dead order by id").fetchall()
    (done,) = on_s3.archive()
    assert (done.segments, done.events) == ([0, 1], 150)
    assert on_s3.is_exact()
    wanted = [(row[0], row[5]) for row in on_s3.stored()]
    (batch,) = DeadArchiver(on_s3.dsn, "main", options=on_s3.options).archive()
    assert batch.dead_letters == len(letters) > 0
    dead = polars.read_delta(f"{on_s3.url}_dead", storage_options=on_s3.options)
    assert dead.select("id", "seq", "payload").sort("id").rows() == letters
    db.execute("select pgmb.alter_stream('main', keep_for => '1 hour', drop_unread => true)")
    on_s3.age()
    assert on_s3.dropped() == [0, 1]
    access = pgmb.LakeAccess(options=on_s3.options or {})
    with (
        pgmb.connect(on_s3.dsn, max_size=2) as broker,
        broker.tail(after=broker.earliest(), follow=False, lake=access) as events,
    ):
        assert [(event.seq, event.raw.decode()) for event in events] == wanted


def test_two_archivers_on_s3_commit_once(on_s3: Lake) -> None:
    on_s3.publish(200)

    class Second(Here):
        others = 0

        def __call__(self, work: Any, tasks: Any, result: Any) -> Any:
            done = super().__call__(work, tasks, result)
            if self.others == 0:
                self.others = 1
                other = on_s3.archiver()
                other.unlocked = True
                assert [one.events for one in other.archive()] == [200]
            return done

    assert on_s3.archive(Second()) == []
    assert on_s3.is_exact()


def test_a_missing_object_blocks_the_drop(on_s3: Lake, s3_options: dict[str, str]) -> None:
    on_s3.publish(200)
    archiver = on_s3.archiver()
    verify = archiver.verify

    def without_objects(*given: Any) -> Any:
        for found in bucket(s3_options).objects.filter(Prefix=on_s3.url.rpartition("/")[2] + "/date="):
            found.delete()
        return verify(*given)

    archiver.verify = without_objects  # type: ignore[method-assign]
    with pytest.raises(VerificationFailed, match="segment 0"):
        list(archiver.archive())
    on_s3.age()
    assert on_s3.dropped() == []
    assert [one.events for one in on_s3.archive(repair=True)] == [200]
    assert on_s3.is_exact()


def test_paths_and_urls_of_folders_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = Storage(str(tmp_path / "a b"))
    assert (
        Storage.at("a b")
        == Storage.at(f"file://{tmp_path}/a%20b/")
        == Storage.at(f"{tmp_path}/a b/")
        == wanted
    )
    assert wanted.folder == tmp_path / "a b"
    assert Storage.at("s3://bucket/x/").url == "s3://bucket/x"
    assert Storage.at("s3://bucket/x").folder is None
