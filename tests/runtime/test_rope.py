"""RMSNorm with the rotary embedding: the functions and their gradients, by PyTorch's operators on
the CPU."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import normforge
from normforge import qk_norm_rope, rms_norm_rope
from normforge.frontends import rope_packed
from normforge.frontends.rope import RotatedFunctions
from normforge.frontends.rope_node import SERVED, rms_norm_rope_backward, rms_norm_rope_forward
from normforge.frontends.rope_packed import qk_norm_rope_backward, qk_norm_rope_forward
from normforge.operations import ROTATED
from normforge.rope import explain
from tests.support.library_functions import (
    EPS,
    HEAD,
    HEADS,
    B,
    Kernels,
    check_rounded_once,
    drawn,
    gradients,
    repeated,
    rotated_norm,
    turns,
)

check = torch.testing.assert_close
S, D = 5, HEAD
INTERLEAVED = "*/rope+interleaved"


@pytest.mark.parametrize("shape", repeated(B, S))
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("columns", "heads"), [(D, None), (D // 2, None), (2, None), (D, 3)])
@pytest.mark.parametrize(("interleaved", "offset"), [(False, 0.0), (True, 0.0), (False, 1.5)])
def test_results_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...],
    half: bool,
    columns: int,
    heads: int | None,
    interleaved: bool,
    offset: float,
) -> None:
    given = drawn(B, S, 3, D) if heads is None else drawn(B, S, heads * D)
    cos, sin = turns(*shape, columns=columns)
    seen = [one[..., : columns // 2] if half else one for one in (cos, sin)]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rotary_dim = None if columns == D else columns
        return rms_norm_rope(x, weight, *seen, EPS, rotary_dim, interleaved, offset, heads=heads)

    def wanted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rotated_norm(x, weight, cos, sin, EPS, interleaved, offset, heads)

    check(norm(*given), wanted(*given))
    check(gradients(norm, given), gradients(wanted, given))


@pytest.mark.parametrize("rotary_dim", [None, D // 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0.0, -2.5])
def test_a_packed_projection_is_split_where_it_lies(
    rotary_dim: int | None, interleaved: bool, offset: float
) -> None:
    columns = (HEADS[0] + 2 * HEADS[1]) * D
    torch.manual_seed(0)
    qkv = torch.randn(B, S, columns, dtype=torch.float64, requires_grad=True)
    weights = [drawn(1, 1, D)[1], torch.ones(D, dtype=torch.float64, requires_grad=True)]
    leaves, (cos, sin) = [qkv, *weights], turns(1, S, columns=rotary_dim or D)

    def wanted(
        qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        every = qkv.view(B, S, -1, D)
        q, k, v = every[..., :4, :], every[..., 4:6, :], every[..., 6:, :]
        rest = (cos, sin, EPS, interleaved, offset)
        return rotated_norm(q, q_weight, *rest), rotated_norm(k, k_weight, *rest), v

    found = qk_norm_rope(*leaves, cos, sin, HEADS, EPS, rotary_dim, interleaved, offset)
    exact = wanted(qkv, *weights)
    check(found, exact)
    assert [part.shape[-2:] for part in found] == [(4, D), (2, D), (2, D)]
    assert found[2].data_ptr() == qkv.view(B, S, -1, D)[..., 6:, :].data_ptr()
    dy = [torch.randn_like(part) for part in found]
    check(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(exact, leaves, dy))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("of_turns", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_rounded_once_and_gradients_have_the_dtypes_of_what_they_belong_to(
    dtype: torch.dtype, wide: bool, of_turns: torch.dtype
) -> None:
    x, weight = (one.detach().to(dtype).requires_grad_() for one in drawn(64, 2, D))
    weight = weight.detach().float().requires_grad_() if wide else weight
    cos, sin = turns(64, dtype=of_turns)
    check_rounded_once(
        lambda *given: rms_norm_rope(*given, cos, sin, 1e-5),
        lambda *given: rotated_norm(*given, cos.double(), sin.double(), 1e-5),
        [x, weight],
    )


@pytest.mark.parametrize("columns", [D // 2, 2])
def test_columns_that_are_not_rotated_have_the_bits_of_the_norm(columns: int) -> None:
    """Whatever cos and sin are, and also where the others are not finite."""
    (x, weight), ones = drawn(B, S, 3, D, dtype=torch.float32), torch.ones(S, columns)
    turned = rms_norm_rope(x, weight, torch.inf * ones, ones, EPS, columns)
    plain = rms_norm_rope(x, weight, torch.ones(S, D), torch.zeros(S, D), EPS)
    assert torch.equal(turned[..., columns:], plain[..., columns:])
    assert not turned[..., :columns].isfinite().any()


@pytest.mark.parametrize("heads", [None, 3])
def test_no_weight_stands_for_ones(heads: int | None) -> None:
    x, weight = drawn(B, S, 3, D) if heads is None else drawn(B, S, heads * D)
    ones, of_turns = torch.ones_like(weight), turns(S)
    found, wanted = (rms_norm_rope(x, one, *of_turns, heads=heads) for one in (None, ones))
    assert torch.equal(found, wanted)
    check(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x))
    found = rms_norm_rope(x, None, *of_turns, weight_offset=2.0, heads=heads)
    assert torch.equal(found, rms_norm_rope(x, ones + 2, *of_turns, heads=heads))


def test_it_is_what_the_attention_of_transformers_computes() -> None:
    """Its modules round after the norm, too, which float32 leaves below the bound."""
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = qwen.Qwen3Config(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    attention = qwen.Qwen3Attention(config, layer_idx=0)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    hidden = torch.randn(B, S, 48, requires_grad=True)
    cos, sin = qwen.Qwen3RotaryEmbedding(config)(hidden, torch.arange(S)[None])
    assert cos.shape == (1, S, 16)
    leaves = [hidden, *attention.parameters()]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    packed = torch.cat([one.weight for one in projections])

    def theirs() -> tuple[torch.Tensor, ...]:
        split = (one(hidden).view(B, S, -1, 16) for one in projections)
        q, k, v = split
        q, k = (attention.q_norm(q).transpose(1, 2), attention.k_norm(k).transpose(1, 2))
        q, k = qwen.apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v.transpose(1, 2)

    def ours() -> tuple[torch.Tensor, ...]:
        weights = (attention.q_norm.weight, attention.k_norm.weight)
        given = (hidden @ packed.t(), *weights, cos, sin, (4, 2), config.rms_norm_eps)
        q, k, v = (one.transpose(1, 2) for one in qk_norm_rope(*given))
        return q, k, v

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attention.o_proj(attended.transpose(1, 2).flatten(2)).square().sum()

    losses = [loss(*side()) for side in (ours, theirs)]
    check(ours(), theirs())
    torch.testing.assert_close(*losses)
    check(*(torch.autograd.grad(one, leaves) for one in losses))


# ---- Operators ---------------------------------------------------------------------------------


def test_the_operators_are_what_pytorch_asks_of_one() -> None:
    for weight, dtype in ((torch.rand(D), torch.float32), (None, torch.bfloat16)):
        rows = [torch.rand(3, 2, D, dtype=dtype) for _ in range(2)]
        for half, package in ((D // 4, "*/rope"), (D // 2, "*/rope"), (D // 4, INTERLEAVED)):
            cos, sin = (one[..., :half].unsqueeze(-2).float() for one in turns(3))
            given = (rows[0], weight, cos, sin, 1e-6, 1.0, package)
            torch.library.opcheck(rms_norm_rope_forward, given)
            torch.library.opcheck(rms_norm_rope_backward, (rows[1], *given))
    turned = torch.rand(3, D, 2).mT
    torch.library.opcheck(rms_norm_rope_forward, (turned, torch.rand(D), *given[2:]))
    assert normforge.rope.operators.rms_norm_rope.v2 is rms_norm_rope_forward


def packed(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], Any]:
    """A projection and weights, and its norms as one tensor."""
    torch.manual_seed(0)
    leaves = [torch.randn(B, S, 8 * D, dtype=dtype), *(torch.rand(D, dtype=dtype) for _ in "qk")]
    of_turns = turns(1, S, dtype=dtype)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return torch.cat(qk_norm_rope(*given, *of_turns, HEADS, EPS), -2)

    return [leaf.requires_grad_() for leaf in leaves], run


def test_the_operators_of_a_projection_are_what_pytorch_asks_of_one() -> None:
    (qkv, *weights), _ = packed()
    cos, sin = (one[..., : D // 2].unsqueeze(-2) for one in turns(1, S, dtype=torch.float32))
    dq, dk, dv = (torch.rand(B, S, heads, D) for heads in (4, 2, 2))
    for given in ((qkv, *weights), (qkv.mT.contiguous().mT, None, None)):
        call = (*(None if one is None else one.detach() for one in given), cos, sin)
        rest = (*HEADS, EPS, 0.5, "*/rope")
        torch.library.opcheck(qk_norm_rope_forward, (*call, *rest))
        torch.library.opcheck(qk_norm_rope_backward, (dq, dk, dv, *call, *rest))
    call = (qkv, *weights, cos, sin, *rest)
    torch.library.opcheck(qk_norm_rope_forward, call)
    q, k, _ = rope_packed._by_formula(*call)
    wanted = torch.autograd.grad((q.square().sum(), k.sum()), (qkv, *weights))
    q, k = qk_norm_rope_forward(*call)
    found = torch.autograd.grad((q.square().sum(), k.sum()), (qkv, *weights))
    torch.testing.assert_close(found, wanted)
    with forward_ad.dual_level():
        dual = (forward_ad.make_dual(qkv.detach(), torch.ones_like(qkv)), *call[1:])
        q, k, _ = rope_packed._by_formula(*dual)
        for one, other in zip(qk_norm_rope_forward(*dual), (q, k), strict=True):
            tangents = (forward_ad.unpack_dual(each).tangent for each in (one, other))
            torch.testing.assert_close(*tangents)


def test_a_projection_has_one_node_whose_gradient_is_written_at_once() -> None:
    """The gradients of q, k and v are parts of one tensor, and are not concatenated."""
    leaves, run = packed()
    q, k, _ = qk_norm_rope(*leaves, *turns(1, S, dtype=torch.float32), HEADS, EPS)
    assert q.grad_fn is k.grad_fn is not None
    torch.compiler.reset()
    traced = make_fx(lambda *given: gradients(run, list(given)))(*leaves)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(qk_norm_rope_forward) == targets.count(qk_norm_rope_backward) == 1
    assert targets.count(torch.ops.aten.cat.default) == 1  # that of the test
    check(traced(*leaves), gradients(run, leaves))
    _, k, _ = qk_norm_rope(*leaves, *turns(1, S, dtype=torch.float32), HEADS, EPS)
    (dqkv,) = torch.autograd.grad(k.sum(), leaves[:1])  # others are not needed
    heads = dqkv.unflatten(-1, (-1, D))
    assert heads[..., 4:6, :].any() and not heads[..., :4, :].any() and not heads[..., 6:, :].any()


# ---- Who serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [False, True])
def test_it_says_which_kernel_serves_or_why_none_does(forward: bool) -> None:
    found = explain(4096, 128, "bf16", "fp32", forward=forward)
    assert (found["how"], found["kernel"]) == ("none", None)
    assert found["reason"].startswith("nothing like 4096x128:bf16:fp32 was tuned")
    assert explain(524288, 128, "bf16", forward=forward)["how"] == "tuned"
    for columns, interleaved, rotation in (
        (64, False, "+rotary64"),
        (None, True, "+interleaved"),
        (64, True, "+rotary64+interleaved"),
    ):
        options: Any = {"rotary_dim": columns, "interleaved": interleaved}
        found = explain(524288, 96, "bf16", forward=forward, **options)
        assert (found["how"], found["kernel"]) == ("none", None)
        assert found["reason"].startswith(f"nothing like 524288x96:bf16{rotation} was tuned")
    found = explain(524288, 128, "bf16", forward=forward, interleaved=True)
    assert found["how"] == "nearest"
    found = explain(131072, 256, "bf16", forward=forward, offset=True)
    assert found["how"] == "tuned" and "_offset_" in found["kernel"]


def test_a_package_that_is_named_by_a_path_with_a_plus_has_a_form() -> None:
    named = RotatedFunctions(lambda _: "no kernels", "/home/c++/of a test")
    form = SERVED("/home/c++/of a test+interleaved")
    assert SERVED("/home/c++/of a test") is named and form.flags == {"interleaved": True}


def test_a_form_is_made_again_behind_a_package_that_is_loaded_again() -> None:
    def no_kernels(_: str) -> str:
        return "no kernels"

    one = RotatedFunctions(no_kernels, "of a test")
    form = SERVED("of a test+interleaved")
    assert SERVED("of a test+interleaved") is form and pickle.loads(pickle.dumps(form)) is form
    other = RotatedFunctions(no_kernels, "of a test")
    assert SERVED("of a test+interleaved") is not form
    assert (one.flags, other.flags, form.flags) == ({}, {}, {"interleaved": True})
    with pytest.raises(RuntimeError, match="no package 'of a test\\+backwards'"):
        SERVED("of a test+backwards")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that kernels would serve."""
    given: list[Any] = []
    servers = {name: Kernels(name, given) for name in ROTATED}
    for package in ("*/rope", INTERLEAVED):
        monkeypatch.setattr(SERVED(package), "_servers", servers)
    return given


