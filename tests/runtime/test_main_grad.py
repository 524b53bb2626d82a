"""`RMSNorm(main_grad=True)`: the contract of trainers that accumulate gradients in a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from normforge.api import Package
from tests.support.entry_points import randn, same


def trained(norm: torch.nn.Module, seed: int = 0, **with_residual: bool) -> list[torch.Tensor]:
    """y and dx of one micro-batch of bf16 rows, and with a residual what belongs to that."""
    x = randn(6, *norm.normalized_shape, dtype=torch.bfloat16, seed=seed).requires_grad_()
    if not with_residual:
        y = norm(x)
        y.sin().sum().backward()
        return [y, x.grad]
    residual = randn(*x.shape, seed=seed + 1).requires_grad_()
    y, stream = norm(x, residual)
    (y.sin().sum() + stream.cos().sum()).backward()
    return [y, stream, x.grad, residual.grad]


def pair(package: Package, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
    """A norm with a buffer of 3s, and one without."""
    ours = package.RMSNorm(*arguments, **keywords, dtype=torch.bfloat16, main_grad=True)
    plain = package.RMSNorm(*arguments, **keywords, dtype=torch.bfloat16)
    with torch.no_grad():
        ours.weight.copy_(randn(*plain.weight.shape, seed=5))
    plain.load_state_dict(ours.state_dict())
    ours.weight.main_grad = torch.full(ours.weight.shape, 3.0)
    return ours, plain


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("how", [{}, {"with_residual": True}])
def test_gradients_are_added_to_the_buffer(
    package: Package, shape: tuple[int, ...], how: dict[str, bool]
) -> None:
    ours, plain = pair(package, shape, 1e-6, weight_offset=1.0)
    plain.float()  # dw before its rounding
    wanted = torch.full(shape, 3.0)
    for seed in range(3):
        found, expected = trained(ours, seed, **how), trained(plain, seed, **how)
        assert same(found, expected)
        wanted += plain.weight.grad
        plain.weight.grad = None
    assert torch.allclose(ours.weight.main_grad, wanted, rtol=1e-6)
    assert ours.weight.grad is None  # nobody asked for a dummy


@pytest.mark.parametrize("zero_out", [False, True])
def test_contract_of_the_hook(package: Package, zero_out: bool) -> None:
    ours, _ = pair(package, 16)
    ours.weight.grad_added_to_main_grad = False
    if zero_out:
        ours.weight.zero_out_wgrad = True
    seen = []

    def hook(parameter: Any) -> None:
        seen.append(parameter.grad_added_to_main_grad)
        assert (parameter.grad.shape, parameter.grad.dtype) == ((16,), torch.bfloat16)
        assert not zero_out or not parameter.grad.any()
        parameter.grad = None

    ours.weight.register_post_accumulate_grad_hook(hook)
    trained(ours)
    assert seen == [True]
    assert not torch.equal(ours.weight.main_grad, torch.full((16,), 3.0))


def test_buffer_may_be_overwritten_or_made_on_request(package: Package) -> None:
    ours, plain = pair(package, 16)
    plain.float()
    ours.weight.overwrite_main_grad = True
    trained(ours), trained(plain)
    assert torch.equal(ours.weight.main_grad, plain.weight.grad)
    made = torch.zeros(16, dtype=torch.bfloat16)  # it has the weight's dtype
    ours.weight.get_main_grad = lambda: made
    trained(ours)
    assert torch.equal(made, plain.weight.grad.bfloat16())


def test_what_is_not_wanted_touches_nothing(package: Package) -> None:
    ours, plain = pair(package, 16)
    ours.weight.requires_grad_(False)
    ours.weight.grad_added_to_main_grad = False
    plain.weight.requires_grad_(False)
    found, expected = trained(ours), trained(plain)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(ours.weight.main_grad, torch.full((16,), 3.0))
    assert ours.weight.grad_added_to_main_grad is False
    with torch.no_grad():
        assert torch.equal(ours(randn(2, 16)), plain(randn(2, 16)))


def test_buffer_that_is_missing_is_named(package: Package) -> None:
    ours, _ = pair(package, 16)
    del ours.weight.main_grad
    with pytest.raises(RuntimeError, match=r"weight\.main_grad, and there is none"):
        trained(ours)


@pytest.mark.parametrize("loss", ["sum", "square"])
def test_no_second_derivative(package: Package, loss: str) -> None:
    ours, _ = pair(package, 16)
    x = randn(4, 16).requires_grad_()
    y = ours(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum() if loss == "sum" else y.square().sum(), x, create_graph=True)
    assert torch.equal(ours.weight.main_grad, torch.full((16,), 3.0))


def test_no_batched_backward_and_no_forward_mode(package: Package) -> None:
    ours, _ = pair(package, 16)
    x = randn(4, 16).requires_grad_()
    y = ours(x)
    with pytest.raises(RuntimeError, match="no batched backward"):
        torch.autograd.grad(y, x, randn(3, 4, 16), is_grads_batched=True, retain_graph=True)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward mode"):
        torch.autograd.grad(y, x, forward_ad.make_dual(randn(4, 16), randn(4, 16)))
    assert torch.equal(ours.weight.main_grad, torch.full((16,), 3.0))


@pytest.mark.parametrize("late", [0, 1])
def test_a_gradient_that_is_on_its_way_goes_through_the_operator(
    package: Package, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    run, calls = package._norm.run, 0

    def count(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return run(*given)

    monkeypatch.setattr(package._norm, "run", count)
    results = []
    for is_late in (False, True):
        ours, _ = pair(package, 16)
        x = randn(4, 16, dtype=torch.bfloat16).requires_grad_()
        gradients = [randn(4, 16, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
        if is_late:
            gradients[late] = AsyncCollectiveTensor(gradients[late])
        results.append([*torch.autograd.grad(ours(x, x.detach()), x, gradients)])
        results[-1].append(ours.weight.main_grad)
        assert calls == 1  # the first round has called it
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_compiled_models(package: Package, reentrant: bool) -> None:
    """Recomputed activations come from hooks, and compiled code leaves its graph for the norm."""
    from torch.utils.checkpoint import checkpoint

    def buffer(how: str) -> torch.Tensor:
        ours, _ = pair(package, 16)
        x = randn(4, 16, dtype=torch.bfloat16).requires_grad_()
        block = lambda x: ours(x.sin()).cos()  # noqa: E731
        if how == "compiled":
            torch._dynamo.reset()
            y = torch.compile(block, backend="aot_eager")(x)
        elif how == "checkpoint":
            y = checkpoint(block, x, use_reentrant=reentrant)
        else:
            y = block(x)
        y.sum().backward()
        main_grad: torch.Tensor = ours.weight.main_grad
        return main_grad

    assert torch.equal(buffer("checkpoint"), buffer("eager"))
    assert torch.equal(buffer("compiled"), buffer("eager"))


def test_it_is_said_and_kept(package: Package) -> None:
    import copy

    ours, _ = pair(package, 16)
    assert "main_grad=True" in repr(ours)
    again = copy.deepcopy(ours)
    again.weight.main_grad = torch.zeros(16)
    trained(again)
    assert again.weight.main_grad.any()
    assert not package.RMSNorm(16, elementwise_affine=False, main_grad=True).main_grad


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
def test_a_narrow_buffer_of_a_narrow_weight_takes_gradients_of_wide_rows(
    package: Package, overwrite: bool, wide_residual: bool
) -> None:
    ours, plain = pair(package, 16)
    ours.weight.main_grad = ours.weight.main_grad.bfloat16()
    ours.weight.overwrite_main_grad = overwrite
    rows = randn(6, 16)
    residual = randn(6, 16, seed=1) if wide_residual else None
    for norm in (ours, plain):
        x = rows.bfloat16() if wide_residual else rows
        y = norm(x) if residual is None else norm(x, residual)[0]
        y.sin().sum().backward()
    wanted = plain.weight.grad + (0.0 if overwrite else 3.0)
    assert ours.weight.main_grad.dtype == torch.bfloat16
    torch.testing.assert_close(ours.weight.main_grad, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("weight", "buffer"),
    [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float64")],
)
def test_a_buffer_of_another_dtype_is_refused(package: Package, weight: str, buffer: str) -> None:
    norm = package.RMSNorm(16, dtype=getattr(torch, weight), main_grad=True)
    norm.weight.main_grad = torch.zeros(16, dtype=getattr(torch, buffer))
    y = norm(randn(6, 16, dtype=getattr(torch, weight)).requires_grad_())
    with pytest.raises(TypeError, match="dw_out must have the weight's dtype"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(7), r"the weight's shape \(8,\), got \(7,\)"),
        (torch.zeros(8, dtype=torch.float16), "main_grad as dw_out: dw_out must have the weight's"),
    ],
)
def test_a_buffer_that_does_not_fit_is_called_by_its_name(
    package: Package, buffer: torch.Tensor, message: str
) -> None:
    norm: Any = package.RMSNorm(8, main_grad=True)
    norm.weight.main_grad = buffer
    with pytest.raises((RuntimeError, TypeError), match=message):
        norm(randn(4, 8)).sum().backward()
