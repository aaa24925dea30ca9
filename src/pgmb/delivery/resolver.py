"""Names of hosts to addresses."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from aiohttp.abc import AbstractResolver, ResolveResult

_LOOKUPS = 256
_OF_ONE_DOMAIN = 4
"""Lookups at a time: a domain whose servers do not answer takes these threads and no others."""


class Resolver(AbstractResolver):
    """Names by getaddrinfo, in threads of its own, a few for each domain."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="pgmb-resolver")
        self._domains: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Every address of a name."""
        domain = ".".join(host.rstrip(".").lower().split(".")[-2:])
        place = self._domains.setdefault(domain, asyncio.Semaphore(_OF_ONE_DOMAIN))
        await place.acquire()
        try:
            looking = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port, family)
        except BaseException:
            place.release()
            raise
        # A request that gives up leaves its thread behind: the place is free when that ends.
        looking.add_done_callback(lambda _: place.release())
        found = await asyncio.shield(looking)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in found
        ]

    async def close(self) -> None:
        """Wait for nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
    except UnicodeError:
        # A label of no or too many letters.
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return [
        (kind, f"{address[0]}%{address[3]}" if len(address) == 4 and address[3] else str(address[0]))
        for kind, _, _, _, address in found
    ]
