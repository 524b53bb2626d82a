"""The text of a layer decides what is joined, and its tensors decide what is left out. These are
layers that look alike and mean something else."""

from __future__ import annotations

import ast
import copy
import gc
import textwrap
import weakref
from typing import Any

import pytest
import torch

import normforge
from normforge.frontends.layer_text import BEFORE, BEHIND, KEPT, Joined, join
from tests.support.entry_points import filled, leaf, randn
from tests.support.foreign_norms import PlainRMSNorm
from tests.support.layer_classes import B, LlamaLayer, N, S

ALL = Joined(*[("norm1", "norm2")] * 3)


def joined(text: str) -> tuple[Joined, str]:
    """Return what is joined in a forward, and its new text."""
    (made,) = ast.parse("def forward(self, x, r):\n" + textwrap.indent(text, "    ")).body
    assert isinstance(made, ast.FunctionDef)
    found = join(made, ALL)
    return found, "; ".join(ast.unparse(one) for one in made.body)


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
    assert joined(text)[1] == JOINED[text]


@pytest.mark.parametrize("text", LEFT)
def test_what_is_left_as_it_is(text: str) -> None:
    found, now = joined(text)
    assert found == Joined()
    assert now == "; ".join(ast.unparse(one) for one in ast.parse(text).body)


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
