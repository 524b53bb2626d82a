"""Turns: turns.cuh, dw_semaphore.cuh, dw_bulk_turns.cuh."""

from __future__ import annotations

from tests.support.litmus import Event, Thread
from tests.support.primitives import event
from tests.support.protocols.protocol import (
    IMPLIED,
    ONE_LAUNCH,
    SENDING,
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


def turn(name: str, mine: int, *own: Event, last: bool = False) -> list[Thread]:
    """A CTA in `semaphore`: thread 0 awaits and passes, another thread adds."""
    before = event("cta_barrier", f"barrier after {name}'s look", f"{name} await")
    after = event("cta_barrier", f"barrier before {name} passes", f"{name} pass")
    look = event("load_acquire", f"{name}'s look", "turn", want=equals(mine))
    pass_on = event("store_release", f"{name} passes", "turn", value=mine + 1)
    waits, passes = [look, before] if mine else [], [] if last else [after, pass_on]
    return cta(name, [*waits, *passes], [*waits[1:], *own, *passes[:1]])


SEMAPHORE = Protocol(
    "a lost row, or one of an earlier launch",
    program(
        turn("A", 0, event("store_workspace", "A's sum", "sums", value=1)),
        turn(
            "B",
            1,
            event("load_workspace", "sum of A", "sums"),
            event("store_workspace", "B's sum", "sums", value=2, plus=("sum of A",)),
        ),
        turn("C", 2, event("load_workspace", "sum of A and B", "sums"), last=True),
        sums=50,
    ),
    sees(sum_of_A_and_B=3),
    {
        **{f"{name} passes by a relaxed store": relaxed(f"{name} passes") for name in "AB"},
        **{f"{name} passes at cta scope": at_cta_scope(f"{name} passes") for name in "AB"},
        **{f"{name} looks by a relaxed load": relaxed(f"{name}'s look") for name in "BC"},
        **{f"{name} looks at cta scope": at_cta_scope(f"{name}'s look") for name in "BC"},
        **{
            f"no barrier before {name} passes": gone(f"barrier before {name} passes")
            for name in "AB"
        },
        **{
            f"no barrier after {name}'s look": gone(f"barrier after {name}'s look") for name in "BC"
        },
    },
    {"sums read by weak loads": weaker("sum of A", order="weak")},
)


def passes(name: str, counter: str) -> Event:
    return event("store_release", f"{name} passes", counter, value=1)


def waits(name: str, counter: str) -> Event:
    return event("load_acquire", f"{name}'s look", counter, want=equals(1))


def ticket(name: str, want: int | None) -> Event:
    ends = None if want is None else equals(want)
    return event("take_ticket", f"{name}'s ticket", "tickets", value=1, want=ends)


TURNS_AGAIN = Protocol(
    "a ticket or a turn of an earlier launch",
    # Two groups, of A and B and of C: B hands the sum of the first to C, who is the last of all.
    program(
        cta("A", [ticket("A", 0), passes("A", "turn in group")]),
        cta("B", [ticket("B", 1), waits("B", "turn in group"), passes("B", "turn of groups")]),
        cta(
            "C",
            [
                ticket("C", 2),
                waits("C", "turn of groups"),
                event("store_relaxed", "tickets set back", "tickets"),
                event("store_relaxed", "turn in group set back", "turn in group"),
                event("store_relaxed", "turn of groups set back", "turn of groups"),
            ],
        ),
        cta("A", [ticket("next", None)], launch=1),
        cta("B", [event("load_acquire", "next turn in group", "turn in group")], launch=1),
        cta("C", [event("load_acquire", "next turn of groups", "turn of groups")], launch=1),
    ),
    lambda o: any(
        o[label] for label in ("next's ticket", "next turn in group", "next turn of groups")
    ),
    {
        "B passes by a relaxed store": relaxed("B passes"),
        "C looks by a relaxed load": relaxed("C's look"),
        "B looks at cta scope": at_cta_scope("B's look"),
        "C looks at cta scope": at_cta_scope("C's look"),
        "A passes at cta scope": at_cta_scope("A passes"),
        "turns not set back": gone("turn of groups set back"),
        **ONE_LAUNCH,
    },
    # That B has seen the turn which C sets back is enough, whatever that orders besides.
    {
        "A passes by a relaxed store": relaxed("A passes"),
        "B looks by a relaxed load": relaxed("B's look"),
    },
)

A_FIRST, A_STORED = sends("A", 1, "bulk_store")
B_NEXT, B_STORED = sends(
    "B",
    2,
    "bulk_add",
    event("load_acquire", "B's look", "turn", want=equals(1)),
    event("fence_async_global", "B's fence before the copy"),
)
LANDED = event("cta_barrier", "B's last barrier", "B landed")
HANDED = event("cta_barrier", "barrier before B passes", "B pass")
TAKEN = event("cta_barrier", "barrier after C's look", "C await")
BULK_TURNS = Protocol(
    "a lost row, or one of an earlier launch",
    # A and B are a group. B writes its sum, the total so far, to the row that the copies went to.
    program(
        cta("A", [*A_FIRST, event("store_release", "A passes", "turn", value=1)], A_STORED),
        cta(
            "B",
            [
                *B_NEXT,
                LANDED,
                HANDED,
                event("store_release", "B passes", "turn of groups", value=1),
            ],
            [
                *B_STORED,
                LANDED,
                event("load_workspace", "sum", "sums"),
                event("store_workspace", "B's total", "sums", plus=("sum",), value=10),
                HANDED,
            ],
        ),
        cta(
            "C",
            [event("load_acquire", "C's look", "turn of groups", want=equals(1)), TAKEN],
            [TAKEN, event("load_workspace", "total", "sums")],
        ),
        sums=50,
    ),
    sees(sum=3, total=13),
    {
        **SENDING,
        **{f"{name} passes by a relaxed store": relaxed(f"{name} passes") for name in "AB"},
        **{f"{name} looks by a relaxed load": relaxed(f"{name}'s look") for name in "BC"},
        **{f"{name} passes at cta scope": at_cta_scope(f"{name} passes") for name in "AB"},
        **{f"{name} looks at cta scope": at_cta_scope(f"{name}'s look") for name in "BC"},
        "no proxy fence before B's bulk copy": gone("B's fence before the copy"),
        "no barrier behind B's wait": gone("B's last barrier"),
        "no barrier before B passes": gone("barrier before B passes"),
        "no barrier after C's look": gone("barrier after C's look"),
    },
    IMPLIED,
)
