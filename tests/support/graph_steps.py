"""Steps of x, r and g of one shape and of w, a row of it; the graphs that are traced of them; and
what is true of such a graph when it was routed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import route
from tests.support.entry_points import randn

ATEN = torch.ops.aten
N = 16
Step = Callable[..., Any]


def norm(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    return functional.rms_norm(x, (N,), w, 1e-5)


def given(dtype: torch.dtype = torch.float32, seed: int = 0, rows: int = 4) -> list[torch.Tensor]:
    """x, r, g and w."""
    shapes = [(rows, N)] * 3 + [(N,)]
    return [randn(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


def trace(step: Step, mode: str = "fake", dtype: torch.dtype = torch.float32) -> Any:
    return make_fx(step, tracing_mode=mode)(*given(dtype))


def additions(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.target is ATEN.add.Tensor]


def results(found: Any) -> list[torch.Tensor]:
    return [*found] if isinstance(found, tuple) else [found]


def check_routed(
    package: Package, module: torch.fx.GraphModule, gone: int, sums: int = 0, rows: int = 4
) -> None:
    """Assert that a graph, routed, has so many additions fewer and so many norms with `add`, and
    computes the same."""
    inputs = given(seed=9, rows=rows)
    copies = [each.clone() for each in inputs]
    wanted, before = module(*inputs), len(additions(module))
    found = route(module, package.ops)(*copies)
    assert before - len(additions(module)) == gone
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(package.ops.rms_norm_and_add) == sums
    torch.testing.assert_close(results(found), results(wanted), atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, inputs, copies))


METAS: list[dict[str, Any]] = [
    {"custom": {"stream": 1}},
    {"custom": {"compile_with_inductor": {}}},
    {"recompute": 1},
    {"partitioner_tag": "is_backward"},
]
"""The meta of nodes that run elsewhere, or at another time."""


def marked(module: torch.fx.GraphModule, meta: dict[str, Any]) -> torch.fx.GraphModule:
    """Return a graph whose additions have this meta, too."""
    for node in additions(module):
        node.meta.update(meta)
    return module
