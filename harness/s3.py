"""An S3 server: moto's, in a process of its own, which keeps objects in memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.ports import free_port

BUCKET = "lake"


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """Starts it with an empty bucket: the options by which `deltalake` reaches it."""
    port = free_port()
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    # Not in this process: deltalake holds Python's lock while it waits for an answer.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _create_bucket(options, server)
        yield options
    finally:
        server.kill()
        server.wait()


def bucket(options: dict[str, str]) -> Any:
    """The bucket, by Amazon's own client."""
    import boto3  # pyright: ignore[reportMissingTypeStubs]

    connect: Any = boto3.resource  # pyright: ignore[reportUnknownMemberType]
    found: Any = connect(
        "s3",
        endpoint_url=options["AWS_ENDPOINT_URL"],
        region_name=options["AWS_REGION"],
        aws_access_key_id=options["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=options["AWS_SECRET_ACCESS_KEY"],
    )
    return found.Bucket(BUCKET)


def _create_bucket(options: dict[str, str], server: subprocess.Popen[bytes]) -> None:
    from botocore.exceptions import EndpointConnectionError  # pyright: ignore[reportMissingTypeStubs]

    until = time.monotonic() + 120
    while True:
        try:
            bucket(options).create()
        except EndpointConnectionError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return
