"""The three entry points on the CPU: autograd, torch.compile, checkpointing, DTensor, operators, routing.

The formula serves every call here, so what is tested is all that lies around the kernels.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from generator.paths import REPOSITORY
from generator.runtime.api import Package
from generator.runtime.launch.row_layout import dense
from generator.runtime.serve.options import PLAIN, Arguments, Options, add_residual, composition
from generator.runtime.serve.reference import reference_backward
from generator.runtime.spec import KernelSpec
from tests.support.entry_points import (
    aten_on_cpu,
    entry_point_1_norm,
    leaf,
    randn,
    routing_on_cpu,
    write_package,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("entry_points"))


def grads(result: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    weights = randn(*result.shape, dtype=result.dtype, seed=9)
    return list(torch.autograd.grad((result * weights).sum(), leaves))


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---- `rmsnorm_backward`: options and their compositions ------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["none", "row", "heads"])
@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
def test_formula_with_options_agrees_with_autograd(
    package: Package, offset: float, shape: str, residual: torch.dtype | None
) -> None:
    x, dy = leaf(5, 3, 16, dtype=torch.float64), randn(5, 3, 16, dtype=torch.float64, seed=1)
    sizes = {"none": None, "row": (16,), "heads": (3, 16)}[shape]
    weight = None if sizes is None else leaf(*sizes, dtype=torch.float64, seed=2)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    y = x * rstd * ((1.0 if weight is None else weight) + offset)
    y.backward(dy)
    dresidual = None if residual is None else randn(5, 3, 16, dtype=residual, seed=3)
    dx, dw, *third = package.rmsnorm_backward(
        dy, x, rstd.detach(), weight, weight_offset=offset, dresidual=dresidual
    )
    assert x.grad is not None
    wanted = x.grad if dresidual is None else x.grad + dresidual
    assert torch.allclose(dx, wanted, atol=1e-12)
    assert len(third) == (dresidual is not None)
    assert all(torch.equal(t, dx.to(residual)) for t in third)
    assert (dw is None) if weight is None else torch.allclose(dw, weight.grad, atol=1e-12)


def test_dw_goes_where_it_is_told(package: Package) -> None:
    dtype = torch.bfloat16
    dy, x, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(64, 8), (64, 8), (8,)]))
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    wide = package.rmsnorm_backward(dy, x, rstd, weight, dw_dtype=torch.float32)[1]
    assert wide is not None and wide.dtype == torch.float32
    main_grad = torch.ones(8)
    for _ in range(2):
        found = package.rmsnorm_backward(dy, x, rstd, weight, dw_out=main_grad, accumulate=True)
        assert found[1] is main_grad
    assert torch.allclose(main_grad, 1 + 2 * wide)
    plain = package.rmsnorm_backward(dy, x, rstd, weight, dw_out=main_grad)
    assert plain[1] is main_grad and torch.equal(main_grad, wide)
    nothing = package.rmsnorm_backward(dy, x, rstd, weight, need_dx=False, need_dw=False)
    assert nothing == (None, None)


def spec(offset: bool = False, residual: str = "") -> KernelSpec:
    from dataclasses import replace

    from tests.runtime.test_runtime import SPEC

    return replace(SPEC, offset=offset, residual=residual)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offset": ({}, {"weight_offset": 1.0}),
    "offset, dw in fp32": ({}, {"weight_offset": 1.0, "dw_dtype": torch.float32}),
    "offset without weight": ({"weight": None}, {"weight_offset": 1.0}),
    "offset into main_grad": (
        {"dw_out": torch.ones(16)},
        {"weight_offset": 1.0, "accumulate": True},
    ),
    "residual": ({"dresidual": randn(6, 16, dtype=torch.bfloat16, seed=5)}, {}),
    "wide residual": ({"dresidual": randn(6, 16, seed=5)}, {"weight_offset": 1.0}),
    "per head": ({"weight": randn(3, 16, dtype=torch.bfloat16, seed=6)}, {}),
    "per head, all": (
        {
            "weight": randn(3, 16, dtype=torch.bfloat16, seed=6),
            "dresidual": randn(2, 3, 16, seed=7),
            "dw_out": torch.ones(3, 16),
        },
        {"weight_offset": 1.0, "accumulate": True},
    ),
    "per head, dx only": (
        {"weight": randn(3, 16, dtype=torch.bfloat16, seed=6)},
        {"need_dw": False},
    ),
    "main_grad in bf16": (
        {"dw_out": torch.ones(16, dtype=torch.bfloat16)},
        {"accumulate": True},
    ),
    "offset and an output of the weight's dtype": (
        {"dw_out": torch.ones(16).bfloat16()},
        {"weight_offset": 1.0},
    ),
    "main_grad in a column": ({"dw_out": torch.ones(16, 2)[:, 0]}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_composition_around_a_plain_kernel_gives_what_the_formula_says(case: str) -> None:
    """A stand-in for the kernel serves what a kernel without options does and nothing more."""
    change, keywords = copy.deepcopy(CASES[case])
    heads = change.get("weight") is not None and change["weight"].dim() == 2
    shape = (2, 3, 16) if heads else (6, 16)
    x, dy = (randn(*shape, dtype=torch.bfloat16, seed=i) for i in range(2))
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    given = Arguments(
        **{"dy": dy, "x": x, "rstd": rstd, "weight": randn(16, seed=2).bfloat16(), **change}
    )
    options = Options(**keywords)
    depth = 0

    def backward(
        dy: Any,
        x: Any,
        rstd: Any,
        weight: Any = None,
        *,
        dresidual: Any = None,
        dw_out: Any = None,
        **rest: Any,
    ) -> Any:
        nonlocal depth
        depth += 1
        assert depth < 20, "a composition has to take something away"
        inner, call_options = Arguments(dy, x, rstd, weight, dresidual, dw_out), Options(**rest)
        compose = composition(inner, call_options, spec())
        if compose is not None:
            return compose(backward, inner, call_options)
        assert dresidual is None and not call_options.weight_offset
        return reference_backward(dy, x, rstd, weight, dw_out=dw_out, **rest)

    wanted_out = None if given.dw_out is None else given.dw_out.clone()
    wanted = reference_backward(
        *(dy, x, rstd, given.weight),
        dresidual=given.dresidual,
        dw_out=wanted_out,
        **vars(options),
    )
    results = backward(
        dy, x, rstd, given.weight, dresidual=given.dresidual, dw_out=given.dw_out, **vars(options)
    )
    assert len(results) == len(wanted)
    for got, expected in zip(results, wanted, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert got.dtype == expected.dtype and got.shape == expected.shape
            # Where dx is rounded before the residual is added, so is its copy in a wider dtype.
            unit = torch.finfo(x.dtype if got.shape == x.shape else got.dtype).eps
            assert torch.allclose(got.double(), expected.double(), rtol=2 * unit, atol=2 * unit)
    assert given.dw_out is None or results[1] is given.dw_out


def test_kernel_with_an_option_is_used_for_it() -> None:
    x = randn(6, 16).bfloat16()
    given = Arguments(x, x, torch.ones(6), randn(16).bfloat16(), dresidual=x)
    options = Options(weight_offset=1.0)
    assert composition(given, options, spec(offset=True, residual="bf16")) is None
    assert composition(given, options, spec(residual="bf16")) is not None
    assert composition(given, options, spec(offset=True)) is not None
    assert composition(given, options, None) is not None
    assert composition(Arguments(x, x, torch.ones(6), None), PLAIN, spec()) is None


def test_no_rows_give_an_empty_dx_and_a_dw_of_zeros(package: Package) -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    dx, dw = package.rmsnorm_backward(x, x, torch.empty(0, 1), weight)
    assert dx is not None and dx.shape == (0, 8)
    assert dw is not None and torch.equal(dw, torch.zeros(8))
    found = torch.empty(0, 8, requires_grad=True)
    package.rms_norm(found, weight).sum().backward()
    assert found.grad is not None and found.grad.shape == (0, 8)


def test_wrong_type_is_named(package: Package) -> None:
    x = randn(4, 8)
    with pytest.raises(TypeError, match=r"rstd must be a torch\.Tensor, got float"):
        package.rmsnorm_backward(x, x, 1.0, x[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got None"):
        package.rmsnorm_backward(x, None, x[:, 0])  # type: ignore[arg-type]


def test_entry_point_1_traces_into_one_operator(package: Package) -> None:
    dy, x, weight = randn(4, 8, seed=1), randn(4, 8), randn(8, seed=2)
    rstd, main_grad = torch.ones(4, 1), torch.zeros(8)

    def step(dy: Any, x: Any, rstd: Any, weight: Any, main_grad: Any) -> Any:
        dx, _, stream = package.rmsnorm_backward(
            dy, x, rstd, weight, dresidual=dy, dw_out=main_grad, accumulate=True
        )
        return dx, stream

    wanted_grad = torch.zeros(8)
    wanted = step(dy, x, rstd, weight, wanted_grad)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same(compiled(dy, x, rstd, weight, main_grad), wanted)
    assert torch.equal(main_grad, wanted_grad)


def test_gradient_of_entry_point_1_is_refused(package: Package) -> None:
    """And not left out, neither as a gradient penalty finds it nor called with leaves."""
    norm = entry_point_1_norm(package)(8)
    x, weight = leaf(4, 8), norm.weight
    for loss in (norm(x).square().sum(), norm(x).sum()):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        for asked in (x, weight):
            with pytest.raises(RuntimeError, match="of its own: differentiate rms_norm"):
                torch.autograd.grad(dx.square().sum(), asked, retain_graph=True)
        with pytest.raises(RuntimeError, match="of its own: differentiate rms_norm"):
            dx.square().sum().backward()
    dy, rstd, main_grad = randn(4, 8, seed=1), torch.ones(4, 1), torch.zeros(8)
    plain = package.rmsnorm_backward(dy, x.detach(), rstd, weight.detach(), dresidual=dy)
    dx, dw, stream = package.rmsnorm_backward(dy, x, rstd, weight, dresidual=dy, dw_out=main_grad)
    assert dw is main_grad and not main_grad.requires_grad and stream is dx
    assert same((dx.detach(), dw), plain[:2])
    for tensors in ((dy, x), (leaf(4, 8, seed=1), x.detach())):
        dx, dw = package.rmsnorm_backward(*tensors, rstd, weight)
        for result in (dx, dw):
            with pytest.raises(RuntimeError, match="differentiate rms_norm"):
                result.sum().backward()
    nothing = package.rmsnorm_backward(dy, x, rstd, weight, need_dx=False, dw_out=main_grad)
    assert nothing[0] is None and nothing[1] is main_grad and not main_grad.requires_grad


def test_call_of_which_nobody_wants_a_gradient_has_none(package: Package) -> None:
    x, rstd, weight = randn(4, 8), torch.ones(4, 1), leaf(8, seed=1)  # dw does not depend on it
    assert not any(r.requires_grad for r in package.rmsnorm_backward(x, x, rstd, weight))
    with torch.no_grad():
        results = package.rmsnorm_backward(x, leaf(4, 8), rstd, weight)
    assert not any(r.requires_grad for r in results)


# ---- `rms_norm`: autograd ----------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_function_agrees_with_pytorch(
    package: Package, dtype: torch.dtype, eps: float | None
) -> None:
    x, weight = leaf(3, 5, 16, dtype=dtype), leaf(16, dtype=dtype, seed=1)
    y = package.rms_norm(x, weight, eps)
    with aten_on_cpu():
        wanted = functional.rms_norm(x, (16,), weight, eps)
        wanted_grads = grads(wanted, x, weight)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.allclose(y, wanted, rtol=tolerance, atol=tolerance)
    for got, expected in zip(grads(y, x, weight), wanted_grads, strict=True):
        assert torch.allclose(got, expected, rtol=tolerance, atol=16 * tolerance)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_residual_stream_gets_both_gradients(
    package: Package, residual_dtype: torch.dtype, how: str
) -> None:
    x, residual = leaf(4, 16, dtype=torch.bfloat16), leaf(4, 16, dtype=residual_dtype, seed=1)
    weight = leaf(16, dtype=torch.bfloat16, seed=2)
    rms_norm: Any = package.rms_norm
    if how == "compiled":
        rms_norm = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    y, stream = rms_norm(x, weight, 1e-6, weight_offset=1.0, residual=residual)
    assert (y.dtype, stream.dtype) == (torch.bfloat16, residual_dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    h = wide[0] + wide[1]
    wanted = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * (wide[2] + 1)
    wanted_grads = grads(torch.cat([wanted, h]), *wide)
    found = grads(torch.cat([y, stream]).double(), x, residual, weight)
    for got, expected, given in zip(found, wanted_grads, (x, residual, weight), strict=True):
        assert got.dtype == given.dtype
        assert (got.double() - expected).norm() / expected.norm() < 2**-6


def test_unused_results_of_the_residual_form(package: Package) -> None:
    x, residual, weight = leaf(4, 8), leaf(4, 8, seed=1), leaf(8, seed=2)
    y, stream = package.rms_norm(x, weight, residual=residual)
    dx, dresidual = grads(stream, x, residual)
    assert torch.equal(dx, dresidual)
    y, stream = package.rms_norm(x, weight, residual=residual)
    only_y = grads(y, x, residual, weight)
    assert torch.equal(only_y[0], only_y[1])


@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_only_the_gradients_that_are_asked_for_are_computed(
    package: Package, wants: tuple[bool, bool], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = (
        randn(*shape, seed=i).requires_grad_(want)
        for i, (shape, want) in enumerate(zip([(4, 8), (8,)], wants, strict=True))
    )
    rms_norm: Any = package.rms_norm
    if how == "compiled":
        rms_norm = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    y = rms_norm(x, weight)
    assert y.requires_grad == any(wants)
    if any(wants):
        y.sum().backward()
    assert [t.grad is not None for t in (x, weight)] == list(wants)


def test_expanded_gradient_is_not_wrong(package: Package) -> None:
    x, weight = leaf(4, 8), leaf(8, seed=1)
    y = package.rms_norm(x, weight)
    summed = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    assert same(summed, torch.autograd.grad(y, (x, weight), torch.ones(4, 8)))


@pytest.mark.parametrize("how", ["eager", "operator", "residual"])
def test_second_derivatives_are_served(package: Package, how: str) -> None:
    x, weight = leaf(3, 6, dtype=torch.float64), leaf(6, dtype=torch.float64, seed=1)
    if how == "residual":
        residual = leaf(3, 6, dtype=torch.float64, seed=2)

        def add(x: Any, weight: Any, residual: Any) -> Any:
            return package.rms_norm(x, weight, 1e-5, residual=residual)

        assert torch.autograd.gradgradcheck(add, (x, weight, residual))
        return

    def norm(x: Any, weight: Any) -> Any:
        if how == "operator":
            return package.ops.rms_norm(x, weight, 1e-5, 1.0)[0]
        return package.rms_norm(x, weight, 1e-5, weight_offset=1.0)

    assert torch.autograd.gradcheck(norm, (x, weight))
    assert torch.autograd.gradgradcheck(norm, (x, weight))


def test_backward_operator_refuses_to_be_differentiated(package: Package) -> None:
    x, weight = leaf(3, 6), leaf(6, seed=1)
    dx = package.ops.rms_norm_backward(x, x, torch.ones(3), weight, None, 0.0, True, True, None)[0]
    with pytest.raises(RuntimeError, match="differentiate rms_norm"):
        dx.sum().backward()


def test_per_head_weight(package: Package) -> None:
    x, weight = leaf(2, 5, 3, 16), leaf(3, 16, seed=1)
    y = package.rms_norm(x, weight, 1e-6)
    heads = [package.rms_norm(x[:, :, h], weight[h], 1e-6) for h in range(3)]
    assert torch.allclose(y, torch.stack(heads, 2))
    both = grads(y, x, weight), grads(torch.stack(heads, 2), x, weight)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*both, strict=True))
    with pytest.raises(ValueError, match=r"\(16,\) or \(3, 16\), got \(2, 16\)"):
        package.rms_norm(x, weight[:2])


def test_wide_weight_keeps_the_dtype_of_the_rows(package: Package) -> None:
    x, weight = leaf(4, 8, dtype=torch.bfloat16), leaf(8, seed=1)
    y = package.rms_norm(x, weight)
    assert y.dtype == torch.bfloat16
    dx, dw = grads(y, x, weight)
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    narrow = leaf(8, dtype=torch.bfloat16, seed=1)
    assert grads(package.rms_norm(leaf(4, 8), narrow), narrow)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_missing_eps_is_pytorchs(package: Package, dtype: torch.dtype) -> None:
    """Of fp32 for narrower rows too. The rows are so small that it shows."""
    x = (1e-3 * randn(4, 64)).to(dtype)
    assert torch.equal(package.rms_norm(x), functional.rms_norm(x, (64,)))


# ---- `rms_norm`: the module --------------------------------------------------------------------------


def test_module_takes_the_place_of_pytorchs(package: Package) -> None:
    theirs = torch.nn.RMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    mine = package.RMSNorm(16, eps=1e-5)
    mine.load_state_dict(theirs.state_dict())
    assert isinstance(mine, torch.nn.RMSNorm)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    x = randn(3, 16)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    assert "weight_offset" not in repr(mine)
    again = copy.deepcopy(mine)
    assert torch.equal(again(x), mine(x))


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("affine", [True, False])
def test_module_normalises_over_its_shape(
    package: Package, shape: tuple[int, ...], affine: bool
) -> None:
    mine = package.RMSNorm(shape, 1e-5, elementwise_affine=affine)
    theirs = torch.nn.RMSNorm(shape, 1e-5, elementwise_affine=affine)
    x = leaf(5, 3, 16)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    y, stream = mine(x, x.detach())
    assert torch.allclose(stream, 2 * x)
    assert y.shape == x.shape


def test_module_with_an_offset_starts_as_the_identity(package: Package) -> None:
    gemma = package.RMSNorm(16, weight_offset=1.0)
    assert torch.equal(gemma.weight, torch.zeros(16))
    x = randn(3, 16)
    assert torch.allclose(gemma(x), torch.nn.RMSNorm(16)(x), atol=1e-6)
    assert "weight_offset=1.0" in repr(gemma)


# ---- `rms_norm`: what watches operators --------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_step_has_the_bits_of_the_eager_one(package: Package, dynamic: bool) -> None:
    x, weight = leaf(4, 16, dtype=torch.bfloat16), leaf(16, dtype=torch.bfloat16, seed=1)

    def step(x: Any, weight: Any) -> Any:
        return package.rms_norm(x, weight, 1e-6, weight_offset=1.0)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert same(grads(compiled(x, weight), x, weight), grads(step(x, weight), x, weight))
    longer = leaf(7, 16, dtype=torch.bfloat16, seed=3)
    assert torch.equal(compiled(longer, weight), step(longer, weight))


def test_inductor_runs_the_operator(package: Package) -> None:
    """The one test here that compiles code."""
    norm = package.RMSNorm(16)
    x = leaf(4, 16)
    compiled = torch.compile(norm, fullgraph=True)
    assert same(grads(compiled(x), x, norm.weight), grads(norm(x), x, norm.weight))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(package: Package, reentrant: bool) -> None:
    x, weight = leaf(4, 16), leaf(16, seed=1)

    def block(x: Any) -> Any:
        return torch.tanh(package.rms_norm(x, weight))

    again = checkpoint(block, x, use_reentrant=reentrant)
    loss, wanted = again.square().sum(), block(x).square().sum()
    loss.backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    wanted.backward()
    assert same(found, [x.grad, weight.grad])


def test_selective_checkpointing_sees_the_operator(package: Package) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        seen.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    x, weight = leaf(4, 16), leaf(16, seed=1)
    y = checkpoint(
        lambda x: package.rms_norm(x, weight) * 2,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert same(grads(y, x, weight), grads(package.rms_norm(x, weight) * 2, x, weight))
    assert package.ops.rms_norm in seen


def test_operators_pass_opcheck(package: Package) -> None:
    x, residual, weight = leaf(4, 6, 16), leaf(4, 6, 16, seed=1), leaf(16, seed=2)
    dy, plain, rstd = randn(4, 6, 16, seed=3), x.detach(), torch.rand(4, 6, 1)
    check = torch.library.opcheck
    check(package.ops.rms_norm, (x, weight, None, 0.0))
    check(package.ops.rms_norm, (x, None, 1e-5, 1.0))
    check(package.ops.add_rms_norm, (x, residual.bfloat16(), weight, 1e-5, 1.0))
    backward = package.ops.rms_norm_backward
    check(backward, (dy, plain, rstd, weight.detach(), None, 0.0, True, True, None))
    check(backward, (dy, plain, rstd, weight.detach(), dy.double(), 1.0, True, False, None))
    check(backward, (dy, plain, rstd, None, None, 0.0, False, False, None))
    heads = torch.rand(6, 16)
    check(backward, (dy, plain, rstd, heads, None, 0.0, True, True, None))
    narrow = [t.bfloat16() for t in (dy, plain)]
    check(backward, (*narrow, rstd, heads.bfloat16(), None, 1.0, True, True, torch.float32))
    check(package.ops.rms_norm, (x, leaf(6, 16, seed=4), None, 0.0))


def test_fake_tensors_never_reach_a_kernel(package: Package) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(4, 16, device="cuda"), torch.empty(16, device="cuda")
        y = package.rms_norm(x, weight)
        dx, dw = package.rmsnorm_backward(y, x, torch.empty(4, 1, device="cuda"), weight)
        assert (y.device.type, y.shape) == ("cuda", (4, 16))
        assert dx is not None and dw is not None
        assert (dx.shape, dw.shape, dw.device.type) == ((4, 16), (16,), "cuda")
    meta = package.rms_norm(torch.empty(4, 16, device="meta"), None)
    assert meta.device.type == "meta"


def test_functional_gradients(package: Package) -> None:
    x, weight = randn(4, 16), randn(16, seed=1)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(x, weight).square().sum()

    dx, dw = torch.func.grad(loss, (0, 1))(x, weight)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip((dx, dw), wanted, strict=True))
    each = torch.func.vmap(package.rms_norm, (0, None))(x.view(2, 2, 16), weight)
    assert torch.allclose(each, package.rms_norm(x.view(2, 2, 16), weight), atol=1e-6)


def test_inference_and_autocast(package: Package) -> None:
    x, weight = randn(4, 16, dtype=torch.bfloat16), torch.nn.Parameter(randn(16, seed=1))
    with torch.inference_mode():
        y = package.rms_norm(x, weight)
    assert y.is_inference() and not y.requires_grad
    with torch.autocast("cpu", torch.float16):
        assert package.rms_norm(x, weight).dtype == torch.bfloat16
    with torch.no_grad():
        assert not package.rms_norm(x, weight).requires_grad


def test_two_packages_have_operators_of_their_own(tmp_path: Path) -> None:
    packages = [write_package(tmp_path / name) for name in ("one", "two")]
    names = {package.ops.namespace for package in packages}
    assert len(names) == 2
    assert all(name.startswith("normforge_") for name in names)


def test_namespace_changes_with_the_tables(tmp_path: Path) -> None:
    first = write_package(tmp_path / "a")
    (tmp_path / "b").mkdir()
    table = (tmp_path / "a" / "table.json").read_text()
    (tmp_path / "b" / "table.json").write_text(table.replace("no GPU", "another"))
    other = Package(tmp_path / "b")
    assert first.ops.namespace.split("_")[1] != other.ops.namespace.split("_")[1]


def test_forked_child_works_after_import(package: Package) -> None:
    import multiprocessing

    def work(queue: Any) -> None:
        torch.set_num_threads(1)
        x = leaf(2, 8)
        package.rms_norm(x).sum().backward()
        queue.put(x.grad is not None)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    assert queue.get(timeout=60)
    child.join()


# ---- DTensor -------------------------------------------------------------------------------------

DTENSOR = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.support.entry_points import write_package

package = write_package(Path({folder!r}))  # before DTensor is imported
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
local, scale = torch.randn(2, 3, 4, 16), torch.randn(16)
x = DTensor.from_local(local, mesh, [Shard(1)]).requires_grad_()
weight = DTensor.from_local(scale, mesh, [Replicate()]).requires_grad_()
y = package.rms_norm(x, weight)
assert y.placements == (Shard(1),), y.placements
assert torch.equal(y.to_local(), package.rms_norm(local, scale))
dy = torch.randn(2, 3, 4, 16)
y.backward(DTensor.from_local(dy, mesh, [Shard(1)]))
rstd = package.ops.rms_norm(local, scale, None, 0.0)[1]
dx, dw = package.rmsnorm_backward(dy, local, rstd, scale)
assert x.grad.placements == (Shard(1),) and torch.equal(x.grad.to_local(), dx)
assert weight.grad.placements == (Partial("sum"),), weight.grad.placements
assert torch.equal(weight.grad.to_local(), dw)

heads = DTensor.from_local(torch.randn(2, 3, 2, 16), mesh, [Shard(2)])
per_head = DTensor.from_local(torch.randn(2, 16), mesh, [Shard(0)]).requires_grad_()
y, stream = package.rms_norm(heads, per_head, residual=heads)
assert y.placements == stream.placements == (Shard(2),)
y.sum().backward()
assert per_head.grad.placements == (Shard(0),), per_head.grad.placements

split = DTensor.from_local(torch.randn(2, 8), mesh, [Shard(1)])  # columns: gathered first
assert package.rms_norm(split).placements == (Replicate(),)

step = torch.compile(package.rms_norm, backend="aot_eager", fullgraph=True)
x.grad = weight.grad = None
step(x, weight).backward(DTensor.from_local(dy, mesh, [Shard(1)]))
assert torch.equal(x.grad.to_local(), dx)
assert weight.grad.placements == (Partial("sum"),)
print("done")
"""


