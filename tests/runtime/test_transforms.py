"""Derivatives of all sorts that PyTorch's own norm has: forward mode, torch.func, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

from normforge.api import Package
from tests.support.entry_points import randn, write_layer_norm_package, write_package

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
X, TANGENT, WEIGHT = randn(4, 8), randn(4, 8, seed=1), randn(8, seed=2)


def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (8,), weight, 1e-6)


def norms(package: Package) -> dict[str, Norm]:
    def with_residual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, stream = package.rms_norm(x / 2, weight, 1e-6, residual=x / 2)
        return y + 0 * stream

    return {
        "function": lambda x, weight: package.rms_norm(x, weight, 1e-6),
        "residual": with_residual,
        "operator": lambda x, weight: package.ops.rms_norm(x, weight, 1e-6, 0.0, package.name)[0],
        "operator with residual": lambda x, weight: package.ops.add_rms_norm(
            x / 2, x / 2, weight, 1e-6, 0.0, package.name
        )[0],
    }


def loss(norm: Norm) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: norm(x, WEIGHT).sin().sum()


TRANSFORMS: dict[str, Callable[[Norm, torch.Tensor], Any]] = {
    "jvp": lambda norm, x: torch.func.jvp(norm, (x, WEIGHT), (TANGENT, WEIGHT))[1],
    "linearize": lambda norm, x: torch.func.linearize(norm, x, WEIGHT)[1](TANGENT, WEIGHT),
    "grad": lambda norm, x: torch.func.grad(loss(norm))(x),
    "grad of each": lambda norm, x: torch.func.vmap(torch.func.grad(loss(norm)))(x.view(2, 2, 8)),
    "hessian": lambda norm, x: torch.func.hessian(loss(norm))(x),
    "forward over reverse": lambda norm, x: torch.func.jvp(
        torch.func.grad(loss(norm)), (x,), (TANGENT,)
    )[1],
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("transform", "how"),
    # torch.func.linearize traces by itself, and is not for torch.compile.
    [(t, how) for t in TRANSFORMS for how in ("eager", "compiled")[: 1 + (t != "linearize")]],
)
@pytest.mark.parametrize("which", ["function", "residual", "operator", "operator with residual"])
def test_transforms_see_through_the_norm(
    package: Package, which: str, transform: str, how: str
) -> None:
    norm = norms(package)[which]
    run = partial(TRANSFORMS[transform], norm)
    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    wanted = TRANSFORMS[transform](theirs, X)
    assert wanted.norm() > 0
    assert torch.allclose(run(X), wanted, atol=1e-5)


@pytest.mark.parametrize("wants", ["nothing", "a gradient", "no_grad"])
@pytest.mark.parametrize("which", ["function", "residual", "operator", "operator with residual"])
def test_dual_tensors_keep_their_tangent(package: Package, which: str, wants: str) -> None:
    def tangent(norm: Norm) -> torch.Tensor:
        x = X.clone().requires_grad_(wants == "a gradient")
        with forward_ad.dual_level(), torch.set_grad_enabled(wants != "no_grad"):
            y = norm(forward_ad.make_dual(x, TANGENT), WEIGHT)
            found = forward_ad.unpack_dual(y).tangent
        assert found is not None
        return found

    assert torch.allclose(tangent(norms(package)[which]), tangent(theirs), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"weight": WEIGHT[:1]}, "weight must have shape"),
        ({"x": X.long()}, "x must be bfloat16"),
        ({"residual": X[:, :4]}, "residual must have x's shape"),
    ],
)
def test_arguments_are_checked_under_a_transform(
    package: Package, change: dict[str, torch.Tensor], error: str
) -> None:
    given = {"x": X, "weight": WEIGHT, **change}
    in_dims = {name: None if name == "weight" else 0 for name in given}
    with pytest.raises((TypeError, ValueError), match=error):
        torch.func.vmap(lambda given: package.rms_norm(**given), (in_dims,))(given)


def test_tangent_of_a_gradient(package: Package) -> None:
    """Forward over reverse, with nodes of the package between the two."""

    def tangent(norm: Norm) -> torch.Tensor:
        x = X.clone().requires_grad_()
        y = norm(x, WEIGHT)  # before the level: an ordinary node
        with forward_ad.dual_level():
            dy = forward_ad.make_dual(torch.ones_like(y), TANGENT)
            (dx,) = torch.autograd.grad(y, x, dy)
            found = forward_ad.unpack_dual(dx).tangent
        assert found is not None
        return found

    for norm in norms(package).values():
        assert torch.allclose(tangent(norm), tangent(theirs), atol=1e-5)


def test_backward_alone_has_no_tangent(package: Package) -> None:
    given = (X, X, torch.ones(4, 1), WEIGHT)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, TANGENT)
        plain = package.rmsnorm_backward(*given)
        for calls in (
            lambda: package.rmsnorm_backward(dual, *given[1:]),
            lambda: package.ops.rms_norm_backward(
                X, dual, *given[2:], None, None, 0.0, True, True, package.name
            ),
        ):
            with pytest.raises(RuntimeError, match="differentiate the norm"):
                calls()
    assert torch.equal(plain[0], package.rmsnorm_backward(*given)[0])


def test_function_around_the_backward_under_torch_func(package: Package) -> None:
    """A Function of a trainer's own: torch.func asks for more than one derivative of what it runs,
    and gets an error, not zeros."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, weight: torch.Tensor) -> Any:
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            return x * rstd * weight, rstd

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs, output[1])
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
            x, weight, rstd = ctx.saved_tensors
            return package.rmsnorm_backward(dy, x, rstd, weight)

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Own.apply(x, weight)[0]
        return y

    with pytest.raises(RuntimeError, match="differentiate the norm"):
        TRANSFORMS["grad"](own, X)


