"""Gated RMSNorms: the function, the module and its gradients, by PyTorch's operators on the CPU."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normforge
from normforge import RMSNormGated, rms_norm_gated
from normforge.frontends.gated_node import SERVED, rms_norm_gated_backward
from normforge.gated import explain
from normforge.operations import (
    GATED,
    GATED_BACKWARDS,
    GATED_FORWARDS,
    OPERATIONS,
    RowOperation,
)
from normforge.serve.rows import RowServer

KINDS = list(itertools.product(("silu", "sigmoid"), (True, False)))
of_kind = pytest.mark.parametrize(("activation", "norm_before_gate"), KINDS)
D, GROUP = 24, 8
GROUPS = {
    "whole rows": (None, D),
    "groups": (GROUP, D),
    "one weight for all groups": (GROUP, GROUP),
}


def drawn(
    *shape: int, width: int = D, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """x, z, and a weight."""
    torch.manual_seed(sum(shape))
    rows = [torch.randn(*shape, dtype=dtype) for _ in range(2)]
    rows.append(torch.randn(width, dtype=dtype) + 1)
    return tuple(one.requires_grad_() for one in rows)


def written_out(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group: int | None,
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
    for one, other in zip(found, torch.autograd.grad(wanted, given, dy), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(lambda *leaves: rms_norm_gated(*leaves, *options), given)


@of_kind
def test_second_derivatives_are_those_of_pytorchs_operators(
    activation: str, norm_before_gate: bool
) -> None:
    given = drawn(2, 6, width=6)

    def norm(*leaves: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(*leaves, 1e-3, activation, norm_before_gate)

    assert torch.autograd.gradgradcheck(norm, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@of_kind
def test_results_are_rounded_once_and_gradients_have_the_dtypes_of_what_they_belong_to(
    activation: str, norm_before_gate: bool, wide: bool, dtype: torch.dtype
) -> None:
    x, z, weight = (one.detach().to(dtype).requires_grad_() for one in drawn(64, D))
    if wide:
        weight = weight.detach().float().requires_grad_()
    y = rms_norm_gated(x, z, weight, 1e-5, activation, norm_before_gate)
    exact = [one.detach().double().requires_grad_() for one in (x, z, weight)]
    wanted = written_out(*exact, 1e-5, activation, norm_before_gate, None)
    assert y.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - wanted).abs() <= wanted.abs() * unit * 1.01 + 1e-6).all()
    dy = torch.randn(y.shape, dtype=dtype)
    found = torch.autograd.grad(y, (x, z, weight), dy)
    for one, leaf, other in zip(
        found, (x, z, weight), torch.autograd.grad(wanted, exact, dy.double()), strict=True
    ):
        assert one.dtype == leaf.dtype
        slack = torch.finfo(one.dtype).eps / 2 * 1.01
        assert ((one.double() - other).abs() <= other.abs() * slack + 1e-5).all()


def test_no_weight_stands_for_ones() -> None:
    x, z, _ = drawn(3, D)
    ones = torch.ones(D, dtype=torch.float64)
    for group in (None, GROUP):
        found = rms_norm_gated(x, z, group_size=group)
        wanted = rms_norm_gated(x, z, ones, group_size=group)
        assert torch.equal(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), (x, z)),
            torch.autograd.grad(wanted.square().sum(), (x, z)),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


# ---- Compilers, modes and transforms -------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
@of_kind
def test_a_compiled_call_is_one_graph_whose_backward_is_the_operator(
    activation: str, norm_before_gate: bool, groups: str
) -> None:
    group, width = GROUPS[groups]
    given = drawn(3, 2, D, width=width, dtype=torch.float32)

    def norm(*leaves: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(*leaves, 1e-6, activation, norm_before_gate, group)

    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), norm(*given))
    calls: list[Any] = []
    functions: Any = SERVED("*/gated")
    before = functions.backward
    try:
        functions.backward = lambda *rest: calls.append(rest) or before(*rest)
        found = torch.autograd.grad(compiled(*given).square().sum(), given)
    finally:
        del functions.backward
    assert len(calls) >= 1
    for one, other in zip(
        found, torch.autograd.grad(norm(*given).square().sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other)


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
    assert normforge.gated.operators.rms_norm_gated_backward.v1 is rms_norm_gated_backward


def test_autocast_inference_and_checkpointing_change_nothing() -> None:
    given = drawn(3, D, dtype=torch.bfloat16)
    plain = rms_norm_gated(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rms_norm_gated(*given), plain)
        wide = [one.detach().float() for one in given]
        assert rms_norm_gated(*wide).dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(rms_norm_gated(*given), plain)
        made = torch.ones(3, D, dtype=torch.bfloat16)
    y = rms_norm_gated(made, *given[1:])  # an inference tensor cannot be saved: a copy is
    assert all(one is not None for one in torch.autograd.grad(y.float().sum(), given[1:]))
    again = checkpoint(rms_norm_gated, *given, use_reentrant=False)
    found = torch.autograd.grad(again.float().sum(), given)
    for one, other in zip(found, torch.autograd.grad(plain.float().sum(), given), strict=True):
        assert torch.equal(one, other)


def test_transforms_and_batched_gradients_see_pytorchs_operators() -> None:
    x, z, weight = drawn(4, D)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(x, z.detach(), weight.detach()).square().sum()

    (wanted,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach()), wanted)
    y = rms_norm_gated(x, z, weight)
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    (batched,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    for one, incoming in zip(batched, dy, strict=True):
        (alone,) = torch.autograd.grad(y, x, incoming, retain_graph=True)
        torch.testing.assert_close(one, alone)


def test_tensors_without_memory_have_results_without_memory() -> None:
    x = torch.empty(3, D, device="meta", requires_grad=True)
    y = rms_norm_gated(x, torch.empty(3, D, device="meta"), torch.empty(D, device="meta"))
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((3, D), (3, D))  # type: ignore[union-attr]


def test_no_rows_have_gradients_of_zero() -> None:
    given = drawn(0, D, dtype=torch.float32)
    rms_norm_gated(*given).sum().backward()
    assert given[0].grad is not None and given[0].grad.shape == (0, D)
    assert given[2].grad is not None and not given[2].grad.any()


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


class Kernels:
    """Stands in for a server with kernels, by the formula, and keeps what it was given."""

    def __init__(self, operation: RowOperation, seen: list[Any]) -> None:
        self._server = RowServer(operation, "no kernels")
        self._seen = seen

    def is_without_kernels(self, x: torch.Tensor) -> bool:
        return False

    def __call__(self, tensors: Any) -> Any:
        self._seen.append((self._server.operation.name, tensors))
        return self._server(tensors)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that kernels would serve."""
    calls: list[Any] = []
    servers = {name: Kernels(OPERATIONS[name], calls) for name in GATED}
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
    for one, other in zip(found, torch.autograd.grad(wanted, given, dy), strict=True):
        torch.testing.assert_close(one, other)
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


