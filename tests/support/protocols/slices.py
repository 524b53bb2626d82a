"""Slices summed by the last to arrive: last_arrived.cuh, dw_column_slices.cuh, dw_mailbox.cuh."""

from __future__ import annotations

from dataclasses import replace

from tests.support.litmus import Outcome, Program, Thread
from tests.support.primitives import event
from tests.support.protocols.protocol import (
    ONE_LAUNCH,
    Protocol,
    at_cta_scope,
    cta,
    equals,
    gone,
    not_zero,
    program,
    relaxed,
    sees,
    weaker,
)

START, ARRIVAL, HANDOVER = 1, 16, 256
"""Entries of a small ledger. Participant 0 takes off what all starts and arrivals add up to."""


def complete(ledger: int) -> bool:
    return ledger % HANDOVER == 0


def look_first(program: Program) -> Program:
    """B looks before it has arrived itself."""
    events = list(program.threads[2].events)
    place = next(i for i, e in enumerate(events) if e.label == "B arrives")
    events[place], events[place + 1] = events[place + 1], events[place]
    threads = list(program.threads)
    threads[2] = replace(threads[2], events=tuple(events))
    return replace(program, threads=tuple(threads))


START_OF_C = event("book_relaxed", "C starts", "ledger", value=START)
ARRIVED = event("cta_barrier", "B's barrier", "B")
SUMS = event("cta_barrier", "B's second barrier", "B sums")
COLUMN_SLICES = Protocol(
    "a stale row of partial dw",
    # A, participant 0, and C arrive. B does as well, and looks until all have. One start stands for
    # those of all, and lies anywhere between the arrivals.
    program(
        cta(
            "A",
            [
                event("cta_barrier", "A's barrier", "A"),
                event(
                    "book_in_order",
                    "A arrives",
                    "ledger",
                    value=ARRIVAL - (3 * ARRIVAL + START),
                ),
            ],
            [
                event("store_workspace", "A's dw", "row A", value=1),
                event("cta_barrier", "A's barrier", "A"),
            ],
        ),
        cta(
            "B",
            [
                ARRIVED,
                event("book_in_order", "B arrives", "ledger", value=ARRIVAL),
                event("read_acquire", "B's look", "ledger", want=complete),
                SUMS,
            ],
            [ARRIVED, SUMS, event("load_workspace", "row of A", "row A")],
        ),
        cta("C", [START_OF_C, event("book_in_order", "C arrives", "ledger", value=ARRIVAL)]),
    ),
    sees(row_of_A=1),
    {
        "A arrives without release": weaker("A arrives", order="acquire"),
        "A arrives at cta scope": at_cta_scope("A arrives"),
        "no barrier before A arrives": gone("A's barrier"),
        "B looks by a relaxed load": relaxed("B's look"),
        "B looks at cta scope": at_cta_scope("B's look"),
        "no barrier behind B's look": gone("B's second barrier"),
        "B looks before it has arrived": look_first,
        "C arrives at cta scope": at_cta_scope("C arrives"),
        "C starts at cta scope": at_cta_scope("C starts"),
    },
    {
        "rows read by weak loads": weaker("row of A", order="weak"),
        # What C adds to the ledger goes on with A's release, whatever its own order.
        "C arrives by a relaxed atomic": relaxed("C arrives"),
    },
)

WHOLE = 2 * ARRIVAL


def handing_over(place: int, launch: int) -> list[Thread]:
    """A, participant 0, arrives and hands over its slices; B is the last and takes them over."""
    name = f"{launch}"
    return [
        *cta(
            "A",
            [
                event("book_and_read", f"A arrives {name}", "ledger", value=ARRIVAL - WHOLE),
                event(
                    "book_and_read",
                    f"A hands over {name}",
                    "ledger",
                    value=HANDOVER,
                    want=lambda before: not complete(before),
                ),
                event("store_relaxed", f"A's word {name}", "list", value=place),
            ],
            launch=launch,
        ),
        *cta(
            "B",
            [
                event(
                    "book_and_read",
                    f"B arrives {name}",
                    "ledger",
                    value=ARRIVAL,
                    want=equals(ARRIVAL - WHOLE + HANDOVER),
                ),
                event("load_relaxed", f"place {name}", "list", want=not_zero),
                event("store_relaxed", f"B empties {name}", "list"),
                event("book_relaxed", f"B takes back {name}", "ledger", value=-HANDOVER),
            ],
            launch=launch,
        ),
    ]


