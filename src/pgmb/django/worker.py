"""The project's app for a process that Django did not start, such as a worker."""

from __future__ import annotations

import django

django.setup()

from pgmb.django import app  # noqa: E402 - needs the settings

__all__ = ["app"]
