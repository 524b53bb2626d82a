"""Litmus programs: threads of a few memory instructions each, and ways to make them weaker.

What a program leaves out only allows more executions, so what is forbidden here stays forbidden:

- A busy wait is its last read, which has to see a value that ends it (`want`). Earlier looks are
  left out; executions in which the wait has not ended are, too.
- A branch that is taken on what was read is written the same way. It orders nothing.

An mbarrier is its phases, one place each. Every arrival at a phase synchronizes with every wait for
it, where one releases, the other acquires, and each scope includes the other thread. A relaxed wait
with an acquire fence behind it acquires, too. A fence that is restricted to shared memory orders
accesses to it, and nothing else, behind what it has acquired. How arrivals
are counted is not modelled. The barrier of a warp is a barrier as its instruction describes it; the
chapter on memory consistency does not mention it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Outcome = Mapping[str, int]
"""The value that every read has seen, by its label."""


@dataclass(frozen=True)
class Event:
    """One instruction. `place` is what it accesses; of barriers, which one, with its phase; of a
    fence that is restricted to a space, that space.

    A write stores `value` plus what the reads in `plus` have seen; an RMW adds that to what it
    reads. An `async` event starts its `parts`, which are not in the program order of the thread.
    """

    kind: str  # read write rmw fence proxy_fence barrier arrive wait async wait_group
    label: str
    place: str = ""
    value: int = 0
    plus: tuple[str, ...] = ()
    order: str = "weak"
    scope: str = "gpu"
    want: Callable[[int], bool] | None = None
    returns: bool = True  # False of `red`, which is no read and so never acquires
    parts: tuple[Event, ...] = ()
    proxy: str = "generic"
    cumulative: bool = False  # async: whether its arrival also covers what its thread did before
    full: bool = True  # wait_group: False of `.read`


@dataclass(frozen=True)
class Thread:
    events: tuple[Event, ...]
    cta: str
    cluster: str = ""  # "": the CTA is a cluster of its own
    launch: int = 0  # on one stream: a launch begins after the end of the one before


@dataclass(frozen=True)
class Program:
    threads: tuple[Thread, ...]
    initial: Mapping[str, int] = field(default_factory=dict)  # places that do not begin as 0

    def edit(self, label: str, change: Callable[[Event], tuple[Event, ...]]) -> Program:
        """Every event of this label, also in parts of others, put through `change`."""
        found = 0

        def edited(events: tuple[Event, ...]) -> tuple[Event, ...]:
            nonlocal found
            kept: list[Event] = []
            for event in events:
                found += event.label == label
                event = replace(event, parts=edited(event.parts))
                kept += change(event) if event.label == label else [event]
            return tuple(kept)

        threads = tuple(replace(t, events=edited(t.events)) for t in self.threads)
        assert found, f"the program has no event {label}"
        return replace(self, threads=threads)

    def without(self, label: str) -> Program:
        return self.edit(label, lambda event: ())

    def weaker(self, label: str, **changes: object) -> Program:
        return self.edit(label, lambda event: (replace(event, **changes),))

    def in_one_launch(self) -> Program:
        """Return the program without the order of launches, as for a dependent launch that does not
        wait."""
        threads = (replace(t, cta=f"{t.cta}/{t.launch}", launch=0) for t in self.threads)
        return replace(self, threads=tuple(threads))
