"""pgmb keys and pgmb audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.cli.conftest import Run

Done = Callable[..., str]


def test_a_key_from_its_making_to_its_end(done: Done, run: Run, db: psycopg.Connection[Any]) -> None:
    made = run("keys", "create", "ci", "--scope", "publish:main", "--scope", "consume:*", "--expires", "30d")
    key = made.out.strip()
    assert (made.code, key.startswith("pgmb_key_"), len(key)) == (0, True, 52)
    assert "cannot be shown again" in made.err
    assert key not in made.err
    (row,) = db.execute("select name, scopes, expires_at - created_at from pgmb.api_key").fetchall()
    assert row[:2] == ("ci", ["publish:main", "consume:*"])
    assert row[2].days in (29, 30)
    assert db.execute("select count(*) from pgmb.find_api_key(sha256(%s))", (key.encode(),)).fetchone() == (
        1,
    )
    (listed,) = run("keys", "list", "--json").json
    assert (listed["name"], listed["scopes"]) == ("ci", ["publish:main", "consume:*"])
    assert "publish:main consume:*" in done("keys", "list")
    assert key not in done("keys", "list")
    assert run("keys", "create", "js", "--scope", "inspect", "--json").json["key"].startswith("pgmb_key_")
    assert run("keys", "drop", "ci").code == 2, "nobody can be asked"
    assert done("keys", "drop", "ci", "--yes") == "Dropped key ci.\n"
    assert done("keys", "drop", "ci", "--yes") == "There is no key ci.\n"

    user = (db.execute("select session_user").fetchone() or ("",))[0]
    told = run("audit", "--json").json
    assert [(entry["actor"], entry["action"], entry["subject"]) for entry in told] == [
        (f"cli:{user}", "drop_api_key", "ci"),
        (f"cli:{user}", "create_api_key", "js"),
        (f"cli:{user}", "create_api_key", "ci"),
    ]
    assert told[2]["detail"]["scopes"] == ["publish:main", "consume:*"]
    assert "scopes: publish:main consume:*" in done("audit")
    assert len(run("audit", "--json", "--limit", "1").json) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "k", "--scope", "everything"), "invalid scope: 'everything'"),
        (("create", "", "--scope", "inspect"), "name"),
        (("create", "k", "--scope", "inspect", "--expires", "soon"), "not a duration"),
        (("create", "k"), "--scope"),
    ],
)
def test_nonsense_is_refused_and_not_recorded(run: Run, arguments: tuple[str, ...], message: str) -> None:
    outcome = run("keys", *arguments)
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert run("audit", "--json").json == []


def test_a_name_that_is_taken_is_refused(run: Run) -> None:
    assert run("keys", "create", "k", "--scope", "inspect").code == 0
    again = run("keys", "create", "k", "--scope", "operate")
    assert (again.code, again.out) == (1, "")
    assert "API key 'k'" in again.err
    assert len(run("audit", "--json").json) == 1


def test_what_is_changed_on_the_command_line_is_in_the_audit(done: Done, run: Run) -> None:
    for arguments in (
        ("streams", "create", "orders", "--keep-for", "7d"),
        ("queues", "create", "mail", "order.*", "user.#", "--stream", "orders"),
        ("queues", "create", "mail", "order.*", "user.#", "--stream", "orders"),
        ("queues", "pause", "mail", "--reason", "moving"),
        ("schedules", "create", "nightly", "0 3 * * *", "report.due", '{"password": "hush"}'),
        ("schedules", "create", "nightly", "0 4 * * *", "report.due", "--headers", '{"token": "hush"}'),
        ("schedules", "drop", "nightly", "--yes"),
        ("schedules", "drop", "nightly", "--yes"),
        ("queues", "drop", "mail", "--yes"),
    ):
        done(*arguments)
    assert run("queues", "pause", "mail").code == 1
    told = run("audit", "--json").json[::-1]
    assert [(entry["action"], entry["subject"]) for entry in told] == [
        ("create_stream", "orders"),
        ("create_queue", "mail"),
        ("pause", "mail"),
        ("create_schedule", "nightly"),
        ("create_schedule", "nightly"),
        ("drop_schedule", "nightly"),
        ("drop_queue", "mail"),
    ], "each change once, and nothing that changed nothing"
    assert told[1]["detail"]["patterns"] == ["order.*", "user.#"]
    assert told[2]["detail"] == {"reason": "moving"}
    assert "hush" not in str(told)


def test_a_role_without_the_audit_still_changes_what_it_may(
    done: Done, db: psycopg.Connection[Any], dsn: str
) -> None:
    done("queues", "create", "mail")
    db.execute("create role carrier login; select pgmb.grant_consume('mail', 'carrier')")
    try:
        assert done("dlq", "redrive", "mail", dsn=f"{dsn} user=carrier").startswith("Redrove 0")
        assert db.execute("select count(*) from pgmb.audit").fetchone() == (1,)
    finally:
        db.execute("drop owned by carrier; drop role carrier")
