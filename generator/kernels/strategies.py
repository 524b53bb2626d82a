"""The ways to turn the partial dw of all CTAs into dw: the one table of strategies.

A strategy is its row here, its code in `templates/`, and its value in the YAML of a search space.
The launch, the memory, the cost, the conditions of knobs and the tests follow from the row.
docs/extending.md walks through it.
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

    name, order: values of REDUCTION_KNOBS. fragments: files of templates/ without suffix, in order;
    `dw_...` is the strategy's own. way: who adds the partial sums, as KernelSpec says; the memory,
    the kernels of a launch and the predicted cost follow from it. bulk_adds: the copy engine adds,
    which needs bulk copies. group_fragments: the files in batch-invariant kernels, which have
    stored sums of groups of rows to add; () where there are none. learned: the learned correction
    of predictions has a feature of its own for it, as it was fitted to many trials. protocol: the
    program of tests/support/protocols that stands for how its CTAs wait for each other. steps: by
    own fragment and function (none for all of it) the primitives and helpers that it calls to that
    end, in the order of the text; tests compare them.
    """

    name: str
    fragments: tuple[str, ...]
    way: str
    order: str = "turns"
    bulk_adds: bool = False
    group_fragments: tuple[str, ...] = ()
    learned: bool = False
    protocol: str = ""
    steps: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} (free)" if self.order == "free" else self.name

    @property
    def template(self) -> str:
        """The name of its own file, without `dw_`: unlike its name, no other row has it."""
        return next(f.removeprefix("dw_") for f in self.fragments if f.startswith("dw_"))

    @property
    def knobs(self) -> dict[str, str]:
        """The values that choose it."""
        return {"strategy": self.name, "order": self.order}

    @property
    def adds(self) -> str:
        """When a CTA adds its partial dw to the others': `in_turns`, `on_arrival`, where the order
        differs from run to run, or `by_index`: each leaves a row and others sum it. "" where there
        is nothing to add."""
        return self.way if self.way in ("", "in_turns", "on_arrival") else "by_index"

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
        return 2 if self.way == "second_kernel" else 1


STRATEGIES = (
    Strategy(
        "column_slices",
        ("sum_slice", "last_arrived", "dw_column_slices"),
        way="slices",
        group_fragments=("sum_slice", "last_arrived", "dw_groups_column_slices"),
        learned=True,
        protocol="column_slices",
        steps=(
            "dw_column_slices finish: store_row_of book_in_order read_acquire",
            "dw_groups_column_slices finish: cta_barrier book_in_order await read_acquire "
            "store_shared_word store_shared_word cta_barrier load_shared_word load_shared_word "
            "broadcast take_over",
        ),
    ),
    Strategy(
        "mailbox",
        ("sum_slice", "last_arrived", "dw_mailbox"),
        way="flagged_slices",
        learned=True,
        protocol="mailbox",
        steps=(
            "dw_mailbox announce: book_and_read_later",
            "dw_mailbox finish: each_partial send_words book_and_read read_relaxed",
            "dw_mailbox await: receive_words empty_words",
        ),
    ),
    Strategy(
        "separate",
        ("sum_slice", "dw_separate", "sum_partials"),
        way="second_kernel",
        group_fragments=("dw_groups_separate",),
        learned=True,
        protocol="separate",
        steps=(
            "dw_separate: allow_dependents store_row_of",
            "sum_partials: wait_for_primary",
            "sum_partials_any_row: wait_for_primary",
            "dw_groups_separate: allow_dependents wait_for_primary",
        ),
    ),
    Strategy(
        "last_cta",
        ("sum_slice", "dw_last_cta"),
        way="last_cta",
        learned=True,
        protocol="last_cta",
        steps=(
            "dw_last_cta finish: store_row_of last_of store_workspace_word last_of",
            "dw_last_cta last_of: cta_barrier take_ticket store_relaxed broadcast",
        ),
    ),
    Strategy(
        "semaphore",
        ("turns", "dw_semaphore"),
        way="in_turns",
        protocol="semaphore",
        steps=(
            "dw_semaphore finish: store_partials await load_workspace store_workspace pass "
            "add_group",
        ),
    ),
    Strategy(
        "bulk_reduce",
        ("turns", "dw_bulk_turns"),
        way="in_turns",
        bulk_adds=True,
        protocol="bulk_reduce in turns",
        steps=(
            "dw_bulk_turns finish: store_partials store_shared4 fence_async_shared cta_barrier "
            "load_acquire fence_async_global bulk_add bulk_store bulk_commit bulk_wait_written "
            "fence_async_global store_release cta_barrier add_group load_workspace",
        ),
    ),
    Strategy(
        "bulk_reduce",
        ("dw_bulk_free",),
        way="on_arrival",
        order="free",
        bulk_adds=True,
        protocol="bulk_reduce, free",
        steps=(
            "dw_bulk_free finish: store_partials store_shared4 fence_async_shared cta_barrier "
            "bulk_add bulk_commit bulk_wait_written fence_async_global take_ticket broadcast "
            "load_workspace store_workspace store_relaxed",
        ),
    ),
    Strategy(
        "atomic",
        ("dw_atomic",),
        way="on_arrival",
        protocol="atomic",
        steps=(
            "dw_atomic finish: store_partials add_workspace cta_barrier take_ticket broadcast "
            "load_workspace store_workspace store_relaxed",
        ),
    ),
)
"""All strategies, in the order of the search space's file, which also breaks ties."""

NO_SUMS = Strategy("none", (), way="")
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
