"""Egress control: name resolution, and connections to public addresses only unless an operator allows more.

The guard checks the address that a socket is created for, after name resolution. Unusual spellings, DNS
rebinding and names of internal hosts do not get past it. The ranges are listed here because `ipaddress`
classifies some of them differently between Python releases.
"""

from __future__ import annotations

import asyncio
import re
import socket
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pgmb.errors import AddressRefused, InvalidArgument

Address: TypeAlias = IPv4Address | IPv6Address
AddressInfo: TypeAlias = tuple[Any, Any, int, str, tuple[Any, ...]]
"""A result of getaddrinfo."""

_REFUSED_4 = [
    (IPv4Network(network), why)
    for network, why in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by carriers"),  # 100.100.100.200: cloud metadata
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "metadata"),  # Azure's host, in a public range
        ("169.254.0.0/16", "link-local"),  # 169.254.169.254: cloud metadata
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),  # 192.0.0.192: cloud metadata
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarks"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
    )
]

# The first range that contains an address gives the reason, so narrower ranges come first.
_REFUSED_6 = [
    (IPv6Network(network), why)
    for network, why in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "mapped"),
        ("::ffff:0:0:0/96", "translated"),
        ("::/96", "compatible"),
        ("64:ff9b::/96", "NAT64"),
        ("64:ff9b:1::/48", "NAT64"),
        ("100::/64", "discard"),
        ("2001::/32", "Teredo"),
        ("2001:2::/48", "benchmarks"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "documentation"),
        ("fc00::/7", "private"),  # fd00:ec2::254: cloud metadata
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
]
_UNICAST_6 = IPv6Network("2000::/3")
_MAPPED = IPv6Network("::ffff:0:0/96")
_6TO4 = IPv6Network("2002::/16")
# The last 32 bits are an IPv4 address.
_EMBEDDING = [
    IPv6Network(network)
    for network in ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48")
]
_LONGEST_URL = 2000
_AUTHORITY_END = re.compile(r"[/?#]")


class Guard:
    """Refuses addresses that are not public, except those in the networks of `allowed` (CIDR notation).

    An IPv6 address that embeds an IPv4 address is permitted only if the embedded one is permitted too.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed_4: list[IPv4Network] = []
        self._allowed_6: list[IPv6Network] = []
        for text in allowed:
            try:
                network = ip_network(text)
            except ValueError as error:
                refused = InvalidArgument(f"{text!r} is not an address range: {error}")
                refused.advise("Use CIDR notation, such as 10.1.0.0/16 or fd00:1::/32.")
                raise refused from None
            if isinstance(network, IPv4Network):
                self._allowed_4.append(network)
            else:
                self._allowed_6.append(network)

    def check(self, address: str) -> None:
        """Raise AddressRefused unless this IP address may be connected to."""
        try:
            parsed = ip_address(address.partition("%")[0])
        except ValueError:
            raise AddressRefused(f"{address!r} is not an IP address") from None
        why = self._why_not_4(parsed) if isinstance(parsed, IPv4Address) else self._why_not_6(parsed)
        if why is not None:
            refused = AddressRefused(f"{address} is not public ({why})")
            refused.advise("Allow private networks with the dispatcher's --allow option.")
            raise refused

    def socket_factory(self, info: AddressInfo) -> socket.socket:
        """Create a socket for a permitted address. aiohttp's connector calls it for every connection."""
        family, kind, protocol, _, address = info
        if family not in (socket.AF_INET, socket.AF_INET6):
            raise AddressRefused("only IPv4 and IPv6 are supported")
        self.check(str(address[0]))
        return socket.socket(family, kind, protocol)

    def _why_not_4(self, address: IPv4Address) -> str | None:
        if any(address in network for network in self._allowed_4):
            return None
        return next((why for network, why in _REFUSED_4 if address in network), None)

    def _why_not_6(self, address: IPv6Address) -> str | None:
        inner = embedded(address)
        if inner is not None and (why := self._why_not_4(inner)) is not None:
            return why
        if any(address in network for network in self._allowed_6):
            return None
        if address in _MAPPED and any(inner in network for network in self._allowed_4):
            return None
        for network, why in _REFUSED_6:
            if address in network:
                return why
        return None if address in _UNICAST_6 else "reserved"


def embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a translator or tunnel would send this address's packets to."""
    if address in _6TO4:
        return IPv4Address(int(address) >> 80 & 0xFFFF_FFFF)
    if int(address) > 1 and any(address in network for network in _EMBEDDING):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


def check_url(url: str) -> URL:
    """Parse a URL. Raises InvalidArgument, without quoting it, unless requests can be posted to it."""
    if len(url) > _LONGEST_URL:
        raise _invalid_url(f"a url has at most {_LONGEST_URL} characters")
    if "\\" in url or any(unicodedata.category(letter)[0] in "CZ" for letter in url):
        raise _invalid_url("a url has no blanks, control characters or backslashes")
    try:
        parsed = URL(url)
        scheme, host, port = parsed.scheme, parsed.raw_host, parsed.port
    except ValueError:
        raise _invalid_url("this is no url") from None
    if scheme not in ("http", "https"):
        raise _invalid_url("a url begins with https:// or http://")
    if not host or host.strip(".") == "":
        raise _invalid_url("a url names a host")
    if "@" in _AUTHORITY_END.split(url.partition("//")[2], maxsplit=1)[0]:
        raise _invalid_url("a url holds no user and no password")
    if not port:
        raise _invalid_url("a url's port is between 1 and 65535")
    return parsed


def check_literal(guard: Guard, host: str) -> None:
    """Raise AddressRefused if a host is an IP address, in any spelling, that may not be connected to.

    With a proxy, which resolves names itself, this is the only check that can be made here.
    """
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        name = "127.0.0.1"
    if ":" not in name:
        try:
            name = str(IPv4Address(socket.inet_aton(name)))
        except OSError:
            return
    guard.check(name)


def _invalid_url(said: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise("Such as https://example.org/hooks/1.")
    return error


_MOST_LOOKUPS = 256
_MOST_LOOKUPS_PER_DOMAIN = 4
"""A domain whose name servers do not answer occupies this many threads at most."""
_MOST_LOOKUPS_PER_REGISTRY = 64
"""The same for a name such as co.uk, below which anyone can register a domain."""
_MOST_ADDRESSES = 16
"""Of one name. After each that fails aiohttp tries the rest again: the work grows with the square."""


class Resolver(AbstractResolver):
    """Resolves names with getaddrinfo in its own threads, at most 4 per domain."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST_LOOKUPS, thread_name_prefix="pgmb-resolver")
        self._domains: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """All addresses of a host name."""
        taken: list[asyncio.Semaphore] = []
        try:
            for domain, most in _domains_of(host):
                slots = self._domains.setdefault(domain, asyncio.Semaphore(most))
                await slots.acquire()
                taken.append(slots)
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port, family)
        except BaseException:
            _release(taken)
            raise
        # A cancelled request does not stop its thread: the slots are free when the lookup ends.
        lookup.add_done_callback(lambda _: _release(taken))
        found = await asyncio.shield(lookup)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in found[:_MOST_ADDRESSES]
        ]

    async def close(self) -> None:
        """Discard queued lookups without waiting for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _domains_of(host: str) -> list[tuple[str, int]]:
    """The domain of a host, and a registry above it, each with how many lookups it may have at a time.

    Without a list of registries: one has two labels, a country's and a short one. A domain that looks alike
    gets more lookups than others, but not all.
    """
    labels = host.rstrip(".").lower().split(".")
    if len(labels) > 2 and len(labels[-1]) == 2 and len(labels[-2]) <= 3:
        return [
            (".".join(labels[-3:]), _MOST_LOOKUPS_PER_DOMAIN),
            (".".join(labels[-2:]), _MOST_LOOKUPS_PER_REGISTRY),
        ]
    return [(".".join(labels[-2:]), _MOST_LOOKUPS_PER_DOMAIN)]


def _release(taken: list[asyncio.Semaphore]) -> None:
    for slots in taken:
        slots.release()


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
    except UnicodeError:
        # An empty label, or one that is too long.
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    return [
        (kind, f"{address[0]}%{address[3]}" if len(address) == 4 and address[3] else str(address[0]))
        for kind, _, _, _, address in found
    ]
