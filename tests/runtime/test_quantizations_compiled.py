"""Quantization to FP8 behind norms and their backwards, in what torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.inductor import missing_beside
from normforge.frontends.quantized import QuantizedFunctions
from tests.support.entry_points import needs_whole_forward, randn
from tests.support.recipes import (
    E4M3,
    EPS,
    LARGEST,
    SPELLINGS,
    Linear,
    M,
    N,
    Pair,
    by_quotient,
    check_pair,
    given,
    layer,
    norm,
    training_step,
    twice,
    two_scales,
)

pytestmark = [pytest.mark.usefixtures("aten", "fresh", "own_cache"), needs_whole_forward]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of what serves the operators."""
    found: list[str] = []
    for name in ("forward", "backward_quantized"):
        run = getattr(QuantizedFunctions, name)

        def counted(self: Any, *given: Any, _run: Any = run, _name: str = name) -> Any:
            found.append(_name)
            return _run(self, *given)

        monkeypatch.setattr(QuantizedFunctions, name, counted)
    return found


def written_out(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("of", ["backend", "backend, written out", "operator"])
def test_compiled_norm_and_quantization_are_one_operator(
    quantized: Package, served: list[str], spelling: Callable[..., Pair], of: str
) -> None:
    """`Worth` leaves such norms to nobody else, and Inductor's decompositions are read, too."""
    x, w = given()
    call = quantized.rms_norm if of == "operator" else norm
    call = written_out if of.endswith("out") else call

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return spelling(call(x, w))

    backend = make_backend(quantized.ops) if of.startswith("backend") else "inductor"
    with torch.no_grad():
        found = torch.compile(run, backend=backend, fullgraph=True)(x, w)
    assert served == ["forward"]
    # Norms that are written out round xhat, too, and kernels do not.
    check_pair(found, spelling(norm(x, w)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("of", ["backend", "operator"])
def test_compiled_steps_quantize_gradients_by_one_operator(
    quantized: Package, served: list[str], of: str, dynamic: bool
) -> None:
    (x, w), m = given(), randn(N, N, seed=4, dtype=torch.bfloat16) / 16
    call = quantized.rms_norm if of == "operator" else norm
    backend = make_backend(quantized.ops) if of == "backend" else "inductor"

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        h = x + Linear.apply(r, m)
        return h + Linear.apply(call(h, w), m)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    leaves = (x, x.flip(0), w, m)
    found = training_step(compiled, *leaves, dynamic=dynamic)
    assert served == ["forward", "backward_quantized"]
    for one, other in zip(found, training_step(layer, *leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_its_key_in_caches_says_which_kernels_quantize(quantized: Package) -> None:
    before = missing_beside(quantized.ops)
    assert len(before) == 5
    quantized.ops.quantized = ""
    assert missing_beside(quantized.ops) == before[:2]


def test_norms_of_two_unknown_sizes_are_left(quantized: Package, served: list[str]) -> None:
    """Their blocks could not be viewed."""
    x, w = randn(2, M, N, dtype=torch.bfloat16), given()[1]

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    with torch.no_grad():
        found = torch.compile(run, backend=make_backend(quantized.ops), fullgraph=True)(x, w)
    assert served == []
    torch.testing.assert_close(found[1], run(x, w)[1], rtol=0.02, atol=0)


@pytest.mark.parametrize("spelled", ["none", "tuple", "named", "zero"])
def test_spellings_of_dynamo_s_graphs(quantized: Package, served: list[str], spelled: str) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        blocks = y.float().unflatten(-1, (-1, 128))
        if spelled == "named":
            return blocks, torch.amax(input=blocks.abs(), dim=-1, keepdim=True)
        if spelled == "zero":
            return blocks / (0.0 * blocks.abs().amax(-1, keepdim=True)), blocks
        amax = blocks.abs().amax((-1,) if spelled == "tuple" else -1)
        scale = (amax / LARGEST).clamp_min(1e-10)
        return (blocks / scale[..., None]).to(E4M3).flatten(-2), scale

    with torch.no_grad():
        found = torch.compile(run, backend=make_backend(quantized.ops), fullgraph=True)(x, w)
    assert served == (["forward"] if spelled in ("none", "tuple") else [])
    if served:
        check_pair(found, run(x, w))
    else:
        torch.testing.assert_close(found, run(x, w), equal_nan=True, rtol=0.02, atol=0.02)


def test_a_norm_beside_whose_quantization_more_is_fused_is_left(
    quantized: Package, served: list[str]
) -> None:
    """It would be left without the quantization, too."""
    x, w = given()

    def run(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        return *by_quotient(y), y * z, torch.sigmoid(y), torch.exp(y)

    with torch.no_grad():
        torch.compile(run, backend=make_backend(quantized.ops), fullgraph=True)(x, x.flip(0), w)
    assert served == []


def test_a_gradient_through_the_cast_leaves_the_norm(quantized: Package, served: list[str]) -> None:
    x, w = (one.requires_grad_() for one in given(torch.float32))

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y8, scales = by_quotient(norm(x, w))
        return y8.float().sum() + scales.sum()

    compiled = torch.compile(run, backend=make_backend(quantized.ops), fullgraph=True)
    found, wanted = (torch.autograd.grad(each(x, w), [x, w]) for each in (compiled, run))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())
    assert served == []


def one_within(y: torch.Tensor) -> Any:
    """The scale that comes first is no result."""
    blocks = y.float().view(M, -1, 128)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / (amax / LARGEST)).to(E4M3), amax * (1 / LARGEST), (1 / LARGEST) * amax


@pytest.mark.parametrize("recipe", [twice, two_scales, one_within])
@pytest.mark.parametrize("of", ["backend", "operator"])
def test_compiled_results_that_were_apart_stay_so(
    quantized: Package, served: list[str], recipe: Callable[..., Any], of: str
) -> None:
    """Inductor drops a copy that it takes for one of nothing that leaves."""
    x, w = given()
    call = quantized.rms_norm if of == "operator" else norm
    backend = "inductor" if of == "operator" else make_backend(quantized.ops)

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return recipe(call(x, w))

    with torch.no_grad():
        found = torch.compile(run, backend=backend, fullgraph=True)(x, w)
    assert served == ["forward"]
    for one, like in zip(found, run(x, w), strict=True):
        torch.testing.assert_close(one.float(), like.float(), rtol=0.13, atol=1e-3)
    assert len({one.untyped_storage().data_ptr() for one in found}) == len(found)
