"""The Dispatcher posts events to HTTP endpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgmb._async.broker import AsyncBroker

if TYPE_CHECKING:
    from pgmb.webhooks.client import WebhookClient
    from pgmb.webhooks.dispatcher import DispatchLoop
    from pgmb.webhooks.request import Serialiser


class Dispatcher:
    """Any number may run: they share the events, and what endpoints allow. Needs the extra `webhooks`.

    allow: networks that endpoints may be in although they are not public, as `10.1.0.0/16`. Secrets are
    opened with the key in the environment, where there is one.

    serialiser: returns the body and the content type of a request, from its endpoint and its events. An
    exception fails these events, not their endpoint.
    """

    name = "dispatcher"

    def __init__(
        self,
        allow: Sequence[str] = (),
        egress_proxy: str | None = None,
        lease_for: float = 10.0,
        *,
        serialiser: Serialiser | None = None,
    ) -> None:
        self._allow = allow
        self._egress_proxy = egress_proxy
        self._lease_for = lease_for
        self._serialiser = serialiser
        self._poster: WebhookClient | None = None
        self._dispatch: DispatchLoop | None = None

    async def turn(self, broker: AsyncBroker) -> float:
        if self._dispatch is None:
            self._dispatch = await self._open()
        await self._dispatch.turn(broker)
        await self._dispatch.wait()
        return 0.0

    async def close(self, broker: AsyncBroker) -> None:
        """Give back what was not posted."""
        dispatch, self._dispatch = self._dispatch, None
        poster, self._poster = self._poster, None
        try:
            if dispatch is not None:
                await dispatch.stop(broker)
        finally:
            if poster is not None:
                await poster.__aexit__(None, None, None)

    async def _open(self) -> DispatchLoop:
        # What delivery needs is an extra.
        from pgmb.webhooks.client import WebhookClient
        from pgmb.webhooks.dispatcher import DispatchLoop
        from pgmb.webhooks.egress import Guard
        from pgmb.webhooks.secrets import KEY_FILE_VARIABLE, KEY_VARIABLE, SealingKey

        given = os.environ.get(KEY_VARIABLE) or os.environ.get(KEY_FILE_VARIABLE)
        key = SealingKey.from_environment() if given else None
        self._poster = await WebhookClient(
            Guard(self._allow), connections=0, proxy=self._egress_proxy
        ).__aenter__()
        return DispatchLoop(self._poster, key, lease_for=self._lease_for, serialiser=self._serialiser)
