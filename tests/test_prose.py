"""Docstrings stand alone: none is the rest of a sentence that the name above it begins."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from generator.paths import REPOSITORY

FRAGMENT = re.compile(
    r"\s*(What|Which|Whether|Whose|Who|How|Why|Where|That|Those|Of|As|For|By|The same)\b"
)
"""The first words of a docstring that says nothing without the name that it stands below."""
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and assignments, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED):
            continue
        for before, statement in zip([node, *node.body], node.body, strict=False):
            text = statement.value if isinstance(statement, ast.Expr) else None
            documents = before is node or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield statement.lineno, text.value


def fragments(path: Path) -> list[str]:
    """Return the docstrings of a file that do not stand alone, as their lines and beginnings."""
    found = sorted(docstrings(ast.parse(path.read_text("utf-8"))))
    return [f"{line}: {text[:40]}" for line, text in found if FRAGMENT.match(text)]


def test_docstrings_stand_alone() -> None:
    found = {}
    for folder in ("generator", "normforge", "benchmarks", "tests"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found[str(path.relative_to(REPOSITORY))] = fragments(path)
    assert len(found) > 500
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_docstring_that_does_not_stand_alone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('''"""What this module has."""
LIMIT = 3
"""Of trials."""
WHOLE = 4
"""The trials of a whole search. What comes later does not count."""


class Search:
    """The same for a search."""

    name: str
    """Format of the name: what users type."""

    def left(self) -> int:
        """Whether trials are left."""
        text = "no docstring"
        return len(text)
''')
    assert fragments(path) == [
        "1: What this module has.",
        "3: Of trials.",
        "9: The same for a search.",
        "15: Whether trials are left.",
    ]