NAMES = ("rms_norm", "rms_norm with residual", "operator", "layer_norm", "layer_norm with residual")


def own_norms(folder: Path) -> dict[str, Callable[..., Any]]:
    """Norms of packages that take x, the residual, the weight and the bias."""
    rms, layer = write_package(folder / "rms"), write_layer_norm_package(folder / "layer")
    return {
        "rms_norm": lambda x, _, weight, __: rms.rms_norm(x, weight, 1e-6),
        "rms_norm with residual": lambda x, other, weight, _: rms.rms_norm(
            x, weight, 1e-6, residual=other
        ),
        "operator": lambda x, _, weight, __: rms.ops.rms_norm(x, weight, 1e-6, 0.0, rms.name)[0],
        "layer_norm": lambda x, _, weight, bias: layer.layer_norm(x, weight, bias),
        "layer_norm with residual": lambda x, other, weight, bias: layer.layer_norm(
            x, weight, bias, residual=other
        ),
    }


def batched_by_autograd(total: torch.Tensor, leaves: Any, vectors: torch.Tensor) -> Any:
    return torch.autograd.grad(total, leaves, vectors, retain_graph=True, is_grads_batched=True)


def batched_by_vmap(total: torch.Tensor, leaves: Any, vectors: torch.Tensor) -> Any:
    return torch.func.vmap(lambda v: torch.autograd.grad(total, leaves, v, retain_graph=True))(
        vectors
    )


@pytest.mark.parametrize("batched", [batched_by_autograd, batched_by_vmap])
@pytest.mark.parametrize("which", NAMES)
def test_backwards_are_batched(tmp_path: Path, which: str, batched: Any) -> None:
    """The nodes were made before, out of anybody's sight."""
    norm = own_norms(tmp_path)[which]
    leaves = [t.clone().requires_grad_() for t in (X, TANGENT, WEIGHT, WEIGHT)]
    found = norm(*leaves)
    y, *stream = found if isinstance(found, tuple) else (found,)
    total = y + sum(stream)
    vectors = randn(3, 4, 8, seed=5)
    grads = torch.autograd.grad(total.sum(), leaves, retain_graph=True, allow_unused=True)
    used = [leaf for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    wanted = [torch.autograd.grad(total, used, v, retain_graph=True) for v in vectors]
    for one, *each in zip(batched(total, used, vectors), *wanted, strict=True):
        assert torch.allclose(one, torch.stack(each), atol=1e-5)


def test_jacobians_are_vectorized(package: Package) -> None:
    def jacobian(norm: Norm) -> Any:
        return torch.autograd.functional.jacobian(lambda x: norm(x, WEIGHT), X, vectorize=True)

    for norm in norms(package).values():
        assert torch.allclose(jacobian(norm), jacobian(theirs), atol=1e-5)
