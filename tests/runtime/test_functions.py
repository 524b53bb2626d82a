"""Functions of the library where something sees their operators: compilers, tracers, modes,
transforms. What they compute is in the files of each."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from normforge.frontends import traced_nodes
from tests.support.entry_points import equal_bits, spied
from tests.support.library_functions import FUNCTIONS, GATED, ONE_OF_EACH, Function, gradients

close = torch.testing.assert_close
WHOLE = [name for name in GATED if "whole" in name]


@pytest.fixture
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


@pytest.fixture
def calls(function: Function, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that the library serves, one by one, which PyTorch's operators do not."""
    seen: list[str] = []
    for name in {*function.calls}:
        note = lambda *_, name=name, **__: seen.append(name)  # noqa: E731
        spied(monkeypatch, function.functions, name, note)
    return seen


def of(names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", names, indirect=True)


def wide(results: Any) -> list[torch.Tensor]:
    """Return results that PyTorch can compare: not all of FP8's operators are there."""
    return [one.float() for one in results]


# ---- Compilers and tracers -----------------------------------------------------------------------


@of([*GATED, "rope", "rotary"])
def test_a_compiled_call_is_one_graph_of_operators(function: Function, calls: list[str]) -> None:
    torch.compiler.reset()
    leaves, rest = function.leaves(), function.rest()
    compiled = torch.compile(function.y, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, leaves, rest)
    assert sorted(calls) == sorted(function.calls)
    close(found, gradients(function.y, leaves, rest))
    close(compiled(*leaves, *rest), function.y(*leaves, *rest))


@of([*WHOLE, "projection", "rotary"])
def test_inductor_runs_the_operators(
    function: Function, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the one test here that compiles code. Inductor is stricter where the environment has
    CI."""
    torch.compiler.reset()
    monkeypatch.setenv("CI", "true")
    leaves, rest = function.leaves(), function.rest()
    found = gradients(torch.compile(function.y, fullgraph=True), leaves, rest)
    assert sorted(calls) == sorted(function.calls)
    close(found, gradients(function.y, leaves, rest))


@of(["rope", "rotary", *(name for name in GATED if "silu, norm" in name)])
def test_sizes_that_a_compiled_call_leaves_open(function: Function, calls: list[str]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function.y, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 12):
            leaves, rest = function.leaves(rows), function.rest(rows)
            close(gradients(compiled, leaves, rest), gradients(function.y, leaves, rest))
    assert calls


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@of(ONE_OF_EACH)
def test_a_traced_step_has_the_operators(function: Function, mode: str) -> None:
    leaves, rest = function.leaves(), function.rest()

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        *others, y = function.run(*given)
        return [*others, y, *torch.autograd.grad(y.square().sum(), given[: len(leaves)])]

    traced = make_fx(step, tracing_mode=mode)(*leaves, *rest)
    targets = [node.target for node in traced.graph.nodes]
    assert [one for one in targets if one in function.operators] == [*function.operators]
    close(wide(traced(*leaves, *rest)), wide(step(*leaves, *rest)))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@of(ONE_OF_EACH)
def test_selective_checkpointing_keeps_or_repeats_the_forward(
    function: Function, policy: CheckpointPolicy, calls: list[str]
) -> None:
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    leaves, rest = function.leaves(), function.rest()

    def saved(*given: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(function.y, *given, use_reentrant=False, context_fn=contexts)
        return y

    found = gradients(saved, leaves, rest)
    again = function.calls[: len(function.calls) // 2]  # those of the forward
    repeated = again if policy == CheckpointPolicy.PREFER_RECOMPUTE else []
    assert calls == [*repeated, *function.calls]
    close(found, gradients(function.y, leaves, rest))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@of(ONE_OF_EACH)
def test_compiled_code_sees_changes_in_place_as_eager_code_does(
    function: Function, backend: str
) -> None:
    """Each argument is changed behind the call. Where its old numbers are what the backward needs,
    a gradient is refused."""
    leaves, rest = function.leaves(), function.rest()

    def is_refused(changed: int, compiled: bool) -> bool:
        def run(*given: torch.Tensor) -> torch.Tensor:
            made = [one * 1 for one in given]
            total = function.y(*made).square().sum()
            made[changed].add_(1.0)
            return total

        torch.compiler.reset()
        called = torch.compile(run, backend=backend, fullgraph=True) if compiled else run
        try:
            torch.autograd.grad(called(*leaves, *rest), leaves)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return True
        return False

    places = range(len(leaves) + len(rest))
    refused = [is_refused(place, compiled=False) for place in places]
    assert any(refused)
    assert [is_refused(place, compiled=True) for place in places] == refused


# ---- Modes and transforms ------------------------------------------------------------------------


@of(ONE_OF_EACH)
def test_autocast_inference_and_checkpointing_change_nothing(function: Function) -> None:
    leaves, rest = function.leaves(dtype=torch.bfloat16), function.rest(dtype=torch.bfloat16)
    plain = wide(function.run(*leaves, *rest))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert equal_bits(wide(function.run(*leaves, *rest)), plain)
        assert function.y(*(one.float() for one in leaves), *rest).dtype == torch.float32
    with torch.inference_mode():
        assert equal_bits(wide(function.run(*leaves, *rest)), plain)
        made = torch.ones_like(leaves[0])
    # An inference tensor cannot be saved: a copy is.
    assert not leaves[1:] or all(
        one.any() for one in gradients(partial(function.y, made), leaves[1:], rest)
    )
    run = partial(checkpoint, function.y, use_reentrant=False)
    assert equal_bits(gradients(run, leaves, rest), gradients(function.y, leaves, rest))


@of([*WHOLE, "rope", "projection", *ONE_OF_EACH[3:]])
def test_transforms_and_forward_mode_are_pytorchs_operators(
    function: Function, calls: list[str]
) -> None:
    leaves, rest = function.leaves(dtype=torch.float64), function.rest(dtype=torch.float64)
    x, *others = (one.detach() for one in leaves)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return function.y(x, *others, *rest)

    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, tangent))).tangent
    close(dual, torch.func.jvp(norm, (x,), (tangent,))[1])
    slope = torch.func.grad(lambda x: norm(x).square().sum())(x)
    assert calls == []
    close(slope, torch.autograd.grad(function.y(*leaves, *rest).square().sum(), leaves)[0])
    ahead, back = (norm(x + step * tangent) for step in (1e-5, -1e-5))
    close(dual, (ahead - back) / 2e-5, rtol=1e-4, atol=1e-6)


@of(ONE_OF_EACH)
def test_forward_mode_goes_through_compiled_code(function: Function) -> None:
    """Compiled code that a backend runs as Dynamo's graph has the tangents of eager code."""
    x, *others = (one.detach() for one in function.leaves())
    rest, tangent = function.rest(), torch.randn_like(x)
    torch.compiler.reset()
    sine, compiled = (
        torch.compile(run, backend="eager", fullgraph=True) for run in (torch.sin, function.y)
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        try:
            sine(dual)
        except torch._dynamo.exc.Unsupported:
            pytest.skip(f"PyTorch {torch.__version__} compiles no inputs with tangents.")
        found = [run(dual, *others, *rest) for run in (compiled, function.y)]
        close(*(forward_ad.unpack_dual(y).tangent for y in found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gated", "packed"])
def test_graphs_with_a_node_can_be_pickled(name: str) -> None:
    apply = getattr(traced_nodes, name)
    assert pickle.loads(pickle.dumps(apply)) is apply
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        traced_nodes.other  # noqa: B018


@of(WHOLE)
def test_compiled_transforms_are_pytorchs_operators(function: Function, calls: list[str]) -> None:
    x, *others = (one.detach() for one in function.leaves())
    norm = lambda x: function.y(x, *others)  # noqa: E731
    first = torch.func.grad(lambda x: norm(x).square().sum())
    second = torch.func.grad(lambda x: first(x).square().sum())
    for transform in (first, second, torch.func.jacrev(norm)):
        torch.compiler.reset()
        close(torch.compile(transform, backend="aot_eager")(x), transform(x))
    assert calls == []


@of(FUNCTIONS)
def test_derivatives_are_those_of_finite_differences(function: Function) -> None:
    leaves, rest = function.leaves(1, torch.float64), function.rest(1, torch.float64)

    def norm(*leaves: torch.Tensor) -> torch.Tensor:
        return function.y(*leaves, *rest)

    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves, fast_mode=True)


@of([*ONE_OF_EACH, "neighbours"])
def test_gradients_are_batched(function: Function, calls: list[str]) -> None:
    leaves = function.leaves()
    y = function.y(*leaves, *function.rest())
    calls.clear()
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, leaves, dy, is_grads_batched=True, retain_graph=True)
    assert calls == []
    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in dy]
    close(batched, tuple(map(torch.stack, zip(*each, strict=True))))


@of(ONE_OF_EACH)
def test_tensors_without_memory_and_without_rows_have_such_results(function: Function) -> None:
    leaves = [one.detach().to("meta").requires_grad_() for one in function.leaves()]
    y = function.y(*leaves, *(one.to("meta") for one in function.rest()))
    y.sum().backward()
    assert y.is_meta and [one.grad.shape for one in leaves] == [one.shape for one in leaves]  # type: ignore[union-attr]
    leaves = function.leaves(0)
    dx, *others = gradients(function.y, leaves, function.rest(0))
    assert dx.shape == leaves[0].shape and not any(one.any() for one in others[-1:])
