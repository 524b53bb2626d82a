"""Says which norms of a compiled model are better left to Inductor, by the bytes that move.

Inductor computes what stands directly before and behind its own norm in the same kernel. What goes
into an operator of a package or comes out of it is written by one kernel and read by another. So a
gate, an activation or a quantization beside a norm may cost more than the faster norm gains. The
estimate counts, for each element of the norm, the bytes that a step reads and writes: without the
route, those of the fused kernels of forward and backward; with it, also

- the norm's result, if all that takes it would be fused: twice in the forward, and three times in
  the backward (its gradient, and itself once more), but for additions, whose gradient it is;
- its input, if that is computed: twice in each direction, or once in all if others take it, too;
- the terms of a sum before the norm, in the same way, where that is less: packages add them.

What reads the result at other columns, as the rotary embedding does, is no such neighbour: Inductor
computes the norm once more for it. A sum or a quantization behind the norm costs nothing where
there are kernels with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .graph_values import are_alike, is_contiguous, value_of, wants_gradient
from .neighbours import (
    are_as_many,
    behind_views,
    fused_behind,
    is_computed,
    is_copied,
    kind_of,
    sources_of,
    users_of,
)
from .quantization_reader import read_quantization
from .quantizations import serves_behind

MARGIN = 1.25
"""So many times the bytes are worth a package's kernels. For the same bytes, they took 165 us where
Inductor's took 209, forward and backward, for 16,384 rows of 4,096 in bf16 on an H200."""
_log = logging.getLogger(__name__)


class Moved(NamedTuple):
    """The bytes that move for each element of a norm, with the route and without it."""

    routed: float
    fused: float

    @property
    def pays(self) -> bool:
        return self.routed <= MARGIN * self.fused


class Worth:
    """Says for each norm of Dynamo's graph whether a package's kernels are worth it, and logs the
    numbers (level INFO)."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self._adds = getattr(getattr(operators, "norm_and_add", None), "serves", None)
        self._may_train = torch.is_grad_enabled()

    def __call__(
        self, x: Node, weight: Any, offset: float, nodes: Iterable[Node], result: Node
    ) -> bool:
        """Return True if a norm is to be routed. x, weight, offset: its arguments; nodes: those
        that it is made of."""
        moved = self.moved(x, weight, offset, set(nodes), result)
        if moved is None:
            return True
        told = "goes to the package" if moved.pays else "is left to Inductor"
        numbers = (result, told, moved.routed, moved.fused)
        _log.info("RMSNorm %s %s: %g bytes move for an element with it, %g without", *numbers)
        return moved.pays

    def moved(
        self, x: Node, weight: Any, offset: float, nodes: set[Node], result: Node
    ) -> Moved | None:
        """Return the estimate; None where tracing left no values."""
        rows = value_of(x)
        if not isinstance(rows, torch.Tensor) or not isinstance(value_of(result), torch.Tensor):
            return None
        size, trains = rows.element_size(), self._trains(x, weight)
        forward, backward = size, 3 * size
        cost = _before(x, nodes, trains) * size
        made = behind_views(x)
        if is_computed(made):
            terms = (sources_of(one, result) for one in made.all_input_nodes)
            forward = _bytes(set[Node]().union(*terms))
            forward += 0 if _takes_alone(made, nodes) else size  # it is written in any case
        outputs, inputs, more = {result}, set[Node](), 0
        fused = fused_behind(result)
        alone = all(user in fused for user in users_of(result))
        taken = self._adds_behind(rows, weight, offset, result) or self._quantizes(
            rows, weight, offset, result
        )
        if alone and len(fused) > 1 and not taken:
            outputs = {node for node in fused if _leaves(node, fused)} - {result}
            outputs = {behind_views(node) for node in outputs}
            others = {one for node in fused for one in node.all_input_nodes} - fused - nodes - {x}
            inputs = set[Node]().union(*(sources_of(one, result) for one in others)) - {x}
            only_sums = all(kind_of(node) in ("sum", "view") for node in fused - {result})
            more = 2 + 3 * (trains and not only_sums)
            if trains and not only_sums:
                backward += 2 * _bytes(one for one in inputs if wants_gradient(one))
        written = _bytes(one for one in outputs if are_as_many(one, result))
        forward += written + _bytes(inputs)
        without = forward + (backward + written - size if trains else 0)
        return Moved(without + cost + more * value_of(result).element_size(), without)

    def of_gated(self, x: Node, z: Node, weight: Any, nodes: Iterable[Node], result: Node) -> bool:
        """Return True if a norm with a gate z is to be routed. The others are as in a call."""
        own = set(nodes)
        moved = self.moved(x, weight, 0.0, own, result)
        if moved is None:
            return False
        size, trains = value_of(z).element_size(), self._trains(x, weight)
        more = size * (1 + 2 * trains)  # z is read, and in the backward again, and dz is written
        before = _before(z, own, trains) * size
        before += sum(2 * size for one in (x, z) if is_copied(one))
        moved = Moved(moved.routed + more + before, moved.fused + more)
        told = "goes to the package" if moved.pays else "is left to Inductor"
        numbers = (result, told, moved.routed, moved.fused)
        _log.info("gated norm %s %s: %g bytes move for an element with it, %g without", *numbers)
        return moved.pays

    def _trains(self, x: Node, weight: Any) -> bool:
        return self._may_train and (wants_gradient(x) or wants_gradient(weight))

    def _adds_behind(self, rows: torch.Tensor, weight: Any, offset: float, y: Node) -> bool:
        """Return True if the package's norm computes the only thing that is made of its result."""
        if self._adds is None or len(y.users) != 1:
            return False
        (total,) = y.users
        terms = _terms(total)
        scale = value_of(weight)
        return terms is not None and bool(self._adds(rows, scale, offset != 0))

    def _quantizes(self, rows: torch.Tensor, weight: Any, offset: float, y: Node) -> bool:
        """Return True if a kernel beside the package's norm computes what is made of its result."""
        if not serves_behind(self._operators, rows, value_of(weight), offset != 0):
            return False
        found = read_quantization(y)
        whole = None if found is None else found.of(lambda end: not wants_gradient(end))
        return whole is not None and whole == found and not whole.keeps_rows


def _before(x: Node, nodes: set[Node], trains: bool) -> int:
    """Return how often a tensor like x is written and read more than by Inductor."""
    made = behind_views(x)
    if not is_computed(made):
        return 0
    plain = 2 + 2 * trains if _takes_alone(made, nodes) else 1
    terms = _terms(made)
    if terms is None:
        return plain
    fresh = [one for one in map(behind_views, terms) if is_computed(one) and len(one.users) == 1]
    return min(plain, len(fresh) * (2 + trains))


def _takes_alone(made: Node, nodes: set[Node]) -> bool:
    return nodes.issuperset(users_of(made))


def _terms(total: Any) -> list[Node] | None:
    """Return the terms of a sum that a package's operators compute."""
    terms = [one for one in getattr(total, "args", ()) if isinstance(one, Node)]
    if kind_of(total) != "sum" or len(terms) != 2 or len(total.args) != 2 or total.kwargs:
        return None
    value = value_of(total)
    alike = all(are_alike(value_of(one), value) for one in terms)
    return terms if alike and is_contiguous(value) else None


def _leaves(node: Node, fused: set[Node]) -> bool:
    return any(user not in fused for user in node.users)


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(value_of(node).element_size() for node in nodes)
