"""What is in deploy/: that it asks for what there is, and starts what can be started."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict
from typer.core import TyperGroup
from typer.main import get_command

from harness.serving import serving
from harness.waiting import until_true
from pgmb.cli import app
from pgmb.server import create_app
from tests.server.asking import asking

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pgmb.json").read_text())
    return found


def accepted(arguments: list[str]) -> str:
    """The command that these arguments of `pgmb` name; fails if it does not take them."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    with group.make_context("pgmb", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, arguments)
        assert name is not None
        assert command is not None
        command.make_context(name, rest, parent=context)
        return name


def test_the_grafana_dashboard_is_one() -> None:
    told = dashboard()
    assert (told["title"], told["uid"]) == ("pgmb", "pgmb")
    assert told["schemaVersion"] >= 36
    panels = told["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in told["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables


async def test_every_metric_that_grafana_asks_for_is_there(dsn: str) -> None:
    async with asking(create_app(dsn, metrics_public=True)) as client:
        # A route is counted once it was asked for.
        await client.get("/livez")
        text = (await client.get("/metrics")).text
    told: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        told |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    written = json.dumps(dashboard())
    asked = set(re.findall(r"\b((?:pgmb|process)_[a-z_]+)", written))
    assert len(asked) > 30
    assert asked <= told


@pytest.mark.parametrize(("unit", "command"), [("pgmb", "serve"), ("pgmb-work", "work")])
def test_the_unit_starts_a_command_that_there_is(unit: str, command: str) -> None:
    text = (DEPLOY / "systemd" / f"{unit}.service").read_text()
    program, *arguments = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0].split()
    assert program.endswith("/bin/pgmb")
    assert accepted(arguments) == command


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pgmb.service"
    text = (DEPLOY / "systemd" / "pgmb.service").read_text()
    unit.write_text(text.replace("/opt/pgmb/bin/pgmb", str(Path(sys.executable).with_name("pgmb"))))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_image_starts_and_checks_what_there_is(dsn: str) -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    final = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root)[\w:]+$", final, re.MULTILINE)
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", final, re.MULTILINE)[0]) == ["pgmb"]
    assert accepted(json.loads(re.findall(r"^CMD (.*)$", final, re.MULTILINE)[0])) == "serve"
    for path in " ".join(re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE)).split():
        assert (ROOT / path).exists(), path
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", final, re.MULTILINE)
    interpreter, *rest = json.loads(health)
    assert interpreter == "python"

    def healthy(port: int) -> bool:
        arguments = [part.replace(":8080", f":{port}") for part in rest]
        ran = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=False)
        return ran.returncode == 0

    with serving(dsn, "serve", "--services", "http") as served:
        assert httpx.get(f"{served.url}/livez").status_code == 200
        assert healthy(served.port)
    assert not healthy(served.port)


def test_the_image_is_pinned_and_runs_as_a_number() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert all(
        re.fullmatch(r"python:\d+\.\d+\.\d+-[a-z-]+", tag)
        for tag in re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    )
    assert re.search(r"pip install [^\n]*--require-hashes -r /requirements.txt", text)
    assert all("--no-deps" in line for line in re.findall(r"pip install .*pgmb.*", text))
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE)


def test_the_image_installs_what_was_tested() -> None:
    def locked(name: str) -> dict[str, str]:
        text = (ROOT / "requirements" / name).read_text().strip()
        blocks = re.split(r"\n(?=[a-z0-9])", text)
        # A package that tests always need is one that the image needs on some platforms only.
        return {re.split(r"[=\[ ;]", block)[0]: re.sub(r" ;[^\\]*", " ", block) for block in blocks}

    served, tested = locked("server.txt"), locked("dev.txt")
    assert served.items() <= tested.items()
    assert {
        "aiohttp",
        "cryptography",
        "httptools",
        "jinja2",
        "psycopg-binary",
        "starlette",
        "uvicorn",
    } <= set(served)
    assert all("--hash=sha256:" in block for block in served.values())


COMPOSE = DEPLOY / "compose"


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def commands() -> dict[str, list[str]]:
    """The arguments of `pgmb` in each service of its image."""
    return {name: service["command"] for name, service in services().items() if "build" in service}


def test_the_services_of_compose_run_commands_that_exist() -> None:
    assert {name: accepted(command) for name, command in commands().items()} == {
        "install": "install",
        "serve": "serve",
        "worker": "work",
    }
    for service in services().values():
        assert set(service.get("depends_on", {})) <= set(services())
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source == "database" or (COMPOSE / source).is_file()
        if "build" in service:
            context = (COMPOSE / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()
    started = services()["postgres"]["environment"]
    told = services()["serve"]["environment"]
    assert told["PGHOST"] == "postgres"
    for variable in ("DB", "USER", "PASSWORD"):
        assert told[f"PG{variable}".replace("PGDB", "PGDATABASE")] == started[f"POSTGRES_{variable}"]


def test_the_worker_of_compose_is_checked_without_http() -> None:
    """The image's check asks for /livez, which only `serve` answers."""
    unchecked = {
        name for name, service in services().items() if service.get("healthcheck") == {"disable": True}
    }
    assert unchecked == set(commands()) - {"serve"}


def test_what_compose_starts_works_together(empty_dsn: str, tmp_path: Path) -> None:
    given = conninfo_to_dict(empty_dsn)
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
    database = {variable: str(given[name]) for name, variable in names.items() if name in given}
    assert set(database) - {"PGPORT"} == set(services()["serve"]["environment"]) - {"PGPASSWORD"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment = {**inherited, **database}

    def pgmb(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pgmb", *arguments],
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    pgmb(*commands()["install"])
    served = [part for part in commands()["serve"] if part not in ("--port", "8080")]
    printed = tmp_path / "printed.txt"
    with serving(empty_dsn, *served) as server, printed.open("w") as output:
        assert httpx.get(f"http://127.0.0.1:{server.port}/livez", timeout=60).status_code == 200
        worker = subprocess.Popen(
            [sys.executable, "-m", "pgmb", *commands()["worker"]],
            cwd=COMPOSE,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            until_true(lambda: "working on hello.greet" in printed.read_text())
            pgmb("publish", "greet", '"world"')
            until_true(lambda: "hello world" in printed.read_text())
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            worker.kill()
            worker.wait()
