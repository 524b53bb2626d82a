"""Options of RMSNorm: an eps that is no float, and weights of other dtypes; a bias, which PyTorch
adds; results in other dtypes, rounded once."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge.layernorm as layernorm
from generator.paths import GENERATED
from normforge.api import Package
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.torch_internals import float_of
from tests.support.entry_points import grads, leaf, randn, same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMBERS = [np.float32(1e-2), np.float64(1e-2), torch.tensor(1e-2), np.array(1e-2), 1]


def norms(package: Package, eps: Any) -> dict[str, Any]:
    weight = randn(16, seed=1)
    return {
        "rms_norm": lambda x: package.rms_norm(x, weight, eps),
        "RMSNorm": package.RMSNorm(16, eps=eps),
        "rmsnorm_forward": lambda x: package.rmsnorm_forward(x, weight, eps)[0],
        "layer_norm": lambda x: layernorm.layer_norm(x, weight, None, eps),
    }


@pytest.mark.parametrize("eps", NUMBERS, ids=lambda eps: type(eps).__name__)
@pytest.mark.parametrize("name", ["rms_norm", "RMSNorm", "rmsnorm_forward", "layer_norm"])
def test_an_eps_is_any_number(package: Package, name: str, eps: Any) -> None:
    torch.compiler.reset()
    x = leaf(4, 16)
    plain, norm = norms(package, float(eps))[name], norms(package, eps)[name]
    wanted = [plain(x), *grads(plain(x), x)]
    for run in (norm, torch.compile(norm, backend="aot_eager")):
        assert all(map(torch.equal, [run(x), *grads(run(x), x)], wanted))


@pytest.mark.parametrize("eps", NUMBERS, ids=lambda eps: type(eps).__name__)
def test_an_eps_becomes_a_number_of_python(eps: Any) -> None:
    """One of NumPy that is derived from float does, too: some versions of Dynamo make a tensor of
    it."""
    assert type(float_of(eps)) in (float, int)
    assert float_of(eps) == eps


@pytest.mark.parametrize("name", ["rms_norm", "RMSNorm", "rmsnorm_forward", "layer_norm"])
def test_an_eps_that_is_no_number_is_refused(package: Package, name: str) -> None:
    with pytest.raises(TypeError, match="eps must be a number or None, got str: '1e-6'"):
        norms(package, "1e-6")[name](leaf(4, 16))


@pytest.mark.parametrize("eps", [torch.tensor(1e-6, requires_grad=True), torch.tensor([1e-6])])
def test_an_eps_that_is_no_single_number_is_refused(package: Package, eps: Any) -> None:
    with pytest.raises(TypeError, match="eps must be a number"):
        package.rms_norm(leaf(4, 16), None, eps)


@pytest.mark.parametrize(
    ("dtype", "other", "size"),
    [(torch.float16, torch.bfloat16, 1e6), (torch.bfloat16, torch.float16, 1e-7)],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_keeps_its_range_and_its_digits(
    package: Package, dtype: torch.dtype, other: torch.dtype, size: float, compiled: bool
) -> None:
    """A weight beyond the range of x's dtype, and rows that make up for it."""
    weight = torch.full((16,), size, dtype=other).requires_grad_()
    x = randn(4, 16).mul(1e-6 if size > 1 else 1.0).to(dtype).requires_grad_()
    eps = 1.0

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = package.rms_norm(x, weight, eps)
        return y

    y = (torch.compile(norm, backend="aot_eager") if compiled else norm)(x, weight)
    wanted = functional.rms_norm(x.float(), (16,), weight.float(), eps).to(dtype)
    assert y.dtype == dtype
    assert wanted.abs().max() > 0
    for one, two in zip(
        [y, *grads(y, x, weight)], [wanted, *grads(wanted, x, weight)], strict=True
    ):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=2**-6, atol=1e-6)


# ---- A bias --------------------------------------------------------------------------------------


REFUSED = "batch-invariant norms have no bias"


@pytest.fixture(scope="module")
def invariant() -> BatchInvariantPackage:
    return BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")


def gradients(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, leaves, randn(*y.shape, dtype=y.dtype, seed=9))


