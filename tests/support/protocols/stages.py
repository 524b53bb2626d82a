"""Shared memory used again: rows_bulk.cuh, partial_dw.cuh, row_sum_cluster.cuh, runs.cuh."""

from __future__ import annotations

from tests.support.litmus import Event
from tests.support.primitives import bulk_load, bulk_out, event, instructions, store_cluster
from tests.support.protocols.protocol import (
    Protocol,
    at_cta_scope,
    cta,
    gone,
    program,
    relaxed,
    sees,
)

STAGE = "shared stage"


def fetch(label: str, value: int, phase: str) -> list[Event]:
    return [
        event("mbarrier_expect", f"{label} expected", phase),
        bulk_load(label, STAGE, value, phase),
    ]


ROW_SUM = event("cta_barrier", "barrier of the row sum", "row sum")
REFILL = Protocol(
    "a stage overwritten before it is read, or read before it is filled",
    program(
        cta(
            "A",
            [
                *fetch("first row", 1, "landed 0"),
                event("mbarrier_wait", "issuer's wait", "landed 0"),
                ROW_SUM,
                event("fence_async_shared", "fence of the refill"),
                *fetch("next row", 2, "landed 1"),
            ],
            [
                event("mbarrier_wait", "wait", "landed 0"),
                event("load_shared_packet", "first", STAGE),
                ROW_SUM,
                event("mbarrier_wait", "next wait", "landed 1"),
                event("load_shared_packet", "next", STAGE),
            ],
        ),
    ),
    sees(first=1, next=2),
    {
        "no proxy fence before the refill": gone("fence of the refill"),
        "no barrier before the refill": gone("barrier of the row sum"),
        "a relaxed wait for the first row": relaxed("wait"),
        "a relaxed wait for the next row": relaxed("next wait"),
    },
)

DX_OVER_DY = Protocol(
    "an element of dy copied after dx has been written there",
    program(
        cta(
            "A",
            [
                event("mbarrier_expect", "row expected", "landed"),
                bulk_load("copy", STAGE, 0, "landed", source="dy"),
            ],
            [
                event("mbarrier_wait", "wait", "landed"),
                event("load_shared_packet", "row", STAGE),
                event("store_row", "dx", "dy", value=1, plus=("row",)),
            ],
        ),
        dy=5,
    ),
    sees(copy_reads=5),
    {"no wait for the row": gone("wait"), "a relaxed wait for the row": relaxed("wait")},
)

DONE = event("cta_barrier", "barrier before partial dw", "done")
HELD = event("cta_barrier", "barrier behind partial dw", "held")
STAGE_REUSED = Protocol(
    "a row in the place of partial dw",
    # One thread waits for the row, another writes partial dw to its place, and the copy engine
    # sends that to the workspace.
    program(
        cta(
            "A",
            [
                *fetch("row", 1, "landed"),
                event("mbarrier_wait", "wait", "landed"),
                DONE,
                HELD,
                bulk_out("bulk_store", "bulk copy", "row A", STAGE),
                event("bulk_wait_written", "full wait"),
                event("load_workspace", "sent", "row A"),
            ],
            [
                DONE,
                event("store_shared4", "partial dw", STAGE, value=5),
                event("fence_async_shared", "fence"),
                HELD,
            ],
        ),
    ),
    sees(sent=5),
    {
        "no barrier before partial dw": gone("barrier before partial dw"),
        "no barrier behind partial dw": gone("barrier behind partial dw"),
        "no proxy fence behind partial dw": gone("fence"),
        "a relaxed wait for the row": relaxed("wait"),
    },
)

