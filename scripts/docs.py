"""Writes docs/reference: sql.md from the headers of the functions, python.md from the docstrings, cli.md from
the commands, http.md of REST.

`--check` fails if one of them is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pgmb import schema
from scripts import cli_reference, http_reference, python_reference

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "pgmb" / "sql"
REFERENCE = ROOT / "docs" / "reference"

INTRODUCTION = """\
# SQL reference

Made from the headers in `src/pgmb/sql` by `make docs`; do not edit. Parameters can be named:
`pgmb.publish('order.paid', '{}', delay => '10 minutes')`. Errors have SQLSTATEs of their own class, `MB…`,
listed in `pgmb.errors`, and carry a hint. [Isolation levels](../explanation/isolation.md) lists the functions
that need READ COMMITTED and raise MB029 in a stricter transaction.

This page lists every function in schema `pgmb`. Only these functions call those in schema `pgmb_internal`
([ADR 26](../adr/0026-internal-functions-have-a-schema.md)).
"""

SUPPORT = " Support."
SUPPORTING = """\
## Support functions, called by clients

Clients and the functions above call these with the caller's own rights, so the caller must be able to
execute them. Applications rarely need one.
"""

FUNCTION = re.compile(
    r"(?P<header>(?:^ *--[^\n]*\n)+)"
    r" *create or replace function pgmb\.(?P<name>\w+)\s*\((?P<parameters>.*?)\)\s*"
    r"(?:returns (?P<returns>.*?)\s*)?language ",
    re.MULTILINE | re.DOTALL,
)
VIEW = re.compile(
    r"(?P<header>(?:^--[^\n]*\n)+)create (?:or replace )?view pgmb\.(?P<name>\w+)", re.MULTILINE
)


def title(path: Path, text: str) -> tuple[str, str]:
    """The heading and the opening lines of a file: what its first comment says."""
    opening = re.match(r"(?:--[^\n]*\n)+", text)
    words = prose(opening.group()) if opening else path.stem
    heading, _, rest = re.sub(r"^([\w ]+?)[.:] ", r"\1\n", words).partition("\n")
    return heading, rest[:1].upper() + rest[1:]


def prose(header: str) -> str:
    return " ".join(line.strip().removeprefix("--").strip() for line in header.splitlines()).strip()


def squeeze(sql: str) -> str:
    return re.sub(r"\s+", " ", sql).strip()


def functions(text: str, *, support: bool = False) -> list[str]:
    """The entries of a file's functions, or of those that only clients call: their headers end so."""
    entries = []
    for found in FUNCTION.finditer(text):
        words = prose(found["header"])
        if words.endswith(SUPPORT) is not support:
            continue
        words = words.removesuffix(SUPPORT)
        returns = f" → {squeeze(found['returns'])}" if found["returns"] else ""
        call = f"pgmb.{found['name']}({squeeze(found['parameters'])}){returns}"
        entries.append(f"### {found['name']}\n\n```\n{call}\n```\n\n{words}\n")
    return entries


def views(text: str) -> list[str]:
    return [f"### {view['name']} (view)\n\n{prose(view['header'])}\n" for view in VIEW.finditer(text)]


def render() -> str:
    parts = [INTRODUCTION]
    sources = [SOURCES / path for path in schema.manifest() if not path.endswith("/tables.sql")]
    for path in sources:
        text = path.read_text()
        entries = functions(text) + views(text)
        if entries:
            heading, opening = title(path, text)
            parts.append(f"## {heading}\n\n{opening}\n" if opening else f"## {heading}\n")
            parts += entries
    parts.append(SUPPORTING)
    parts += [entry for path in sources for entry in functions(path.read_text(), support=True)]
    return "\n".join(parts)


def main() -> int:
    stale = 0
    pages = {
        "sql.md": render(),
        "python.md": python_reference.render(),
        "cli.md": cli_reference.render(),
        "http.md": http_reference.render(),
    }
    for name, rendered in pages.items():
        target = REFERENCE / name
        if "--check" not in sys.argv:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rendered)
        elif not target.exists() or target.read_text() != rendered:
            print(f"{target.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
