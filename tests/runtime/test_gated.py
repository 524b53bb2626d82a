"""Gated RMSNorms: the function, the module and its gradients, by PyTorch's operators on the CPU;
their errors beside those of the models that they stand in for."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge import RMSNormGated, rms_norm_gated
from normforge.frontends.gated_node import SERVED, rms_norm_gated_backward
from normforge.gated import explain
from normforge.operations import GATED, GATED_BACKWARDS, GATED_FORWARDS
from tests.support.library_functions import GROUP, GROUPS, KINDS, D, Kernels, check_rounded_once

of_kind = pytest.mark.parametrize(("activation", "norm_before_gate"), KINDS)


def drawn(
    *shape: int, width: int = D, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """x, z, and a weight."""
    torch.manual_seed(sum(shape))
    rows = [torch.randn(*shape, dtype=dtype) for _ in range(2)]
    rows.append(torch.randn(width, dtype=dtype) + 1)
    return tuple(one.requires_grad_() for one in rows)


def written_out(
    x: Any, z: Any, weight: Any, eps: float, activation: str, norm_before_gate: bool, group: Any
) -> torch.Tensor:
    gate = functional.silu(z) if activation == "silu" else torch.sigmoid(z)
    rows = x if norm_before_gate else x * gate
    groups = rows.reshape(*rows.shape[:-1], -1, group or rows.shape[-1])
    normalized = groups / (groups.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    repeats = rows.shape[-1] // len(weight)
    y = normalized.reshape(rows.shape) * weight.repeat(repeats)
    return y * gate if norm_before_gate else y


@pytest.mark.parametrize("groups", GROUPS)
@of_kind
def test_results_and_gradients_are_those_of_the_definition(
    activation: str, norm_before_gate: bool, groups: str
) -> None:
    group, width = GROUPS[groups]
    given = drawn(3, 2, D, width=width)
    options = (1e-3, activation, norm_before_gate, group)
    y, wanted = rms_norm_gated(*given, *options), written_out(*given, *options)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, given, dy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@of_kind
def test_results_are_rounded_once_and_gradients_have_the_dtypes_of_what_they_belong_to(
    activation: str, norm_before_gate: bool, wide: bool, dtype: torch.dtype
) -> None:
    x, z, weight = (one.detach().to(dtype).requires_grad_() for one in drawn(64, D))
    if wide:
        weight = weight.detach().float().requires_grad_()
    check_rounded_once(
        lambda *given: rms_norm_gated(*given, 1e-5, activation, norm_before_gate),
        lambda *given: written_out(*given, 1e-5, activation, norm_before_gate, None),
        [x, z, weight],
    )


def test_no_weight_stands_for_ones() -> None:
    x, z, _ = drawn(3, D)
    ones = torch.ones(D, dtype=torch.float64)
    for group in (None, GROUP):
        found = rms_norm_gated(x, z, group_size=group)
        wanted = rms_norm_gated(x, z, ones, group_size=group)
        assert torch.equal(found, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), (x, z)),
            torch.autograd.grad(wanted.square().sum(), (x, z)),
        )


@of_kind
def test_the_operator_is_what_pytorch_asks_of_one(activation: str, norm_before_gate: bool) -> None:
    for weight, dtype in ((torch.rand(D), torch.float32), (None, torch.bfloat16)):
        rows = [torch.rand(3, 2, D, dtype=dtype) for _ in range(3)]
        given = (*rows, weight, 1e-6, activation, norm_before_gate, "*/gated")
        torch.library.opcheck(rms_norm_gated_backward, given)
    turned = [torch.rand(3, D, 2, dtype=torch.float64).mT for _ in range(3)]
    torch.library.opcheck(
        rms_norm_gated_backward,
        (*turned, torch.rand(D).double(), 1e-6, activation, norm_before_gate, "*/gated"),
    )
    assert normforge.gated.operators.rms_norm_gated_backward.v2 is rms_norm_gated_backward


# ---- Who serves ----------------------------------------------------------------------------------


def test_where_nothing_was_tuned_it_says_so() -> None:
    """There is no package, or none that has rows like these."""
    unlike = "nothing like 4096x128:bf16:fp32 was tuned, and no fallback kernel serves it"
    for kind in KINDS:
        for forward in (False, True):
            found = explain(4096, 128, "bf16", "fp32", *kind, forward=forward)
            assert found["how"] == "none"
            way = "forward" if forward else "backward"
            absent = rf"there is no tuned package of \w+_{way}"
            assert re.fullmatch(f"{absent}|{unlike}", found["reason"])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that kernels would serve."""
    calls: list[Any] = []
    servers = {name: Kernels(name, calls) for name in GATED}
    monkeypatch.setattr(SERVED("*/gated"), "_servers", servers)
    return calls


