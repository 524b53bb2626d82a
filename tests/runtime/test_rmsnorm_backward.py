"""`rmsnorm_backward` on the CPU: its options and their compositions, tracing, gradients; and the
formula, which serves every call here: what is tested is all that lies around the kernels."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from normforge.api import Package
from normforge.launch.row_layout import dense
from normforge.serve.call import aten_call
from normforge.serve.options import PLAIN, Arguments, Options, add_residual, composition
from normforge.serve.reference import reference_backward
from normforge.serve.warn_once import WarnOnce
from normforge.spec import KernelSpec
from tests.support.entry_points import (
    aten_on_cpu,
    function_norm,
    leaf,
    randn,
    same,
    spied,
    write_package,
)
from tests.support.fake_driver import SPEC, tensors


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
    return replace(SPEC, offset=offset, residual=residual)


HEADS, SHIFTED = randn(3, 16, dtype=torch.bfloat16, seed=6), {"weight_offset": 1.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "offset": ({}, SHIFTED),
    "offset, dw in fp32": ({}, SHIFTED | {"dw_dtype": torch.float32}),
    "offset without weight": ({"weight": None}, SHIFTED),
    "offset into main_grad": ({"dw_out": torch.ones(16)}, SHIFTED | {"accumulate": True}),
    "residual": ({"dresidual": randn(6, 16, dtype=torch.bfloat16, seed=5)}, {}),
    "wide residual": ({"dresidual": randn(6, 16, seed=5)}, SHIFTED),
    "per head": ({"weight": HEADS}, {}),
    "per head, all": (
        {"weight": HEADS, "dresidual": randn(2, 3, 16, seed=7), "dw_out": torch.ones(3, 16)},
        SHIFTED | {"accumulate": True},
    ),
    "per head, dx only": ({"weight": HEADS}, {"need_dw": False}),
    "main_grad in bf16": ({"dw_out": torch.ones(16).bfloat16()}, {"accumulate": True}),
    "offset and an output of the weight's dtype": ({"dw_out": torch.ones(16).bfloat16()}, SHIFTED),
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

    def backward(inner: Arguments, call_options: Options) -> Any:
        nonlocal depth
        depth += 1
        assert depth < 20, "a composition has to take something away"
        compose = composition(inner, call_options, spec())
        if compose is not None:
            return compose(backward, inner, call_options)
        assert inner.dresidual is None and not call_options.weight_offset
        return reference_backward(**vars(inner), **vars(call_options))

    wanted_out = None if given.dw_out is None else given.dw_out.clone()
    wanted = reference_backward(**vars(replace(given, dw_out=wanted_out)), **vars(options))
    results = backward(given, options)
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
    assert dx.shape == (0, 8) and torch.equal(dw, torch.zeros(8))
    found = torch.empty(0, 8, requires_grad=True)
    package.rms_norm(found, weight).sum().backward()
    assert found.grad.shape == (0, 8)


def test_wrong_type_is_named(package: Package) -> None:
    x = randn(4, 8)
    with pytest.raises(TypeError, match=r"rstd must be a torch\.Tensor, got float"):
        package.rmsnorm_backward(x, x, 1.0, x[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got None"):
        package.rmsnorm_backward(x, None, x[:, 0])  # type: ignore[arg-type]


def test_backward_traces_into_one_operator(package: Package) -> None:
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


def test_gradient_of_the_backward_is_refused(package: Package) -> None:
    """It is not left out, neither as a gradient penalty finds it nor called with leaves."""
    norm = function_norm(package)(8)
    x, weight = leaf(4, 8), norm.weight
    for loss in (norm(x).square().sum(), norm(x).sum()):
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        for asked in (x, weight):
            with pytest.raises(RuntimeError, match="of its own: differentiate the norm"):
                torch.autograd.grad(dx.square().sum(), asked, retain_graph=True)
        with pytest.raises(RuntimeError, match="of its own: differentiate the norm"):
            dx.square().sum().backward()
    dy, rstd, main_grad = randn(4, 8, seed=1), torch.ones(4, 1), torch.zeros(8)
    plain = package.rmsnorm_backward(dy, x.detach(), rstd, weight.detach(), dresidual=dy)
    dx, dw, stream = package.rmsnorm_backward(dy, x, rstd, weight, dresidual=dy, dw_out=main_grad)
    assert dw is main_grad and not main_grad.requires_grad and stream is dx
    assert same((dx.detach(), dw), plain[:2])
    for wanting in ((dy, x), (leaf(4, 8, seed=1), x.detach())):
        dx, dw = package.rmsnorm_backward(*wanting, rstd, weight)
        for result in (dx, dw):
            with pytest.raises(RuntimeError, match="differentiate the norm"):
                result.sum().backward()
    rows = x.detach()
    kept = leaf(4, 8, seed=1)
    dx = package.rmsnorm_backward(rows, rows, rstd, weight.detach(), dresidual=kept)[0]
    with pytest.raises(RuntimeError, match="differentiate the norm"):
        dx.sum().backward()
    nothing = package.rmsnorm_backward(dy, x, rstd, weight, need_dx=False, dw_out=main_grad)
    assert nothing[0] is None and nothing[1] is main_grad and not main_grad.requires_grad


def test_call_of_which_nobody_wants_a_gradient_has_none(package: Package) -> None:
    x, rstd, weight = randn(4, 8), torch.ones(4, 1), leaf(8, seed=1)  # dw does not depend on it
    assert not any(r.requires_grad for r in package.rmsnorm_backward(x, x, rstd, weight))
    with torch.no_grad():
        results = package.rmsnorm_backward(x, leaf(4, 8), rstd, weight)
    assert not any(r.requires_grad for r in results)


def test_reasons_are_warned_about_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rstd, weight = randn(4, 16), torch.ones(4, 1), torch.ones(16)
    monkeypatch.setattr(package, "warn", WarnOnce())
    monkeypatch.setattr(package, "_find", lambda given, options: "there is no kernel here")
    with aten_on_cpu():
        for _ in range(2):  # said as often as the program makes an error of it
            with warnings.catch_warnings(), pytest.raises(UserWarning, match="no kernel here"):
                warnings.simplefilter("error")
                package.rmsnorm_backward(x, x, rstd, weight)
        with pytest.warns(UserWarning, match="no kernel here; using PyTorch's own") as caught:
            dx, dw = package.rmsnorm_backward(x, x, rstd, weight)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            package.rmsnorm_backward(x[:2], x[:2], rstd[:2], weight)
        monkeypatch.setattr(package, "_find", lambda given, options: "another reason")
        with pytest.warns(UserWarning, match="another reason; using PyTorch's own"):
            package.rmsnorm_backward(x, x, rstd, weight)
    assert same((dx, dw), reference_backward(x, x, rstd, weight))
    with pytest.warns(UserWarning, match="using the formula in plain PyTorch"):
        package.rmsnorm_backward(x.bfloat16(), x.bfloat16(), rstd, weight)


@pytest.mark.parametrize("package", ["torch", "torch.autograd", "torchtitan.models"])
def test_warnings_name_a_line_of_the_program_and_none_of_pytorch(package: str) -> None:
    code = compile("def call(function): function('a sentence')", "between.py", "exec")
    between: dict[str, Any] = {"__package__": package}
    exec(code, between)
    with pytest.warns(UserWarning, match="a sentence") as caught:
        between["call"](WarnOnce())
    ours = package == "torchtitan.models"
    assert caught[0].filename == ("between.py" if ours else __file__)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": True}, "accumulate=True adds to dw_out"),
        ({"dw_out": torch.zeros(3, 16)}, "dw_out must have the weight's shape"),
        ({"dw_out": torch.zeros(16), "dw_dtype": torch.bfloat16}, "dw_"),
        ({"dresidual": torch.zeros(4, 16), "need_dx": False}, "need_dx must be True"),
    ],
)
def test_options_are_checked_where_the_operator_serves_too(
    package: Package, options: dict[str, Any], says: str
) -> None:
    x, rstd, weight = randn(4, 16), torch.ones(4, 1), torch.ones(16)
    with FlopCounterMode(display=False), pytest.raises((TypeError, ValueError), match=says):
        package.rmsnorm_backward(x, x, rstd, weight, **options)


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
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("weight_dtype", "options", "by"),
    [
        (torch.bfloat16, {}, "PyTorch's own kernel"),
        (torch.bfloat16, {"dw_dtype": torch.float32, "need_dw": False}, "PyTorch's own kernel"),
        (torch.bfloat16, {"dw_dtype": torch.float32}, "the formula"),
        (torch.float32, {}, "the formula"),
    ],
)
def test_what_has_no_kernel_is_pytorchs_where_that_gives_the_same(
    package: Package, weight_dtype: torch.dtype, options: dict[str, Any], by: str
) -> None:
    x, rstd = torch.empty(6, 8, dtype=torch.bfloat16, device="meta"), torch.ones(6, device="meta")
    given = Arguments(x, x, rstd, torch.empty(8, dtype=weight_dtype, device="meta"))
    with pytest.warns(UserWarning, match=by):
        call = package._fallback(f"no {weight_dtype}, {options}", given, Options(**options))
    found = call(*vars(given).values())
    wanted = reference_backward(**vars(given), **options)
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


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
    assert torch.equal(found[0], total.to(dtype)) and torch.equal(found[2], total.to(wide))


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
    """The operator unwraps it; a kernel would read its address."""
    seen = spied(monkeypatch, package.ops, "backward", lambda given, _: type(given.dy))
    for name in ("run", "_quick"):
        fail = lambda *_: pytest.fail("a node served it by itself")  # noqa: E731
        monkeypatch.setattr(package._norm, name, fail)
    x = torch.randn(6, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    y = package.rms_norm(x, weight, residual=torch.zeros(6, 8) if residual else None)
    y = y[0] if residual else y
    torch.autograd.grad(y, (x, weight), torch.ones(6, 8).as_subclass(Late))
    assert seen == [Late]


def test_no_heads_are_served(package: Package) -> None:
    x = torch.randn(3, 0, 8, requires_grad=True)
    weight = torch.zeros(0, 8, requires_grad=True)
    y = package.rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape
    assert dw.shape == weight.shape


# ---- The formula, and a kernel of PyTorch --------------------------------------------------------


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        *((dtype, None) for dtype in DTYPES),
        *((dtype, torch.float32) for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_formula_agrees_with_autograd_in_float64(dtype: torch.dtype, weight: Any) -> None:
    dy, x, rstd, scale = tensors(64, 96, dtype, weight)
    dx, dw = reference_backward(dy, x, rstd, scale)
    wide = [t.double().requires_grad_() for t in (x, scale)]
    y = torch.nn.functional.rms_norm(wide[0], (96,), wide[1], eps=1e-6)
    y.backward(dy.double())
    assert (dx.dtype, dw.dtype) == (x.dtype, scale.dtype)
    for got, of in ((dx, wide[0]), (dw, wide[1])):
        # One rounding to the output's dtype, and fp32 in the middle (rstd is fp32 throughout).
        bound = 2e-6 + torch.finfo(got.dtype).eps
        error = (got.double() - of.grad).abs() / (1 + of.grad.abs())
        assert error.max() < bound


def test_aten_gets_the_arguments_of_its_schema() -> None:
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this PyTorch has no aten::_fused_rms_norm_backward")
    seen = []

    def kernel(dy: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        seen.append((list(shape), tuple(rstd.shape), list(mask)))
        return reference_backward(dy, x, rstd, weight)

    dy, x, rstd, weight = tensors(6, 8)
    given = (dy.view(2, 3, 8), x.view(2, 3, 8), rstd.flatten())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", kernel, "CPU")
        dx, dw = aten_call(PLAIN)(*given, weight)
        assert aten_call(Options(need_dw=False))(*given, weight)[1] is None
        assert aten_call(PLAIN)(*given, None)[1] is None
    assert seen[0] == ([8], (2, 3, 1), [True, True])
    assert [mask for _, _, mask in seen[1:]] == [[True, False]] * 2
    assert (dx.shape, dw.shape) == ((2, 3, 8), (8,))


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_of_tiny_rows_is_finite(tmp_path: Path, create_graph: bool) -> None:
    """The square of rstd overflows there. Kernels multiply by it: docs/adopting.md."""
    package = write_package(tmp_path)
    x, weight = (randn(4, 64) * 1e-20).requires_grad_(), randn(64, seed=1)
    dy = randn(4, 64, seed=2)
    (dx,) = torch.autograd.grad(package.rms_norm(x, weight, 0.0), x, dy, create_graph=create_graph)
    wide = x.detach().double().requires_grad_()
    y = torch.nn.functional.rms_norm(wide, (64,), weight.double(), 0.0)
    (wanted,) = torch.autograd.grad(y, wide, dy.double())
    assert wanted.abs().max() > 1e19
    assert torch.allclose(dx.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
