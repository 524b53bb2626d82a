"""`patch(model, fuse=True)`: attention whose queries and keys `rms_norm_rope` serves, and what is
left alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import normforge
from normforge.api import Package
from normforge.frontends.rope import RotatedFunctions
from normforge.serve.rows import RowServer
from tests.support import attention_classes
from tests.support.attention_classes import (
    HIDDEN,
    WIDTH,
    Attention,
    GatedAttention,
    GemmaAttention,
    MixedAttention,
    PlainAttention,
    QueriesAttention,
    ScaledAttention,
    TwiceRotatedAttention,
    WholeNormAttention,
    results,
    turns,
)
from tests.support.entry_points import equal_bits, filled, randn, spied
from tests.support.foreign_norms import CentredRMSNorm
from tests.support.layer_classes import B, S, check

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what `rms_norm_rope` serves in plain eager code."""
    return spied(monkeypatch, RotatedFunctions, "forward", lambda _, x, *__: tuple(x.shape))


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what `apply_rope` and its backward serve in plain eager code."""
    return spied(monkeypatch, RotatedFunctions, "rotate", lambda _, x, *__: tuple(x.shape))


NAMES = ["q_norm", "k_norm", ""]
COLUMNS = {
    Attention: WIDTH,
    GemmaAttention: WIDTH,
    GatedAttention: WIDTH // 4,
    WholeNormAttention: WIDTH,
}
"""Columns of a head that are rotated."""


@pytest.mark.parametrize("kind", [Attention, WholeNormAttention])
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_norm_that_became_another_module_is_called(name: str, kind: Any) -> None:
    plain, fused = filled(kind()), filled(kind())
    normforge.patch(plain)
    assert normforge.patch(fused, fuse=True) == NAMES
    for model in (plain, fused):
        width = len(getattr(model, name).weight)
        setattr(model, name, filled(torch.nn.LayerNorm(width)))
    check(results(fused, turns()), results(plain, turns()))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_full_backward_hook", "register_forward_pre_hook"],
)
def test_norms_with_hooks_are_called(name: str, register: str, served: list[Any]) -> None:
    """Tensor parallelism in transformers has such hooks: they sum the gradients of the weights."""
    model, seen = filled(Attention()), list[str]()
    assert normforge.patch(model, fuse=True) == NAMES
    served.clear()  # it was tried
    wanted = results(model, turns())
    assert len(served) == 2
    handle = getattr(getattr(model, name), register)(lambda *_: seen.append(name))
    check(results(model, turns()), wanted)
    assert seen == [name] and len(served) == 2
    handle.remove()
    assert equal_bits(results(model, turns()), wanted)
    assert seen == [name] and len(served) == 4


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("kind", COLUMNS)
def test_queries_and_keys_are_normalized_and_rotated_at_once(
    kind: Any, batch: int, served: list[Any]
) -> None:
    model = filled(kind())
    of_turns, state = turns(COLUMNS[kind], batch), copy.deepcopy(model.state_dict())
    wanted = results(model, of_turns)
    assert normforge.patch(model, fuse=True) == NAMES
    served.clear()  # it was tried
    check(results(model, of_turns), wanted)
    heads = (attention_classes.HEADS, attention_classes.KEYS)
    joined = kind is WholeNormAttention
    assert served == [(B, S, 1, one * WIDTH) if joined else (B, S, one, WIDTH) for one in heads]
    assert isinstance(model, kind)
    assert model.state_dict().keys() == state.keys()
    assert "by Normforge" in repr(model).splitlines()[1]
    assert normforge.unpatch(model) == NAMES
    assert type(model) is kind
    assert equal_bits(results(model, of_turns), wanted)
    assert len(served) == 2


def test_without_fuse_attention_stays(served: list[Any]) -> None:
    model = Attention()
    assert normforge.patch(model) == NAMES[:2]
    assert type(model) is Attention
    assert normforge.patch(model, fuse=True) == NAMES
    assert normforge.patch(model) == NAMES[:2]  # as the last call says
    assert type(model) is Attention


def heads_of(model: Any, of_turns: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries and keys as attention has them."""
    seen: list[torch.Tensor] = []

    def attend(_: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> Any:
        seen.extend((q, k))
        return v.repeat_interleave(2, 1).transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention_classes.ATTENTIONS, "other", attend)
        model(randn(B, S, HIDDEN, dtype=torch.bfloat16).to(dtype), of_turns, None)
    return seen