def filled(norm: Any) -> Any:
    """The module with other parameters than at first."""
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data.copy_(randn(*parameter.shape, dtype=parameter.dtype, seed=seed))
    return norm


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "scale", "of_bias"),
    [((6, 16), (16,), (16,)), ((2, 3, 16), (3, 16), (3, 16)), ((2, 3, 16), (3, 16), (16,))],
)
def test_bias_is_added_and_nothing_else_changes(
    package: Package, dtype: torch.dtype, shape: Any, scale: Any, of_bias: Any
) -> None:
    x, weight = leaf(*shape, dtype=dtype), leaf(*scale, dtype=dtype, seed=1)
    bias = leaf(*of_bias, dtype=torch.float32, seed=2)
    plain = package.rms_norm(x, weight, 1e-6)
    y = package.rms_norm(x, weight, 1e-6, bias=bias)
    assert y.dtype == dtype and torch.equal(y, plain + bias.to(dtype))
    dx, dw, db = gradients(y, x, weight, bias)
    assert same((dx, dw), gradients(plain, x, weight))
    dy = randn(*shape, dtype=dtype, seed=9)
    unit = torch.finfo(dtype).eps
    exact = dy.double().reshape(-1, *of_bias).sum(0)
    assert db.dtype == torch.float32 and torch.allclose(db.double(), exact, rtol=unit, atol=unit)


def test_residual_keeps_its_sum(package: Package) -> None:
    x, residual, weight, bias = (
        leaf(*s, seed=i) for i, s in enumerate([(6, 16)] * 2 + [(16,)] * 2)
    )
    wanted, stream = package.rms_norm(x, weight, residual=residual)
    y, h = package.rms_norm(x, weight, residual=residual, bias=bias)
    assert torch.equal(y, wanted + bias) and torch.equal(h, stream)
    assert torch.equal(gradients(h, residual)[0], gradients(stream, residual)[0])


@pytest.mark.parametrize("options", [{}, {"main_grad": True}, {"weight_offset": 1.0}])
@pytest.mark.parametrize("sizes", [(16,), (2, 16)])
def test_module(package: Package, sizes: Any, options: Any) -> None:
    norm = filled(package.RMSNorm(sizes, bias=True, **options))
    norm.weight.main_grad = torch.zeros(sizes)
    plain = package.RMSNorm(sizes, weight_offset=norm.weight_offset)
    plain.load_state_dict({"weight": norm.weight.detach()})
    x = leaf(6, *sizes)
    wanted, y = plain(x) + norm.bias, norm(x)
    assert torch.equal(y, wanted)
    assert torch.equal(*(gradients(each, norm.bias)[0] for each in (y, wanted)))
    residual = randn(6, *sizes, seed=4)
    (y, h), (wanted, stream) = norm(x, residual), plain(x, residual)
    assert torch.equal(y, wanted + norm.bias) and torch.equal(h, stream)


def test_module_is_saved_copied_and_shown(package: Package) -> None:
    norm = package.RMSNorm(16, bias=True)
    assert not norm.bias.any() and norm.bias.dtype == norm.weight.dtype
    assert sorted(norm.state_dict()) == ["bias", "weight"]
    assert "bias=True" in repr(norm) and "bias" not in repr(package.RMSNorm(16))
    filled(norm)
    other = package.RMSNorm(16, bias=True)
    other.load_state_dict(norm.state_dict())
    x = randn(6, 16)
    for again in (other, copy.deepcopy(norm)):
        assert torch.equal(again(x), norm(x))
    norm.reset_parameters()
    assert not norm.bias.any() and (norm.weight == 1).all()
    for none in (package.RMSNorm(16), package.RMSNorm(16, elementwise_affine=False, bias=True)):
        assert none.bias is None and "bias" not in none.state_dict()
        assert torch.isfinite(none(x)).all()
    meta = package.RMSNorm(16, bias=True, device="meta", dtype=BF16)
    assert meta.bias.is_meta and meta.bias.dtype == BF16
    with pytest.raises(RuntimeError, match="bias"):
        package.RMSNorm(16).load_state_dict(norm.state_dict())


