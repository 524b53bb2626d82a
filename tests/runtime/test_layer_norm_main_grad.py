"""`LayerNorm(main_grad=True)`: the contract of trainers that accumulate gradients in buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from normforge.frontends import layer_norm_main_grad as module
from normforge.frontends.layer_norm import LayerNormPackage
from tests.support.entry_points import randn, same, write_layer_norm_package

BF16 = torch.bfloat16
NAMES = ("weight", "bias")


@pytest.fixture
def package(tmp_path: Path) -> LayerNormPackage:
    return write_layer_norm_package(tmp_path / "package")


def trained(norm: torch.nn.Module, seed: int = 0, **with_residual: bool) -> list[torch.Tensor]:
    """y and dx of one micro-batch of bf16 rows, and with a residual what belongs to that."""
    x = randn(6, *norm.normalized_shape, dtype=BF16, seed=seed).requires_grad_()
    if not with_residual:
        y = norm(x)
        y.sin().sum().backward()
        return [y, x.grad]
    residual = randn(*x.shape, seed=seed + 1).requires_grad_()
    y, stream = norm(x, residual)
    (y.sin().sum() + stream.cos().sum()).backward()
    return [y, stream, x.grad, residual.grad]


def pair(package: LayerNormPackage, shape: Any, **options: Any) -> tuple[Any, Any]:
    """A norm with buffers of 3s, and one without."""
    ours = package.LayerNorm(shape, 1e-5, **options, dtype=BF16, main_grad=True)
    plain = package.LayerNorm(shape, 1e-5, **options, dtype=BF16)
    with torch.no_grad():
        for i, one in enumerate(ours.parameters()):
            one.copy_(randn(*one.shape, seed=5 + i))
            one.main_grad = torch.full(one.shape, 3.0)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("how", [{}, {"with_residual": True}])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_added_to_the_buffers(
    package: LayerNormPackage, shape: tuple[int, ...], how: dict[str, bool], bias: bool
) -> None:
    ours, plain = pair(package, shape, bias=bias)
    plain.float()  # dw and db before their rounding
    wanted = [torch.full(shape, 3.0) for _ in ours.parameters()]
    for seed in range(3):
        found, expected = trained(ours, seed, **how), trained(plain, seed, **how)
        assert same(found, expected)
        for total, one in zip(wanted, plain.parameters(), strict=True):
            total += one.grad
            one.grad = None
    for total, one in zip(wanted, ours.parameters(), strict=True):
        torch.testing.assert_close(one.main_grad, total, rtol=1e-6, atol=1e-6)
        assert one.grad is None  # nobody asked for a dummy


def test_contract_of_the_hook(package: LayerNormPackage) -> None:
    ours, _ = pair(package, 16)
    seen = []

    def hook(parameter: Any) -> None:
        seen.append(parameter.grad_added_to_main_grad)
        assert (parameter.grad.shape, parameter.grad.dtype) == ((16,), BF16)
        assert not parameter.grad.any()
        parameter.grad = None

    for one in ours.parameters():
        one.grad_added_to_main_grad, one.zero_out_wgrad = False, True
        one.register_post_accumulate_grad_hook(hook)
    trained(ours)
    assert seen == [True, True]
    assert all(not torch.equal(one.main_grad, torch.full((16,), 3.0)) for one in ours.parameters())


def test_buffers_may_be_overwritten_or_made_on_request(package: LayerNormPackage) -> None:
    ours, plain = pair(package, 16)
    plain.float()
    ours.weight.overwrite_main_grad = True
    made = torch.zeros(16, dtype=BF16)  # it has the bias's dtype
    ours.bias.get_main_grad = lambda: made
    trained(ours), trained(plain)
    assert torch.equal(ours.weight.main_grad, plain.weight.grad)
    assert torch.equal(made, plain.bias.grad.bfloat16())


@pytest.mark.parametrize("frozen", [*NAMES, "both"])
def test_what_is_not_wanted_touches_nothing(package: LayerNormPackage, frozen: str) -> None:
    ours, plain = pair(package, 16)
    for name in NAMES:
        getattr(ours, name).grad_added_to_main_grad = False
        if frozen in (name, "both"):
            for norm in (ours, plain):
                getattr(norm, name).requires_grad_(False)
    found, expected = trained(ours), trained(plain)
    assert torch.equal(found[1], expected[1])
    for name in NAMES:
        one, touched = getattr(ours, name), frozen not in (name, "both")
        assert torch.equal(one.main_grad, torch.full((16,), 3.0)) is not touched
        assert one.grad_added_to_main_grad is touched
    with torch.no_grad():
        x = randn(2, 16, dtype=BF16)
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("rows", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [NAMES, NAMES[:1], NAMES[1:]])
def test_parameters_may_be_narrower_than_the_rows(
    package: LayerNormPackage, rows: torch.dtype, narrow: tuple[str, ...]
) -> None:
    ours, plain = pair(package, 16)
    for name in {*NAMES} - {*narrow}:
        for norm in (ours, plain):
            setattr(norm, name, torch.nn.Parameter(getattr(norm, name).detach().float()))
        getattr(ours, name).main_grad = torch.full((16,), 3.0)
    ours_x, x = (randn(6, 16, dtype=rows).requires_grad_() for _ in range(2))
    y = ours(ours_x)
    y.sin().sum().backward()
    assert torch.equal(y, plain(x)) and y.dtype == rows
    plain.float()  # dw and db before their rounding
    plain(x).sin().sum().backward()
    torch.testing.assert_close(ours_x.grad, x.grad)
    for name in NAMES:
        wanted = 3 + getattr(plain, name).grad
        torch.testing.assert_close(getattr(ours, name).main_grad, wanted)


@pytest.mark.parametrize("wants", ["x", "residual", "both", "neither"])
@pytest.mark.parametrize("used", ["y", "stream", "both"])
def test_each_gets_the_gradient_of_what_is_used(
    package: LayerNormPackage, wants: str, used: str
) -> None:
    ours, plain = pair(package, 16)
    found: list[list[Any]] = []
    for norm in (ours, plain):
        for one in norm.parameters():
            one.grad_added_to_main_grad = False
        given = [randn(6, 16, dtype=BF16, seed=seed) for seed in (1, 2)]
        for one, name in zip(given, ("x", "residual"), strict=True):
            one.requires_grad_(wants in (name, "both"))
        y, stream = norm(*given)
        found.append([y.requires_grad, stream.requires_grad])
        loss = (y.sin().sum() if used != "stream" else 0) + (
            stream.cos().sum() if used != "y" else 0
        )
        if loss.requires_grad:
            loss.backward()
        found[-1] += [one.grad for one in given]
    for one, other in zip(*found, strict=True):
        assert one == other if one is None or isinstance(one, bool) else torch.equal(one, other)
    for one in ours.parameters():
        assert one.grad_added_to_main_grad is (used != "stream")
        assert torch.equal(one.main_grad, torch.full((16,), 3.0)) is (used == "stream")
        assert (one.grad is None) is (used == "stream")


class Late(torch.Tensor):
    """A gradient that another library has not finished."""


@pytest.mark.parametrize("late", ["none", "dy", "dstream"])
def test_a_gradient_of_another_kind_goes_to_the_operator(
    package: LayerNormPackage, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair(package, 16)
    went: list[str] = []
    for way, where, name in (("run", package, "_run"), ("operator", package.ops, "backward")):
        real = getattr(where, name)
        spy = lambda *given, way=way, real=real: (went.append(way), real(*given))[1]  # noqa: E731
        monkeypatch.setattr(where, name, spy)
    x, residual = (randn(6, 16, dtype=BF16, seed=seed).requires_grad_() for seed in (1, 2))
    given = {"dy": randn(6, 16, dtype=BF16, seed=3), "dstream": randn(6, 16, dtype=BF16, seed=4)}
    incoming = [one.as_subclass(Late) if name == late else one for name, one in given.items()]
    torch.autograd.backward(ours(x, residual), incoming)
    assert went[0] == ("run" if late == "none" else "operator")


def test_rows_that_were_made_in_inference_mode(package: LayerNormPackage) -> None:
    ours, plain = pair(package, 16)
    plain.float()
    with torch.inference_mode():
        given = [randn(6, 16, dtype=BF16, seed=seed) for seed in (1, 2)]
    usual = [one.clone() for one in given]
    for count in (1, 2):
        for norm, rows in ((ours, given), (plain, usual)):
            y = norm(*rows[:count])
            (y if count == 1 else y[0] + y[1]).sin().sum().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.main_grad, 3 + other.grad)


@pytest.mark.parametrize("place", range(4))
def test_no_dtensor(package: LayerNormPackage, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(package, 16)
    x, residual = (randn(6, 16, dtype=BF16, seed=seed) for seed in (1, 2))
    sharded = (x, residual, ours.weight, ours.bias)[place]
    monkeypatch.setattr(module, "is_dtensor", lambda one: one is sharded)
    with pytest.raises(TypeError, match=r"LayerNorm\(main_grad=True\) takes no DTensor"):
        ours(x, residual)


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_does_not_fit_is_called_by_its_name(
    package: LayerNormPackage, name: str
) -> None:
    ours, _ = pair(package, 16)
    one = getattr(ours, name)
    other = getattr(ours, NAMES[1 - NAMES.index(name)])
    for buffer, kind, said in (
        (
            None,
            RuntimeError,
            rf"LayerNorm\(main_grad=True\) adds its gradient to {name}\.main_grad",
        ),
        (torch.zeros(16, dtype=torch.float16), TypeError, rf"{name}\.main_grad must be of"),
        (
            torch.zeros(15),
            RuntimeError,
            rf"{name}\.main_grad must be contiguous, with the {name}'s",
        ),
    ):
        one.main_grad = buffer
        with pytest.raises(kind, match=said):
            trained(ours)
        assert torch.equal(other.main_grad, torch.full((16,), 3.0))  # nor is the other one changed


def test_no_other_derivatives(package: LayerNormPackage) -> None:
    ours, _ = pair(package, 16)
    x = randn(4, 16, dtype=BF16).requires_grad_()
    y = ours(x)
    refused = r"LayerNorm\(main_grad=True\) has no second derivative"
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(ours(x), x, torch.ones(2, *y.shape), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=refused):
        torch.func.vmap(ours)(x)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        ours(forward_ad.make_dual(x, x)).sum().backward()
    for one in ours.parameters():
        assert torch.equal(one.main_grad, torch.full((16,), 3.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_compiled_models(package: LayerNormPackage, reentrant: bool) -> None:
    ours, plain = pair(package, 16)
    plain.float()
    torch._dynamo.reset()
    compiled: Any = torch.compile(ours, backend="aot_eager")
    x = randn(6, 16, dtype=BF16).requires_grad_()
    wanted = [torch.full((16,), 3.0) for _ in NAMES]
    for norm in (compiled, lambda rows: checkpoint(ours, rows, use_reentrant=reentrant)):
        norm(x).sin().sum().backward()
        plain(x).sin().sum().backward()
        for total, one in zip(wanted, plain.parameters(), strict=True):
            total += one.grad
            one.grad = None
        for total, one in zip(wanted, ours.parameters(), strict=True):
            torch.testing.assert_close(one.main_grad, total, rtol=1e-6, atol=1e-6)


def test_it_is_said(package: LayerNormPackage) -> None:
    ours, plain = pair(package, 16)
    assert "main_grad=True" in repr(ours) and "main_grad" not in repr(plain)
    assert not package.LayerNorm(16, elementwise_affine=False, main_grad=True).main_grad
