"""A stream with a lake in a folder of the test."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from deltalake import DeltaTable

from harness.lake import Here, Mortal, archived
from harness.s3 import s3
from harness.segments import fill, seal
from pgmb.lake.archive import Archived, Sizes, init

DB = psycopg.Connection[Any]


class Lake:
    """The stream main, and its table."""

    def __init__(self, dsn: str, db: DB, url: str, options: dict[str, str] | None = None) -> None:
        self.dsn, self.db, self.url, self.options = dsn, db, url, options
        init(dsn, "main", url, "1 hour", options)

    def publish(self, events: int, *, sealed: bool = True) -> None:
        """Publish to the open segment, and seal it."""
        fill(self.db, events, base=self.value("select count(*) from pgmb.log_main"))
        if sealed:
            seal(self.db)

    def archiver(self, run: Any = None, **sizes: int) -> Mortal:
        return Mortal(self.dsn, "main", run or Here(), options=self.options, sizes=Sizes(**sizes))

    def archive(self, run: Any = None, *, repair: bool = False, **sizes: int) -> list[Archived]:
        return archived(self.archiver(run, **sizes), repair=repair)

    def table(self) -> DeltaTable:
        return DeltaTable(self.url, storage_options=self.options)

    def files(self) -> list[Path]:
        """The files of the table, which lies in a folder."""
        return [Path(uri) for uri in self.table().file_uris()]

    def stored(self) -> list[tuple[Any, ...]]:
        """Every event of the table, as the log has them."""
        found = self.table().to_pyarrow_table(columns=COLUMNS).sort_by("seq").to_pydict()
        return list(zip(*(found[name] for name in COLUMNS), strict=True))

    def logged(self) -> list[tuple[Any, ...]]:
        """Every event of sealed segments in the log."""
        return self.db.execute(
            "select e.seq, e.xid::text::bigint,"
            " coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, s.salt))::text,"
            " e.topic::text, e.key::text, e.payload::text, e.headers::text, e.published_at"
            " from pgmb.log_main e, pgmb.stream s, pgmb.segment g"
            " where s.name = 'main' and g.stream = s.id and g.number = e.seq >> 40"
            " and g.sealed_at is not null"
            " order by e.seq"
        ).fetchall()

    def is_exact(self) -> bool:
        """Whether the table holds each sealed event once, and nothing else."""
        return self.stored() == self.logged()

    def value(self, statement: str) -> Any:
        row = self.db.execute(statement.encode()).fetchone()
        return None if row is None else row[0]

    def age(self) -> None:
        """Make everything old enough for retention, and let it run."""
        self.db.execute(
            "update pgmb.segment set closed_at = closed_at - interval '2 hours',"
            " last_published_at = last_published_at - interval '2 hours'"
        )
        deadline = time.monotonic() + 60
        while self.value("select count(*) from pgmb.droppable()"):
            # Autovacuum may hold a segment for a moment.
            self.db.execute("select pgmb.drop_segments()")
            assert time.monotonic() < deadline, "segments cannot be dropped"

    def await_end_of_archivers(self, name: str = "pgmb lake") -> None:
        """Wait until the sessions of a killed archiver have ended: until then they hold its lock."""
        sessions = (
            "select count(*) from pg_stat_activity"
            f" where datname = current_database() and application_name = '{name}'"
        )
        deadline = time.monotonic() + 60
        while self.value(sessions):
            assert time.monotonic() < deadline, "an archiver is still connected"
            time.sleep(0.01)

    def dropped(self) -> list[int]:
        rows = self.db.execute("select number from pgmb.segment where dropped_at is not null order by 1")
        return [number for (number,) in rows]


COLUMNS = ["seq", "xid", "id", "topic", "key", "payload", "headers", "published_at"]


def plain_digest(events: Iterable[tuple[Any, ...]], derived: set[str]) -> bytes:
    """The digest by its definition, event by event, without Arrow and without the product's code."""
    blocks: dict[int, list[bytes]] = {}
    for seq, xid, id, topic, key, payload, headers, at in events:
        since_2000 = round((at.timestamp() - 946_684_800) * 1_000_000)
        values: list[bytes | None] = [struct.pack(">q", number) for number in (seq, xid, since_2000)]
        values.append(None if id in derived else UUID(id).bytes)
        values += [None if text is None else text.encode() for text in (topic, key)]
        for text in (payload, headers):
            encoded = None if text is None else text.encode()
            values.append(_hashed(encoded) if encoded and len(encoded) > 1024 else encoded)
        columns = blocks.setdefault(seq >> 12, [b""] * 8)
        for place, value in enumerate(values):
            columns[place] += struct.pack(">i", -1 if value is None else len(value)) + (value or b"")
    return _hashed(*(_hashed(*map(_hashed, blocks[number])) for number in sorted(blocks)))


def _hashed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


@pytest.fixture
def lake(dsn: str, db: DB, tmp_path: Path) -> Lake:
    return Lake(dsn, db, str(tmp_path / "lake"))


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, str]]:
    """The options of an S3 server with the bucket BUCKET; use a folder of your own."""
    with s3() as started:
        yield started
