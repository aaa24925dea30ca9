"""Every connection of pgmb has timeouts, keepalives and a name, unless its user said otherwise."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

import pgmb
from pgmb._core.connecting import DEFAULTS, conninfo

PACKAGE = Path(pgmb.__file__).parent
OPENS = {"_core/connecting.py", "_async/pool.py", "_sync/pool.py"}
"""The modules that call a driver. All others call these."""

DRIVERS = {"psycopg", "Connection", "AsyncConnection", "driver", "adbc_driver_postgresql", "dbapi"}
POOLS = {"ConnectionPool", "AsyncConnectionPool", "NullConnectionPool", "AsyncNullConnectionPool"}


def opened(source: str) -> list[int]:
    """The lines that open a connection with a driver, except ADBC's with a string of `conninfo`."""
    found: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=base), attr="connect"), args=arguments):
                completed = [
                    given
                    for given in arguments[:1]
                    if isinstance(given, ast.Call) and ast.unparse(given.func) == "conninfo"
                ]
                if base in DRIVERS and not completed:
                    found.append(node.lineno)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name in POOLS:
                found.append(node.lineno)
            case _:
                pass
    return found


def test_nothing_connects_around_the_one_place() -> None:
    around = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.parent.rglob("*.py"))
        if (lines := opened(path.read_text())) and str(path.relative_to(PACKAGE.parent))[5:] not in OPENS
    }
    assert around == {}


@pytest.mark.parametrize(
    "source",
    [
        "psycopg.connect(dsn)",
        "await AsyncConnection.connect(dsn, autocommit=True)",
        "driver.connect(url)",
        "psycopg_pool.ConnectionPool(dsn)",
        "AsyncConnectionPool(dsn)",
    ],
)
def test_the_search_finds_every_way_to_connect(source: str) -> None:
    assert opened(source)


def test_what_is_left_open_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGAPPNAME", raising=False)
    given = conninfo_to_dict(conninfo("host=a dbname=b", "pgmb work"))
    assert given.pop("fallback_application_name") == "pgmb work"
    assert (given.pop("host"), given.pop("dbname")) == ("a", "b")
    assert given == {name: str(value) for name, value in DEFAULTS.items()}


@pytest.mark.parametrize(
    "dsn",
    [
        "host=a connect_timeout=30 tcp_user_timeout=0 keepalives=0 application_name=mine",
        "postgresql://a/?connect_timeout=30&tcp_user_timeout=0&keepalives=0&application_name=mine",
    ],
)
def test_what_the_user_says_stays(dsn: str) -> None:
    given = conninfo_to_dict(conninfo(dsn))
    assert (given["connect_timeout"], given["tcp_user_timeout"], given["keepalives"]) == ("30", "0", "0")
    assert given["application_name"] == "mine"


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "77")
    assert "connect_timeout" not in conninfo_to_dict(conninfo("host=a"))
