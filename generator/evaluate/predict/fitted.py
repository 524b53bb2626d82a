"""The results of fitting to the committed measurements, stored beside this file: the learned
correction, its error, and the measured winners.

`python -m benchmarks.prediction fit` writes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from typing import Any

from generator.evaluate.predict.correction import Correction
from generator.evaluate.predict.prior import Prior

FITTED_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class Fitted:
    """Everything that was fitted. correction, prior: as their classes say; errors: by operation the
    root mean square of measured over predicted time, less 1, at the configs that it chose for
    shapes that it had not seen (of other widths, and where it was not fitted to the operation,
    all); studies: name and digest of every study file behind it."""

    correction: Correction
    prior: Prior
    errors: Mapping[str, float]
    studies: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "errors": dict(self.errors),
            "studies": dict(self.studies),
            "correction": self.correction.to_json(),
            "prior": self.prior.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fitted:
        return cls(
            Correction.from_json(data["correction"]),
            Prior.from_json(data["prior"]),
            data["errors"],
            data["studies"],
        )


@cache
def load_fitted() -> Fitted:
    """Load the fit that is committed with this project."""
    return Fitted.from_json(json.loads(FITTED_FILE.read_text(encoding="utf-8")))


@cache
def model_revision() -> str:
    """Names the model: predictions of models that differ in it do not compare. A digest of the code
    of this folder, without what only people read, and of what was fitted: other studies or errors
    behind the same numbers change no prediction. Studies of the same model may have been made when
    it was digested in another way: `known_as` has the name that they have."""
    data = json.loads(FITTED_FILE.read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps([data["correction"], data["prior"]]).encode())
    for file in sorted(FITTED_FILE.parent.glob("*.py")):
        digest.update(code_of(file.read_text(encoding="utf-8")).encode())
    revision = digest.hexdigest()[:8]
    return str(data.get("known_as", {}).get(revision, revision))


def code_of(source: str) -> str:
    """Python code without comments, docstrings, imports and empty lines: the same text under every
    version of Python, which `ast.unparse` is not."""
    lines = source.splitlines()
    for token in generate_tokens(StringIO(source).readline):
        if token.type == COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and (_is_text(node) or _is_import(node)):
            lines[node.lineno - 1 : _end(node)] = [""] * (_end(node) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
