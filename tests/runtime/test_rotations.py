"""Norms of heads and the rotary embedding behind them, in graphs before autograd: which of them
`inductor_backend` joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.api import Package
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.graph_values import value_of
from normforge.frontends.graph_writes import is_pure
from normforge.frontends.rope import RotatedFunctions
from normforge.frontends.rope_node import rms_norm_rope_forward
from normforge.serve.rows import RowServer
from tests.support import dynamo_graphs
from tests.support.attention_classes import (
    HEADS,
    HIDDEN,
    KEYS,
    WIDTH,
    Attention,
    GemmaAttention,
    WholeNormAttention,
)
from tests.support.dynamo_graphs import changed, close, mark_result
from tests.support.entry_points import filled, grads, randn
from tests.support.foreign_norms import OffsetRMSNorm, PlainRMSNorm
from tests.support.layer_classes import B, S, model_of, step
from tests.support.library_functions import rotate_half

pytestmark = pytest.mark.usefixtures("fresh")
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The rows that kernels are asked for, which there are."""
    found: Asked = []

    def serves(_: Any, x: Any, weight: Any, rotation: str, offset: bool, trains: bool) -> bool:
        found.append((tuple(x.shape), rotation, offset, trains))
        return True

    monkeypatch.setattr(RotatedFunctions, "serves", serves)
    return found


