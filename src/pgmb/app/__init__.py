"""Handlers: functions that get a queue's events, and the process that runs them.

A consumer a queue receives leases (`consumer`), its workers call the handlers that a topic leads to
(`worker`, `routing`), what came of it is settled (`settling`), and queues at rest are looked at
together (`idle`).
"""

from __future__ import annotations

from pgmb.app.app import App
from pgmb.app.delivery import Delivery
from pgmb.app.outcome import Reject, Retry

__all__ = ["App", "Delivery", "Reject", "Retry"]
