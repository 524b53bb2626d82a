"""Quantization to FP8 behind norms and their backwards in graphs, which becomes part of their
operators, and what stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import route
from normforge.frontends.quantized import QuantizedFunctions
from normforge.frontends.quantized_backward import rms_norm_backward_quantized
from normforge.frontends.quantized_node import (
    add_rms_norm_quantized_forward,
    rms_norm_quantized_forward,
)
from normforge.operations import BACKWARD_FORMATS, FORMATS, STREAM_FORMATS
from tests.support.entry_points import needs_whole_forward, randn
from tests.support.recipes import (
    E4M3,
    EPS,
    LARGEST,
    NO_RECIPES,
    POWERS,
    SPELLINGS,
    Linear,
    M,
    N,
    Pair,
    by_bits,
    by_quotient,
    by_reciprocal,
    check_pair,
    given,
    layer,
    norm,
    training_step,
    twice,
    two_scales,
)

pytestmark = [pytest.mark.usefixtures("aten", "fresh", "own_cache"), needs_whole_forward]

ATEN: Any = torch.ops.aten
Asked = list[tuple[Any, ...]]


def calls(module: torch.fx.GraphModule, target: Any = rms_norm_quantized_forward) -> list[Any]:
    return [node for node in module.graph.nodes if node.target is target]


def computed(module: torch.fx.GraphModule) -> list[Any]:
    """The calls of a graph but those that only view what others compute."""
    views = [ATEN.view.default, ATEN._unsafe_view.default, ATEN.squeeze.dim]
    views += [ATEN.detach.default, ATEN.alias.default]  # of a tensor whose dtype is viewed
    found = [node for node in module.graph.nodes if node.op == "call_function"]
    return [node for node in found if node.target not in (operator.getitem, *views)]


def routed(package: Package, function: Any, *arguments: Any) -> torch.fx.GraphModule:
    with torch.no_grad():
        return route(make_fx(function)(*arguments), package.ops)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_norm_and_quantization_are_one_operator(
    quantized: Package, asked_to_quantize: Asked, spelling: Callable[..., Pair], dtype: torch.dtype
) -> None:
    x, w = given(dtype)

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return spelling(norm(x, w))

    module = routed(quantized, run, x, w)
    (call,) = calls(module)
    up = spelling in POWERS
    assert call.args[2:] == (EPS, 0.0, "fp8_1x128", False, True, up, "*/quantized")
    assert computed(module) == [call]
    assert asked_to_quantize == [((M, N), FORMATS["fp8_1x128"].name, {"offset": False})]
    check_pair(module(x, w), run(x, w))


@pytest.mark.parametrize(("recipe", "rounding"), [(by_quotient, 1.2e-7), (by_bits, 0.0)])
def test_bits_are_those_of_the_recipe(
    quantized: Package, recipe: Callable[..., Pair], rounding: float
) -> None:
    """The norm's result is rounded to bf16 before it is quantized. Bits of floats say exactly which
    power is the next."""
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return recipe(norm(x, w))

    found, wanted = routed(quantized, run, x, w)(x, w), run(x, w)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    torch.testing.assert_close(found[1], wanted[1], rtol=rounding, atol=0)


def test_exponents_of_other_blocks_are_none_of_a_scale(quantized: Package) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        scale = y.float().abs().view(M, -1, 128).amax(-1) / LARGEST
        bits = scale.view(torch.int32)
        high, carry = bits >> 23, (bits & 0x7FFFFF).bool().int()
        return *by_bits(y), (high.view(-1, 1) + carry.view(1, -1) << 23).view(torch.float32)

    module = routed(quantized, run, x, w)
    assert len(calls(module)) == 1
    torch.testing.assert_close(module(x, w)[2], run(x, w)[2], rtol=0, atol=0)


@pytest.mark.parametrize("first", [by_quotient, by_bits])
def test_rows_are_quantized_by_one_kind_of_scale(quantized: Package, first: Any) -> None:
    """The other kind is computed from the norm's result."""
    x, w = given()
    second = by_bits if first is by_quotient else by_quotient

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        return *first(y), *second(y)

    module = routed(quantized, run, x, w)
    (call,) = calls(module)
    assert call.args[5] is True and call.args[7] is (first is by_bits)
    found, wanted = module(x, w), run(x, w)
    check_pair(found[:2], wanted[:2])
    check_pair(found[2:], wanted[2:])


