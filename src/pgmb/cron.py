"""When a cron expression falls due, in a time zone. Read by the library cronsim. No I/O.

Five fields as in Debian's cron: minute, hour, day of month, month, day of week; a sixth may come before them,
the second. In the hour that a change to summer time leaves out, what names a time of day falls due right
after it; in the hour that comes twice, it falls due once. What runs every so many minutes goes by elapsed
time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from pgmb.errors import InvalidArgument

_MOST_CHARACTERS = 200
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
        return next(CronSim(cron, moment.astimezone(zone))).astimezone(UTC)
    except (StopIteration, OverflowError):
        return None
    except _SYNTAX_ERRORS as error:
        refused = InvalidArgument(f"not a cron expression: {cron!r}: {str(error) or 'cannot be read'}")
        refused.advise("Five fields: minute, hour, day of month, month, day of week; or six, seconds first.")
        raise refused from error


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
