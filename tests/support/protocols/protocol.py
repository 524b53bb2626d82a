"""A way in which partial dw becomes dw, or shared memory is used again, as a litmus program.

A CTA has one or two threads here: thread 0, which signals and waits, and one of the others, whose
accesses are what has to be ordered. Kinds, orders and scopes come from the primitives themselves. A
weakening is a bug that could be planted in a template or in a primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from tests.support.litmus import Event, Outcome, Program, Thread
from tests.support.primitives import bulk_out, event

Change = Callable[[Program], Program]


@dataclass(frozen=True)
class Protocol:
    bad_outcome: str
    program: Program
    bad: Callable[[Outcome], bool]
    weakenings: dict[str, Change]
    harmless: dict[str, Change] = field(default_factory=dict)


def cta(name: str, *threads: list[Event], launch: int = 0, cluster: str = "") -> list[Thread]:
    return [Thread(tuple(events), name, cluster, launch) for events in threads]


def program(*ctas: list[Thread], **initial: int) -> Program:
    return Program(tuple(chain(*ctas)), initial)


def sees(**values: int) -> Callable[[Outcome], bool]:
    """Return a predicate of outcomes: one of these reads sees another value than this."""
    return lambda outcome: any(
        outcome[label.replace("_", " ")] != value for label, value in values.items()
    )


def gone(label: str) -> Change:
    return lambda program: program.without(label)


def weaker(label: str, **changes: object) -> Change:
    return lambda program: program.weaker(label, **changes)


def relaxed(label: str) -> Change:
    return weaker(label, order="relaxed")


def at_cta_scope(label: str) -> Change:
    return weaker(label, scope="cta")


def equals(value: int) -> Callable[[int], bool]:
    return lambda seen: seen == value


def not_zero(seen: int) -> bool:
    return seen != 0


ONE_LAUNCH: dict[str, Change] = {"launches that overlap": Program.in_one_launch}


def sends(name: str, value: int, bulk: str, *before: Event) -> tuple[list[Event], list[Event]]:
    """Thread 0 and another one of a CTA that sends its partial dw by the copy engine."""
    barrier = event("cta_barrier", f"{name}'s barrier", name)
    issuer = [
        barrier,
        *before,
        bulk_out(bulk, f"{name}'s bulk copy", "sums", f"shared {name}"),
        event("bulk_wait_written", f"{name}'s wait"),
        event("fence_async_global", f"{name}'s fence after the wait"),
    ]
    other = [
        event("store_shared4", f"{name}'s dw", f"shared {name}", value=value),
        event("fence_async_shared", f"{name}'s fence of shared memory"),
        barrier,
    ]
    return issuer, other


SENDING: dict[str, Change] = {
    f"{what} {name}'s {of}": change
    for name in "AB"
    for what, of, change in (
        ("`.read` for", "wait", weaker(f"{name}'s wait", full=False)),
        ("no proxy fence behind", "partial dw", gone(f"{name}'s fence of shared memory")),
        ("no barrier before", "bulk copy", gone(f"{name}'s barrier")),
    )
}
IMPLIED: dict[str, Change] = {
    f"no proxy fence after {name}'s wait": gone(f"{name}'s fence after the wait") for name in "AB"
}
