"""Compiles functions with backends that change Dynamo's graphs as `inductor_backend` does, and then
run them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from normforge.api import Package
from normforge.frontends.graph_pass import route_before_autograd
from normforge.frontends.graph_values import graph_modules

Backend = Callable[[GraphModule, Any], Any]


def changed(
    package: Package, operator: Any, before: Callable[[GraphModule], None] | None = None
) -> tuple[Backend, list[Node]]:
    """Return a backend, and the calls of an operator in the graphs that it has changed. before: is
    given each graph before that."""
    found: list[Node] = []

    def backend(module: GraphModule, _: Any) -> Any:
        if before is not None:
            before(module)
        route_before_autograd(module, package.ops)
        nodes = [node for each in graph_modules(module) for node in each.graph.nodes]
        found.extend(node for node in nodes if node.target is operator)
        return module

    return backend, found


def compiled(
    package: Package,
    function: Any,
    operator: Any,
    before: Callable[[GraphModule], None] | None = None,
    **options: Any,
) -> tuple[Any, list[Node]]:
    """Return a compiled function, and the calls of an operator in its graphs."""
    backend, found = changed(package, operator, before)
    return torch.compile(function, backend=backend, fullgraph=True, **options), found


def mark_result(module: GraphModule) -> None:
    """Let the result of a graph be computed on another stream."""
    (last,) = next(iter(reversed(module.graph.nodes))).all_input_nodes
    last.meta["custom"] = {"stream": 1}


def close(one: Any, other: Any) -> None:
    """Compare what is computed in another order."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
