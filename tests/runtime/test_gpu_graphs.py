"""Norms with additions around them, in graphs compiled on a GPU: bits, errors, what was folded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from generator.target import Target
from normforge.api import Package
from normforge.frontends.graph_pass import make_backend
from tests.support.accuracy import MARGIN
from tests.support.entry_points import equal_bits, randn
from tests.support.norm_classes import NORM_CLASSES, GemmaRMSNorm, L2Norm
from tests.support.samples import training_package

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic", "served_by_kernels")]

EPS = 1e-5
KINDS = (torch.nn.RMSNorm, *(kind for kind in NORM_CLASSES if kind is not L2Norm))


@pytest.fixture(scope="module")
def package(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return training_package(here, tmp_path_factory.mktemp("graphs"))


class Layer(torch.nn.Module):
    """A norm of a sum that goes on as the residual stream."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.norm = kind(1024, eps=EPS).to("cuda", torch.bfloat16)
        with torch.no_grad():
            self.norm.weight.copy_(randn(1024, seed=1, device="cuda"))

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> Any:
        h = x + r
        return self.norm(h), h


def drawn() -> list[torch.Tensor]:
    return [randn(2048, 1024, dtype=torch.bfloat16, seed=s, device="cuda") for s in range(2, 6)]


def step(layer: Any, weight: torch.Tensor) -> list[torch.Tensor]:
    """y, the stream, and the gradients of both terms and the weight."""
    x, r, dy, dstream = drawn()
    leaves = [x.requires_grad_(), r.requires_grad_(), weight]
    y, stream = layer(x, r)
    return [y.detach(), stream.detach(), *torch.autograd.grad([y, stream], leaves, [dy, dstream])]


def exact(kind: Any, stream: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """y, and the gradients of a term and the weight, in float64, of the rounded stream."""
    dy, dstream = (each.double() for each in drawn()[2:])
    h, w = stream.double().requires_grad_(), weight.detach().double().requires_grad_()
    xhat = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    y = xhat * (1.0 + w if kind is GemmaRMSNorm else w)
    dx, dw = torch.autograd.grad(y, (h, w), dy)
    return [y.detach(), dx + dstream, dw]


def errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    y, _, dx, _, dw = found
    pairs = zip((y, dx, dw), wanted, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_keep_their_bits_and_are_as_exact_as_eager_ones(
    package: Package,
    kind: Any,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer, runs = Layer(kind), []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=make_backend(package.ops), fullgraph=True)
        with caplog.at_level("INFO"):
            runs.append(step(compiled, layer.norm.weight))
    folded = [message for message in caplog.messages if message.endswith("additions folded: 1")]
    assert len(folded) >= 2, "one in the forward, one in the backward"
    assert equal_bits(*runs)
    eager = step(layer, layer.norm.weight)
    assert torch.equal(runs[0][1], eager[1])
    wanted = exact(kind, eager[1], layer.norm.weight)
    for mine, theirs in zip(errors(runs[0], wanted), errors(eager, wanted), strict=True):
        assert mine <= MARGIN * theirs
        assert mine < 2**-8


def test_routed_graph_of_a_step_keeps_its_bits(package: Package) -> None:
    layer = Layer(torch.nn.RMSNorm)
    weight = layer.norm.weight.detach()

    def training(x: Any, r: Any, w: Any, dy: Any, dstream: Any) -> Any:
        leaves = [each.detach().requires_grad_() for each in (x, r, w)]
        h = leaves[0] + leaves[1]
        y = torch.nn.functional.rms_norm(h, (1024,), leaves[2], EPS)
        return [y, h, *torch.autograd.grad([y, h], leaves, [dy, dstream])]

    x, r, dy, dstream = drawn()
    given = (x, r, weight, dy, dstream)
    graph = make_fx(training, tracing_mode="fake")(*given)
    plain = copy.deepcopy(graph)(*given)
    routed = package.graph_pass()(graph)
    assert torch.ops.aten.add.Tensor not in {node.target for node in routed.graph.nodes}
    runs = [routed(*given) for _ in range(2)]
    assert equal_bits(*runs)
    wanted = exact(torch.nn.RMSNorm, plain[1], weight)
    for mine, theirs in zip(errors(runs[0], wanted), errors(plain, wanted), strict=True):
        assert mine <= MARGIN * theirs
