"""Gated RMSNorms where something sees their operators: compilers, tracers, modes, transforms and
subclasses of tensors."""

from __future__ import annotations

from collections.abc import Callable
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

from generator.paths import REPOSITORY
from normforge import RMSNormGated, rms_norm_gated
from normforge.frontends.gated_node import SERVED, rms_norm_gated_backward
from normforge.operations import GATED_BACKWARDS
from tests.support.fresh import run_fresh

N, GROUP = 16, 8
of_kind = pytest.mark.parametrize("kind", GATED_BACKWARDS)


def leaves(*shape: int, width: int = N) -> list[torch.Tensor]:
    torch.manual_seed(sum(shape))
    rows = [torch.randn(*shape, N) for _ in range(2)]
    return [one.requires_grad_() for one in (*rows, torch.rand(width) + 0.5)]


def gradients(norm: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(norm(*given).square().sum(), given))


def check(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kind of every backward that the library serves, which PyTorch's operators do not."""
    functions: Any = SERVED("*/gated")
    seen: list[Any] = []
    before = functions.backward

    def backward(*given: Any) -> Any:
        seen.append(given[-1])
        return before(*given)

    monkeypatch.setattr(functions, "backward", backward)
    return seen


@of_kind
def test_inductor_runs_the_operator(
    kind: tuple[str, bool], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the one test here that compiles code. Inductor is stricter where the environment has
    CI."""
    monkeypatch.setenv("CI", "true")
    norm = RMSNormGated(N, norm_before_gate=kind[1], activation=kind[0])
    given = [*leaves(3)[:2], norm.weight]
    compiled = torch.compile(norm, fullgraph=True)

    def run(x: torch.Tensor, z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = compiled(x, z)
        return y

    found = gradients(run, given)
    assert calls == [kind]
    check(found, gradients(lambda x, z, _: norm(x, z), given))


@pytest.mark.parametrize(("group", "width"), [(None, N), (GROUP, N), (GROUP, GROUP)])
def test_sizes_that_a_compiled_call_leaves_open(
    group: int | None, width: int, calls: list[Any]
) -> None:
    def norm(*given: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(*given, group_size=group)

    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 12):
            given = leaves(2, rows, width=width)
            check(gradients(compiled, given), gradients(norm, given))
    assert calls


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_step_has_the_operator(mode: str) -> None:
    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        return gradients(rms_norm_gated, list(given))

    given = leaves(3)
    traced = make_fx(step, tracing_mode=mode)(*given)
    nodes = [node for node in traced.graph.nodes if node.target is rms_norm_gated_backward]
    assert len(nodes) == 1
    check(traced(*given), step(*given))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_keeps_the_operator(
    policy: CheckpointPolicy, calls: list[Any]
) -> None:
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    given = leaves(3)

    def norm(*rest: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(
            rms_norm_gated, *rest, use_reentrant=False, context_fn=contexts
        )
        return y

    found = gradients(norm, given)
    assert calls == [("silu", True)]
    check(found, gradients(rms_norm_gated, given))


@of_kind
def test_forward_mode_and_compiled_transforms_are_pytorchs_operators(
    kind: tuple[str, bool], calls: list[Any]
) -> None:
    x, z, weight = (one.detach() for one in leaves(3))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(x, z, weight, 1e-3, *kind)

    tangent, step = torch.randn_like(x), 1e-2
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(dual, torch.func.jvp(norm, (x,), (tangent,))[1])
    slope = (norm(x + step * tangent) - norm(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(dual, slope, rtol=1e-2, atol=1e-2)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return norm(x).square().sum()

    def slope_of(grad: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.func.grad(lambda x: grad(x).square().sum())

    first = torch.func.grad(loss)
    for transform in (first, slope_of(first), torch.func.jacrev(norm)):
        torch.compiler.reset()
        compiled = torch.compile(transform, backend="aot_eager")
        torch.testing.assert_close(compiled(x), transform(x))
    assert calls == []


DTENSOR = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from normforge import rms_norm_gated

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
local = [torch.randn(2, 3, 16).requires_grad_() for _ in range(2)]
scale = torch.randn(16).requires_grad_()
for norm in (rms_norm_gated, torch.compile(rms_norm_gated, backend="aot_eager")):
    for order in (True, False):
        rows = [DTensor.from_local(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in local]
        weight = DTensor.from_local(scale.detach(), mesh, [Replicate()]).requires_grad_()
        y = norm(*rows, weight, norm_before_gate=order)
        assert y.placements == (Shard(1),), y.placements
        wanted = rms_norm_gated(*local, scale, norm_before_gate=order)
        torch.testing.assert_close(y.to_local(), wanted)
        dy = torch.randn(2, 3, 16)
        y.backward(DTensor.from_local(dy, mesh, [Shard(1)]))
        for one, other in zip(rows, torch.autograd.grad(wanted, local, dy)):
            torch.testing.assert_close(one.grad.to_local(), other)
dist.destroy_process_group()
print("done")
"""


def test_shards_of_a_mesh_are_pytorchs_operators() -> None:
    code = DTENSOR.format(root=str(REPOSITORY))
    done = run_fresh(code, REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
