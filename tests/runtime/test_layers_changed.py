"""`patch(model, fuse=True)`: layers whose norms or forwards are others than they seem, or become
others after the patch; and what the text of a layer means, which decides what is joined."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import linecache
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import normforge
from normforge.frontends.layer_text import BEFORE, BEHIND, KEPT, Joined, join
from tests.support.entry_points import equal_bits, filled, leaf, randn
from tests.support.foreign_norms import PlainRMSNorm
from tests.support.layer_classes import B, GemmaLayer, Layer, LlamaLayer, N, S, check, results


def both(model: Any) -> tuple[Any, Any]:
    """A model whose norms alone are patched, and one that is fused."""
    plain, fused = copy.deepcopy(model), copy.deepcopy(model)
    normforge.patch(plain)
    normforge.patch(fused, fuse=True)
    return plain, fused


# ---- What norms are -----------------------------------------------------------------------------


class Doubled(nn.Module):
    """Stands before a module and has its attributes, as wrappers of FSDP and PEFT do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> Any:
        return 2 * self.inner(x)


OTHERS = {
    "another norm": lambda _: filled(nn.LayerNorm(N)),
    "nothing": lambda _: nn.Identity(),
    "a wrapper": Doubled,
}


@pytest.mark.parametrize("name", ["norm1", "norm2"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", [Layer, LlamaLayer])
def test_a_norm_that_became_another_module_is_called(kind: Any, other: str, name: str) -> None:
    plain, fused = both(filled(kind()))
    assert type(fused) is not kind
    for model in (plain, fused):
        setattr(model, name, OTHERS[other](getattr(model, name)))
    check(results(fused), results(plain))


def test_a_norm_that_was_patched_otherwise_since_is_called() -> None:
    plain, fused = both(filled(LlamaLayer()).bfloat16())
    for model in (plain, fused):
        normforge.patch(model.norm1, casting="llama")
        normforge.unpatch(model.norm2)
    assert equal_bits(*(results(one, dtype=torch.bfloat16) for one in (fused, plain)))


class CountingRMSNorm(PlainRMSNorm):
    """Does more than it returns."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return super().forward(x)


class WideningRMSNorm(PlainRMSNorm):
    """Returns fp32 for any rows and weight."""

    def forward(self, x: torch.Tensor) -> Any:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.float() * (wide * rstd)


class OfWeightsDtypeRMSNorm(PlainRMSNorm):
    """T5's."""

    def forward(self, x: torch.Tensor) -> Any:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * rstd).to(self.weight.dtype)


class NormAlone(LlamaLayer):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        return hidden_states, residual


@pytest.mark.parametrize("norm", [CountingRMSNorm, WideningRMSNorm])
def test_layers_whose_norms_patch_leaves_alone_are_left_alone(
    norm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = NormAlone()
    model.norm1, model.norm2 = norm(N), norm(N)
    with caplog.at_level("INFO"):
        assert normforge.patch(model, fuse=True) == []
    assert "(NormAlone) alone: its norms were not all patched" in caplog.text


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [OfWeightsDtypeRMSNorm, PlainRMSNorm])
def test_norms_have_results_of_their_own_dtype(norm: Any, rows: torch.dtype) -> None:
    model = NormAlone()
    model.norm1, model.norm2 = norm(N), norm(N)
    plain, fused = both(filled(model).bfloat16())
    assert type(fused) is not NormAlone
    assert equal_bits(results(fused, dtype=rows), results(plain, dtype=rows))


@pytest.mark.parametrize("kind", [Layer, LlamaLayer, GemmaLayer])
def test_hooks_for_all_modules_are_called(kind: Any) -> None:
    model, seen = filled(kind()), list[str]()
    normforge.patch(model, fuse=True)
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        found = results(model)
    finally:
        handle.remove()
    norms = [one for _, one in model.named_children() if "norm" in type(one).__name__.lower()]
    assert sum("Norm" in one for one in seen) == len(norms)
    check(found, results(model))
    assert len(seen) == len(list(model.modules()))


# ---- What forwards are --------------------------------------------------------------------------


class Scaled(LlamaLayer):
    def forward(  # type: ignore[override]
        self, hidden_states: Any, *, attention_mask: Any = None, scale: float = 2.0, **_: Any
    ) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        return self.mlp(hidden_states) * scale + residual


class Private(LlamaLayer):
    """Has a name that its class changes, where it is not tried."""

    def forward(self, hidden_states: Any, **_: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        y = residual + self.mlp(hidden_states)
        return self.__in_training(y) if self.training else y

    def __in_training(self, x: torch.Tensor) -> Any:
        return x.sin()


class Told(LlamaLayer):
    """Has a text of several lines, and names in annotations that are nowhere."""

    def forward(self, hidden_states: Any, **_: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)

        def add(x: torch.Tensor, y: Nowhere) -> Any:  # type: ignore[name-defined]  # noqa: F821
            return x + y

        self.text = """a line,
            and another"""
        return add(self.mlp(hidden_states), residual)


@pytest.mark.parametrize("scale", [{}, {"scale": 3.0}])
def test_arguments_by_name_alone_stay_so(scale: dict[str, float]) -> None:
    plain, fused = both(filled(Scaled()))
    assert type(fused) is not Scaled
    check(results(fused, **scale), results(plain, **scale))
    with pytest.raises(TypeError, match="positional"):
        fused(randn(B, S, N), None)


def test_a_text_with_private_names_is_left_alone() -> None:
    plain, fused = both(filled(Private()))
    assert type(fused) is Private
    assert equal_bits(results(fused), results(plain))


def test_texts_of_several_lines_and_annotations_stay() -> None:
    plain, fused = both(filled(Told()))
    assert type(fused) is not Told
    check(results(fused), results(plain))
    assert fused.text == plain.text


def test_a_forward_that_was_wrapped_since_is_left_alone() -> None:
    class Wrapped(Scaled):
        forward = Scaled.forward

    @functools.wraps(Scaled.forward)
    def wrapper(self: Any, *given: Any, **named: Any) -> Any:
        y = Scaled.forward(self, *given, **named)
        return y * 2 if self.training else y

    Wrapped.forward = wrapper  # type: ignore[method-assign]
    plain, fused = both(filled(Wrapped()))
    assert type(fused) is Wrapped
    assert equal_bits(results(fused), results(plain))


def test_a_forward_that_became_another_is_read_again() -> None:
    class Steered(Scaled):
        forward = Scaled.forward
        by = 0.0

    def forward(self: Any, hidden_states: Any, **_: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        return self.mlp(hidden_states) * 2.0 + residual + self.by

    both(Steered())
    Steered.forward = forward  # type: ignore[method-assign]
    plain, fused = both(filled(Steered()))
    assert type(fused) is not Steered
    Steered.by = 3.0
    check(results(fused), results(plain))


def test_a_text_that_changed_since_is_left_alone(tmp_path: Path) -> None:
    text = "    y = residual + self.mlp(hidden_states) * (2 if self.training else 1)\n"
    lines = [
        "def forward(self, hidden_states, **_):\n",
        "    residual = hidden_states\n",
        "    hidden_states = self.norm1(hidden_states)\n",
        text,
        "    return y\n",
    ]
    file, scope = tmp_path / "model.py", dict[str, Any]()
    file.write_text("".join(lines))
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), scope)
    kind: Any = type("Edited", (LlamaLayer,), {"forward": scope["forward"]})
    other: Any = type("Edited", (LlamaLayer,), {"forward": scope["forward"]})
    assert type(both(kind())[1]) is not kind
    file.write_text("".join(lines).replace("2 if", "3 if"))
    linecache.checkcache()
    plain, fused = both(filled(other()))
    assert type(fused) is other
    assert equal_bits(results(fused), results(plain))


# ---- What texts mean -----------------------------------------------------------------------------


ALL = Joined(*[("norm1", "norm2")] * 3)


def joined(text: str) -> tuple[Joined, str]:
    """Return what is joined in a forward, and its new text."""
    (made,) = ast.parse("def forward(self, x, r):\n" + textwrap.indent(text, "    ")).body
    assert isinstance(made, ast.FunctionDef)
    found = join(made, ALL)
    return found, "; ".join(ast.unparse(one) for one in made.body)


def spelled(text: str) -> str:
    """Return statements as this Python writes them: 3.10 puts tuples into parentheses."""
    return "; ".join(ast.unparse(one) for one in ast.parse(text).body)


JOINED = {
    "x = self.norm1(x)\nx = r + x": f"x = {BEHIND}(self.norm1, x, r)",
    "x = self.norm1(x.sin())\nx = x + r": f"x = {BEHIND}(self.norm1, x.sin(), r)",
    "x = r + x\nr = x\nx = self.norm1(x)": f"x, r = {BEFORE}(self.norm1, r, x)",
    "s = r + x * 2\nr = s\nx = self.norm1(s)": f"x, r = {BEFORE}(self.norm1, r, x * 2); s = r",
    "s = x + r\ny = self.norm1(s)": f"y, s = {BEFORE}(self.norm1, x, r)",
    "x = r - x\nr = x\nx = self.norm1(x)": f"x = r - x; x, r = {KEPT}(self.norm1, x)",
    "r = x\nx = self.norm1(x)": f"x, r = {KEPT}(self.norm1, x)",
}
LEFT = [
    "x = self.norm1(x)\ny = r + x",
    "x = self.norm1(x)\nx = r - x",
    "x = self.norm1(x)\nx = x + x",
    "x = self.norm1(x)\nx += r",
    "x = self.norm1(x, 2)\nx = r + x",
    "x = self.norm1(x, scale=2)\nx = r + x",
    "x = self.norm3(x)\nx = r + x",
    "x = norm1(x)\nx = r + x",
    "x = self.norm1(x)\nx = x.sin()\nx = r + x",
    "x = r + x\nr = x\nx = self.norm1(x, scale=2)",
    "x = r + x\nr = x\nx = self.norm1(r.sin())",
    "x = r + x\nx = self.norm1(x)",
    "x = r.sin() + x.sin()\nr = x\ny = r",
    "r += x\nx = self.norm1(r)",
    "r = x\nr = self.norm1(x)",
    "r = x\ny = self.norm1(r)",
    "r = x\nx = self.norm1(x, scale=2)",
    "r = x\nx = self.norm3(x)",
    "r = r\nx = self.norm1(r)",
    "if x is r:\n    x = self.norm1(x)\n    x = r + x",
]


@pytest.mark.parametrize("text", JOINED)
def test_what_is_joined(text: str) -> None:
    assert joined(text)[1] == spelled(JOINED[text])


@pytest.mark.parametrize("text", LEFT)
def test_what_is_left_as_it_is(text: str) -> None:
    found, now = joined(text)
    assert found == Joined()
    assert now == spelled(text)


class Between(LlamaLayer):
    """Takes what is added before one norm and behind the other."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **other: Any) -> Any:
        residual = other.get("residual", hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states = hidden_states.cos() * residual.sin()
        residual = other.get("residual", residual)
        hidden_states = self.norm2(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


TERMS: dict[str, Any] = {
    "a number": 0,
    "a tensor without dimensions": torch.tensor(2.0),
    "a row": torch.ones(N),
    "a row of float64": torch.ones(1, 1, N, dtype=torch.float64),
    "whole numbers": torch.ones(B, S, N, dtype=torch.int32),
    "narrow rows": torch.ones(B, S, N, dtype=torch.bfloat16),
    "more rows": torch.ones(3, B, S, N),
}


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_another_kind_are_added_as_before(term: str) -> None:
    plain, fused = filled(Between()), filled(Between())
    normforge.patch(plain)
    assert "" in normforge.patch(fused, fuse=True)
    x = randn(B, S, N)
    found, wanted = (model(x, residual=TERMS[term]) for model in (fused, plain))
    torch.testing.assert_close(found, wanted)


class CalledRMSNorm(PlainRMSNorm):
    """Does more in a call than in its forward."""

    def __call__(self, x: torch.Tensor) -> Any:
        return 2 * super().__call__(x)


def test_a_norm_that_does_more_in_a_call_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    model = LlamaLayer()
    model.norm1 = CalledRMSNorm(N)
    with caplog.at_level("INFO"):
        assert "" not in normforge.patch(model, fuse=True)
    assert "(LlamaLayer) alone: it computes something else" in caplog.text


@pytest.mark.parametrize("backward", [False, True])
def test_rows_and_stream_are_freed_at_once(backward: bool) -> None:
    """A node that kept its own result would wait for Python's garbage collection."""
    model = filled(LlamaLayer())
    normforge.patch(model, fuse=True)
    norm, weight = normforge.rms_norm.__self__, model.norm1.weight  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        x = leaf(B, S, N) * 1
        y, stream = normforge.frontends.layer_calls.norm_of_stream(norm, x, weight, 1e-4, 0)
        z = model(stream)
        kept = [weakref.ref(one) for one in (x, y, stream, z)]
        if backward:
            (y.sum() + z.sum()).backward()
        del x, y, stream, z
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


class Unlike(torch.Tensor):
    """A gradient of another type, as a collective's that has not arrived."""


@torch.no_grad()
def test_gradients_of_a_stream_do_not_go_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick way adds no gradient, and tells nobody who watches of one."""
    norm = normforge.rms_norm.__self__  # type: ignore[attr-defined]
    x, weight, dy, dstream = (
        randn(*one, seed=i) for i, one in enumerate([(B, N), (N,), *[(B, N)] * 2])
    )
    _, rstd = norm.rmsnorm_forward(x, weight, 1e-4)
    given = (dy, x, weight, rstd, 1e-4, 0.0, True, True)
    alone = norm.gradients(*given)
    monkeypatch.setattr(norm, "_quick", lambda *_: alone)
    dx, dw = norm.gradients(*given, dstream)
    torch.testing.assert_close([dx, dw], [alone[0] + dstream, alone[1]])
    monkeypatch.setattr(norm, "run", lambda *_: pytest.fail("a subclass reached a kernel"))
    dx, _ = norm.gradients(*given, dstream.as_subclass(Unlike))
    torch.testing.assert_close(dx.as_subclass(torch.Tensor), alone[0] + dstream)


def test_a_stream_without_a_gradient_gets_none() -> None:
    norm, weight = normforge.rms_norm.__self__, leaf(N)  # type: ignore[attr-defined]
    of = normforge.frontends.layer_calls.norm_of_stream
    y, stream = of(norm, randn(B, N), weight, 1e-4, 0)
    assert (y.requires_grad, stream.requires_grad) == (True, False)


class Trained(LlamaLayer):
    """Cannot be tried as in training, where its results are never the same."""

    def forward(self, hidden_states: Any, **_: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states = torch.nn.functional.dropout(hidden_states, 0.5, self.training)
        return self.mlp(hidden_states) + residual


def test_layers_in_training_are_tried_without_dropout() -> None:
    plain, fused = filled(Trained()), filled(Trained())
    normforge.patch(plain)
    assert "" in normforge.patch(fused, fuse=True)
    x, found = randn(B, S, N), []
    for model in (plain, copy.deepcopy(fused)):
        torch.manual_seed(0)
        found.append(model.train()(x))
    torch.testing.assert_close(*found)
