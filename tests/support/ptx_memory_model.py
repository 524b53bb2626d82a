"""Litmus programs under PTX's memory consistency model: every execution that its axioms allow.

The rules are those of the PTX ISA, chapter "Memory Consistency Model"; names in quotes below are
its terms. Lustig, Sahasrabuddhe and Giroux formalised it ("A Formal Analysis of the NVIDIA PTX
Memory Consistency Model", ASPLOS 2019). All places are words, accessed as a whole.

For the asynchronous proxy that chapter states no rule. Here accesses by different proxies are
ordered where a proxy fence lies on the path between them. It has to be a fence of the CTA that
makes the asynchronous access. That is the strictest reading, of Lustig, Cooksey and Giroux
("Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", ISCA 2022). The end of a
launch is such a fence for all CTAs, and a bulk operation that has completed is one for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

from tests.support.litmus import Outcome, Program
from tests.support.litmus_graph import ACQUIRE, RELEASE, Graph, Node, Pairs, closure, cyclic


@dataclass(frozen=True)
class Execution:
    values: Outcome  # what each read has seen
    reads_from: tuple[str, ...]

    def __str__(self) -> str:
        return f"{dict(self.values)}, because " + ", ".join(self.reads_from)


class Model(Graph):
    """The relations and axioms of the model for one program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        size = range(len(self.nodes))
        self.strong = {(a, b) for a, b in product(size, repeat=2) if self._morally_strong(a, b)}
        self.patterns = self._patterns()
        fences = [n for n in size if self.nodes[n].event.order == "sc"]
        self.proxy_fences = [
            n
            for n, node in enumerate(self.nodes)
            if node.event.kind == "proxy_fence"
            or (node.event.kind == "wait_group" and node.event.full)
        ]
        self.fences = [pair for pair in combinations(fences, 2) if pair in self.strong]

    def _morally_strong(self, a: int, b: int) -> bool:
        first, then = self.nodes[a], self.nodes[b]
        if a == b or -1 in (first.thread, then.thread) or first.event.proxy != then.event.proxy:
            return False
        elsewhere = first.event.place != then.event.place
        if elsewhere and a in self.memory and b in self.memory:
            return False
        if first.thread == then.thread:
            return True
        return first.strong and then.strong and first.reaches(then) and then.reaches(first)

    def _patterns(self) -> tuple[Pairs, Pairs]:
        """Return the "release patterns" as pairs of first operation and write, and the "acquire
        patterns" as pairs of read and last."""
        release, acquire = set(), set()
        for a, b in self.program_order | {(n, n) for n in self.memory}:
            first, then = self.nodes[a], self.nodes[b]
            here = first.event.place == then.event.place
            starts = first.event.kind == "fence" or (first.writes and here)
            ends = then.event.kind == "fence" or (then.reads and here)
            if first.event.order in RELEASE and starts and then.writes and then.strong:
                release.add((a, b))
            seen = first.reads and first.strong and first.event.returns
            if then.event.order in ACQUIRE and ends and seen:
                acquire.add((a, b))
        return release, acquire

    # -- What a choice of the writes that are read implies --

    def base_causality(self, reads_from: Pairs, fences: Pairs) -> list[int]:
        """ "Base causality order", as masks of what follows each node."""
        strong = reads_from & self.strong
        observed, longer = set(), strong
        while longer:  # "observation order" goes on through RMWs
            observed |= longer
            through = {(w, z) for w, z in longer if self.nodes[z].event.kind == "rmw"}
            longer = {(w, r) for w, z in through for y, r in strong if y == z} - observed
        self.observed = observed
        release, acquire = self.patterns
        synchronizes = {
            (first, last)
            for first, w in release
            for r, last in acquire
            if (w, r) in observed and (first, last) in self.strong
        }
        size = len(self.nodes)
        after = closure(self.order | synchronizes | fences, size)
        for issuer, parts in self.issued:
            mask = sum(1 << part for part in parts)
            for n in range(size):
                if n == issuer or after[n] >> issuer & 1:
                    after[n] |= mask
        return after

    def _proxy_preserved(self, a: int, b: int, after: list[int]) -> bool:
        first, then = self.nodes[a], self.nodes[b]
        kinds = (first.event.proxy, then.event.proxy)
        one_cta = first.cta_of_launch == then.cta_of_launch
        same = kinds[0] == kinds[1] and (kinds[0] == "generic" or one_cta)
        if same or first.thread < 0:
            return True
        space = "shared" if first.event.place.startswith("shared ") else "global"
        between = [
            n
            for n in self.proxy_fences
            if self.nodes[n].event.place in ("", space) and after[a] >> n & after[n] >> b & 1
        ]

        of_first = [n for n in between if self.acts_for(first, n)]
        of_then = [n for n in between if self.acts_for(then, n)]
        if kinds == ("async", "async"):
            return any(m == n or after[m] >> n & 1 for m in of_first for n in of_then)
        return bool(of_first if kinds[0] == "async" else of_then)

    def acts_for(self, access: Node, fence: int) -> bool:
        """Return True if a proxy fence orders an asynchronous access: of its own CTA, or of a
        launch."""
        node = self.nodes[fence]
        return node.thread < 0 or node.cta_of_launch == access.cta_of_launch

    def causality(self, after: list[int]) -> Pairs:
        """ "Causality order" between accesses of the same place."""
        preserved = {
            (a, b)
            for a, b in self.same_place
            if after[a] >> b & 1 and self._proxy_preserved(a, b, after)
        }
        return preserved | {(w, b) for w, z in self.observed for a, b in preserved if a == z}

    def values(self, reads_from: Mapping[int, int]) -> dict[str, int] | None:
        """Return what every read sees; None where a value depends on itself ("no thin air")."""
        by_label = {self.nodes[n].event.label: n for n in self.memory if self.nodes[n].reads}
        seen: dict[int, int] = {}
        under_way: set[int] = set()

        def read(n: int) -> int:
            if n in under_way:
                raise RecursionError
            if n not in seen:
                under_way.add(n)
                seen[n] = written(reads_from[n])
                under_way.remove(n)
            return seen[n]

        def written(n: int) -> int:
            node = self.nodes[n]
            total = node.event.value + (read(n) if node.event.kind == "rmw" else 0)
            return total + sum(read(by_label[label]) for label in node.event.plus)

        try:
            return {self.nodes[n].event.label: read(n) for n in reads_from}
        except RecursionError:
            return None

    def choices(self) -> Iterator[dict[int, int]]:
        """Yield for every read the write that it reads, in all ways."""
        hopeless = self.hopeless()
        sources = {
            r: [w for w, other in self.same_place if other == r and self.nodes[w].writes]
            for r in self.memory
            if self.nodes[r].reads
        }

        def choose(rest: list[int], chosen: dict[int, int]) -> Iterator[dict[int, int]]:
            if not rest:
                yield chosen
                return
            r = rest[0]
            for w in sources[r]:
                rivals = (s for s, v in chosen.items() if v == w)
                if (w, r) in hopeless or any(self.excludes(r, s, w) for s in rivals):
                    continue
                made = w  # RMWs may have made it of what this one wrote
                while made in chosen and made != r:
                    made = chosen[made]
                if made != r:
                    yield from choose(rest[1:], {**chosen, r: w})

        return choose([*sources], {})

    def hopeless(self) -> Pairs:
        """Writes, and reads that the program's own order keeps from them; a shortcut."""
        before = self.causality(self.base_causality(set(), set()))
        hidden = {(w, r) for w, v in self.writes if (w, v) in before for u, r in before if u == v}
        return hidden | {(w, r) for r, w in before}

    def excludes(self, r: int, s: int, w: int) -> bool:
        """Return True if atomicity keeps two RMWs from reading one write; a shortcut."""
        both = self.nodes[r].event.kind == self.nodes[s].event.kind == "rmw"
        known = self.nodes[w].thread < 0 or {(w, r), (w, s)} <= self.strong
        return both and known and (r, s) in self.strong

    # -- The axioms; that of coherence is in coherence_orders, that of Fence-SC in _allowed --

    def coherence_orders(self, cause: Pairs, reads_from: Pairs) -> Iterator[Pairs]:
        """ "Coherence order": holds causality, and relates writes that are morally strong."""
        forced = cause | (reads_from & self.strong)
        start = {(a, b) for a, b in forced if self.nodes[a].writes and self.nodes[b].writes}

        def extend(order: Pairs) -> Iterator[Pairs]:
            after = closure(order, len(self.nodes))
            if cyclic(after):
                return
            for a, b in self.writes:
                if a < b and (a, b) in self.strong and not (after[a] >> b | after[b] >> a) & 1:
                    yield from extend(order | {(a, b)})
                    yield from extend(order | {(b, a)})
                    return
            yield {(a, b) for a, b in self.writes if after[a] >> b & 1}

        return extend(start)

    def overwritten(self, reads_from: Pairs, coherence: Pairs) -> Pairs:
        """A read, and a write that comes after the one it has read."""
        return {(r, w) for v, r in reads_from for u, w in coherence if u == v and w != r}

    def keeps_causality(self, reads_from: Pairs, coherence: Pairs, cause: Pairs) -> bool:
        late = self.overwritten(reads_from, coherence)
        stale = any((w, r) in cause for r, w in late)
        return not stale and not any((r, w) in cause for w, r in reads_from)

    def keeps_atomicity(self, reads_from: Pairs, coherence: Pairs) -> bool:
        late = self.overwritten(reads_from, coherence) & self.strong
        rmws = {(a, w) for a, w in late if self.nodes[a].event.kind == "rmw"}
        return not any((w, a) in coherence for a, w in rmws)

    def keeps_order_of_place(self, reads_from: Pairs, coherence: Pairs) -> bool:
        """ "Sequential consistency per location"."""
        communication = reads_from | coherence | self.overwritten(reads_from, coherence)
        here = self.program_order & {*self.same_place}
        return not cyclic(closure((communication & self.strong) | here, len(self.nodes)))


