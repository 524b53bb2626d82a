"""The expressions of a search space: what may stand in one, and the names that it may use."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from generator.derived import DERIVED
from generator.errors import NormforgeError
from generator.problem import Problem
from generator.target import Target
from generator.variant import Geometry

PROBLEM_NAMES = (
    *("M", "N", "dtype", "weight_dtype", "itemsize", "weight_itemsize"),
    *("residual_itemsize", "exact"),
)
TARGET_NAMES = {
    "gpu": "name",
    **{
        name: name
        for name in (
            *("sms", "registers_per_sm", "max_threads_per_sm", "max_ctas_per_sm"),
            *("smem_per_sm", "smem_per_cta", "barriers_per_sm", "max_vector_bytes"),
            "has_bulk_copy",
        )
    },
}
_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Compare, ast.Eq, ast.NotEq),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.Name, ast.Load),
    ast.Constant,
)


@dataclass(frozen=True)
class Expression:
    """A checked expression over the names a space offers."""

    text: str
    names: frozenset[str]
    code: CodeType
    where: str

    @classmethod
    def parse(cls, text: Any, known: set[str], where: str) -> Expression:
        if not isinstance(text, str):
            raise NormforgeError(f"{where}: expected an expression in text, got {text!r}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise NormforgeError(f"{where}: '{text}' is no expression ({error})") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                kind = type(node).__name__
                raise NormforgeError(f"{where}: '{text}' uses {kind}, which rules may not")
        names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        unknown = sorted(names - known)
        if unknown:
            raise NormforgeError(
                f"{where}: '{text}' uses unknown name '{unknown[0]}'; the header of the "
                "file lists the names"
            )
        return cls(text.strip(), names, compile(tree, where, "eval"), where)

    def __str__(self) -> str:
        return self.text

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """The value. Raises NormforgeError where the names do not allow one, such as `M / 0`."""
        try:
            return eval(self.code, {"__builtins__": {}}, names)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise NormforgeError(
                f"{self.where}: '{self.text}' cannot be computed ({error})"
            ) from error


class Names(dict[str, Any]):
    """Names of one (possibly partial) config, with derived ones computed when asked for."""

    def __init__(
        self, problem: Problem, target: Target, exact: bool, in_blocks: bool = True
    ) -> None:
        super().__init__({name: getattr(problem, name) for name in PROBLEM_NAMES[:-1]})
        self.update({name: getattr(target, field) for name, field in TARGET_NAMES.items()})
        self["exact"] = exact
        self.problem, self.target = problem, target
        self.geometry = Geometry(
            self,
            *(problem.N, problem.dtype, problem.weight_dtype),
            *(exact, problem.offset, problem.residual),
            in_blocks=in_blocks,
        )

    def __missing__(self, name: str) -> Any:
        return DERIVED[name][1](self.geometry, self.problem, self.target)
