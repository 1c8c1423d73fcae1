"""No circles among modules: each can be read with those that it imports, and a type names its module, too."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import balance_service

PACKAGE = Path(str(balance_service.__file__)).parent


def imported(file: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, also for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def test_no_module_imports_itself_through_others() -> None:
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
        for file in PACKAGE.rglob("*.py")
        # A package's own module names what it exports.
        if file.name != "__init__.py"
    }

    TopologicalSorter({name: imported(file, {*files}) for name, file in files.items()}).prepare()
