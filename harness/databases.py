"""Databases inside a throwaway server."""

from __future__ import annotations

import itertools
import os

from psycopg import sql

from harness.server import Server

_numbers = itertools.count(1)


def create_database(server: Server, template: str | None = None) -> str:
    """A new database with a name of its own, copied from `template` if one is given.

    Nobody may be connected to the template meanwhile.
    """
    name = f"pgmb_{os.getpid()}_{next(_numbers)}"
    server.admin().execute(
        sql.SQL("create database {} template {} strategy {}").format(
            sql.Identifier(name),
            sql.Identifier(template or "template0"),
            # Two checkpoints, which cost little without fsync, are cheaper than logging every page.
            sql.Identifier("file_copy"),
        )
    )
    return name


def drop_database(server: Server, name: str) -> None:
    """Drops a database and whatever sessions are left in it."""
    server.admin().execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
