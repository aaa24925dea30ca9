"""Keys, passes and the audit in SQL: digests alone, for admins alone; a pass ends with its key."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from tests.conftest import Connect

KEY, OTHER, TICKET = (hashlib.sha256(text).digest() for text in (b"key", b"other", b"ticket"))


def one(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    found = db.execute(statement.encode(), parameters).fetchone()
    return found and (found[0] if len(found) == 1 else found)


def create(
    db: psycopg.Connection[Any], name: str = "k", digest: bytes = KEY, scopes: str = "{operate}"
) -> int:
    made: int = one(db, "select pgmb.create_api_key(%s, %s, %s::text[])", name, digest, scopes)
    return made


def refused(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> str | None:
    with pytest.raises(psycopg.Error) as raised, db.transaction():
        db.execute(statement.encode(), parameters)
    return raised.value.sqlstate


def test_a_key_is_found_by_its_digest(db: psycopg.Connection[Any]) -> None:
    made = create(db, scopes="{publish:a,read:*}")
    found = one(db, "select id, name, scopes from pgmb.find_api_key(%s)", KEY)
    assert found == (made, "k", ["publish:a", "read:*"])
    assert one(db, "select used_at is not null from pgmb.api_keys")
    assert one(db, "select count(*) from pgmb.find_api_key(%s)", OTHER) == 0


def test_names_digests_and_scopes_that_cannot_be_are_refused(db: psycopg.Connection[Any]) -> None:
    create(db)
    statement = "select pgmb.create_api_key(%s, %s, %s::text[])"
    assert refused(db, statement, "k", OTHER, "{operate}") == "MB004"
    assert refused(db, statement, "l", KEY, "{operate}") == "MB004"
    assert refused(db, statement, " ", OTHER, "{operate}") == "MB003"
    for digest in (b"", b"short", None):
        assert refused(db, statement, "l", digest, "{operate}") == "MB005"
    for scopes in ("{}", None, "{NULL}", "{all}", "{publish}", "{publish:}", "{operate:x}", '{"read:a\nb"}'):
        assert refused(db, statement, "l", OTHER, scopes) == "MB005", scopes


def test_an_expired_key_is_not_found_and_gives_no_pass(db: psycopg.Connection[Any]) -> None:
    made = one(
        db,
        "select pgmb.create_api_key('k', %s, '{operate}', expires_at => clock_timestamp() - interval '1s')",
        KEY,
    )
    assert one(db, "select count(*) from pgmb.find_api_key(%s)", KEY) == 0
    given = one(
        db, "select pgmb.create_access_token(%s, 'ticket', %s, '{operate}', '1 minute')", made, TICKET
    )
    assert given is False


def test_a_pass_ends_with_its_key_at_the_latest(db: psycopg.Connection[Any]) -> None:
    made = create(db)
    db.execute("update pgmb.api_key set expires_at = clock_timestamp() + interval '1 minute'")
    assert one(db, "select pgmb.create_access_token(%s, 'session', %s, '{inspect}', '1 day')", made, OTHER)
    found = one(
        db,
        "select s.name, s.scopes, s.expires_at = k.expires_at from pgmb.find_session(%s) s, pgmb.api_key k",
        OTHER,
    )
    assert found == ("k", ["inspect"], True)
    assert one(db, "select pgmb.drop_api_key('k')")
    assert one(db, "select count(*) from pgmb.access_token") == 0
    assert one(db, "select pgmb.drop_api_key('k')") is False


def test_a_pass_is_of_its_kind(db: psycopg.Connection[Any]) -> None:
    made = create(db)
    give = "select pgmb.create_access_token(%s, %s, %s, %s::text[], '1 minute')"
    assert one(db, give, made, "session", OTHER, "{operate}")
    assert one(db, give, made, "ticket", TICKET, "{operate}")
    assert one(db, "select count(*) from pgmb.take_ticket(%s)", OTHER) == 0
    assert one(db, "select count(*) from pgmb.find_session(%s)", TICKET) == 0
    for kind, digest, scopes in (
        ("other", KEY, "{operate}"),
        (None, KEY, "{operate}"),
        ("ticket", b"x", "{operate}"),
        ("ticket", KEY, "{}"),
    ):
        assert refused(db, give, made, kind, digest, scopes) == "MB005"
    assert one(db, "select pgmb.end_session(%s)", TICKET) is False
    assert one(db, "select pgmb.end_session(%s)", OTHER) is True
    assert one(db, "select count(*) from pgmb.find_session(%s)", OTHER) == 0


def test_a_ticket_that_is_over_is_worth_nothing(db: psycopg.Connection[Any]) -> None:
    made = create(db)
    one(db, "select pgmb.create_access_token(%s, 'ticket', %s, '{operate}', '-1 second')", made, TICKET)
    assert one(db, "select count(*) from pgmb.take_ticket(%s)", TICKET) == 0


def test_of_several_takers_of_a_ticket_one_gets_it(db: psycopg.Connection[Any], connect: Connect) -> None:
    made = create(db)
    one(db, "select pgmb.create_access_token(%s, 'ticket', %s, '{operate}', '1 minute')", made, TICKET)
    together = threading.Barrier(6)
    taken: list[int] = []

    def take(connection: psycopg.Connection[Any]) -> None:
        together.wait()
        taken.append(one(connection, "select count(*) from pgmb.take_ticket(%s)", TICKET))

    takers = [threading.Thread(target=take, args=(connect(autocommit=True),)) for _ in range(6)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sorted(taken) == [0, 0, 0, 0, 0, 1]


def test_what_is_over_is_cleared_with_the_audit_of_long_ago(db: psycopg.Connection[Any]) -> None:
    made = create(db)
    one(db, "select pgmb.create_access_token(%s, 'ticket', %s, '{operate}', '-1 second')", made, TICKET)
    one(db, "select pgmb.create_access_token(%s, 'session', %s, '{operate}', '1 day')", made, OTHER)
    one(db, "select pgmb.record('key:k', 'pause', 'q', '{\"reason\": \"x\"}')")
    one(db, "select pgmb.record('key:k', 'resume', 'q')")
    db.execute("update pgmb.audit set at = at - interval '1 year' where action = 'pause'")
    assert one(db, "select pgmb_internal.clear_access('90 days')") == 2
    assert one(db, "select count(*) from pgmb.access_token") == 1
    assert one(db, "select action, detail from pgmb.audit") == ("resume", {})


def test_plain_roles_neither_call_nor_read_any_of_it(db: psycopg.Connection[Any], connect: Connect) -> None:
    create(db)
    functions = (
        ("pgmb.create_api_key('x', '\\x00', '{operate}')"),
        ("pgmb.drop_api_key('k')"),
        ("pgmb.find_api_key('\\x00')"),
        ("pgmb.create_access_token(1, 'ticket', '\\x00', '{operate}', '1s')"),
        ("pgmb.find_session('\\x00')"),
        ("pgmb.take_ticket('\\x00')"),
        ("pgmb.end_session('\\x00')"),
        ("pgmb.record('a', 'b')"),
        ("pgmb_internal.clear_access('1s')"),
    )
    role = f"plain_{db.info.dbname}"
    db.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
    try:
        db.execute(sql.SQL("grant pgmb_publisher, pgmb_consumer to {}").format(sql.Identifier(role)))
        plain = connect(autocommit=True)
        plain.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
        for call in functions:
            with pytest.raises(errors.InsufficientPrivilege):
                plain.execute(f"select {call}".encode())
        for table in ("api_key", "api_keys", "access_token", "audit"):
            with pytest.raises(errors.InsufficientPrivilege):
                plain.execute(f"select * from pgmb.{table}".encode())
        plain.close()
    finally:
        db.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
    assert one(db, "select count(*) from pgmb.api_key") == 1