def runs_to_its_end(script: str, folder: Path) -> None:
    """In a process of its own."""
    root = str(REPOSITORY)
    script = script.format(root=root, folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]


def test_dtensor_shards_rows_and_leaves_dw_partial(tmp_path: Path) -> None:
    runs_to_its_end(DTENSOR, tmp_path)


DTENSOR_LATE = """
import sys
sys.path.insert(0, "{root}")
from pathlib import Path
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.support.entry_points import write_package

package = write_package(Path("{folder}") / "package")
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
dy, x, rstd, weight = (torch.randn(n) for n in ((4, 8), (4, 8), (4, 1), (8,)))
rows = [DTensor.from_local(t, mesh, [Shard(0)]) for t in (dy, x, rstd)]
everywhere = DTensor.from_local(weight, mesh, [Replicate()])
dx, dw = package.rmsnorm_backward(*rows, everywhere)
assert (dx.placements, dw.placements) == ((Shard(0),), (Partial("sum"),))
wanted = package.rmsnorm_backward(dy, x, rstd, weight)
assert torch.equal(dx.to_local(), wanted[0]) and torch.equal(dw.to_local(), wanted[1])
print("done")
"""


def test_dtensor_may_be_imported_after_the_package(tmp_path: Path) -> None:
    runs_to_its_end(DTENSOR_LATE, tmp_path)


