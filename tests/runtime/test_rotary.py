"""The rotary embedding alone: `apply_rope` and its derivatives, by PyTorch's operators on the CPU,
and what a package's kernel is asked for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import normforge
from generator.paths import GENERATED
from normforge import apply_rope
from normforge.frontends.rope import RotatedFunctions, RotatedPackage
from normforge.frontends.rope_node import SERVED
from normforge.frontends.rotary_node import rope
from normforge.rope import explain
from tests.support.library_functions import (
    HEAD,
    B,
    Kernels,
    check_rounded_once,
    gradients,
    repeated,
    rotated,
    turns,
)

check = torch.testing.assert_close
S, D = 5, HEAD


def heads(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", repeated(B, S))
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("columns", [D, D // 2, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], half: bool, columns: int, interleaved: bool
) -> None:
    x, (cos, sin) = heads(B, S, 3, D), turns(*shape, columns=columns)
    seen = [one[..., : columns // 2] if half else one for one in (cos, sin)]
    rotary_dim = None if columns == D else columns

    def run(x: torch.Tensor) -> torch.Tensor:
        return apply_rope(x, *seen, rotary_dim, interleaved)

    def wanted(x: torch.Tensor) -> torch.Tensor:
        return rotated(x, cos, sin, interleaved)

    check(run(x), wanted(x))
    check(gradients(run, [x]), gradients(wanted, [x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("of_turns", [torch.bfloat16, torch.float32, torch.float64])
def test_results_and_gradients_are_rounded_once(dtype: torch.dtype, of_turns: torch.dtype) -> None:
    x = heads(64, 2, D).detach().to(dtype).requires_grad_()
    cos, sin = turns(64, dtype=of_turns)
    check_rounded_once(
        lambda x: apply_rope(x, cos, sin),
        lambda x: rotated(x, cos.double(), sin.double()),
        [x],
    )


@pytest.mark.parametrize("columns", [D // 2, 2])
def test_columns_that_are_not_rotated_keep_their_bits(columns: int) -> None:
    x, ones = heads(B, S, 3, D, dtype=torch.float32), torch.ones(S, columns)
    turned = apply_rope(x, torch.inf * ones, ones, columns)
    assert torch.equal(turned[..., columns:], x[..., columns:])
    assert not turned[..., :columns].isfinite().any()


def test_it_can_be_differentiated_again() -> None:
    x, (cos, sin) = heads(2, 3, 2, 4), turns(3, columns=4)
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, cos, sin).pow(3), x)
    (dx,) = torch.autograd.grad(apply_rope(x, cos, sin).square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    check(again, torch.full_like(x, 2.0))  # a rotation keeps squares


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_kernel_is_asked_for_both_directions(
    interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward is the kernel of the forward, with the sign of the angles turned, and so is the
    backward of that."""
    functions, seen = RotatedFunctions(lambda _: "none", "of a rotary test"), list[Any]()
    served = SERVED(functions.form_named(interleaved=interleaved))
    monkeypatch.setattr(served, "_servers", {"rope": Kernels("rope", seen)})
    x, (cos, sin) = heads(B, S, 3, D), turns(1, S)
    y = functions.apply_rope(x, cos, sin, None, interleaved)
    dy = torch.ones_like(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    torch.autograd.grad(dx.sum(), dy)
    assert [given["sign"] for _, given in seen] == [1.0, -1.0, 1.0]
    assert [given.get("interleaved", False) for _, given in seen] == [interleaved] * 3
    for _, given in seen:
        assert given["cos"].shape == (1, S, 1, D // 2)
    SERVED.known.pop("of a rotary test+interleaved", None)
    SERVED.known.pop("of a rotary test")


def test_heads_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a packed projection, and heads that were transposed."""
    functions, seen = RotatedFunctions(lambda _: "none", "of a rotary test"), list[Any]()
    monkeypatch.setattr(functions, "_servers", {"rope": Kernels("rope", seen)})
    cos, sin = turns(1, S)
    packed = heads(B, S, 8 * D).view(B, S, 8, D)[..., 2:5, :]
    turned = heads(B, 3, S, D).transpose(1, 2)
    for x in (packed, turned):
        with torch.no_grad():
            y = functions.apply_rope(x, cos, sin)
        check(y, rotated(x, cos, sin).detach())
        assert seen[-1][1]["x"].data_ptr() == x.data_ptr()
        assert y.is_contiguous()
    SERVED.known.pop("of a rotary test")


REFUSED = {
    "no tensor": (lambda x, c, s: apply_rope([1.0], c, s), TypeError, "x must be a torch.Tensor"),
    "odd heads": (lambda x, c, s: apply_rope(x[..., :3], c, s), ValueError, "even number of"),
    "other tokens": (
        lambda x, c, s: apply_rope(x, c[:2], s),
        ValueError,
        "cos must have the shape",
    ),
    "learnt": (
        lambda x, c, s: apply_rope(x, c, s.requires_grad_()),
        ValueError,
        "sin has no gradient here",
    ),
    "a number": (lambda x, c, s: apply_rope(x, c, s, 4.0), TypeError, "rotary_dim must be an int"),
    "too many": (lambda x, c, s: apply_rope(x, c, s, D + 2), ValueError, "rotary_dim must be an"),
    "pairs": (lambda x, c, s: apply_rope(x, c, s, None, 1), TypeError, "interleaved must be True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words) as caught:
        call(heads(B, S, 3, D).detach(), *turns(S))
    assert "\n" not in str(caught.value)


def test_the_operator_keeps_the_rules_of_operators() -> None:
    cos, sin = (one[..., : D // 2].unsqueeze(-2).float() for one in turns(1, S))
    for sign in (1.0, -1.0):
        given = (heads(B, S, 3, D, dtype=torch.float32), cos, sin, sign, "*/rope")
        torch.library.opcheck(rope, given)
        for turned in (
            given[0].detach().transpose(1, 2).contiguous().transpose(1, 2),
            given[0].detach().to(memory_format=torch.channels_last),
        ):
            assert rope(turned, *given[1:]).is_contiguous()
    learnt = cos.clone().requires_grad_()
    y = rope(heads(B, S, 3, D, dtype=torch.float32), learnt, sin, 1.0, "*/rope")
    assert torch.autograd.grad(y.sum(), learnt)[0].any()


def test_what_serves_is_explained_and_functions_are_pickled_by_name() -> None:
    found = explain(131072, 128, "bf16", norm=False, rotary_dim=64, interleaved=True)
    assert found.keys() == {"how", "reason", "kernel"}
    with pytest.raises(ValueError, match="at least 1"):
        explain(0, 128, "bf16", norm=False)
    alone: Any
    for alone in ({"heads": 2}, {"offset": True}):
        with pytest.raises(ValueError, match="apply_rope has no weight_offset, and no heads that"):
            explain(131072, 128, "bf16", norm=False, **alone)
    for columns in (63, 0, -2, 256):
        for norm in (True, False):
            with pytest.raises(ValueError, match="rotary_dim must be an even number from 2 to the"):
                explain(131072, 128, "bf16", norm=norm, rotary_dim=columns)
    with pytest.raises(TypeError, match="rotary_dim must be an int or None, got float"):
        explain(131072, 128, "bf16", norm=False, rotary_dim=64.0)  # type: ignore[arg-type]
    package = RotatedPackage(GENERATED / "h200" / "rope", "a package of rotations")
    assert package.explain(131072, 128, "bf16")["how"] == "tuned"
    other = pickle.loads(pickle.dumps(normforge.apply_rope))
    assert other.__self__ is normforge.apply_rope.__self__