def test_module_of_a_time_before_the_bias_runs(package: Package) -> None:
    norm = package.RMSNorm((2, 8))
    del norm._parameters["bias"]
    assert norm(randn(3, 2, 8)).shape == (3, 2, 8) and norm.reset_parameters() is None
    assert "bias" not in repr(norm)


def test_bias_that_a_module_is_given_later_is_added(package: Package) -> None:
    norm, x = package.RMSNorm(16), randn(6, 16)
    plain = norm(x)
    norm.bias = torch.nn.Parameter(randn(16, seed=3))
    assert torch.equal(norm(x), plain + norm.bias)
    norm.bias = None
    assert torch.equal(norm(x), plain)


def test_what_does_not_fit_is_named(package: Package) -> None:
    x, weight = randn(6, 16), randn(16)
    with pytest.raises(ValueError, match=r"bias must have shape \(16,\), got \(1,\)"):
        package.rms_norm(x, weight, bias=randn(1))
    with pytest.raises(ValueError, match=r"bias must have shape \(16,\), got \(6, 16\)"):
        package.rms_norm(x, None, bias=x)
    with pytest.raises(ValueError, match="bias is on meta and x on cpu"):
        package.rms_norm(x, weight, bias=weight.to("meta"))
    for bias, kind in (([0.0] * 16, "list"), (weight.int(), "int32"), (weight.cfloat(), "complex")):
        with pytest.raises(TypeError, match=f"a tensor of a floating dtype, got .*{kind}"):
            package.rms_norm(x, weight, bias=bias)


