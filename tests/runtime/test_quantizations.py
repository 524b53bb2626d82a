"""Quantization to FP8 behind norms and their backwards in graphs, which becomes part of their
operators, and what stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import make_backend, route
from normforge.frontends.inductor import missing_beside
from normforge.frontends.quantized import QuantizedFunctions
from normforge.frontends.quantized_backward import rms_norm_backward_quantized
from normforge.frontends.quantized_node import (
    add_rms_norm_quantized_forward,
    rms_norm_quantized_forward,
)
from normforge.operations import BACKWARD_FORMATS, FORMATS, STREAM_FORMATS
from tests.support.entry_points import needs_whole_forward, randn

pytestmark = [pytest.mark.usefixtures("aten", "fresh", "own_cache"), needs_whole_forward]

ATEN: Any = torch.ops.aten
M, N, EPS, LARGEST = 6, 256, 1e-6, 448.0
E4M3 = torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The rows that kernels are asked for, which there are, and by which operations."""
    found: Asked = []

    def have(_: Any, x: Any, weight: Any, operations: Any, **options: Any) -> bool:
        found.append((tuple(x.shape), *(one.name for one in operations), options))
        return True

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", have)
    return found


@pytest.fixture
def quantized(package: Package, asked: Asked) -> Package:
    package.ops.quantized = "normforge.quantized_packages"
    return package


# ---- Spellings -----------------------------------------------------------------------------------


def by_quotient(y: torch.Tensor) -> Pair:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (blocks / scale).to(E4M3).flatten(-2), scale.squeeze(-1)


def by_reciprocal(y: torch.Tensor) -> Pair:
    """DeepGEMM's."""
    view = y.view(M, -1, 128)
    amax = view.abs().float().amax(dim=2).view(M, -1).clamp(1e-4)
    scale = amax / LARGEST
    return (view * (1.0 / scale.unsqueeze(2))).to(E4M3).view(M, N), scale


def by_inverse(y: torch.Tensor) -> Pair:
    """An older one of DeepGEMM."""
    view = y.view(M, -1, 128)
    amax = view.abs().float().amax(dim=2).view(M, -1).clamp(1e-4)
    return (view * (LARGEST / amax.unsqueeze(2))).to(E4M3).view(M, N), (amax / LARGEST).view(M, -1)


def clamped(y: torch.Tensor) -> Pair:
    """torchao's, which returns the reciprocal of what it multiplies with."""
    tiles = y.reshape(-1, 128)
    largest = tiles.abs().max(dim=1, keepdim=True)[0].clamp(min=1e-12, max=float("inf"))
    inverse = (LARGEST / largest.to(torch.float64)).to(torch.float32)
    y8 = (tiles * inverse).clamp(min=-LARGEST, max=LARGEST).to(E4M3)
    return y8.reshape(y.shape), inverse.reciprocal().reshape(M, -1)


def by_product(y: torch.Tensor) -> Pair:
    tiles = y.reshape(-1, 128)
    scale = torch.amax(torch.abs(tiles), -1, keepdim=True).to(torch.float32) * (1 / LARGEST)
    return torch.div(tiles, scale).to(E4M3).reshape(y.shape), scale.reshape(M, -1)


SPELLINGS = [by_quotient, by_reciprocal, by_inverse, clamped, by_product]


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (N,), w, EPS)


def given(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    rows = randn(M, N, dtype=dtype)
    rows[1] *= 1e3
    rows[2, :128] *= 1e-3
    return [rows, randn(N, seed=2, dtype=dtype)]


def calls(module: torch.fx.GraphModule, target: Any = rms_norm_quantized_forward) -> list[Any]:
    return [node for node in module.graph.nodes if node.target is target]


def computed(module: torch.fx.GraphModule) -> list[Any]:
    """The calls of a graph but those that only view what others compute."""
    views = (operator.getitem, ATEN.view.default, ATEN._unsafe_view.default, ATEN.squeeze.dim)
    found = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node for node in found if node.target not in views]


def routed(package: Package, function: Any, *arguments: Any) -> torch.fx.GraphModule:
    return route(make_fx(function)(*arguments), package.ops)