RUNS = Protocol(
    "a sum of a run overwritten before it is added, or added before it is written",
    # V's team has one thread, the other one two: U writes and adds, and another thread arrives.
    program(
        cta(
            "A",
            [
                event("store_shared4", "V writes run 0", "shared V", value=1),
                event("mbarrier_expect", "V arrives", "run 0"),
                event("mbarrier_wait", "V waits", "run 1"),
                event("load_shared4", "run 1 of U", "shared U"),
                event("store_shared4", "V writes run 2", "shared V", value=3),
            ],
            [
                event("mbarrier_wait", "U waits", "run 0"),
                event("load_shared4", "run 0 of V", "shared V"),
                event("store_shared4", "U writes run 1", "shared U", value=2),
                event("named_barrier", "barrier of the team", "team"),
            ],
            [
                event("named_barrier", "barrier of the team", "team"),
                event("mbarrier_expect", "U's team arrives", "run 1"),
            ],
        ),
    ),
    sees(run_0_of_V=1, run_1_of_U=2),
    {
        "V arrives without release": relaxed("V arrives"),
        "U's team arrives without release": relaxed("U's team arrives"),
        "U waits without acquire": relaxed("U waits"),
        "V waits without acquire": relaxed("V waits"),
        "no barrier of the team": gone("barrier of the team"),
    },
)


def wait_for(primitive: str, whose: str, place: str) -> list[Event]:
    """Return what the primitive does: a wait that acquires, or a relaxed one and a fence."""
    events = [event(primitive, f"{whose} wait", place)]
    if len(instructions(primitive)) > 1:
        events.append(event(primitive, f"{whose} fence", instruction=1))
    return events


def row_sums(cumulative: bool, primitive: str = "mbarrier_wait_cluster") -> Protocol:
    """B gets A's sum of a batch, then sends its own of the next, and A that of the one after it.

    Both sums of A go to one buffer of B. A lane of B sends for its warp; another has read the sum.
    """
    met = event("warp_barrier", "barrier of the warp", "warp")
    received = wait_for(primitive, "B's", "B batch 0")
    weakenings = {
        "B waits at cta scope": at_cta_scope("B's wait"),
        "B waits without acquire": relaxed("B's wait"),
        "A waits at cta scope": at_cta_scope("A's wait"),
        "A waits without acquire": relaxed("A's wait"),
    }
    if len(received) > 1:
        weakenings = {
            "B waits at cta scope": at_cta_scope("B's wait"),
            "no fence behind B's wait": gone("B's fence"),
            "B's fence at cta scope": at_cta_scope("B's fence"),
            "A waits at cta scope": at_cta_scope("A's wait"),
            "no fence behind A's wait": gone("A's fence"),
            "A's fence at cta scope": at_cta_scope("A's fence"),
        }
    return Protocol(
        "a row sum missed, or overwritten before it is read",
        program(
            cta(
                "A",
                [
                    store_cluster("A's sum", "shared B 0", 1, "B batch 0", cumulative),
                    *wait_for(primitive, "A's", "A batch 1"),
                    store_cluster("A's last sum", "shared B 0", 2, "B batch 2", cumulative),
                ],
                cluster="cluster",
            ),
            cta(
                "B",
                [*received, event("load_shared", "sum of A", "shared B 0"), met],
                [
                    *received,
                    met,
                    store_cluster("B's sum", "shared A 1", 1, "A batch 1", cumulative),
                ],
                cluster="cluster",
            ),
        ),
        sees(sum_of_A=1),
        {**weakenings, "no barrier of the warp": gone("barrier of the warp")},
    )


def refill_in_cluster(cumulative: bool) -> Protocol:
    """Return the protocol of REFILL, behind the completed exchange of row sums instead of a barrier
    of the CTA."""
    wait = event("mbarrier_wait", "wait", "landed 0")
    return Protocol(
        "a stage overwritten before it is read, or read before it is filled",
        program(
            cta(
                "A",
                [
                    *fetch("first row", 1, "landed 0"),
                    event("mbarrier_wait_cluster", "wait for sums", "sums"),
                    event("fence_async_shared", "fence of the refill"),
                    *fetch("next row", 2, "landed 1"),
                ],
                [
                    wait,
                    event("load_shared_packet", "first", STAGE),
                    store_cluster("sum", "shared sums", 1, "sums", cumulative),
                ],
                cluster="cluster",
            ),
        ),
        sees(first=1),
        {
            "no proxy fence before the refill": gone("fence of the refill"),
            "sums waited for without acquire": relaxed("wait for sums"),
        },
    )


ROW_SUMS, REFILL_IN_CLUSTER = row_sums(cumulative=True), refill_in_cluster(cumulative=True)
ROW_SUMS_WITH_A_PRODUCER = row_sums(True, "mbarrier_wait_sums")
