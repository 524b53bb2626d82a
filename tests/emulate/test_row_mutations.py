"""The emulator finds bugs planted in the pipeline of rows, in barriers and in sums: each test
breaks one line of a rendered kernel that passes as it stands, and names what has to be reported."""

from __future__ import annotations

import pytest

from generator.emulate.build import find_compiler
from generator.target import Target
from tests.support.mutations import (
    ASYNC,
    BULK,
    CLOSING,
    PAIR,
    SHORT,
    TEAMS,
    Mutation,
    check_planted,
    check_untouched,
    untouched,
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

FEW_SCHEDULES = 50
"""Schedules for what goes wrong under all of them, and takes more rows than the rest."""

PLANTED = {
    "last row of a ragged tile read": Mutation(
        "separate",
        "const bool valid = row < rows.count;",
        "const bool valid = true;",
        r"CTA \d+ thread \d+: out of bounds: reads 16 bytes at x\[43, \d+\]",
        {"rows_in_flight": 2},
    ),
    "last row of a ragged tile copied": Mutation(
        "separate",
        "const int valid = left < kRowsInFlight ? static_cast<int>(left) : kRowsInFlight;",
        "const int valid = kRowsInFlight;",
        r"out of bounds: reads 2048 bytes at x\[43, 0\]",
        {"rows_in_flight": 2, **BULK},
    ),
    "last row of a ragged tile written": Mutation(
        "separate",
        "if (args.dx != nullptr && row < args.rows && rows.owns(j, column)) {",
        "if (args.dx != nullptr && rows.owns(j, column)) {",
        r"out of bounds: writes 16 bytes at dx\[43, \d+\]",
        {"rows_in_flight": 2},
    ),
    "stage refilled before all threads have read it (bulk)": Mutation(
        "separate",
        "    row_sum(sum);\n    pipeline.refill(schedule);",
        "    pipeline.refill(schedule);\n    row_sum(sum);",
        r"race: refills byte \d+ of shared memory, which .* may still have to read"
        r"|reads byte \d+ of shared memory, .*bulk copy of thread 0.*refilled before",
        BULK,
    ),
    "stage refilled while it is reloaded (bulk)": Mutation(
        "last_cta",
        "kReload ? last : stage);",
        "stage);",
        r"race: refills byte \d+ of shared memory, which .* may still have to read"
        r"|refilled before this thread had read it",
        {**BULK, "stages": 3, "reload": "smem"},
    ),
    "stage refilled while it is reloaded (cp.async)": Mutation(
        "last_cta",
        "!kReload ? due : due == first ? last() : due - kStageBytes);",
        "due);",
        r"reads byte \d+ of shared memory before the wait for the cp.async",
        {**ASYNC, "stages": 3, "reload": "smem"},
    ),
    "no proxy fence before a bulk operation reads shared memory": Mutation(
        "bulk_turns",
        "    fence_async_shared();\n    cta_barrier();",
        "    cta_barrier();",
        r"no proxy fence: thread \d+ wrote byte \d+ of shared memory",
    ),
    "no proxy fence between acquire and bulk operation": Mutation(
        "bulk_turns",
        "        fence_async_global();\n        bulk_add",
        "        bulk_add",
        r"no proxy fence between an acquire and the bulk operation on scratch\[",
    ),
    "no proxy fence between bulk operation and release": Mutation(
        "bulk_turns",
        "      bulk_wait_written();\n      fence_async_global();",
        "      bulk_wait_written();",
        r"race: .*or not fenced",
    ),
    "own turn not awaited": Mutation(
        "bulk_turns",
        "while (load_acquire(group_turn(g)) != place) {",
        "while (load_acquire(group_turn(g)) == kThreads) {",
        r"race: adds to scratch\[|adds to scratch\[.*nobody has written",
    ),
    "stage read before its wait (bulk)": Mutation(
        "separate",
        "    pipeline.await();\n",
        "",
        r"CTA \d+ thread \d+: reads byte \d+ of shared memory, .*(before this thread's wait"
        r"|nobody has written)",
        BULK,
    ),
    "stage read before its wait (cp.async)": Mutation(
        "separate",
        "copy_async_wait<kAhead - 1>();",
        "copy_async_wait<kAhead>();",
        r"CTA \d+ thread \d+: reads byte \d+ of shared memory before the wait for the cp.async",
        ASYNC,
    ),
    "barriers of the stages not published": Mutation(
        "separate",
        "  const Weight weights(rows, args.weight, smem);\n  team_barrier();",
        "  const Weight weights(rows, args.weight, smem);",
        r"race: uses mbarrier \d+, whose initialisation|an mbarrier at byte \d+ .* not initialised",
        BULK,
    ),
    "barriers of a cluster not published": Mutation(
        "separate",
        "  cluster_barrier();\n",
        "",
        r"race: uses mbarrier \d+, whose initialisation|an mbarrier at byte \d+ .* not initialised",
        PAIR,
        shape="21x4096:bf16",
    ),
    "sums of a cluster read before their wait": Mutation(
        "separate",
        "    mbarrier_wait_cluster(&arrived[buffer], phase);\n",
        "",
        r"reads byte \d+ of shared memory, .*(store from the cluster|nobody has written)",
        PAIR,
        shape="21x4096:bf16",
    ),
    "barrier of the row sum removed": Mutation(
        "separate",
        "store_shared(into + u * kWarpsPerRow + team_thread() / 32, value[u]);\n"
        "      team_barrier();",
        "store_shared(into + u * kWarpsPerRow + team_thread() / 32, value[u]);",
        r"race: reads byte \d+ of shared memory|reads byte \d+ .*nobody has written",
    ),
    "teams add up before all have stored": Mutation(
        "separate",
        "store_shared(own + padded, 0.0f);\n  cta_barrier();",
        "store_shared(own + padded, 0.0f);",
        r"race: reads byte \d+ of shared memory|reads byte \d+ .*nobody has written",
    ),
    "stages overwritten while others read them": Mutation(
        "separate",
        "const int columns = kExact ? kColumns : rows.columns;\n  cta_barrier();",
        "const int columns = kExact ? kColumns : rows.columns;",
        r"race: overwrites byte \d+ of shared memory|refilled before this thread had read it",
        {**BULK, "reload": "smem", "stages": 3},
    ),
    "barrier in a branch": Mutation(
        "separate",
        "    allow_dependents();\n",
        "    allow_dependents();\n    if (threadIdx.x < 32) cta_barrier();\n",
        r"divergent barrier: ",
    ),
    "second kernel does not wait for the first": Mutation(
        "separate",
        "  wait_for_primary();\n",
        "",
        r"sum_partials CTA \d+ thread \d+: (race: reads|reads) scratch\[",
        {"overlap": "dependent"},
    ),
    "row of dx left out": Mutation(
        "separate",
        "if (args.dx != nullptr && row < args.rows && rows.owns(j, column)) {",
        "if (args.dx != nullptr && row < args.rows - 1 && rows.owns(j, column)) {",
        r"dx\[42, 0\] was never written, nor 1023 more",
    ),
    "row of dx written twice": Mutation(
        "separate",
        "store_row<kVectorBytes>(args.dx + row * args.dx_stride + column, packet);",
        "store_row<kVectorBytes>(args.dx + row / 2 * args.dx_stride + column, packet);",
        r"writes dx\[\d+, \d+\] a second time",
    ),
    "slice of dw left out": Mutation(
        "column_slices",
        "slice < slices; slice += participants)",
        "slice + 1 < slices; slice += participants)",
        r"dw\[\d+\] was never written",
    ),
    "workspace row too far": Mutation(
        "last_cta",
        "store_row_of(participant, rows, partial);",
        "store_row_of(participant + 1, rows, partial);",
        r"out of bounds: writes 16 bytes at scratch\[|reads scratch\[.*nobody has written",
        {"levels": 1},
    ),
    "shared memory too small": Mutation(
        "separate",
        "float* own = teams + team_index() * kPartialStride;",
        "float* own = teams + (team_index() + 1) * kPartialStride;",
        r"out of bounds: writes 16 bytes at byte \d+ of shared memory, which has \d+",
    ),
    "loop without end": Mutation(
        "separate",
        "    allow_dependents();\n",
        "    for (volatile int i = 0; i == 0;) {\n    }\n",
        r"no end within 1 s",
        deadline=1.0,
    ),
    # Rows of less than a warp.
    "sum of all rows of a warp": Mutation(
        "separate",
        "mask = (kThreadsPerRow < 32 ? kThreadsPerRow : 32) / 2;",
        "mask = 16;",
        r"dx\[\d+, \d+\] is .*, float64 gives",
        SHORT,
        shape="43x64:bf16",
    ),
    "rows abreast not added": Mutation(
        "last_cta",
        "    add_abreast(partial);\n",
        "",
        r"dw\[\d+\] is .*, float64 gives",
        SHORT,
        shape="43x64:bf16",
    ),
    "rows abreast added without the last step": Mutation(
        "semaphore",
        "mask = kThreadsPerRow; mask < 32; mask *= 2)",
        "mask = kThreadsPerRow; mask < 16; mask *= 2)",
        r"dw\[\d+\] is .*, float64 gives",
        SHORT,
        shape="43x64:bf16",
    ),
    "lanes of every row abreast store": Mutation(
        "separate",
        "row_abreast() != 0 || !rows.owns",
        "!rows.owns",
        r"race: overwrites byte \d+ of shared memory|race: writes scratch\[",
        SHORT,
        shape="43x64:bf16",
        places=2,
    ),
    "rows abreast confused": Mutation(
        "separate",
        "u * kRowsAbreast + row_abreast();",
        "u * kRowsAbreast;",
        r"writes dx\[\d+, \d+\] a second time",
        SHORT,
        shape="43x64:bf16",
    ),
    # Sums of blocks of rows, in vectors of 16 bytes and one by one, and while row sums travel.
    **{
        f"{bug} ({shape})": Mutation(
            "column_slices", old, new, found, knobs, shape, schedules=FEW_SCHEDULES
        )
        for bug, old, new, found in (
            (
                "complete blocks left out",
                "    blocks.finish(partial);\n",
                "",
                r"dw\[\d+\] is .*float64 gives",
            ),
            (
                "block overwrites those before it",
                "    if (batches != kBlockBatches) add(partial);\n",
                "",
                r"dw\[\d+\] is .*float64 gives",
            ),
            (
                "block not started anew",
                "        partial[j][i] = 0.0f;\n",
                "",
                r"dw\[\d+\] is .*float64 gives",
            ),
            (
                "complete blocks not noticed",
                "batches >= kBlockBatches",
                "batches > 9 * kBlockBatches",
                r"dw\[\d+\] is .*float64 gives",
            ),
            (
                "first block added to nothing",
                "if (batches != kBlockBatches) add",
                "add",
                r"nobody has written|float64 gives",
            ),
            (
                "two threads in one place",
                "* kThreads + threadIdx.x) * kChunk",
                "* kThreads + threadIdx.x / 2 * 2) * kChunk",
                r"race: (overwrites|reads) byte \d+ of shared memory|float64 gives",
            ),
        )
        for shape, knobs in (*CLOSING, ("1400x77:fp32", TEAMS))
    },
    **{
        f"sums of blocks at {place} ({shape})": Mutation(
            "column_slices",
            "smem + kBlockSumsOffset",
            place,
            r"of shared memory|mbarrier|float64 gives",
            knobs,
            shape,
            schedules=FEW_SCHEDULES,
        )
        for shape, knobs in CLOSING
        for place in ("smem + 16", "smem + kTilesOffset - 64")
    },
    # A wrong kernel that synchronises well.
    "wrong formula": Mutation(
        "separate",
        "const float correction = -__fmul_rn(",
        "const float correction = __fmul_rn(",
        r"dx\[\d+, \d+\] is .*, float64 gives",
    ),
    "partial dw started over": Mutation(
        "separate",
        "partial[j][i] = __fmaf_rn(xe, scaled, partial[j][i]);",
        "partial[j][i] = __fmaf_rn(xe, scaled, row == 17 ? 0.0f : partial[j][i]);",
        r"dw\[\d+\] is .*, float64 gives",
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found_and_named(name: str, target: Target) -> None:
    check_planted(PLANTED[name], target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", untouched(PLANTED))
def test_unmutated_kernel_passes_the_same_schedules(name: str, target: Target) -> None:
    check_untouched(PLANTED[name], target)