HAND_OVER = Protocol(
    "a place of an earlier launch, or an entry that is left",
    program(
        handing_over(5, 0),
        handing_over(3, 1),
        cta(
            "A",
            [
                event("read_relaxed", "last ledger", "ledger"),
                event("load_relaxed", "last word", "list"),
            ],
            launch=2,
        ),
    ),
    lambda o: (o["place 0"], o["place 1"], o["last ledger"], o["last word"]) != (5, 3, 0, 0),
    {
        "the word sent by a weak store": weaker("A's word 0", order="weak"),
        "the word read by a weak load": weaker("place 0", order="weak"),
        "the word sent at cta scope": at_cta_scope("A's word 0"),
        "the word read at cta scope": at_cta_scope("place 0"),
        "the word not emptied": gone("B empties 0"),
        "the entry not taken back": gone("B takes back 1"),
        **ONE_LAUNCH,
    },
    # B has read the word that it empties.
    {"the word emptied by a weak store": weaker("B empties 0", order="weak")},
)

VOID_ENTRY = Protocol(
    "a stale row of partial dw, or an entry that is left",
    # C hands over in time. A comes too late for that: it takes its entry back, and looks once more.
    # B, participant 0, is the last to arrive, and takes back the entry of C.
    program(
        cta(
            "A",
            [
                event("book_in_order", "A arrives", "ledger", value=ARRIVAL),
                event("book_and_read", "A hands over", "ledger", value=HANDOVER, want=complete),
                event("book_relaxed", "A takes back", "ledger", value=-HANDOVER),
                event("read_acquire", "A's look", "ledger", want=complete),
                event("cta_barrier", "A's barrier", "A"),
            ],
            [
                event("cta_barrier", "A's barrier", "A"),
                event("load_workspace", "row of B", "row B"),
            ],
        ),
        cta(
            "B",
            [
                event("store_workspace", "B's dw", "row B", value=1),
                event("book_in_order", "B arrives", "ledger", value=-2 * ARRIVAL),
                event("book_relaxed", "B takes back", "ledger", value=-HANDOVER),
            ],
        ),
        cta(
            "C",
            [
                event("book_in_order", "C arrives", "ledger", value=ARRIVAL),
                event(
                    "book_and_read",
                    "C hands over",
                    "ledger",
                    value=HANDOVER,
                    want=lambda before: not complete(before),
                ),
            ],
        ),
        cta("A", [event("read_relaxed", "last ledger", "ledger")], launch=1),
    ),
    sees(row_of_B=1, last_ledger=0),
    {
        "A does not look once more": gone("A's look"),
        "A looks by a relaxed load": relaxed("A's look"),
        "no barrier behind A's look": gone("A's barrier"),
        "B arrives without release": weaker("B arrives", order="acquire"),
        "A takes back at cta scope": at_cta_scope("A takes back"),
        "B takes back at cta scope": at_cta_scope("B takes back"),
    },
)


def summed_once(outcome: Outcome) -> bool:
    """B, the last, knows of the entry, or A has read that it is void."""
    known = outcome["B arrives"] >= HANDOVER - WHOLE
    return known != complete(outcome["A hands over"])


def arrived_last(before: int) -> bool:
    return before % HANDOVER == (ARRIVAL - WHOLE) % HANDOVER


WHO_SUMS = Protocol(
    "slices that nobody sums, or two do",
    program(
        cta(
            "A",
            [
                event("book_and_read", "A arrives", "ledger", value=ARRIVAL - WHOLE),
                event("book_and_read", "A hands over", "ledger", value=HANDOVER),
            ],
        ),
        cta(
            "B",
            [event("book_and_read", "B arrives", "ledger", value=ARRIVAL, want=arrived_last)],
        ),
    ),
    lambda outcome: not summed_once(outcome),
    {
        "A hands over at cta scope": at_cta_scope("A hands over"),
        "B arrives at cta scope": at_cta_scope("B arrives"),
    },
)


def mail(word: int, launch: int) -> list[Thread]:
    """A sends a word and B takes it. That A has arrived is a hint, and orders nothing."""
    name = f"{launch}"
    receive = event("receive_words", f"word {name}", "place", want=not_zero)
    return [
        *cta("A", [event("send_words", f"A sends {name}", "place", value=word)], launch=launch),
        *cta("B", [receive, event("empty_words", f"B empties {name}", "place")], launch=launch),
    ]


MAILBOX = Protocol(
    "a word of an earlier launch, or one that is left",
    program(
        mail(5, 0),
        mail(3, 1),
        cta("A", [event("load_workspace", "last word", "place")], launch=2),
    ),
    sees(word_0=5, word_1=3, last_word=0),
    {
        "sent by a weak store": weaker("A sends 0", order="weak"),
        "received by a weak load": weaker("word 0", order="weak"),
        "sent at cta scope": at_cta_scope("A sends 0"),
        "received at cta scope": at_cta_scope("word 0"),
        "not emptied": gone("B empties 0"),
        **ONE_LAUNCH,
    },
    # B has read the word that it empties.
    {"emptied by a weak store": weaker("B empties 0", order="weak")},
)