def test_batch_invariant_norms_have_none(
    invariant: BatchInvariantPackage, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of PyTorch's sum over rows depend on their number."""
    x, weight = randn(6, 1024), randn(1024)
    with pytest.raises(ValueError, match=REFUSED):
        invariant.rms_norm(x, weight, bias=weight)
    with pytest.raises(ValueError, match=REFUSED):
        invariant.RMSNorm(1024, bias=True)
    norm = invariant.RMSNorm(1024)
    norm.bias = torch.nn.Parameter(weight)  # afterwards
    with pytest.raises(ValueError, match=REFUSED):
        norm(x)
    monkeypatch.setattr(package.RMSNorm, "_invariant_class", lambda: invariant.RMSNorm)
    with pytest.raises(ValueError, match=REFUSED):
        package.RMSNorm(1024, bias=True, batch_invariant=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_compiled_and_under_autocast(package: Package, dtype: torch.dtype) -> None:
    norm = filled(package.RMSNorm(16, bias=True))
    x = leaf(6, 16, dtype=dtype)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        assert norm(x).dtype == dtype
        assert torch.equal(compiled(x), norm(x))
    leaves = (x, norm.weight, norm.bias)
    for one, two in zip(gradients(compiled(x), *leaves), gradients(norm(x), *leaves), strict=True):
        assert torch.equal(one, two)


def test_whoever_watches_gets_an_answer(package: Package) -> None:
    norm = filled(package.RMSNorm(16, bias=True))
    x = leaf(6, 16)
    wanted = norm(x).detach()
    (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(dx.sum(), norm.bias)[0]).all()
    assert torch.allclose(torch.func.vmap(norm)(x), wanted, atol=1e-6)
    assert torch.allclose(torch.fx.symbolic_trace(torch.nn.Sequential(norm))(x), wanted, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(norm(x), wanted)


# ---- out_dtype and residual_dtype ----------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, FP32), (FP16, FP32), (FP32, BF16), (BF16, FP16)])
def test_y_is_computed_in_the_wider_dtype(
    package: Package, dtype: torch.dtype, out: torch.dtype, compiled: bool
) -> None:
    x, weight = leaf(6, 16, dtype=dtype), leaf(16, dtype=dtype, seed=1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(x, weight, 1e-6, out_dtype=out)

    run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm
    y = run(x, weight)
    wide = [each.detach().float().requires_grad_() for each in (x, weight)]
    wanted = package.rms_norm(*wide, 1e-6)
    assert y.dtype == out and torch.equal(y, wanted.to(out))
    dy = randn(6, 16, dtype=out, seed=9)
    found = torch.autograd.grad(y, (x, weight), dy)
    expected = torch.autograd.grad(wanted, wide, dy.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("out", [None, BF16, FP32])
def test_stream_is_rounded_to_its_own_dtype(package: Package, out: torch.dtype | None) -> None:
    x, residual = leaf(6, 16, dtype=BF16), leaf(6, 16, dtype=BF16, seed=1)
    weight = leaf(16, dtype=BF16, seed=2)
    y, h = package.rms_norm(x, weight, 1e-6, residual=residual, residual_dtype=FP32, out_dtype=out)
    exact = x.detach().float() + residual.detach().float()
    assert torch.equal(h, exact) and y.dtype == (out or BF16)
    wanted = package.rms_norm(exact, weight.detach().float(), 1e-6)
    assert torch.equal(y, wanted.to(y.dtype))
    dh = randn(6, 16, seed=3)
    dx, dresidual = torch.autograd.grad(h, (x, residual), dh)
    assert torch.equal(dx, dh.to(BF16)) and torch.equal(dresidual, dh.to(BF16))


def test_bias_is_added_before_y_is_narrowed(package: Package) -> None:
    x, weight, bias = randn(6, 16), randn(16, seed=1), randn(16, seed=2)
    wanted = (package.rms_norm(x, weight, 1e-6) + bias).to(BF16)
    assert torch.equal(package.rms_norm(x, weight, 1e-6, bias=bias, out_dtype=BF16), wanted)


def test_own_dtypes_change_nothing(package: Package) -> None:
    x, weight = randn(6, 16, dtype=BF16), randn(16, dtype=BF16, seed=1)
    wanted = package.rms_norm(x, weight, 1e-6, residual=x)
    found = package.rms_norm(x, weight, 1e-6, residual=x, out_dtype=BF16, residual_dtype=BF16)
    assert all(map(torch.equal, found, wanted))


def test_what_cannot_be_had_is_said(package: Package) -> None:
    x = randn(6, 16)
    with pytest.raises(TypeError, match=r"out_dtype must be one of .*, got torch\.int8"):
        package.rms_norm(x, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"residual_dtype must be one of .*, got fp32"):
        package.rms_norm(x, residual=x, residual_dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual_dtype needs a residual"):
        package.rms_norm(x, residual_dtype=FP32)
    with pytest.raises(ValueError, match=r"bfloat16 cannot hold the residual, torch\.float32"):
        package.rms_norm(x, residual=x, residual_dtype=BF16)


@pytest.mark.parametrize("options", [{"out_dtype": FP32}, {"residual_dtype": FP32}])
def test_what_a_norm_refuses_it_refuses_with_them(package: Package, options: Any) -> None:
    x = randn(6, 16)
    residual = {"residual": x.int()} if "residual_dtype" in options else {}
    for wrong in (x.int(), [1.0]) if not residual else (x,):
        with pytest.raises(TypeError) as plain:
            package.rms_norm(wrong, **residual)
        with pytest.raises(TypeError) as found:
            package.rms_norm(wrong, **residual, **options)
        assert str(found.value) == str(plain.value)
    with pytest.raises(TypeError, match=r"must be one of .*, got torch\.float8_e4m3fn"):
        package.rms_norm(x, **dict.fromkeys(options, torch.float8_e4m3fn))


def test_they_can_be_traced_by_fx(package: Package) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            return package.rms_norm(x, residual=residual, out_dtype=FP32, residual_dtype=FP32)

    x, residual = randn(6, 16, dtype=BF16), randn(6, 16, dtype=BF16, seed=1)
    for one, other in zip(
        torch.fx.symbolic_trace(Block())(x, residual), Block()(x, residual), strict=True
    ):
        assert one.dtype == FP32
        torch.testing.assert_close(one, other)


def test_batch_invariant_norms_have_them_too() -> None:
    invariant = BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")
    x = randn(6, 1024, dtype=BF16)
    assert torch.equal(invariant.rms_norm(x, out_dtype=FP32), invariant.rms_norm(x.float()))
    with pytest.raises(ValueError, match="with `matches`, y has x's dtype"):
        invariant.rms_norm(x, matches="vllm-triton3.6", out_dtype=FP32)
