"""ARCHITECTURE.md against the tree: every folder, file, function, command and state that it names exists."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_command

import pgmb
from pgmb.cli import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pgmb"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
SQL = "\n".join(path.read_text() for path in sorted((PACKAGE / "sql").rglob("*.sql")))

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FUNCTIONS = set(re.findall(r"create (?:or replace )?function (pgmb(?:_internal)?\.\w+)", SQL))
RELATIONS = set(re.findall(r"create (?:unlogged )?(?:or replace )?(?:table|view) (pgmb\.\w+)", SQL))
# Words in code style that are names of PostgreSQL's or of columns, not of this repository's.
WORDS = {"due_at", "lease", "pgmb", "pgmb_internal", "state"}


def section(title: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert found is not None, f"no section {title}"
    rest = PAGE[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def folders(below: Path) -> set[str]:
    """Every folder with a file in it, as a path from the root that ends in a slash."""
    with_files = {
        path.parent
        for path in below.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    found = {
        folder for each in with_files for folder in (each, *each.parents) if folder.is_relative_to(below)
    }
    return {f"{folder.relative_to(ROOT)}/" for folder in found}


def listed() -> list[str]:
    """The folders of the tree, one per line with its description."""
    lines = [line for _, body in FENCE.findall(section("The tree")) for line in body.splitlines()]
    found = [re.fullmatch(r"(\S+/) +(\S.*)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return [match[1] for match in found if match is not None]


def spans() -> list[str]:
    """What stands in code style, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE))


COMMANDS = cache(lambda: get_command(app))


def command_exists(words: list[str]) -> bool:
    command = COMMANDS()
    for word in words:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            return False
        command = command.commands[word]
    return True


def exists(name: str) -> bool:
    """Whether a name in code style is a function, command, target, table, module, file or state."""
    if name in WORDS or name in states():
        return True
    if name.endswith("()"):
        return name[:-2] in FUNCTIONS
    if name.startswith("pgmb "):
        return command_exists(name.split()[1:])
    if name.startswith("make "):
        return re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if re.fullmatch(r"pgmb\.\w+", name):
        return name in RELATIONS or hasattr(pgmb, name[5:]) or find_spec(name) is not None
    if re.fullmatch(r"[A-Z]\w+\.\w+", name):
        return hasattr(getattr(pgmb, name.partition(".")[0]), name.partition(".")[2])
    return any((base / name).exists() for base in (ROOT, PACKAGE, PACKAGE / "sql"))


def diagram(title: str) -> set[str]:
    """The states of the diagram in a section."""
    (body,) = [body for kind, body in FENCE.findall(section(title)) if kind == "mermaid"]
    ends = re.findall(r"^ *(\S+) --> (\S+?)(?:: .*)?$", body, re.MULTILINE)
    return {state for pair in ends for state in pair} - {"[*]"}


def table(name: str) -> str:
    found = re.search(rf"create table pgmb\.{name} \((.*?)^\)", SQL, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def claim_states() -> set[str]:
    found = re.search(r"create type pgmb\.claim_state as enum \((.*?)^\)", SQL, re.MULTILINE | re.DOTALL)
    assert found is not None
    return set(re.findall(r"^  '(\w+)'", found[1], re.MULTILINE))


def segment_states() -> set[str]:
    """Each state of a segment begins at the time in a column of its name."""
    times = re.findall(r"^  (\w+)_at timestamptz", table("segment"), re.MULTILINE)
    return set(times) - {"last_published"}


def endpoint_states() -> set[str]:
    found = re.search(r"check \(state in \(([^)]+)\)\)", table("endpoint"))
    assert found is not None
    return set(re.findall(r"'(\w+)'", found[1]))


@cache
def states() -> set[str]:
    return claim_states() | segment_states() | endpoint_states() | {"waiting", "leased"}


def test_every_folder_is_listed_once() -> None:
    package = [folder for folder in listed() if folder.startswith("src/pgmb/")]
    assert len(set(package)) == len(package)
    assert set(package) == folders(PACKAGE)


def test_the_other_folders_listed_exist() -> None:
    others = [folder for folder in listed() if not folder.startswith("src/pgmb/")]
    assert len(set(others)) == len(others)
    top = {
        f"{path.name}/"
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in ("build", "dist", "src")
    }
    assert set(others) == top - {"node_modules/"}


def test_every_name_exists() -> None:
    names = set(spans())
    assert len(names) > 80
    assert [name for name in sorted(names) if not exists(name)] == []


def test_functions_in_diagrams_exist() -> None:
    named = {name for _, body in FENCE.findall(PAGE) for name in re.findall(r"\b(\w+)\(\)", body)}
    assert len(named) > 20
    assert named <= {function.partition(".")[2] for function in FUNCTIONS}


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / target).exists(), target


def test_the_states_are_those_of_the_tables() -> None:
    assert diagram("A claim") == claim_states()
    assert diagram("A segment") == segment_states()
    assert diagram("An endpoint") == endpoint_states()


def test_a_delivery_waits_or_is_leased() -> None:
    """A row of pgmb.delivery has a lease or none. Delivered or given up, it is deleted."""
    assert re.search(r"^  lease uuid,", table("delivery"), re.MULTILINE)
    assert diagram("A delivery") == {"waiting", "leased"}
