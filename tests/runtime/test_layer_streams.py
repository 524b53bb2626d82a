"""`patch(model, fuse=True)`: layers in which `rms_norm` with `residual` serves norms and the sums
before them, and in which the gradients of a residual stream come to the kernel of its norm."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.frontends.layer_patch import _with_kernels
from normforge.frontends.norm_add import NormAndAdd
from tests.support.entry_points import equal_bits, filled, leaf, randn
from tests.support.layer_classes import (
    B,
    GemmaLayer,
    LlamaLayer,
    N,
    OffsetLayer,
    OtherNamesLayer,
    S,
    check,
    model_of,
    results,
    step,
)

SUM, STREAM, ALONE = "EagerAddNormBackward", "EagerNormOfStreamBackward", "EagerNormBackward"


pytestmark = pytest.mark.usefixtures("fresh")


class BothNamesLayer(LlamaLayer):
    """Keeps the sum under two names."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        residual = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states)
        stream = residual + hidden_states
        residual = stream
        hidden_states = self.norm2(stream)
        return residual.sin() + stream * self.mlp(hidden_states)


KINDS = [LlamaLayer, OffsetLayer, OtherNamesLayer, BothNamesLayer]


def nodes_of(y: torch.Tensor) -> tuple[Counter[str], int]:
    """The autograd nodes behind a tensor, by name, and how many gradients of tensors that are no
    parameters autograd adds up."""
    seen, into = set[Any](), Counter[Any]()
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            into[edge] += edge[0] is not None
            waiting.append(edge[0])
    return Counter(node.name() for node in seen), sum(count - 1 for count in into.values() if count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_before_norms_are_one_call(kind: Any, dtype: torch.dtype) -> None:
    model = filled(kind()).to(dtype)
    plain = results(model, dtype=dtype)
    normforge.patch(model)
    wanted = results(model, dtype=dtype)
    assert normforge.patch(model, fuse=True) == ["norm1", "norm2", ""]
    found = results(model, dtype=dtype)
    assert torch.equal(found[0], wanted[0])  # the sum is rounded before it is normalised
    for one, other in zip(found, wanted, strict=True):
        size = 1e-6 if dtype == torch.float32 else 0.01
        assert one.dtype == other.dtype
        assert (one - other).norm() <= size * other.norm()
    nodes, _ = nodes_of(found[0])
    assert (nodes[SUM], nodes[STREAM], nodes[ALONE]) == (1, 1, 0)
    assert isinstance(model, kind)
    assert "by Normforge" in repr(model).splitlines()[1]
    assert "" in normforge.unpatch(model)
    assert type(model) is kind
    assert equal_bits(results(model, dtype=dtype), plain)


def test_the_kernels_add_the_gradients_of_the_stream() -> None:
    """Autograd adds none."""
    model = filled(LlamaLayer())
    normforge.patch(model)
    _, before = nodes_of(results(model)[0])
    normforge.patch(model, fuse=True)
    _, after = nodes_of(results(model)[0])
    assert (before, after) == (2, 0)


def test_narrow_gradients_of_the_stream_are_rounded_once() -> None:
    """Their error against float64 is smaller."""
    model = filled(LlamaLayer()).bfloat16()
    for name in ("self_attn", "mlp"):
        getattr(model, name).weight.data *= 0.1  # what is rounded twice is small otherwise
    exact = results(copy.deepcopy(model).double(), dtype=torch.float64)[1]
    errors = []
    for fuse in (False, True):
        normforge.patch(model, fuse=fuse)
        x = leaf(B, S, N, dtype=torch.bfloat16, seed=7)
        dy = randn(B, S, N, dtype=torch.float64, seed=8)
        (dx,) = torch.autograd.grad(model(x), x, dy.bfloat16())
        errors.append(float((dx.double() - exact).norm()))
    assert errors[1] < errors[0]


def test_norms_before_of_layers_with_norms_behind() -> None:
    """Without a kernel that adds behind a norm, the sum is the next norm's."""
    model = filled(GemmaLayer())
    wanted = results(model)
    assert "" in normforge.patch(model, fuse=True)
    found = results(model)
    check(found, wanted)
    assert nodes_of(found[0])[0][STREAM] == 2
    norm = normforge.rms_norm.__self__  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(norm), "added", None)
        patch.setattr(norm, "added", None)
        assert "" in normforge.patch(model, fuse=True)
    found = results(model)
    check(found, wanted)
    nodes, _ = nodes_of(found[0])
    assert (nodes[SUM], nodes[STREAM], nodes[ALONE]) == (1, 1, 2)


