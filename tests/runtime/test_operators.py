"""The operators of a package under what watches them: torch.compile, checkpointing, fake tensors;
and derivatives of all sorts: forward mode, torch.func, compiled too."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from normforge.api import Package
from normforge.frontends import gradients
from normforge.frontends.library import Served
from tests.support.entry_points import (
    grads,
    leaf,
    randn,
    same,
    write_layer_norm_package,
    write_package,
)
from tests.support.fresh import printed_by
from tests.support.patience import patience


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_step_has_the_bits_of_the_eager_one(package: Package, dynamic: bool) -> None:
    x, weight = leaf(4, 16, dtype=torch.bfloat16), leaf(16, dtype=torch.bfloat16, seed=1)

    def step(x: Any, weight: Any) -> Any:
        return package.rms_norm(x, weight, 1e-6, weight_offset=1.0)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert same(grads(compiled(x, weight), x, weight), grads(step(x, weight), x, weight))
    longer = leaf(7, 16, dtype=torch.bfloat16, seed=3)
    assert torch.equal(compiled(longer, weight), step(longer, weight))


def test_compiled_step_asks_the_dispatcher_once_per_operator(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, dy = leaf(4, 16), leaf(16, seed=1), randn(4, 16, seed=2)

    def step() -> list[torch.Tensor]:
        y, stream = compiled(x)
        return list(torch.autograd.grad((y, stream), (x, weight), (dy, dy)))

    compiled = torch.compile(
        lambda x: package.rms_norm(package.rms_norm(x, weight), weight, residual=x),
        backend="aot_eager",
        fullgraph=True,
    )
    wanted = step()

    def fail(*_: Any) -> Any:
        raise AssertionError("the dispatcher is asked again")

    monkeypatch.setattr(gradients, "below_autograd", fail)
    assert same(step(), wanted)
    assert (
        package.ops.rms_norm_backward(*plain_call(), None, None, 0.0, True, True, package.name)[0]
        is not None
    )
    with pytest.raises(AssertionError, match="asked again"):
        package.ops.rms_norm(x, weight, None, 0.0, package.name)  # this goes through a node


def test_wrapper_that_no_mode_announces_is_left_to_the_dispatcher(package: Package) -> None:
    x, weight = randn(4, 16), randn(16, seed=1)
    torch._enable_functionalization(reapply_views=True)
    try:
        y, _ = package.ops.rms_norm(torch._to_functional_tensor(x), weight, 1e-6, 0.0, package.name)
        assert torch._is_functional_tensor(y)
        torch._sync(y)
    finally:
        torch._disable_functionalization()
    plain = torch._from_functional_tensor(y)
    assert torch.equal(plain, package.rms_norm(x, weight, 1e-6))
    negative = package.ops.rms_norm(torch._neg_view(x), weight, 1e-6, 0.0, package.name)[0]
    assert torch.equal(negative, package.rms_norm(-x, weight, 1e-6))


class Wrapped(torch.Tensor):
    """A tensor around another one, which keeps the names of the operators that it is given to."""

    inner: torch.Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, seen: list[str]) -> Wrapped:
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner, found.seen = inner, seen
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, given: Any, named: Any = None) -> Any:
        (seen,) = (one.seen for one in given if isinstance(one, Wrapped))
        seen.append(str(function))
        inner = (one.inner if isinstance(one, Wrapped) else one for one in given)
        return function(*inner, **(named or {}))


def test_a_subclass_is_asked_for_the_operator_and_nothing_below(package: Package) -> None:
    x, weight, seen = randn(4, 16), randn(16, seed=1), list[str]()
    y, _ = package.ops.rms_norm(Wrapped(x, seen), weight, 1e-6, 0.0, package.name)
    assert torch.equal(y, package.rms_norm(x, weight, 1e-6))
    assert len(seen) == 1 and seen[0].startswith("normforge.rms_norm"), seen


def test_operator_tries_the_quick_call_for_plain_arguments_alone(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    dy, x, rstd, weight = plain_call()
    found = torch.ones(4, 16), torch.ones(16)
    monkeypatch.setattr(package.ops, "_quick", lambda *_: tuple(t.clone() for t in found))
    backward = package.ops.rms_norm_backward
    plain = (dy, x, rstd, weight, None, None, 0.0, True, True, package.name)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            dx, dw, third = backward(*plain)
        assert same([dx, dw], list(found)) and third.shape == (0,)
    for place, value in ((3, None), (4, dy), (5, torch.float32), (6, 1.0), (7, False), (8, False)):
        dx, dw, _ = backward(*plain[:place], value, *plain[place + 1 :])
        assert not torch.equal(dx, found[0]) or not torch.equal(dw, found[1])


@pytest.mark.parametrize("need_dx", [False, True])
def test_results_that_nobody_wants_are_tensors_of_their_own(
    package: Package, need_dx: bool
) -> None:
    call = (*plain_call(), None, None, 0.0, need_dx, False)
    results = [
        *package.ops.rms_norm_backward(*call, package.name),
        *package.ops.rms_norm_backward(*call, package.name),
    ]
    assert [t.shape for t in results[1:3]] == [(0,), (0,)]
    assert len({t.untyped_storage()._cdata for t in results}) == 6


def plain_call() -> tuple[torch.Tensor, ...]:
    """dy, x, rstd and weight."""
    return randn(4, 16), randn(4, 16, seed=1), torch.rand(4, 1), randn(16, seed=2)


@pytest.mark.usefixtures("fresh")  # other tests have compiled the same forward
def test_inductor_runs_the_operator(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the one test here that compiles code. Inductor is stricter where the environment has
    CI."""
    monkeypatch.setenv("CI", "true")
    norm = package.RMSNorm(16)
    x = leaf(4, 16)
    compiled = torch.compile(norm, fullgraph=True)
    assert same(grads(compiled(x), x, norm.weight), grads(norm(x), x, norm.weight))


