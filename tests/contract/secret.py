"""Something that only the owner may see, for those who try to get at it."""

from __future__ import annotations

from typing import Any

import psycopg

SECRET = "the combination is 4711"


def hide(db: psycopg.Connection[Any]) -> None:
    """Put it into a table of the owner's, beside a queue."""
    db.execute("set statement_timeout = '60s'")
    db.execute("create table public.secret (text text)")
    db.execute("insert into public.secret values (%s)", [SECRET])
    db.execute("select pgmb.create_queue('q')")