def test_others_take_the_rows_as_they_were(quantized: Package) -> None:
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


@pytest.fixture
def no_sums(quantized: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel adds the residual stream."""

    def have(_: Any, x: Any, weight: Any, operations: Any, **options: Any) -> bool:
        return STREAM_FORMATS["fp8_1x128"] not in operations

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", have)


def stream(package: Package) -> Any:
    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        y, h = package.rms_norm(x, w, EPS, residual=r, residual_dtype=r.dtype)
        return (*by_quotient(y), h)

    return run


@pytest.mark.parametrize("apart", [False, True])
def test_the_sum_of_a_stream_is_part_of_it(
    quantized: Package, asked_to_quantize: Asked, apart: bool
) -> None:
    """It does not matter whether the norm added it or an operator before."""
    x, w = given()

    def added_before(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        h = x + r
        return (*by_quotient(quantized.rms_norm(h, w, EPS)), h)

    run, arguments = added_before if apart else stream(quantized), (x, x.flip(0), w)
    module = routed(quantized, run, *arguments)
    (call,) = computed(module)
    assert call.target is add_rms_norm_quantized_forward and call.args[6] is False
    assert asked_to_quantize == [((M, N), STREAM_FORMATS["fp8_1x128"].name, {"offset": False})]
    found, wanted = module(*arguments), run(*arguments)
    check_pair(found[:2], wanted[:2])
    assert torch.equal(found[2], wanted[2])


@pytest.mark.usefixtures("no_sums")
def test_without_a_kernel_that_adds_the_sum_is_before_it(quantized: Package) -> None:
    x, w = given()
    run, arguments = stream(quantized), (x, x.flip(0), w)
    module = routed(quantized, run, *arguments)
    targets = [node.target for node in computed(module)]
    assert targets == [ATEN.add.Tensor, rms_norm_quantized_forward]
    found, wanted = module(*arguments), run(*arguments)
    check_pair(found[:2], wanted[:2])
    assert torch.equal(found[2], wanted[2])


def test_a_stream_of_another_dtype_stays(quantized: Package, asked_to_quantize: Asked) -> None:
    x, w = given()
    module = routed(quantized, stream(quantized), x, x.float(), w)
    assert calls(module) == [] and asked_to_quantize == []


def test_sizes_that_tracing_does_not_know(quantized: Package) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    x, w = given()
    with torch.no_grad():
        module = route(make_fx(run, tracing_mode="symbolic")(x, w), quantized.ops)
    assert len(calls(module)) == 1
    other = torch.cat((x, x))
    check_pair(module(other, w), run(other, w))


@pytest.mark.parametrize("recipe", [by_quotient, by_bits])
def test_gradients_that_a_recipe_quantizes(
    quantized: Package, asked_to_quantize: Asked, recipe: Callable[..., Pair]
) -> None:
    (x, w), m = given(), randn(N, N, seed=4, dtype=torch.bfloat16) / 16
    leaves = (x, x.flip(0), w, m)
    step = partial(training_step, partial(layer, recipe=recipe))
    module = route(make_fx(lambda *given: step(*given))(*leaves), quantized.ops)
    (call,) = calls(module, add_rms_norm_quantized_forward)
    (backward,) = calls(module, rms_norm_backward_quantized)
    assert call.args[6] is True  # for dm
    assert backward.args[4] is not None  # the gradient of the stream
    assert backward.args[5:] == (0.0, "fp8_1x128", True, recipe is by_bits, "*/quantized")
    assert asked_to_quantize == [
        ((M, N), STREAM_FORMATS["fp8_1x128"].name, {"offset": False}),
        ((M, N), BACKWARD_FORMATS["fp8_1x128"].name, {"offset": False, "residual": "bf16"}),
    ]
    for one, other in zip(module(*leaves), step(*leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_rows_that_several_products_quantize(quantized: Package) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        pairs = by_quotient(y), by_reciprocal(y)
        return [(y8.float().view(M, -1, 128) * scales[..., None]).sum(-1) for y8, scales in pairs]

    module = routed(quantized, run, x, w)
    assert len(calls(module)) == 1
    assert not {ATEN.abs.default, ATEN.clone.default} & {node.target for node in computed(module)}
    for one, other in zip(module(x, w), run(x, w), strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.05)


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


def scales_of_other_blocks(y: torch.Tensor) -> Any:
    more = y.float().view(M, -1, 64).abs().amax(-1) / LARGEST
    return by_quotient(y)[0], more


def wide_scales(y: torch.Tensor) -> Any:
    blocks = y.double().view(M, -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    return (blocks / scale).to(E4M3), scale


ON_THE_WAY = [amax_goes_on, wide_goes_on, places_go_on, scales_of_other_blocks, wide_scales]


@pytest.mark.parametrize("other", ON_THE_WAY)
def test_what_is_read_on_the_way_is_read_from_the_rows(
    quantized: Package, other: Callable[..., Any]
) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return other(norm(x, w))

    module = routed(quantized, run, x, w)
    (call,) = calls(module)
    assert call.args[5] is True and len(computed(module)) > 1
    found, wanted = module(x, w), run(x, w)
    assert ((found[0].float() - wanted[0].float()).abs() <= wanted[0].float().abs() / 8).all()
    torch.testing.assert_close(found[1], wanted[1])


def written_to(y: torch.Tensor) -> Any:
    one, scales = by_quotient(y)
    other, more = by_reciprocal(y)
    one.view(torch.uint8).zero_()
    return other.float() + more.sum(), scales


@pytest.mark.parametrize("other", [twice, two_scales, written_to])
def test_results_that_were_apart_stay_so(quantized: Package, other: Callable[..., Any]) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return other(norm(x, w))

    module = routed(quantized, run, x, w)
    assert len(calls(module)) == 1
    found, wanted = module(x, w), run(x, w)
    for one, like in zip(found, wanted, strict=True):
        wide = [each.float() for each in (one, like)]
        torch.testing.assert_close(*wide, rtol=0.13, atol=1e-3)
    memory = [one.untyped_storage().data_ptr() for one in found]
    assert len({*memory}) == len({one.untyped_storage().data_ptr() for one in wanted})


# ---- What stays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", NO_RECIPES)
def test_what_is_no_such_quantization_stays(
    quantized: Package, asked_to_quantize: Asked, other: Callable[..., Any]
) -> None:
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return other(norm(x, w))

    module = routed(quantized, run, x, w)
    assert calls(module) == [] and asked_to_quantize == []
    assert len(calls(module, quantized.ops.rms_norm)) == 1


def test_the_largest_of_128_rows_is_none_of_a_block(quantized: Package) -> None:
    """There are as many of these as of blocks."""

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        blocks = norm(x, w).float().view(128, 2, 128)
        scale = blocks.abs().amax(0).view(128, 2, 1) / LARGEST
        return (blocks / scale).to(E4M3), scale

    assert calls(routed(quantized, run, randn(128, N), randn(N))) == []


def test_narrow_rows_of_other_widths_stay(quantized: Package, asked_to_quantize: Asked) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = functional.rms_norm(x, (192,), w, EPS)
        tiles = y.float().reshape(-1, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / LARGEST
        return (tiles / scale).to(E4M3), scale

    module = routed(quantized, run, randn(M, 192), randn(192))
    assert calls(module) == [] and asked_to_quantize == []


def test_without_a_kernel_norms_stay(quantized: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Pair:
        return by_quotient(norm(x, w))

    monkeypatch.setattr(QuantizedFunctions, "have_kernels", lambda *_, **__: False)
    assert calls(routed(quantized, run, *given())) == []


def test_a_package_without_functions_beside_it_folds_nothing(
    package: Package, asked_to_quantize: Asked
) -> None:
    package.ops.quantized = ""
    module = routed(package, lambda x, w: by_quotient(norm(x, w)), *given())
    assert calls(module) == [] and asked_to_quantize == []


def test_a_graph_that_gradients_may_be_computed_of_stays(
    quantized: Package, asked_to_quantize: Asked
) -> None:
    """None flows through an operator that quantizes."""
    x, w = given()

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = norm(x, w)
        return x + y, *by_quotient(y)

    module = route(make_fx(run)(x, w), quantized.ops)
    assert calls(module) == [] and asked_to_quantize == []
    leaves = [one.clone().requires_grad_() for one in (x, w)]
    found = torch.autograd.grad(module(*leaves)[0].sum(), leaves)
    for one, other in zip(found, torch.autograd.grad(run(*leaves)[0].sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(2, N), (128, 128)])
def test_a_weight_of_several_dimensions_stays(
    quantized: Package, asked_to_quantize: Asked, shape: tuple[int, int]
) -> None:
    x, w = randn(M, *shape), randn(*shape, seed=2)

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        tiles = quantized.rms_norm(x, w, EPS).view(-1, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / LARGEST
        return (tiles / scale).to(E4M3), scale

    module = routed(quantized, run, x, w)
    assert calls(module) == [] and asked_to_quantize == []
    check_pair(module(x, w), run(x, w))


@pytest.mark.usefixtures("no_sums")
def test_rows_in_another_order_keep_it(quantized: Package) -> None:
    """PyTorch's sum of them would not be contiguous."""
    x, r = (randn(4, M, N, seed=seed).transpose(0, 1) for seed in (1, 2))

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        y, h = quantized.rms_norm(x, w, EPS, residual=r)
        tiles = y.view(-1, 128)
        scale = tiles.abs().amax(-1, keepdim=True) / LARGEST
        return (tiles / scale).to(E4M3), scale, h.view(-1, N)

    arguments = (x, r, randn(N, seed=3))
    module = routed(quantized, run, *arguments)
    assert len(calls(module, quantized.ops.add_rms_norm)) == 1
    found, wanted = module(*arguments), run(*arguments)
    check_pair(found[:2], wanted[:2])
    assert torch.equal(found[2], wanted[2])


def test_an_order_of_channels_stays(quantized: Package) -> None:
    x, w = randn(2, 3, 4, 128), randn(128, seed=2)

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = functional.rms_norm(x, (128,), w, EPS)
        scale = y.abs().amax(-1, keepdim=True) / LARGEST
        return (y / scale).to(E4M3, memory_format=torch.channels_last), scale

    module = routed(quantized, run, x, w)
    assert calls(module) == []
    assert module(x, w)[0].stride() == run(x, w)[0].stride()


# ---- Steps whose halves are marked ---------------------------------------------------------------


class Again(Linear):
    """A recipe whose backward quantizes the rows that it saved."""

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y, m = ctx.saved_tensors
        y8, scales = by_quotient(y)
        y = (y8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(y.dtype)
        return dz @ m.T, y.T @ dz


class Narrow(Linear):
    """A recipe that saves what it multiplied."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y8, scales = by_quotient(y)
        ctx.save_for_backward(y8, scales, m)
        return (y8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(y.dtype) @ m

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y8, scales, m = ctx.saved_tensors
        y = (y8.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2).to(dz.dtype)
        return dz @ m.T, y.T @ dz


@pytest.mark.parametrize("recipe", [Again, Narrow])
def test_what_a_backward_reads_again_stays_in_its_half(quantized: Package, recipe: Any) -> None:
    (x, w), m = given(), randn(N, N, seed=4, dtype=torch.bfloat16) / 16

    def step(*leaves: torch.Tensor) -> Any:
        return training_step(lambda x, w, m: recipe.apply(norm(x, w), m), *leaves)

    traced = make_fx(step)(x, w, m)
    backward = False
    for node in traced.graph.nodes:
        backward |= node.target is ATEN.cumsum.default
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
    module = route(traced, quantized.ops)
    (call,) = calls(module)
    assert call.args[5] is (recipe is Again)
    for one, other in zip(module(x, w, m), step(x, w, m), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())
