"""The author of SQL conditions tries to have one run code, read what it may not, or never end."""

from __future__ import annotations

import psycopg

from tests.adversary.stage import Stage
from tests.contract.test_conditions import REFUSED as NO_CONDITIONS

MORE = [
    "query_to_xml('select 1', false, false, '')::text <> ''",
    "cursor_to_xml('c', 1, false, false, '') is null",
    "pg_ls_dir('.') = 'x'",
    "pg_stat_file('postgresql.conf') is null",
    "pg_read_binary_file('PG_VERSION') is null",
    "pg_logical_emit_message(true, 'a', 'b') is null",
    "pg_export_snapshot() is null",
    "pg_reload_conf()",
    "pg_cancel_backend(1)",
    "pg_promote()",
    "lo_import('/etc/passwd') = 0",
    "lo_export(1, '/tmp/x') = 0",
    "inet_server_addr() is null",
    "current_schemas(true) is null",
    "has_schema_privilege('pgmb', 'usage')",
    "pg_get_functiondef(1) is null",
    "pg_get_expr('x', 1) is null",
    "obj_description(1) is null",
    "'pgmb.queue'::regclass is null",
    "xmlserialize(document query_to_xml('select 1', true, true, '') as text) is null",
    "(select count(*) from pg_roles) > 0",
    "e.payload = any (select payload from pgmb.log_main)",
    "ts_stat('select 1') is null",
    "setseed(0.5) is null",
    "gen_random_uuid() is null",
    "version() is null or timeofday() is null",
]


def test_nothing_hostile_is_taken_for_a_condition(stage: Stage) -> None:
    author = stage.role("author", "grant pgmb_admin, pgmb_conditions to {}")
    before = stage.standing()
    through: list[str] = []
    for condition in [*NO_CONDITIONS.values(), *MORE]:
        try:
            author.execute("select pgmb.create_queue('evil', condition => %s)", [condition])
            through.append(condition)
        except psycopg.Error as error:
            # MB025: a plain owner who may not act as pgmb_matcher has no conditions at all.
            if error.sqlstate not in ("MB010", "MB025"):
                through.append(f"{condition}: {error.sqlstate} {error}")
    assert through == []
    assert stage.standing() == before
