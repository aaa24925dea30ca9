"""Maintenance: whether ticker and janitor do their work, seen by what they leave undone."""

from __future__ import annotations

from collections.abc import Iterable

from pgmb.doctor.finding import Check, Look, Verdict, ago, fail, note, warn

_SERVE = (
    "Run `pgmb work` or `pgmb serve` as a role with pgmb_admin, or select pgmb.maintain(); every few seconds."
)


def _upkeep(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        since = row["unmaintained_for"]
        if since is not None and since > look.limits.unkept_for:
            leader = f"; process {row['leader']} did it last" if row["leader"] else ""
            yield warn(
                f"nobody does the upkeep: pgmb.maintain() did not run for {ago(since)}{leader};"
                " segments and settled claims pile up",
                _SERVE,
            )


def _ticker(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        waiting = row["unticked_for"]
        if waiting is not None and waiting > look.limits.unkept_for:
            yield warn(
                f"no ticker: {row['unticked']:,} events of stream {row['stream']} since the last tick,"
                f" the first {ago(waiting)} ago; nobody wakes sleepers, times to seek to are coarse",
                "Run `pgmb work` or `pgmb serve` as a role with pgmb_admin, or `pgmb ticker`.",
            )


def _janitor(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["standing_for"] is not None and row["standing_for"] > look.limits.standing_for:
            yield warn(f"maintenance is behind: {row['what']} for {ago(row['standing_for'])}", _SERVE)


def _steps(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["failing_for"] is not None and row["failing_for"] > look.limits.standing_for:
            for step in row["failing"]:
                yield fail(
                    f"maintenance fails, for {ago(row['failing_for'])}: {step}",
                    "Remove the cause of the error; maintain() tries the step again in every call.",
                )


def _segments(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["missing_segment"] is not None:
            yield fail(
                f"stream {row['stream']} accepts no events: its sequence points to segment"
                f" {row['missing_segment']}, which is missing, as after a dump during rotations",
                "Run: select pgmb.maintain();",
            )
        waiting = row["unsealed_for"]
        if waiting is not None and waiting > look.limits.standing_for:
            yield warn(
                f"segments of stream {row['stream']} are closed but not sealed, for {ago(waiting)}:"
                " a publisher's transaction is still open, or no janitor runs",
                f"End the oldest transaction (see old transactions). {_SERVE}",
            )


def _archive(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        waiting = row["unarchived_for"]
        if waiting is not None and waiting > look.limits.unarchived_for:
            yield warn(
                f"segments of stream {row['stream']} are sealed but not archived, for {ago(waiting)}:"
                " retention keeps them",
                f"Run pgmb lake archive, or: pgmb streams alter {row['stream']} --no-archive.",
            )


def _lake(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        lost = row["state"] == "damaged"
        yield (fail if lost else warn)(
            f"segment {row['segment']} of stream {row['stream']}: {row['reason']}",
            "Restore the files of the table." if lost else "Run pgmb lake archive --repair.",
        )


def _erasures(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["standing_for"] > look.limits.standing_for:
            yield warn(
                f"erasure {row['id']} ({row['reason']}) is not complete, for {ago(row['standing_for'])}:"
                " data may be left, and its streams cannot be replayed",
                "Run pgmb erase again with the same keys and streams.",
            )


def _retention(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        stream, keep_for, late = row["stream"], row["keep_for"], row["overkept_for"]
        if keep_for is None:
            yield note(
                f"stream {stream} keeps events without limit",
                f"pgmb streams alter {stream} --keep-for 7d",
            )
        elif late is not None and late > look.limits.held_for:
            yield warn(
                f"stream {stream} keeps events for {ago(late)} longer than its {ago(keep_for)}:"
                " a queue or reader has not passed them, or no janitor runs",
                "See `pgmb status`; drop queues without consumers, forget readers that will not return.",
            )


def _delayed(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        waiting = row["overdue_for"]
        if waiting is not None and waiting > look.limits.standing_for:
            yield warn(
                f"{row['overdue']:,} delayed events of stream {row['stream']} are late by {ago(waiting)}",
                _SERVE,
            )


def _schedules(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["late"] is not None and row["late"] > look.limits.unkept_for:
            yield warn(
                f"no scheduler: schedule {row['name']} is late by {ago(row['late'])}",
                "Run `pgmb work` or `pgmb serve` as a role with pgmb_admin, or pause it:"
                " pgmb schedules pause NAME.",
            )
        if row["others"]:
            yield warn(
                f"schedule {row['name']} belongs to app {row['app']}, and {', '.join(row['others'])} declares"
                " one of that name too, which does not run",
                "Give that one another name: app.every(..., name=...).",
            )
        if not row["taken"]:
            yield warn(
                f"schedule {row['name']} publishes {row['topic']} to stream {row['stream']},"
                " and no queue, endpoint or durable reader takes it",
                "Create a queue for that topic, or pause the schedule: pgmb schedules pause NAME.",
            )


def _times(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        yield warn(
            f"{row['rows']:,} {row['kind']} have times in the future, up to {row['latest']:%Y-%m-%d %H:%M}:"
            " the clock was ahead when they were written, or it is behind now",
            f"Check the clock of the database server. {_SERVE} It corrects them once their delay has passed.",
        )


_HEALTH = "select * from pgmb.stream_health()"

_DAMAGED = """
select s.stream, s.segment, s.state, s.reason from pgmb.describe_lake_segments() s
where s.state = 'damaged' or s.reason like 'verification failed%'
"""

_UNERASED = """
select e.id, e.reason, clock_timestamp() - e.begun_at standing_for from pgmb.describe_erasures() e
where e.ended_at is null
"""

# Since the installation, where it never ran.
_UPKEEP = """
select coalesce(b.maintained_age, b.age) unmaintained_for,
  (select format('%s:%s (%s)', l.host, l.pid, l.program)
    from pgmb.describe_leaders() l where l.service = 'janitor') leader
from pgmb.describe_broker() b
"""

_STANDING = """
select 'rotation of stream ' || s.stream || ' is due' what, s.unrotated_for standing_for
from pgmb.stream_health() s
union all
select 'what queue ' || q.queue || ' has settled is not cleared', q.uncleared_for from pgmb.queue_health() q
"""

# The queue of a group takes every topic; what its members ask for stands in the subscriptions.
_SCHEDULES = """
with queues as materialized (
  select q.stream, q.patterns from pgmb.queue_status q
  where q.queue not in (select s.group_id from pgmb.subscriptions s)
)
select c.name, c.topic, c.stream, c.app, c.others,
  case when c.next_at < c.now then c.now - c.next_at end late,
  exists (select from queues q where q.stream = c.stream and exists (
    select from unnest(q.patterns) p (pattern) where pgmb.matches(p.pattern, c.topic)))
  or exists (select from pgmb.reader_status r where r.stream = c.stream)
  or exists (select from pgmb.subscriptions s where s.stream = c.stream and exists (
    select from unnest(s.patterns) p (pattern) where pgmb.matches(p.pattern, c.topic))) taken
from pgmb.schedules() c where c.paused_at is null
"""

CHECKS = (
    Check("upkeep", "a process does it", _UPKEEP, _upkeep),
    Check("ticker", "positions are named as they pass", _HEALTH, _ticker),
    Check("janitor", "rotation and clearing are up to date", _STANDING, _janitor),
    Check("maintenance", "every step of maintain() succeeds", "select * from pgmb.describe_broker()", _steps),
    Check("segments", "the current segment is there, and closed ones are sealed", _HEALTH, _segments),
    Check("archive", "sealed segments are archived where the stream says so", _HEALTH, _archive),
    Check("lake", "no table is known to be damaged", _DAMAGED, _lake),
    Check("erasures", "all are complete", _UNERASED, _erasures),
    Check("retention", "no stream keeps events for longer than it should", _HEALTH, _retention),
    Check("delayed events", "none overdue", _HEALTH, _delayed),
    Check("schedules", "none late", _SCHEDULES, _schedules),
    Check("times", "none in the future", "select * from pgmb.times_ahead()", _times),
)
