"""Whatever is changed, added, left out or moved between events changes the digest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from pgmb.lake import digest
from pgmb.lake.events import FILE_SCHEMA
from pgmb.spark.source.rows import derived_ids, uuid_texts

SALT = 17
AT = datetime(2026, 1, 31, 10, tzinfo=UTC)
CHANGES: dict[str, list[tuple[Any, Any]]] = {
    "seq": [(4095, 4097)],
    "xid": [(1, 2)],
    "id": [
        ("", "00000000-0000-0000-0000-000000000001"),
        ("", None),
        ("00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-0000-00000000000A"),
        ("00000000-0000-0000-0000-00000000000a", "00000000-0000-0000-00000000000-0000a"),
        ("0" * 36, "?" * 36),
    ],
    "topic": [("a", "b"), ("a", "aa")],
    "key": [("k", "l"), ("k", None), ("k", ""), (None, "")],
    "payload": [("1", "2"), (f'"{"x" * 2000}"', f'"{"x" * 1999}y"'), (f'"{"x" * 1022}"', f'"{"x" * 1023}"')],
    "headers": [("{}", None), (None, "null"), ('{"a":1}', '{"a": 1}'), (f'{{"a":"{"é" * 700}"}}', None)],
    "published_at": [(AT, AT + timedelta(microseconds=1))],
}


def events(**first: Any) -> Any:
    """Two events of which the first has these values."""
    common = {
        "xid": 1,
        "id": "",
        "topic": "a",
        "key": "k",
        "payload": "1",
        "headers": None,
        "published_at": AT,
    }
    rows: list[dict[str, Any]] = [{"seq": 4095, **common, **first}, {"seq": 4200, **common}]
    made = pa.Table.from_pylist(rows, schema=FILE_SCHEMA)
    derived = uuid_texts(derived_ids(made.column("seq"), made.column("published_at"), SALT)).to_pylist()
    ids = [own if row["id"] == "" else row["id"] for row, own in zip(rows, derived, strict=True)]
    return made.set_column(2, FILE_SCHEMA.field("id"), pa.array(ids))


def digested(*parts: Any) -> Any:
    blocks = digest.BlockDigests(SALT)
    for part in parts:
        blocks.add(part)
    return digest.segments(blocks.blocks())


@pytest.mark.parametrize(
    ("column", "before", "after"),
    [(name, before, after) for name, pairs in CHANGES.items() for before, after in pairs],
)
def test_a_changed_field_changes_the_digest(column: str, before: Any, after: Any) -> None:
    assert digested(events(**{column: before})) != digested(events(**{column: after}))
    assert digested(events(**{column: before})) == digested(events(**{column: before}))


def test_events_that_are_missing_or_there_twice_change_the_digest() -> None:
    both = events()
    assert digested(both.slice(0, 1)) != digested(both) != digested(both.slice(1))
    assert digested(both, both.slice(1)) != digested(both)


def test_what_lies_between_two_values_cannot_move() -> None:
    """The bytes of a column are the same, but not where its values end."""
    apart = [events(key=key).slice(0, 1) for key in ("ab", "a")]
    rest = [events(seq=4200, key=key).slice(0, 1) for key in ("c", "bc")]
    assert digested(apart[0], rest[0]) != digested(apart[1], rest[1])


def test_batches_may_end_anywhere() -> None:
    whole = pa.concat_tables([events(seq=n).slice(0, 1) for n in range(4000, 4200)])
    parts = [whole.slice(begin, 7) for begin in range(0, 200, 7)]
    assert digested(*parts) == digested(whole)
    assert digested(*(part.combine_chunks() for part in parts)) == digested(whole)
