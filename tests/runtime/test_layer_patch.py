"""`patch(model, fuse=True)`: layers in which `rms_norm` with `add` serves norms and the sums behind
them, and what is left alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import normforge
from normforge.api import Package
from normforge.frontends.norm_add import NormAndAdd
from tests.support.entry_points import equal_bits, filled, leaf, randn
from tests.support.foreign_norms import CentredRMSNorm, PlainRMSNorm
from tests.support.layer_classes import (
    B,
    GemmaLayer,
    Layer,
    LlamaLayer,
    N,
    OffsetLayer,
    OtherNamesLayer,
    S,
    check,
    first,
    model_of,
    results,
    step,
)
from tests.support.norm_add import Kernels

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    package: Package = normforge.explain.__self__  # type: ignore[attr-defined]
    before = package._norm.added
    found = Kernels(package, monkeypatch)
    yield found
    assert before is not None
    package._norm.added = package.ops.norm_and_add = before


@pytest.mark.parametrize(("kind", "offset"), [(Layer, 0.0), (GemmaLayer, 1.0)])
def test_norms_and_the_sums_behind_them_are_one_call(
    kind: Any, offset: float, kernels: Kernels
) -> None:
    model = filled(kind())
    wanted = results(model)
    assert normforge.patch(model, fuse=True)[-1:] == [""]
    kernels.calls.clear()  # it was tried
    check(results(model), wanted)
    assert kernels.calls == [offset] * 2
    assert isinstance(model, kind)
    assert "by Normforge" in repr(model).splitlines()[1]
    assert "" in normforge.unpatch(model)
    assert type(model) is kind
    assert equal_bits(results(model), wanted)
    assert len(kernels.calls) == 2


def test_results_that_are_wider_than_rows_are_added_by_pytorch(kernels: Kernels) -> None:
    models = [filled(Layer()).bfloat16(), filled(Layer()).bfloat16()]
    for model in models:
        model.norm1.float(), model.norm2.float(), model.mlp.float()
    normforge.patch(models[0], fuse=True)
    kernels.calls.clear()
    x = randn(B, S, N, dtype=torch.bfloat16)
    found, wanted = (model(x) for model in models)
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert len(kernels.calls) == 1  # of the second norm, whose rows are wide


@pytest.mark.parametrize("kind", [Layer, LlamaLayer])
def test_models_are_copied_and_pickled(kind: Any, kernels: Kernels) -> None:
    model = filled(kind())
    normforge.patch(model, fuse=True)
    wanted = results(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert equal_bits(results(other), wanted)


@pytest.mark.parametrize("kind", [Layer, GemmaLayer, LlamaLayer, OffsetLayer, OtherNamesLayer])
def test_compiled_layers_have_no_more_graphs_than_before(kind: Any, kernels: Kernels) -> None:
    def graphs(fuse: bool) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        counter, layers = CompileCounter(), [filled(kind()) for _ in range(3)]
        x = start = leaf(B, S, N)
        for layer in layers:
            normforge.patch(layer, fuse=fuse)
            layer.compile(backend=counter, fullgraph=True)
            x = first(layer(x))
        frames = counter.frame_count
        assert isinstance(frames, int)
        return frames, [x, *torch.autograd.grad(x.sin().sum(), [start, *layers[0].parameters()])]

    (before, wanted), (after, found) = graphs(False), graphs(True)
    assert after == before
    check(found, wanted)


# ---- What is left alone --------------------------------------------------------------------------


class Centred(Layer):
    norm = CentredRMSNorm


class Several(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm2 = PlainRMSNorm(2 * N)


class Needing(Layer):
    """Cannot do without what its attention gives."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states, _ = self.self_attn.forward(hidden_states)
        hidden_states = hidden_states * self.mlp.weight.sum()
        hidden_states = self.norm1(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class InPlace(LlamaLayer):
    """Writes to rows that a norm keeps for its backward."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        residual += self.mlp(hidden_states)
        return residual


class OwnNorm(LlamaLayer):
    """Has norms of a package, which may have options of their own."""

    norm = partial(normforge.RMSNorm, main_grad=True)


LEFT = {
    Centred: "its norms were not all patched",
    Several: "its norms have weights of several lengths",
    Needing: "it raises an error on the CPU",
    InPlace: "it raises an error on the CPU",
    OwnNorm: "its norms are a package's own",
}


@pytest.mark.parametrize("kind", LEFT)
def test_other_layers_are_left_alone(
    kind: Any, kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    with caplog.at_level("INFO"):
        assert "" not in normforge.patch(model, fuse=True)
    assert type(model) is kind
    assert f"({kind.__name__}) alone: {LEFT[kind]}" in caplog.text


def test_rows_without_a_kernel_are_left_alone_on_a_gpu(
    kernels: Kernels, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def has_kernel(_: NormAndAdd, *given: Any) -> bool:
        asked.append(given[1:])
        return given[2] == "bf16"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(NormAndAdd, "has_kernel", has_kernel)
    with caplog.at_level("INFO"):
        assert "" not in normforge.patch(Layer(), fuse=True)
        assert "" in normforge.patch(GemmaLayer().bfloat16(), fuse=True)
    assert "no kernel that adds serves rows of 16 columns here" in caplog.text
    assert asked == [(N, "fp32", "fp32", False), (N, "bf16", "bf16", True)]


# ---- Models of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Olmo2", "Olmo3", "Gemma2", "Gemma3"])
def test_models_of_transformers(name: str, kernels: Kernels) -> None:
    model, ids = model_of(name), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    names = normforge.patch(model, fuse=True)
    kernels.calls.clear()
    torch.testing.assert_close(step(model, ids), wanted, rtol=1e-3, atol=1e-4)
    served = [one for one in names if one.count(".") == 2]
    assert served == ["model.layers.0", "model.layers.1"]
    assert kernels.calls == [float(name.startswith("Gemma"))] * 4
    normforge.unpatch(model)
    assert equal_bits(step(model, ids), wanted)
