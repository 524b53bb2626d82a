"""Norms of compiled code that go to the package, and those that are left to Inductor with what
stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.frontends.graph_pass import make_backend, route_before_autograd
from normforge.frontends.neighbours import is_copied
from normforge.frontends.worth import Moved
from tests.support.entry_points import grads, needs_whole_forward, randn, spied, write_package
from tests.support.norm_add import Kernels

pytestmark = pytest.mark.usefixtures("aten", "fresh", "own_cache")

N, HEADS, D, EPS = 32, 2, 16, 1e-6
Step = Callable[..., Any]


def pytorchs(x: Any, w: Any, width: int = N) -> Any:
    return functional.rms_norm(x, (width,), w, EPS)


def written_out(x: Any, w: Any, width: int = N) -> Any:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (w.float() * wide).to(x.dtype)


NORMS = (pytorchs, written_out)


# Every step takes a norm, x, z and w; m is a matrix.
def plain(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    return norm(x, w)


def gated(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    return (norm(x, w) * functional.silu(z.float())).to(x.dtype)


def post_norm(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    return z + norm(x, w)


def stream(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    """The sum is used twice, as in every layer with the norms before."""
    h = x + z
    return h + norm(h, w) @ m


def after_a_norm(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    h = x @ m + z
    h = h + norm(h, w) @ m
    return norm(h, w) @ m


def gated_and_needed(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    y = norm(x, w) * functional.silu(z)
    return y + y @ m


def quantized(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    blocks = norm(x, w).float().unflatten(-1, (-1, 16))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (blocks / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def rotated(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    heads = norm((x @ m).unflatten(-1, (HEADS, D)), w[:D], D).transpose(0, 1)
    low, high = heads.chunk(2, -1)
    cos, sin = z[:, :D].cos(), z[:, :D].sin()
    return heads * cos + torch.cat((-high, low), -1) * sin


def result_is_needed(norm: Any, x: Any, z: Any, w: Any, m: Any) -> Any:
    y = norm(x, w)
    return y @ m + z * y, y * z


DECISIONS: dict[str, tuple[Step, tuple[bool, float, float]]] = {
    "plain": (plain, (True, 10, 10)),
    "between products": (lambda norm, x, z, w, m: norm(x @ m, w) @ m, (True, 10, 10)),
    "stream": (stream, (True, 14, 14)),
    "gated": (gated, (False, 26, 16)),
    "gated and needed": (gated_and_needed, (False, 26, 16)),
    "post norm": (post_norm, (False, 16, 12)),
    "rotated": (rotated, (True, 10, 10)),
    "activated before": (
        lambda norm, x, z, w, m: norm(functional.gelu(x @ m), w) @ m,
        (False, 18, 10),
    ),
    "activated behind": (
        lambda norm, x, z, w, m: functional.gelu(norm(x @ m, w)) @ m,
        (False, 20, 10),
    ),
    "the result is needed": (result_is_needed, (True, 10, 10)),
}
"""Steps, the decision for a norm of bf16 rows in training, and the bytes that move for an
element."""


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = [(4, N), (4, N), (N,), (N, N)]
    return [randn(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def graph_of(
    operators: Any, step: Step, norm: Any, given: list[torch.Tensor], dynamic: bool = False
) -> list[str]:
    """The calls of a graph of Dynamo, after what the backend does to it."""
    calls: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        route_before_autograd(module, operators)
        calls.extend(str(n.target) for n in module.graph.nodes if n.op.startswith("call"))
        return module

    torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)(norm, *given)
    return calls


def numbers(caplog: pytest.LogCaptureFixture) -> list[tuple[bool, float, float]]:
    told = [r.args for r in caplog.records if "bytes move" in r.getMessage()]
    return [(args[1] == "goes to the package", *args[2:]) for args in told]  # type: ignore[index, misc]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", DECISIONS)
def test_norms_are_routed_where_that_pays(
    package: Package, name: str, norm: Any, dynamic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The decisions of the measured cases, and others like them."""
    step, decision = DECISIONS[name]
    with caplog.at_level("INFO"):
        calls = graph_of(package.ops, step, norm, inputs(), dynamic)
    assert numbers(caplog) == [decision]
    operator = "normforge.rms_norm.v2" if norm is written_out else "rms_norm"
    assert any(operator in call for call in calls) == decision[0], calls
    assert any("rsqrt" in call for call in calls) != decision[0]


