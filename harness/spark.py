"""Spark for tests and benchmarks: a standalone cluster of separate processes, driver programs, a session.

    with Cluster.start() as cluster:
        driver = cluster.submit(Path("program.py"), "--dsn", dsn)
        send(cluster.executor_pids()[0], signal.SIGKILL)
        driver.kill()
        print(cluster.submit("package.module").finish())

    with session(directory) as spark:   # local[2], in this process
        spark.read.format("pgmb")

Nothing outlives the process that started it, even if that one is killed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self
from unittest import mock

from harness import spark_python, spark_settings
from harness.ports import free_port
from harness.processes import children_of, kill_group
from harness.spark_settings import HOST
from harness.watchdog import watch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[2]"
# Spark gives the Python process of a source ten seconds to start, whatever its settings: on a crowded machine
# not always enough. A query that failed with this may be started again.
TOO_SLOW = "Python worker failed to connect back"

# What these processes import.
_WORKERS = (
    "adbc_driver_postgresql.dbapi",
    "pgmb.spark.source.rows",
    "pyspark.sql.streaming.python_streaming_source_runner",
)

_open: set[_Group] = set()


class _Group:
    """A process group with a directory of its own, both gone in the end."""

    def __init__(self, prefix: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        self._pidfile = self.directory / "pid"
        self._members: list[subprocess.Popen[bytes]] = []
        self._owner = os.getpid()
        self._watchdog = watch(self.directory, self._pidfile, signal.SIGKILL)
        _open.add(self)

    def _spawn(
        self, command: list[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=self._members[0].pid if self._members else 0,
        )
        self._members.append(process)
        if len(self._members) == 1:
            # A negative number is a group to kill(2).
            self._pidfile.write_text(str(-process.pid))
        return process

    def kill(self) -> None:
        """SIGKILL to all of them and to their children, at once."""
        if self._members:
            kill_group(self._members[0].pid)
        for process in self._members:
            process.wait()

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        _open.discard(self)
        try:
            self.kill()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
            if self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
            self._watchdog.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Driver(_Group):
    """A driver program: a Python process with its JVM, in a process group of its own."""

    @classmethod
    def start(
        cls,
        program: Path | str,
        *arguments: str,
        master: str = LOCAL,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a Python file (Path) or module (str) in which `SparkSession.builder.getOrCreate()` gives a
        session on `master`. `conf` adds Spark settings, `env` variables."""
        driver = cls("pgmb-driver-")
        command = [str(program.resolve())] if isinstance(program, Path) else ["-m", program]
        variables = spark_settings.environment(driver.directory, master, conf) | dict(env or {})
        with driver._log.open("wb") as log:
            driver._spawn([sys.executable, *command, *arguments], variables, log)
        return driver

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The Python process."""
        return self._members[0]

    def output(self) -> str:
        """What it wrote so far, standard output and errors."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def finish(self, timeout: float = 120.0) -> str:
        """Waits for its end and closes it: its output. A failure raises with the output."""
        try:
            code = self.process.wait(timeout)
            output = self.output()
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done in {timeout:g} s:\n{self.output()[-4000:]}") from None
        finally:
            self.close()
        if code != 0:
            raise RuntimeError(f"exit code {code}:\n{output[-4000:]}")
        return output


class Cluster(_Group):
    """A standalone master and workers of one core, each a JVM of its own, as users run them.

    Executors are children of the workers. An application takes all cores unless `spark.cores.max` says less.
    """

    url: str
    """spark://..., for `SparkSession.builder.master`."""
    master_pid: int
    worker_pids: list[int]

    @classmethod
    def start(cls, workers: int = 2, *, memory: str = "2g") -> Self:
        cluster = cls("pgmb-spark-")
        try:
            cluster._launch(workers, memory)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def executor_pids(self) -> list[int]:
        """The JVMs that run tasks, of all applications; their Python workers are children of these."""
        return [pid for worker in self.worker_pids for pid in children_of(worker)]

    def submit(
        self,
        program: Path | str,
        *arguments: str,
        conf: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Driver:
        """A driver program on this cluster, see `Driver.start`."""
        return Driver.start(program, *arguments, master=self.url, conf=conf, env=env)

    def _launch(self, workers: int, memory: str) -> None:
        port, page = free_port(), free_port()
        self.url = f"spark://{HOST}:{port}"
        variables = spark_settings.environment(self.directory, self.url)
        # The daemons take no settings of applications; a port taken meanwhile is an error, not another port.
        properties = self.directory / "daemons.properties"
        properties.write_text("spark.port.maxRetries 0\nspark.master.rest.enabled false\n")

        def daemon(name: str, *arguments: str) -> None:
            command = [
                f"{variables['SPARK_HOME']}/bin/spark-class",
                f"org.apache.spark.deploy.{name}",
                *("--properties-file", str(properties)),
                *arguments,
            ]
            with (self.directory / "log").open("ab") as log:
                self._spawn(command, variables, log)

        daemon("master.Master", "--host", HOST, "--port", str(port), "--webui-port", str(page))
        for number in range(workers):
            place = str(self.directory / f"worker-{number}")
            # Each as a host of its own: Spark runs a speculative attempt on another host than the first only.
            daemon(
                "worker.Worker",
                *("--host", f"127.0.0.{number + 1}", "--cores", "1", "--memory", memory, "--webui-port", "0"),
                *("-d", place, self.url),
            )
        self.master_pid, *self.worker_pids = (process.pid for process in self._members)
        deadline = time.monotonic() + 300
        while _workers_alive(page) < workers:
            if any(process.poll() is not None for process in self._members) or time.monotonic() > deadline:
                said = (self.directory / "log").read_text(errors="replace")
                raise RuntimeError(f"the Spark cluster did not start:\n{said[-4000:]}")
            time.sleep(0.05)


def _workers_alive(page: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{page}/json/", timeout=30) as answer:
            state: dict[str, Any] = json.load(answer)
    except (OSError, ValueError):
        return 0
    return int(state["aliveworkers"])


@contextmanager
def session(
    directory: Path, master: str = LOCAL, conf: Mapping[str, str] | None = None, *, lasting: bool = False
) -> Generator[SparkSession]:
    """A session of this process on `master`; its JVM ends with it. One at a time. Its Python workers are
    those of `spark_python` unless it is `lasting`, see `spark_settings.environment`."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        raise RuntimeError("this process has a Spark session already")
    for module in _WORKERS:
        importlib.import_module(module)  # which compiles it, once for all workers
    variables = spark_settings.environment(directory, master, conf, lasting=lasting)
    del variables["TMPDIR"]  # of this process, which outlives the directory
    if not lasting:
        variables["PYSPARK_PYTHON"] = variables["PYSPARK_DRIVER_PYTHON"] = str(
            spark_python.executable(directory)
        )
    with mock.patch.dict(os.environ, variables):
        spark = SparkSession.builder.getOrCreate()
    # The JVM that this Python started; pyspark leaves it to live on as long as this process.
    gateway: Any = SparkContext._gateway  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        yield spark
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(600)  # one that archives its classes takes a minute
        SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


@atexit.register
def _close_all() -> None:
    for group in list(_open):
        group.close()
