"""The benchmark runs in every row, measures what it says, and pairs rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from bench import wire
from bench.forms import FORMS
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.payload import SIZE, payload
from bench.report import table
from bench.rounds import interleave
from bench.rows import ROWS

ROOT = Path(__file__).parents[2]

# One process, one set of servers.
pytestmark = [pytest.mark.once, pytest.mark.xdist_group("bench")]


@pytest.fixture(scope="module")
def ground(pg_major):
    with Ground(pg_major) as servers:
        yield servers


SPARK = [row for row in ROWS if row.startswith(("lake-", "spark-"))]


@pytest.mark.slow
@pytest.mark.minutes
@pytest.mark.parametrize("row", [row for row in ROWS if row not in SPARK])
def test_every_row_runs_and_gives_figures(ground, row, monkeypatch):
    # Of a shallow clone's history only this is certain to be there.
    monkeypatch.setenv("PGMB_BEFORE", "HEAD")
    outcome = ROWS[row](ground, FORMS["tiny"])
    assert outcome.readings
    assert all(reading.messages > 0 and reading.server_cpu > 0 for reading in outcome.readings)
    assert outcome.checks
    assert all(0 < check.figure < 1000 or check.goal == 0 for check in outcome.checks)
    assert outcome.row in table(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.minutes
def test_the_rows_of_spark_run_and_give_figures(tmp_path, pg_major):
    # Apart: a process has one Spark session, and other tests may have theirs.
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench", *SPARK, "--tiny", "--pg", str(pg_major), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row["row"] for row in rows] == SPARK
    for row in rows:
        assert all(reading["messages"] > 0 and reading["server_cpu"] > 0 for reading in row["readings"])
        assert row["checks"]
        assert all(0 < check["figure"] < 1000 or check["goal"] == 0 for check in row["checks"])


@pytest.mark.slow
def test_the_command_runs_a_row_and_writes_every_round_and_the_machine(tmp_path, pg_major):
    """One with peers; the scores run the others."""
    name, out = "publish", tmp_path / "out.json"
    subprocess.run(
        [sys.executable, "-m", "bench", name, "--tiny", "--pg", str(pg_major), "--json", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=250,
    )
    document = json.loads(out.read_text())
    assert document["machine"]["cores"] >= 1
    (row,) = document["rows"]
    assert row["row"] == name
    contenders = {reading["contender"] for reading in row["readings"]}
    assert len(row["readings"]) >= len(contenders) * FORMS["tiny"].rounds > 0
    assert all(reading["messages"] > 0 and reading["server_cpu"] > 0 for reading in row["readings"])
    assert row["checks"]
    assert all(0 < check["figure"] < 1000 or check["goal"] == 0 for check in row["checks"])
    assert {"name", "figure", "goal", "ok"} <= set(row["checks"][0])


def test_the_order_of_contenders_is_rotated():
    turns = interleave(["a", "b", "c"], 3, lambda name: Reading(name, 1, 1.0, 1.0, 1.0))
    assert "".join(reading.contender for reading in turns) == "abcbcacab"


def test_ratios_are_taken_round_by_round():
    outcome = Outcome("row", "what")
    # Each round is twice as fast as the one before, for both: the ratio is the same in all.
    for speed in (1, 2, 4):
        outcome.readings += [Reading("a", 3 * speed, 1, 1, 1), Reading("b", 2 * speed, 1, 1, 1)]
    assert outcome.ratio("a", "b") == 1.5


def test_a_check_knows_which_way_is_better():
    assert Check("rate", 0.9, 0.9).ok
    assert not Check("rate", 0.89, 0.9).ok
    assert Check("cost", 1.1, 1.1, at_least=False).ok
    assert not Check("cost", 1.2, 1.1, at_least=False).ok


def test_payloads_are_json_of_the_size_said():
    for number, stamp in ((0, 0), (499, 0), (7, 3_812_000_000_000)):
        body = payload(number, stamp)
        assert len(body) == SIZE
        assert json.loads(body)["t"] == 10**19 + stamp
        assert b"\\" not in body
    assert payload(1) != payload(2)


def test_binary_arrays_arrive_whole(server):
    client = wire.Client(server.dsn())
    call = client.prepare("select array_to_json($1)::text", "json[]")
    assert json.loads(call(wire.json_array([b"1", b'{"a": 2}'])).get_value(0, 0) or b"") == [1, {"a": 2}]
    call = client.prepare("select array_to_json($1)::text", "jsonb[]")
    assert json.loads(call(wire.jsonb_array([b"1", b'{"a": 2}'])).get_value(0, 0) or b"") == [1, {"a": 2}]
    call = client.prepare("select sum(n) from unnest($1) n", "bigint[]")
    assert call(wire.bigint_array([wire.bigint(-1), wire.bigint(5)])).ntuples == 1
    with pytest.raises(RuntimeError, match="division"):
        client.prepare("select 1 / $1", "integer")(wire.integer(0))
    client.close()
    assert isinstance(client.connection, psycopg.Connection)
