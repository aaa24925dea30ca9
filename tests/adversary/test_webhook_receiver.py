"""The receiver of a webhook, or the author of its url, tries to have requests reach inner addresses.

No spelling, resolver or redirect leads to an address that is not public: a canary listens, unheard.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest
import pytest_asyncio
from aiohttp.abc import AbstractResolver, ResolveResult

from harness.answers import OK, saying
from harness.receiver import Receiver, response
from pgmb.webhooks.client import WebhookClient
from pgmb.webhooks.egress import Guard
from pgmb.webhooks.request import Request
from tests.webhooks.hostile import HOSTILE

pytestmark = pytest.mark.once


class Names(AbstractResolver):
    """Answers in turn for the names it was told; else what getaddrinfo makes of an address."""

    def __init__(self, answers: dict[str, list[list[str]]]) -> None:
        self._answers = answers

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        name = host.rstrip(".")
        if name in self._answers:
            answers = self._answers[name]
            addresses: Iterable[str] = answers.pop(0) if len(answers) > 1 else answers[0]
        else:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            addresses = [str(info[4][0]) for info in found]
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


NAMES = {
    "localhost": [["127.0.0.1", "::1"]],
    "inner.example": [["127.0.0.1"]],
    "inner6.example": [["::1"]],
    "both.example": [["127.0.0.1", "::1", "10.0.0.1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "nat64.example": [["64:ff9b::7f00:1"]],
    "metadata.example": [["169.254.169.254"]],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def canary() -> AsyncIterator[Receiver]:
    """Listens on every address of this machine."""
    async with Receiver(saying(OK), ["0.0.0.0", "::"] if has_ipv6() else ["0.0.0.0"]) as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded() -> AsyncIterator[WebhookClient]:
    async with WebhookClient(Guard(), resolver=Names(NAMES)) as poster:
        yield poster


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("url", HOSTILE, ids=ascii)
async def test_a_hostile_url_reaches_nothing(canary: Receiver, guarded: WebhookClient, url: str) -> None:
    before = canary.connections
    attempted = await guarded.post(Request(url.format(port=canary.port), b"{}", {}), 30, False)
    assert attempted.error_class in ("refused_address", "invalid_url", "dns"), attempted
    assert canary.connections == before


@pytest.mark.asyncio(loop_scope="module")
async def test_the_canary_is_heard_where_its_address_is_allowed(canary: Receiver) -> None:
    async with WebhookClient(Guard(["127.0.0.0/8"]), resolver=Names(NAMES)) as allowing:
        request = Request(HOSTILE[0].format(port=canary.port), b"{}", {})
        before = canary.connections
        assert (await allowing.post(request, 30, False)).status == 200
    assert canary.connections == before + 1


@pytest.mark.parametrize("host", ["localhost", "0x7f.1", "0x7f000001"])
async def test_what_the_system_resolves_is_looked_at_too(host: str) -> None:
    async with Receiver(saying(OK)) as canary:
        request = Request(f"http://{host}:{canary.port}/", b"{}", {})
        async with WebhookClient(Guard()) as poster:
            assert (await poster.post(request, 30, False)).error_class == "refused_address"
        assert canary.connections == 0
        async with WebhookClient(Guard(["127.0.0.0/8"])) as poster:
            assert (await poster.post(request, 30, False)).kind == "delivered"


async def test_a_resolver_that_changes_its_mind_gets_nowhere() -> None:
    # 127.0.0.2 stands for an address that may be reached.
    names = Names({"rebinding.example": [["127.0.0.2"], ["127.0.0.1"]]})
    closing = saying(response(200, "Connection: close"))
    async with Receiver(closing, ["127.0.0.2"]) as public, Receiver(saying(OK), port=public.port) as canary:
        async with WebhookClient(Guard(["127.0.0.2/32"]), resolver=names) as poster:
            request = Request(f"http://rebinding.example:{public.port}/", b"{}", {})
            assert (await poster.post(request, 30, False)).kind == "delivered"
            connector = poster._session.connector
            assert connector is not None
            connector.clear_dns_cache()  # type: ignore[attr-defined]
            again = await poster.post(request, 30, False)
        assert again.error_class == "refused_address"
        assert again.detail == "127.0.0.1 is not public (loopback)"
        assert (public.connections, canary.connections) == (1, 0)


@pytest.mark.parametrize(
    "order", [["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"], ["::1", "127.0.0.2"]]
)
async def test_of_several_addresses_only_those_are_tried_that_may_be(order: list[str]) -> None:
    names = Names({"mixed.example": [order]})
    async with (
        Receiver(saying(OK), ["127.0.0.2"]) as public,
        Receiver(saying(OK), port=public.port) as canary,
    ):
        async with WebhookClient(Guard(["127.0.0.2/32"]), resolver=names) as poster:
            attempted = await poster.post(
                Request(f"http://mixed.example:{public.port}/", b"{}", {}), 30, False
            )
        assert attempted.kind == "delivered"
        assert (public.connections, canary.connections) == (1, 0)


REDIRECTS = [
    *[(code, "Location: http://127.0.0.1:{port}/") for code in (300, 301, 302, 303, 305, 307, 308)],
    (302, "Location: //127.0.0.1:{port}/"),
    (307, "Location: http://localhost:{port}/"),
    (308, "Location: http://[::ffff:127.0.0.1]:{port}/"),
    (302, "Location: http://169.254.169.254/latest/meta-data/"),
    (302, "Location: file:///etc/passwd"),
]


@pytest.mark.parametrize(("code", "location"), REDIRECTS)
async def test_a_redirect_is_not_followed(code: int, location: str) -> None:
    async with Receiver(saying(OK)) as canary:
        away = saying(response(code, location.format(port=canary.port)))
        async with Receiver(away, ["127.0.0.2"]) as public, WebhookClient(Guard(["127.0.0.0/8"])) as poster:
            attempted = await poster.post(Request(f"http://127.0.0.2:{public.port}/", b"{}", {}), 30, False)
        assert attempted.kind == "failed"
        assert attempted.error_class == "redirect"
        assert (public.connections, canary.connections) == (1, 0)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Receiver(saying(OK)) as canary, Receiver(saying(OK), ["127.0.0.2"]) as public:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{canary.port}")
        async with WebhookClient(Guard(["127.0.0.0/8"])) as poster:
            attempted = await poster.post(Request(f"http://127.0.0.2:{public.port}/", b"{}", {}), 30, False)
        assert attempted.kind == "delivered"
        assert (public.connections, canary.connections) == (1, 0)


async def test_an_egress_proxy_gets_names() -> None:
    async with Receiver(saying(OK)) as proxy, WebhookClient(Guard(), proxy=at(proxy)) as poster:
        attempted = await poster.post(Request("http://example.org/hook", b"{}", {}), 30, False)
        assert attempted.kind == "delivered"
        assert proxy.requests[0].head.startswith(b"POST http://example.org/hook HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "0x7f.1", "2130706433", "[::1]", "localhost", "10.0.0.1", "a.localhost."]
)
async def test_an_egress_proxy_gets_no_inner_addresses(host: str) -> None:
    async with Receiver(saying(OK)) as proxy, WebhookClient(Guard(), proxy=at(proxy)) as poster:
        attempted = await poster.post(Request(f"http://{host}/", b"{}", {}), 30, False)
        assert attempted.error_class == "refused_address"
        assert proxy.requests == []


async def test_the_address_of_a_proxy_is_checked_if_asked() -> None:
    async with (
        Receiver(saying(OK)) as proxy,
        WebhookClient(Guard(), proxy=at(proxy), guard_proxy=True) as poster,
    ):
        attempted = await poster.post(Request("http://example.org/", b"{}", {}), 30, False)
        assert attempted.error_class == "refused_address"
        assert proxy.requests == []


def at(proxy: Receiver) -> str:
    return f"http://127.0.0.1:{proxy.port}"


async def test_a_proxy_that_is_not_there_is_named_so() -> None:
    async with Receiver(saying(OK)) as proxy:
        pass
    async with WebhookClient(Guard(), proxy=f"http://127.0.0.1:{proxy.port}") as poster:
        attempted = await poster.post(Request("http://example.org/", b"{}", {}), 30, False)
    assert attempted.error_class == "proxy"


# -- resolvers ---------------------------------------------------------------------------------------------


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Name servers of evil domains do not answer; other names are at 127.0.0.2."""
    ended = threading.Event()

    def look_up(host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        if "evil" in host:
            ended.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    ended.set()


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize(
    ("evil", "good"),
    [
        ("{n}.evil.example", "good.example"),
        ("{n}.a.b.evil.example", "good.example"),
        ("{n}.EVIL.example", "good.example"),
        ("{n}.evil.example.", "good.example."),
        ("{n}.evil.co.uk", "good.co.uk"),
        ("{n}.evil.com.au", "a.b.good.com.au"),
        ("evil{n}.abc.de", "good.de"),
    ],
)
async def test_name_servers_that_do_not_answer_delay_no_other_endpoint(evil: str, good: str) -> None:
    async with (
        Receiver(saying(OK), ["127.0.0.2"]) as public,
        WebhookClient(Guard(["127.0.0.2/32"])) as client,
        asyncio.timeout(60),
    ):
        urls = [f"http://{evil.format(n=number)}:{public.port}/" for number in range(300)]
        waiting = [asyncio.ensure_future(client.post(Request(url, b"{}", {}), 60, False)) for url in urls]
        # After these have all asked for their addresses.
        await asyncio.sleep(0)
        attempted = await client.post(Request(f"http://{good}:{public.port}/", b"{}", {}), 30, False)
        assert attempted.kind == "delivered", attempted
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_of_thousands_of_addresses_a_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(4000)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in many]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    checked: list[str] = []

    class Counting(Guard):
        def check(self, address: str) -> None:
            checked.append(address)
            super().check(address)

    async with WebhookClient(Counting()) as client:
        attempted = await client.post(Request("http://many.example/", b"{}", {}), 30, False)
    assert attempted.error_class == "refused_address"
    assert 1 <= len(checked) <= 200