# ---- `install()` --------------------------------------------------------------------------------------


@pytest.fixture
def aten() -> Iterator[list[str]]:
    """PyTorch's operators on the CPU; the calls that reached them."""
    calls: list[str] = []
    with aten_on_cpu(calls):
        yield calls


def train_once(norm: torch.nn.Module) -> list[torch.Tensor]:
    x = leaf(4, 16)
    return grads(norm(x), x, norm.weight)


def test_existing_model_is_routed_while_installed_only(package: Package, aten: list[str]) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)
    wanted = train_once(norm)
    assert aten == ["forward", "backward"]
    entry_point.install()
    entry_point.install()  # idempotent
    assert same(train_once(norm), wanted)
    assert aten == ["forward", "backward", "forward"]
    entry_point.uninstall()
    train_once(norm)
    assert aten[-1] == "backward"
    entry_point.uninstall()


def test_blocks_nest_and_restore_what_was(package: Package, aten: list[str]) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)

    def routed() -> bool:
        before = aten.count("backward")
        train_once(norm)
        return aten.count("backward") == before

    with entry_point.installed():
        with entry_point.installed():
            assert routed()
        assert routed()
        entry_point.uninstall()  # takes effect when the block ends
        assert routed()
    assert not routed()
    entry_point.install()
    with pytest.raises(ZeroDivisionError), entry_point.installed():
        raise ZeroDivisionError
    assert routed()
    entry_point.uninstall()
    assert not routed()


