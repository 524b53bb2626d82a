"""A trainer that traces its whole step into one graph and runs passes over it, as the graph trainer
of torchtitan does.

    PYTHONPATH=. python examples/graph_trainer.py [--how tag]

The model is untouched torch.nn.RMSNorm. Traced without decompositions, its forward and backward are
one node each (on a GPU); the pass gives them to the package (`route`), or marks them for Inductor's
regional compilation (`tag`), which leaves the rest of the graph as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from normforge import graph_pass


class Model(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.linear1, self.linear2 = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear1(self.norm1(x))
        return x + self.linear2(self.norm2(x)).tanh()


def compile_marked(graph: GraphModule) -> Callable[..., Any]:
    """The graph, with what is marked compiled by Inductor."""
    from torch.fx.passes.regional_inductor import regional_inductor

    first = next(iter(graph.graph.nodes))
    with tracing(TracingContext(first.meta["val"].fake_mode)):
        compiled = regional_inductor(graph)
    return lambda *inputs: compiled(list(inputs))


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("route", "tag"), default="route")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    names, weights = zip(*model.named_parameters(), strict=True)
    x, target = (torch.randn(4, 64, 256, device=device, dtype=dtype) for _ in range(2))

    def step(x: torch.Tensor, target: torch.Tensor, *weights: torch.Tensor) -> Any:
        y = functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        loss = nn.functional.mse_loss(y.float(), target.float())
        return loss, *torch.autograd.grad(loss, weights)

    wanted = step(x, target, *weights)
    graph = graph_pass(options.how)(make_fx(step)(x, target, *weights))
    ours = [n for n in graph.graph.nodes if "normforge" in str(n.target)]
    marked = [n for n in graph.graph.nodes if "compile_with_inductor" in n.meta.get("custom", {})]
    print(f"{len(ours)} nodes of the package, {len(marked)} marked for Inductor")
    run = compile_marked(graph) if marked else graph

    losses, error = [], 0.0
    for number in range(5):
        loss, *gradients = run(x, target, *weights)
        with torch.no_grad():
            if number == 0:
                for a, b in zip((loss, *gradients), wanted, strict=True):
                    error = max(error, float((a.float() - b.float()).norm() / b.float().norm()))
                print(f"loss and gradients of the first step differ by {error:.1e} from PyTorch's")
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient
        losses.append(loss.item())
        print(f"step {number}: loss {losses[-1]:.4f}")
    return {
        "nodes": len(ours),
        "marked": len(marked),
        "error": error,
        "first loss": losses[0],
        "last loss": losses[-1],
    }


if __name__ == "__main__":
    main()