@of_kind
def test_kernels_serve_both_directions_of_eager_code(
    activation: str, norm_before_gate: bool, seen: list[Any]
) -> None:
    given = drawn(3, D)
    options = (1e-3, activation, norm_before_gate)
    names = [of[activation, norm_before_gate].name for of in (GATED_FORWARDS, GATED_BACKWARDS)]
    y = rms_norm_gated(*given, *options)
    torch.autograd.grad(y.sum(), given)
    assert [name for name, _ in seen] == names
    for grad in (torch.no_grad, torch.inference_mode):
        seen.clear()
        with grad():
            assert torch.equal(rms_norm_gated(*given, *options), y)
        assert [name for name, _ in seen] == names[:1]


def test_compiled_code_has_the_forward_of_pytorchs_operators(seen: list[Any]) -> None:
    given = drawn(3, D, dtype=torch.float32)
    torch.compiler.reset()
    y = torch.compile(rms_norm_gated, fullgraph=True, backend="aot_eager")(*given)
    assert seen == []
    torch.autograd.grad(y.sum(), given)
    assert [name for name, _ in seen] == ["gated_rmsnorm_backward"]


def test_a_weight_of_its_own_for_each_group_is_served_group_by_group(seen: list[Any]) -> None:
    """Groups are served where they lie, without copies."""
    given = drawn(5, D)
    x, z, weight = given
    options = (1e-6, "silu", True, GROUP)
    y, wanted = rms_norm_gated(*given, *options), written_out(*given, *options)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, given, dy))
    assert len(seen) == 6
    for at, (_, tensors) in enumerate(seen):
        h = at % 3 * GROUP
        assert tensors["x"].data_ptr() == x[:, h:].data_ptr()
        assert tensors["z"].data_ptr() == z[:, h:].data_ptr()
        assert torch.equal(tensors["weight"], weight[h : h + GROUP])


def test_one_weight_for_all_groups_is_one_call(seen: list[Any]) -> None:
    given = drawn(5, D, width=GROUP)
    torch.autograd.grad(rms_norm_gated(*given, group_size=GROUP).sum(), given)
    assert [tensors["x"].shape for _, tensors in seen] == [(5, 3, GROUP)] * 2


# ---- The module ----------------------------------------------------------------------------------


@of_kind
def test_the_module_has_the_state_dict_and_the_results_of_the_function(
    activation: str, norm_before_gate: bool
) -> None:
    x, z, weight = (one.detach().float() for one in drawn(3, D))
    norm = RMSNormGated(D, 1e-5, GROUP, norm_before_gate, activation=activation)
    assert [(name, one.shape) for name, one in norm.state_dict().items()] == [("weight", (D,))]
    norm.load_state_dict({"weight": weight})
    wanted = rms_norm_gated(x, z, weight, 1e-5, activation, norm_before_gate, GROUP)
    assert torch.equal(norm(x, z), wanted)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(other) is type(norm) is RMSNormGated
        assert torch.equal(other(x, z), wanted)


