"""Promise: maintenance costs the same however many rows are kept.

Every step that clears rows finds those that are due through an index. An index is used only if the value to
compare with does not change within the statement: no condition calls a volatile function such as
clock_timestamp().
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

import pgmb
from harness.explain import cost
from harness.states import add_dead, add_retries, age_leases, hold_leases, pin_xmin, publish
from tests.conftest import Connect

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

SOURCES = Path(pgmb.__file__).parent
ROWS = 20_000
# A scan of any of the tables below reads more than 200 pages.
FEW_PAGES = 150

# Rows that are kept, and the step of maintain() that looks for others among them.
KEPT = {
    "pgmb.clear_keys()": "insert into pgmb.dedup (stream, key, id, expires_at)"
    " select 'main', 'k' || n, gen_random_uuid(), now() + interval '1 day' from generate_series(1, %s) n",
    "pgmb_internal.clear_attempts('7 days')": "insert into pgmb.attempt (endpoint, attempt, seconds)"
    " select (select id from pgmb.endpoint), 1, 0 from generate_series(1, %s)",
    "pgmb_internal.clear_access('90 days')": "with audited as (insert into pgmb.audit (actor, action)"
    " select 'a', 'b' from generate_series(1, %s) returning id)"
    " insert into pgmb.access_token (digest, api_key, kind, scopes, expires_at)"
    " select sha256(id::text::bytea), 1, 'ticket', '{inspect}', now() + interval '1 day' from audited",
    "pgmb.clear_stages('1 day')": "insert into pgmb.ledger (app, stream, role)"
    " select 'app ' || n, 1, 'pgmb_publisher' from generate_series(1, %s) n",
    "pgmb_internal.expire_subscriptions()": "insert into pgmb.subscription"
    " (group_id, stream, shape, params, expires_after, expires_at, digest)"
    " select 'g', 1, (select min(id) from pgmb.shape), '{}', '1 day', now() + interval '1 day',"
    "  sha256(n::text::bytea) from generate_series(1, %s) n",
    "pgmb_internal.release_due('main', clock_timestamp())": "insert into pgmb.delayed"
    " (id, stream, due_at, topic, payload)"
    " select gen_random_uuid(), 'main', now() + interval '1 day', 't', '1' from generate_series(1, %s)",
}


def pages(db: psycopg.Connection[Any], call: str) -> int:
    """The pages that a call and all its statements read; the fewest of four calls: the first fill caches,
    and an autovacuum empties them."""
    counts: list[int] = []
    for _ in range(4):
        explained = db.execute(
            cast("Any", f"explain (analyze, buffers, format json) select {call}")
        ).fetchone()
        assert explained is not None
        plan = explained[0][0]["Plan"]
        counts.append(int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"]))
    return min(counts)


def test_maintenance_reads_no_more_pages_for_rows_that_are_kept(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_endpoint('e', 'https://endpoint.example/')")
    db.execute("select pgmb.create_api_key('k', sha256('k'), '{inspect}')")
    db.execute("select pgmb.create_queue('q', '{none}')")
    # Idle from the start, so that every call looks at it.
    age_leases(db, "1 hour")
    before = pages(db, "pgmb.maintain()")
    for rows in KEPT.values():
        db.execute(cast("Any", rows), [ROWS])
    add_dead(db, ROWS)
    add_retries(db, ROWS, due="1 day")
    for analyzed in (False, True):
        if analyzed:
            db.execute("analyze")
        read = {
            call: found for call in (*KEPT, "pgmb.clear_settled()") if (found := pages(db, call)) >= FEW_PAGES
        }
        assert read == {}
        assert pages(db, "pgmb.maintain()") <= 1.2 * before


# What maintain() calls for each stream that needs it.
STEPS = "{seal,release_due,note_writers,rotate,guard_stream,drop_segments,droppable,detach_dropped}"


def test_streams_and_queues_at_rest_cost_maintenance_no_step_of_their_own(
    db: psycopg.Connection[Any],
) -> None:
    for number in range(3):
        db.execute("select pgmb.create_stream(%s)", [f"s{number}"])
        db.execute("select pgmb.create_queue(%s, stream => %s)", [f"q{number}", f"s{number}"])
        db.execute("select pgmb.publish('t', '1', stream => %s)", [f"s{number}"])
        db.execute("select pgmb.ack(lease) from pgmb.receive(%s)", [f"q{number}"])
    age_leases(db)
    # Notes who writes to the new segments.
    db.execute("select pgmb.maintain()")
    with db.transaction(force_rollback=True):
        db.execute("set local track_functions = 'all'")
        counting = (
            "select funcname, calls from pg_stat_xact_user_functions"
            " where funcname = any (%s) or funcname = 'maintain'"
        )
        before = dict(db.execute(counting, [STEPS]).fetchall())
        db.execute("select pgmb.maintain()")
        after = dict(db.execute(counting, [STEPS]).fetchall())
    assert {name: calls - before.get(name, 0) for name, calls in after.items()} == {"maintain": 1}


def test_a_dispatcher_reads_no_more_pages_for_endpoints_that_did_not_change(
    db: psycopg.Connection[Any],
) -> None:
    since = "pgmb.dispatched_endpoints(clock_timestamp() - interval '10 seconds')"
    call = f"count(*) from {since}"
    few = pages(db, call)
    db.execute(
        "insert into pgmb.endpoint (name, url, changed_at)"
        " select 'e' || n, 'https://endpoint.example/', now() - interval '1 hour'"
        " from generate_series(1, %s) n",
        [ROWS // 4],
    )
    for analyzed in (False, True):
        if analyzed:
            db.execute("analyze")
        assert pages(db, call) < few + FEW_PAGES


# Between these words lies a condition; strings are read as well, because some of them are statements.
TOKEN = re.compile(r"--[^\n]*|[a-z_][a-z0-9_.]*(?=\s*\(\s*\))|[a-z_][a-z0-9_]*|[();]", re.IGNORECASE)
BEGINS = {"where", "on", "having"}
ENDS = {
    *(
        "select",
        "from",
        "set",
        "values",
        "returning",
        "group",
        "order",
        "limit",
        "union",
        "except",
        "intersect",
    ),
    *("into", "loop", "begin", "window", "offset", "do", "for", ";"),
}


def strings_of(path: Path) -> list[str]:
    """The strings in a Python module: some of them are statements."""
    return [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def conditions_that_call(text: str, volatile: set[str]) -> list[str]:
    """The lines on which a condition of a statement calls one of these functions."""
    found: list[str] = []
    states = [False]
    for token in TOKEN.finditer(text):
        word = token.group().lower()
        if word == "(":
            states.append(states[-1])
        elif word == ")":
            states = states[:-1] or [False]
        elif word in BEGINS:
            states[-1] = True
        elif word in ENDS:
            states[-1] = False
            if word == ";":
                states = [False]
        elif (
            states[-1] and word.rsplit(".", 1)[-1] in volatile and "." not in word.replace("pg_catalog.", "")
        ):
            begin = text.rfind("\n", 0, token.start()) + 1
            found.append(text[begin : text.find("\n", begin)].strip())
    return found


def test_no_condition_compares_with_a_volatile_function(db: psycopg.Connection[Any]) -> None:
    """Bind the time to a variable before the statement, or use statement_timestamp()."""
    volatile = {
        name
        for (name,) in db.execute(
            "select distinct proname from pg_proc"
            " where provolatile = 'v' and pronargs = 0 and pronamespace = 'pg_catalog'::regnamespace"
        )
    }
    assert {"clock_timestamp", "random", "gen_random_uuid"} <= volatile
    offences = [
        f"{path.relative_to(SOURCES)}: {line}"
        for path in sorted((*SOURCES.rglob("*.sql"), *SOURCES.rglob("*.py")))
        # settle.sql looks a claim up by its id, and compares when it expires besides.
        if path.name not in ("tables.sql", "settle.sql") or "compat" in path.parts
        for text in ([path.read_text()] if path.suffix == ".sql" else strings_of(path))
        for line in conditions_that_call(text, volatile)
    ]
    assert offences == []


@pytest.mark.parametrize(
    ("text", "flagged"),
    [
        ("select 1 from t where t.at < clock_timestamp();", True),
        ("delete from t where t.id = any (array(select o.id from t o where o.at < random() limit 1));", True),
        ("execute format('delete from %s where at < pg_catalog.clock_timestamp()', leaf);", True),
        ("select t.a from t join u on t.at < clock_timestamp();", True),
        ("now := clock_timestamp(); delete from t where t.at < now;", False),
        ("update t set at = clock_timestamp() where t.id = 1;", False),
        ("select clock_timestamp() - t.at from t where t.id = 1 order by random();", False),
        ("if exists (select from t where t.id = 1) then at := clock_timestamp(); end if;", False),
        ("-- where at < clock_timestamp()\nselect 1;", False),
    ],
)
def test_the_check_itself(text: str, flagged: bool) -> None:
    assert bool(conditions_that_call(text, {"clock_timestamp", "random"})) is flagged


def test_maintenance_looks_at_a_bounded_number_of_leases(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 800)
    look = "pgmb_internal.find_hidden_leases(clock_timestamp(), clock_timestamp() + interval '1 second', 50)"
    hold_leases(db, 100)
    few = pages(db, look)
    hold_leases(db, 700)
    assert pages(db, look) < 2 * few


def test_searches_for_lost_rows_rest_after_they_passed_many(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    """They pass all rows that a pinned xmin keeps. Without a rest each call of maintain() would pass them."""
    db.execute("select pgmb.create_queue('q')")
    publish(db, 400)
    pinned = pin_xmin(connect)
    for lease in hold_leases(db, 400):
        db.execute("select pgmb.ack(%s)", [lease])
    age_leases(db)
    assert one(db, "select pgmb.clear_settled()") > 300
    searched = cost(db, "select pgmb.maintain()").pages
    for step in ("hidden leases", "dropped queues"):
        rests = f"select pgmb_internal.is_resting('{step}')"
        db.execute("select pgmb_internal.rest_after(%s, 50000, false)", [step])
        assert one(db, rests)
        # A clock that was set back does not prolong the rest.
        db.execute(f"set pgmb.rest_{step.replace(' ', '_')} = '{2**60}'")
        assert not one(db, rests)
        db.execute("select pgmb_internal.rest_after(%s, 50000, true)", [step])
        assert not one(db, rests), "a search that stopped before its end goes on"
        db.execute("select pgmb_internal.rest_after(%s, 50000, false)", [step])
    resting = cost(db, "select pgmb.maintain()").pages
    pinned.rollback()
    assert resting < searched - 400, f"{searched} pages with the searches, {resting} without"


def one(db: psycopg.Connection[Any], statement: str) -> Any:
    row = db.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]
