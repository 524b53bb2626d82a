"""Heads that are rotated as complex numbers: which of them `inductor_backend` and `graph_pass` give
to the packages of the rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.api import Package
from normforge.frontends.graph_pass import make_backend, make_pass, route_before_autograd
from normforge.frontends.rope import RotatedFunctions
from normforge.frontends.rotary_node import rope
from normforge.serve.rows import RowServer
from tests.support import dynamo_graphs
from tests.support.dynamo_graphs import changed, close, mark_result
from tests.support.entry_points import grads, randn
from tests.support.layer_classes import B, S, model_of, step

pytestmark = pytest.mark.usefixtures("fresh")
HEADS, WIDTH = 4, 16
Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The heads that kernels are asked for, which there are."""
    found: Asked = []

    def rotates(_: Any, x: Any, rotation: str) -> bool:
        found.append((tuple(x.shape), rotation))
        return True

    monkeypatch.setattr(RotatedFunctions, "rotates", rotates)
    return found


def angles(tokens: int = S, pairs: int = WIDTH // 2, batch: int = 1) -> torch.Tensor:
    """1.5 (cos + i sin), as the caches of models hold it, of shape (batch, tokens, 1, pairs)."""
    turns = torch.arange(batch * tokens)[:, None] * torch.linspace(0.1, 1, pairs)
    return torch.polar(torch.full_like(turns, 1.5), turns).view(batch, tokens, 1, pairs)


def pairs_of(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def turned(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(pairs_of(x) * numbers).flatten(3).type_as(x)


def heads(dtype: torch.dtype = torch.float32, count: int = HEADS) -> torch.Tensor:
    return randn(B, S, count, WIDTH).to(dtype).requires_grad_()


compiled = partial(dynamo_graphs.compiled, operator=rope)


# ---- Rotations that are found --------------------------------------------------------------------


def viewed(x: Any, numbers: Any) -> Any:
    pairs = torch.view_as_complex(x.to(torch.float32).view(B, S, HEADS, WIDTH // 2, 2))
    real = torch.view_as_real(torch.mul(numbers, pairs))
    return real.reshape(x.shape).to(x.dtype)


def unflattened(x: Any, numbers: Any) -> Any:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.flatten(torch.view_as_real(pairs.mul(numbers)), -2).to(x)


def back(x: Any, numbers: Any) -> Any:
    return turned(x, numbers.conj())


def there_again(x: Any, numbers: Any) -> Any:
    return turned(x, torch.conj(numbers.conj()).clone())


def transposed(x: Any, numbers: Any) -> Any:
    """Heads are before tokens, as in Hugging Face's DeepSeek V2."""
    return turned(x.transpose(1, 2), numbers.transpose(1, 2))


def like_another(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs * numbers).view_as(x).type_as(x)


def of_a_part(x: Any, numbers: Any) -> Any:
    """Other columns are before those of a head, as in multi-head latent attention."""
    packed = torch.cat((x.sin(), x), -1)
    return turned(packed[..., WIDTH:], numbers)


FOUND: dict[Callable[..., Any], float] = {
    **dict.fromkeys((turned, viewed, unflattened, like_another), 1.0),
    **dict.fromkeys((there_again, transposed, of_a_part), 1.0),
    back: -1.0,
}
"""Spellings, with the sign of the angles."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", FOUND, ids=lambda f: f.__name__)
def test_heads_times_complex_numbers_are_one_operator(
    rotated: Package, function: Any, dtype: torch.dtype, asked: Asked
) -> None:
    x, numbers = heads(dtype), angles()
    wanted = function(x, numbers)
    dy = torch.randn_like(wanted)
    run, found = compiled(rotated, function)
    y = run(x, numbers)
    torch.testing.assert_close(y, wanted)
    assert y.stride() == wanted.stride()
    for one, other in ((y, wanted), (y.float() ** 2, wanted.float() ** 2)):
        of_one, of_other = (torch.autograd.grad(out, x, dy.to(out), True) for out in (one, other))
        torch.testing.assert_close(of_one, of_other)
    assert [node.args[3:] for node in found] == [(FOUND[function], "*/rope+interleaved")]
    shape = (B, HEADS, S, WIDTH) if function is transposed else (B, S, HEADS, WIDTH)
    assert asked == [(shape, "interleaved")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotation_may_be_of_another(rotated: Package, dtype: torch.dtype, asked: Asked) -> None:
    def there_and_back(x: Any, numbers: Any) -> Any:
        return turned(turned(x, numbers), numbers.conj())

    def traced(x: Any, numbers: Any) -> Any:
        y = there_and_back(x, numbers)
        return y, torch.autograd.grad(y.square().sum(), x)

    given = (heads(dtype), angles())
    run, found = compiled(rotated, there_and_back)
    torch.testing.assert_close(run(*given), there_and_back(*given))
    assert [node.args[3] for node in found] == [1.0, -1.0]
    graph = make_pass(rotated.ops)(make_fx(traced)(*given))
    torch.testing.assert_close(graph(*given), traced(*given))
    assert sum(node.target is rope for node in graph.graph.nodes) == 4


@pytest.mark.parametrize("batch", [1, B])
def test_tokens_of_all_sequences_or_of_each(rotated: Package, batch: int, asked: Asked) -> None:
    x, numbers = heads(), angles(batch=batch)
    for dynamic in (False, True):
        torch._dynamo.reset()
        for at, given in ((1, x), (1, numbers)) if dynamic else ():
            torch._dynamo.mark_dynamic(given, at)
        run, found = compiled(rotated, turned)
        close(run(x, numbers), turned(x, numbers))
        assert len(found) == 1 and (type(asked[-1][0][1]) is int) != dynamic


def test_queries_and_keys_share_cos_and_sin(rotated: Package, asked: Asked) -> None:
    """Not with the backward, nor where something may have changed them in between."""

    def function(q: Any, k: Any, numbers: Any, changes: bool) -> Any:
        first = turned(q, numbers)
        if changes:
            numbers.mul_(2.0)
        return first, turned(k, numbers), turned(q, numbers.conj())

    for changes, copies in ((False, 2), (True, 3)):
        torch._dynamo.reset()
        run, found = compiled(rotated, partial(function, changes=changes))
        q, k = heads().detach(), heads(count=2).detach()
        close(run(q, k, angles()), function(q, k, angles(), changes))
        assert len(found) == 3 and len({node.args[1] for node in found}) == copies
        assert all(len({*node.args[1:3]}) == 2 for node in found)


def test_both_directions_are_the_operator_where_autograd_is_traced(
    rotated: Package, asked: Asked
) -> None:
    """In the graphs that Inductor compiles, not only in Dynamo's."""
    found: dict[str, list[str]] = {}

    def compiler(which: str) -> Any:
        def keep(module: torch.fx.GraphModule, _: Any) -> Any:
            calls = (node for node in module.graph.nodes if node.op == "call_function")
            found[which] = [str(node.target) for node in calls]
            return make_boxed_func(module.forward)

        return keep

    def backend(module: torch.fx.GraphModule, given: Any) -> Any:
        route_before_autograd(module, rotated.ops)
        of_both = {f"{which}_compiler": compiler(which) for which in ("fw", "bw")}
        return aot_autograd(**of_both)(module, given)

    x, numbers = heads(torch.bfloat16), angles()
    y, wanted = torch.compile(turned, backend=backend)(x, numbers), turned(x, numbers)
    torch.testing.assert_close([y, *grads(y, x)], [wanted, *grads(wanted, x)])
    assert found["fw"][-1] == "normforge.rope.v2" and found["bw"] == ["normforge.rope.v2"]


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_traced_step_has_kernels_in_both_directions(
    rotated: Package, dtype: torch.dtype, mode: str, asked: Asked
) -> None:
    def both(x: Any, numbers: Any, dy: Any) -> Any:
        y = turned(x, numbers)
        return y, torch.autograd.grad(y, x, dy)

    given = (heads(dtype), angles(), randn(B, S, HEADS, WIDTH, seed=3).to(dtype))
    graph = make_fx(both, tracing_mode=mode)(*given)
    graph = make_pass(rotated.ops)(graph)
    torch.testing.assert_close(graph(*given), both(*given))
    found = [node for node in graph.graph.nodes if node.target is rope]
    assert [node.args[3] for node in found] == [1.0, -1.0]
    left = {str(node.target) for node in graph.graph.nodes}
    assert not any("conj" in one or "as_complex" in one for one in left)


# ---- What stays ----------------------------------------------------------------------------------


def product_is_used(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x) * numbers
    return torch.view_as_real(pairs).flatten(3).type_as(x) * pairs.abs().mean()


def pairs_are_used(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs * numbers).flatten(3).type_as(x) * pairs.abs().mean()


def divided(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs / numbers).flatten(3).type_as(x)


def squared(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs * pairs).flatten(3).type_as(x) + numbers.real.sum()


def for_each_head(x: Any, numbers: Any) -> Any:
    return turned(x, numbers[:, :HEADS].transpose(1, 2))


def for_every_number(x: Any, numbers: Any) -> Any:
    return turned(x, numbers.expand(1, S, HEADS, WIDTH // 2))


def for_the_last_dimensions(x: Any, numbers: Any) -> Any:
    return turned(x, numbers[0])


def one_for_all_columns(x: Any, numbers: Any) -> Any:
    return turned(x, numbers[..., :1])


def learnt(x: Any, numbers: Any) -> Any:
    return turned(x, torch.polar(x.detach()[..., :1, : WIDTH // 2], x[..., :1, : WIDTH // 2]))


def narrowed(x: Any, numbers: Any) -> Any:
    pairs = torch.view_as_complex(x.half().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * numbers).flatten(3).type_as(x)


def wide(x: Any, numbers: Any) -> Any:
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * numbers).flatten(3).type_as(x)


def narrower(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x.bfloat16())
    return torch.view_as_real(pairs * numbers).flatten(3).half().float()


def wider(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x.bfloat16())
    return torch.view_as_real(pairs * numbers).flatten(3)


def kept_as_pairs(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs * numbers)


def flattened_further(x: Any, numbers: Any) -> Any:
    pairs = pairs_of(x)
    return torch.view_as_real(pairs * numbers).flatten(2).type_as(x)


def of_halves(x: Any, numbers: Any) -> Any:
    """The two halves of a head are the real and the imaginary parts."""
    pairs = torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
    return torch.view_as_real(pairs * numbers).flatten(3).type_as(x)


def of_joined_heads(x: Any, numbers: Any) -> Any:
    """The pairs are made of other rows than the result has."""
    pairs = torch.view_as_complex(x.reshape(B, S, HEADS // 2, WIDTH, 2))
    both = torch.cat((numbers, numbers), -1)
    return torch.view_as_real(pairs * both).reshape(x.shape)


def of_other_rows(x: Any, numbers: Any) -> Any:
    """Rows of two sequences are taken for those of four, whose heads are half as many."""
    pairs = torch.view_as_complex(x.reshape(2 * B, S, HEADS // 2, WIDTH // 2, 2))
    return torch.view_as_real(pairs * numbers).reshape(x.shape)


def three_dimensions(x: Any, numbers: Any) -> Any:
    pairs = torch.view_as_complex(x[0].float().reshape(S, HEADS, -1, 2))
    return torch.view_as_real(pairs * numbers[0]).flatten(2).type_as(x)


def changed_before(x: Any, numbers: Any) -> Any:
    x = x @ torch.eye(WIDTH)
    wide = x.float().reshape(*x.shape[:-1], -1, 2)
    pairs = torch.view_as_complex(wide.clone())
    product = pairs * numbers
    x.mul_(2.0)
    return torch.view_as_real(product).flatten(3).type_as(x) + x


LEFT: list[Callable[..., Any]] = [
    *(product_is_used, pairs_are_used, divided, squared, for_each_head, for_every_number),
    *(for_the_last_dimensions, one_for_all_columns, learnt, narrowed),
    *(wide, narrower, wider),
    *(kept_as_pairs, flattened_further, of_halves, of_joined_heads, of_other_rows),
    *(three_dimensions, changed_before),
]


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_what_is_not_quite_a_rotation_stays(rotated: Package, function: Any, asked: Asked) -> None:
    x, numbers = heads(), angles()
    wanted = function(x, numbers)
    run, found = compiled(rotated, function)
    y = run(x, numbers)
    close([y, *grads(y, x)], [wanted, *grads(wanted, x)])
    assert found == []


def test_numbers_that_change_between_product_and_result_stay(
    rotated: Package, asked: Asked
) -> None:
    def function(x: Any, numbers: Any, changes: bool) -> Any:
        product = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * numbers
        if changes:
            numbers.zero_()
        return torch.view_as_real(product).flatten(3)

    for changes in (True, False):
        torch._dynamo.reset()
        run, found = compiled(rotated, partial(function, changes=changes))
        x = heads().detach()
        close(run(x, angles()), function(x, angles(), changes))
        assert len(found) == (not changes)


@pytest.mark.parametrize("change", [torch.conj, torch.clone])
def test_numbers_that_learn_nothing_here_stay(rotated: Package, change: Any, asked: Asked) -> None:
    """PyTorch computes no gradient of what was made without one."""

    def function(x: Any, numbers: Any) -> Any:
        with torch.no_grad():
            made = change(numbers)
        return turned(x, made)

    x, numbers = heads(), angles().requires_grad_()
    run, found = compiled(rotated, function)
    y = run(x, numbers)
    close(y, function(x, numbers))
    y.sum().backward()
    assert x.grad is not None and numbers.grad is None and found == []


def test_numbers_that_a_caller_has_conjugated_stay(rotated: Package, asked: Asked) -> None:
    """PyTorch does not view such as real numbers."""
    run, found = compiled(rotated, turned)
    close(run(heads(), angles().conj()), turned(heads(), angles().conj()))
    assert found == []


def written(numbers: Any) -> Any:
    copy = numbers.clone()
    copy.mul_(2.0)
    return copy


def written_behind(numbers: Any) -> Any:
    numbers = numbers * 1.0
    copy = numbers.clone()
    numbers.mul_(2.0)
    return copy


def written_behind_a_conjugate(numbers: Any) -> Any:
    copy = numbers.conj().resolve_conj()
    numbers.zero_()
    return copy


def written_through_a_view(numbers: Any) -> Any:
    """The conjugate is a view, which has what was written."""
    numbers = numbers * 1.0
    view = numbers.conj()
    numbers.mul_(2.0)
    return view


@pytest.mark.parametrize(
    "change", [written, written_behind, written_behind_a_conjugate, written_through_a_view]
)
def test_copies_of_numbers_that_were_written_to_stay(
    rotated: Package, change: Any, asked: Asked
) -> None:
    def function(x: Any, numbers: Any) -> Any:
        return turned(x, change(numbers))

    x = heads().detach()
    run, found = compiled(rotated, function)
    close(run(x, angles()), function(x, angles()))
    assert len(found) == (change is written_through_a_view)


@pytest.mark.parametrize("marked", [False, True])
def test_a_rotation_that_runs_elsewhere_stays(rotated: Package, marked: bool, asked: Asked) -> None:
    x = heads(torch.bfloat16)
    run, found = compiled(rotated, turned, before=mark_result if marked else None)
    close(run(x, angles()), turned(x, angles()))
    assert len(found) == (not marked)


@pytest.mark.parametrize("marked", [False, True])
def test_cos_and_sin_of_one_place_are_not_read_in_another(
    rotated: Package, marked: bool, asked: Asked
) -> None:
    def both(q: Any, k: Any, numbers: Any) -> Any:
        return turned(q, numbers), turned(k, numbers)

    def mark(module: torch.fx.GraphModule) -> None:
        (result,) = next(iter(reversed(module.graph.nodes))).args
        for node in module.graph.nodes if marked else ():
            if node.op != "placeholder" and result[0] < node:  # all of the second one
                node.meta["custom"] = {"stream": 1}

    given = (heads(torch.bfloat16), heads(torch.bfloat16, count=2), angles())
    run, found = compiled(rotated, both, before=mark)
    close(run(*given), both(*given))
    assert len(found) == 2 and len({node.args[1] for node in found}) == 1 + marked


def test_a_graph_without_values_stays(rotated: Package, asked: Asked) -> None:
    graph = make_fx(turned)(heads().detach(), angles())
    for node in graph.graph.nodes:
        node.meta.clear()
    make_pass(rotated.ops)(graph)
    assert not any(node.target is rope for node in graph.graph.nodes)


def test_rotations_without_a_kernel_stay(rotated: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = compiled(rotated, turned)
    close(run(heads(), angles()), turned(heads(), angles()))  # on the CPU there is none
    monkeypatch.setattr(RotatedFunctions, "rotates", lambda *_: True)
    rotated.ops.rotated = ""  # as in a package that came from elsewhere
    torch._dynamo.reset()
    close(run(heads(), angles()), turned(heads(), angles()))
    assert found == []


def test_a_kernel_is_asked_for_by_the_way_it_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def explain(server: RowServer, *given: Any, rotation: str, offset: bool) -> dict[str, Any]:
        told.append((server.operation.name, *given, rotation, offset))
        return {"kernel": "some" if rotation else None}

    monkeypatch.setattr(RowServer, "explain", explain)
    functions = normforge.rope_packages.functions

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    x = heads(torch.bfloat16).detach()
    assert not functions.rotates(x, "interleaved") and told == []
    x = x.as_subclass(OnGpu)
    assert functions.rotates(x, "interleaved") and not functions.rotates(x, "")
    shape = ("rope", B * S * HEADS, WIDTH, "bf16", "bf16")
    assert told == [(*shape, "interleaved", False), (*shape, "", False)]


def test_a_checkpointed_step_through_the_backend_is_that_of_eager_code(
    rotated: Package, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    def layer(x: Any, numbers: Any) -> Any:
        return checkpoint(lambda q: turned(q.sin(), numbers).square(), x, use_reentrant=False)

    x, numbers = heads(), angles()
    wanted = layer(x, numbers)
    with caplog.at_level("INFO"):
        y = torch.compile(layer, backend=make_backend(rotated.ops), fullgraph=True)(x, numbers)
    torch.testing.assert_close([y, *grads(y, x)], [wanted, *grads(wanted, x)])
    assert "gave 1 rotations by complex numbers to the packages of rope" in caplog.text


# ---- Modules of others ---------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "Llama4": {"moe_layers": [], "intermediate_size_mlp": 32, "head_dim": 16},
    "DeepseekV2": {
        "first_k_dense_replace": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
"""Models of transformers, with what else they are made with."""


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(rotated: Package, name: str, asked: Asked) -> None:
    model, ids = model_of(name, **MODELS[name]), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    backend, found = changed(rotated, rope)
    model.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(step(model, ids), wanted, rtol=1e-3, atol=1e-4)
    assert len(found) == 4


@pytest.mark.parametrize("positions", [None, 1, B])
def test_the_rotary_embedding_of_torchtitan(
    rotated: Package, positions: int | None, asked: Asked
) -> None:
    titan: Any = pytest.importorskip(
        "torchtitan.models.common.rope", reason="torchtitan 0.3 is not installed"
    )
    module = titan.ComplexRoPE.Config(dim=WIDTH, max_seq_len=2 * S).build()
    assert isinstance(module, nn.Module)
    at = None if positions is None else (torch.arange(S) + 2).expand(positions, S)
    q, k = heads(torch.bfloat16), heads(torch.bfloat16, count=2)
    wanted = module(q, k, at)
    run, found = compiled(rotated, module)
    y = run(q, k, at)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(grads(y[0], q), grads(wanted[0], q))
    assert len(found) == 2 and len({node.args[1] for node in found}) == 1