@pytest.mark.parametrize("norm", NORMS)
def test_quantization_behind_a_norm_is_left_to_inductor(
    package: Package, norm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad(), caplog.at_level("INFO"):
        graph_of(package.ops, quantized, norm, inputs())
        graph_of(package.ops, plain, norm, inputs())
    assert numbers(caplog) == [(False, 7, 3), (True, 4, 4)]


@pytest.mark.parametrize("norm", NORMS)
def test_norms_whose_sum_a_kernel_adds_are_routed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = write_package(tmp_path / "package")
    Kernels(served, monkeypatch)
    with caplog.at_level("INFO"):
        graph_of(served.ops, post_norm, norm, inputs())
        graph_of(served.ops, gated, norm, inputs())
    assert numbers(caplog) == [(True, 10, 10), (False, 26, 16)]


def test_all_norms_between_layers_are_routed(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        graph_of(package.ops, after_a_norm, pytorchs, inputs())
    assert [routed for routed, *_ in numbers(caplog)] == [True, True]


def test_batch_invariant_norms_are_all_routed(tmp_path: Path) -> None:
    """Inductor's bits would depend on the batch."""
    write_package(tmp_path / "package")
    invariant = BatchInvariantPackage(tmp_path / "package")
    for norm, name in ((pytorchs, "rms_norm"), (written_out, "normforge.rms_norm.v2")):
        calls = graph_of(invariant.ops, gated, norm, inputs())
        assert any(name in call for call in calls)
        assert not any("rsqrt" in call for call in calls)


def test_the_margin_is_that_of_the_measured_norms() -> None:
    """The times of plain norms, forward and backward, in us: Inductor's and the package's."""
    faster = 209 / 165
    measured = {"plain": (209, 165), "gated": (320, 410), "post norm": (241, 254)}
    for name, (inductor, backend) in measured.items():
        pays, routed, fused = DECISIONS[name][1]
        assert pays == (backend < inductor) == Moved(routed, fused).pays
        expected = routed / fused / faster
        assert expected == pytest.approx(backend / inductor, rel=0.05)


@needs_whole_forward
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("step", [gated, plain])
def test_the_backend_computes_the_same_either_way(
    package: Package, step: Step, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [spied(monkeypatch, package.ops, name) for name in ("_forward", "_backward")]
    given = inputs(torch.float32)[:3]
    run = torch.compile(
        lambda x, z, w: step(norm, x, z, w, None), backend=make_backend(package.ops), fullgraph=True
    )
    found, wanted = run(*given), step(norm, *given, None)
    leaves = given if step is gated else [given[0], given[2]]
    found, wanted = ([y, *grads(y, *leaves)] for y in (found, wanted))
    assert list(map(len, calls)) == [step is plain] * 2
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_that_are_left_have_pytorchs_eps(package: Package, dtype: torch.dtype) -> None:
    def norm(x: Any, w: Any) -> Any:
        return functional.rms_norm(x, (N,), w)

    x, z, w = (one.detach() for one in inputs(dtype)[:3])
    x = x / 1000  # squares are about as large as the eps
    calls = graph_of(package.ops, gated, norm, [x, z, w, w])
    assert any("rsqrt" in call for call in calls)
    run = torch.compile(gated, backend=make_backend(package.ops), fullgraph=True)
    found, wanted = (one(norm, x, z, w, None) for one in (run, gated))
    close = {torch.float32: 1e-5}.get(dtype, 2**-6)
    torch.testing.assert_close(found, wanted, rtol=close, atol=close * 1e-2)


@pytest.mark.parametrize("norm", NORMS)
def test_sizes_stay_dynamic(package: Package, norm: Any) -> None:
    """One graph serves all numbers of rows, of norms that are routed and of those that are left."""

    def both(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = gated(norm, plain(norm, x, z, w, None) @ z.T @ z, z, w, None)
        return y

    run = torch.compile(both, backend=make_backend(package.ops), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 6, 9):
            x, z, w = (randn(*s, seed=rows) for s in ((rows, N), (rows, N), (N,)))
            for each in (x, z):
                torch._dynamo.mark_dynamic(each, 0)
            leaves = [each.requires_grad_() for each in (x, z, w)]
            found, wanted = ([y, *grads(y, *leaves)] for y in (run(*leaves), both(*leaves)))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


MODULES = {
    "qwen3.Qwen3RMSNorm": (lambda norm, x, z: norm(x), "plain"),
    "qwen3_next.Qwen3NextRMSNormGated": (lambda norm, x, z: norm(x, z), "gated"),
    "olmo2.Olmo2RMSNorm": (lambda norm, x, z: z + norm(x), "post norm"),
    "gemma3.Gemma3RMSNorm": (lambda norm, x, z: z + norm(x), "post norm"),
}


@pytest.mark.parametrize("name", MODULES)
def test_norms_of_transformers(
    package: Package, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, kind = name.split(".")
    where = f"transformers.models.{folder}.modeling_{folder}"
    module = getattr(pytest.importorskip(where, reason="needs transformers"), kind)(N)
    step, alike = MODULES[name]
    x, z, *_ = inputs()
    with caplog.at_level("INFO"):
        graph_of(package.ops, step, module.bfloat16(), [x, z])
    assert numbers(caplog) == [DECISIONS[alike][1]]


@pytest.mark.parametrize(
    ("name", "arguments", "copies"),
    [("reshape", (2, 12), True), ("flatten", (1,), True), ("contiguous", (), False)],
)
def test_a_shape_that_takes_a_copy_counts(name: str, arguments: Any, copies: bool) -> None:
    """Inductor makes its own tensors in the shape that is asked for."""
    graph = torch.fx.Graph()
    for source, copied in ((randn(2, 4, 3).transpose(1, 2), copies), (randn(2, 3, 4), False)):
        x = graph.placeholder("x")
        shaped = graph.call_method(name, (x, *arguments))
        viewed = graph.call_method("view", (shaped, -1))
        x.meta["val"], shaped.meta["val"] = source, getattr(source, name)(*arguments)
        viewed.meta["val"] = shaped.meta["val"].view(-1)
        assert is_copied(shaped) is is_copied(viewed) is copied
