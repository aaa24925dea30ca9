"""Tests, harness, faults and benches leave the tables of the queue core to harness/states.

A test that writes or reads these tables has to change whenever they do. Statements that name a table by a
variable are found where they write, not where they read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "harness", "faults", "bench")
HELPERS = "harness/states/"

CORE = "queue|binding|generation|claim|settlement|shortened|noted_lease|noted_key|retry|delivery"
# What pgmb.dead_letters() returns are rows of pgmb.dead: to read it is no secret.
WRITTEN = f"{CORE}|dead"
USE = re.compile(
    rf"(?:\b(?:from|join|using)|,)\s+pgmb\.(?:{CORE})\b(?!\s*\()"
    rf"|\b(?:copy|analyze|(?:lock|alter) table)\s+(?:only\s+)?pgmb\.(?:{WRITTEN})\b"
    rf"|\b(?:insert into|update|delete from|truncate)\s+(?:only\s+)?pgmb\.(?:(?:{WRITTEN})\b|\{{\}})",
    re.IGNORECASE,
)

NAMED = re.compile(rf"pgmb\.(?:{WRITTEN}|\{{)")

# A folder, a file, or a file and what it holds.
EXEMPT = {
    "tests/adversary/": "attempts that must be refused",
    "tests/contract/test_endpoints.py: from pgmb.delivery": "an attempt that must be refused",
    "tests/contract/test_privileges.py": "attempts that must be refused",
    "tests/contract/test_publisher_attacks.py": "attempts that must be refused",
    "tests/contract/test_workers_rights.py": "an attempt that must be refused",
    "tests/concurrency/test_mutations.py": "texts of functions, to be mutated",
    "tests/contract/test_boundaries.py": "a function that a rule on functions must find; it is not called",
    "tests/contract/test_catalog_rules.py": "objects that a rule on the catalog must find",
    "tests/contract/test_decided_times.py": "texts that a rule on functions must find",
    "tests/cli/test_doctor.py": "the doctor names the table that it wants changed",
    "tests/migration/": "what upgrades do to tables",
    "harness/next_version.py": "what upgrades do to tables",
    "tests/unit/test_states.py": "this rule",
    "tests/webhooks/stepped.py: update pgmb.{}": "endpoints, which are no part of the core",
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module, adjacent ones as one; `{}` is a value put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield (
                node.lineno,
                node.value if isinstance(node.value, str) else node.value.decode(errors="replace"),
            )


def uses(source: str) -> list[tuple[int, str]]:
    """Where the strings of a module write or read a table of the core: the line, and the words that do."""
    if not NAMED.search(source):
        return []
    found = {
        (line, " ".join(match[0].lstrip(", ").split()))
        for line, text in texts(source)
        for match in USE.finditer(text)
    }
    return sorted(found)


def exemption(path: str, words: str) -> str | None:
    return next((exempt for exempt in EXEMPT if f"{path}: {words}".startswith(exempt)), None)


def everywhere() -> list[tuple[str, int, str]]:
    return [
        (path.relative_to(ROOT).as_posix(), line, words)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, words in uses(path.read_text())
    ]


def test_only_helpers_know_the_tables_of_the_core() -> None:
    found = [use for use in everywhere() if not use[0].startswith(HELPERS)]
    assert [use for use in found if exemption(use[0], use[2]) is None] == []
    used = {exemption(path, words) for path, _, words in found}
    assert EXEMPT.keys() - used == set(), "exempt, but with nothing to exempt"


def test_the_rule_finds_writes_and_reads() -> None:
    for statement in (
        'db.execute("update pgmb.claim set at = now()")',
        'db.execute("insert into pgmb.retry (queue)"\n" select 1")',
        'db.execute(f"delete from pgmb.{table}")',
        'db.execute("select 1 from pgmb.endpoint e,"\n" pgmb.queue q")',
        'db.execute("select count(*) from"\n" pgmb.delivery d".encode())',
        'db.execute("update pgmb.dead set died_at = now()")',
        'db.execute("lock table pgmb.queue")',
    ):
        assert len(uses(statement)) == 1, statement


def test_the_rule_lets_public_calls_pass() -> None:
    for statement in (
        "select * from pgmb.retry(%s)",
        "select pgmb.ack(l), pgmb.retry(l) from pgmb.queue_leases('q') l",
        "select * from pgmb.queue_status, pgmb.dead",
        "insert into pgmb.log_main (topic) values ('t')",
    ):
        assert uses(f'db.execute("{statement}")') == [], statement
