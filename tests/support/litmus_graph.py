"""The parts that all executions of a litmus program have in common: its events, and their
orders."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations, pairwise, product

from tests.support.litmus import Event, Program, Thread

Pairs = set[tuple[int, int]]
ACQUIRE, RELEASE = {"acquire", "acq_rel", "sc"}, {"release", "acq_rel", "sc"}


@dataclass(frozen=True)
class Node:
    """An event, and the thread that it belongs to."""

    event: Event
    thread: int  # -1 of initial writes and of the ends of launches
    cta: str
    cluster: str
    launch: int
    half: str = ""  # a barrier is two nodes: its arrival and its wait

    @property
    def cta_of_launch(self) -> tuple[str, int]:
        return self.cta, self.launch

    @property
    def writes(self) -> bool:
        return self.event.kind in ("write", "rmw")

    @property
    def reads(self) -> bool:
        return self.event.kind in ("read", "rmw")

    @property
    def strong(self) -> bool:
        return self.event.order != "weak"

    @property
    def shared(self) -> bool:
        """True of accesses to shared memory, and of operations that have started some of these."""
        own = [e for e in (self.event, *self.event.parts) if e.kind in ("read", "write", "rmw")]
        return bool(own) and all(e.place.startswith("shared") for e in own)

    def reaches(self, other: Node) -> bool:
        """Return True if the "scope" of this one includes the thread of the other."""
        if self.event.scope == "cta":
            return self.cta_of_launch == other.cta_of_launch
        if self.event.scope == "cluster":
            return (self.cluster, self.launch) == (other.cluster, other.launch)
        return True


def closure(pairs: Pairs, size: int) -> list[int]:
    """The transitive closure, as a bit mask of successors for each node."""
    after = [0] * size
    for a, b in pairs:
        after[a] |= 1 << b
    for middle in range(size):
        bit, reached = 1 << middle, after[middle]
        for a in range(size):
            if after[a] & bit:
                after[a] |= reached
    return after


def cyclic(after: list[int]) -> bool:
    return any(mask >> node & 1 for node, mask in enumerate(after))


class Graph:
    """The parts that all executions of a program have in common."""

    def __init__(self, program: Program) -> None:
        self.nodes: list[Node] = []
        self.program_order: Pairs = set()
        # This holds in base causality whatever is read. For `issued`, see base_causality.
        self.order: Pairs = set()
        self.issued: list[tuple[int, list[int]]] = []  # a node, those of the operation it starts
        threads = 0
        for thread in program.threads:
            threads += 1 + self._add(thread, thread.events, threads, None)
        places = {node.event.place for node in self.nodes if node.reads or node.writes}
        for place in sorted(places):
            event = Event("write", f"initial {place}", place, program.initial.get(place, 0))
            self.nodes.append(Node(event, -1, "", "", -1))
        for launch in range(1, 1 + max(thread.launch for thread in program.threads)):
            self.nodes.append(Node(Event("proxy_fence", "end"), -1, "", "", launch))
        self._order_launches_and_barriers()
        self.memory = [n for n, node in enumerate(self.nodes) if node.reads or node.writes]
        self.same_place = [
            (a, b)
            for a, b in product(self.memory, repeat=2)
            if a != b and self.nodes[a].event.place == self.nodes[b].event.place
        ]
        self.writes = [
            (a, b) for a, b in self.same_place if self.nodes[a].writes and self.nodes[b].writes
        ]
        labels = [self.nodes[n].event.label for n in self.memory if self.nodes[n].reads]
        assert len({*labels}) == len(labels), "every read needs a label of its own"

    def _add(
        self, thread: Thread, events: tuple[Event, ...], index: int, issuer: int | None
    ) -> int:
        """Adds a thread, or what an asynchronous one does. How many of those it starts."""
        own: list[int] = []
        started: list[list[int]] = []
        for event in events:
            of_thread = (index, thread.cta, thread.cluster or thread.cta, thread.launch)
            for half in ("arrival", "wait") if event.kind == "barrier" else ("",):
                own.append(len(self.nodes))
                self.nodes.append(Node(event, *of_thread, half))
            if event.kind == "async":
                first = len(self.nodes)
                self._add(thread, event.parts, index + 1 + len(started), own[-1])
                started.append(list(range(first, len(self.nodes))))
                if event.cumulative:
                    self.order.add((own[-1], first))
            if event.kind == "wait_group":
                # `.read` waits for the reads, whose completion is no proxy fence.
                self.order |= {
                    (part, own[-1])
                    for part in chain(*started)
                    if event.full or self.nodes[part].event.kind == "read"
                }
        self.order |= set(pairwise(own))
        if issuer is None:
            self.program_order |= set(combinations(own, 2))
        else:
            # The arrival "does not transitively establish ordering" for what came before the issue.
            self.issued.append((issuer, [n for n in own if self.nodes[n].event.kind != "arrive"]))
        return len(started)

    def _order_launches_and_barriers(self) -> None:
        seen: dict[tuple[int, str, str], int] = {}
        times = []  # the place of each use of a barrier among those of its thread
        for node in self.nodes:
            use = (node.thread, node.event.place, node.half)
            seen[use] = seen.get(use, 0) + 1
            times.append(seen[use])
        for (a, first), (b, then) in product(enumerate(self.nodes), repeat=2):
            begins = first.launch == then.launch and first.thread < 0 <= then.thread
            met = (first.half, then.half) == ("arrival", "wait") and times[a] == times[b]
            if first.launch < then.launch or begins:
                self.order.add((a, b))
            elif first.event.place != then.event.place or first.thread == then.thread:
                continue
            elif (met and first.reaches(then)) or _passed(first, then):
                self.order.add((a, b))
            elif _looked(first, then):
                self.order |= {(a, behind) for behind in self._acquired(a, b)}

    def _acquired(self, arrival: int, wait: int) -> list[int]:
        """The nodes behind a relaxed wait that an acquire fence orders behind the arrival: the
        fence or, if it is restricted to shared memory, the accesses to that behind it."""
        of_arrival, thread = self.nodes[arrival], self.nodes[wait].thread
        behind = [n for n in range(wait, len(self.nodes)) if self.nodes[n].thread == thread]
        found: list[int] = []
        for n in behind:
            fence = self.nodes[n]
            agreed = of_arrival.reaches(fence) and fence.reaches(of_arrival)
            if fence.event.kind != "fence" or fence.event.order not in ACQUIRE or not agreed:
                continue
            if not fence.event.place:
                found.append(n)
            else:
                found += [m for m in behind if m > n and self.nodes[m].shared]
        return found


def _looked(arrival: Node, wait: Node) -> bool:
    """Return True if a relaxed wait for a phase of an mbarrier sees a releasing arrival at it."""
    kinds = (arrival.event.kind, wait.event.kind)
    orders = arrival.event.order in RELEASE and wait.event.order == "relaxed"
    return (
        kinds == ("arrive", "wait") and orders and arrival.reaches(wait) and wait.reaches(arrival)
    )


def _passed(arrival: Node, wait: Node) -> bool:
    """Return True if an arrival at a phase of an mbarrier synchronizes with a wait for it."""
    kinds = (arrival.event.kind, wait.event.kind)
    ordered = arrival.event.order in RELEASE and wait.event.order in ACQUIRE
    return (
        kinds == ("arrive", "wait") and ordered and arrival.reaches(wait) and wait.reaches(arrival)
    )
