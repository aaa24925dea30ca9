"""When cron expressions fall due: time zones, the hours of summer time, and what never does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faults.log import due_times
from pgmb import InvalidArgument, cron

pytestmark = pytest.mark.once


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def following(expression: str, timezone: str, start: str, count: int) -> list[str]:
    moment = at(start)
    found = []
    for _ in range(count):
        moment = cron.first_after(expression, timezone, moment)
        found.append(moment.isoformat(timespec="seconds").removesuffix("+00:00"))
    return found


def test_due_times_come_after_the_moment_given() -> None:
    assert following("*/5 * * * *", "UTC", "2026-01-01T00:00:00", 2) == [
        "2026-01-01T00:05:00",
        "2026-01-01T00:10:00",
    ]
    assert following("0 9 * * MON", "Europe/Berlin", "2026-01-01T00:00:00", 1) == ["2026-01-05T08:00:00"]


def test_six_fields_begin_with_the_second() -> None:
    assert following("*/20 * * * * *", "UTC", "2026-01-01T00:00:01.5", 3) == [
        "2026-01-01T00:00:20",
        "2026-01-01T00:00:40",
        "2026-01-01T00:01:00",
    ]


def test_a_time_of_day_that_summer_time_leaves_out_falls_due_right_after() -> None:
    # On 29 March 2026 Berlin goes from 02:00 to 03:00.
    assert following("30 2 * * *", "Europe/Berlin", "2026-03-27T12:00:00", 3) == [
        "2026-03-28T01:30:00",
        "2026-03-29T01:00:00",
        "2026-03-30T00:30:00",
    ]


def test_a_time_of_day_that_comes_twice_falls_due_once() -> None:
    # On 25 October 2026 Berlin goes from 03:00 back to 02:00.
    assert following("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00", 2) == [
        "2026-10-25T00:30:00",
        "2026-10-26T01:30:00",
    ]


def test_what_runs_every_half_hour_goes_by_elapsed_time() -> None:
    assert following("*/30 * * * *", "Europe/Berlin", "2026-10-24T23:59:00", 6) == [
        "2026-10-25T00:00:00",
        "2026-10-25T00:30:00",
        "2026-10-25T01:00:00",
        "2026-10-25T01:30:00",
        "2026-10-25T02:00:00",
        "2026-10-25T02:30:00",
    ]
    assert following("*/30 * * * *", "Europe/Berlin", "2026-03-29T00:29:00", 3) == [
        "2026-03-29T00:30:00",
        "2026-03-29T01:00:00",
        "2026-03-29T01:30:00",
    ]


def test_six_fields_keep_to_the_rules_of_five_when_clocks_change() -> None:
    assert following("0 30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00", 2) == [
        "2026-03-29T01:00:00",
        "2026-03-30T00:30:00",
    ]
    assert following("0 30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00", 2) == [
        "2026-10-25T00:30:00",
        "2026-10-26T01:30:00",
    ]
    # Many times that do not exist are due once, at the end of the gap.
    assert following("*/10 30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00", 2) == [
        "2026-03-29T01:00:00",
        "2026-03-30T00:30:00",
    ]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *", "*/30 * * * *"])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe", "America/New_York"])
def test_a_due_time_comes_after_the_moment_given_in_the_hour_that_comes_twice(
    expression: str, zone: str
) -> None:
    change = [*due_times.changes(ZoneInfo(zone), range(2026, 2027))]
    moments = [at + timedelta(minutes=minute) for at in change for minute in range(-90, 91, 10)]
    for moment in moments:
        assert cron.first_after(expression, zone, moment) > moment


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"])
def test_due_times_are_those_of_a_walk_over_the_wall_clock(zone: str) -> None:
    """`python -m faults due-times` compares more of them."""
    result = due_times.Result()
    for change in due_times.changes(ZoneInfo(zone), due_times.ZONES[zone][:1]):
        for expression in ("*/30 * * * *", "0 */2 * * *", "30 2 * * *", "15,45 1-3 * * *", "30 0 * * * *"):
            hours = timedelta(hours=3)
            due_times.compare(result, expression, zone, change - hours, change + hours)
    assert result.holds, str(result)


@pytest.mark.parametrize(
    "expression",
    ["", "x", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "0 0 31 2 *", "*/0 * * * *",
     "* * * * 1#6", "* * * * L", "1-0 * * * *", "é * * * *", "* * * * 1L/2", "\0 * * * *", "*" * 300],
)  # fmt: skip
def test_what_is_no_cron_expression_is_refused(expression: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        cron.first_after(expression, "UTC", at("2026-01-01T00:00:00"))
    assert "cron expression" in str(caught.value)


@pytest.mark.parametrize(
    "timezone", ["", "Mars/Phobos", "../../etc/passwd", "/etc/localtime", "a\0b", "Europe"]
)
def test_what_is_no_time_zone_is_refused(timezone: str) -> None:
    with pytest.raises(InvalidArgument, match="not a time zone"):
        cron.first_after("* * * * *", timezone, at("2026-01-01T00:00:00"))


def test_what_never_falls_due_is_refused_and_what_no_longer_does_ends() -> None:
    with pytest.raises(InvalidArgument, match="never falls due"):
        cron.first_after("0 0 29 2 *", "UTC", at("9997-01-01T00:00:00"))
    assert cron.next_after("* * * * *", "UTC", at("9999-12-31T23:59:30")) is None


@given(st.text(max_size=30) | st.from_regex(r"([0-9*/,L#-]{1,6} ){4,5}[0-9*/,LW#A-Z-]{1,6}", fullmatch=True))
@settings(max_examples=100, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = cron.next_after(text, "America/New_York", at("2026-03-01T00:00:00"))
    except InvalidArgument:
        return
    assert found is None or found > at("2026-03-01T00:00:00")


# Of each about how often it is due: some dozens of times are missed, across a change of the clocks too.
USUAL = {
    "* * * * *": timedelta(minutes=1),
    "*/7 * * * *": timedelta(minutes=7),
    "30 2 * * *": timedelta(days=1),
    "0 */6 * * *": timedelta(hours=6),
    "15 10 1 * *": timedelta(days=30),
    "*/10 * * * * *": timedelta(seconds=10),
    "0 0 * * SUN": timedelta(days=7),
}


@given(
    expression=st.sampled_from([*USUAL]),
    timezone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31), timezones=st.just(UTC)),  # noqa: DTZ001
    missed=st.floats(0, 40),
)
@settings(max_examples=40, deadline=None)
@example("*/10 * * * * *", "Europe/Berlin", datetime(2026, 10, 25, 0, 59, tzinfo=UTC), 40)
@example("* * * * *", "Europe/Berlin", datetime(2026, 3, 29, 0, 40, tzinfo=UTC), 40)
@example("* * * * *", "Australia/Lord_Howe", datetime(2026, 4, 4, 14, 50, tzinfo=UTC), 60)
def test_the_newest_is_the_last_of_all_that_were_missed(
    expression: str, timezone: str, start: datetime, missed: float
) -> None:
    due = cron.first_after(expression, timezone, start)
    now = due + missed * USUAL[expression]
    last = walked = due
    while walked <= now:
        last = walked
        walked = cron.first_after(expression, timezone, walked)
    assert cron.newest(expression, timezone, due, now) == last


def test_the_newest_of_years_is_found_at_once() -> None:
    due = at("2020-01-01T00:00:00")
    now = at("2026-06-01T12:00:00.5")
    assert cron.newest("* * * * * *", "Europe/Berlin", due, now) == at("2026-06-01T12:00:00")
