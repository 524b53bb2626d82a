"""The last to finish sums (dw_last_cta.cuh, dw_atomic.cuh, dw_bulk_free.cuh); dw_separate.cuh."""

from __future__ import annotations

from tests.support.litmus import Event, Thread
from tests.support.primitives import event
from tests.support.protocols.protocol import (
    IMPLIED,
    ONE_LAUNCH,
    SENDING,
    Change,
    Protocol,
    at_cta_scope,
    cta,
    equals,
    gone,
    program,
    relaxed,
    sees,
    sends,
    weaker,
)


def drawn_last(ticket: str) -> list[Event]:
    """Thread 0 of the CTA that draws the last of two tickets, up to the end of broadcast."""
    return [
        event("cta_barrier", "B's barrier", "B"),
        event("take_ticket", ticket, "counter", value=1, want=equals(1)),
        event("store_relaxed", "reset", "counter"),
        event("store_shared_word", "B's word", "shared word", plus=(ticket,)),
        event("cta_barrier", "B's broadcast", "B broadcast"),
    ]


def broadcast() -> list[Event]:
    """Return the events of another thread of that CTA."""
    return [
        event("cta_barrier", "B's barrier", "B"),
        event("cta_barrier", "B's broadcast", "B broadcast"),
        event("load_shared_word", "B is last", "shared word", want=equals(1)),
    ]


def next_ticket() -> list[Thread]:
    return cta("A", [event("take_ticket", "next ticket", "counter", value=1)], launch=1)


TICKETS: dict[str, Change] = {
    "A's ticket acquires only": weaker("A's ticket", order="acquire"),
    "A's ticket relaxed": relaxed("A's ticket"),
    "B's ticket releases only": weaker("B's ticket", order="release"),
    "A's ticket at cta scope": at_cta_scope("A's ticket"),
    "B's ticket at cta scope": at_cta_scope("B's ticket"),
    "no barrier before A's ticket": gone("A's barrier"),
    "no barrier in B's broadcast": gone("B's broadcast"),
    "counter not set back": gone("reset"),
    **ONE_LAUNCH,
}

LAST_CTA = Protocol(
    "a stale row of partial dw, or a ticket of an earlier launch",
    program(
        cta(
            "A",
            [
                event("cta_barrier", "A's barrier", "A"),
                event("take_ticket", "A's ticket", "counter", value=1),
            ],
            [
                event("store_workspace", "A's dw", "row A", value=1),
                event("cta_barrier", "A's barrier", "A"),
            ],
        ),
        cta(
            "B",
            drawn_last("B's ticket"),
            [*broadcast(), event("load_workspace", "row of A", "row A")],
        ),
        next_ticket(),
    ),
    sees(row_of_A=1, next_ticket=0),
    TICKETS,
    {"rows read by weak loads": weaker("row of A", order="weak")},
)


TWO_LEVELS = Protocol(
    "a stale row of partial dw, or a stale sum of a group",
    # A and B are a group: B sums it, and C, the last of the groups, sums B's sum and its own.
    program(
        cta(
            "A",
            [
                event("cta_barrier", "A's barrier", "A"),
                event("take_ticket", "A's ticket", "counter", value=1),
            ],
            [
                event("store_workspace", "A's dw", "row A", value=1),
                event("cta_barrier", "A's barrier", "A"),
            ],
        ),
        cta(
            "B",
            [
                *drawn_last("B's ticket"),
                event("cta_barrier", "B's barrier after its sum", "B summed"),
                event("take_ticket", "B's ticket of groups", "groups", value=1),
            ],
            [
                *broadcast(),
                event("load_workspace", "row of A", "row A"),
                event("store_workspace_word", "sum of B", "group", value=2, plus=("row of A",)),
                event("cta_barrier", "B's barrier after its sum", "B summed"),
            ],
        ),
        cta(
            "C",
            [
                event("take_ticket", "C's ticket", "groups", value=1, want=equals(1)),
                event("cta_barrier", "C's broadcast", "C broadcast"),
            ],
            [
                event("cta_barrier", "C's broadcast", "C broadcast"),
                event("load_workspace", "sum of the group", "group"),
                event("load_workspace", "row of A in C", "row A"),
            ],
        ),
    ),
    sees(sum_of_the_group=3, row_of_A_in_C=1),
    {
        "A's ticket relaxed": relaxed("A's ticket"),
        "B's ticket relaxed": relaxed("B's ticket"),
        "B's ticket of groups relaxed": relaxed("B's ticket of groups"),
        "C's ticket relaxed": relaxed("C's ticket"),
        "B's ticket of groups at cta scope": at_cta_scope("B's ticket of groups"),
        "no barrier after B's sum": gone("B's barrier after its sum"),
        "no barrier in C's broadcast": gone("C's broadcast"),
    },
)