def test_a_tiny_eps_is_served_by_the_formula(seen: list[Any]) -> None:
    """Its rstd may be more than kernels can square."""
    given = drawn(5, D)
    for eps, calls in ((2.0**-97, 0), (2.0**-96, 1)):
        y = rms_norm_gated(*given, eps)
        seen.clear()
        torch.autograd.grad(y.sum(), given)
        assert len(seen) == calls


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


# ---- What does not fit together is one sentence --------------------------------------------------

ROWS = torch.ones(3, D)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"x": [1.0]}, "x must be a torch.Tensor, got list"),
    "no gate": ({"z": None}, "z must be a torch.Tensor, got NoneType"),
    "a gate of another dtype": (
        {"z": ROWS.bfloat16()},
        "z must have x's dtype torch.float32, got torch.bfloat16",
    ),
    "a gate of another shape": ({"z": ROWS[:2]}, "z must have x's shape (3, 24), got (2, 24)"),
    "whole numbers": ({"x": ROWS.int()}, "x must be floating rows of at least one element"),
    "no columns": ({"x": torch.ones(3, 0)}, "x must be floating rows of at least one element"),
    "another weight": (
        {"weight": torch.ones(8)},
        "weight must have shape (24,), got (8,)",
    ),
    "another weight for groups": (
        {"weight": torch.ones(12), "group_size": 8},
        "weight must have shape (24,) or (8,), got (12,)",
    ),
    "a whole weight": ({"weight": torch.ones(D).int()}, "must be of a floating dtype, got"),
    "a gate at a place that there is not": (
        {"norm_before_gate": "first"},
        "norm_before_gate must be True or False, got 'first'",
    ),
    "no activation": (
        {"activation": None},
        "activation must be one of silu, sigmoid, swish; got None",
    ),
    "a group of no size": ({"group_size": 0}, "x has 24 columns, no multiple of group_size, 0"),
    "unequal groups": ({"group_size": 7}, "x has 24 columns, no multiple of group_size, 7"),
    "no eps": ({"eps": None}, "eps must be a number, got None"),
    "an eps in words": ({"eps": "small"}, "eps must be a number or None, got str"),
    "another activation": (
        {"activation": "gelu"},
        "activation must be one of silu, sigmoid, swish; got 'gelu'",
    ),
    "another device": ({"z": ROWS.to("meta")}, "z is on meta and x on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_one_sentence(name: str) -> None:
    change, said = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as error:
        rms_norm_gated(**{"x": ROWS, "z": ROWS, "weight": torch.ones(D), **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group_size": 7}, "hidden_size is 24, no multiple of group_size, 7"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"hidden_size": (8,)}, "hidden_size must be a whole number of at least 1, got (8,)"),
        ({"activation": "tanh"}, "activation must be one of silu, sigmoid, swish; got 'tanh'"),
        ({"norm_before_gate": None}, "norm_before_gate must be True or False, got None"),
        ({"eps": None}, "eps must be a number, got None"),
    ],
)
def test_a_module_that_there_cannot_be_is_one_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        RMSNormGated(**{"hidden_size": D, **change})
    assert str(error.value) == said


def test_a_module_says_which_rows_and_gates_it_takes() -> None:
    norm = RMSNormGated(D, group_size=GROUP)
    for given in ([torch.ones(3, 16)], [torch.ones(3, 16)] * 2):
        with pytest.raises(
            ValueError, match=re.escape("weight must have shape (16,) or (8,), got")
        ):
            norm(*given)
    with pytest.raises(ValueError, match="z must have x's shape"):
        norm(ROWS, ROWS[:2])
