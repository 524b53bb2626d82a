"""The expressions of a search space: what may stand in one, and the names that it may use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from generator.errors import NormforgeError
from generator.kernels.geometry import Geometry
from generator.kernels.knobs import KNOBS
from generator.kernels.strategies import REDUCTION_KNOBS
from generator.kernels.variant import shape_fields
from generator.own_files import may_add_early
from generator.problem import Problem
from generator.target import Target
from normforge.spec import ceil_div

_OF_PROBLEM = (
    "M",
    "N",
    "dtype",
    "weight_dtype",
    "itemsize",
    "weight_itemsize",
    "residual_itemsize",
    "rotated",
    "interleaved",
)
_OF_TARGET = (
    "sms",
    "registers_per_sm",
    "max_threads_per_sm",
    "max_ctas_per_sm",
    "smem_per_sm",
    "smem_per_cta",
    "barriers_per_sm",
    "max_vector_bytes",
    "has_bulk_copy",
    "has_fp8",
)
GIVEN_NAMES = ("exact", "gpu", *_OF_PROBLEM, *_OF_TARGET)
"""Names whose values follow from the problem and the target alone."""


def window_bytes(v: Geometry, problem: Problem, target: Target) -> int:
    """The bytes of one tensor of M x N elements that all teams of a full grid work on at once:
    participants x teams of a CTA x rows of a batch x bytes of a whole row of x.

    A cluster is one participant and has whole rows, so its size counts once, in the number of
    participants. Rows of a batch are the rows in flight, times 2 or 4 where threads of a warp share
    several rows. Stages do not count: they hold rows that nobody works on yet. An `even` grid may
    have a few teams less, and where M is small the whole tensor is less than a window.
    """
    whole_rows = _participants(v, target) * v.teams * v.batch_rows
    return whole_rows * problem.N * problem.itemsize


def _participants(v: Geometry, target: Target) -> int:
    return int((target.sms - v["spare_sms"]) * v["ctas_per_sm"] // v["cluster"])


def even_splits(v: Geometry) -> int:
    """Numbers of threads that have equally many vectors of a row, and no more than they can hold
    (as the rule `registers` of rmsnorm_forward.yaml has it)."""
    across, least = v.columns // v.elements, 128 if v["cluster"] > 1 else 1
    return sum(
        across % threads == 0 and threads >= least and across // threads <= held
        for threads, held in _HELD.items()
    )


_HELD = {threads: 8 if threads <= 512 else 4 for threads in (4, 8, 16, *range(32, 1025, 32))}


class Derived(NamedTuple):
    """A number that follows from a config. knobs: those that it needs, as far as a space has them;
    value: computes it."""

    knobs: tuple[str, ...]
    value: Callable[[Geometry, Problem, Target], Any]


_ROW = ("cluster", "threads_per_row", "vector_bytes")
_BATCH = ("threads_per_row", "rows_in_flight")
_CTA = ("threads_per_row", "rows_per_cta", "pipeline")
_SM = (*_CTA, "ctas_per_sm")
_GRID = ("ctas_per_sm", "cluster", "spare_sms")
_SMEM = (
    "strategy",
    "slice_columns",
    "cluster",
    "pipeline",
    "stages",
    "threads_per_row",
    "rows_per_cta",
    "rows_in_flight",
    "vector_bytes",
    "weight_in",
    "run_rows",
    "group_rows",
    "groups_in",
)
_SHIFT = ("cluster", "pipeline", "rows_in_flight", "vector_bytes", "weight_in")
OF_ROWS: dict[str, Derived] = {
    "threads": Derived(_CTA, lambda v, p, t: v.cta_threads),
    "columns": Derived(("cluster",), lambda v, p, t: v.columns),
    "row_bytes": Derived(("cluster",), lambda v, p, t: v.row_bytes),
    "widest_vector": Derived(("cluster",), lambda v, p, t: v.widest_vector),
    "elements": Derived(("vector_bytes",), lambda v, p, t: v.elements),
    "vectors": Derived(_ROW, lambda v, p, t: v.vectors),
    "accumulators": Derived(_ROW, lambda v, p, t: v.accumulators),
    "idle_columns": Derived(_ROW, lambda v, p, t: v.idle_columns),
    "batch_rows": Derived(_BATCH, lambda v, p, t: v.batch_rows),
    "teams": Derived(("rows_per_cta",), lambda v, p, t: v.teams),
    "resident_threads": Derived(_SM, lambda v, p, t: v.cta_threads * v["ctas_per_sm"]),
    "resident_registers": Derived(
        (*_SM, "register_cap"),
        lambda v, p, t: v.cta_threads * v["ctas_per_sm"] * v["register_cap"],
    ),
    "register_estimate": Derived(
        (*_ROW, "pipeline", "rows_in_flight", "reload", "weight_in"),
        lambda v, p, t: v.register_estimate,
    ),
    "register_budget": Derived(
        (*_SM, "register_cap"),
        lambda v, p, t: min(
            255,
            v["register_cap"] or 255,
            t.registers_per_sm // (v.cta_threads * v["ctas_per_sm"]) // 8 * 8,
        ),
    ),
    "batches": Derived(_BATCH, lambda v, p, t: ceil_div(p.M, v.batch_rows)),
    "participants": Derived(_GRID, lambda v, p, t: _participants(v, t)),
    "window_bytes": Derived((*_GRID, *_BATCH, "rows_per_cta"), window_bytes),
    "smem_bytes": Derived(_SMEM, lambda v, p, t: v.smem_bytes),
    "resident_smem": Derived(
        (*_SMEM, "ctas_per_sm"),
        lambda v, p, t: v["ctas_per_sm"] * t.smem_of_cta(v.smem_bytes),
    ),
}
"""Expressions of the kernels over rows."""
DERIVED = {
    **OF_ROWS,
    "even_splits": Derived(("cluster", "vector_bytes"), lambda v, p, t: even_splits(v)),
}

"""Numbers, from which a search learns, too."""
IMPLIED = DERIVED | {
    "way": Derived(REDUCTION_KNOBS, lambda v, p, t: v.strategy.way),
    "bulk_adds": Derived(REDUCTION_KNOBS, lambda v, p, t: v.strategy.bulk_adds),
    "adds_early": Derived((), lambda v, p, t: may_add_early(v.operation)),
    "block_columns": Derived((), lambda v, p, t: v.block_columns),
    "shares_numbers": Derived((), lambda v, p, t: bool(v.signature.groups)),
    "may_stage": Derived(("cluster", "pipeline", "vector_bytes"), lambda v, p, t: v.may_stage),
    "exchanges": Derived((*_ROW, "pipeline"), lambda v, p, t: v.exchanges),
    "shifted": Derived(("cluster", "vector_bytes"), lambda v, p, t: v.shifted),
    "may_shift": Derived(_SHIFT, lambda v, p, t: v.may_shift),
    "grid_step": Derived((*_SHIFT, "rows_per_cta"), lambda v, p, t: v.grid_step),
}
"""All names that follow from a config: the numbers, facts of its strategy, of its operation whether
the template can add to the sums over the rows before the row sum, how many columns share a scale,
whether rows share numbers and threads of a row exchange something, and what is about rows that are
no whole vectors."""

MOST_CHARACTERS = 1000
_ALLOWED = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Div,
    ast.Mod,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Tuple,
    ast.Name,
    ast.Load,
    ast.Constant,
)
_NO_BUILTINS: dict[str, Any] = {"__builtins__": {}}  # nothing that is allowed can change it


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
        if len(text) > MOST_CHARACTERS:  # Python's own parser has no better answer to deep nesting
            raise NormforgeError(
                f"{where}: an expression has at most {MOST_CHARACTERS} characters, got {len(text)}"
            )
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
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

    @property
    def knobs(self) -> frozenset[str]:
        """The knobs that its value depends on, also through derived names."""
        implied = self.names & IMPLIED.keys()
        needed = self.names.union(*(IMPLIED[name].knobs for name in implied))
        return needed & KNOBS.keys()

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """The value. Raises NormforgeError where the names do not allow one, such as `M / 0`."""
        try:
            return eval(self.code, _NO_BUILTINS, names)
        except (ArithmeticError, MemoryError, TypeError, ValueError) as error:
            raise NormforgeError(
                f"{self.where}: '{self.text}' cannot be computed ({str(error) or 'out of memory'})"
            ) from error


class Names(dict[str, Any]):
    """Names of one (possibly partial) config, with derived ones computed when asked for."""

    def __init__(
        self, problem: Problem, target: Target, exact: bool, in_blocks: bool = True
    ) -> None:
        super().__init__({name: getattr(problem, name) for name in _OF_PROBLEM})
        self.update({name: getattr(target, name) for name in _OF_TARGET})
        self.update(exact=exact, gpu=target.name)
        self.problem, self.target = problem, target
        self.geometry = Geometry(self, exact=exact, in_blocks=in_blocks, **shape_fields(problem))

    def __missing__(self, name: str) -> Any:
        return IMPLIED[name].value(self.geometry, self.problem, self.target)