@pytest.mark.parametrize("kind", COLUMNS)
def test_narrow_rows_are_rounded_once(kind: Any, served: list[Any]) -> None:
    """The error of rotated queries and keys against float64 is smaller."""
    narrow = filled(kind()).bfloat16()
    of_turns = turns(COLUMNS[kind], dtype=torch.bfloat16)
    exact, wide = copy.deepcopy(narrow).double(), [one.double() for one in of_turns]
    if kind in (GemmaAttention, GatedAttention):
        for norm in (exact.q_norm, exact.k_norm):
            norm.forward = lambda x, norm=norm: torch.nn.functional.rms_norm(
                x, (WIDTH,), 1.0 + norm.weight, norm.eps
            )
    wanted, before = (
        heads_of(model, given, dtype)
        for model, given, dtype in (
            (exact, wide, torch.float64),
            (narrow, of_turns, torch.bfloat16),
        )
    )
    normforge.patch(narrow, fuse=True)
    served.clear()
    found = heads_of(narrow, of_turns, torch.bfloat16)
    assert len(served) == 2
    for one, two, other in zip(found, before, wanted, strict=True):
        assert one.dtype == two.dtype
        one, two, other = (given[..., : COLUMNS[kind]] for given in (one, two, other))
        assert (one.double() - other).norm() < 0.9 * (two.double() - other).norm()


