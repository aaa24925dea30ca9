"""The harness's cluster is real: separate processes, which can be killed, and none of which is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.processes import alive, descendants, send, wait_gone
from harness.spark import Cluster, Driver
from harness.spark_settings import ROOT

# It starts some twenty JVMs: `make score-spark` and a plain run have it.
pytestmark = [pytest.mark.slow, pytest.mark.minutes, pytest.mark.timeout(900)]

COUNTING = """
import os, sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
context = spark.sparkContext

def where(_):
    import pgmb, harness
    yield os.getpid()

pids = set(context.parallelize(range(8), 8).mapPartitions(where).collect())
print("master", context.master, "python workers", *pids, "arguments", *sys.argv[1:], flush=True)
assert os.getpid() not in pids
"""

LONG = """
import time
from pathlib import Path
from pyspark.sql import SparkSession

def wait(rows):
    Path(TOUCHED).touch()
    while not Path(GO).exists():
        time.sleep(0.05)
    yield sum(rows)

context = SparkSession.builder.getOrCreate().sparkContext
print("sum", context.parallelize(range(10), 2).mapPartitions(wait).sum())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start() as started:
        yield started


def until(condition: Callable[[], object], what: str, driver: Driver | None = None) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < deadline, what
        assert driver is None or driver.process.poll() is None, driver.output()
        time.sleep(0.05)


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def long_program(folder: Path) -> tuple[Path, Path, Path]:
    touched, go = folder / "touched", folder / "go"
    text = LONG.replace("TOUCHED", repr(str(touched))).replace("GO", repr(str(go)))
    return program(folder, text), touched, go


def test_it_has_a_master_and_workers_of_their_own_processes(cluster: Cluster) -> None:
    assert len({cluster.master_pid, *cluster.worker_pids, os.getpid()}) == 4
    assert all(alive(pid) for pid in [cluster.master_pid, *cluster.worker_pids])


def test_a_driver_program_runs_on_it(cluster: Cluster, tmp_path: Path) -> None:
    said = cluster.submit(program(tmp_path, COUNTING), "one", "two").finish(400)
    assert f"master {cluster.url} " in said
    assert "arguments one two" in said


def test_a_killed_executor_is_replaced_and_its_task_done_again(cluster: Cluster, tmp_path: Path) -> None:
    path, touched, go = long_program(tmp_path)
    with cluster.submit(path) as driver:
        until(touched.exists, "the program does not begin", driver)
        victims = cluster.executor_pids()
        assert victims
        for victim in victims:
            send(victim, signal.SIGKILL)
        wait_gone(victims, 60)
        until(lambda: len(cluster.executor_pids()) == 2, "no new executors")
        go.touch()
        assert "sum 45" in driver.finish(400)


def test_a_killed_driver_takes_its_executors_along(cluster: Cluster, tmp_path: Path) -> None:
    path, touched, _ = long_program(tmp_path)
    with cluster.submit(path) as driver:
        until(touched.exists, "the program does not begin", driver)
        family = [driver.process.pid, *descendants(driver.process.pid)]
        assert len(family) >= 2
        driver.kill()
        assert not any(alive(pid) for pid in family)
        assert driver.process.returncode == -signal.SIGKILL
        until(lambda: not cluster.executor_pids(), "executors go on without their driver")
    assert not driver.directory.exists()


def test_a_failing_program_raises_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*no luck"):
        Driver.start(program(tmp_path, "raise SystemExit('no luck')")).finish(400)


def test_a_module_runs_on_a_local_master(tmp_path: Path) -> None:
    program(tmp_path, COUNTING)
    said = Driver.start("program", env={"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/src"}).finish(400)
    assert "master local[2] " in said


def test_nothing_is_left_when_its_owner_is_killed(tmp_path: Path) -> None:
    path, touched, _ = long_program(tmp_path)
    command = [sys.executable, "-c", OWNING.replace("PROGRAM", repr(str(path)))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        directories = [Path(name) for name in process.stdout.readline().split()]
        assert len(directories) == 2
        until(touched.exists, "the program does not begin")
        family = descendants(process.pid)
        assert len(family) >= 8
        process.kill()
        process.wait()
    wait_gone(family, 60)
    until(lambda: not any(directory.exists() for directory in directories), "directories are left")


OWNING = """
from pathlib import Path
from harness.spark import Cluster
cluster = Cluster.start()
driver = cluster.submit(Path(PROGRAM))
print(cluster.directory, driver.directory, flush=True)
driver.process.wait()
"""
