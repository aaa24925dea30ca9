"""An S3 server in this process: moto's, which keeps objects in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "lake"


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """Starts it with an empty bucket: the options by which `deltalake` reaches it."""
    import boto3  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs]
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        client = boto3.client(  # pyright: ignore[reportUnknownMemberType]
            "s3",
            endpoint_url=options["AWS_ENDPOINT_URL"],
            region_name=options["AWS_REGION"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket=BUCKET)
        yield options
    finally:
        server.stop()