def test_the_log_says_what_is_joined(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        normforge.patch(LlamaLayer(), fuse=True)
    said = "patch joins in a LlamaLayer: a sum before norm2, gradients at norm1"
    assert said in [record.getMessage() for record in caplog.records]


def test_a_gpu_joins_what_it_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = normforge.rms_norm.__self__  # type: ignore[attr-defined]

    def explain(M: int, N: int, *_: str, offset: bool, residual: str) -> dict[str, str]:
        return {"how": "tuned" if (N, residual) == (16, "bf16") and offset else "none"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(norm._server, "explain", explain)
    monkeypatch.setattr(NormAndAdd, "has_kernel", lambda *_: False)
    names = ("a", "b")
    ask = partial(_with_kernels, norm, names)
    for dtype in (torch.bfloat16, torch.float32):  # FSDP may cast weights
        found = ask(torch.ones(16, dtype=dtype), True)
        assert (found.behind, found.before, found.kept) == ((), names, names)
    assert ask(torch.ones(8), True).kept == ask(torch.ones(16), False).kept == ()
    monkeypatch.setattr(type(norm.forward), "table", None)
    assert ask(torch.ones(16), False).before == ()


# ---- As modules are used -------------------------------------------------------------------------


def test_a_pass_finds_the_gradients_of_the_stream_in_compiled_layers() -> None:
    """There autograd adds them, and the operator of the sum takes its own."""
    found: list[bool] = []

    def backward(module: Any, _: Any) -> Any:
        normforge.graph_pass("route")(module)
        nodes = [n for n in module.graph.nodes if "normforge.rms_norm_backward" in str(n.target)]
        found.extend(node.args[4] is not None for node in nodes)
        module.recompile()
        return module

    model = filled(LlamaLayer())
    normforge.patch(model, fuse=True)
    wanted = results(model)
    backend = aot_autograd(fw_compiler=lambda module, _: module, bw_compiler=backward)
    check(results(torch.compile(model, backend=backend, fullgraph=True)), wanted)
    assert found == [True, True]


@pytest.mark.parametrize("strict", [True, False])
def test_exported_layers_have_gradients(strict: bool) -> None:
    model, x = filled(LlamaLayer()), leaf(B, S, N, seed=7)
    normforge.patch(model, fuse=True)
    exported = torch.export.export(model, (leaf(B, S, N),), strict=strict).module()
    grads = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (exported, model)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_checkpointed(reentrant: bool) -> None:
    model = filled(LlamaLayer())
    normforge.patch(model, fuse=True)
    dy, found = randn(B, S, N, seed=8), []
    for run in (model, partial(checkpoint, model, use_reentrant=reentrant)):
        x = leaf(B, S, N, seed=7)
        model.zero_grad()
        y = run(x)
        y.backward(dy)
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    assert equal_bits(*found)


def test_second_derivatives() -> None:
    def second(model: Any) -> list[torch.Tensor]:
        x = leaf(B, S, N, seed=7)
        (dx,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), [x, *model.parameters()]))

    model = filled(LlamaLayer())
    wanted = second(model)
    normforge.patch(model, fuse=True)
    check(second(model), wanted, 1e-3)


def test_transforms_and_forward_mode() -> None:
    model = filled(LlamaLayer())
    x, tangent = randn(B, S, N, seed=7), randn(B, S, N, seed=6)
    wanted = torch.func.jvp(model, (x,), (tangent,))
    mapped = torch.func.vmap(torch.func.grad(lambda x: model(x).sin().sum()))
    of_each = mapped(x)
    normforge.patch(model, fuse=True)
    check(list(torch.func.jvp(model, (x,), (tangent,))), list(wanted))
    torch.testing.assert_close(mapped(x), of_each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", ["rows", "weights", "norms"])
def test_gradients_of_some(frozen: str) -> None:
    def some(model: Any) -> list[torch.Tensor]:
        x = randn(B, S, N, seed=7).requires_grad_(frozen != "rows")
        leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
        y = model(x)
        return [y, *torch.autograd.grad(y, leaves, randn(*y.shape, seed=8))]

    model = filled(LlamaLayer())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            frozen == "rows" or (frozen == "norms" and not name.startswith("norm"))
        )
    wanted = some(model)
    normforge.patch(model, fuse=True)
    check(some(model), wanted)


def test_a_stream_whose_norm_nobody_needs() -> None:
    model = filled(LlamaLayer())
    normforge.patch(model, fuse=True)
    norm, x = normforge.rms_norm.__self__, leaf(B, S, N)  # type: ignore[attr-defined]
    y, stream = normforge.frontends.layer_calls.norm_of_stream(norm, x, model.norm1.weight, 1e-4, 0)
    dy = randn(B, S, N)
    given = torch.autograd.grad(stream, [x, model.norm1.weight], dy, True, allow_unused=True)
    assert torch.equal(given[0], dy)
    assert given[1] is None
    (alone,) = torch.autograd.grad(y, x, dy)
    (wanted,) = torch.autograd.grad(norm.rms_norm(x, model.norm1.weight, 1e-4), x, dy)
    assert torch.equal(alone, wanted)