def test_selective_checkpointing_sees_the_operator(package: Package) -> None:
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
    name = package.name

    def check(operator: Any, given: tuple[Any, ...]) -> None:
        torch.library.opcheck(operator, (*given, name))

    check(package.ops.rms_norm, (x, weight, None, 0.0))
    check(package.ops.rms_norm, (x, None, 1e-5, 1.0))
    check(package.ops.add_rms_norm, (x, residual.bfloat16(), weight, 1e-5, 1.0))
    backward = package.ops.rms_norm_backward
    check(backward, (dy, plain, rstd, weight.detach(), None, None, 0.0, True, True))
    check(backward, (dy, plain, rstd, weight.detach(), dy.double(), None, 1.0, True, False))
    check(backward, (dy, plain, rstd, None, None, None, 0.0, False, False))
    heads = torch.rand(6, 16)
    check(backward, (dy, plain, rstd, heads, None, None, 0.0, True, True))
    narrow = [t.bfloat16() for t in (dy, plain)]
    check(backward, (*narrow, rstd, heads.bfloat16(), None, torch.float32, 1.0, True, True))
    check(package.ops.rms_norm, (x, leaf(6, 16, seed=4), None, 0.0))


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_what_watches_gets_an_answer(tmp_path: Path, norm: str) -> None:
    """Fake tensors, torch.func, forward mode, torch.jit.trace, torch.fx, checkpoints, autocast."""
    rms, close = norm == "rms_norm", partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    package: Any = (write_package if rms else write_layer_norm_package)(tmp_path)
    ours, module = getattr(package, norm), package.RMSNorm if rms else package.LayerNorm
    scales = [leaf(16, seed=1 + i) for i in range(1 if rms else 2)]
    x, theirs = leaf(4, 16), getattr(functional, norm)
    wanted = theirs(x, (16,), *scales)
    with FakeTensorMode():
        fake, saved = torch.empty(4, 16, device="cuda"), torch.empty(4, 1, device="cuda")
        scale = torch.empty(16, device="cuda")
        y = ours(fake, scale)
        backward = package.rmsnorm_backward if rms else package.layer_norm_backward
        found = backward(y, fake, *[saved] * (1 if rms else 2), scale)
        assert [one.device.type for one in (y, *found)] == ["cuda"] * (3 if rms else 4)
        assert [one.shape for one in (y, *found)] == [x.shape] * 2 + [(16,)] * len(scales)
    leaves = [x, *scales]
    given = tuple(one.detach() for one in leaves)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return ours(*given).square().sum()

    of_func = torch.func.grad(loss, tuple(range(len(given))))(*given)
    by_hand = torch.autograd.grad(wanted.square().sum(), leaves, retain_graph=True)
    torch.testing.assert_close(of_func, by_hand, atol=1e-4, rtol=1e-4)
    _, tangent = torch.func.jvp(loss, given, tuple(map(torch.ones_like, given)))
    torch.testing.assert_close(tangent, sum(g.sum() for g in by_hand), rtol=1e-3, atol=1e-3)
    each = torch.func.vmap(ours, (0, *[None] * len(scales)))(x.view(2, 2, 16), *scales)
    close(each, wanted.view(2, 2, 16))
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(module(16)))
    assert theirs in [node.target for node in traced.graph.nodes]
    close(traced(x), theirs(x, (16,)))
    rows = [leaf(n, 16, seed=n) for n in (2, 5)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    run = partial(ours, **({"weight_offset": 1.0} if rms else {}))
    both = run(nested, *scales).values(), torch.cat([run(one, *scales) for one in rows])
    close(*both)
    close(*(torch.autograd.grad(one.sin().sum(), (*rows, *scales)) for one in both))
    if not rms:
        nested = torch.nested.as_nested_tensor([*given[:1], given[0][:1]], layout=torch.strided)
        close(ours(nested, *scales).unbind()[0], wanted)
    close(torch.jit.trace(lambda x: ours(x), x.detach())(x), theirs(x, (16,)))
    again = checkpoint(lambda x: ours(x, *scales), x, use_reentrant=False)
    assert same(grads(again, *leaves), grads(ours(*leaves), *leaves))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x.bfloat16(), scales[0]).dtype == torch.bfloat16
    with torch.no_grad():
        close(ours(*leaves), wanted)
        assert rms or torch.equal(ours(*leaves), wanted)
    assert ours(torch.empty(4, 16, device="meta")).device.type == "meta"
    assert ours(torch.empty(0, 16)).shape == (0, 16)


