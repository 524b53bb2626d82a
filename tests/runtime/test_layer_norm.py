"""LayerNorm's package: gradients on the CPU, what reaches the driver, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from generator.package.files import KernelFiles, write_package
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32, DW_IN_WEIGHT_DTYPE
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.serve.options import Arguments, Options, composition
from normforge.serve.reference import reference_backward
from normforge.spec import KernelSpec, plan_launch
from normforge.table import Table
from tests.support.entry_points import leaf, randn, routing_on_cpu, spied
from tests.support.fake_driver import (
    LAYER_NORM,
    SPEC,
    TARGET,
    FakeDevice,
    FakeDriver,
    entry,
    tensors,
)

KERNEL = replace(SPEC, **LAYER_NORM)  # type: ignore[arg-type]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float64: 1e-12}


@pytest.fixture
def package(tmp_path: Path) -> LayerNormPackage:
    write_package(tmp_path, KernelFiles(tmp_path, 132), Table(TARGET, (entry(6, KERNEL),)), None)
    return LayerNormPackage(tmp_path)


def close(found: Any, exact: Any, dtype: torch.dtype) -> bool:
    limit = TOLERANCE[dtype] * float(exact.abs().max())
    return bool((found.double() - exact).abs().max() <= limit)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        *((dtype, dtype) for dtype in TOLERANCE),
        *((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_gradients_are_those_of_pytorch_in_float64(
    package: LayerNormPackage, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    norm = package.LayerNorm((3, 16), dtype=weight_dtype)
    exact = torch.nn.LayerNorm((3, 16), dtype=torch.float64)
    torch.manual_seed(1)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    exact.load_state_dict({name: value.double() for name, value in norm.state_dict().items()})
    x = (3 + torch.randn(5, 3, 16)).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(5, 3, 16).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    y.backward(dy)
    exact(wide).backward(dy.double())
    assert close(x.grad, wide.grad, dtype)
    assert close(norm.weight.grad, exact.weight.grad, norm.weight.dtype)
    assert close(norm.bias.grad, exact.bias.grad, norm.bias.dtype)


@pytest.mark.parametrize("affine", [False, True])
def test_only_what_is_wanted_is_there(package: LayerNormPackage, affine: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    bias = torch.zeros(8, requires_grad=True)
    weight = torch.ones(8) if affine else None
    package.layer_norm(x, weight, bias).square().sum().backward()
    y = torch.nn.functional.layer_norm(x.detach(), (8,))
    assert bias.grad is not None
    assert torch.allclose(bias.grad, (2 * y).sum(0), atol=1e-5)
    mean, rstd = torch.zeros(4), torch.ones(4)
    none = package.layer_norm_backward(x, x, mean, rstd, None, need_dx=False)
    assert none == (None, None, None)
    dx, dw, db = package.layer_norm_backward(x, x, mean, rstd, torch.ones(8), need_dw=False)
    assert dx is not None and (dw, db) == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("mean", torch.zeros(5), "mean must be like rstd"),
        ("mean", torch.zeros(4, dtype=torch.bfloat16), "mean must be like rstd"),
        ("mean", None, "mean must be a torch.Tensor"),
        ("weight", torch.ones(4, 8), "weight must have shape"),
        ("dy", torch.zeros(4, 9), "dy must have x's shape"),
        ("accumulate", True, "give the tensor to add to"),
        ("dw_out", torch.zeros(8), r"dw_out must have shape \(2, 8\), got \(8,\)"),
        ("dw_out", torch.zeros(2, 8).double(), "dw_out must have the weight's dtype or"),
        ("dw_dtype", torch.float16, "dw_dtype must be the weight's or"),
        ("dresidual", torch.zeros(4, 9), "dresidual must have x's shape"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(
    package: LayerNormPackage, name: str, value: Any, error: str
) -> None:
    x = torch.randn(4, 8)
    given: dict[str, Any] = {"dy": x, "x": x, "mean": torch.zeros(4), "rstd": torch.ones(4)}
    with pytest.raises((TypeError, ValueError), match=error):
        package.layer_norm_backward(**{**given, "weight": torch.ones(8), name: value})


# ---- Options -------------------------------------------------------------------------------------


def exact(given: dict[str, Any]) -> list[torch.Tensor]:
    """dx, dw and db of F.layer_norm by autograd, in float64."""
    x, weight = (given[name].double().requires_grad_() for name in ("x", "weight"))
    bias = torch.zeros_like(weight, requires_grad=True)
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
    return list(torch.autograd.grad(y, (x, weight, bias), given["dy"].double()))


def saved(x: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = x.double()
    rstd = torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return {"mean": wide.mean(-1, keepdim=True).float(), "rstd": rstd.float()}


def call_of(dtype: torch.dtype, weight_dtype: torch.dtype, N: int = 24) -> dict[str, Any]:
    x, dy = 2 + randn(5, 6, N, seed=1).to(dtype), randn(5, 6, N, seed=2).to(dtype)
    return {"dy": dy, "x": x, "weight": randn(N, seed=3).to(weight_dtype), **saved(x)}


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"dw_dtype": torch.float32},
    {"dresidual": torch.bfloat16},
    {"dresidual": torch.float32, "dw_out": torch.float32},
    {"dw_out": torch.float32, "accumulate": True},
    {"dw_out": torch.bfloat16, "accumulate": True},
)


@pytest.mark.parametrize(
    ("weight_dtype", "options"),
    [
        *((torch.bfloat16, options) for options in OPTIONS),
        # A kernel writes dw in the weight's dtype or in fp32.
        *((torch.float32, o) for o in OPTIONS if o.get("dw_out") != torch.bfloat16),
    ],
)
def test_options_of_the_backward(
    package: LayerNormPackage, weight_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    given, options = call_of(torch.bfloat16, weight_dtype), dict(options)
    wanted_dx, *wanted_sums = exact(given)
    kind, before = options.pop("dw_out", None), torch.zeros(2, 24)
    if options.get("accumulate"):
        before = randn(2, 24, seed=4)
    if kind is not None:
        options["dw_out"] = before.to(kind, copy=True)
    residual = options.get("dresidual")
    if residual is not None:
        options["dresidual"] = randn(5, 6, 24, seed=5).to(residual)
        wanted_dx = wanted_dx + options["dresidual"].double()
    dx, dw, db, *third = package.layer_norm_backward(**given, **options)
    assert close(dx, wanted_dx, torch.bfloat16)
    for found, wanted, row in zip((dw, db), wanted_sums, before.double(), strict=True):
        assert found.dtype == (kind or options.get("dw_dtype") or weight_dtype)
        assert close(found, wanted + row, found.dtype)
    if kind is not None:
        assert dw.data_ptr() == options["dw_out"].data_ptr()
    assert len(third) == (residual is not None)
    if third:
        assert third[0].dtype == residual
        assert close(third[0], wanted_dx, residual)


@pytest.mark.parametrize("options", OPTIONS)
def test_what_a_kernel_lacks_is_composed_around_it(options: dict[str, Any]) -> None:
    """Around a stand-in that takes no residual's gradient and no dw_out that a kernel refuses."""
    given, options = call_of(torch.bfloat16, torch.bfloat16), dict(options)
    if kind := options.pop("dw_out", None):
        given["dw_out"] = torch.ones(2, 24, dtype=kind)
    if kind := options.pop("dresidual", None):
        given["dresidual"] = randn(5, 6, 24).to(kind)

    def backward(inner: Arguments, asked: Options) -> Any:
        compose = composition(inner, asked, KERNEL)
        if compose is not None:
            return compose(backward, inner, asked)
        assert inner.dresidual is None and inner.mean is not None
        return reference_backward(**vars(inner), **vars(asked))

    copied = {name: value.clone() for name, value in given.items()}
    wanted = reference_backward(**copied, **options)
    found = backward(Arguments(**given), Options(**options))
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("frozen", ["", "weight", "bias", "both", "x"])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_what_wants_one(package: LayerNormPackage, frozen: str, biased: bool) -> None:
    norm, exact = package.LayerNorm(16, bias=biased), torch.nn.LayerNorm(16, bias=biased)
    x, mine = leaf(4, 16), leaf(4, 16)
    for module in (norm, exact):
        module.weight.requires_grad_(frozen not in ("weight", "both"))
        if biased:
            module.bias.requires_grad_(frozen not in ("bias", "both"))
    if frozen == "x":
        x, mine = x.detach(), mine.detach()
    dy = randn(4, 16, seed=1)
    norm(mine).backward(dy)
    exact(x).backward(dy)
    pairs = [(mine, x), (norm.weight, exact.weight), *([(norm.bias, exact.bias)] * biased)]
    for one, other in pairs:
        assert (one.grad is None) == (other.grad is None)
        assert other.grad is None or torch.allclose(one.grad, other.grad, atol=1e-5)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_residual_is_added_before_and_its_gradient_after(
    package: LayerNormPackage, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    norm = package.LayerNorm(16, dtype=dtype)
    torch.nn.init.normal_(norm.bias)
    x, residual = leaf(4, 16, dtype=dtype), leaf(4, 16, dtype=residual_dtype, seed=1)
    dy, dh = randn(4, 16, seed=2).to(dtype), randn(4, 16, seed=3).to(residual_dtype)
    y, h = norm(x, residual)
    assert (y.dtype, h.dtype) == (dtype, residual_dtype)
    leaves = (x, residual, norm.weight, norm.bias)
    found = torch.autograd.grad((y, h), leaves, (dy, dh))
    wide = [given.detach().double().requires_grad_() for given in leaves]
    total = (wide[0] + wide[1]).to(residual_dtype).double()  # rounded as it is
    other = torch.nn.functional.layer_norm(total, (16,), *wide[2:])
    assert close(y, other.detach(), dtype) and torch.equal(h.double(), total)
    wanted = torch.autograd.grad((other, total), wide, (dy.double(), dh.double()))
    narrowest = torch.bfloat16 if torch.bfloat16 in (dtype, residual_dtype) else dtype
    for one, exact_one, given in zip(found, wanted, leaves, strict=True):
        assert one.dtype == given.dtype
        assert close(one, exact_one, narrowest)
    only_stream = norm(x, residual)[1]
    (dx,) = torch.autograd.grad(only_stream, x, dh)
    assert torch.equal(dx, dh.to(dtype))


def test_second_derivatives_are_pytorchs(package: LayerNormPackage) -> None:
    wide = torch.float64
    leaves = [leaf(3, 6, dtype=wide), leaf(6, dtype=wide, seed=1), leaf(6, dtype=wide, seed=2)]

    def penalty(norm: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        y = norm(*leaves)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    wanted = penalty(lambda x, w, b: torch.nn.functional.layer_norm(x, (6,), w, b))
    torch.testing.assert_close(penalty(package.layer_norm), wanted)
    given = {name: value.float() for name, value in call_of(torch.float32, torch.float32).items()}
    for result in package.layer_norm_backward(**{**given, "x": given["x"].requires_grad_()}):
        assert result is not None
        with pytest.raises(RuntimeError, match="no gradient of its own"):
            result.sum().backward()


def test_arguments_of_the_forward(package: LayerNormPackage) -> None:
    x = torch.randn(4, 8)
    for given, error in (
        ({"weight": torch.ones(7)}, r"weight must have shape \(8,\)"),
        ({"weight": torch.ones(4, 8)}, r"weight must have shape \(8,\)"),
        ({"weight": torch.tensor(1.0)}, r"weight must have shape \(8,\)"),
        ({"bias": torch.tensor(1.0)}, r"bias must have shape \(8,\)"),
        ({"bias": torch.ones(7)}, r"bias must have shape \(8,\)"),
        ({"residual": torch.ones(4, 7)}, "residual must have x's shape"),
    ):
        with pytest.raises(ValueError, match=error):
            package.layer_norm(x, **given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        package.layer_norm([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 2, 8\)"):
        package.LayerNorm((2, 8))(x)


def test_a_wide_bias_gets_a_wide_gradient(package: LayerNormPackage) -> None:
    x = torch.randn(512, 16, dtype=torch.bfloat16)
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(16, requires_grad=True)
    dy = torch.randn(512, 16, dtype=torch.bfloat16)
    package.layer_norm(x, weight, bias).backward(dy)
    assert (weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(bias.grad, dy.float().sum(0), rtol=1e-5, atol=1e-4)


def test_gradients_may_be_changed_in_place(package: LayerNormPackage) -> None:
    x = torch.randn(4, 8)
    given = {"dy": torch.randn(4, 8), "x": x, "weight": torch.ones(8), **saved(x)}
    _, dw, db = package.layer_norm_backward(**given)
    dw.mul_(2.0), db.add_(1.0)


# ---- Launches ------------------------------------------------------------------------------------


@pytest.fixture
def launching(
    tmp_path: Path, driver: FakeDriver, device: FakeDevice
) -> Callable[..., LayerNormPackage]:
    """Makes a package whose kernel is launched for CPU tensors, by a driver that records it."""

    def make(spec: KernelSpec = KERNEL) -> LayerNormPackage:
        write_package(tmp_path, KernelFiles(tmp_path, 132), Table(TARGET, (entry(6, spec),)), None)
        package = LayerNormPackage(tmp_path)
        kernel = LoadedKernel(b"cubin", spec)
        package._source(None).loaded.get = lambda _: kernel  # type: ignore[method-assign]
        package._find = partial(package._with_kernel, device=0)  # type: ignore[method-assign]
        package._calls._device = ""
        return package

    return make


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("way", ["slices", "second_kernel"])
def test_the_kernel_gets_every_tensor_and_its_mean(
    launching: Any, driver: FakeDriver, device: FakeDevice, way: str, capturing: bool
) -> None:
    spec = replace(KERNEL, way=way)
    package, device.capturing = launching(spec), capturing
    dy, x, rstd, weight = tensors()
    mean = torch.randn(6, 2)[:, 0]  # is made contiguous
    dx, dw, db = package.layer_norm_backward(dy, x, mean, rstd, weight)
    seen, *second = driver.launches
    launch = plan_launch(spec, 6)
    assert (seen.function, seen.grid, seen.stream) == ("layernorm_backward", launch.grid, 7)
    got = seen.arguments
    given = {"x": x, "dy": dy, "rstd": rstd, "weight": weight, "dx": dx, "dw": dw}
    assert all(getattr(got, name) == tensor.data_ptr() for name, tensor in given.items())
    assert (got.dresidual, got.dresidual_out) == (0, 0)
    assert got.mean not in (0, mean.data_ptr())
    assert (got.x_stride, got.dy_stride, got.dresidual_stride, got.dx_stride) == (1024,) * 4
    assert (got.rows, got.columns) == (6, 1024)  # N, though dw has 2 N
    assert (got.dw_mode, got.weight_offset) == (DW_IN_WEIGHT_DTYPE, 0.0)
    assert db.data_ptr() == dw.data_ptr() + 1024 * 2  # the kernel writes dbeta behind dgamma
    theirs = [one.arguments for one in second]
    assert [(one.sums, one.partials, one.columns) for one in theirs] == [
        (dw.data_ptr(), launch.participants, 2048)
    ] * (way == "second_kernel")
    mean = mean.contiguous()
    package.layer_norm_backward(dy, x, mean, rstd, weight)
    again = driver.launches[len(driver.launches) // 2].arguments
    assert again.mean == mean.data_ptr()
    for name in ("counters", "zeroed", "scratch"):
        assert capturing or getattr(again, name) == getattr(got, name)


def test_the_kernel_gets_options_and_strides(launching: Any, driver: FakeDriver) -> None:
    package = launching(replace(KERNEL, residual="fp32"))
    dy, x, rstd, weight = tensors(6, 2048)
    dy, x, weight, mean = dy[:, :1024], x[:, 1024:], weight[:1024], torch.randn(6)
    dresidual, buffer = torch.randn(6, 1024), torch.zeros(2, 1024)
    options = {"dresidual": dresidual, "dw_out": buffer, "accumulate": True}
    dx, dw, _, third = package.layer_norm_backward(dy, x, mean, rstd, weight, **options)
    (seen,) = driver.launches
    given = {"x": x, "dy": dy, "rstd": rstd, "weight": weight, "dx": dx, "dw": buffer}
    given |= {"dresidual": dresidual, "dresidual_out": third, "mean": mean}
    got = seen.arguments
    assert all(getattr(got, name) == tensor.data_ptr() for name, tensor in given.items())
    assert (got.rows, got.x_stride, got.dy_stride) == (6, 2048, 2048)
    assert (got.dresidual_stride, got.dx_stride, got.dw_mode) == (1024, 1024, DW_ADDED)
    assert dw.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("need_dx", [False, True])
@pytest.mark.parametrize("need_dw", [False, True])
def test_what_is_not_wanted_has_no_address(
    launching: Any, driver: FakeDriver, need_dx: bool, need_dw: bool
) -> None:
    package, (dy, x, rstd, weight) = launching(), tensors()
    wanted = {"need_dx": need_dx, "need_dw": need_dw, "dw_dtype": torch.float32}
    dx, dw, db = package.layer_norm_backward(dy, x, rstd, rstd, weight, **wanted)
    (seen,) = driver.launches
    assert [result is not None for result in (dx, dw, db)] == [need_dx, need_dw, need_dw]
    got = seen.arguments
    assert (got.dx != 0, got.dw != 0) == (need_dx, need_dw)
    assert got.dw_mode == (DW_IN_FP32 if need_dw else DW_IN_WEIGHT_DTYPE)
    assert dw is None or dw.dtype == torch.float32


def test_a_module_launches_its_backward(launching: Any, driver: FakeDriver) -> None:
    package = launching()
    norm = package.LayerNorm(1024, dtype=torch.bfloat16)
    _, x, _, _ = tensors()
    norm(x.requires_grad_()).sum().backward()
    (seen,) = driver.launches
    assert (seen.function, seen.arguments.weight) == ("layernorm_backward", address(norm.weight))
    assert seen.arguments.dx == x.grad.data_ptr()
    assert norm.bias.grad.data_ptr() == seen.arguments.dw + 2048


# ---- Calls like an earlier one -------------------------------------------------------------------


def test_a_call_that_came_before_goes_the_quick_way(
    launching: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, (dy, x, rstd, weight) = launching(), tensors()
    mean = torch.zeros(6, 1)
    for _ in range(2):
        package.layer_norm_backward(dy, x, mean, rstd, weight)
    monkeypatch.setattr(package, "_run", None)
    dx, dw, db = package.layer_norm_backward(dy, x, mean, rstd, weight)
    first, second, third = (seen.arguments for seen in driver.launches)
    given = {"x": x, "dy": dy, "rstd": rstd, "weight": weight, "dx": dx, "dw": dw, "mean": mean}
    places = {name: address(tensor) for name, tensor in given.items()}
    assert third == first._replace(**places) == second._replace(**places)
    assert address(db) == address(dw) + 2048
    assert dw.shape == db.shape == weight.shape
    assert dw.is_contiguous() and db.is_contiguous()


def test_known_call_is_seen_by_a_mode(
    launching: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, (dy, x, rstd, weight) = launching(), tensors()
    given = (dy, x, torch.zeros(6, 1), rstd, weight)
    for _ in range(3):
        package.layer_norm_backward(*given)
    monkeypatch.setattr(package, "_quick", None)
    with FlopCounterMode(display=False):
        package.layer_norm_backward(*given)
    with torch.autograd.forward_ad.dual_level():
        package.layer_norm_backward(*given)
    assert len(driver.launches) == 5


class Node:
    """A training step of a module on the fake GPU. wanted: of x, weight and bias."""

    def __init__(self, package: Any, driver: FakeDriver, *wanted: bool) -> None:
        self.norm, self.driver = package.LayerNorm(1024, dtype=torch.bfloat16), driver
        self.leaves = (tensors()[1], self.norm.weight, self.norm.bias)
        for tensor, wants in zip(self.leaves, wanted, strict=True):
            tensor.requires_grad_(wants)

    def step(
        self,
        residual: torch.Tensor | None = None,
        around: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Return what the kernel of a step got, which has to be where the gradients are. around: of
        the backward alone."""
        for tensor in self.leaves:
            tensor.grad = None
        result = self.norm(self.leaves[0], residual)
        results = (result,) if residual is None else result
        with around or nullcontext():
            torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        got = self.driver.launches[-1].arguments
        places = (got.dx, got.dw, got.dw + 2048)
        for tensor, place in zip(self.leaves, places, strict=True):
            assert address(tensor.grad) == (place if tensor.requires_grad else 0)
        return got


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, True, False), (True, False, True)])
def test_a_node_that_came_before_goes_the_quick_way(
    launching: Any,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    wanted: tuple[bool, ...],
    watched: bool,
) -> None:
    """Either of the two sums may be wanted; but it never does where somebody watches operators."""
    package = launching()
    node = Node(package, driver, *wanted)
    for _ in range(3):
        node.step()
    asked = spied(monkeypatch, package, "_run")
    monkeypatch.setattr(package.ops, "_backward", package._run)
    node.step(around=FlopCounterMode(display=False) if watched else None)
    assert len(driver.launches) == 4
    assert len(asked) == watched


def test_the_tangent_of_a_gradient_is_that_of_a_known_node_too(
    launching: Any, driver: FakeDriver
) -> None:
    """No check of tensors sees a tangent, and no kernel passes it on."""
    node, dual = Node(launching(), driver, True, True, True), torch.autograd.forward_ad
    for _ in range(3):
        node.step()
    y = node.norm(node.leaves[0])
    with dual.dual_level():
        dy = dual.make_dual(torch.ones_like(y), torch.ones_like(y))
        for result in torch.autograd.grad(y, node.leaves, dy):
            assert dual.unpack_dual(result).tangent is not None
    assert len(driver.launches) == 3


def test_a_node_wants_what_an_earlier_one_did_not(
    launching: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = launching()
    for wanted in product((True, False), repeat=3):
        if not any(wanted):
            continue
        node = Node(package, driver, *wanted)
        for _ in range(3):
            got = node.step()
            assert [place != 0 for place in got[4:6]] == [wanted[0], any(wanted[1:])]
    node = Node(package, driver, True, True, True)
    asked = spied(monkeypatch, package, "_run")
    node.step()
    assert not asked
    node.step(torch.zeros(6, 1024, dtype=torch.bfloat16))
    assert asked[0][0].dresidual is not None


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, True], [False, True, True]])
def test_routed_calls_go_the_quick_way_by_their_mask(
    launching: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, mask: list[bool]
) -> None:
    package, (dy, x, rstd, weight) = launching(), tensors()
    backward, mean = torch.ops.aten.native_layer_norm_backward, torch.zeros(6, 1)
    given = (dy, x, [1024], mean, rstd, weight, weight)
    with torch.no_grad(), routing_on_cpu(package).installed():
        for _ in range(3):
            backward(*given, [True, True, True])
        asked = spied(monkeypatch, package, "_run")
        found = backward(*given, mask)
    got = driver.launches[-1].arguments
    places = (got.dx, got.dw, got.dw + 2048)
    assert [address(one) for one in found] == [
        place if wants else 0 for place, wants in zip(places, mask, strict=True)
    ]
    assert (got.dx != 0, got.mean) == (mask[0], address(mean))
    assert bool(asked) is not mask[0]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def test_what_has_no_kernel_is_pytorchs_and_said_once(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    _, mean, rstd = torch.native_layer_norm(x, (8,), weight, weight, 1e-5)
    right = package.layer_norm_backward(x, x, mean, rstd, weight)
    monkeypatch.setattr(package, "_find", lambda given, options: "no kernel")
    package._calls._by_key.clear()
    with pytest.warns(UserWarning, match="PyTorch's own kernel"):
        found = package.layer_norm_backward(x, x, mean, rstd, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only = package.layer_norm_backward(x, x, mean, rstd, weight, need_dw=False)
    assert only[1:] == (None, None)
    torch.testing.assert_close((*found, only[0]), (*right, right[0]), atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="the formula in plain PyTorch"):
        package.layer_norm_backward(x.half(), x.half(), mean, rstd, weight)