@pytest.mark.parametrize("kind", [Attention, GemmaAttention])
def test_what_the_config_does_not_say_stays_as_it_was(kind: Any, served: list[Any]) -> None:
    """Fewer columns are rotated than it says, or the results are wider than the rows."""
    models = [filled(kind()), filled(kind())]
    normforge.patch(models[0], fuse=True)
    served.clear()
    check(*(results(model, turns(WIDTH // 2)) for model in models))
    assert served == []
    narrow = [model.bfloat16() for model in models]
    of_turns = turns()
    found, wanted = (heads_of(model, of_turns, torch.bfloat16) for model in narrow)
    assert [one.dtype for one in (*found, *wanted)] == [torch.float32] * 4
    for norm in (one for model in narrow for one in (model.q_norm, model.k_norm)):
        norm.float()
    of_turns = turns(dtype=torch.bfloat16)
    found, wanted = (heads_of(model, of_turns, torch.bfloat16) for model in narrow)
    wide = kind is Attention  # Gemma's norm narrows
    assert [one.dtype for one in (*found, *wanted)] == [
        torch.float32 if wide else torch.bfloat16
    ] * 4
    assert len(served) == 2 * (not wide)


def test_angles_that_are_learned_have_a_gradient(served: list[Any]) -> None:
    models = [filled(Attention()), filled(Attention())]
    normforge.patch(models[0], fuse=True)
    served.clear()
    x, angles = randn(B, S, HIDDEN), (turns()[0].requires_grad_(), turns()[1].requires_grad_())
    losses = [model(x, angles, None)[0].square().sum() for model in models]
    check(*(torch.autograd.grad(loss, angles) for loss in losses))
    assert served == []


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": SimpleNamespace(partial_rotary_factor=0.5)},
        {"rope_parameters": [{"partial_rotary_factor": 0.5}]},
        {"partial_rotary_factor": [0.5, 1.0]},
    ],
)
def test_a_config_that_says_it_in_another_way_is_one_of_whole_heads(
    said: dict[str, Any], served: list[Any]
) -> None:
    models = [filled(Attention()), filled(Attention())]
    vars(models[0].config).update(said)
    assert normforge.patch(models[0], fuse=True) == NAMES
    served.clear()
    for columns, calls in ((WIDTH // 2, 0), (WIDTH, 2)):
        check(*(results(model, turns(columns)) for model in models))
        assert len(served) == calls


@pytest.mark.parametrize("kind", [Attention, WholeNormAttention])
def test_patched_attention_is_traced(kind: Any) -> None:
    """Tracers have sizes that are no ints."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = kind()

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
            return self.attention(x, (cos, sin), None)[0]

    model, x = filled(Model()), randn(B, S, HIDDEN)
    assert len(normforge.patch(model, fuse=True)) == 3
    with torch.no_grad():
        traced = torch.jit.trace(model, (x, *turns()), check_trace=False)
        check([traced(2 * x, *turns())], [model(2 * x, *turns())])


def test_models_are_copied_and_pickled() -> None:
    model = filled(Attention())
    normforge.patch(model, fuse=True)
    wanted = results(model, turns())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert equal_bits(results(other, turns()), wanted)
        normforge.unpatch(other)
        assert type(other) is Attention


class Layers(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor, of_turns: Any, _: None) -> Any:
        for layer in self.layers:
            x = x + layer(x, of_turns, None)[0]
        return x, None


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("kind", COLUMNS)
def test_compiled_models_have_no_more_graphs_than_before(kind: Any, by_layer: bool) -> None:
    def graphs(patch: bool) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        counter, model = CompileCounter(), filled(Layers(kind))
        if patch:
            normforge.patch(model, fuse=True)
        compiled = model if by_layer else torch.compile(model, backend=counter, fullgraph=True)
        if by_layer:
            for layer in model.layers:
                layer.compile(backend=counter, fullgraph=True)
        x = randn(B, S, HIDDEN)
        found = [compiled(x, turns(COLUMNS[kind]), None)[0]]
        with torch.no_grad():
            found.append(compiled(x, turns(COLUMNS[kind], batch=B), None)[0])
        return counter.frame_count, found

    (before, wanted), (after, found) = graphs(False), graphs(True)
    assert after == before
    check(found, wanted)


def test_a_rotation_that_keeps_the_dtype_of_its_rows_may_have_wider_numbers(
    served: list[Any],
) -> None:
    """OLMo's, whose cos and sin are fp32."""
    kind = with_globals(apply_rotary_pos_emb=attention_classes.apply_rotary_in_its_dtype)
    models = [filled(kind()).bfloat16(), filled(kind()).bfloat16()]
    assert normforge.patch(models[0], fuse=True) == NAMES
    served.clear()
    found, wanted = (heads_of(model, turns(), torch.bfloat16) for model in models)
    assert [one.dtype for one in (*found, *wanted)] == [torch.bfloat16] * 4
    assert len(served) == 2
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


# ---- What is left alone --------------------------------------------------------------------------


def interleaved(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs of neighbours, as GLM does."""
    cos, sin = (one.chunk(2, -1)[0].repeat_interleave(2, -1).unsqueeze(1) for one in (cos, sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return x * cos + torch.stack((-odd, even), -1).flatten(-2) * sin

    return rotated(q), rotated(k)


def with_globals(**others: Any) -> type:
    """The class in a file that has other functions."""
    forward = FunctionType(Attention.forward.__code__, {**vars(attention_classes), **others})
    return type("Another", (Attention,), {"forward": forward})


def centred() -> type:
    return type("Centred", (Attention,), {"norm": CentredRMSNorm})


def with_closure() -> type:
    kept = apply = attention_classes.apply_rotary_pos_emb

    class Closed(Attention):
        def forward(self, x: Any, of_turns: Any, _: Any) -> Any:  # type: ignore[override]
            shape = (*x.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
            q, k = kept(q, k, *of_turns)
            return self.o_proj(q.transpose(1, 2).flatten(-2)), k

    assert apply is kept
    return Closed


def with_norms(of_queries: int, of_keys: int) -> Any:
    class Wide(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.k_norm = (self.norm(width) for width in (of_queries, of_keys))

    return Wide


def joined_in_part() -> Any:
    class Part(WholeNormAttention):
        def __init__(self) -> None:
            super().__init__()
            self.config.partial_rotary_factor = 0.5

    return Part


FORWARD = "its forward is not q_norm, k_norm and then apply_rotary_pos_emb"


def by_three(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Rotate columns and those three behind them: no pairs."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(x * cos + x.roll(3, -1) * sin for x in (q, k))


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "norms of some heads": (partial(with_norms, 24, 16), "its norms are neither those of single"),
    "two ways of norms": (partial(with_norms, 64, 16), "it raises an error on the CPU"),
    "other rotation": (
        partial(with_globals, apply_rotary_pos_emb=by_three),
        "it computes something else",
    ),
    "closure": (with_closure, FORWARD),
    "no norm of keys": (lambda: QueriesAttention, FORWARD),
    "two rotations": (lambda: TwiceRotatedAttention, FORWARD),
}
WITHOUT_NORMS: dict[str, tuple[Callable[[], Any], str]] = {
    "a part of joined heads": (joined_in_part, "it normalizes all heads together, and rotates a"),
    "two kinds of norms": (lambda: MixedAttention, "its norms do not both compute"),
    "other norms": (centred, "its norms do not both compute"),
    "something in between": (lambda: ScaledAttention, "it computes something else"),
    "neighbours": (
        partial(with_globals, apply_rotary_pos_emb=interleaved),
        "it computes something else",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_where_norms_stay_rotations_are_served(
    name: str, caplog: pytest.LogCaptureFixture, served: list[Any], rotated: list[Any]
) -> None:
    make, why = WITHOUT_NORMS[name]
    kind, columns = make(), WIDTH // 2 if name == "a part of joined heads" else WIDTH
    models = [filled(kind()), filled(kind())]
    with caplog.at_level("INFO"):
        assert "" in normforge.patch(models[0], fuse=True)
    said = f"patch joins no norms with the rotation in a {kind.__name__}: {why}"
    assert any(message.startswith(said) for message in caplog.messages)
    served.clear()
    rotated.clear()
    check(*(results(model, turns(columns)) for model in models))
    heads = (attention_classes.HEADS, attention_classes.KEYS)
    assert served == []
    assert sorted(rotated) == sorted((B, S, one, WIDTH) for one in (*heads, *heads))
    assert "" in normforge.unpatch(models[0]) and type(models[0]) is kind


def test_norms_that_stay_are_tried_whatever_the_dtype_of_the_model() -> None:
    kind = type("LayerNormed", (Attention,), {"norm": torch.nn.LayerNorm})
    assert "" in normforge.patch(filled(kind()).bfloat16(), fuse=True)


@pytest.mark.parametrize("name", LEFT)
def test_other_attention_is_left_alone(
    name: str, caplog: pytest.LogCaptureFixture, served: list[Any]
) -> None:
    make, why = LEFT[name]
    model = make()()
    kind = type(model)
    with caplog.at_level("INFO"):
        names = normforge.patch(model, fuse=True)
    assert type(model) is kind
    assert "" not in names
    told = [m for m in caplog.messages if f"({kind.__name__}) alone: {why}" in m]
    assert len(told) == 1, caplog.messages
    (summary,) = [
        r for r in caplog.records if "attention" in r.getMessage() and "serves" in r.getMessage()
    ]
    assert summary.levelname == "INFO"
    assert "patch fuses nothing in this model" in caplog.text


def test_attention_that_cannot_be_tried_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Attention()
    del model.config
    with caplog.at_level("INFO"):
        normforge.patch(model, fuse=True)
    assert type(model) is Attention
    assert "it raises an error on the CPU with small projections" in caplog.text


def test_roundings_of_llama_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = Attention()
    with caplog.at_level("INFO"):
        assert normforge.patch(model, "llama", fuse=True) == NAMES[:2]
    assert "patch fuses nothing: the casting of Llama" in caplog.text


def test_heads_without_a_kernel_are_left_alone_on_a_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def explain(_: RowServer, *given: Any, rotation: str, offset: bool) -> dict[str, Any]:
        asked.append((*given[1:], rotation, offset))
        missing = given[1:] == (16, "fp32", "fp32") or (rotation and given[1] != 64) or offset
        return {"kernel": None if missing else "some"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(RowServer, "explain", explain)
    with caplog.at_level("INFO"):
        assert normforge.patch(Attention(), fuse=True) == NAMES[:2]
        assert normforge.patch(Attention().bfloat16(), fuse=True) == NAMES
        assert normforge.patch(GemmaAttention().bfloat16(), fuse=True) == NAMES
        assert normforge.patch(GatedAttention().bfloat16(), fuse=True) == NAMES[:2]
        assert normforge.patch(WholeNormAttention().bfloat16(), fuse=True) == NAMES
        assert normforge.patch(PlainAttention(), fuse=True) == []
        assert normforge.patch(PlainAttention().bfloat16(), fuse=True) == [""]
    assert "no kernel of apply_rope serves heads of 16 columns here" in caplog.text
    assert "no kernel of rms_norm_rope serves heads of 16 columns here" in caplog.text
    assert "serves heads of 16 columns, 4 of them rotated, here" in caplog.text
    assert "serves rows of 32 columns in heads of 16 columns here" in caplog.text
    # Behind norms without kernels, rotations are asked for alone.
    whole = [*[("fp32", "fp32", "")] * 2, *[("bf16", "bf16", "")] * 2]
    wanted = [(16, *asked_of, False) for asked_of in whole]
    # What an offset is added to has no kernel here, and the sum of both is asked for.
    of_gemma = [(16, "bf16", "bf16", "", True), (16, "bf16", "fp32", "", False)] * 2
    of_part = [(16, "bf16", "bf16", "rotary4", True), (16, "bf16", "fp32", "rotary4", False)]
    of_part += [(16, "bf16", "bf16", "rotary4", False)]
    of_rows = [(64, "bf16", "bf16", "joined16", False)] * 2
    of_rows += [(32, "bf16", "bf16", "joined16", False), (16, "bf16", "bf16", "", False)]
    of_plain = [(16, one, one, "", False) for one in ("fp32", "bf16")]
    assert asked == [*wanted, *of_gemma, *of_part, *of_rows, *of_plain]


def test_other_packages_fuse_nothing(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    assert package.patch(Attention(), fuse=True) == NAMES[:2]
    assert "only normforge.patch has rms_norm_rope" in caplog.text
    with pytest.raises(ValueError, match="no kernels of rms_norm_rope are batch-invariant"):
        normforge.batch_invariant.patch(Attention(), fuse=True)