SOMEBODY = Protocol(
    "no CTA draws the last ticket",
    program(
        cta("A", [event("take_ticket", "A's ticket", "counter", value=1)]),
        cta("B", [event("take_ticket", "B's ticket", "counter", value=1)]),
    ),
    lambda outcome: 1 not in outcome.values(),
    {
        "A's ticket at cta scope": at_cta_scope("A's ticket"),
        "B's ticket at cta scope": at_cta_scope("B's ticket"),
    },
    {"relaxed tickets": relaxed("A's ticket")},
)


ATOMIC = Protocol(
    "a lost partial dw, or one of an earlier launch",
    program(
        cta(
            "A",
            [
                event("cta_barrier", "A's barrier", "A"),
                event("take_ticket", "A's ticket", "counter", value=1),
            ],
            [
                event("add_workspace", "A adds", "sums", value=1),
                event("cta_barrier", "A's barrier", "A"),
            ],
        ),
        cta(
            "B",
            drawn_last("B's ticket"),
            [
                event("add_workspace", "B adds", "sums", value=2),
                *broadcast(),
                event("load_workspace", "sum", "sums"),
                event("store_workspace", "zero", "sums"),
            ],
        ),
        next_ticket(),
        cta("B", [event("load_workspace", "next sum", "sums")], launch=1),
    ),
    sees(sum=3, next_sum=0, next_ticket=0),
    {**TICKETS, "sums not zeroed": gone("zero"), "A adds at cta scope": at_cta_scope("A adds")},
    {"sums read by weak loads": weaker("sum", order="weak")},
)


A_SENDS, A_HOLDS = sends("A", 1, "bulk_add")
B_SENDS, B_HOLDS = sends("B", 2, "bulk_add")
C_SENDS, C_HOLDS = sends("C", 4, "bulk_add")

NOT_HERE = ("counter not set back", "no barrier before A's ticket")
BULK_FREE = Protocol(
    "a lost partial dw, or one of an earlier launch",
    program(
        cta("A", [*A_SENDS, event("take_ticket", "A's ticket", "counter", value=1)], A_HOLDS),
        cta(
            "B",
            [*B_SENDS, *drawn_last("B's ticket")[1:]],
            [
                *B_HOLDS,
                *broadcast()[1:],
                event("load_workspace", "sum", "sums"),
                event("store_workspace", "zero", "sums"),
            ],
        ),
        cta("C", C_SENDS, C_HOLDS, launch=1),
        cta("B", [event("load_workspace", "last sum", "sums")], launch=2),
    ),
    sees(sum=3, last_sum=4),
    {
        **{what: TICKETS[what] for what in TICKETS if what not in NOT_HERE},
        **SENDING,
        "sums not zeroed": gone("zero"),
    },
    IMPLIED,
)


# -- Another kernel sums: dw_separate.cuh --

SEPARATE = Protocol(
    "a stale row of partial dw",
    # The end of a grid, which griddepcontrol.wait waits for as well, orders what it has written.
    program(
        cta("A", [event("store_workspace", "A's dw", "row A", value=1)]),
        cta("B", [event("load_workspace", "row of A", "row A")], launch=1),
    ),
    sees(row_of_A=1),
    ONE_LAUNCH,
)