@pytest.mark.parametrize(("interleaved", "offset"), [(False, 0.0), (True, 0.0), (False, 1.5)])
def test_kernels_serve_both_directions_of_heads_where_they_lie(
    seen: list[Any], interleaved: bool, offset: float
) -> None:
    qkv = torch.randn(B, S, 8 * D, requires_grad=True)
    weights = [torch.rand(D, requires_grad=True) for _ in range(2)]
    cos, sin = turns(1, S, dtype=torch.float32)
    how: Any = {"interleaved": interleaved, "weight_offset": offset}
    q, k, _ = qk_norm_rope(qkv, *weights, cos, sin, HEADS, **how)
    (q.sum() + k.sum()).backward()
    heads = qkv.view(B, S, -1, D)
    rest = (cos, sin, 1e-6, interleaved, offset)
    wanted_q = rotated_norm(heads[..., :4, :], weights[0], *rest)
    wanted_k = rotated_norm(heads[..., 4:6, :], weights[1], *rest)
    check((q, k), (wanted_q, wanted_k))
    leaves = [qkv, *weights]
    exact = torch.autograd.grad(wanted_q.sum() + wanted_k.sum(), leaves)
    check([leaf.grad for leaf in leaves], list(exact))
    names = [name for name, _ in seen]
    assert names == ["rmsnorm_rope_forward"] * 2 + ["rmsnorm_rope_backward"] * 2
    assert [tensors.get("interleaved", False) for _, tensors in seen] == [interleaved] * 4
    for at, (_, tensors) in zip((0, 4 * D), seen, strict=False):
        assert tensors["x"].data_ptr() == qkv[..., at:].data_ptr()
        assert tensors["cos"].data_ptr() == cos.data_ptr()
        assert tensors["sin"].shape == (1, S, 1, D // 2)
    seen.clear()
    with torch.no_grad():
        again = qk_norm_rope(qkv, *weights, cos, sin, HEADS, **how)
        assert torch.equal(again[0], q)
    assert [name for name, _ in seen] == names[:2]