def test_without_a_gate_the_module_is_a_norm_of_its_groups() -> None:
    x, _, weight = (one.detach() for one in drawn(3, D))
    norm = RMSNormGated(D, group_size=GROUP, dtype=torch.float64)
    norm.load_state_dict({"weight": weight})
    rows = functional.rms_norm(x.view(3, -1, GROUP), (GROUP,), eps=1e-6).view(3, D)
    torch.testing.assert_close(norm(x), rows * weight)
    text = "RMSNormGated(24, eps=1e-06, group_size=8)"
    assert str(norm) == text
    other = RMSNormGated(8, 1e-5, norm_before_gate=False, activation="sigmoid")
    assert str(other) == "RMSNormGated(8, eps=1e-05, norm_before_gate=False, activation='sigmoid')"


def test_the_module_takes_what_mamba_ssms_does_in_its_order() -> None:
    names = [*inspect.signature(RMSNormGated).parameters]
    assert names[:6] == ["hidden_size", "eps", "group_size", "norm_before_gate", "device", "dtype"]
    norm = RMSNormGated(D, 1e-5, GROUP, False, "meta", torch.bfloat16)
    assert (norm.weight.device.type, norm.weight.dtype) == ("meta", torch.bfloat16)


# ---- Errors against float64 ----------------------------------------------------------------------


MOST = 1.1
"""Times the error of eager code."""
SHAPES = {
    "heads of 64": (96, 4, 64),
    "heads of 128": (48, 4, 128),
    "heads of 256": (24, 4, 256),
    "whole rows": (48, 1024),
}
WIDTHS = (64, 128, 256, 1024)


def eager(x: Any, z: Any, weight: Any, eps: float, activation: str, first: bool, group: int) -> Any:
    """Compute the norm as transformers does: in fp32, its result in x's dtype times the weight."""
    act = functional.silu if activation == "silu" else torch.sigmoid
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide) if first else x.to(wide) * act(z.to(wide))
    groups = rows.unflatten(-1, (-1, group))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * groups.flatten(-2).to(x.dtype)
    return (y * act(z.to(wide)) if first else y).to(x.dtype)


def results(norm: Any, given: list[torch.Tensor], dy: torch.Tensor, *rest: Any) -> Any:
    given = [one.detach().requires_grad_() for one in given]
    y = norm(*given, 1e-6, *rest)
    return dict(zip(("y", "dx", "dz", "dw"), (y, *torch.autograd.grad(y, given, dy)), strict=True))


def no_worse(given: list[torch.Tensor], *rest: Any, than: Any = eager) -> None:
    dy = torch.randn(given[0].shape).to(given[0].dtype)
    exact = results(eager, [one.double() for one in given], dy.double(), *rest)
    ours, theirs = results(rms_norm_gated, given, dy, *rest), results(than, given, dy, *rest)
    for name, wanted in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        for norm in (2, torch.inf):
            error, bar = (
                torch.linalg.vector_norm(found[name].double() - wanted, norm)
                for found in (ours, theirs)
            )
            # Both are off by a few units in the last place in fp32, in one order or another.
            unit = torch.finfo(torch.float32).eps * torch.linalg.vector_norm(wanted, norm)
            assert error <= MOST * bar + unit, (name, norm, error, bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_heads_and_rows(kind: tuple[str, bool], shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    *_, width = size = SHAPES[shape]
    rows = [torch.randn(size).to(dtype) for _ in range(2)]
    no_worse([*rows, (torch.randn(width) * 0.3 + 1).to(dtype)], *kind, width)


@pytest.mark.parametrize("group", WIDTHS)
@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_groups_with_weights_of_their_own(kind: tuple[str, bool], group: int) -> None:
    torch.manual_seed(1)
    given = [torch.randn(32, 1024).bfloat16() for _ in range(2)]
    no_worse([*given, (torch.randn(1024) * 0.3 + 1).bfloat16()], *kind, group)


@pytest.mark.parametrize("kind", GATED_BACKWARDS)
def test_errors_of_a_weight_in_fp32(kind: tuple[str, bool]) -> None:
    """Qwen's returns x's dtype, too; Mamba's is as wide as its weight."""
    torch.manual_seed(2)
    given = [torch.randn(96, 128).bfloat16() for _ in range(2)]
    weight = torch.randn(128) * 0.3 + 1
    no_worse([*given, weight], *kind, 128, than=lambda *g: eager(*g).to(torch.bfloat16))
