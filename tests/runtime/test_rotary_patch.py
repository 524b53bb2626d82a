"""`patch(model, fuse=True)`: attention without norms, whose heads `apply_rope` rotates; and models
of transformers, with norms of heads and without."""

from __future__ import annotations

import copy
import pickle
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import normforge
from normforge.frontends.rope import RotatedFunctions
from normforge.serve.rows import RowServer
from tests.support import attention_classes
from tests.support.attention_classes import (
    HEADS,
    HIDDEN,
    KEYS,
    WIDTH,
    PlainAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
    results,
    turns,
)
from tests.support.entry_points import equal_bits, filled, randn, spied
from tests.support.layer_classes import B, S, check, model_of, step

pytestmark = pytest.mark.usefixtures("fresh")
OF_HEADS = [(B, S, HEADS, WIDTH), (B, S, KEYS, WIDTH)]


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what `apply_rope` and its backward serve in plain eager code."""
    return spied(monkeypatch, RotatedFunctions, "rotate", lambda _, x, *__: tuple(x.shape))


@pytest.mark.parametrize("batch", [1, B])
def test_queries_and_keys_are_rotated(batch: int, rotated: list[Any]) -> None:
    model = filled(PlainAttention())
    of_turns = turns(batch=batch)
    wanted = results(model, of_turns)
    assert normforge.patch(model, fuse=True) == [""]
    rotated.clear()  # it was tried
    check(results(model, of_turns), wanted)
    assert sorted(rotated) == sorted(2 * OF_HEADS)
    assert "by Normforge" in repr(model).splitlines()[1]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        check(results(other, of_turns), wanted)
    assert normforge.unpatch(model) == [""]
    assert type(model) is PlainAttention
    assert equal_bits(results(model, of_turns), wanted)


def test_without_fuse_attention_stays() -> None:
    model = PlainAttention()
    assert normforge.patch(model) == []
    assert type(model) is PlainAttention


def test_calls_of_another_kind_run_as_before(rotated: list[Any]) -> None:
    """Fewer columns are rotated than the config says, angles are learnt, or results are wider."""
    models = [filled(PlainAttention()), filled(PlainAttention())]
    normforge.patch(models[0], fuse=True)
    rotated.clear()
    check(*(results(model, turns(WIDTH // 2)) for model in models))
    learnt = tuple(one.requires_grad_() for one in turns())
    losses = [model(randn(B, S, HIDDEN), learnt, None)[0].square().sum() for model in models]
    check(*(torch.autograd.grad(loss, learnt) for loss in losses))
    with pytest.MonkeyPatch.context() as patch:
        seen = list[torch.dtype]()

        def attend(_: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> Any:
            seen.extend((q.dtype, k.dtype))
            return v.repeat_interleave(HEADS // KEYS, 1).transpose(1, 2), None

        patch.setitem(attention_classes.ATTENTIONS, "other", attend)
        for model in models:
            model.bfloat16()(randn(B, S, HIDDEN, dtype=torch.bfloat16), turns(), None)
    assert seen == [torch.float32] * 4
    assert rotated == []


def test_narrow_rows_are_rounded_once(rotated: list[Any]) -> None:
    models = [filled(PlainAttention()).bfloat16() for _ in range(2)]
    exact = filled(PlainAttention()).bfloat16().double()
    normforge.patch(models[0], fuse=True)
    rotated.clear()
    narrow = turns(dtype=torch.bfloat16)
    wide = tuple(one.double() for one in narrow)
    seen = dict[torch.dtype | int, list[torch.Tensor]]()

    def attend(key: Any) -> Any:
        def keep(_: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> Any:
            seen[key] = [q, k]
            return v.repeat_interleave(HEADS // KEYS, 1).transpose(1, 2), None

        return keep

    x = randn(B, S, HIDDEN, dtype=torch.bfloat16)
    for key, model, of_turns in ((0, models[0], narrow), (1, models[1], narrow), (2, exact, wide)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(attention_classes.ATTENTIONS, "other", attend(key))
            model(x.double() if key == 2 else x, of_turns, None)
    for found, before, other in zip(seen[0], seen[1], seen[2], strict=True):
        assert found.dtype == before.dtype == torch.bfloat16
        assert found.stride() == before.stride()
        assert (found.double() - other).norm() < 0.95 * (before.double() - other).norm()
    assert len(rotated) == 2


def of_first(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate all of a batch as its first sequence."""
    return attention_classes.apply_rotary_pos_emb(q, k, cos[:1], sin[:1])


