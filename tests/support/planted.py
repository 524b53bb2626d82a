"""Bugs that the tests on a GPU plant into rendered kernels, which then have to be caught."""

from __future__ import annotations

from generator.kernels.render import render
from generator.kernels.variant import Variant

SHAPE = "777x1024:bf16"

WRONG: dict[str, tuple[dict[str, int | str], str, str, str]] = {
    "row 77 is left out of dw": (
        {},
        "partial[j][i] = __fmaf_rn(xe, scaled, partial[j][i]);",
        "partial[j][i] = row == 77 ? partial[j][i] : __fmaf_rn(xe, scaled, partial[j][i]);",
        "dw[",
    ),
    "dx has no correction term": ({}, "__fmul_rn(correction, xe)", "0.0f", "dx["),
    "mean over one column too many": (
        {},
        "float inverse_columns = 1.0f / kRowColumns;",
        "float inverse_columns = 1.0f / (kRowColumns + 1);",
        "dx[",
    ),
    "row sum without the last vector": (
        {"threads_per_row": 64, "rows_per_cta": 4},
        "sum[u] = __fmaf_rn(element<Element>(xs[u][j].words, i), weighted, sum[u]);",
        "if (j + 1 < kVectors) sum[u] = __fmaf_rn(element<Element>(xs[u][j].words, i), weighted, "
        "sum[u]);",
        "dx[",
    ),
    "last column of dx is not written": (
        {},
        "if (args.dx != nullptr && row < args.rows && rows.owns(j, column)) {",
        "if (row < args.rows && rows.owns(j, column) && column + kElements < kColumns) {",
        "dx[",
    ),
    "row past the end is written": (
        {"rows_in_flight": 2},
        "if (args.dx != nullptr && row < args.rows && rows.owns(j, column)) {",
        "if (rows.owns(j, column)) {",
        "wrote outside",
    ),
    "last ragged row is counted twice": (
        {"rows_in_flight": 2},
        "return batch * kBatchRows + u * kRowsAbreast + row_abreast();",
        "const long long row = batch * kBatchRows + u * kRowsAbreast + row_abreast();\n"
        "return row < 776 ? row : 776;",
        "dw[",
    ),
    "a word of the list of slices is not reset": (
        {},
        "const DwOutput out = own_dw();",
        "const DwOutput out = own_dw();\n"
        "if (threadIdx.x == 0 && participant == 0) store_relaxed(list(), 1);",
        "left a counter",
    ),
    "counter of the last CTA is not reset": (
        {"strategy": "last_cta"},
        "if (ticket + 1 == count) store_relaxed(counter, 0);",
        "",
        "left a counter",
    ),
    "turns are not reset": (
        {"strategy": "semaphore", "levels": 2},
        "i < groups() + 2; ++i) store_relaxed",
        "i < groups() + 1; ++i) store_relaxed",
        "left a counter",
    ),
    "sums of atomics are not zeroed": (
        {"strategy": "atomic"},
        "store_workspace(sums + column, make_float4(0.0f, 0.0f, 0.0f, 0.0f));",
        "",
        "left a counter or an accumulator",
    ),
}
"""Kernels that give wrong numbers on SHAPE: knobs, the line, what becomes of it, and how the fault
that is found begins."""

BAD: dict[str, tuple[str, str, str]] = {
    "illegal access": (
        "store_row<kVectorBytes>(args.dx + row * args.dx_stride + column, packet);",
        "store_row<kVectorBytes>(args.dx + (1ll << 50) + column, packet);",
        "crashed",
    ),
    "trap": (
        "const unsigned participant = strategy.begin();",
        'const unsigned participant = strategy.begin(); asm volatile("trap;");',
        "crashed",
    ),
    "hang": (
        "const unsigned participant = strategy.begin();",
        "const unsigned participant = strategy.begin();\n"
        "while (load_acquire(args.counters) != 0x7fffffffu) {}",
        "timeout",
    ),
    "wrong numbers": ("__fmul_rn(correction, xe)", "0.0f", "wrong"),
}
"""Kernels that an evaluator has to survive: the line, what becomes of it, and the outcome."""


def broken(v: Variant, old: str = "", new: str = "") -> str:
    """The source of a variant with `old`, which it must have, replaced by `new`."""
    source = render(v)
    assert old in source, f"the templates no longer have {old!r}"
    return source.replace(old, new) if old else source
