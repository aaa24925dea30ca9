"""Free TCP ports for servers."""

from __future__ import annotations

import random
import socket

# Below the range from which the kernel gives ports to outgoing connections: a server that is down for a
# moment must find its port free when it comes back.
_RANGE = range(15000, 32000)
# pytest-randomly seeds the global generator; two processes with one seed would go for the same ports.
_random = random.SystemRandom()


def free_port() -> int:
    for _ in range(200):
        port = _random.choice(_RANGE)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free TCP port found")
