"""pgmb http with a certificate, behind a proxy that it believes."""

from __future__ import annotations

import signal
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.serving import serving


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """One that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pgmb test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, secret = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, secret


def test_https_and_the_address_that_a_proxy_tells(dsn: str, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
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
