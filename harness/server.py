"""A throwaway PostgreSQL server."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import psycopg
from psycopg.conninfo import make_conninfo

from harness import processes
from harness.account import remove_directory, scratch_directory, server_account
from harness.installations import binaries
from harness.ports import free_port
from harness.watchdog import watch

Settings: TypeAlias = Mapping[str, str | int | float | bool]
Mode: TypeAlias = Literal["smart", "fast", "immediate"]

HOST = "127.0.0.1"
_START_TIMEOUT = 60.0
_SIGNALS: dict[Mode, int] = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

DEFAULTS: Settings = {
    # Throwaway data need not survive a crash of the operating system. A killed server recovers without.
    "fsync": "off",
    "max_connections": 200,
    "max_prepared_transactions": 20,
    "wal_level": "replica",
    # Standbys stream without a slot; this is how far one may fall behind.
    "wal_keep_size": "256MB",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "logging_collector": "off",
}

# Not part of a base backup: the running server's own state, or rebuilt at start.
_NOT_COPIED_FILES = {
    "postmaster.pid",
    "postmaster.opts",
    "pg_internal.init",
    "backup_label",
    "standby.signal",
}
_NOT_COPIED_CONTENTS = {
    "pg_dynshmem",
    "pg_notify",
    "pg_replslot",
    "pg_serial",
    "pg_snapshots",
    "pg_stat_tmp",
    "pg_subtrans",
    "pg_wal",
}

_open: set[Server] = set()


class Server:
    """A cluster of its own: data, unix socket and log in one temporary directory, TCP on a free port.

    Make one with `Server.start`. `close` (or leaving the `with` block, or the end of the process, however it
    comes) stops it and removes the directory.
    """

    def __init__(self, major: int, name: str, settings: Settings | None, memory: bool) -> None:
        self.major = major
        self.name = name
        self.memory = memory
        self.port = free_port()
        self.settings: dict[str, str | int | float | bool] = {**DEFAULTS, **(settings or {})}
        self.directory = scratch_directory(f"pgmb-{major}-", memory=memory)
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: psycopg.Connection[Any] | None = None
        self._orphaned_memory: set[Path] = set()
        self._owner = os.getpid()
        self._watchdog = watch(self.directory, self.data / "postmaster.pid", signal.SIGQUIT)
        _open.add(self)

    # -- life ------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        major: int,
        *,
        settings: Settings | None = None,
        name: str = "pgmb",
        memory: bool = False,
        copy_of: Server | None = None,
    ) -> Self:
        """A new, empty, running cluster. `settings` go over `DEFAULTS`; `name` becomes its `cluster_name`.

        With `memory` its data lives in the machine's memory where that suffices: for tests, not measurements.
        With `copy_of` it is a copy of a prepared one, whose system identifier it then has.
        """
        server = cls(major, name, settings, memory)
        try:
            if copy_of is None:
                server._initialise()
            else:
                _copy_cluster(copy_of.data, server.data, without=())
            server._launch_on_free_port()
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def prepare(cls, major: int, *, memory: bool = False) -> Self:
        """A cluster that is never started, to be copied: that takes a tenth of the time of a new one."""
        server = cls(major, "prepared", None, memory)
        try:
            server._initialise()
        except BaseException:
            server.close()
            raise
        return server

    def stop(self, mode: Mode = "fast", timeout: float = 60.0) -> None:
        """Shuts down and waits for the end. The data stays; `start_again` continues with it."""
        self._close_admin()
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            processes.send(process.pid, _SIGNALS[mode])
        process.wait(timeout)
        self._process = None

    def kill(self) -> None:
        """SIGKILL to the postmaster and all its children at once: what a crash of the machine looks like."""
        process = self._running()
        family = [*processes.children(process.pid), process.pid]
        self._orphaned_memory |= processes.shared_memory_files(family)
        processes.kill_family(process)
        self._process = None
        self._close_admin()

    def start_again(self, settings: Settings | None = None) -> None:
        """Starts a stopped or killed server on its data and port, with crash recovery where that is due."""
        if self._process is not None:
            raise RuntimeError(f"{self} is running")
        self._write_settings(settings)
        self._launch()

    def restart(self, mode: Mode = "fast", settings: Settings | None = None) -> None:
        self.stop(mode)
        self.start_again(settings)

    def configure(self, settings: Settings) -> None:
        """Changes settings that need no restart, and waits until new sessions see them."""
        self._write_settings(settings)
        with self.connect() as connection:
            before = connection.execute("select pg_conf_load_time()").fetchone()
        processes.send(self.postmaster_pid, signal.SIGHUP)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with self.connect() as connection:
                if connection.execute("select pg_conf_load_time()").fetchone() != before:
                    return
            time.sleep(0.005)
        raise TimeoutError(f"{self} did not reload its settings")

    def close(self) -> None:
        """Ends the server and removes all of it. May be called at any time, and again."""
        if self._owner != os.getpid():
            return  # a forked child does not own its parent's servers
        _open.discard(self)
        try:
            self.stop("immediate", 20)
        except subprocess.TimeoutExpired:
            self.kill()
        finally:
            self._remove_orphaned_memory()
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

    def __repr__(self) -> str:
        return f"<Server {self.major} {self.name!r} port {self.port}>"

    # -- looking at it ---------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def postmaster_pid(self) -> int:
        return self._running().pid

    def dsn(self, dbname: str = "postgres", user: str | None = None, *, tcp: bool = False) -> str:
        """A connection string, over the unix socket unless `tcp`."""
        host = HOST if tcp else str(self.directory)
        return make_conninfo(host=host, port=self.port, user=user or "postgres", dbname=dbname)

    def url(self, dbname: str = "postgres", user: str | None = None) -> str:
        return f"postgresql://{user or 'postgres'}@{HOST}:{self.port}/{dbname}"

    def connect(self, dbname: str = "postgres", user: str | None = None) -> psycopg.Connection[Any]:
        """A new autocommit connection."""
        return psycopg.connect(self.dsn(dbname, user), autocommit=True)

    def admin(self) -> psycopg.Connection[Any]:
        """The harness's own autocommit connection to database `postgres`, opened once and kept."""
        if self._admin is None or self._admin.closed:
            self._admin = self.connect()
        return self._admin

    def cpu_seconds(self) -> float:
        """User and system time of all processes of this server since its last start, exited ones included."""
        return processes.cpu_seconds(self.postmaster_pid)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    # -- replication -----------------------------------------------------------------------------------------

    def standby(self, *, settings: Settings | None = None, name: str = "standby") -> Server:
        """A streaming standby of this server, known to it as application `name`."""
        standby = Server(self.major, name, {**self.settings, **(settings or {})}, self.memory)
        try:
            standby.settings["primary_conninfo"] = make_conninfo(
                host=HOST, port=self.port, user="postgres", application_name=name
            )
            standby._copy_from(self)
            standby._launch_on_free_port()
        except BaseException:
            standby.close()
            raise
        return standby

    def promote(self) -> None:
        """Makes a standby a primary, and waits until it takes writes."""
        with self.connect() as connection:
            row = connection.execute("select pg_promote(wait => true, wait_seconds => 60)").fetchone()
        if row is None or not row[0]:
            raise RuntimeError(f"{self} was not promoted:\n{self.log_text()}")

    def wait_for_replay(self, primary: Server, timeout: float = 30.0) -> None:
        """Waits until this standby has replayed all that `primary` has written by now."""
        with primary.connect() as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            # An unflushed tail (an idle asynchronous commit) is not streamed before something flushes it.
            connection.execute("select pg_logical_emit_message(true, 'pgmb', '')")
        deadline = time.monotonic() + timeout
        with self.connect() as connection:
            while time.monotonic() < deadline:
                done = connection.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", row).fetchone()
                if done is not None and done[0]:
                    return
                time.sleep(0.005)
        raise TimeoutError(f"{self} did not replay up to {row[0]}:\n{self.log_text()[-2000:]}")

    # -- inside ----------------------------------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self} is not running")
        return self._process

    def _initialise(self) -> None:
        done = server_account().run(
            [
                binaries(self.major) / "initdb",
                f"--pgdata={self.data}",
                "--username=postgres",
                "--auth=trust",
                "--locale=C",
                "--encoding=UTF8",
                "--no-sync",
                "--no-instructions",
            ]
        )
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude 'pgmb.conf'\n")

    def _write_settings(self, changes: Settings | None = None) -> None:
        self.settings.update(changes or {})
        effective = {
            **self.settings,
            "port": self.port,
            "listen_addresses": HOST,
            "unix_socket_directories": str(self.directory),
            "cluster_name": self.name,
        }
        lines = [f"{key} = {_quoted(value)}\n" for key, value in effective.items()]
        conf = self.data / "pgmb.conf"
        conf.write_text("".join(lines))
        server_account().own(conf)

    def _launch_on_free_port(self) -> None:
        for attempt in range(5):
            self._write_settings()
            try:
                return self._launch()
            except RuntimeError:
                # Somebody took the port between our look and the server's bind.
                if attempt == 4 or "could not bind" not in self.log_text():
                    raise
                self.log.unlink()
                self.port = free_port()
        return None

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            server_account().own(self.log)
            self._process = server_account().spawn([binaries(self.major) / "postgres", "-D", self.data], log)
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._ready():
            if self._process.poll() is not None:
                self._process = None
                raise RuntimeError(f"{self} did not start:\n{self.log_text()[-4000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self} is not ready after {_START_TIMEOUT} s:\n{self.log_text()[-4000:]}"
                )
            time.sleep(0.01)

    def _ready(self) -> bool:
        """Whether the pid file, if it is not one a killed predecessor left, says sessions are taken."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return (
            len(lines) >= 8
            and int(lines[0]) == self.postmaster_pid
            and lines[7].strip() in ("ready", "standby")
        )

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _remove_orphaned_memory(self) -> None:
        """What a killed server leaves outside of its directory when it was not started again."""
        for path in self._orphaned_memory:
            path.unlink(missing_ok=True)
        try:
            segment = (self.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        except (OSError, IndexError):
            return
        subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)

    def _copy_from(self, primary: Server) -> None:
        """A base backup: by pg_basebackup, or by SQL and copying files where a build lacks it."""
        program = binaries(self.major) / "pg_basebackup"
        if program.exists():
            source = make_conninfo(host=HOST, port=primary.port, user="postgres")
            done = server_account().run(
                [program, f"--pgdata={self.data}", f"--dbname={source}", "--checkpoint=fast", "--no-sync"]
            )
            if done.returncode != 0:
                raise RuntimeError(f"pg_basebackup failed:\n{done.stdout}{done.stderr}")
            (self.data / "standby.signal").touch()
            server_account().own(self.data / "standby.signal")
            return
        with primary.connect() as connection:
            connection.execute("select pg_backup_start('pgmb', fast => true)")
            _copy_cluster(primary.data, self.data, without=_NOT_COPIED_CONTENTS)
            row = connection.execute(
                "select labelfile from pg_backup_stop(wait_for_archive => false)"
            ).fetchone()
        assert row is not None
        (self.data / "backup_label").write_text(row[0])
        (self.data / "standby.signal").touch()
        for name in ("backup_label", "standby.signal"):
            server_account().own(self.data / name)


def _copy_cluster(source: Path, target: Path, without: Collection[str]) -> None:
    account = server_account()
    target.mkdir(mode=0o700)
    account.own(target)
    for entry in os.scandir(source):
        copy = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            if entry.name in without:
                copy.mkdir(mode=0o700)
                account.own(copy)
            else:
                _copy_cluster(Path(entry.path), copy, without)
        elif entry.name not in _NOT_COPIED_FILES:
            try:
                shutil.copy2(entry.path, copy)
            except FileNotFoundError:
                continue  # dropped while we copied; the log will tell the standby
            account.own(copy)


def _quoted(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"


@atexit.register
def _close_all() -> None:
    for server in list(_open):
        server.close()
