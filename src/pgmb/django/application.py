"""The app of a Django project: its database, its transactions, its connections."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import close_old_connections, connections
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from pgmb._async.broker import AsyncBroker
from pgmb._sync.broker import Broker
from pgmb._sync.publishing import Publishing
from pgmb.app.app import App, like

if TYPE_CHECKING:
    from pgmb._sync.calls import Pool

# Publishes inside Django's transactions only, so that it needs no connections.
_unconnected = Publishing(cast("Pool", None))


def alias() -> str:
    """The database that has pgmb, by its name in DATABASES: the setting PGMB_DATABASE, or "default"."""
    return str(getattr(settings, "PGMB_DATABASE", "default"))


def dsn_of(name: str) -> str:
    """A connection string to one of Django's databases; below `manage.py test`, to the test's."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    options: dict[str, Any] = connections[name].get_connection_params()
    return make_conninfo(**{key: value for key, value in options.items() if key in known})


class DjangoApp(App):
    """An app on Django's database. `publish` joins the transaction that Django has open."""

    def __init__(self, **options: Any) -> None:
        self._dsn = ""
        super().__init__("", **options)

    @property
    def dsn(self) -> str:
        """Looked up when it is used: tests change the database's name after this module was imported."""
        return self._dsn or dsn_of(alias())

    @dsn.setter
    def dsn(self, given: str) -> None:
        self._dsn = given

    @property
    def _publishing(self) -> Publishing:
        # What instruments an app instruments brokers, by their servers.
        return _unconnected if self.observer is None else self.broker

    def prepared(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function that is no coroutine runs with living database connections, as a request does."""
        return function if inspect.iscoroutinefunction(function) else _connected(function)

    @like(Broker.publish)
    def publish(self, *arguments: Any, **options: Any) -> Any:
        return self._publishing.publish(*arguments, **{"conn": connections[alias()], **options})

    @like(Broker.publish_many)
    def publish_many(self, *arguments: Any, **options: Any) -> Any:
        return self._publishing.publish_many(*arguments, **{"conn": connections[alias()], **options})

    @like(AsyncBroker.publish)
    async def apublish(self, *arguments: Any, **options: Any) -> Any:
        # In the thread of Django's connections, as its own queries.
        return await sync_to_async(self.publish, thread_sensitive=True)(*arguments, **options)


def _connected(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Drops connections that are broken or too old before and after a call, in the call's own thread."""

    @functools.wraps(function)
    def handle(given: Any) -> Any:
        close_old_connections()
        try:
            return function(given)
        finally:
            close_old_connections()

    return handle