# -- what is told of a failure -----------------------------------------------------------------------------

TOKEN = "T0KEN-a1b2c3d4e5f6"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:{port}/{token}?token={token}",
        "http://127.0.0.1:{port}/{token}?token={token}",
        "http://127.0.0.2:1/{token}?token={token}",
        "https://127.0.0.2:{port}/{token}?token={token}",
        "http://unknown.invalid/{token}?token={token}",
        "http://user:{token}@127.0.0.2:{port}/",
        "http://127.0.0.2:{port}\\{token}",
        "http://127.0.0.2:port/{token}",
        "ftp://127.0.0.2/{token}",
        "http://[::1/{token}",
        "{token}",
    ],
)
async def test_no_failure_tells_the_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Receiver(saying(b"nonsense\r\n\r\n"), ["127.0.0.2"]) as public,
        WebhookClient(Guard(["127.0.0.2/32"])) as client,
    ):
        request = Request(url.format(port=public.port, token=TOKEN), b"{}", {"authorization": TOKEN})
        # It waits for the rest of a head, the client for its part of a handshake.
        attempted = await client.post(request, 1 if url.startswith("https:") else 30, True)
    assert attempted.error_class is not None
    assert TOKEN not in repr(attempted)
    assert TOKEN not in repr(request)
    assert TOKEN not in caplog.text
