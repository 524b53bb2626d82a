"""`rms_norm_rope` of rows of several heads, which are normalized together: the formula on the CPU,
and what kernels are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from generator.paths import GENERATED
from normforge import rms_norm_rope
from normforge.frontends.rope import RotatedFunctions, RotatedPackage
from normforge.frontends.rope_node import (
    SERVED,
    formula,
    rms_norm_rope_backward,
    rms_norm_rope_forward,
)
from normforge.operations import ROTATED
from normforge.rope import explain
from tests.support.library_functions import (
    EPS,
    HEAD,
    B,
    Kernels,
    check_rounded_once,
    drawn,
    gradients,
    rotated_norm,
    turns,
)

S, D, H = 5, HEAD, 3
JOINED = "*/rope+joined"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_second_derivatives_are_those_of_the_definition(interleaved: bool, joined: bool) -> None:
    leaves, (cos, sin) = drawn(B, S, H * D), turns(S)
    weight = leaves[1] if joined else leaves[1].detach()[:D].requires_grad_()

    def slopes(y: torch.Tensor) -> torch.Tensor:
        given = (y.square().sum(), [leaves[0], weight])
        found = torch.autograd.grad(*given, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in found), leaves[0])[0]

    if joined:
        y = rms_norm_rope(leaves[0], weight, cos, sin, EPS, None, interleaved, heads=H)
        wanted = rotated_norm(leaves[0], weight, cos, sin, EPS, interleaved, heads=H)
    else:
        heads = leaves[0].unflatten(-1, (H, D))
        y = rms_norm_rope(heads, weight, cos, sin, EPS, None, interleaved)
        wanted = formula(heads, weight, *halves(cos, sin), EPS, 0.0, interleaved=interleaved)
    torch.testing.assert_close(slopes(y), slopes(wanted))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_batched(interleaved: bool) -> None:
    (x, weight), of_turns = drawn(B, S, H * D), turns(S)
    y = rms_norm_rope(x, weight, *of_turns, EPS, None, interleaved, heads=H)
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    found = torch.autograd.grad(y, [x, weight], dy, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, [x, weight], one, retain_graph=True) for one in dy]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*alone, strict=True))))


def test_symbolic_sizes_may_say_how_many_heads_there_are() -> None:
    x, of_turns = torch.randn(S, H, D), turns(S, dtype=torch.float32)

    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rms_norm_rope(x.flatten(-2), None, cos, sin, heads=x.shape[-2])

    traced = make_fx(function, tracing_mode="symbolic")(x, *of_turns)
    torch.testing.assert_close(traced(x, *of_turns), function(x, *of_turns))


def halves(*given: torch.Tensor) -> list[torch.Tensor]:
    return [one[..., : D // 2].unsqueeze(-2) for one in given]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("of_turns", [torch.bfloat16, torch.float32])
def test_results_are_rounded_once(dtype: torch.dtype, wide: bool, of_turns: torch.dtype) -> None:
    x, weight = (one.detach().to(dtype).requires_grad_() for one in drawn(64, H * D))
    weight = weight.detach().float().requires_grad_() if wide else weight
    cos, sin = turns(64, dtype=of_turns)
    check_rounded_once(
        lambda *given: rms_norm_rope(*given, cos, sin, 1e-5, heads=H),
        lambda *given: rotated_norm(*given, cos.double(), sin.double(), 1e-5, heads=H),
        [x, weight],
    )


def test_one_head_is_a_row_of_its_own() -> None:
    (x, _), of_turns = drawn(B, S, H * D), turns(S, columns=H * D)
    weight = torch.rand(H * D, dtype=torch.float64)
    found = rms_norm_rope(x, weight, *of_turns, heads=1)
    assert torch.equal(found, rms_norm_rope(x.unsqueeze(-2), weight, *of_turns).squeeze(-2))


def test_the_operators_are_what_pytorch_asks_of_one() -> None:
    x, dy = (torch.rand(7, 1, H * D) for _ in range(2))
    for weight, package in ((torch.rand(H * D), JOINED), (None, f"{JOINED}+interleaved")):
        cos, sin = (one[..., : D // 2].unsqueeze(-2).float() for one in turns(7))
        given = (x, weight, cos, sin, 1e-6, 0.0, package)
        torch.library.opcheck(rms_norm_rope_forward, given)
        torch.library.opcheck(rms_norm_rope_backward, (dy, *given))


def test_the_operator_gives_angles_their_gradients() -> None:
    """They are those of the formula; and its backward refuses to be differentiated."""
    x, dy = (torch.randn(7, 1, H * D, dtype=torch.float64) for _ in range(2))
    cos, sin = (one.requires_grad_() for one in halves(*turns(7)))
    given, flags = (x, None, cos, sin, 1e-6, 0.0), {"joined": True}
    found = torch.autograd.grad(rms_norm_rope_forward(*given, JOINED), [cos, sin], dy)
    torch.testing.assert_close(found, torch.autograd.grad(formula(*given, **flags), [cos, sin], dy))
    slope = x.clone().requires_grad_()
    angles = (cos.detach(), sin.detach())
    dx, _ = rms_norm_rope_backward(dy, slope, None, *angles, 1e-6, 0.0, JOINED)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_a_traced_graph_has_one_operator_for_each_direction() -> None:
    leaves, of_turns = drawn(B, S, H * D, dtype=torch.float32), turns(S, dtype=torch.float32)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return rms_norm_rope(*given, *of_turns, heads=H)

    torch.compiler.reset()
    traced = make_fx(lambda *given: gradients(run, list(given)))(*leaves)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(rms_norm_rope_forward) == targets.count(rms_norm_rope_backward) == 1
    torch.testing.assert_close(traced(*leaves), gradients(run, leaves))
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), run(*leaves))


@pytest.mark.parametrize("interleaved", [False, True])
def test_kernels_serve_rows_where_they_lie(
    interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    form = SERVED(f"{JOINED}+interleaved" if interleaved else JOINED)
    monkeypatch.setattr(form, "_servers", {name: Kernels(name, seen) for name in ROTATED})
    qk = torch.randn(B, S, 2 * H * D, requires_grad=True)
    weight = torch.rand(H * D, requires_grad=True)
    cos, sin = turns(1, S, dtype=torch.float32)
    x = qk[..., H * D :]
    y = rms_norm_rope(x, weight, cos, sin, 1e-6, None, interleaved, heads=H)
    y.sum().backward()
    wanted = rotated_norm(x, weight, cos, sin, 1e-6, interleaved, heads=H)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(
        [qk.grad, weight.grad], list(torch.autograd.grad(wanted.sum(), [qk, weight]))
    )
    assert [name for name, _ in seen] == ["rmsnorm_rope_forward", "rmsnorm_rope_backward"]
    flags = {"joined": True, **({"interleaved": True} if interleaved else {})}
    for _, tensors in seen:
        assert tensors["x"].data_ptr() == x.data_ptr()
        assert tensors["x"].shape == (B, S, 1, H * D)
        assert tensors["cos"].shape == (1, S, 1, D // 2)
        assert {name: tensors[name] for name in flags} == flags
        assert ("interleaved" in tensors) is interleaved


@pytest.mark.parametrize("forward", [False, True])
def test_it_says_which_kernel_serves_or_why_none_does(forward: bool) -> None:
    found = explain(16384, 96, "bf16", forward=forward, heads=3)
    assert (found["how"], found["kernel"]) == ("none", None)
    assert found["reason"].startswith("nothing like 16384x96:bf16+joined32 was tuned")
    tuned = RotatedPackage(
        GENERATED / "h200" / f"rmsnorm_rope_{'forward' if forward else 'backward'}"
    )
    assert tuned.explain(16384, 4096, "bf16", forward=forward, heads=32)["how"] == "tuned"
    for heads, kind in ((0, ValueError), (5, ValueError), (-3, ValueError), (2.0, TypeError)):
        with pytest.raises(kind, match="heads"):
            explain(16384, 96, "bf16", forward=forward, heads=heads)
    with pytest.raises(ValueError, match="rotary_dim must be None"):
        explain(16384, 96, "bf16", forward=forward, heads=3, rotary_dim=16)


def test_forms_of_a_form_are_forgotten_with_it() -> None:
    def no_kernels(_: str) -> str:
        return "no kernels"

    RotatedFunctions(no_kernels, "of joined")
    form = SERVED("of joined+joined+interleaved")
    assert form.flags == {"joined": True, "interleaved": True}
    assert SERVED("of joined+joined").flags == {"joined": True}
    RotatedFunctions(no_kernels, "of joined")
    assert SERVED("of joined+joined+interleaved") is not form


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"heads": 2.0}, TypeError, "heads must be an int or None, got float"),
    ({"heads": True}, TypeError, "heads must be an int or None, got bool"),
    *(
        ({"heads": heads}, ValueError, f"rows of 24 columns are not {heads} heads of an even")
        for heads in (0, 5, 8)
    ),
    ({"heads": H, "rotary_dim": 2}, ValueError, "rotary_dim must be None where heads is given"),
    ({"heads": H, "weight": torch.ones(D)}, ValueError, r"weight must have shape \(24,\)"),
    ({"heads": H, "x": torch.ones(B, S, H * D).int()}, ValueError, "x must be floating rows of 3"),
    ({"heads": H, "cos": torch.ones(S, H * D)}, ValueError, "cos must have the shape .* a head"),
]


@pytest.mark.parametrize(("changed", "kind", "said"), BAD)
def test_bad_arguments_get_one_sentence(
    changed: dict[str, Any], kind: type[Exception], said: str
) -> None:
    cos, sin = turns(S, dtype=torch.float32)
    given = {"x": torch.ones(B, S, H * D), "weight": None, "cos": cos, "sin": sin}
    with pytest.raises(kind, match=said) as caught:
        rms_norm_rope(**(given | changed))
    assert "\n" not in str(caught.value)
