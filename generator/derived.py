"""What the rules of a space may ask beside the knobs: numbers that follow from a config."""

from __future__ import annotations

from collections.abc import Callable

from generator.problem import Problem
from generator.runtime.plan import ceil_div, round_up
from generator.target import Target
from generator.variant import Geometry

Derive = Callable[[Geometry, Problem, Target], int]

DERIVED: dict[str, tuple[tuple[str, ...], Derive]] = {
    "threads": (("threads_per_row", "rows_per_cta"), lambda v, p, t: v.threads),
    "columns": (("cluster",), lambda v, p, t: v.columns),
    "row_bytes": (("cluster",), lambda v, p, t: v.row_bytes),
    "widest_vector": (("cluster",), lambda v, p, t: v.widest_vector),
    "elements": (("vector_bytes",), lambda v, p, t: v.elements),
    "vectors": (("cluster", "threads_per_row", "vector_bytes"), lambda v, p, t: v.vectors),
    "accumulators": (
        ("cluster", "threads_per_row", "vector_bytes"),
        lambda v, p, t: v.accumulators,
    ),
    "idle_columns": (
        ("cluster", "threads_per_row", "vector_bytes"),
        lambda v, p, t: v.idle_columns,
    ),
    "teams": (("rows_per_cta",), lambda v, p, t: v.teams),
    "resident_threads": (
        ("threads_per_row", "rows_per_cta", "ctas_per_sm"),
        lambda v, p, t: v.threads * v["ctas_per_sm"],
    ),
    "resident_registers": (
        ("threads_per_row", "rows_per_cta", "ctas_per_sm", "register_cap"),
        lambda v, p, t: v.threads * v["ctas_per_sm"] * v["register_cap"],
    ),
    "register_estimate": (
        (
            *("cluster", "pipeline", "threads_per_row", "rows_in_flight", "vector_bytes"),
            *("reload", "weight_in"),
        ),
        lambda v, p, t: v.register_estimate,
    ),
    "register_budget": (
        ("threads_per_row", "rows_per_cta", "ctas_per_sm", "register_cap"),
        lambda v, p, t: min(
            255,
            v["register_cap"] or 255,
            t.registers_per_sm // (v.threads * v["ctas_per_sm"]) // 8 * 8,
        ),
    ),
    "batches": (
        ("threads_per_row", "rows_in_flight"),
        lambda v, p, t: ceil_div(p.M, v.batch_rows),
    ),
    "participants": (
        ("ctas_per_sm", "cluster", "spare_sms"),
        lambda v, p, t: (t.sms - v["spare_sms"]) * v["ctas_per_sm"] // v["cluster"],
    ),
    "smem_bytes": (
        (
            *("strategy", "slice_columns", "cluster", "pipeline", "stages", "threads_per_row"),
            *("rows_per_cta", "rows_in_flight", "vector_bytes", "weight_in"),
        ),
        lambda v, p, t: v.smem_bytes,
    ),
    "resident_smem": (
        (
            *("strategy", "slice_columns", "cluster", "pipeline", "stages", "threads_per_row"),
            *("rows_per_cta", "rows_in_flight", "vector_bytes", "weight_in", "ctas_per_sm"),
        ),
        lambda v, p, t: v["ctas_per_sm"] * (round_up(v.smem_bytes, 128) + 1024),
    ),
}
"""By name: the knobs that the number needs, and its value."""
