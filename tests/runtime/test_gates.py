"""Gated norms that a model writes out, in graphs before autograd: which of them `inductor_backend`
joins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge import gated_packages
from normforge.api import Package
from normforge.frontends.gated import GatedFunctions
from normforge.frontends.gated_node import SERVED, formula, rms_norm_gated_forward
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.worth import Worth
from normforge.packages import chosen
from normforge.serve.rows import RowServer
from tests.support import dynamo_graphs
from tests.support.dynamo_graphs import close
from tests.support.entry_points import grads, randn
from tests.support.layer_classes import model_of, step

pytestmark = pytest.mark.usefixtures("fresh")
B, S, N = 2, 5, 16
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The rows that kernels are asked for, which there are."""
    found: Asked = []

    def serves(_: Any, x: Any, weight: Any, kind: Any, trains: bool) -> bool:
        found.append((tuple(x.shape), kind, trains))
        return True

    monkeypatch.setattr(GatedFunctions, "serves", serves)
    return found


@pytest.fixture
def gated(package: Package) -> Package:
    package.ops.gated = "normforge.gated_packages"
    return package


compiled = partial(dynamo_graphs.compiled, operator=rms_norm_gated_forward)


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = [randn(B, S, N), randn(B, S, N, seed=2), randn(N, seed=3)]
    return [one.to(dtype).requires_grad_() for one in made]


