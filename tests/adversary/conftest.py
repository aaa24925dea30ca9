"""The stage: pgmb with streams, queues and events of others, installed by a superuser or by a plain owner."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from harness.server import Server
from pgmb import schema
from tests.adversary.stage import Stage

_numbers = itertools.count(1)


@pytest.fixture(params=["superuser", "plain owner"])
def stage(request: pytest.FixtureRequest, server: Server) -> Iterator[Stage]:
    suffix = f"{os.getpid()}_{next(_numbers)}"
    database = f"adversary_{suffix}"
    admin = server.admin()
    owner: str | None = None
    # Roles belong to the server: a plain owner finds those that an administrator made.
    if request.param == "plain owner":
        owner = f"plain_{suffix}"
        admin.execute(sql.SQL("create role {} login").format(sql.Identifier(owner)))
    admin.execute(
        sql.SQL("create database {} owner {}").format(
            sql.Identifier(database), sql.Identifier(owner or "postgres")
        )
    )
    with psycopg.connect(server.dsn(database, owner), autocommit=True) as db:
        schema.install(db)
        made = Stage(server, database, db, suffix)
        made.prepare()
        yield made
        made.leave()
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(database)))
    for role in [*made.roles, *([owner] if owner else [])]:
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
