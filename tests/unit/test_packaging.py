"""The package that is built: its files, its dependencies and its version; and the files for a forge."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

import pgmb
from pgmb import schema

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
PROJECT_FILE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PROJECT_FILE["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_sources(wheel: Path) -> None:
    files = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in files} >= {".sql", ".html", ".css", ".js", ".typed"}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files


def test_an_installed_wheel_installs_the_same_schema(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "import pgmb; from pgmb import schema; print(pgmb.__file__, pgmb.__version__, schema.emit())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = f"{tmp_path / 'pgmb' / '__init__.py'} {PROJECT['version']} {schema.emit()}\n"
    assert done.stdout == expected


def test_the_readme_of_the_package_links_to_nothing_that_an_index_lacks(wheel: Path) -> None:
    told = metadata(wheel)
    shown = str(told.get_payload())
    assert told["Description-Content-Type"] == "text/markdown"
    assert shown.startswith("# pgmb\n")
    assert re.findall(r"\]\((?!https?://)[^)]*\)", shown) == []
    # The words of a link stay, and where the pages are is said.
    assert "see handle events." in shown
    linked = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text())
    archived = PROJECT_FILE["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in linked if not f"/{path}".startswith(tuple(archived))] == []


def test_the_package_does_not_choose_a_libpq(wheel: Path) -> None:
    told = metadata(wheel).get_all("Requires-Dist", [])
    core = {requirement for requirement in told if "extra ==" not in requirement}
    assert {re.split(r"[<>=\[]", requirement)[0] for requirement in core} == {
        "cronsim",
        "msgspec",
        "psycopg",
        "rich",
        "typer",
    }
    with_binary = [requirement for requirement in told if "binary" in requirement.partition(";")[0]]
    assert [re.findall(r"extra == '(\w+)'", requirement) for requirement in with_binary] == [["binary"]]


def test_without_libpq_the_import_names_the_extra() -> None:
    environment = {**os.environ, "PSYCOPG_IMPL": "c"}
    done = subprocess.run(
        [sys.executable, "-c", "import pgmb"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'pgmb[binary]'" in done.stderr.splitlines()[-1]


def test_the_version_has_one_source(wheel: Path) -> None:
    assert pgmb.__version__ == PROJECT["version"] == metadata(wheel)["Version"]
    with pytest.raises(AttributeError, match="__versions__"):
        pgmb.__versions__  # type: ignore[attr-defined]  # noqa: B018
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)[0] == PROJECT["version"]
    done = subprocess.run(
        [sys.executable, "-m", "pgmb", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"pgmb {PROJECT['version']}\n"


def test_the_metadata_names_no_host() -> None:
    """There is no public address yet; one that is made up would lead strangers to a wrong place."""
    assert "urls" not in PROJECT
    assert PROJECT["license"] == "PostgreSQL"
    assert PROJECT["keywords"] == sorted(PROJECT["keywords"])
    assert PROJECT["classifiers"] == sorted(PROJECT["classifiers"])


def test_every_extra_that_is_advised_exists() -> None:
    advised: set[str] = set()
    for folder in ("src", "docs", "deploy", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".md", ".service", ""):
                for extras in re.findall(r"\bpgmb\[([\w,]+)\]", path.read_text()):
                    advised |= set(extras.split(","))
    assert advised >= {"binary", "server", "spark", "webhooks"}
    assert advised <= set(PROJECT["optional-dependencies"])


def test_the_workflow_runs_the_gate() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    # YAML 1.1 reads the key `on` as a boolean.
    assert set(workflow[True]) == {"push", "pull_request"}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert os.access(ROOT / commands[-1], os.X_OK)


def test_the_development_container_is_where_the_gate_runs() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    gate = workflow["jobs"]["gate"]
    assert container["image"] == gate["container"]["image"]
    (java,) = [step["run"] for step in gate["steps"] if "apt-get" in step.get("run", "")]
    assert container["onCreateCommand"] == f"{java} make"
    target = container["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_issue_forms_have_what_a_forge_asks_for() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
    assert [form.stem for form in forms] == ["bug_report", "feature_request"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert all(part["attributes"]["label"] for part in fields)
        ids = [part["id"] for part in fields]
        assert len(set(ids)) == len(ids) > 1
