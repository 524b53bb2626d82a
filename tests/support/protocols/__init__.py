"""Every protocol of the templates that rests on an order of memory."""

from __future__ import annotations

from tests.support.protocols import last_cta, slices, stages, turns
from tests.support.protocols.protocol import Protocol

PROTOCOLS: dict[str, Protocol] = {
    "`separate`": last_cta.SEPARATE,
    "`last_cta`": last_cta.LAST_CTA,
    "`last_cta`, two levels": last_cta.TWO_LEVELS,
    "tickets": last_cta.SOMEBODY,
    "`atomic`": last_cta.ATOMIC,
    "`bulk_reduce`, free": last_cta.BULK_FREE,
    "`semaphore`": turns.SEMAPHORE,
    "`bulk_reduce` in turns": turns.BULK_TURNS,
    "turns, launch after launch": turns.TURNS_AGAIN,
    "`column_slices`": slices.COLUMN_SLICES,
    "ledger, entry in time or void": slices.WHO_SUMS,
    "ledger, void entry taken back": slices.VOID_ENTRY,
    "list of places handed over": slices.HAND_OVER,
    "`mailbox`": slices.MAILBOX,
    "stage refilled": stages.REFILL,
    "dx over dy": stages.DX_OVER_DY,
    "stage reused for partial dw": stages.STAGE_REUSED,
    "sums of runs": stages.RUNS,
    "stage refilled in a cluster": stages.REFILL_IN_CLUSTER,
    "row sums in a cluster": stages.ROW_SUMS,
    "row sums in a cluster, with a producer": stages.ROW_SUMS_WITH_A_PRODUCER,
}
