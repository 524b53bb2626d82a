"""Layouts in compiled code: the kernels read heads, and the gradients of heads, where they lie."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import make_backend
from normforge.frontends.layouts import ask_for_layouts
from normforge.frontends.routes import INPUTS
from normforge.launch.row_layout import row_layout
from normforge.serve.layout import read_layout
from tests.support.entry_points import needs_whole_forward, randn, spied

pytestmark = pytest.mark.usefixtures("aten", "fresh", "own_cache")

B, S, H, D, WIDTH = 2, 32, 4, 16, 64
Heads = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def written_out(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).type_as(x)


def pytorchs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Qwen's order: the norm, then the transpose."""
    return functional.rms_norm(x, (D,), w, 1e-6).transpose(1, 2)


def before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return written_out(x, w).transpose(1, 2)


def behind(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Gemma's order: the transpose, then the norm."""
    return written_out(x.transpose(1, 2), w)


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * turn.cos() + torch.cat((-high, low), -1) * turn.sin()


def attention(heads: Heads, packed: bool) -> Callable[..., torch.Tensor]:
    """A function of the stream, the projections of q, k and v, and the weights of two norms."""

    def run(
        x: torch.Tensor, qkv: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, turn: torch.Tensor
    ) -> torch.Tensor:
        if packed:
            parts = functional.linear(x, qkv).split(WIDTH, -1)
        else:
            parts = tuple(functional.linear(x, one) for one in qkv.chunk(3))
        q, k, v = (part.view(B, S, H, D) for part in parts)
        q, k = rotated(heads(q, wq), turn), rotated(heads(k, wk), turn)
        mixed = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return mixed.transpose(1, 2).reshape(B, S, WIDTH)

    return run


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "heads", [pytest.param(pytorchs, marks=needs_whole_forward), before, behind]
)
def test_heads_and_their_gradients_are_not_copied(
    package: Package, monkeypatch: pytest.MonkeyPatch, heads: Heads, packed: bool
) -> None:
    from torch._inductor.utils import run_and_get_code

    run = attention(heads, packed)
    monkeypatch.setattr(package.ops, "_quick", lambda *_: None)
    rows = spied(monkeypatch, package.ops, "_forward", lambda x, *_: x)
    backwards = spied(monkeypatch, package.ops, "_backward", lambda given, _: given)
    shapes = [(B, S, WIDTH), (3 * WIDTH, WIDTH), (D,), (D,)]
    leaves = [randn(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    turn, dy = randn(S, D, seed=8), randn(B, S, WIDTH, seed=9)
    compiled = torch.compile(run, backend=make_backend(package.ops), fullgraph=True)

    def step(run: Any) -> list[torch.Tensor]:
        y = run(*leaves, turn)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    wanted = step(run)
    rows.clear(), backwards.clear()
    found, codes = run_and_get_code(step, compiled)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert [len(rows), len(backwards)] == [2, 2]
    for x in rows:  # where the projection lies
        assert row_layout(x) is not None
        assert x.stride() == (S * H * D * (1 + 2 * packed), H * D * (1 + 2 * packed), D, 1)
    for given in backwards:
        copies = read_layout(given)[0].copy
        assert not any(copies), given.dy.stride()
    calls = re.findall(r"normforge\.rms_norm\.v2\.?\w*\((\S+)\(", codes[0])
    assert calls == ["reinterpret_tensor"] * 2, "a norm has the projection as it lies"


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "packed heads": lambda x: x.repeat(1, 1, 3, 1)[:, :, :H],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batches apart": lambda x: x.repeat(1, 3, 1, 1)[:, :S],
    "columns apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
PLAIN, PACKED = (S * H * D, H * D, D, 1), (3 * S * H * D, 3 * H * D, D, 1)
APART = (3 * S * H * D, H * D, D, 1)


@pytest.mark.parametrize(
    ("of_dy", "of_x", "wanted"),
    [
        ("contiguous", "contiguous", (PLAIN, PLAIN)),
        ("contiguous", "packed heads", (PLAIN, PACKED)),
        ("packed heads", "packed heads", (PACKED, PACKED)),
        ("transposed", "packed heads", (PLAIN, PACKED)),
        ("transposed", "transposed", (PLAIN, PLAIN)),
        ("columns apart", "contiguous", (PLAIN, PLAIN)),
        ("batches apart", "contiguous", (APART, PLAIN)),
        ("batches apart", "packed heads", (PLAIN, PACKED)),
    ],
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_rest_is_asked_for_contiguous(
    package: Package, mode: str, of_dy: str, of_x: str, wanted: Any
) -> None:
    def step(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        x, rstd = LAYOUTS[of_x](x), x.square().mean(-1, keepdim=True)
        return package.rmsnorm_backward(LAYOUTS[of_dy](dy), x, rstd, w)

    given = (*(randn(B, S, H, D, seed=seed) for seed in (0, 1)), randn(D))
    graph = make_fx(step, tracing_mode=mode)(*given).graph
    ask_for_layouts(graph, package.ops)
    asked = {node.target: node.meta[INPUTS] for node in graph.nodes if INPUTS in node.meta}
    (dy, x, rstd, *_), named = asked.pop(package.ops.rms_norm_backward)
    assert (asked, named) == ({}, {})
    assert tuple(tuple(map(int, one.stride())) for one in (dy, x)) == wanted
    assert rstd.shape == (B, S, H, 1)


STREAMS: dict[str, Callable[..., Any]] = {
    "dresidual": lambda ops, stream, x, w: ops.rms_norm_backward(
        x, x, x.square().mean(-1, keepdim=True), w, stream, None, 0.0, True, True, ops.package
    ),
    "residual": lambda ops, stream, x, w: ops.add_rms_norm(x, stream, w, 1e-6, 0.0, ops.package),
    "r": lambda ops, stream, x, w: ops.rms_norm_and_add(x, stream, w, 1e-6, 0.0, ops.package),
}
OF_STREAM = LAYOUTS | {"rows apart": lambda x: x.repeat(1, 1, 1, 2)[..., :D]}


@pytest.mark.parametrize("of_x", ["contiguous", "packed heads"])
@pytest.mark.parametrize("of_stream", OF_STREAM)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_stays_where_its_kernel_reads_it(
    package: Package, name: str, of_stream: str, of_x: str
) -> None:
    """A residual and its gradient are read at one stride, and what is added behind a norm like the
    heads that are normalized."""

    def step(stream: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        return STREAMS[name](package.ops, OF_STREAM[of_stream](stream), OF_STREAM[of_x](x), w)

    given = (*(randn(B, S, H, D, seed=seed) for seed in (0, 1)), randn(D))
    graph = make_fx(step, tracing_mode="fake")(*given).graph
    ask_for_layouts(graph, package.ops)
    (node,) = (node for node in graph.nodes if node.target in package.ops.all)
    names = [argument.name for argument in node.target._schema.arguments]
    asked = dict(zip(names, node.meta[INPUTS][0], strict=False))[name]
    lies = OF_STREAM[of_stream](given[0])
    rows, of_heads = row_layout(lies), row_layout(OF_STREAM[of_x](given[1]))
    assert of_heads is not None
    along = name == "r" and rows is not None and rows.inner in (of_heads.inner or rows.inner, 0)
    stays = rows is not None and (not rows.inner or along)
    assert tuple(map(int, asked.stride())) == (lies.stride() if stays else PLAIN)
