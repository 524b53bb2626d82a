"""The ways to turn the partial dw of all CTAs into dw: the one table of strategies.

A strategy is added by its row here, its code in `templates/` (`dw_<name>.cuh`), its memory in
`runtime/spec.py`, its cost in `evaluate/predict/dw_reduction.py` and its value in the YAML of the
search space. docs/extending.md walks through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REDUCTION_KNOBS = ("strategy", "order")
"""The knobs that choose a row of the table."""


@dataclass(frozen=True)
class Strategy:
    """One way to sum dw.

    name, order: values of REDUCTION_KNOBS. adds: when a CTA adds its partial dw to the others':
    `by_index`, `in_turns`, or `on_arrival`, where the order differs from run to run; "" where there
    is nothing to add. tail: with
    `by_index`, who sums the rows of partial dw, one per CTA: `slices` (every CTA some columns),
    `last_cta` or `second_kernel`; else "". fragments: files of templates/ without suffix, in order.
    """

    name: str
    fragments: tuple[str, ...]
    adds: str = "by_index"
    tail: str = ""
    order: str = "turns"

    def __str__(self) -> str:
        return f"{self.name} (free)" if self.order == "free" else self.name

    @property
    def determinism(self) -> str:
        """`none` where partial sums are added in the order in which CTAs happen to finish, else
        `gpu_to_gpu`: every sum has one order, fixed by the config and the grid stored with it."""
        return "none" if self.adds == "on_arrival" else "gpu_to_gpu"

    @property
    def deterministic(self) -> bool:
        return self.determinism != "none"

    @property
    def launches(self) -> int:
        """Kernels of one call."""
        return 2 if self.tail == "second_kernel" else 1


STRATEGIES = (
    Strategy("column_slices", ("sum_slice", "last_arrived", "dw_column_slices"), tail="slices"),
    Strategy("mailbox", ("sum_slice", "last_arrived", "dw_mailbox"), tail="slices"),
    Strategy("separate", ("sum_slice", "dw_separate", "sum_partials"), tail="second_kernel"),
    Strategy("last_cta", ("sum_slice", "dw_last_cta"), tail="last_cta"),
    Strategy("semaphore", ("turns", "dw_semaphore"), adds="in_turns"),
    Strategy("bulk_reduce", ("turns", "dw_bulk_turns"), adds="in_turns"),
    Strategy("bulk_reduce", ("dw_bulk_free",), adds="on_arrival", order="free"),
    Strategy("atomic", ("dw_atomic",), adds="on_arrival"),
)
"""All strategies, in the order of the search space's file, which also breaks ties."""

NO_SUMS = Strategy("none", (), adds="")
"""The strategy of an operation without sums over the rows."""
NAMES = tuple(dict.fromkeys(strategy.name for strategy in (*STRATEGIES, NO_SUMS)))
_BY_KNOBS = {(strategy.name, strategy.order): strategy for strategy in (*STRATEGIES, NO_SUMS)}


def strategy_of(config: Mapping[str, Any]) -> Strategy:
    """The row of the table that a config chooses, NO_SUMS where it has no strategy. Where one has
    one row, the order does not count. Raises KeyError for an unknown strategy."""
    name = config.get("strategy", NO_SUMS.name)
    return _BY_KNOBS.get((name, config.get("order", "turns"))) or _BY_KNOBS[name, "turns"]


def is_deterministic(config: Mapping[str, Any]) -> bool:
    """Return True if a config has the same bits in every run, by construction: else it cannot
    win."""
    return strategy_of(config).deterministic


def launches(config: Mapping[str, Any]) -> int:
    """Kernels of one call of a config."""
    return strategy_of(config).launches
