"""The knobs that the templates and the launch have: the one table of knobs.

A knob is added by its row here, its values in the YAML of the search space, and its use in a
template, where every knob is at hand as `knobs.<name>`. docs/extending.md walks through it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from generator.kernels.strategies import NAMES

Value = int | str


@dataclass(frozen=True)
class KnobFacts:
    """The fixed facts about a knob; the values that are searched are in the YAML.

    meaning: one line. domain: values that the templates support. launch_only: it changes the launch
    and not the source, so variants that differ in it share a cubin. neutral: of a knob that was
    added later, the value that leaves the ids of older variants as they were. optional: not every
    search space has it.
    """

    meaning: str
    domain: tuple[Value, ...] | range
    launch_only: bool = False
    neutral: Value | None = None
    optional: bool = False


WARPS_OR_EVEN_PARTS = (8, 16, *range(32, 1025, 32))
"""Numbers of threads that are whole warps, or of which some make up a warp."""

KNOBS: dict[str, KnobFacts] = {
    "strategy": KnobFacts("how the partial dw of all CTAs becomes dw", NAMES),
    "order": KnobFacts("whether bulk reduce-adds take turns or run free", ("turns", "free")),
    "levels": KnobFacts("chains of a strategy in turns: one, or groups and then one", range(1, 3)),
    "overlap": KnobFacts(
        "programmatic dependent launch of the second kernel", ("dependent", "none"), True
    ),
    "arrival": KnobFacts("when a CTA of `mailbox` arrives", ("late", "early"), neutral="late"),
    "sum_threads": KnobFacts("threads of a CTA of the second kernel", range(0, 1025, 32)),
    # A thread has four columns. sum_groups.cuh adds the rows of a warp in a butterfly, so the
    # threads of a row divide a warp, or leave no room in it for a second row.
    "slice_columns": KnobFacts(
        "columns of dw that a CTA of the tail sums", (0, 4, 8, 16, 32, *range(64, 1025, 4))
    ),
    "cluster": KnobFacts("CTAs that share a row", (1, 2, 4, 8, 16)),
    "run_rows": KnobFacts("rows that a CTA adds up at once", range(1025), optional=True),
    "group_rows": KnobFacts(
        "rows whose runs are added one after another", range(1025), optional=True
    ),
    "leaves": KnobFacts(
        "the sums that a CTA leaves: of groups, of runs, or of runs only at the end",
        ("groups", "runs", "both"),
        launch_only=True,
        optional=True,
    ),
    "pipeline": KnobFacts("how rows reach the threads", ("bulk", "direct", "async", "producer")),
    "stages": KnobFacts("batches of rows under way in shared memory", range(1, 17)),
    "threads_per_row": KnobFacts(
        "threads that share a row", (5, 6, 7, 10, 12, 14, *WARPS_OR_EVEN_PARTS)
    ),
    "rows_per_cta": KnobFacts("teams of a CTA, each with rows of its own", range(1, 33)),
    "rows_in_flight": KnobFacts("rows that a thread works on at once", range(1, 17)),
    "vector_bytes": KnobFacts("bytes of x in one load", (2, 4, 8, 16, 32)),
    "reload": KnobFacts("where dx takes x and dy from", ("none", "smem")),
    "weight_in": KnobFacts("where the weight is kept", ("registers", "smem")),
    "ctas_per_sm": KnobFacts("CTAs that run on one SM at once", range(1, 33), True),
    "spare_sms": KnobFacts("SMs that the grid leaves free", range(1024), True),
    "grid": KnobFacts(
        "as many CTAs as fit, or as divide the rows evenly, or as the rows need",
        ("full", "even", "rows"),
        launch_only=True,
    ),
    "min_blocks": KnobFacts("CTAs per SM promised to the compiler", range(33), neutral=0),
    "register_cap": KnobFacts("registers of a thread, 0 for no cap", range(256)),
    "load_hint": KnobFacts(
        "cache hint of the loads of x and dy", ("default", "no_allocate", "streaming", "evict_last")
    ),
    "column_sums": KnobFacts(
        "whether sums over the rows are added to before the row sum or behind it",
        ("late", "early"),
        neutral="late",
        optional=True,
    ),
    "row_numbers": KnobFacts(
        "whether threads load rstd for the next batch, or lanes hold that of 32 rows",
        ("next", "held"),
        neutral="next",
        optional=True,
    ),
    "groups_ahead": KnobFacts(
        "batches ahead at which the L2 is asked for what rows of a group share; 0: it is not",
        (0, 2, 3, 4, 6, 8, 12, 16),
        neutral=0,
        optional=True,
    ),
    "groups_in": KnobFacts(
        "where what rows of a group share waits for them: registers, or the stages of the rows",
        ("registers", "smem"),
        neutral="registers",
        optional=True,
    ),
    "store_hint": KnobFacts("cache hint of the stores of dx", ("default", "streaming")),
    "form": KnobFacts(
        "whether a row of a forward stays in registers, or is read again, also as Triton adds it",
        ("registers", "twice", "tiles_in_turn", "tiles_in_pairs"),
        optional=True,
    ),
}

FORWARD_KNOBS: dict[str, KnobFacts] = {
    **{name: KNOBS[name] for name in ("form", "cluster", "vector_bytes", "rows_in_flight")},
    "threads_per_row": KnobFacts("threads that share a row", (4, *WARPS_OR_EVEN_PARTS)),
    "rows_per_cta": KnobFacts("rows that a CTA works on at once", range(1, 129)),
    "ctas_per_sm": KnobFacts("CTAs on one SM that walk over rows, or 0: they do not", range(33)),
}
"""The knobs of RMSNorm's forward, which has all of them and no others."""


def knobs_like(names: Collection[str]) -> Mapping[str, KnobFacts]:
    """The table that knobs of these names are of."""
    return FORWARD_KNOBS if "form" in names else KNOBS
