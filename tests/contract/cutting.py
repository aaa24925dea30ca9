"""A way to the server that can be cut when its work is done and the client has not heard of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class CuttingProxy:
    """Forwards bytes between clients and a server. `cut_next_answer` drops one answer, and its connection."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._armed: bytes | None = None
        self.cut = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut_next_answer(self, containing: bytes) -> None:
        """Of the next statement that holds these bytes, the answer never arrives."""
        self.cut.clear()
        self._armed = containing

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                doomed = threading.Event()
                self._start(self._forward, client, server, doomed, True)
                self._start(self._forward, server, client, doomed, False)

    def _forward(
        self, source: socket.socket, target: socket.socket, doomed: threading.Event, asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if asks and self._armed is not None and self._armed in data:
                    self._armed = None
                    doomed.set()
                if not asks and doomed.is_set():
                    self.cut.set()
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
