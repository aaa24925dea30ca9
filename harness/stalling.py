"""A TCP proxy that can stop forwarding without closing anything: its connections become black holes."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class StallingProxy:
    """Forwards bytes between clients and a server until `stall`. What it received, it still acknowledges.

    So TCP itself notices nothing, as behind a pooler or a load balancer whose server is gone.
    """

    def __init__(self, dsn: str, host: str = "127.0.0.1") -> None:
        given = conninfo_to_dict(dsn)
        self._target = (host, int(given["port"] or 5432))
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port)
        self.accepting = True
        """Whether connections that are made from now on work."""
        self.refused: int | None = None
        """How many connections were refused since `cut`; None while it works."""
        self._stalled = threading.Event()
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    @property
    def connections(self) -> int:
        """How many connections were made so far."""
        return len(self._sockets) // 2

    def stall(self, *, accepting: bool = True) -> None:
        """Forward nothing more on the connections that exist and, unless `accepting`, on later ones."""
        self.accepting = accepting
        self._stalled.set()
        self._stalled = threading.Event()

    def cut(self) -> None:
        """Close all connections and refuse new ones, as a server that is down, until `restore`."""
        self.refused = 0
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self.refused = None
        self.accepting = True

    def _start(self, target: object, *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.refused is not None:
                    self.refused += 1
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    # It is down. A client sees a connection that ends at once.
                    client.close()
                    continue
                self._sockets += [client, server]
                stalled = self._stalled
                if not self.accepting:
                    stalled = threading.Event()
                    stalled.set()
                self._start(self._forward, client, server, stalled)
                self._start(self._forward, server, client, stalled)

    def _forward(self, source: socket.socket, target: socket.socket, stalled: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not stalled.is_set():
                    target.sendall(data)
        if not stalled.is_set():
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