def test_threads_may_install_and_uninstall(package: Package, aten: list[str]) -> None:
    entry_point, norm, errors = routing_on_cpu(package), torch.nn.RMSNorm(16), []

    def work() -> None:
        try:
            for _ in range(10):
                with entry_point.installed():
                    train_once(norm)
        except Exception as error:  # shown below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert "backward" not in aten
    train_once(norm)
    assert aten[-1] == "backward"


def test_second_package_is_refused_while_one_is_installed(
    package: Package, aten: list[str], tmp_path: Path
) -> None:
    one, two = routing_on_cpu(package), routing_on_cpu(write_package(tmp_path))
    with one.installed(), pytest.raises(RuntimeError, match="uninstall it first"):
        two.install()
    with two.installed():
        pass


def test_what_was_not_tuned_goes_to_the_kernel_that_was_there(
    package: Package, aten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, entry_point = torch.nn.RMSNorm(16), routing_on_cpu(package)
    monkeypatch.setattr(package, "_routed", {})
    monkeypatch.setattr(package, "_warned", set())
    monkeypatch.setattr(package, "_find", lambda given, options: "nothing was tuned")
    with entry_point.installed():
        with pytest.warns(UserWarning, match="nothing was tuned; using PyTorch's own kernel"):
            train_once(norm)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_once(norm)
            package._routed.clear()
            train_once(norm)  # the same reason
            train_once(torch.nn.RMSNorm((4, 16)))  # what no package is asked for
    assert aten.count("backward") == 4


def test_import_and_construction_change_nothing(package: Package, aten: list[str]) -> None:
    train_once(torch.nn.RMSNorm(16))
    assert aten == ["forward", "backward"]


def test_routing_serves_second_derivatives_by_pytorch(package: Package, aten: list[str]) -> None:
    x, weight = leaf(3, 6, dtype=torch.float64), leaf(6, dtype=torch.float64, seed=1)

    def penalty(y: torch.Tensor) -> list[torch.Tensor]:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), (x, weight)))

    with routing_on_cpu(package).installed():
        found = penalty(functional.rms_norm(x, (6,), weight, 1e-5))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    for one, wanted in zip(found, penalty(x * rstd * weight), strict=True):
        torch.testing.assert_close(one, wanted)


