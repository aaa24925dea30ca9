"""A reader of stream main tries to read another, to write, and to stop what others read."""

from __future__ import annotations

from tests.adversary.stage import Stage, got_through

BOMB = "exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (@ < 0))))))))"
PARAMS = "(select jsonb_build_object('p', jsonb_agg(n)) from generate_series(1, 300) n)"
ATTEMPTS = [
    "select * from pgmb.log_other",
    "select * from pgmb.between('other', pgmb.earliest('other'), pgmb.position('other'))",
    "select * from pgmb.between_filtered('other', pgmb.earliest('main'), pgmb.position('main'))",
    "select * from pgmb.between_group('g', 'other', pgmb.earliest('main'), pgmb.position('main'))",
    "select pgmb.subscribe('g', stream => 'other')",
    "select pgmb.subscribe('webhooks')",
    "select pgmb.subscribe('webhooks/other')",
    "select pgmb.subscribe('endpoint/hook')",
    f"select pgmb.subscribe('webhooks', filter => '{BOMB}', params => {PARAMS})",
    "select pgmb.subscribe('g', condition => 'true')",
    "select pgmb.subscribe('g', filter => '$.a == $missing')",
    "select pgmb.resume_subscriptions('webhooks')",
    "select pgmb.unsubscribe(id) from pgmb.subscription",
    "select pgmb.publish('t', '1')",
    "insert into pgmb.log_main (topic, payload) values ('t', '1')",
    "delete from pgmb.log_main",
    "lock table pgmb.log_main in access exclusive mode",
    "select * from pgmb.receive('yours')",
    "select pgmb.ack('<lease>')",
    "select pgmb.create_queue('evil', filter => '$.a == 1')",
    "select pgmb.maintain()",
    "select * from pgmb.subscription",
    "select * from pgmb.endpoint",
    "select * from pgmb.dispatched_endpoints()",
    "set role pgmb_admin",
]


def test_nothing_gets_through(stage: Stage) -> None:
    before = stage.standing()
    reader = stage.role("reader", "select pgmb.grant_read('main', '{}')")
    assert got_through(reader, ATTEMPTS, lease=stage.lease) == []
    assert stage.standing() == before
    assert reader.execute(
        "select count(*) from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main'))"
    ).fetchone() == (1,)


def test_a_filter_that_runs_for_hours_is_not_run_to_be_checked_nor_without_a_limit(stage: Stage) -> None:
    reader = stage.role("reader", "select pgmb.grant_read('main', '{}')")
    reader.execute("set statement_timeout = 0")
    asked = f"filter => '{BOMB}', params => {PARAMS}"
    attempts = [
        f"select * from pgmb.between_filtered('main', pgmb.earliest('main'), pgmb.position('main'), {asked})",
        f"select * from pgmb.between_filtered('main', null, null, {asked})",
    ]
    assert got_through(reader, attempts) == []
