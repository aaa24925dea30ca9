"""Which addresses may be connected to, and which urls posted to."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb import InvalidArgument
from pgmb.errors import AddressRefused
from pgmb.webhooks.egress import Guard, check_literal, check_url

pytestmark = pytest.mark.once

REFUSED = {
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd00:ec2::254"],
    "link-local": [
        "169.254.0.1",
        "169.254.169.254",
        "fe80::1",
        "fe80::1%eth0",
        "febf::1",
        "2002:a9fe:a9fe::1",
    ],
    "shared by carriers": ["100.64.0.1", "100.100.100.200", "100.127.255.255", "::ffff:100.64.0.1"],
    "metadata": ["168.63.129.16"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "broadcast": ["255.255.255.255"],
    "reserved": [
        "192.0.0.1",
        "192.0.0.192",
        "240.0.0.1",
        "255.255.255.254",
        "2001:1ff::1",
        "4000::1",
        "1::1",
    ],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "benchmarks": ["198.18.0.1", "198.19.255.255", "2001:2::1"],
    "mapped": ["::ffff:8.8.8.8"],
    "translated": ["::ffff:0:8.8.8.8"],
    "compatible": ["::8.8.8.8"],
    "NAT64": ["64:ff9b::8.8.8.8", "64:ff9b:1::8.8.8.8"],
    "6to4": ["192.88.99.1", "2002:808:808::1"],
    "Teredo": ["2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"],
    "discard": ["100::1"],
    "site-local": ["fec0::1"],
}
PUBLIC = ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.255.255", "172.32.0.1", "192.0.1.1"]
PUBLIC += [
    "198.17.255.255",
    "198.20.0.1",
    "223.255.255.255",
    "2001:200::1",
    "2606:4700::1111",
    "2a00:1450::1",
]


@pytest.mark.parametrize(
    ("why", "address"), [(why, address) for why, addresses in REFUSED.items() for address in addresses]
)
def test_addresses_that_are_not_public_are_refused(why: str, address: str) -> None:
    with pytest.raises(AddressRefused) as caught:
        Guard().check(address)
    assert str(caught.value) == f"{address} is not public ({why})"
    assert caught.value.hint


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_not(address: str) -> None:
    Guard().check(address)


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "0x7f.0.0.1", "0177.0.0.1", "2130706433", "::g", "1.2.3"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressRefused, match="is not an IP address"):
        Guard(["0.0.0.0/0", "::/0"]).check(text)


@given(st.integers(0, 2**32 - 1))
def test_an_address_inside_another_is_refused_with_it(number: int) -> None:
    inner = socket.inet_ntoa(number.to_bytes(4, "big"))
    allowing = Guard(["::/0"])
    forms = [
        f"::ffff:{inner}",
        f"64:ff9b::{inner}",
        f"64:ff9b:1::{inner}",
        f"2002:{number >> 16:x}:{number & 65535:x}::",
    ]
    try:
        Guard().check(inner)
    except AddressRefused:
        for form in forms:
            with pytest.raises(AddressRefused):
                allowing.check(form)
    else:
        for form in forms:
            allowing.check(form)


def test_ranges_are_allowed_by_an_operator() -> None:
    guard = Guard(["127.0.0.0/8", "10.1.0.0/16", "fd00:1::/32", "64:ff9b::/96"])
    for address in (
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "10.1.2.3",
        "fd00:1::5",
        "64:ff9b::808:808",
        "64:ff9b::10.1.2.3",
    ):
        guard.check(address)
    for address in (
        "10.2.0.1",
        "fd00:2::1",
        "::1",
        "64:ff9b::10.2.0.1",
        "64:ff9b:1::10.1.2.3",
        "::127.0.0.1",
    ):
        with pytest.raises(AddressRefused):
            guard.check(address)


@pytest.mark.parametrize("text", ["", "localhost", "127.0.0.1/8", "10.0.0.0/33", "10.0.0.0-10.0.0.9"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Guard([text])
    assert caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org",
        "http://example.org:8080/a/b?c=d#e",
        "HTTPS://EXAMPLE.ORG/",
        "https://bücher.example/ü?ü=ü",
        "https://xn--bcher-kva.example/",
        "http://93.184.216.34/",
        "http://[2606:4700::1111]:8443/",
        "http://host_with_underscore/",
        "https://example.org/" + "a" * 1980,
    ],
)
def test_urls_to_post_to(url: str) -> None:
    check_url(url)


BAD_URLS = [
    "",
    "example.org",
    "//example.org/",
    "/path",
    "ftp://example.org/",
    "file:///etc/passwd",
    "gopher://example.org/_x",
    "unix:///run/x.sock",
    "tcp://example.org:80",
    "ws://example.org/",
    "javascript:alert(1)",
    "http:///path",
    "http://",
    "http://:80/",
    "http://./",
    "http://user@example.org/",
    "http://user:password@example.org/",
    "http://@example.org/",
    "http://example.org:0/",
    "http://example.org:65536/",
    "http://example.org:-1/",
    "http://example.org:port/",
    "http://example.org/a b",
    "http://example.org/\n",
    "http://example.org/\r\nx: y",
    "\thttp://example.org/",
    "http://example.org\\@127.0.0.1/",
    "http://exa\u200bmple.org/",
    "http://example.org/\u202e",
    "http://[::1/",
    "http://[hello]/",
    "https://example.org/" + "a" * 2000,
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_urls_that_are_none_to_post_to(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_url(url)
    assert caught.value.hint
    assert "password" not in str(caught.value).replace("no password", "")


def test_only_sockets_for_the_internet_are_made() -> None:
    with pytest.raises(AddressRefused, match="only IPv4 and IPv6"):
        Guard().socket_factory((socket.AF_UNIX, socket.SOCK_STREAM, 0, "", ("/run/x.sock",)))


@pytest.mark.parametrize("host", ["example.org", "8.8.8.8", "2606:4700::1111", "0x08080808"])
def test_hosts_that_a_proxy_may_be_asked_for(host: str) -> None:
    check_literal(Guard(), host)