# ---- Fallbacks -----------------------------------------------------------------------------------


def test_reasons_are_warned_about_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rstd, weight = randn(4, 16), torch.ones(4, 1), torch.ones(16)
    monkeypatch.setattr(package, "_calls", {})
    monkeypatch.setattr(package, "_warned", set())
    monkeypatch.setattr(package, "_find", lambda given, options: "there is no kernel here")
    with aten_on_cpu():
        with pytest.warns(UserWarning, match="no kernel here; using PyTorch's own") as caught:
            dx, dw = package.rmsnorm_backward(x, x, rstd, weight)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            package.rmsnorm_backward(x[:2], x[:2], rstd[:2], weight)
    assert same((dx, dw), reference_backward(x, x, rstd, weight))
    with pytest.warns(UserWarning, match="using the formula in plain PyTorch"):
        package.rmsnorm_backward(x.bfloat16(), x.bfloat16(), rstd, weight)


# ---- Where a call must not go by the quick way ---------------------------------------------------


def test_dtype_without_kernels_gets_every_option_from_the_formula(package: Package) -> None:
    """PyTorch's fused kernel knows none of them."""
    x = torch.randn(6, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)
    given = Arguments(x, x, torch.ones(6, dtype=torch.float64), weight, x)
    options = Options(weight_offset=1.0)
    with pytest.warns(UserWarning, match="formula"):
        call = package._fallback("no kernel for float64", given, options)
    found = call(*vars(given).values())
    wanted = reference_backward(x, x, given.rstd, weight, weight_offset=1.0, dresidual=x)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_copy_for_a_kernel_is_aligned() -> None:
    whole = torch.zeros(1 + 4 * 8, dtype=torch.bfloat16)
    for rows in (whole[1:].view(4, 8), whole[1:9].expand(4, 8)):
        assert rows.data_ptr() % 32
        assert dense(rows).data_ptr() % 32 == 0
        assert torch.equal(dense(rows), rows)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_composed_residual_is_added_in_fp32_and_rounded_once(
    package: Package, dtype: torch.dtype, wide: torch.dtype
) -> None:
    dx, dresidual = randn(33, 40, dtype=dtype), randn(33, 40, dtype=wide, seed=1)
    given = Arguments(dx, dx, torch.ones(33), torch.ones(40), dresidual)
    found = add_residual(lambda *_, **__: (dx.clone(), None), given, PLAIN)
    total = dx.float() + dresidual.float()
    assert found[0] is not None and torch.equal(found[0], total.to(dtype))
    assert found[2] is not None and torch.equal(found[2], total.to(wide))


