"""`main_grad=True` of both norms: the contract of trainers that accumulate gradients in buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

from normforge.frontends import layer_norm_main_grad
from tests.support.entry_points import randn, same, spied, write_layer_norm_package, write_package

BF16 = torch.bfloat16
NAMES = ("weight", "bias")
THREES = torch.full((16,), 3.0)
Build = Callable[..., Any]
of_layer_norm = pytest.mark.parametrize("kind", ["LayerNorm"], indirect=True)
of_rms_norm = pytest.mark.parametrize("kind", ["RMSNorm"], indirect=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("packages")
    rms, layer = write_package(folder / "rms"), write_layer_norm_package(folder / "layer")
    return {"RMSNorm": rms, "LayerNorm": layer}


@pytest.fixture(params=["RMSNorm", "LayerNorm"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def build(kind: str, packages: dict[str, Any]) -> Build:
    """The module of a package."""
    found: Build = getattr(packages[kind], kind)
    return found


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


def pair(build: Build, shape: Any = 16, **options: Any) -> tuple[Any, Any]:
    """A norm with buffers of 3s, and one without."""
    ours = build(shape, 1e-5, **options, dtype=BF16, main_grad=True)
    plain = build(shape, 1e-5, **options, dtype=BF16)
    with torch.no_grad():
        for i, one in enumerate(ours.parameters()):
            one.copy_(randn(*one.shape, seed=5 + i))
            one.main_grad = torch.full(one.shape, 3.0)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def buffers(norm: Any) -> list[torch.Tensor]:
    return [one.main_grad for one in norm.parameters()]


def untouched(norm: Any) -> bool:
    return all(torch.equal(one, THREES) for one in buffers(norm))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("RMSNorm", {"weight_offset": 1.0}), ("LayerNorm", {}), ("LayerNorm", {"bias": False})],
    indirect=["kind"],
)
@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("how", [{}, {"with_residual": True}])
def test_gradients_are_added_to_the_buffers(
    build: Build, shape: tuple[int, ...], how: dict[str, bool], options: dict[str, Any]
) -> None:
    ours, plain = pair(build, shape, **options)
    plain.float()  # dw and db before their rounding
    wanted = [torch.full(shape, 3.0) for _ in ours.parameters()]
    for seed in range(3):
        assert same(trained(ours, seed, **how), trained(plain, seed, **how))
        for total, one in zip(wanted, plain.parameters(), strict=True):
            total += one.grad
            one.grad = None
    torch.testing.assert_close(buffers(ours), wanted, rtol=1e-6, atol=1e-6)
    assert all(one.grad is None for one in ours.parameters())  # nobody asked for a dummy


@pytest.mark.parametrize("zero_out", [False, True])
def test_contract_of_the_hook(build: Build, zero_out: bool) -> None:
    ours, _ = pair(build)
    seen = []

    def hook(parameter: Any) -> None:
        seen.append(parameter.grad_added_to_main_grad)
        assert (parameter.grad.shape, parameter.grad.dtype) == ((16,), BF16)
        assert not zero_out or not parameter.grad.any()
        parameter.grad = None

    for one in ours.parameters():
        one.grad_added_to_main_grad = False
        if zero_out:
            one.zero_out_wgrad = True
        one.register_post_accumulate_grad_hook(hook)
    trained(ours)
    assert seen == [True] * len(buffers(ours))
    assert not any(torch.equal(one, THREES) for one in buffers(ours))


def test_buffers_may_be_overwritten_or_made_on_request(build: Build) -> None:
    ours, plain = pair(build)
    plain.float()
    for one in ours.parameters():
        one.overwrite_main_grad = True
    trained(ours), trained(plain)
    wanted = [one.grad for one in plain.parameters()]
    assert same(buffers(ours), wanted)
    made = [torch.zeros(16, dtype=BF16) for _ in wanted]  # they have the dtype of the weight
    for one, buffer in zip(ours.parameters(), made, strict=True):
        one.overwrite_main_grad, one.get_main_grad = False, lambda buffer=buffer: buffer
    trained(ours)
    assert same(made, [one.bfloat16() for one in wanted])


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [("RMSNorm", ("weight",)), *(("LayerNorm", one) for one in (NAMES[:1], NAMES[1:], NAMES))],
    indirect=["kind"],
)
def test_what_is_not_wanted_touches_nothing(build: Build, frozen: tuple[str, ...]) -> None:
    ours, plain = pair(build)
    for norm in (ours, plain):
        for name, one in norm.named_parameters():
            one.grad_added_to_main_grad = False
            one.requires_grad_(name not in frozen)
    found, expected = trained(ours), trained(plain)
    assert torch.equal(found[1], expected[1])
    for name, one in ours.named_parameters():
        assert torch.equal(one.main_grad, THREES) is (name in frozen)
        assert one.grad_added_to_main_grad is (name not in frozen)
    with torch.no_grad():
        x = randn(2, 16, dtype=BF16)
        assert torch.equal(ours(x), plain(x))


@of_layer_norm
@pytest.mark.parametrize("rows", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [NAMES, NAMES[:1], NAMES[1:]])
def test_parameters_may_be_narrower_than_the_rows(
    build: Build, rows: torch.dtype, narrow: tuple[str, ...]
) -> None:
    ours, plain = pair(build)
    for name in {*NAMES} - {*narrow}:
        for norm in (ours, plain):
            setattr(norm, name, torch.nn.Parameter(getattr(norm, name).detach().float()))
        getattr(ours, name).main_grad = THREES.clone()
    ours_x, x = (randn(6, 16, dtype=rows).requires_grad_() for _ in range(2))
    y = ours(ours_x)
    y.sin().sum().backward()
    assert torch.equal(y, plain(x)) and y.dtype == rows
    plain.float()  # dw and db before their rounding
    plain(x).sin().sum().backward()
    torch.testing.assert_close(ours_x.grad, x.grad)
    torch.testing.assert_close(buffers(ours), [3 + one.grad for one in plain.parameters()])


@of_rms_norm
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
def test_a_narrow_buffer_of_a_narrow_weight_takes_gradients_of_wide_rows(
    build: Build, overwrite: bool, wide_residual: bool
) -> None:
    ours, plain = pair(build)
    ours.weight.main_grad = ours.weight.main_grad.bfloat16()
    ours.weight.overwrite_main_grad = overwrite
    rows, residual = randn(6, 16), randn(6, 16, seed=1)
    for norm in (ours, plain):
        y = norm(rows.bfloat16(), residual)[0] if wide_residual else norm(rows)
        y.sin().sum().backward()
    wanted = plain.weight.grad + (0.0 if overwrite else 3.0)
    assert ours.weight.main_grad.dtype == BF16
    torch.testing.assert_close(ours.weight.main_grad, wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("wants", ["x", "residual", "both", "neither"])
@pytest.mark.parametrize("used", ["y", "stream", "both"])
def test_each_gets_the_gradient_of_what_is_used(build: Build, wants: str, used: str) -> None:
    ours, plain = pair(build)
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
        assert torch.equal(one.main_grad, THREES) is (used == "stream")
        assert (one.grad is None) is (used == "stream")


@pytest.mark.parametrize("late", [0, 1])
def test_a_gradient_that_is_on_its_way_goes_through_the_operator(
    build: Build, packages: Any, kind: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = packages[kind]
    of_node = (package._norm, "run") if kind == "RMSNorm" else (package, "_run")
    by_node, by_operator = spied(monkeypatch, *of_node), spied(monkeypatch, package.ops, "backward")
    results = []
    for is_late in (False, True):
        ours, _ = pair(build)
        x, residual = (randn(4, 16, dtype=BF16, seed=seed).requires_grad_() for seed in (0, 3))
        gradients: list[Any] = [randn(4, 16, dtype=BF16, seed=seed) for seed in (1, 2)]
        if is_late:
            gradients[late] = AsyncCollectiveTensor(gradients[late])
        found = torch.autograd.grad(ours(x, residual), (x, residual), gradients)
        results.append([*found, *buffers(ours)])
        assert (len(by_node) > 0, len(by_operator) > 0) == (not is_late, is_late)
        by_node.clear()
    assert same(*results)


def test_rows_that_were_made_in_inference_mode(build: Build) -> None:
    ours, plain = pair(build)
    plain.float()
    with torch.inference_mode():
        given = [randn(6, 16, dtype=BF16, seed=seed) for seed in (1, 2)]
    usual = [one.clone() for one in given]
    for count in (1, 2):
        for norm, rows in ((ours, given), (plain, usual)):
            y = norm(*rows[:count])
            (y if count == 1 else y[0] + y[1]).sin().sum().backward()
    torch.testing.assert_close(buffers(ours), [3 + one.grad for one in plain.parameters()])


@of_layer_norm
@pytest.mark.parametrize("place", range(4))
def test_no_dtensor(build: Build, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(build)
    x, residual = (randn(6, 16, dtype=BF16, seed=seed) for seed in (1, 2))
    sharded = (x, residual, ours.weight, ours.bias)[place]
    monkeypatch.setattr(layer_norm_main_grad, "is_dtensor", lambda one: one is sharded)
    with pytest.raises(TypeError, match=r"LayerNorm\(main_grad=True\) takes no DTensor"):
        ours(x, residual)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_compiled_models(build: Build, reentrant: bool) -> None:
    """Recomputed activations come from hooks, and compiled code leaves its graph for the norm."""
    found = []
    for around in (
        lambda block: block,
        lambda block: partial(checkpoint, block, use_reentrant=reentrant),
        partial(torch.compile, backend="aot_eager"),
    ):
        torch._dynamo.reset()
        ours, _ = pair(build)
        run: Any = around(lambda x, ours=ours: ours(x.sin()).cos())
        run(randn(4, 16, dtype=BF16).requires_grad_()).sum().backward()
        found.append(buffers(ours))
        assert not untouched(ours)
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_it_is_said_and_kept(build: Build) -> None:
    ours, plain = pair(build)
    assert "main_grad=True" in repr(ours) and "main_grad" not in repr(plain)
    again = copy.deepcopy(ours)
    for one in again.parameters():
        one.main_grad = torch.zeros(16)
    trained(again)
    assert all(one.any() for one in buffers(again)) and untouched(ours)
    assert not build(16, elementwise_affine=False, main_grad=True).main_grad


# ---- What is refused -----------------------------------------------------------------------------

NARROW = torch.zeros(16, dtype=torch.float16)
WRONG: list[tuple[str, str, Any, type[Exception], str]] = [
    ("RMSNorm", "weight", None, RuntimeError, r"weight\.main_grad, and there is none"),
    ("RMSNorm", "weight", torch.zeros(7), RuntimeError, r"weight's shape \(16,\), got \(7,\)"),
    ("RMSNorm", "weight", NARROW, TypeError, "main_grad as dw_out: dw_out must have the weight's"),
]
for NAME in NAMES:
    WRONG += [
        ("LayerNorm", NAME, None, RuntimeError, rf"adds its gradient to {NAME}\.main_grad"),
        ("LayerNorm", NAME, NARROW, TypeError, rf"{NAME}\.main_grad must be of"),
        (
            *("LayerNorm", NAME, torch.zeros(15), RuntimeError),
            rf"{NAME}\.main_grad must be contiguous, with the {NAME}'s",
        ),
    ]


@pytest.mark.parametrize(("kind", "name", "buffer", "error", "said"), WRONG, indirect=["kind"])
def test_a_buffer_that_does_not_fit_is_called_by_its_name(
    build: Build, name: str, buffer: Any, error: type[Exception], said: str
) -> None:
    ours, _ = pair(build)
    getattr(ours, name).main_grad = buffer
    with pytest.raises(error, match=said):
        trained(ours)
    for other, one in ours.named_parameters():  # nor is the other one changed
        assert other == name or torch.equal(one.main_grad, THREES)


@of_rms_norm
@pytest.mark.parametrize(
    ("weight", "buffer"),
    [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float64")],
)
def test_a_buffer_of_another_dtype_is_refused(build: Build, weight: str, buffer: str) -> None:
    norm = build(16, dtype=getattr(torch, weight), main_grad=True)
    norm.weight.main_grad = torch.zeros(16, dtype=getattr(torch, buffer))
    y = norm(randn(6, 16, dtype=getattr(torch, weight)).requires_grad_())
    with pytest.raises(TypeError, match="dw_out must have the weight's dtype"):
        y.sum().backward()


def of_a_sum(ours: Any, x: torch.Tensor) -> Any:
    return torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def of_squares(ours: Any, x: torch.Tensor) -> Any:
    return torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)


def batched(ours: Any, x: torch.Tensor) -> Any:
    return torch.autograd.grad(ours(x), x, torch.ones(2, 4, 16), is_grads_batched=True)


def dual(ours: Any, x: torch.Tensor) -> Any:
    y = ours(x)
    with forward_ad.dual_level():
        return torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones(4, 16), randn(4, 16)))


def of_each(ours: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(ours)(x)


SECOND = r"LayerNorm\(main_grad=True\) has no second derivative"
OTHER_DERIVATIVES = [
    ("RMSNorm", of_a_sum, "no second derivative"),
    ("RMSNorm", of_squares, "no second derivative"),
    ("RMSNorm", batched, "no batched backward"),
    ("RMSNorm", dual, "no forward mode"),
    *(("LayerNorm", way, SECOND) for way in (of_a_sum, of_squares, batched, of_each)),
]


@pytest.mark.parametrize(("kind", "way", "said"), OTHER_DERIVATIVES, indirect=["kind"])
def test_no_other_derivatives(build: Build, way: Any, said: str) -> None:
    ours, _ = pair(build)
    with pytest.raises(RuntimeError, match=said):
        way(ours.float(), randn(4, 16).requires_grad_())
    assert untouched(ours)


@of_layer_norm
def test_no_forward_mode_of_layer_norm(build: Build) -> None:
    ours, _ = pair(build)
    x = randn(4, 16, dtype=BF16).requires_grad_()
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        ours(forward_ad.make_dual(x, x)).sum().backward()
    assert untouched(ours)
