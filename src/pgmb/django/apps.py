"""The Django application."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.db import connections, router
from django.db.models.signals import pre_migrate
from django.utils.module_loading import autodiscover_modules

from pgmb import schema
from pgmb._sync.broker import connect


class PgmbConfig(AppConfig):
    name = "pgmb.django"
    label = "pgmb"
    verbose_name = "pgmb"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        autodiscover_modules("events")
        self._find_tasks()
        # Before all migrations: those of other applications may use pgmb's functions.
        pre_migrate.connect(install, sender=self)

    @staticmethod
    def _find_tasks() -> None:
        """Have each of our backends for Django's Tasks declare its queues."""
        ours = [
            name
            for name, params in getattr(settings, "TASKS", {}).items()
            if params["BACKEND"].startswith("pgmb.django.tasks.")
        ]
        if ours:
            from pgmb.django.tasks import backends

            for name in ours:
                backends()[name]


def install(using: str, **_: Any) -> None:
    """Install or upgrade the schema, and create the queues of the project's handlers."""
    # Here, because importing it before the settings are configured would fail.
    from pgmb.django import app
    from pgmb.django.application import alias, dsn_of

    wanted = connections[using].vendor == "postgresql" and using == alias()
    if not wanted or not router.allow_migrate(using, "pgmb"):
        return
    dsn = dsn_of(using)
    if (schema.installed_version(dsn) or 0) < schema.VERSION:
        schema.install(dsn)
    with connect(dsn) as broker:
        app.create_queues(broker)
