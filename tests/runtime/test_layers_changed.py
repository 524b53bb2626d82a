"""`patch(model, fuse=True)`: layers whose norms or forwards are others than they seem, or become
others after the patch."""

from __future__ import annotations

import copy
import functools
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import normforge
from tests.support.entry_points import equal_bits, filled, randn
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
