"""What the committed measurements taught, as stored beside this file: the learned correction, its
error, and the measured winners.

`python -m benchmarks.prediction fit` writes it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from generator.evaluate.predict.correction import Correction
from generator.evaluate.predict.prior import Prior

FITTED_FILE = Path(__file__).with_name("fitted.json")


@dataclass(frozen=True)
class Fitted:
    """correction, prior: as their classes say; errors: by operation the root mean square of
    measured over predicted time, less 1, at the configs that it chose for shapes that it had not
    seen (of other widths, and where it was not fitted to the operation, all); studies: name and
    digest of every study file behind it."""

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
    """The one of this project."""
    return Fitted.from_json(json.loads(FITTED_FILE.read_text()))


@cache
def model_revision() -> str:
    """Names the model: predictions of models that differ in it do not compare. A digest of the code
    of this folder, without what only people read, and of what was fitted: other studies or errors
    behind the same numbers change no prediction."""
    data = json.loads(FITTED_FILE.read_text())
    digest = hashlib.sha256(json.dumps([data["correction"], data["prior"]]).encode())
    for file in sorted(FITTED_FILE.parent.glob("*.py")):
        digest.update(without_docstrings(file.read_text()).encode())
    return digest.hexdigest()[:8]


def without_docstrings(code: str) -> str:
    """Python code without comments and docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [s for s in body if not _is_text(s)]
            body[:] = kept or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
