"""Random grants and calls: a role sees, changes and locks what its grants say, and nothing else.

PGMB_GRANT_EXAMPLES says how many sets of grants are tried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adversary.target import INSTALLATIONS, REFUSED, Installations, Target

EXAMPLES = int(os.environ.get("PGMB_GRANT_EXAMPLES", "100"))

GRANTS = {
    "publish main": "select pgmb.grant_publish('main', '{}')",
    "publish other": "select pgmb.grant_publish('other', '{}')",
    "read main": "select pgmb.grant_read('main', '{}')",
    "read other": "select pgmb.grant_read('other', '{}')",
    "consume mine": "select pgmb.grant_consume('mine', '{}')",
    "consume yours": "select pgmb.grant_consume('yours', '{}')",
}
REVOKES = [
    "select pgmb.revoke_stream('main', '{}')",
    "select pgmb.revoke_stream('other', '{}')",
    "select pgmb.revoke_consume('mine', '{}')",
    "select pgmb.revoke_consume('yours', '{}')",
]

MODEL: list[tuple[str, str | None]] = [
    ("select pgmb.publish('t', '1')", "publish main"),
    ("select pgmb.publish('t', '1', stream => 'other')", "publish other"),
    ("select pgmb.publish('t', '1', delay => '1 hour')", "publish main"),
    ("insert into pgmb.log_main (topic, payload) values ('t', '1')", "publish main"),
    ("insert into pgmb.log_other (topic, payload) values ('t', '1')", "publish other"),
    ("select payload from pgmb.log_main", "read main"),
    ("select payload from pgmb.log_other", "read other"),
    ("select pgmb.subscribe('g')", "read main"),
    ("select pgmb.subscribe('g', stream => 'other')", "read other"),
    ("select * from pgmb.between_filtered('main', null, null, filter => '$.a == 1')", "read main"),
    ("select * from pgmb.between_filtered('other', null, null, filter => '$.a == 1')", "read other"),
    ("select pgmb.passing_events('main', '{}', '$.a == 1')", "read main"),
    ("select pgmb.passing_events('other', '{}', '$.a == 1')", "read other"),
    ("select * from pgmb.receive('mine', lease_for => '1 second')", "consume mine"),
    ("select * from pgmb.receive('yours', lease_for => '1 second')", "consume yours"),
    ("select pgmb.pause('mine'), pgmb.resume('mine')", "consume mine"),
    ("select pgmb.pause('yours'), pgmb.resume('yours')", "consume yours"),
    ("select * from pgmb.dead_letters('yours')", "consume yours"),
    ("select pgmb.create_queue('evil')", None),
    ("select pgmb.drop_queue('mine')", None),
    ("select pgmb.maintain()", None),
    ("select pgmb.create_api_key('evil', sha256('y'), '{operate}')", None),
    ("select * from pgmb.api_key", None),
    ("select * from pgmb.endpoint", None),
    ("select * from pgmb.delayed", None),
    ("select * from pgmb.dispatched_endpoints()", None),
    ("delete from pgmb.log_main", None),
    ("delete from pgmb.delayed", None),
    ("lock table pgmb.log_main in access exclusive mode", None),
    ("lock table pgmb.queue in share mode", None),
    ("truncate pgmb.claim", None),
    ("select pgmb.subscribe('webhooks')", None),
]
"""Each call, and the grant without which it is refused. None: it always is."""


@pytest.fixture(params=INSTALLATIONS)
def target(request: pytest.FixtureRequest, installations: Installations) -> Iterator[Target]:
    """A copy of its own: what a grant allows changes it."""
    with installations.copy(request.param) as copied:
        yield copied


@pytest.fixture
def attacker(target: Target) -> psycopg.Connection[Any]:
    return target.role("fuzzed")


def test_a_role_does_what_its_grants_say(target: Target, attacker: psycopg.Connection[Any]) -> None:
    (name,) = attacker.execute("select current_user").fetchone() or ("",)
    calls = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sets(st.sampled_from(sorted(GRANTS))), st.lists(st.sampled_from(MODEL), min_size=1, max_size=8))
    def tried(granted: set[str], asked: list[tuple[str, str | None]]) -> None:
        nonlocal calls
        for revoke in REVOKES:
            target.db.execute(revoke.format(name).encode())
        for grant in granted:
            target.db.execute(GRANTS[grant].format(name).encode())
        for call, needed in asked:
            calls += 1
            try:
                with attacker.transaction():
                    attacker.execute(call.encode())
                said = None
            except psycopg.Error as error:
                said = error.sqlstate or str(error)
            if needed is not None and needed in granted:
                assert said is None, (call, granted, said)
            else:
                assert said in REFUSED or str(said).startswith("MB"), (call, granted, said)
        held = target.db.execute(
            "select locktype, mode from pg_locks where pid = %s and locktype <> 'virtualxid'",
            [attacker.info.backend_pid],
        ).fetchall()
        assert held == []

    tried()
    print(f"{EXAMPLES} grant sets, {calls} calls")
