"""Ranges that show a profiler which work belongs to a norm, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node
from torch.profiler import record_function

from benchmarks.training.model import Norm

RANGE = "benchmarks.training: norm"
"""The name of the ranges."""


def in_ranges(norm: Norm) -> Norm:
    """Return a norm whose forward runs in a range, and so does every node of its backward."""

    def ranged(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with record_function(RANGE):
            y = norm(x, weight)
        for node in _between(y, (x, weight)):
            _range_around(node)
        return y

    return ranged


def _between(y: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Iterator[Node]:
    """The nodes of the graph that computed y from the inputs."""
    before = {tensor.grad_fn for tensor in inputs} | {None}
    found: set[Node] = set()
    left = [y.grad_fn]
    while left:
        node = left.pop()
        # The graph ends in nodes that accumulate the gradient of a leaf, which have no next ones.
        if node is not None and node not in before | found and node.next_functions:
            found.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


def _range_around(node: Node) -> None:
    """Put a node into a range, by hooks that run before and after it, on the thread of its
    backward."""
    entered: list[record_function] = []

    def before(gradients: object) -> None:
        entered.append(record_function(RANGE))
        entered[-1].__enter__()

    def after(*gradients: object) -> None:
        entered.pop().__exit__(None, None, None)

    node.register_prehook(before)
    node.register_hook(after)