def test_composed_call_returns_nothing_that_requires_grad(package: Package) -> None:
    x = torch.randn(6, 8)
    dresidual = torch.randn(6, 8, requires_grad=True)
    call = package._composed(add_residual, PLAIN)
    dx, _, _ = call(x, x, torch.ones(6), torch.ones(8), dresidual, None)
    assert not dx.requires_grad


class Late(torch.Tensor):
    """A subclass, as the result of a collective that has not arrived is one."""


@pytest.mark.parametrize("residual", [False, True])
def test_gradient_of_another_kind_goes_through_the_operator(
    package: Package, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read its address."""
    kinds: list[type] = []
    run = Package._run

    def watched(self: Package, given: Arguments, options: Options) -> Any:
        kinds.extend(type(t) for t in vars(given).values() if t is not None)
        return run(self, given, options)

    monkeypatch.setattr(Package, "_run", watched)
    x = torch.randn(6, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    y = package.rms_norm(x, weight, residual=torch.zeros(6, 8) if residual else None)
    y = y[0] if residual else y
    torch.autograd.grad(y, (x, weight), torch.ones(6, 8).as_subclass(Late))
    assert Late not in kinds


def test_no_heads_are_served(package: Package) -> None:
    x = torch.randn(3, 0, 8, requires_grad=True)
    weight = torch.zeros(0, 8, requires_grad=True)
    y = package.rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape
    assert dw.shape == weight.shape
