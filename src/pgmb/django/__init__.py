"""pgmb in a Django project: add "pgmb.django" to INSTALLED_APPS.

    # shop/events.py
    from pgmb.django import app

    @app.on("order.paid")
    def send_receipt(order: dict) -> None: ...

`app.publish` joins the transaction of the settings' database; `manage.py pgmb work` runs the handlers.
"""

from __future__ import annotations

from pgmb.django.application import DjangoApp

__all__ = ["DjangoApp", "app"]

app = DjangoApp()
"""The project's app: handlers of all `events` modules."""
