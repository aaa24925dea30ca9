"""pgmb http with a certificate, behind a proxy that it believes."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path

import httpx
import msgspec

from harness.certificates import self_signed
from harness.serving import serving


def test_https_and_the_address_that_a_proxy_tells(dsn: str, tmp_path: Path) -> None:
    chain, key = self_signed(tmp_path)
    arguments = [
        "--ssl-certfile",
        str(chain),
        "--ssl-keyfile",
        str(key),
        "--proxy-headers",
        "--log-format",
        "json",
    ]
    trusted = ssl.create_default_context(cafile=str(chain))
    with serving(dsn, "http", *arguments) as served:
        assert served.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=served.url, verify=trusted, timeout=30) as client:
            assert client.get("/livez").text == "ok\n"
            assert client.get("/nowhere", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 404
        served.process.send_signal(signal.SIGTERM)
        log = served.ended()
    (line,) = [msgspec.json.decode(line) for line in log.splitlines() if "pgmb.access" in line]
    assert line["client"] == "203.0.113.9"
