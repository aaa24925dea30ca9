"""Assertions inside `django.test.TestCase`, whose transaction is never committed."""

from __future__ import annotations

from typing import Any

from django.db import connections

from pgmb import testing
from pgmb.django.application import alias
from pgmb.types import Event


def published(topic: str = "#", **options: Any) -> list[Event]:
    """`pgmb.testing.published`, with what the test's transaction has published."""
    return testing.published("", topic, conn=connections[alias()], **options)


def assert_published(topic: str, *payload: Any, **options: Any) -> list[Event]:
    """`pgmb.testing.assert_published`, with what the test's transaction has published."""
    return testing.assert_published("", topic, *payload, conn=connections[alias()], **options)
