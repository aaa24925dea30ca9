"""When a cron expression falls due, in a time zone. No I/O.

Five fields as in Debian's cron: minute, hour, day of month, month, day of week; a sixth may come before them,
the second. The library cronsim reads them.

An expression names times of day if neither its minute nor its hour begins with a star. Where the clock goes
back, such a time is due when it occurs first. Where the clock goes forward, all times that do not exist are
due once, at the end of the gap. Every other expression is due whenever the clock shows one of its times: it
follows elapsed time, is not due in a gap, and is due twice at times that occur twice.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from pgmb.errors import InvalidArgument

_MOST_CHARACTERS = 200
_NO_TIME = timedelta(0)
_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
_LONGEST_CHANGE = timedelta(hours=24)
"""No zone set its clocks forward or back by more."""
_SYNTAX_ERRORS = (CronSimError, AssertionError, ValueError, TypeError, IndexError)
"""What cronsim raises at an expression that it does not understand."""


def next_after(cron: str, timezone: str, moment: datetime) -> datetime | None:
    """The first due time after `moment`, or None if there is none within 50 years."""
    return _following(cron, _zone(timezone), moment)


def first_after(cron: str, timezone: str, moment: datetime) -> datetime:
    """The first due time after `moment`; InvalidArgument if there is none."""
    found = next_after(cron, timezone, moment)
    if found is None:
        raise InvalidArgument(f"cron expression {cron!r} never falls due")
    return found


def newest(cron: str, timezone: str, due: datetime, now: datetime) -> datetime:
    """The last due time from `due`, which is one, up to `now`."""
    zone = _zone(timezone)
    # Only the end is walked, however long ago `due` was.
    window = timedelta(minutes=1)
    while now - window > due:
        found = _following(cron, zone, now - window)
        if found is not None and found <= now:
            due = now - window
            break
        window *= 2
    last = due
    found = _following(cron, zone, due)
    while found is not None and found <= now:
        last = found
        found = _following(cron, zone, found)
    return last


def _following(cron: str, zone: tzinfo, moment: datetime) -> datetime | None:
    if len(cron) > _MOST_CHARACTERS:
        raise InvalidArgument(f"a cron expression has at most {_MOST_CHARACTERS} characters, got {len(cron)}")
    try:
        if zone is UTC:
            return next(CronSim(cron, moment.astimezone(UTC)))
        following = _time_of_day if _names_times_of_day(cron) else _shown
        return following(cron, zone, moment.astimezone(UTC))
    except (StopIteration, OverflowError):
        return None
    except _SYNTAX_ERRORS as error:
        refused = InvalidArgument(f"not a cron expression: {cron!r}: {str(error) or 'cannot be read'}")
        refused.advise("Five fields: minute, hour, day of month, month, day of week; or six, seconds first.")
        raise refused from error


def _names_times_of_day(cron: str) -> bool:
    minute, hour = cron.split()[-5:-3] or ("*", "*")
    return not minute.startswith("*") and not hour.startswith("*")


def _time_of_day(cron: str, zone: tzinfo, moment: datetime) -> datetime:
    """The next due time of an expression that names times of day."""
    local = moment.astimezone(zone)
    start = local.replace(tzinfo=None, fold=0)
    if local.fold:
        # Every time of day that comes twice was due when it came first.
        before = start.replace(tzinfo=zone).utcoffset() or _NO_TIME
        changed = _change(zone, moment - _LONGEST_CHANGE, moment, last=True)
        start = max(start, (changed + before).replace(tzinfo=None) - _SECOND)
    for named in CronSim(cron, start):
        due = _first_shown(named, zone)
        if due > moment:
            return due
    raise StopIteration


def _first_shown(named: datetime, zone: tzinfo) -> datetime:
    """When the clock of a zone first shows this time, or goes over it."""
    due = named.replace(tzinfo=zone).astimezone(UTC)
    if due.astimezone(zone).replace(tzinfo=None) == named:
        return due
    return _change(zone, named.replace(tzinfo=zone, fold=1).astimezone(UTC), due)


def _shown(cron: str, zone: tzinfo, moment: datetime) -> datetime:
    """The next time at which the clock of a zone shows what an expression names."""
    local = moment.astimezone(zone)
    start = local.replace(tzinfo=None)
    offset = local.utcoffset() or _NO_TIME
    while True:
        # As if the clock were never changed, which holds up to its next change.
        due = (next(CronSim(cron, start)) - offset).replace(tzinfo=UTC)
        step = moment
        while step < due and (step.astimezone(zone).utcoffset() or _NO_TIME) == offset:
            step = min(step + _DAY, due)
        if (step.astimezone(zone).utcoffset() or _NO_TIME) == offset:
            return due
        moment = _change(zone, max(moment, step - _DAY), step)
        offset = moment.astimezone(zone).utcoffset() or _NO_TIME
        start = moment.astimezone(zone).replace(tzinfo=None) - _SECOND


def _change(zone: tzinfo, before: datetime, after: datetime, *, last: bool = False) -> datetime:
    """When, of two moments, the clock of a zone was changed: the first second with another offset."""
    offset = (after if last else before).astimezone(zone).utcoffset()
    before, after = before.replace(microsecond=0), after.replace(microsecond=0)
    while after - before > _SECOND:
        middle = before + timedelta(seconds=int((after - before).total_seconds()) // 2)
        if (middle.astimezone(zone).utcoffset() == offset) == last:
            after = middle
        else:
            before = middle
    return after


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        # cronsim takes its short ways only with this one.
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        refused = InvalidArgument(f"not a time zone: {name!r}")
        refused.advise("A name of the IANA database, for example Europe/Berlin.")
        raise refused from error