def xhat(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


# ---- What is joined ------------------------------------------------------------------------------


def norm_first(x: Any, z: Any, w: Any, act: Any = functional.silu) -> Any:
    """Qwen3-Next's."""
    n = w * xhat(x.to(torch.float32)).to(x.dtype)
    n = n * act(z.to(torch.float32))
    return n.to(x.dtype)


def gate_first(x: Any, z: Any, w: Any, act: Any = functional.silu) -> Any:
    """Mamba 2's."""
    wide = x.to(torch.float32) * act(z.to(torch.float32))
    return w * xhat(wide).to(x.dtype)


def turned_around(x: Any, z: Any, w: Any) -> Any:
    gate = torch.sigmoid(z.float())
    return torch.mul(gate, xhat(x.float()).type_as(x) * w).to(x.dtype)


def in_its_own_dtype(x: Any, z: Any, w: Any) -> Any:
    return w * xhat(x.float()).to(x.dtype) * functional.silu(z)


def without_weight(x: Any, z: Any, w: Any) -> Any:
    return (xhat(x.float()).to(x.dtype) * functional.silu(z.float())).to(x.dtype)


KINDS: dict[str, tuple[Callable[..., Any], tuple[str, bool]]] = {
    "norm, silu": (norm_first, ("silu", True)),
    "norm, sigmoid": (partial(norm_first, act=torch.sigmoid), ("sigmoid", True)),
    "silu, norm": (gate_first, ("silu", False)),
    "sigmoid, norm": (partial(gate_first, act=torch.sigmoid), ("sigmoid", False)),
    "its method": (partial(norm_first, act=lambda z: z.sigmoid()), ("sigmoid", True)),
    "its function": (partial(gate_first, act=torch.nn.functional.sigmoid), ("sigmoid", False)),
    "turned around": (turned_around, ("sigmoid", True)),
    "narrow": (in_its_own_dtype, ("silu", True)),
    "no weight": (without_weight, ("silu", True)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_norm_and_gate_are_one_operator(
    gated: Package, name: str, dynamic: bool, asked: Asked
) -> None:
    function, kind = KINDS[name]
    given = leaves()
    used = given[: 2 + (name != "no weight")]
    for one in given[: 2 * dynamic]:
        torch._dynamo.mark_dynamic(one, 1)
    run, found = compiled(gated, function)
    y, wanted = run(*given), function(*given)
    close([y, *grads(y, *used)], [wanted, *grads(wanted, *used)])
    (node,) = found
    assert (*node.args[4:6], node.args[6]) == (*kind, "*/gated")
    assert (node.args[2] is None) is (name == "no weight")
    assert [one[1:] for one in asked] == [(kind, True)]
    if not dynamic:
        assert asked[0][0] == (B, S, N)
    with torch.no_grad():
        close(run(*given), wanted)
    assert asked[-1][-1] is False


def test_a_gate_in_fp8_is_widened_before(gated: Package, asked: Asked) -> None:
    """PyTorch does not say which dtypes have its numbers."""
    x, z, w = (one.detach() for one in leaves(torch.bfloat16))
    run, found = compiled(gated, lambda x, z, w: norm_first(x, z, w))
    y = run(x, narrow := z.to(torch.float8_e4m3fn), w)
    torch.testing.assert_close(y, norm_first(x, narrow, w), rtol=0.02, atol=0.02)
    assert len(found) == 0 or found[0].args[1].meta["example_value"].dtype == torch.float32


@pytest.mark.parametrize("name", ["norm, silu", "silu, norm", "norm, sigmoid"])
def test_narrow_rows_are_rounded_once(gated: Package, name: str, asked: Asked) -> None:
    function, kind = KINDS[name]
    given = leaves(torch.bfloat16)
    run, found = compiled(gated, function)
    y = run(*given)
    assert len(found) == 1 and y.dtype == torch.bfloat16
    assert torch.equal(y, formula(*given, 1e-6, kind))
    wide = [one.detach().double() for one in given]
    exact = formula(*wide, 1e-6, kind)
    for one, other in zip(
        grads(y, *given), grads(formula(*given, 1e-6, kind), *given), strict=True
    ):
        torch.testing.assert_close(one, other)
    error, before = ((one.double() - exact).norm() for one in (y, function(*given)))
    assert error < before


def test_inductor_runs_the_operators(gated: Package, asked: Asked) -> None:
    calls: list[str] = []
    served, given = SERVED("*/gated"), leaves()
    run = torch.compile(norm_first, backend=make_backend(gated.ops), fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            was = getattr(served, name)
            seen = lambda *args, was=was, name=name: (calls.append(name), was(*args))[1]  # noqa: E731
            patch.setattr(served, name, seen, raising=False)
        y = run(*given)
        found = [y, *grads(y, *given)]
    wanted = norm_first(*given)
    close(found, [wanted, *grads(wanted, *given)])
    assert calls == ["forward", "backward"]


# ---- What stays ----------------------------------------------------------------------------------


def used_twice(x: Any, z: Any, w: Any) -> Any:
    n = w * xhat(x.float()).to(x.dtype)
    return n * functional.silu(z.float()) + n.sum()


def gate_is_used(x: Any, z: Any, w: Any) -> Any:
    gate = functional.silu(z.float())
    return w * xhat(x.float()) * gate * gate.mean()


def product_is_used(x: Any, z: Any, w: Any) -> Any:
    wide = x.float() * functional.silu(z.float())
    return w * xhat(wide) * wide.mean()


def another_activation(x: Any, z: Any, w: Any) -> Any:
    return norm_first(x, z, w, functional.gelu)


def in_place(x: Any, z: Any, w: Any) -> Any:
    wide = z * 1.0
    return w * xhat(x.float()) * functional.silu(wide, inplace=True) + wide


def broadcast(x: Any, z: Any, w: Any) -> Any:
    return norm_first(x, z[:, :1], w)


def of_itself(x: Any, z: Any, w: Any) -> Any:
    n = w * xhat(x.float())
    return n * functional.silu(n) + z


def with_offset(x: Any, z: Any, w: Any) -> Any:
    return norm_first(x, z, 1.0 + w)


def norm_of_another(x: Any, z: Any, w: Any) -> Any:
    """The root is that of the rows before the gate, and the product that behind it."""
    wide = x.float() * functional.silu(z.float())
    return w * (wide * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))


def root_of_another(x: Any, z: Any, w: Any) -> Any:
    """And here the other way round."""
    wide = x.float() * functional.silu(z.float())
    return w * (x.float() * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))


def transposed(x: Any, z: Any, w: Any) -> Any:
    """The result lies in another order than the operator's."""
    return norm_first(x.transpose(0, 1), z.transpose(0, 1), w)


def written_between(x: Any, z: Any, w: Any) -> Any:
    gates = z.clone()
    n = w * xhat(x.float())
    gates.mul_(2.0)
    return n * functional.silu(gates)


def written_behind(x: Any, z: Any, w: Any) -> Any:
    gates = z * 1.0
    y = norm_first(x, gates, w)
    gates.mul_(2.0)
    return y + gates


def gates_are_the_rows(x: Any, z: Any, w: Any) -> Any:
    """A cast is an argument of the operator and a step of the gate."""
    wide = x.float()
    return w * xhat(wide) * functional.silu(wide) + z


def rounded_gate(x: Any, z: Any, w: Any) -> Any:
    return w * xhat(x) * torch.sigmoid((3 * z).to(torch.int32)) + z


def narrowed_gate(x: Any, z: Any, w: Any) -> Any:
    return w * xhat(x) * torch.sigmoid(z.bfloat16()).float() + w * xhat(z.half() * z.sigmoid())


def rounded_rows(x: Any, z: Any, w: Any) -> Any:
    return w * xhat((3 * x).to(torch.int32) * functional.silu(z)) + x


def written_as_data(x: Any, z: Any, w: Any) -> Any:
    gates = (z * 1.0).unsqueeze(0)
    y = norm_first(x, gates.squeeze(0), w)
    gates.data.mul_(2.0)
    return y + gates


def gate_without_gradient(x: Any, z: Any, w: Any) -> Any:
    n = w * xhat(x.float())
    with torch.no_grad():
        gate = functional.silu(z.float())
    return n * gate + z


LEFT: list[Callable[..., Any]] = [
    *(used_twice, gate_is_used, product_is_used, another_activation, in_place, broadcast),
    *(of_itself, with_offset, norm_of_another, root_of_another, transposed, written_between),
    *(gate_without_gradient, written_behind, written_as_data, gates_are_the_rows),
    *(rounded_gate, narrowed_gate, rounded_rows),
]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_what_is_not_quite_a_gated_norm_stays(
    gated: Package, function: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worth, "of_gated", lambda *_: True)
    dtype = torch.bfloat16 if function in (written_behind, written_as_data) else torch.float32
    given = leaves(dtype)
    wanted = function(*given)
    run, found = compiled(gated, function)
    y = run(*given)
    close([y, *grads(y, *given)], [wanted, *grads(wanted, *given)])
    assert found == []


def test_a_norm_without_kernels_and_a_package_without_gates_stay(
    package: Package, gated: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = compiled(gated, norm_first)
    run(*leaves())  # there are none on the CPU
    assert found == []
    torch._dynamo.reset()
    monkeypatch.setattr(GatedFunctions, "serves", lambda *_: True)
    monkeypatch.setattr(package.ops, "gated", "")
    run, found = compiled(package, norm_first)
    run(*leaves())
    assert found == []


def test_two_norms_share_a_gate_and_others_read_it(
    gated: Package, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers are no writers."""
    monkeypatch.setattr(Worth, "of_gated", lambda *_: True)

    def step(x: Any, z: Any, w: Any) -> Any:
        return norm_first(x, z, w) + gate_first(x, z, w) + functional.gelu(z)

    given = leaves()
    run, found = compiled(gated, step)
    close([run(*given), *grads(run(*given), *given)], [step(*given), *grads(step(*given), *given)])
    assert len(found) == 2


def test_gradients_that_a_graph_turns_on_itself_are_seen(gated: Package, asked: Asked) -> None:
    def step(x: Any, z: Any, w: Any) -> Any:
        with torch.enable_grad():
            gates = z * 1.0
            y = norm_first(x, gates, w)
            gates.mul_(2.0)
            return y + gates

    given = leaves(torch.bfloat16)
    run, found = compiled(gated, step)
    with torch.no_grad():
        y, wanted = run(*given), step(*given)
    close([y, *grads(y, *given)], [wanted, *grads(wanted, *given)])
    assert found == []


def test_views_may_have_their_arguments_by_name(gated: Package, asked: Asked) -> None:
    def step(x: Any, z: Any, w: Any) -> Any:
        return norm_first(torch.reshape(input=x, shape=(-1, N)), z.view(-1, N), w)

    run, found = compiled(gated, step)
    close(run(*leaves()), step(*leaves()))
    assert len(found) == 1


BESIDE: dict[str, tuple[Callable[..., Any], bool]] = {
    "products of matrices": (lambda x, z, w, m: norm_first(x @ m, z @ m, w) @ m, True),
    "a gate of a slice": (lambda x, z, w, m: norm_first(x, torch.cat((z, z), 1)[:, :S], w), True),
    "rows that are computed": (lambda x, z, w, m: norm_first(x * 2 + 1, z, w), False),
    "gates that are computed": (lambda x, z, w, m: norm_first(x, z * 2 + 1, w), False),
    "an activation behind": (lambda x, z, w, m: functional.gelu(norm_first(x, z, w)) @ m, False),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_inductor_would_fuse_with_it_decides(
    gated: Package, name: str, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    function, joined = BESIDE[name]
    given = [*leaves(), randn(N, N, seed=9)]
    run, found = compiled(gated, function)
    with caplog.at_level(logging.INFO):
        y = run(*given)
    close(y, function(*given))
    assert len(found) == joined
    told = [message for message in caplog.messages if message.startswith("gated norm")]
    assert len(told) == 1
    assert ("goes to the package" if joined else "is left to Inductor") in told[0]


@pytest.mark.parametrize("trains", [True, False])
def test_bytes_of_a_gated_norm(
    gated: Package, asked: Asked, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows, gates and results in the forward, and five of these in the backward, of four bytes."""
    given = [one.requires_grad_(trains) for one in (one.detach() for one in leaves())]
    run, _ = compiled(gated, norm_first)
    with caplog.at_level(logging.INFO):
        run(*given)
    numbers = (32, 32) if trains else (12, 12)
    said = "{} bytes move for an element with it, {} without".format(*numbers)
    assert any(message.endswith(said) for message in caplog.messages), caplog.messages


def test_a_gate_that_has_to_be_copied_counts_twice_more(
    gated: Package, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3-Next's projection has the gates of several heads side by side."""

    def step(x: Any, z: Any, w: Any) -> Any:
        return norm_first(x.reshape(-1, N), z[..., :2, :].reshape(-1, N), w)

    x, w = randn(B, S, 4, N).requires_grad_(), leaves()[2]
    z = randn(B, S, 2, 3, N, seed=5).requires_grad_()
    run, found = compiled(gated, step)
    with caplog.at_level(logging.INFO):
        y = run(x, z, w)
    close([y, *grads(y, x, z, w)], [step(x, z, w), *grads(step(x, z, w), x, z, w)])
    assert len(found) == 1
    assert any("40 bytes move for an element with it, 32" in m for m in caplog.messages)


# ---- The operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [("silu", True), ("sigmoid", False)])
def test_the_operator_keeps_the_rules_of_operators(kind: tuple[str, bool]) -> None:
    x, z, w = leaves()
    given = (x, z, w, 1e-6, *kind, "*/gated")
    torch.library.opcheck(rms_norm_gated_forward, given)
    turned = [one.detach().transpose(0, 1) for one in (x, z)]
    y = rms_norm_gated_forward(*turned, *given[2:])
    assert y.is_contiguous()
    close(y, formula(*turned, w, 1e-6, kind))
    double = [one.double().detach().requires_grad_() for one in (x, z, w)]
    operator = partial(rms_norm_gated_forward, *double[:2])
    assert operator(None, *given[3:]).requires_grad
    run = lambda *leaf: rms_norm_gated_forward(*leaf, *given[3:])  # noqa: E731
    assert torch.autograd.gradcheck(run, double)
    assert torch.autograd.gradgradcheck(run, double)


def test_kernels_of_both_directions_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def explain(server: RowServer, *given: Any, offset: bool) -> dict[str, Any]:
        asked.append((server.operation.name, *given, offset))
        return {"kernel": None if server.operation.name.endswith("backward") else "some"}

    class Rows:
        is_cuda, dtype, shape = True, torch.bfloat16, torch.Size((3, 5, 128))

    monkeypatch.setattr(RowServer, "explain", explain)
    functions: Any = gated_packages.functions
    assert functions.serves(Rows, None, ("sigmoid", False), trains=False)
    assert not functions.serves(Rows, None, ("sigmoid", False), trains=True)
    rest = (15, 128, "bf16", "bf16", False)
    name = "gate_first_rmsnorm_sigmoid"
    assert asked == [(f"{name}_forward", *rest)] * 2 + [(f"{name}_backward", *rest)]
    assert not functions.serves(torch.ones(3, 128), None, ("silu", True), trains=False)


# ---- Models of transformers ----------------------------------------------------------------------

LINEAR = {"layer_types": ["linear_attention"] * 2}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3Next": ({**LINEAR, "head_dim": 16, "mlp_only_layers": [0, 1]}, 2),
    "Qwen3_5": (LINEAR, 2),
    "OlmoHybrid": ({}, 1),
}
"""Models with gated norms, what else they are made with, and how many are joined."""


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(
    gated: Package, name: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of their gated norms are computed here, and not by another library's kernel."""
    monkeypatch.setattr(Worth, "of_gated", lambda *_: True)
    others, count = MODELS[name]
    model, ids = model_of(name, **others), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    run, found = compiled(gated, model)
    loss = run(ids, labels=ids, use_cache=False).loss
    parameters = list(model.parameters())
    seen = [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]
    assert len(found) == count
    torch.testing.assert_close(seen, wanted, rtol=1e-3, atol=1e-4)


def test_the_librarys_backend_knows_the_packages_of_gates() -> None:
    ops = chosen("rmsnorm_backward").ops
    assert (ops.gated, ops.rotated) == ("normforge.gated_packages", "normforge.rope_packages")
