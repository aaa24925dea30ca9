"""A throwaway pgbouncer in transaction mode."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo

from harness.account import remove_directory, scratch_directory, server_account
from harness.ports import free_port
from harness.server import HOST, Server
from harness.watchdog import watch

_open: set[PgBouncer] = set()


class PgBouncer:
    """Debian's pgbouncer in front of a `Server`.

    Every database of the server is reachable under its own name. It lets in the users named at start only,
    without a password.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = free_port()
        self.directory = scratch_directory("pgmb-bouncer-")
        self.log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._watchdog = watch(self.directory, self.directory / "pid", signal.SIGTERM)
        _open.add(self)

    @staticmethod
    def program() -> Path | None:
        found = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
        return Path(found) if found else None

    @classmethod
    def start(
        cls,
        server: Server,
        *,
        users: Sequence[str] = ("postgres",),
        settings: Mapping[str, str | int] | None = None,
    ) -> Self:
        bouncer = cls(server)
        try:
            bouncer._write(users, settings or {})
            bouncer._launch()
        except BaseException:
            bouncer.close()
            raise
        return bouncer

    def dsn(self, dbname: str = "postgres", user: str | None = None, *, tcp: bool = False) -> str:
        host = HOST if tcp else str(self.directory)
        return make_conninfo(host=host, port=self.port, user=user or "postgres", dbname=dbname)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        _open.discard(self)
        try:
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(10)
                self._process = None
        finally:
            remove_directory(self.directory)
            if self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
            self._watchdog.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, users: Sequence[str], settings: Mapping[str, str | int]) -> None:
        users_file = self.directory / "users"
        users_file.write_text("".join(f'"{user}" ""\n' for user in users))
        effective: dict[str, str | int] = {
            "listen_addr": HOST,
            "listen_port": self.port,
            "unix_socket_dir": str(self.directory),
            "pidfile": str(self.directory / "pid"),
            "auth_type": "trust",
            "auth_file": str(users_file),
            "admin_users": "postgres",
            "pool_mode": "transaction",
            "max_client_conn": 500,
            "default_pool_size": 20,
            "ignore_startup_parameters": "extra_float_digits",
            **settings,
        }
        lines = "".join(f"{key} = {value}\n" for key, value in effective.items())
        target = f"host={self.server.directory} port={self.server.port}"
        (self.directory / "pgbouncer.ini").write_text(f"[databases]\n* = {target}\n\n[pgbouncer]\n{lines}")

    def _launch(self) -> None:
        program = self.program()
        if program is None:
            raise RuntimeError("pgbouncer is not installed here; run `make setup`")
        with self.log.open("ab") as log:
            self._process = server_account().spawn([program, self.directory / "pgbouncer.ini"], log)
        deadline = time.monotonic() + 20
        while True:
            try:
                # Its own console answers without a server connection.
                psycopg.connect(self.dsn("pgbouncer"), autocommit=True).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"pgbouncer did not start:\n{self.log_text()}") from None
            time.sleep(0.01)


@atexit.register
def _close_all() -> None:
    for bouncer in list(_open):
        bouncer.close()
