"""pgmb schedules: create, look, pause, drop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import Run

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

Done = Callable[..., str]


def test_a_schedule_from_its_creation_to_its_end(done: Done, run: Run) -> None:
    said = done(
        "schedules", "create", "nightly", "30 3 * * *", "report.run", '{"kind": "full"}',
        "--timezone", "Europe/Berlin", "--headers", '{"a": 1}', "--missed", "all",
    )  # fmt: skip
    assert said.startswith("Created schedule nightly, due next at ")
    (made,) = run("schedules", "list", "--json").json
    assert (made["cron"], made["timezone"], made["payload"], made["headers"], made["missed"]) == (
        "30 3 * * *", "Europe/Berlin", {"kind": "full"}, {"a": 1}, "all",
    )  # fmt: skip
    assert done("schedules", "create", "nightly", "45 3 * * *", "report.run").startswith("Updated schedule")
    assert done("schedules", "pause", "nightly") == "Paused schedule nightly.\n"
    assert run("schedules", "list", "--json").json[0]["paused_at"] is not None
    assert done("schedules", "resume", "nightly") == "Resumed schedule nightly.\n"
    assert "45 3 * * *" in done("schedules", "list")
    due = run("schedules", "list", "--json").json[0]["next_at"]
    event = run("event", done("schedules", "run", "nightly").strip(), "--json").json
    assert (event["topic"], event["payload"]) == ("report.run", "null")
    assert run("schedules", "list", "--json").json[0]["next_at"] == due
    assert run("schedules", "drop", "nightly").code == 2, "nobody can be asked"
    assert done("schedules", "drop", "nightly", "--yes") == "Dropped schedule nightly.\n"
    assert done("schedules", "drop", "nightly", "--yes") == "There is no schedule nightly.\n"
    assert run("schedules", "list", "--json").json == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "s", "soon", "t"), "not a cron expression: 'soon'"),
        (("create", "s", "* * * * *", "t", "--timezone", "Mars"), "not a time zone: 'Mars'"),
        (("create", "s", "* * * * *", "t", "{"), "json"),
        (("create", "s", "* * * * *", "t", "--headers", "[1]"), "headers must be an object, got array"),
        (("pause", "none"), "schedule 'none' does not exist"),
        (("resume", "none"), "schedule 'none' does not exist"),
        (("run", "none"), "schedule 'none' does not exist"),
    ],
)
def test_nonsense_is_refused_with_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run("schedules", *arguments)
    assert outcome.code == 1
    assert message in outcome.err
    assert "Traceback" not in outcome.err