def repeated(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate neighbours by numbers that stand twice behind each other, as Cohere does."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    return rotated(q), rotated(k)


@pytest.mark.parametrize("rotation", [of_first, repeated])
def test_another_rotation_is_left_alone(rotation: Any, caplog: pytest.LogCaptureFixture) -> None:
    scope = {**vars(attention_classes), "apply_rotary_pos_emb": rotation}
    forward = FunctionType(PlainAttention.forward.__code__, scope)
    model = type("Another", (PlainAttention,), {"forward": forward})()
    with caplog.at_level("INFO"):
        assert normforge.patch(model, fuse=True) == []
    assert "it computes something else than the rotation of halves or of neighbours" in caplog.text


class Rotary(torch.nn.Module):
    """Gives cos and sin of positions; with several axes, sections of columns belong to each of
    them behind the doubling, as in HunYuan-VL."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        angles = positions[..., None].float() * torch.linspace(1, 0.1, WIDTH // 2)
        whole = torch.cat((angles, angles), -1)
        if positions.dim() == 3:
            parts = whole.split(WIDTH // 4, -1)
            whole = torch.cat([one[i] for i, one in enumerate(parts)], -1)
        return whole.cos(), whole.sin()


class SeveralAxes(torch.nn.Module):
    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.attention, self.rotary = PlainAttention(), rotary


class PlainRotary(Rotary):
    """Takes positions of one axis alone."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        assert positions.dim() == 2
        return super().forward(x, positions)


def test_models_whose_angles_have_other_halves_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kernels read the first halves alone."""
    with caplog.at_level("INFO"):
        assert normforge.patch(SeveralAxes(Rotary()), fuse=True) == []
        assert normforge.patch(SeveralAxes(PlainRotary()), fuse=True) == ["attention"]
    assert "Rotary gives cos and sin whose halves differ" in caplog.text


def always_wide(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return tuple(one.float() for one in attention_classes.apply_rotary_pos_emb(q, k, cos, sin))


def test_a_rotation_with_other_dtypes_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    scope = {**vars(attention_classes), "apply_rotary_pos_emb": always_wide}
    forward = FunctionType(PlainAttention.forward.__code__, scope)
    model = type("Another", (PlainAttention,), {"forward": forward})()
    with caplog.at_level("INFO"):
        assert normforge.patch(model, fuse=True) == []
    assert "its rotation gives other dtypes than those of its rows and of cos" in caplog.text


def without_prefix(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Leave the first tokens alone, where cos has fewer, as DINOv3 does."""
    first = q.shape[2] - cos.shape[-2]
    turned = attention_classes.apply_rotary_pos_emb(q[:, :, first:], k[:, :, first:], cos, sin)
    parts = zip((q, k), turned, strict=True)
    return tuple(torch.cat((one[:, :, :first], two), 2) for one, two in parts)


def test_calls_with_fewer_angles_than_tokens_run_as_before(rotated: list[Any]) -> None:
    scope = {**vars(attention_classes), "apply_rotary_pos_emb": without_prefix}
    forward = FunctionType(PlainAttention.forward.__code__, scope)
    kind = type("Prefixed", (PlainAttention,), {"forward": forward})
    models = [filled(kind()), filled(kind())]
    assert normforge.patch(models[0], fuse=True) == [""]
    rotated.clear()
    fewer = tuple(one[:, 2:] for one in turns())
    check(*(results(model, fewer) for model in models))
    assert rotated == []


def test_nothing_is_drawn_and_odd_modules_are_passed_over() -> None:
    """Modules of TorchScript have no class of their own."""
    model = torch.nn.Sequential(
        PlainAttention(), torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert normforge.patch(model, fuse=True) == ["0"]
    assert torch.equal(torch.get_rng_state(), before)


class Sliced(PlainAttention):
    """Gives the columns that are rotated alone, as Phi does."""

    def __init__(self) -> None:
        super().__init__()
        self.config.partial_rotary_factor = 0.5

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        half = WIDTH // 2
        turned, others = apply_rotary_pos_emb(q[..., :half], k[..., :half], cos, sin)
        q, k = torch.cat((turned, q[..., half:]), -1), torch.cat((others, k[..., half:]), -1)
        y, scores = eager_attention_forward(self, q, k, v, attention_mask, WIDTH**-0.5)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), scores


def test_the_kernel_that_is_asked_for_is_that_of_the_calls(
    monkeypatch: pytest.MonkeyPatch, rotated: list[Any]
) -> None:
    asked = []

    def explain(_: RowServer, *given: Any, rotation: str, offset: bool) -> dict[str, Any]:
        asked.append((*given[1:], rotation, offset))
        return {"kernel": "some"}

    model = filled(Sliced())
    wanted = results(model, turns(WIDTH // 2))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(RowServer, "explain", explain)
        assert normforge.patch(model, fuse=True) == [""]
    assert asked == [(WIDTH // 2, "fp32", "fp32", "", False)]
    rotated.clear()
    check(results(model, turns(WIDTH // 2)), wanted)
    assert {one[-1] for one in rotated} == {WIDTH // 2}


# ---- Models of transformers, with norms of heads and without -------------------------------------

WITH_ATTENTION = {"layer_types": ["full_attention"] * 2}
NORMALIZED: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Gemma3": {},
    "Glm4Moe": {"use_qk_norm": True, "first_k_dense_replace": 2},  # rotates half of the columns
    "Qwen3_5": WITH_ATTENTION,  # and these a quarter
    "Qwen3Next": {**WITH_ATTENTION, "mlp_only_layers": [0, 1]},
    "Olmo2": {},
    "Olmo3": {},
}
"""Models whose attention is served, and what else they are made with."""
ROTATED = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Gemma2", "Granite", "SmolLM3", "Phi3"), 16),
    "Glm4": 8,  # of neighbours, and half of the columns
    "Ernie4_5": 16,  # of neighbours
}
"""Models without norms of heads that are served, with the columns of a head that are rotated."""

MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("Gemma3", "Glm4Moe")]
"""Models of which the others cover most."""


def small_model(name: str) -> Any:
    return model_of(name, head_dim=16, **NORMALIZED.get(name, {}))


@pytest.mark.parametrize("name", [*NORMALIZED, *ROTATED])
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_call = lambda self, x, cos, *_: (2 * cos.shape[-1], bool(self.flags))  # noqa: E731
    rotated = spied(monkeypatch, RotatedFunctions, "rotate", of_call)
    of_rows = lambda self, x, *_: tuple(x.shape)  # noqa: E731
    normalized = spied(monkeypatch, RotatedFunctions, "forward", of_rows)
    model, ids = small_model(name), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    names = [n for n in normforge.patch(model, fuse=True) if n.endswith("self_attn")]
    assert names == [f"model.layers.{i}.self_attn" for i in range(2)]
    rotated.clear()
    normalized.clear()
    torch.testing.assert_close(step(model, ids), wanted, rtol=1e-3, atol=1e-4)
    one_by_one, joined = [(2, 9, 4, 16), (2, 9, 2, 16)], [(2, 9, 1, 64), (2, 9, 1, 32)]
    shapes = (joined if name.startswith("Olmo") else one_by_one) * 2
    of_neighbours = name in ("Glm4", "Ernie4_5")
    assert normalized == (shapes if name in NORMALIZED else [])
    assert rotated == ([] if name in NORMALIZED else [(ROTATED[name], of_neighbours)] * 8)
    normforge.unpatch(model)
    assert equal_bits(step(model, ids), wanted)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Qwen3Next", "Olmo2", "Llama", "Glm4"])
def test_models_of_transformers_generate_as_before(name: str) -> None:
    model, ids = small_model(name).eval(), torch.randint(1, 32, (2, 9))
    given = {"max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(ids, **given)
    normforge.patch(model, fuse=True)
    assert torch.equal(model.generate(ids, **given), wanted)


@pytest.mark.parametrize("name", ["Qwen3", "Olmo2", "Llama", *MORE])
def test_models_of_transformers_compile_into_as_many_graphs(name: str) -> None:
    ids = torch.randint(1, 32, (2, 9))

    def graphs(fuse: bool) -> tuple[int, torch.Tensor]:
        torch._dynamo.reset()
        counter, model = CompileCounter(), small_model(name)
        normforge.patch(model, fuse=fuse)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        loss = compiled(ids, labels=ids, use_cache=False).loss
        longer = compiled(ids.repeat(1, 2), labels=ids.repeat(1, 2), use_cache=False).loss
        compiled(ids.repeat(1, 3), labels=ids.repeat(1, 3), use_cache=False)
        frames = counter.frame_count
        assert isinstance(frames, int)
        return frames, loss + longer

    (before, wanted), (after, found) = graphs(False), graphs(True)
    assert after == before
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