def cosines(S: int, columns: int = WIDTH, dtype: torch.dtype = torch.float32) -> Any:
    """Compute cos and sin as models do, for angles of tokens."""
    freqs = (torch.arange(S)[:, None] * torch.arange(1, columns // 2 + 1))[None].float()
    emb = torch.cat((freqs, freqs), dim=-1)
    return (emb.cos() * 1.5).to(dtype), (emb.sin() * 1.5).to(dtype)


class Model(nn.Module):
    """An attention behind the angles that it takes."""

    def __init__(self, kind: Any, columns: int = WIDTH) -> None:
        super().__init__()
        self.attention, self.columns = kind(), columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_turns = cosines(x.shape[1], self.columns, x.dtype)
        y: torch.Tensor = self.attention(x, of_turns, None)[0]
        return y


compiled = partial(dynamo_graphs.compiled, operator=rms_norm_rope_forward)


KINDS: dict[Any, tuple[int, str, bool]] = {
    Attention: (WIDTH, "", False),
    GemmaAttention: (WIDTH, "", True),
    WholeNormAttention: (WIDTH, f"joined{WIDTH}", False),
}
"""Attention, how many columns are rotated, how kernels are named for it, and whether 1 is added."""


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_rotated_behind_their_norm_are_one_operator(
    rotated: Package, kind: Any, dynamic: bool | None, asked: Asked
) -> None:
    columns, rotation, offset = KINDS[kind]
    model, x = filled(Model(kind, columns)), randn(B, S, HIDDEN)
    wanted = [model(x), *grads(model(x), *model.parameters())]
    run, found = compiled(rotated, model, dynamic=dynamic)
    y = run(x)
    close([y, *grads(y, *model.parameters())], wanted)
    assert len(found) == 2
    joined = kind is WholeNormAttention
    assert {node.args[-1] for node in found} == {"*/rope+joined" if joined else "*/rope"}
    assert {node.args[5] for node in found} == {float(offset)}
    if dynamic is None:
        shapes = [
            (B, S, heads * WIDTH) if joined else (B, S, heads, WIDTH) for heads in (HEADS, KEYS)
        ]
        assert asked == [(shape, rotation, offset, True) for shape in shapes]
    else:
        assert [(one, two, three) for _, one, two, three in asked] == [(rotation, offset, True)] * 2
    with torch.no_grad():
        close(run(x), wanted[0])
    assert asked[-1][-1] is False


def test_narrow_rows_are_rounded_once(rotated: Package, asked: Asked) -> None:
    """Also where cos and sin are wider than the rows, as OLMo's."""

    def heads(x: Any, w: Any, dtype: torch.dtype) -> Any:
        cos, sin = (one.unsqueeze(1) for one in cosines(x.shape[1], dtype=dtype))
        y = turned(written_out(x, w).transpose(1, 2), cos, sin)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    x, w = (3 * randn(B, S, 2, WIDTH)).bfloat16(), randn(WIDTH, seed=4).bfloat16()
    exact = heads(x.double(), w.double(), torch.float64)
    for dtype in (torch.bfloat16, torch.float32):
        step = partial(heads, dtype=dtype)
        run, found = compiled(rotated, step)
        y, eager = run(x, w), step(x, w)
        assert [value_of(given).dtype for given in found[0].args[2:4]] == [dtype] * 2
        assert y.dtype == eager.dtype == torch.bfloat16 and len(found) == 1
        assert (y.double() - exact).norm() < 0.9 * (eager.double() - exact).norm()
        assert y.stride() == eager.stride()


# ---- What stays ----------------------------------------------------------------------------------


def written_out(x: Any, w: Any, eps: float = 1e-6) -> Any:
    wide = x.float() if x.dtype != torch.float64 else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (w.to(wide.dtype) * wide).to(x.dtype)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + rotate_half(x) * sin


def plain(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    return turned(written_out(x, w), cos, sin)


def with_slices(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(-2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    half = torch.cat([-n[..., WIDTH // 2 :], n[..., : WIDTH // 2]], -1)
    return torch.add(half.mul(sin), torch.mul(cos, n))


def in_part(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1], WIDTH // 2))
    n = written_out(x, w)
    part, rest = n[..., : WIDTH // 2], n[..., WIDTH // 2 :]
    return torch.cat((turned(part, cos, sin), rest), -1)


def permuted(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(1) for one in cosines(x.shape[1]))
    return turned(written_out(x, w).permute(0, 2, 1, 3), cos, sin)


def of_pytorch(x: Any, w: Any) -> Any:
    """A norm that is PyTorch's own is no operator of a package before autograd."""
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    return turned(nn.functional.rms_norm(x, (WIDTH,), w, 1e-6), cos, sin)


def in_part_in_another_order(x: Any, w: Any) -> Any:
    """Joined parts lie in the order of their dimensions, which rows behind the norm do not."""
    cos, sin = (one.unsqueeze(1) for one in cosines(x.shape[1], WIDTH // 2))
    n = written_out(x, w).transpose(1, 2)
    part, rest = n[..., : WIDTH // 2], n[..., WIDTH // 2 :]
    return torch.cat((turned(part, cos, sin), rest), -1).view(-1)


def other_halves(x: Any, w: Any) -> Any:
    freqs = torch.arange(S)[None, :, None] * torch.arange(1, WIDTH // 2 + 1).float()
    emb = torch.cat((freqs, 2 * freqs), -1)
    return turned(written_out(x, w), emb.cos().unsqueeze(2), emb.sin().unsqueeze(2))


def rows_of_angles(x: Any, w: Any) -> Any:
    """Tokens are joined and not columns."""
    freqs = torch.arange(2)[None, :, None] * torch.arange(1, WIDTH + 1).float()
    emb = torch.cat((freqs, freqs), 1)
    return turned(written_out(x[:, :4], w), emb.cos().unsqueeze(2), emb.sin().unsqueeze(2))


def the_other_way(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    first, second = n.chunk(2, -1)
    return n * cos + torch.cat((second, -first), -1) * sin


def swapped(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    first, second = n.chunk(2, -1)
    return n * cos + torch.cat((-first, second), -1) * sin


def not_a_half(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    return n * cos + torch.cat((-n[..., 4:], n[..., :4]), -1) * sin


def of_another(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    return written_out(x, w) * cos + rotate_half(x) * sin


def scaled(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    return turned(written_out(x, w) * 0.5, cos, sin)


def used_twice(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    return turned(n, cos, sin) + n.sum()


def half_is_used(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    half = rotate_half(n)
    return (n * cos + half * sin) * half.mean()


def for_each_head(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(1) for one in cosines(2))
    return turned(written_out(x, w), cos, sin)


def for_all_tokens(x: Any, w: Any) -> Any:
    """cos and sin have no dimension for heads of their own."""
    cos, sin = cosines(S)
    return turned(written_out(x, w).transpose(1, 2), cos[0], sin[0])


def without_gradient(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    n = written_out(x, w)
    with torch.no_grad():
        y = turned(n, cos, sin)
    return y + x + w


def by_a_tensor(x: Any, w: Any) -> Any:
    """cos is multiplied with one number for each column."""
    factors = torch.arange(1, WIDTH + 1)
    cos, sin = ((one * factors).unsqueeze(2) for one in cosines(x.shape[1]))
    return turned(written_out(x, w), cos, sin)


def columns_apart(x: Any, w: Any) -> Any:
    freqs = torch.arange(S)[:, None] * torch.arange(1, WIDTH // 2 + 1).float()
    emb = torch.cat((freqs, freqs), -1).unsqueeze(-1)  # behind the columns
    cos, sin = emb.cos()[None], emb.sin()[None]
    n = written_out(x, w).permute(0, 1, 3, 2)
    first, second = n.chunk(2, -1)
    return n * cos + torch.cat((-second, first), -1) * sin


FOUND: list[Callable[..., Any]] = [plain, with_slices, in_part, permuted]
LEFT: list[Callable[..., Any]] = [
    *(
        of_pytorch,
        in_part_in_another_order,
        other_halves,
        rows_of_angles,
        the_other_way,
        swapped,
        not_a_half,
        of_another,
    ),
    *(scaled, used_twice, half_is_used, for_each_head, for_all_tokens),
    *(without_gradient, by_a_tensor, columns_apart),
]


@pytest.mark.parametrize("function", [*FOUND, *LEFT], ids=lambda f: f.__name__)
def test_what_is_not_quite_a_rotation_stays(rotated: Package, function: Any, asked: Asked) -> None:
    leaves = [randn(B, S, 2, WIDTH).requires_grad_(), randn(WIDTH, seed=4).requires_grad_()]
    wanted = function(*leaves)
    run, found = compiled(rotated, function)
    y = run(*leaves)
    close([y, *grads(y, *leaves)], [wanted, *grads(wanted, *leaves)])
    assert len(found) == (function in FOUND)


def doubled(x: Any) -> None:
    x.mul_(2.0)


def doubled_by_an_operator(x: Any) -> None:
    x *= 2.0


def set_to_zero(x: Any) -> None:
    x[:, 0] = 0.0


def doubled_into(x: Any) -> None:
    torch.mul(x, 2.0, out=x)


def squashed(x: Any) -> None:
    nn.functional.relu(x, True)


@pytest.mark.parametrize(
    "change", [doubled, doubled_by_an_operator, set_to_zero, doubled_into, squashed]
)
def test_rows_that_change_before_their_norm_is_rotated_stay(
    rotated: Package, change: Any, asked: Asked
) -> None:
    def function(x: Any, w: Any, changes: bool) -> Any:
        cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
        x = x @ torch.eye(WIDTH)
        n = written_out(x, w)
        if changes:
            change(x)
        return turned(n, cos, sin), x

    leaves = [randn(B, S, 2, WIDTH), randn(WIDTH, seed=4)]
    for changes in (True, False):
        torch._dynamo.reset()
        run, found = compiled(rotated, partial(function, changes=changes))
        close(run(*leaves), function(*leaves, changes))
        assert len(found) == (not changes)


def changed_angles(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    cos[..., 0] = 2.0
    return x @ torch.eye(WIDTH), cos, sin


def changed_view(x: Any, w: Any) -> Any:
    freqs = torch.arange(S)[None, :, None] * torch.arange(1, WIDTH // 2 + 1).float()
    emb = torch.cat((freqs, freqs), -1)
    emb[..., 3:5].mul_(2.0)
    cos, sin = emb.cos().unsqueeze(2), emb.sin().unsqueeze(2)
    return x @ torch.eye(WIDTH), cos, sin


def changed_together(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    torch._foreach_mul_([sin[..., :3], cos[..., 1:]], 2.0)
    return x @ torch.eye(WIDTH), cos, sin


def changed_by_a_packet(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    torch.ops.aten.mul_(cos[..., :3], 2.0)
    return x @ torch.eye(WIDTH), cos, sin


def changed_by_position(x: Any, w: Any) -> Any:
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    nn.functional.relu(cos[..., 3:7], True)
    return x @ torch.eye(WIDTH), cos, sin


def changed_elsewhere(x: Any, w: Any) -> Any:
    """Something else is written to."""
    cos, sin = (one.unsqueeze(2) for one in cosines(x.shape[1]))
    x = x @ torch.eye(WIDTH)
    x.mul_(2.0)
    return x, cos, sin


@pytest.mark.parametrize(
    "angles",
    [
        *(changed_angles, changed_view, changed_together, changed_by_a_packet),
        *(changed_by_position, changed_elsewhere),
    ],
)
def test_angles_that_were_written_to_stay(rotated: Package, angles: Any, asked: Asked) -> None:
    def function(x: Any, w: Any) -> Any:
        x, cos, sin = angles(x, w)
        return turned(written_out(x, w), cos, sin)

    leaves = [randn(B, S, 2, WIDTH), randn(WIDTH, seed=4)]
    run, found = compiled(rotated, function)
    close(run(*leaves), function(*leaves))
    assert len(found) == (angles is changed_elsewhere)


def test_what_writes_to_nothing_is_known() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def pure(target: Any, *given: Any, **options: Any) -> bool:
        return is_pure(graph.call_function(target, given, options))

    assert pure(torch.add, x, y) and pure(torch.ops.aten.mul.Tensor, x, y) and is_pure(x)
    assert not pure(torch.cat, (x, y), out=x) and not pure(torch.ops.aten.copy_.default, x, y)
    for unknown in (cosines, nn.functional.relu_, torch.ops.aten.add_, nn.functional.embedding):
        assert not pure(unknown, x, y)


def test_angles_of_checkpointed_layers_are_those_of_the_model(
    rotated: Package, asked: Asked
) -> None:
    """The layers' graphs have them from outside."""
    model, x = filled(Model(Attention)), randn(B, S, HIDDEN)
    wanted = [model(x), *grads(model(x), *model.parameters())]

    def layers(x: torch.Tensor) -> torch.Tensor:
        of_turns = cosines(x.shape[1])
        y: torch.Tensor = checkpoint(
            lambda *given: model.attention(given[0], given[1:], None)[0],
            *(x, *of_turns),
            use_reentrant=False,
        )
        return y

    run, found = compiled(rotated, layers)
    y = run(x)
    close([y, *grads(y, *model.parameters())], wanted)
    assert len(found) == 2


@pytest.mark.parametrize("marked", [False, True])
def test_a_rotation_that_runs_elsewhere_stays(rotated: Package, marked: bool, asked: Asked) -> None:
    leaves = [randn(B, S, 2, WIDTH), randn(WIDTH, seed=4)]
    run, found = compiled(rotated, plain, before=mark_result if marked else None)
    close(run(*leaves), plain(*leaves))
    assert len(found) == (not marked)


def test_angles_of_a_caller_stay(rotated: Package, asked: Asked) -> None:
    """Nothing in the graph says that their halves are alike."""
    x, w = randn(B, S, 2, WIDTH), randn(WIDTH, seed=4)
    cos, sin = (one.unsqueeze(2) for one in cosines(S))

    def function(x: Any, w: Any, cos: Any, sin: Any) -> Any:
        return turned(written_out(x, w), cos, sin)

    run, found = compiled(rotated, function)
    close(run(x, w, cos, sin), function(x, w, cos, sin))
    assert found == []


def test_norms_without_a_kernel_that_rotates_stay(
    rotated: Package, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [randn(B, S, 2, WIDTH), randn(WIDTH, seed=4)]
    run, found = compiled(rotated, plain)
    close(run(*leaves), plain(*leaves))  # on the CPU there is none
    assert found == []
    monkeypatch.setattr(RotatedFunctions, "serves", lambda *_: True)
    rotated.ops.rotated = ""  # as in a package that came from elsewhere
    torch._dynamo.reset()
    run, found = compiled(rotated, plain)
    close(run(*leaves), plain(*leaves))
    assert found == []


def test_kernels_are_asked_for_in_the_directions_that_a_step_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    def explain(server: RowServer, *given: Any, rotation: str, offset: bool) -> dict[str, Any]:
        told.append((server.operation.name, *given, rotation, offset))
        return {"kernel": "some" if len(told) != 4 else None}

    monkeypatch.setattr(RowServer, "explain", explain)
    functions = normforge.rope_packages.functions

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    x, weight = (randn(*shape).bfloat16() for shape in ((3, 5, 2, WIDTH), (WIDTH,)))
    assert not functions.serves(x, weight, "", False, False) and told == []
    x = x.as_subclass(OnGpu)
    assert functions.serves(x, weight, "", False, False)
    assert functions.serves(x, None, "rotary4", False, True)
    assert not functions.serves(x, weight.float(), "joined8", False, True)
    forward, backward = (f"rmsnorm_rope_{one}" for one in ("forward", "backward"))
    assert told == [
        (forward, 30, WIDTH, "bf16", "bf16", "", False),
        (forward, 30, WIDTH, "bf16", "bf16", "rotary4", False),
        (backward, 30, WIDTH, "bf16", "bf16", "rotary4", False),
        (forward, 30, WIDTH, "bf16", "fp32", "joined8", False),
    ]
    assert not functions.serves(x, weight.double(), "", False, True)
    assert not functions.serves(x.double(), None, "", False, True)


def test_patched_norms_are_joined_as_well(rotated: Package, asked: Asked) -> None:
    model, x = filled(Model(Attention)), randn(B, S, HIDDEN)
    wanted = model(x)
    assert len(rotated.patch(model)) == 2
    run, found = compiled(rotated, model)
    close(run(x), wanted)
    assert len(found) == 2


@pytest.mark.parametrize("norm", [PlainRMSNorm, OffsetRMSNorm])
def test_a_step_through_the_backend_is_that_of_eager_code(
    rotated: Package, norm: Any, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("Some", (Attention,), {"norm": norm})
    model, x = filled(Model(kind)), randn(B, S, HIDDEN)
    wanted = [model(x), *grads(model(x), *model.parameters())]
    with caplog.at_level("INFO"):
        y = torch.compile(model, backend=make_backend(rotated.ops), fullgraph=True)(x)
    close([y, *grads(y, *model.parameters())], wanted)
    assert "joined 2 norms of heads and the rotary embeddings behind them" in caplog.text


# ---- Models of transformers ----------------------------------------------------------------------

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3": (4, {}),
    "Gemma3": (4, {}),
    "Glm4Moe": (0, {"use_qk_norm": True, "first_k_dense_replace": 2}),  # in another order
    "Olmo2": (4, {}),
}
"""Models, with the number of norms that are joined, and what else they are made with."""


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(rotated: Package, name: str, asked: Asked) -> None:
    count, options = MODELS[name]
    model, ids = model_of(name, head_dim=16, **options), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    backend, found = changed(rotated, rms_norm_rope_forward)
    model.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(step(model, ids), wanted, rtol=1e-3, atol=1e-4)
    assert len(found) == count