def executions(program: Program) -> Iterator[Execution]:
    """Yield the executions that the model allows, but for those in which a wait does not end."""
    model = Model(program)
    wanted = {n.event.label: n.event.want for n in model.nodes if n.event.want}
    for chosen in model.choices():
        values = model.values(chosen)
        if values is None or not all(want(values[label]) for label, want in wanted.items()):
            continue
        reads_from = {(w, r) for r, w in chosen.items()}
        if _allowed(model, reads_from):
            labels = [
                (model.nodes[n].event.label, model.nodes[w].event.label) for n, w in chosen.items()
            ]
            yield Execution(values, tuple(f"{r} reads {w}" for r, w in labels))


def _allowed(model: Model, reads_from: Pairs) -> bool:
    """Return True if there are a "Fence-SC order" and a coherence order that fit."""
    for turned in product((False, True), repeat=len(model.fences)):
        fences = {
            pair[::-1] if turn else pair for pair, turn in zip(model.fences, turned, strict=True)
        }
        after = model.base_causality(reads_from, fences)
        if cyclic(after):
            continue
        cause = model.causality(after)
        for coherence in model.coherence_orders(cause, reads_from):
            if (
                model.keeps_causality(reads_from, coherence, cause)
                and model.keeps_atomicity(reads_from, coherence)
                and model.keeps_order_of_place(reads_from, coherence)
            ):
                return True
    return False


def find(program: Program, bad: Callable[[Outcome], bool]) -> Execution | None:
    """An execution with this outcome; None where the model forbids it."""
    return next((found for found in executions(program) if bad(found.values)), None)