def test_results_without_gradients_and_in_inference_mode() -> None:
    model = filled(LlamaLayer())
    x = randn(B, S, N)
    normforge.patch(model)
    wanted = model(x).detach()
    normforge.patch(model, fuse=True)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
    with torch.inference_mode():
        assert torch.equal(model(x), wanted)
        given = x.clone()
    assert torch.equal(model(given), wanted)


# ---- What runs as before -------------------------------------------------------------------------


def test_results_that_are_wider_than_rows_run_as_before() -> None:
    models = [filled(LlamaLayer()).bfloat16(), filled(LlamaLayer()).bfloat16()]
    for model in models:
        model.norm2.float(), model.mlp.float()
    normforge.patch(models[0])
    normforge.patch(models[1], fuse=True)
    x = leaf(B, S, N, dtype=torch.bfloat16)
    wanted, found = (model(x) for model in models)
    assert torch.equal(found, wanted)
    assert found.dtype == torch.float32
    nodes, _ = nodes_of(found)
    assert (nodes[SUM], nodes[STREAM]) == (0, 1)


def test_sums_of_two_dtypes_run_as_before() -> None:
    """Under autocast the stream is fp32, and what is added to it is not."""
    model, found = filled(LlamaLayer()), []
    for fuse in (False, True):
        normforge.patch(model, fuse=fuse)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(model))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][0].dtype == torch.float32
    nodes, _ = nodes_of(found[1][0])
    assert (nodes[SUM], nodes[STREAM], nodes[ALONE]) == (0, 1, 1)
    check(found[1], found[0], 0.02)


def test_norms_with_hooks_are_called() -> None:
    model = filled(LlamaLayer())
    normforge.patch(model, fuse=True)
    seen: list[str] = []
    handles = [
        model.norm1.register_forward_hook(lambda *_: seen.append("norm1")),
        model.norm2.register_forward_pre_hook(lambda *_: seen.append("norm2")),
    ]
    wanted = results(model)
    assert seen == ["norm1", "norm2"]
    for handle in handles:
        handle.remove()
    check(results(model), wanted)
    assert len(seen) == 2
    model.norm1.forward = torch.sin  # as accelerate gives a module another one
    assert not torch.equal(model(randn(B, S, N, seed=7)), wanted[0])


class BehindLayer(LlamaLayer):
    """Normalizes sums that it does not keep."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        residual = hidden_states
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        hidden_states = self.norm1(hidden_states)
        return hidden_states


class ParallelLayer(LlamaLayer):
    """Subtracts, and keeps other rows than it normalizes."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> Any:
        residual = hidden_states.sin()
        hidden_states = self.norm1(hidden_states)
        other = self.mlp(hidden_states)
        hidden_states = residual - hidden_states
        residual = hidden_states
        hidden_states = self.norm2(other)
        return hidden_states + residual.cos()


@pytest.mark.parametrize("kind", [ParallelLayer, BehindLayer])
def test_layers_without_such_sums_are_not_asked(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    with caplog.at_level("INFO"):
        assert normforge.patch(model, fuse=True) == ["norm1", "norm2"]
    assert kind.__name__ not in caplog.text
    assert "patch fuses nothing in this model" in caplog.text


# ---- Models of transformers ----------------------------------------------------------------------

MODELS = {"Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Granite", "Phi3", "SmolLM3"}
MODELS |= {"Glm", "Glm4", "Ernie4_5"}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_transformers(name: str) -> None:
    model, ids = model_of(name).eval(), torch.randint(1, 32, (2, 9))
    plain = step(model, ids)
    normforge.patch(model)
    wanted = step(model, ids)
    names = normforge.patch(model, fuse=True)
    found = step(model, ids)
    assert [n for n in names if n.count(".") == 2] == ["model.layers.0", "model.layers.1"]
    if name != "Qwen3":  # whose heads are rounded in another way
        assert torch.equal(found[0], wanted[0])
    check(found, plain, 1e-3)
    nodes, _ = nodes_of(found[0])
    behind = name == "Glm4"  # there the sums are the norms' that stand before them
    assert (nodes[SUM], nodes[STREAM]) == ((0, 4) if behind else (2, 2))
    normforge.unpatch(model)
    assert equal_bits(step(model, ids), plain)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_models_of_transformers_that_are_checkpointed_and_compiled(name: str) -> None:
    model, ids = model_of(name).eval(), torch.randint(1, 32, (2, 9))
    normforge.patch(model, fuse=True)
    wanted = step(model, ids)
    model.train()
    model.gradient_checkpointing_enable()
    assert equal_bits(step(model, ids), wanted)
    model.gradient_checkpointing_disable()
    counters = []
    for fuse in (False, True):
        normforge.patch(model, fuse=fuse)
        torch._dynamo.reset()
        counters.append(CompileCounter())
        for one in model.model.layers:
            one.compile(backend=counters[-1], fullgraph=True)
        found = step(model, ids)
        check(found, wanted, 1e-3)
    assert counters[0].frame_count == counters[1].frame_count > 0