def check_pair(found: Pair, wanted: Pair) -> None:
    """Compare rows in FP8, of which a few may be rounded to the other side, and their scales."""
    assert found[0].dtype == wanted[0].dtype and found[0].shape == wanted[0].shape
    one, other = (pair[0].view(torch.uint8).int() for pair in (found, wanted))
    assert (one - other).abs().max() <= 1 and (one != other).float().mean() < 0.01
    torch.testing.assert_close(found[1], wanted[1], rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_norm_and_quantization_are_one_operator(
    quantized: Package, asked: Asked, spelling: Callable[..., Pair], dtype: torch.dtype
) -> None:
    x, w = given(dtype)

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return spelling(norm(x, w))

    module = routed(quantized, run, x, w)
    (call,) = calls(module)
    assert call.args[2:] == (EPS, 0.0, "fp8_1x128", False, True, False, "*/quantized")
    assert computed(module) == [call]
    assert asked == [((M, N), FORMATS["fp8_1x128"].name, {"offset": False})]
    check_pair(module(x, w), run(x, w))


def test_bits_of_a_quotient_are_those_of_the_recipe(quantized: Package, asked: Asked) -> None:
    """What the norm gives is rounded to bf16 before it is quantized."""
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    found, wanted = routed(quantized, run, x, w)(x, w), run(x, w)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    torch.testing.assert_close(found[1], wanted[1], rtol=1.2e-7, atol=0)


def test_others_take_the_rows_as_they_were(quantized: Package, asked: Asked) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        return (*by_reciprocal(y), y.t(), y.float() + 1)

    module = routed(quantized, run, x, w)
    (call,) = calls(module)
    assert call.args[5] is True
    found, wanted = module(x, w), run(x, w)
    check_pair(found[:2], wanted[:2])
    for one, other in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(one, other)


def stream(package: Package) -> Any:
    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        y, h = package.rms_norm(x, w, EPS, residual=r, residual_dtype=r.dtype)
        return (*by_quotient(y), h)

    return run


@pytest.mark.parametrize("apart", [False, True])
def test_the_sum_of_a_stream_is_part_of_it(quantized: Package, asked: Asked, apart: bool) -> None:
    """Whether the norm added it or an operator before."""
    x, w = given()

    def added_before(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        h = x + r
        return (*by_quotient(quantized.rms_norm(h, w, EPS)), h)

    run, arguments = added_before if apart else stream(quantized), (x, x.flip(0), w)
    module = routed(quantized, run, *arguments)
    (call,) = computed(module)
    assert call.target is add_rms_norm_quantized_forward and call.args[6] is False
    assert asked == [((M, N), STREAM_FORMATS["fp8_1x128"].name, {"offset": False})]
    found, wanted = module(*arguments), run(*arguments)
    check_pair(found[:2], wanted[:2])
    assert torch.equal(found[2], wanted[2])


def test_without_a_kernel_that_adds_the_sum_is_before_it(
    quantized: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def have(_: Any, x: Any, weight: Any, operations: Any, **options: Any) -> bool:
        return STREAM_FORMATS["fp8_1x128"] not in operations

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", have)
    x, w = given()
    run, arguments = stream(quantized), (x, x.flip(0), w)
    module = routed(quantized, run, *arguments)
    targets = [node.target for node in computed(module)]
    assert targets == [ATEN.add.Tensor, rms_norm_quantized_forward]
    found, wanted = module(*arguments), run(*arguments)
    check_pair(found[:2], wanted[:2])
    assert torch.equal(found[2], wanted[2])


def test_a_stream_of_another_dtype_stays(quantized: Package, asked: Asked) -> None:
    x, w = given()
    module = routed(quantized, stream(quantized), x, x.float(), w)
    assert calls(module) == [] and asked == []


def test_sizes_that_tracing_does_not_know(quantized: Package, asked: Asked) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    x, w = given()
    module = route(make_fx(run, tracing_mode="symbolic")(x, w), quantized.ops)
    assert len(calls(module)) == 1
    other = torch.cat((x, x))
    check_pair(module(other, w), run(other, w))


class Linear(torch.autograd.Function):
    """A recipe: what is multiplied is quantized, also the gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y8, scales = by_quotient(y)
        ctx.save_for_backward(y, m)
        return (y8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(y.dtype) @ m

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y, m = ctx.saved_tensors
        z8, scales = by_quotient(dz)
        dz = (z8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(dz.dtype)
        return dz @ m.T, y.T @ dz


def layer(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The stream, a norm, a product and the stream: dx is what the product before quantizes."""
    h = x + Linear.apply(r, m)
    return h + Linear.apply(norm(h, w), m)


def training_step(
    function: Any, *leaves: torch.Tensor, dynamic: bool = False
) -> list[torch.Tensor]:
    given = [one.detach().requires_grad_() for one in leaves]
    for rows in given[: 2 * dynamic]:
        torch._dynamo.mark_dynamic(rows, 0)
    result = function(*given)
    return [result, *torch.autograd.grad(result, given, torch.ones_like(result).cumsum(0))]


def test_gradients_that_a_recipe_quantizes(quantized: Package, asked: Asked) -> None:
    (x, w), m = given(), randn(N, N, seed=4, dtype=torch.bfloat16) / 16
    leaves = (x, x.flip(0), w, m)
    module = route(make_fx(lambda *given: training_step(layer, *given))(*leaves), quantized.ops)
    (call,) = calls(module, add_rms_norm_quantized_forward)
    (backward,) = calls(module, rms_norm_backward_quantized)
    assert call.args[6] is True  # for dm
    assert backward.args[4] is not None  # the gradient of the stream
    assert backward.args[5:] == (0.0, "fp8_1x128", True, False, "*/quantized")
    assert asked == [
        ((M, N), STREAM_FORMATS["fp8_1x128"].name, {"offset": False}),
        ((M, N), BACKWARD_FORMATS["fp8_1x128"].name, {"offset": False, "residual": "bf16"}),
    ]
    for one, other in zip(module(*leaves), training_step(layer, *leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_rows_that_several_products_quantize(quantized: Package, asked: Asked) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        return *by_quotient(y), *by_reciprocal(y)

    module = routed(quantized, run, x, w)
    assert len(calls(module)) == 1 and computed(module) == calls(module)
    found, wanted = module(x, w), run(x, w)
    check_pair(found[:2], wanted[:2])
    check_pair(found[2:], wanted[2:])


# ---- What stays ----------------------------------------------------------------------------------


def mean_of_blocks(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().mean(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def signed(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def of_64_columns(y: torch.Tensor) -> Any:
    blocks = y.float().unflatten(-1, (-1, 64))
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def of_rows(y: torch.Tensor) -> Any:
    scale = y.abs().amax(-1, keepdim=True).float() / LARGEST
    return (y / scale).to(E4M3), scale


def of_columns(y: torch.Tensor) -> Any:
    """128 rows of a column."""
    blocks = y.t().reshape(-1, 128) if M % 128 == 0 else y.t().reshape(-1, M)
    scale = blocks.abs().amax(-1, keepdim=True).float() / LARGEST
    return (blocks / scale).to(E4M3), scale


def across(y: torch.Tensor) -> Any:
    """The largest of the blocks of a place, not of its own."""
    blocks = y.float().view(M, 2, 128)
    scale = blocks.abs().amax(1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def other_blocks(y: torch.Tensor) -> Any:
    """The scales of the rows turned around."""
    blocks = y.float().view(-1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).flip(0)
    return (blocks / scale).to(E4M3), scale


def to_240(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 240.0
    return (blocks / scale).to(E4M3), scale


def to_e5m2(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(torch.float8_e5m2), scale


def multiplied(y: torch.Tensor) -> Any:
    """With the scale, not with its reciprocal."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks * scale).to(E4M3), scale


def narrow_scales(y: torch.Tensor) -> Any:
    blocks = y.view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


def cast_scales(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = (blocks.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
    return (blocks / scale).to(E4M3), scale


def rounded_before(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).bfloat16().to(E4M3), scale


def of_large_blocks_alone(y: torch.Tensor) -> Any:
    """Its least amax is not there to avoid a division by zero."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(0.5) / LARGEST
    return (blocks / scale).to(E4M3), scale


def capped(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(1e-12, 2.0) / LARGEST
    return (blocks / scale).to(E4M3), scale


def cut(y: torch.Tensor) -> Any:
    """Its numbers are clamped to less than FP8 has."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).clamp(-240.0, 240.0).to(E4M3), scale


def amax_goes_on(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / (amax / LARGEST)).to(E4M3), amax


def wide_goes_on(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    scaled = blocks / (blocks.abs().amax(-1, keepdim=True) / LARGEST)
    return scaled.to(E4M3), scaled.sum()


def places_go_on(y: torch.Tensor) -> Any:
    blocks = y.float().view(-1, 128)
    amax, place = blocks.abs().max(-1, keepdim=True)
    return (blocks / (amax / LARGEST)).to(E4M3), place


def others_are_quantized(y: torch.Tensor) -> Any:
    """What is scaled is more than the rows."""
    blocks = y.float().view(-1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return ((blocks + 1) / scale).to(E4M3), scale


STAYS = [
    mean_of_blocks,
    signed,
    of_64_columns,
    of_rows,
    of_columns,
    across,
    other_blocks,
    to_240,
    to_e5m2,
    multiplied,
    narrow_scales,
    cast_scales,
    rounded_before,
    of_large_blocks_alone,
    capped,
    cut,
    amax_goes_on,
    wide_goes_on,
    places_go_on,
    others_are_quantized,
]


@pytest.mark.parametrize("other", STAYS)
def test_what_is_no_such_quantization_stays(
    quantized: Package, asked: Asked, other: Callable[..., Any]
) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return other(norm(x, w))

    module = routed(quantized, run, x, w)
    assert calls(module) == [] and asked == []
    assert len(calls(module, quantized.ops.rms_norm)) == 1


def test_narrow_rows_of_other_widths_stay(quantized: Package, asked: Asked) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = functional.rms_norm(x, (192,), w, EPS)
        tiles = y.float().reshape(-1, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / LARGEST
        return (tiles / scale).to(E4M3), scale

    module = routed(quantized, run, randn(M, 192), randn(192))
    assert calls(module) == [] and asked == []


def test_without_a_kernel_norms_stay(quantized: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", lambda *_, **__: False)
    assert calls(routed(quantized, run, *given())) == []


def test_a_package_without_functions_beside_it_folds_nothing(
    package: Package, asked: Asked
) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    package.ops.quantized = ""
    assert calls(routed(package, run, *given())) == [] and asked == []


# ---- Compiled ------------------------------------------------------------------------------------


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
