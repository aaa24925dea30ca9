"""The import graph of a package: which module imports which, and the circles among them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class When(Enum):
    """When an import is executed."""

    IMPORTED = "at module level"
    CALLED = "inside a function"
    NEVER = "for type checkers"


class Import(NamedTuple):
    importer: str
    imported: str
    when: When


def modules(package: Path) -> dict[str, Path]:
    """The modules of a package, and of the packages inside it, by their dotted names."""
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    """Every import of one module of the package by another."""
    known = modules(package)
    return [
        Import(importer, imported, when)
        for importer, path in known.items()
        for node, when in _statements(ast.parse(path.read_text()), When.IMPORTED)
        for imported in _imported(node, known)
        if imported != importer
    ]


def _statements(parent: ast.AST, when: When) -> Iterator[tuple[ast.AST, When]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, when
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(node, When.CALLED if when is When.IMPORTED else when)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node, When.NEVER)
        else:
            yield from _statements(node, when)


def _imported(node: ast.AST, known: Collection[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if isinstance(node, ast.ImportFrom) and node.module in known:
        # `from package import name`: the module of that name, if there is one, else the package itself.
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in known else str(node.module) for name in full]
    return []


def circles(found: Collection[Import], *counted: When) -> list[list[str]]:
    """The sets of modules that import each other, directly or through others, by imports of these kinds."""
    graph: dict[str, set[str]] = {}
    for one in found:
        if one.when in counted:
            graph.setdefault(one.importer, set()).add(one.imported)
    reached = {module: _reached(graph, module) for module in graph}
    together = {
        tuple(sorted(other for other in beyond if module in reached.get(other, ())))
        for module, beyond in reached.items()
        if module in beyond
    }
    return sorted(map(list, together))


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for module in graph.get(ahead.pop(), ()):
            if module not in seen:
                seen.add(module)
                ahead.append(module)
    return seen