def test_inference_and_autocast(package: Package) -> None:
    x, weight = randn(4, 16, dtype=torch.bfloat16), torch.nn.Parameter(randn(16, seed=1))
    with torch.inference_mode():
        y = package.rms_norm(x, weight)
    assert y.is_inference() and not y.requires_grad
    with torch.autocast("cpu", torch.float16):
        assert package.rms_norm(x, weight).dtype == torch.bfloat16
    with torch.no_grad():
        assert not package.rms_norm(x, weight).requires_grad


def test_packages_share_operators_which_find_the_package_that_a_call_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (write_package(tmp_path / name) for name in ("one", "two"))
    assert one.operators is two.operators and one.name != two.name
    for package in (one, two):
        wide = torch.full((4, 16), float(len(package.name)))
        monkeypatch.setattr(package.ops, "_quick", lambda *_, wide=wide: (wide.clone(), wide[0]))
    for package in (two, one):
        given = (*plain_call(), None, None, 0.0, True, True, package.name)
        dx, *_ = package.operators.rms_norm_backward.v2(*given)
        assert torch.equal(dx, torch.full((4, 16), float(len(package.name))))
    compiled = torch.compile(lambda x: two.rms_norm(x).sin(), backend="aot_eager", fullgraph=True)
    x = leaf(4, 16)
    assert torch.equal(compiled(x), one.rms_norm(x).sin())


def test_operator_of_a_package_that_is_not_there_says_what_to_do(package: Package) -> None:
    operator = package.operators.rms_norm.v2
    for name in (
        "models.norms",
        "models.norms+tiles_in_turn",
        "h200/",
        "h300/rmsnorm_backward",
        "h200/softmax_backward",
        "+x",
    ):
        with pytest.raises(RuntimeError, match=f"no package '{re.escape(name)}'.*: import it"):
            operator(randn(4, 16), None, None, 0.0, name)


FORKED = """
import multiprocessing
from pathlib import Path
import torch
from tests.support.entry_points import leaf, write_package

package = write_package(Path("{folder}"))

def work(queue):
    torch.set_num_threads(1)
    x = leaf(2, 8)
    package.rms_norm(x).sum().backward()
    queue.put(x.grad is not None)

context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=work, args=(queue,))
child.start()
assert queue.get(timeout={patience})
child.join()
"""


def test_forked_child_works_after_import(tmp_path: Path) -> None:
    """The process has computed nothing: PyTorch's threads do not survive a fork."""
    printed_by(FORKED.replace("{patience}", str(patience(60))), tmp_path)


# ---- Transforms ----------------------------------------------------------------------------------


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


class Named:
    """Stands in for what serves the calls of a package."""

    retired = False

    def retire(self) -> None:
        self.retired = True

    def of_form(self, form: str) -> Any:
        raise LookupError(form)


def test_a_package_that_is_loaded_again_takes_the_place_of_the_first() -> None:
    served, first, second = Served[Named](), Named(), Named()
    for package in (first, second):
        served.add("a", package)
    assert served("a") is second
    assert (first.retired, second.retired) == (True, False)
