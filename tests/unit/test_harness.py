"""The harness keeps what it promises to the tests that rest on it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from harness import processes
from harness.databases import Databases, create_database, drop_database
from harness.pgbouncer import PgBouncer
from harness.server import Server
from harness.sessions import Sessions
from harness.states import lock_queues, queue_names
from harness.waiting import until_true

ROOT = Path(__file__).resolve().parent.parent.parent

StartServer = Callable[..., Server]


def test_a_server_runs_the_chosen_major_and_leaves_nothing_behind(pg_major: int) -> None:
    with Server.start(pg_major) as server:
        family = [server.postmaster_pid, *processes.children(server.postmaster_pid)]
        directory = server.directory
        with psycopg.connect(server.dsn(tcp=True)) as connection:
            assert connection.info.server_version // 10000 == pg_major
            assert connection.info.user == "postgres"
        with psycopg.connect(server.dsn()) as connection:
            row = connection.execute(
                "select current_setting('timezone'), current_setting('fsync')"
            ).fetchone()
            assert row == ("UTC", "off")
    assert len(family) > 3
    assert not any(processes.alive(pid) for pid in family)
    assert not directory.exists()


def test_settings_go_over_the_defaults_and_can_change_later(fresh_server: StartServer) -> None:
    server = fresh_server(settings={"work_mem": "7MB", "fsync": True})
    with server.connect() as connection:
        assert connection.execute("show fsync").fetchone() == ("on",)
        assert connection.execute("show work_mem").fetchone() == ("7MB",)
    server.configure({"work_mem": "9MB"})
    with server.connect() as connection:
        assert connection.execute("show work_mem").fetchone() == ("9MB",)
    server.restart(settings={"max_connections": 33})
    with server.connect() as connection:
        assert connection.execute("show max_connections").fetchone() == ("33",)


def test_a_killed_server_recovers_what_was_committed(fresh_server: StartServer) -> None:
    server = fresh_server()
    with server.connect() as connection:
        connection.execute("create table kept (id int)")
        connection.execute("insert into kept values (1)")
    lost = psycopg.connect(server.dsn())
    lost.execute("insert into kept values (2)")
    family = [server.postmaster_pid, *processes.children(server.postmaster_pid)]
    server.kill()
    lost.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)
    server.start_again()
    with server.connect() as connection:
        assert connection.execute("select id from kept").fetchall() == [(1,)]
    assert "not properly shut down" in server.log_text()


def test_a_server_killed_for_good_leaves_no_shared_memory(pg_major: int) -> None:
    with Server.start(pg_major) as server:
        family = [server.postmaster_pid, *processes.children(server.postmaster_pid)]
        memory = processes.shared_memory_files(family)
        server.kill()
    assert memory
    assert not any(path.exists() for path in memory)
    assert not server.directory.exists()


def test_a_standby_replays_and_can_be_promoted(fresh_server: StartServer) -> None:
    primary = fresh_server()
    with primary.connect() as connection:
        connection.execute("create table copied as select generate_series(1, 10) as id")
        with primary.standby() as standby:
            connection.execute("insert into copied values (11)")
            standby.wait_for_replay(primary)
            with standby.connect() as reader:
                assert reader.execute("select pg_is_in_recovery(), count(*) from copied").fetchone() == (
                    True,
                    11,
                )
            primary.kill()
            standby.promote()
            with standby.connect() as writer:
                writer.execute("insert into copied values (12)")
                assert writer.execute("select count(*) from copied").fetchone() == (12,)


def test_cpu_seconds_grow_and_keep_the_time_of_ended_sessions(fresh_server: StartServer) -> None:
    server = fresh_server()
    before = server.cpu_seconds()
    with server.connect() as connection:
        connection.execute("set max_parallel_workers_per_gather = 0")
        connection.execute("select sum(sqrt(g)) from generate_series(1, 2000000) as g")
        during = server.cpu_seconds()
        pid = connection.info.backend_pid
    until_true(lambda: not Path(f"/proc/{pid}").exists())
    assert during - before > 0.1
    assert server.cpu_seconds() >= during


@pytest.mark.skipif(PgBouncer.program() is None, reason="pgbouncer is not installed")
def test_pgbouncer_shares_server_sessions_between_transactions(server: Server) -> None:
    name = create_database(server)
    with PgBouncer.start(server, settings={"default_pool_size": 1}) as bouncer:
        directory = bouncer.directory
        with (
            psycopg.connect(bouncer.dsn(name), autocommit=True, prepare_threshold=None) as one,
            psycopg.connect(bouncer.dsn(name, tcp=True), autocommit=True, prepare_threshold=None) as two,
        ):
            query = "select pg_backend_pid(), current_database()"
            assert one.execute(query).fetchone() == two.execute(query).fetchone()
    assert not directory.exists()
    drop_database(server, name)


def test_a_cloned_database_has_the_templates_content(server: Server) -> None:
    template = create_database(server)
    with server.connect(template) as connection:
        connection.execute("create table original as select 42 as answer")
    clone = create_database(server, template)
    with server.connect(clone) as connection:
        assert connection.execute("select answer from original").fetchone() == (42,)
        drop_database(server, clone)  # with a session in it
    drop_database(server, template)
    names = server.admin().execute("select datname from pg_database").fetchall()
    assert not {(template,), (clone,)} & set(names)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_process_leaves_no_server(pg_major: int, signal_number: int) -> None:
    program = (
        "import signal, time; from harness.postgres import Server;"
        # Ignored SIGINT is inherited, for example from a shell that runs the tests in the background.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"s = Server.start({pg_major}); print(s.postmaster_pid, s.directory, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        os.kill(process.pid, signal_number)
        process.wait(20)
    until_true(lambda: not processes.alive(int(pid)) and not Path(directory).exists())


def test_the_servers_command_prints_an_installation_and_removes_it_at_the_end(pg_major: int) -> None:
    command = [sys.executable, "-m", "harness.postgres", str(pg_major)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with psycopg.connect(process.stdout.readline().strip()) as connection:
            assert connection.execute("select name from pgmb.stream").fetchall() == [("main",)]
            row = connection.execute("select current_setting('data_directory')").fetchone()
            assert row is not None
        process.terminate()
        assert process.wait(20) == 0
    assert not Path(row[0]).exists()


def test_a_stepped_session_tells_blocked_from_done(server: Server, empty_dsn: str) -> None:
    with Sessions(empty_dsn) as sessions:
        first, second = sessions.open("first", "second")
        first.run("create table t (id int primary key)")
        first.run("begin")
        first.run("insert into t values (%s)", [1])
        waiting = second.start("insert into t values (1)").blocked()
        assert waiting.blocked_by() == [first.pid]
        assert not waiting.done()
        first.run("commit")
        with pytest.raises(psycopg.errors.UniqueViolation):
            waiting.result()
        assert second.value("select count(*) from t") == 1
        with pytest.raises(AssertionError, match="was not blocked"):
            second.start("select 1").blocked()


def test_a_stepped_session_that_still_waits_is_closed(empty_dsn: str) -> None:
    with Sessions(empty_dsn) as sessions:
        sessions["holder"].run("select pg_advisory_lock(1)")
        sessions["waiter"].start("select pg_advisory_lock(1)").blocked()


@pytest.fixture
def lending(server: Server, template: str) -> Iterator[Databases]:
    made = Databases(server, template)
    yield made
    made.close()


def test_a_database_is_lent_again_as_it_was(lending: Databases) -> None:
    contents = "select (select count(*) from pgmb.segment), nextval('pgmb.seq_main')"
    with lending.lend("test") as first:
        before = first.connect().execute(contents).fetchall()
        used, other = first.connect(), first.connect()
        used.execute("select pgmb.create_queue('q'), pgmb.publish('t', '1')")
        used.execute("create table t (id int primary key); create view v as select * from t")
        used.execute("create function pgmb.f() returns int language sql as 'select 1'; create schema s")
        used.execute("create table s.t (id pgmb.position); create function s.f(s.t) returns int return 1")
        used.execute("update pgmb.stream set rotate_every = '1 day'")
        used.execute(
            "set statement_timeout = '1min'; prepare p as select 1; listen x; select pg_advisory_lock(1)"
        )
        other.execute("begin")
        lock_queues(other)
        pids = {used.info.backend_pid, other.info.backend_pid}
    with lending.lend("test") as again:
        assert again.name == first.name
        kept = [again.connect() for _ in range(3)]
        assert kept[0].execute(contents).fetchall() == before
        assert queue_names(kept[0]) == []
        made = "select to_regclass('t'), to_regclass('v'), to_regproc('pgmb.f'), to_regnamespace('s')"
        assert kept[0].execute(made).fetchall() == [(None,) * 4]
        assert kept[0].execute("select rotate_every = '1 day' from pgmb.stream").fetchall() == [(False,)]
        assert pids < {connection.info.backend_pid for connection in kept}
        for connection in kept:
            assert connection.autocommit
            assert connection.execute("show statement_timeout").fetchall() == [("0",)]
            left = "select name from pg_prepared_statements union select pg_listening_channels()"
            assert connection.execute(left).fetchall() == []
        locks = "select count(*) from pg_locks where locktype = 'advisory'"
        assert kept[0].execute(locks).fetchall() == [(0,)]


@pytest.mark.parametrize(
    "change",
    [
        "do $$ begin execute pg_get_functiondef('pgmb.maintain()'::regprocedure); end $$",
        "grant select on pgmb.queue to pgmb_publisher",
        "grant select (name) on pgmb.queue to pgmb_publisher",
        "select pgmb.create_stream('s')",
        "select pgmb.rotate()",
        "drop view pgmb.workers",
        "drop schema pgmb cascade",
        "do $$ begin execute format('alter database %I set work_mem = 64', current_database()); end $$",
    ],
)
def test_a_database_that_has_changed_is_not_lent_again(lending: Databases, change: str) -> None:
    with lending.lend("test") as first:
        first.connect().execute(change.encode())
    with lending.lend("another") as second:
        assert second.name != first.name


def test_a_database_with_a_session_of_somebody_is_not_lent_again(lending: Databases) -> None:
    with lending.lend("test") as first:
        stays = psycopg.connect(first.dsn)
    with lending.lend("another") as second:
        assert second.name != first.name
    stays.close()


class Splitting:
    """Prints what is wrong with the two halves of the tests, each shuffled in an order of its own."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from tests.conftest import split

        items = [item for item in session.items if not item.get_closest_marker("minutes")]
        on_15, on_18 = (
            set(split(random.Random(major).sample(items, len(items)), major)) for major in (15, 18)
        )
        print("tests:", len(items), "on both:", len(on_15 & on_18))
        print("on neither:", *sorted(item.nodeid for item in set(items) - on_15 - on_18))


@pytest.mark.slow
def test_split_leaves_no_test_out() -> None:
    program = "import pytest; from tests.unit.test_harness import Splitting; "
    # Most of what is dealt lies there; to import all tests takes long.
    program += "pytest.main(['tests/contract', 'tests/concurrency', '--collect-only', '-qq'], [Splitting()])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r"^tests: (\d+) on both: (\d+)\non neither:(.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:]
    assert found[3] == ""
    tests, both = int(found[1]), int(found[2])
    assert tests > 2000
    assert 100 < both < 1000
