"""pgmb lake report: figures of log and lake, rules that find what is unusual and no more, a safe page."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from harness.month import BEGIN, END, PLANTED, fill
from harness.states import add_dead_letters
from pgmb.errors import InvalidArgument
from pgmb.lake.dead import DeadArchiver
from pgmb.lake.report import rules
from pgmb.lake.report.figures import (
    HOUR,
    Endpoint,
    Failing,
    FieldDay,
    Figures,
    KeyCount,
    KeyDay,
    Quantiles,
    Queue,
    Series,
    Volume,
    error_kind,
    quantiles,
)
from pgmb.lake.report.gather import Asked, Counting, collapsed, fields_of, gather, shape_of
from pgmb.lake.report.page import render
from pgmb.spark.source.queries import arrow_schema
from tests.lake.conftest import Lake
from tests.lake.test_cli import Run, on_spark, pgmb_lake  # noqa: F401

pa: Any = pyarrow

ORDERS = Series("main", "order.paid")
SINCE = datetime(2026, 3, 2, tzinfo=UTC)


def figures(days: int = 14, **given: Any) -> Figures:
    until = SINCE + timedelta(days=days)
    return Figures(since=SINCE, until=until, taken_at=until, streams=["main"], **given)


def hours(days: int, events: int, **other: int) -> dict[Series, dict[datetime, Volume]]:
    """The same in each hour, but for those that are named by their number: h7=100."""
    made = dict.fromkeys(range(days * 24), events) | {int(name[1:]): n for name, n in other.items()}
    return {ORDERS: {SINCE + n * HOUR: Volume(count, count) for n, count in made.items() if count}}


def judged(given: Figures) -> list[tuple[str, str]]:
    return [(one.rule, one.said) for one in rules.judge(given).anomalies]


def test_hours_are_compared_with_like_hours() -> None:
    assert judged(figures(hours=hours(14, 100))) == []
    assert judged(figures(hours=hours(14, 100, h30=240, h31=260))) == [
        ("spike", "2026-03-03 06:00 to 08:00: 500 events, usual are 200")
    ]
    assert judged(figures(hours=hours(14, 100, h30=150))) == [], "less than twice the usual"
    assert judged(figures(hours=hours(14, 100, h23=0, h24=4))) == [
        ("silence", "2026-03-02 23:00 to 2026-03-03 01:00: 4 events, usual are 200")
    ]
    assert judged(figures(hours=hours(14, 5, h40=0))) == [], "nothing is expected of five events"
    # A job that runs at night, weekends without events, and a topic that begins later are usual.
    night = {n: 0 for n in range(14 * 24) if n % 24 != 2}
    assert judged(figures(hours=hours(14, 900, **{f"h{n}": 0 for n in night}))) == []
    weekends = {n for n in range(14 * 24) if (SINCE + n * HOUR).weekday() >= 5}
    assert judged(figures(21, hours=hours(21, 400, **{f"h{n}": 0 for n in weekends}))) == []
    assert judged(figures(hours=hours(14, 100, **{f"h{n}": 0 for n in range(100)}))) == []


def test_what_cannot_be_judged_is_said() -> None:
    short = rules.judge(figures(3, hours=hours(3, 100, h30=900)))
    assert (short.anomalies, short.unjudged) == ([], [ORDERS])
    assert "too short to judge hours of order.paid" in render(figures(3, hours=hours(3, 100)))
    bursts = {f"h{n}": 900 for n in range(0, 14 * 24, 17)}
    uneven = rules.judge(figures(hours=hours(14, 100, **bursts)))
    assert (uneven.anomalies, uneven.irregular) == ([], [ORDERS])


def test_a_key_is_heavy_if_it_was_not_before() -> None:
    def days(**share: int) -> dict[Series, dict[date, KeyDay]]:
        made = dict.fromkeys(range(10), 30) | {int(name[1:]): n for name, n in share.items()}
        return {
            ORDERS: {
                (SINCE + timedelta(days=day)).date(): KeyDay(50, 1000, [KeyCount("c-1", n)])
                for day, n in made.items()
            }
        }

    assert judged(figures(key_days=days())) == []
    assert judged(figures(key_days=days(d4=400, d5=300))) == [
        (
            "heavy key",
            "2026-03-06 and 1 more days: key c-1 has 40% of the events, usual is 3.0% for the heaviest key",
        )
    ]
    always = {f"d{day}": 400 for day in range(10)}
    assert judged(figures(key_days=days(**always))) == [], "skew that is usual is in the table of keys"


def test_a_burst_of_one_error_is_found_among_others() -> None:
    failing = [Failing("main", "bill", None, name) for name in ("TimeoutError", "KeyError")]
    steady = {SINCE + n * HOUR: 3 for n in range(14 * 24)}
    assert judged(figures(dead={failing[0]: steady, failing[1]: steady})) == []
    burst = steady | {SINCE + 50 * HOUR: 40}
    (found,) = judged(figures(dead={failing[0]: steady, failing[1]: burst}))
    assert found[0] == "burst of errors"
    assert "40 dead letters with “KeyError”, usual are 3 per hour" in found[1]


def test_fields_that_appear_vanish_or_change_type_are_found() -> None:
    def rows(path: str, name: str, first: int, last: int, events: int = 100) -> list[FieldDay]:
        return [FieldDay((SINCE + timedelta(days=n)).date(), path, name, events) for n in range(first, last)]

    base = rows("", "object", 0, 10) + rows("id", "number", 0, 10)

    def found(*more: list[FieldDay]) -> list[tuple[str, str]]:
        return judged(figures(fields={ORDERS: base + [row for one in more for row in one]}))

    assert found() == []
    assert found(rows("country", "string", 4, 10)) == [
        ("field appeared", "2026-03-06: country is in 100% of the payloads, and was in none before")
    ]
    assert found(rows("country", "string", 0, 4, 50)) == [
        ("field vanished", "after 2026-03-05: country is in no payload, and was in 50% of them")
    ]
    assert found(rows("total", "number", 0, 5), rows("total", "string", 4, 10)) == [
        (
            "field changed type",
            "2026-03-06: total is a string in 100% of the payloads, and was a number before",
        )
    ]
    # Of an object that appears, its fields are not named too; nulls are no type; single events are no news.
    assert [rule for rule, _ in found(rows("a", "object", 4, 10), rows("a.b", "null", 4, 10))] == [
        "field appeared"
    ]
    assert found(rows("note", "string", 0, 10, 50), rows("note", "null", 5, 10, 50)) == []
    assert found(rows("odd", "string", 9, 10, 1)) == []
    assert found(rows("rare", "string", 2, 3, 1), rows("rare", "string", 8, 9, 1)) == []


def test_slow_endpoints_and_late_queues_are_named() -> None:
    seconds = Quantiles(100, 0.1, 9.0, 12.0, 15.0)
    endpoint = Endpoint("shop", "main", "q", "all", 15.0, 100, 3, seconds, seconds)
    queue = Queue("late", "main", 12, timedelta(hours=5), 0, 0, False)
    given = figures(
        endpoints=[endpoint, endpoint._replace(name="few", attempts=5)],
        queues=[queue, queue._replace(name="off", paused=True)],
    )
    assert [(one.rule, one.name) for one in rules.judge(given).anomalies] == [
        ("slow endpoint", "q, shop"),
        ("lag", "late"),
    ]


def test_errors_are_counted_by_kind() -> None:
    kinds = {
        error_kind(text)
        for text in (
            "Timeout after 12.5 s for order 'a-1'",
            "Timeout after 3 s for order 'b'",
            'Timeout\n after 1,000 s for order "x"',
        )
    }
    assert kinds == {"Timeout after … s for order …"}
    assert error_kind("no such id 0f8fad5b-d9cb-469f-a165-70867728950e") == "no such id …"
    assert error_kind("bad decade") == "bad decade"
    assert error_kind(None) == error_kind(" ") == "(no error given)"
    assert len(error_kind("x" * 999)) == 160
    assert quantiles([]) is None
    assert quantiles(range(1, 101)) == Quantiles(100, 50, 95, 99, 100)


def test_payloads_are_reduced_to_fields_and_types() -> None:
    def fields(payload: Any) -> set[tuple[str, str]]:
        return set(fields_of(shape_of(payload)))

    assert fields({"a": 1, "b": {"c": None}, "l": [{"p": 1.5}, {"p": "x"}, True]}) == {
        ("", "object"), ("a", "number"), ("b", "object"), ("b.c", "null"), ("l", "array"), ("l[]", "object"),
        ("l[].p", "number"), ("l[].p", "string"), ("l[]", "boolean"),
    }  # fmt: skip
    assert fields("text") == {("", "string")}
    assert shape_of({"a": 1, "b": "x", "c": []}) == shape_of({"a": 2.5, "b": "y", "c": []})
    deep: Any = 1
    for _ in range(50):
        deep = {"a": [deep]}
    assert len(fields(deep)) < 10
    # Names that are data do not become fields.
    counted = Counter({("t", 1, "", "object"): 500, ("t", 1, "by", "object"): 500})
    counted.update({("t", 1, f"by.id-{n}", "object"): 1 for n in range(500)})
    counted.update({("t", 1, f"by.id-{n}.x", "number"): 1 for n in range(500)})
    assert collapsed(counted) == {
        ("t", 1, "", "object"): 500, ("t", 1, "by", "object"): 500, ("t", 1, "by.*", "object"): 500,
    }  # fmt: skip


def test_the_page_is_alone_and_escapes_what_it_shows() -> None:
    evil = "<script>alert(1)</script>\"'&"
    series = Series("main", evil)
    given = figures(
        hours={series: {SINCE + n * HOUR: Volume(1000 if n == 30 else 100, 5000) for n in range(14 * 24)}},
        keys={series: KeyDay(3, 10, [KeyCount(evil, 5)])},
        fields={series: [FieldDay(SINCE.date(), evil, "string", 5), FieldDay(SINCE.date(), "", "object", 5)]},
        dead={Failing("main", "q", evil, evil): {SINCE: 30}},
        queues=[Queue(evil, "main", 1, timedelta(hours=2), 0, 0, False)],
        endpoints=[Endpoint(evil, "main", "q", "all", 1.0, 50, 1, Quantiles(50, 1, 2, 3, 4), None)],
    )
    page = render(given)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 8
    assert "default-src 'none'" in page
    assert re.findall(r"""\b(?:src|href|action)=|@import|url\(""", page) == []
    assert page.count("<svg") > 4
    assert "@page { size: A4" in page
    for rule in rules.RULES:
        assert f"<dt>{rule}</dt>" in page
    assert "Nothing is unusual" in render(figures())


def test_a_sample_of_payloads_is_parsed_and_all_events_are_counted() -> None:
    schema = arrow_schema(["seq", "topic", "key", "payload", "headers", "published_at"])
    day = [SINCE + timedelta(seconds=n) for n in range(8000)]
    columns = [
        list(range(1 << 40, (1 << 40) + 8000)), ["a", "b"] * 4000, ["k", None] * 4000, ['{"x": 1}'] * 8000,
        [None] * 8000, day,
    ]  # fmt: skip
    batch = pa.record_batch(columns, schema=schema)
    counting = Counting("main", 10)
    counting.add(batch.slice(0, 5000))
    counting.add(batch.slice(5000))
    rows = [row for counts in counting.counts() for row in counts.to_pylist()]
    assert sum(row["events"] for row in rows if row["kind"] == "hour") == 8000
    assert sum(row["bytes"] for row in rows if row["kind"] == "hour") == 8000 * 9 + 4000
    assert [row["events"] for row in rows if row["kind"] == "key"] == [4000]
    for topic in "ab":
        (parsed,) = [
            row["events"] for row in rows if (row["kind"], row["topic"], row["name"]) == ("field", topic, "x")
        ]
        assert 300 < parsed < 500
    unreadable = Counting("main", 1)
    unreadable.add(batch.slice(0, 1).set_column(3, schema.field("payload"), pa.array(['"\\ud800"'])))
    assert [row["type"] for counts in unreadable.counts() for row in counts.to_pylist()][-1] == "unreadable"


ATTEMPTS = """
insert into pgmb.attempt (endpoint, at, seq, event_id, topic, attempt, status, seconds, error)
select e.id, l.published_at + interval '3 s', l.seq, pgmb.derive_id(l.seq, l.published_at, s.salt), l.topic,
  1, 200, 0.5, case when l.place % 2 = 0 then 'status' end
from pgmb.endpoint e, pgmb.stream s,
  (select *, row_number() over () place from pgmb.log_main where topic = 'order.paid' limit 50) l
where s.name = 'main'
"""


@pytest.mark.minutes
@pytest.mark.new_database
@pytest.mark.timeout(600)
def test_a_month_of_log_and_lake_shows_what_was_planted(
    lake: Lake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_spark: Run,  # noqa: F811
) -> None:
    """Five anomalies are found, some in the lake and some in the log; the page and the command name them."""
    events = fill(lake.db, planted=True, segments=3)
    lake.db.execute("select pgmb.create_endpoint('shop', 'https://shop.example/', log => 'all')")
    lake.db.execute(ATTEMPTS)
    lake.archive()
    list(DeadArchiver(lake.dsn, "main").archive())
    lake.age()
    assert lake.dropped() == [0, 1]
    # Not archived.
    add_dead_letters(lake.db, [(END - HOUR, "late 7", END - 2 * HOUR)], "billing", attempt=3)
    taken: list[Figures] = []

    def seen(*given: Any, **options: Any) -> Figures:
        taken.append(gather(*given, **options))
        return taken[0]

    monkeypatch.setattr("pgmb.lake.report.gather.gather", seen)
    out = tmp_path / "report.html"
    code, said, error = on_spark(
        "report", "--from", "2026-09-01T00:00+00:00", "--to", "2026-10-01T00:59+00:00", "--out", str(out),
        "--json",
    )  # fmt: skip
    assert code == 0, error
    found = [(one["rule"], one["name"]) for one in json.loads(said)["unusual"]]
    assert (len(found), set(found)) == (5, PLANTED)
    assert all(f"<b>{name}</b>" in out.read_text() for _, name in PLANTED)
    (figures,) = taken
    assert (figures.since, figures.until, figures.streams) == (BEGIN, END, ["main"])
    by_topic = {
        series.topic: sum(one.events for one in line.values()) for series, line in figures.hours.items()
    }
    assert sum(by_topic.values()) == events
    assert {topic: key.events for (_, topic), key in figures.keys.items()} == by_topic
    assert {
        series.topic: sum(row.events for row in rows if not row.path)
        for series, rows in figures.fields.items()
    } == by_topic
    assert figures.dead[Failing("main", "billing", None, "late …")] == {END - HOUR: 1}
    assert sum(sum(one.values()) for one in figures.dead.values()) == lake.value(
        "select count(*) from pgmb.dead where died_at >= '2026-09-01' and died_at < '2026-10-01'"
    )
    (endpoint,) = figures.endpoints
    assert (endpoint.attempts, endpoint.failed) == (50, 25)
    assert endpoint.seconds == Quantiles(50, 0.5, 0.5, 0.5, 0.5)
    assert endpoint.delay is not None
    assert (endpoint.delay.events, round(endpoint.delay.median, 2)) == (25, 3.0)


def test_a_report_needs_an_hour_and_streams_that_exist(lake: Lake) -> None:
    with pytest.raises(InvalidArgument, match="a whole hour"):
        gather(None, lake.dsn, Asked(since=BEGIN, until=BEGIN + timedelta(minutes=30)))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no stream nothing"):
        gather(None, lake.dsn, Asked(since=BEGIN, until=END, streams=["nothing"]))  # type: ignore[arg-type]
