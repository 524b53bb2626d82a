"""RMSNorm with the rotary embedding: the functions and their gradients, by PyTorch's operators on
the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import normforge
from normforge import qk_norm_rope, rms_norm_rope
from normforge.frontends.rope_node import SERVED, rms_norm_rope_backward, rms_norm_rope_forward
from normforge.frontends.rope_packed import qk_norm_rope_backward, qk_norm_rope_forward
from normforge.operations import OPERATIONS, ROTATED, RowOperation
from normforge.rope import explain
from normforge.serve.rows import RowServer

B, S, D = 2, 5, 8
HEADS = (4, 2)
EPS = 1e-3


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, and a weight."""
    torch.manual_seed(sum(shape))
    made = [torch.randn(*shape, dtype=dtype), torch.rand(D, dtype=dtype) + 0.5]
    return [one.requires_grad_() for one in made]


def turns(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of random angles, the same for both halves of the columns."""
    torch.manual_seed(7)
    angles = torch.randn(*shape, D // 2, dtype=torch.float64)
    whole = torch.cat((angles, angles), -1)
    return whole.cos().to(dtype), whole.sin().to(dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def written_out(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float = EPS
) -> torch.Tensor:
    n = functional.rms_norm(x, x.shape[-1:], weight, eps)
    return n * cos.unsqueeze(-2) + rotate_half(n) * sin.unsqueeze(-2)


def gradients(
    norm: Callable[..., torch.Tensor], given: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(norm(*given).square().sum(), given)


def check(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


REPEATED = [(B, S), (1, S), (S,), (B, 1), (1, 1), (1,), ()]


@pytest.mark.parametrize("shape", REPEATED)
@pytest.mark.parametrize("half", [False, True])
def test_results_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], half: bool
) -> None:
    given, (cos, sin) = drawn(B, S, 3, D), turns(*shape)
    seen = [one[..., : D // 2] if half else one for one in (cos, sin)]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_rope(x, weight, *seen, EPS)

    def wanted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return written_out(x, weight, cos, sin)

    torch.testing.assert_close(norm(*given), wanted(*given))
    check(gradients(norm, given), gradients(wanted, given))
    if shape == (1, S):
        assert torch.autograd.gradcheck(norm, given)
        few = [one[:1, :2].detach().requires_grad_() if one.dim() > 1 else one for one in given]
        part = [one[:, :2] for one in seen]
        assert torch.autograd.gradgradcheck(lambda *g: rms_norm_rope(*g, *part, EPS), few)


def test_a_packed_projection_is_split_where_it_lies() -> None:
    columns = (HEADS[0] + 2 * HEADS[1]) * D
    torch.manual_seed(0)
    qkv = torch.randn(B, S, columns, dtype=torch.float64, requires_grad=True)
    weights = [drawn(1, 1, D)[1], torch.ones(D, dtype=torch.float64, requires_grad=True)]
    leaves, (cos, sin) = [qkv, *weights], turns(1, S)

    def wanted(
        qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        every = qkv.view(B, S, -1, D)
        q, k, v = every[..., :4, :], every[..., 4:6, :], every[..., 6:, :]
        return written_out(q, q_weight, cos, sin), written_out(k, k_weight, cos, sin), v

    found = qk_norm_rope(*leaves, cos, sin, HEADS, EPS)
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
    y = rms_norm_rope(x, weight, cos, sin, 1e-5)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    wanted = written_out(*exact, cos.double(), sin.double(), 1e-5)
    assert y.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert ((y.double() - wanted).abs() <= wanted.abs() * unit * 1.01 + 1e-6).all()
    dy = torch.randn(y.shape, dtype=dtype)
    found = torch.autograd.grad(y, (x, weight), dy)
    others = torch.autograd.grad(wanted, exact, dy.double())
    for one, leaf, other in zip(found, (x, weight), others, strict=True):
        assert one.dtype == leaf.dtype
        slack = torch.finfo(one.dtype).eps / 2 * 1.01
        assert ((one.double() - other).abs() <= other.abs() * slack + 1e-5).all()


def test_no_weight_stands_for_ones() -> None:
    (x, _), of_turns = drawn(B, S, 3, D), turns(S)
    ones = torch.ones(D, dtype=torch.float64)
    found, wanted = rms_norm_rope(x, None, *of_turns), rms_norm_rope(x, ones, *of_turns)
    assert torch.equal(found, wanted)
    check(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x))


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


# ---- Compilers, modes and transforms -------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that the library serves, one by one, which PyTorch's operators do not."""
    functions: Any = SERVED("*/rope")
    seen: list[str] = []

    def watch(name: str, before: Any) -> None:
        def call(*given: Any, **how: Any) -> Any:
            seen.append(name)
            return before(*given, **how)

        monkeypatch.setattr(functions, name, call)

    for name in ("forward", "backward"):
        watch(name, getattr(functions, name))
    return seen


def narrow(rows: int = 3) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Leaves in fp32, and the norm of them."""
    of_turns = turns(rows, dtype=torch.float32)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_rope(x, weight, *of_turns, EPS)

    return drawn(rows, 2, D, dtype=torch.float32), norm


def test_a_compiled_call_is_one_graph_of_operators(calls: list[str]) -> None:
    leaves, norm = narrow()
    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, leaves)
    assert calls == ["forward", "backward"]
    check(found, gradients(norm, leaves))
    torch.testing.assert_close(compiled(*leaves), norm(*leaves))


def test_inductor_runs_the_operators(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is stricter where the environment has CI."""
    monkeypatch.setenv("CI", "true")
    leaves, run = packed()
    torch.compiler.reset()
    found = gradients(torch.compile(run, fullgraph=True), leaves)
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2
    check(found, gradients(run, leaves))


def test_sizes_that_a_compiled_call_leaves_open(calls: list[str]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(rms_norm_rope, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 12):
            given, of_turns = drawn(B, rows, 4, D, dtype=torch.float32), turns(1, rows)
            of_turns = (of_turns[0].float(), of_turns[1].float())
            found = gradients(lambda *g, t=of_turns: compiled(*g, *t), given)
            check(found, gradients(lambda *g, t=of_turns: rms_norm_rope(*g, *t), given))
    assert calls


def test_the_operators_are_what_pytorch_asks_of_one() -> None:
    for weight, dtype in ((torch.rand(D), torch.float32), (None, torch.bfloat16)):
        rows = [torch.rand(3, 2, D, dtype=dtype) for _ in range(2)]
        cos, sin = (one[..., : D // 2].unsqueeze(-2).float() for one in turns(3))
        given = (rows[0], weight, cos, sin, 1e-6, "*/rope")
        torch.library.opcheck(rms_norm_rope_forward, given)
        torch.library.opcheck(rms_norm_rope_backward, (rows[1], *given))
    turned = torch.rand(3, D, 2).mT
    torch.library.opcheck(rms_norm_rope_forward, (turned, torch.rand(D), *given[2:]))
    assert normforge.rope.operators.rms_norm_rope.v1 is rms_norm_rope_forward


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
        rest = (*HEADS, EPS, "*/rope")
        torch.library.opcheck(qk_norm_rope_forward, (*call, *rest))
        torch.library.opcheck(qk_norm_rope_backward, (dq, dk, dv, *call, *rest))


def test_a_projection_has_one_node_whose_gradient_is_written_at_once(calls: list[str]) -> None:
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


def test_a_projection_has_second_derivatives_and_transforms() -> None:
    leaves, run = packed(torch.float64)
    few = [leaves[0][:1, :2].detach().requires_grad_(), *leaves[1:]]
    of_turns = [one[:, :2] for one in turns(1, S)]

    def some(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qk_norm_rope(*given, *of_turns, HEADS, EPS)

    assert torch.autograd.gradcheck(some, few)
    assert torch.autograd.gradgradcheck(some, few)
    given = [leaf.detach() for leaf in leaves]
    found = torch.func.grad(lambda qkv: run(qkv, *given[1:]).square().sum())(given[0])
    torch.testing.assert_close(found, gradients(run, leaves)[0])
    with torch.inference_mode():
        made = torch.ones(B, S, 8 * D, dtype=torch.float64)
    assert all(one.any() for one in gradients(lambda *w: run(made, *w), leaves[1:]))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_step_has_the_operators(mode: str) -> None:
    leaves, of_turns = drawn(3, 2, D, dtype=torch.float32), turns(3, dtype=torch.float32)

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients(lambda *rest: rms_norm_rope(*rest, *given[2:]), list(given[:2]))

    given = (*leaves, *of_turns)
    traced = make_fx(step, tracing_mode=mode)(*given)
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(rms_norm_rope_forward) == targets.count(rms_norm_rope_backward) == 1
    check(traced(*given), step(*given))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_keeps_or_repeats_the_forward(
    policy: CheckpointPolicy, calls: list[str]
) -> None:
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    leaves, norm = narrow()

    def saved(*given: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(norm, *given, use_reentrant=False, context_fn=contexts)
        return y

    found = gradients(saved, leaves)
    repeated = policy == CheckpointPolicy.PREFER_RECOMPUTE
    assert calls == ["forward"] * (1 + repeated) + ["backward"]
    check(found, gradients(norm, leaves))


def test_autocast_inference_and_checkpointing_change_nothing() -> None:
    given = [one.detach().bfloat16().requires_grad_() for one in drawn(3, 2, D)]
    of_turns = turns(3, dtype=torch.bfloat16)
    plain = rms_norm_rope(*given, *of_turns)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rms_norm_rope(*given, *of_turns), plain)
        assert rms_norm_rope(*(one.float() for one in given), *of_turns).dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(rms_norm_rope(*given, *of_turns), plain)
        made = torch.ones(3, 2, D, dtype=torch.bfloat16)
    y = rms_norm_rope(made, given[1], *of_turns)  # an inference tensor cannot be saved: a copy is
    assert torch.autograd.grad(y.float().sum(), given[1])[0] is not None
    again = checkpoint(rms_norm_rope, *given, *of_turns, use_reentrant=False)
    found = torch.autograd.grad(again.float().sum(), given)
    for one, other in zip(found, torch.autograd.grad(plain.float().sum(), given), strict=True):
        assert torch.equal(one, other)


def test_transforms_see_pytorchs_operators(calls: list[str]) -> None:
    leaves, norm = narrow()
    x, weight = (one.detach() for one in leaves)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return norm(x, weight).square().sum()

    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, tangent), weight)).tangent
    torch.testing.assert_close(dual, torch.func.jvp(lambda x: norm(x, weight), (x,), (tangent,))[1])
    slope = torch.func.grad(loss)(x)
    assert calls == []
    torch.testing.assert_close(slope, gradients(norm, leaves)[0])
    y = norm(*leaves)
    dy = torch.randn(3, *y.shape)
    (batched,) = torch.autograd.grad(y, leaves[0], dy, is_grads_batched=True, retain_graph=True)
    for one, incoming in zip(batched, dy, strict=True):
        (alone,) = torch.autograd.grad(y, leaves[0], incoming, retain_graph=True)
        torch.testing.assert_close(one, alone)


def test_tensors_without_memory_and_without_rows_have_such_results() -> None:
    x = torch.empty(3, 2, D, device="meta", requires_grad=True)
    of_turns = [torch.empty(3, D, device="meta") for _ in range(2)]
    y = rms_norm_rope(x, torch.empty(D, device="meta"), *of_turns)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)  # type: ignore[union-attr]
    leaves, norm = narrow(0)
    dx, dw = gradients(norm, leaves)
    assert dx.shape == (0, 2, D) and not dw.any()


# ---- Who serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [False, True])
def test_it_says_which_kernel_serves_or_why_none_does(forward: bool) -> None:
    found = explain(4096, 128, "bf16", "fp32", forward=forward)
    assert (found["how"], found["kernel"]) == ("none", None)
    assert found["reason"].startswith("nothing like 4096x128:bf16:fp32 was tuned")
    assert explain(524288, 128, "bf16", forward=forward)["how"] == "tuned"


class Kernels:
    """Stands in for a server with kernels, by the formula, and keeps what it was given."""

    def __init__(self, operation: RowOperation, seen: list[Any]) -> None:
        self._server = RowServer(operation, "no kernels")
        self._seen = seen

    def is_without_kernels(self, x: torch.Tensor) -> bool:
        return False

    def __call__(self, tensors: Any, **how: Any) -> Any:
        self._seen.append((self._server.operation.name, tensors))
        return self._server(tensors, **how)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that kernels would serve."""
    given: list[Any] = []
    servers = {name: Kernels(OPERATIONS[name], given) for name in ROTATED}
    monkeypatch.setattr(SERVED("*/rope"), "_servers", servers)
    return given


def test_kernels_serve_both_directions_of_heads_where_they_lie(seen: list[Any]) -> None:
    qkv = torch.randn(B, S, 8 * D, requires_grad=True)
    weights = [torch.rand(D, requires_grad=True) for _ in range(2)]
    cos, sin = turns(1, S, dtype=torch.float32)
    q, k, _ = qk_norm_rope(qkv, *weights, cos, sin, HEADS)
    (q.sum() + k.sum()).backward()
    names = [name for name, _ in seen]
    assert names == ["rmsnorm_rope_forward"] * 2 + ["rmsnorm_rope_backward"] * 2
    for at, (_, tensors) in zip((0, 4 * D), seen, strict=False):
        assert tensors["x"].data_ptr() == qkv[..., at:].data_ptr()
        assert tensors["cos"].data_ptr() == cos.data_ptr()
        assert tensors["sin"].shape == (1, S, 1, D // 2)
    seen.clear()
    with torch.no_grad():
        assert torch.equal(qk_norm_rope(qkv, *weights, cos, sin, HEADS)[0], q)
    assert [name for name, _ in seen] == names[:2]


def test_a_tiny_eps_is_served_by_the_formula(seen: list[Any]) -> None:
    """Its rstd may be more than kernels can square."""
    leaves, of_turns = drawn(5, 2, D), turns(5)
    for eps, count in ((2.0**-97, 0), (2.0**-96, 1)):
        y = rms_norm_rope(*leaves, *of_turns, eps)
        seen.clear()
        torch.autograd.grad(y.sum(), leaves)
        assert len(seen) == count


# ---- What is refused, in one sentence ------------------------------------------------------------

X, W, (COS, SIN) = torch.ones(B, S, 3, D), torch.ones(D), turns(S, dtype=torch.float32)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no tensor": ((X, W, 3, SIN), "cos must be a torch.Tensor, got int"),
    "one dimension": (
        (X[0, 0, 0], W, COS, SIN),
        "of shape (..., H, D), got torch.float32 of shape",
    ),
    "whole numbers": ((X.int(), W, COS, SIN), "x must be floating heads"),
    "an odd width": ((X[..., :7], W, COS, SIN), "an even number of columns"),
    "another weight": ((X, W[:4], COS, SIN), "weight must have shape (8,), got (4,)"),
    "a quarter of cos": ((X, W, COS[:, :2], SIN), "cos must have the shape (2, 5, 8) of x without"),
    "another sequence": ((X, W, COS, SIN[:4]), "sin must have the shape (2, 5, 8) of x without"),
    "heads of cos": ((X, W, COS[:, None].expand(5, 3, D), SIN), "got (5, 3, 8)"),
    "too many dimensions": ((X, W, COS[None, None, None], SIN), "cos must have the shape"),
    "whole cos": ((X, W, COS.int(), SIN), "cos must be of a floating dtype, got torch.int32"),
    "cos with a gradient": ((X, W, COS, SIN.clone().requires_grad_()), "give sin.detach()"),
    "another device": ((X, W, COS.to("meta"), SIN), "cos is on meta and x on cpu"),
    "no eps": ((X, W, COS, SIN, None), "eps must be a number, got None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_one_sentence(name: str) -> None:
    given, said = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as error:
        rms_norm_rope(*given)
    assert "\n" not in str(error.value) and ". " not in str(error.value).replace("(...", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qkv": 3}, "qkv must be a torch.Tensor, got int"),
        ({"heads": 4}, "heads must be the numbers of heads of the queries and of the keys, got 4"),
        ({"heads": (4, 0)}, "heads must be the numbers of heads"),
        ({"heads": (5, 2)}, "qkv has 64 columns, no multiple of 5 + 2 * 2 heads"),
    ],
)
def test_a_projection_without_these_heads_is_refused(change: dict[str, Any], said: str) -> None:
    given = {"qkv": torch.ones(B, S, 8 * D), "heads": HEADS} | change
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        qk_norm_rope(given["qkv"], W, W, COS, SIN, given["heads"])
