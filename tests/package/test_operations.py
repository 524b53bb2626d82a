"""Packages of operations that the row kernel serves: emitted, imported, exported to stand alone,
and tuned by the command. Each does what the library does with the same inputs."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from generator.emulate import find_compiler
from generator.package.entries import problem_of
from generator.package.standalone import add_library
from generator.paths import REPOSITORY
from normforge import gated, layernorm, quantized, rope
from normforge.operations import (
    BACKWARD_FORMATS,
    FORMATS,
    GATED_BACKWARDS,
    GATED_FORWARDS,
    LAYERNORM_BACKWARD,
    LAYERNORM_FORWARD,
    OPERATIONS,
    QUANTIZED,
    RMSNORM_ADD_FORWARD,
    RMSNORM_BACKWARD,
    RMSNORM_INVARIANT_BACKWARD,
    RMSNORM_ROPE_BACKWARD,
    RMSNORM_ROPE_FORWARD,
    RMSNORM_SUM_BACKWARDS,
    ROPE,
    ROTATED,
    STREAM_FORMATS,
)
from normforge.packages import open_package
from normforge.table import Table
from tests.support.fresh import INDUCTOR, run_fresh
from tests.support.packages import emit_first, forget

FORWARD_BESIDE = {RMSNORM_BACKWARD.name, RMSNORM_INVARIANT_BACKWARD.name}
NAMES = [name for name in OPERATIONS if name not in FORWARD_BESIDE]
"""All operations but those whose packages have forward kernels of another kind."""


# ---- One use of every front end; each stands alone, for a process without these tests ------------


def use_gated(package: Any, **kind: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    norm = package.RMSNormGated(8, **kind)
    x, z = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    leaves = [x, z, norm.weight]
    y = norm(x, z)
    again = package.rms_norm_gated(*leaves, norm.eps, *kind.values())
    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")(x, z)
    found = [torch.autograd.grad(one.sum(), leaves) for one in (y, again, compiled)]
    assert package.patch(torch.nn.Sequential(norm)) == []
    return [y, again, compiled, *found]


def use_rotated(package: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    qkv, angles = torch.randn(3, 8 * 16, requires_grad=True), torch.randn(3, 8)
    weights = [torch.rand(16, requires_grad=True) for _ in range(2)]
    given = (qkv, *weights, angles.cos(), angles.sin(), (4, 2))
    results = []
    torch.compiler.reset()
    for run in (
        package.qk_norm_rope,
        torch.compile(package.qk_norm_rope, fullgraph=True, backend="aot_eager"),
    ):
        q, k, v = run(*given)
        gradients = torch.autograd.grad(q.sum() + k.square().sum(), [qkv, *weights])
        results += [q, k, v, *gradients]
    heads = qkv.unflatten(-1, (-1, 16))
    return [*results, package.rms_norm_rope(heads[:, :4], weights[0], *given[3:5])]


def use_rope(package: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x, angles = torch.randn(2, 3, 4, 16, requires_grad=True), torch.randn(3, 8)
    torch.compiler.reset()
    results = []
    for run in (
        package.apply_rope,
        torch.compile(package.apply_rope, fullgraph=True, backend="aot_eager"),
    ):
        y = run(x, angles.cos(), angles.sin())
        results += [y, *torch.autograd.grad(y.square().sum(), [x])]
    return results


def use_quantized(package: Any, **format: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 128, requires_grad=True), torch.rand(128, requires_grad=True)
    found = package.rms_norm_quantized(x, weight, 1e-6, keep_y=True, weight_offset=1.0, **format)
    return [*found, *torch.autograd.grad(found[3].square().sum(), (x, weight))]


def use_quantized_sum(package: Any, **format: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x, r = (torch.randn(2, 5, 128).bfloat16().requires_grad_() for _ in range(2))
    given = (x, torch.rand(128).bfloat16())
    found = package.rms_norm_quantized(*given, residual=r, keep_y=True, weight_offset=1.0)
    gradients = torch.autograd.grad((found[3] * found[4]).sum(), [x, r])
    return [*found, *gradients, *package.rms_norm_quantized(*given, residual=r)]


def use_quantized_backward(package: Any, **format: str) -> list[Any]:
    import torch

    torch.manual_seed(0)
    dy, x, dresidual = torch.randn(3, 2, 5, 128)
    given = (dy, x, torch.rand(2, 5, 1), torch.rand(128))
    options: Any = {"dresidual": dresidual.bfloat16(), "weight_offset": 1.0, **format}
    run = torch.compile(package.rms_norm_backward_quantized, fullgraph=True, backend="aot_eager")
    return [*package.rms_norm_backward_quantized(*given, **options), *run(*given, **options)]


def use_add(package: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x, r = torch.randn(2, 2, 5, 128)
    try:
        package.rmsnorm_forward(x, add=r.half())
    except TypeError as error:
        assert "add must have x's dtype" in str(error)
    return [*package.rmsnorm_forward(x, torch.rand(128), add=r, weight_offset=1.0)]


def use_layer_norm(package: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    norm, x = package.LayerNorm(8), torch.randn(2, 8, requires_grad=True)
    y = norm(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, norm.weight, norm.bias])
    with package.installed():
        pass
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    assert package.patch(model) == ["0"] == package.unpatch(model)
    assert package.graph_pass().__name__ == "normforge_route_layernorm"
    return [y, *gradients]


def use_layer_norm_forward(package: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x = (3 + torch.randn(2, 5, 128)).bfloat16()
    weight, bias = torch.rand(2, 128)
    results = [*package.layer_norm_forward(x, eps=1.0)]
    third = [one.half() for one in (weight, bias)]  # neither x's dtype nor fp32
    for columns in ((weight, bias), third, (third[0], bias), (None, third[1])):
        results += package.layer_norm_forward(x, *columns)
    try:
        package.layer_norm_forward(x, weight, bias.bfloat16())
    except TypeError as error:
        assert "must be of one dtype, got weight of" in str(error)
    return results


def use_sum(package: Any, count: int) -> list[Any]:
    import torch

    torch.manual_seed(0)
    x, dresidual, *gradients = torch.randn(2 + count, 2, 5, 128)
    given = (x, torch.rand(2, 5, 1), torch.rand(128))
    options = {"weight_offset": 1.0, "dresidual": dresidual.bfloat16()}
    if not hasattr(package, "rms_norm"):
        try:
            package.rmsnorm_backward(gradients[1:], *given)
        except ValueError as error:
            assert f"adds {count} gradients, and got {count - 1}" in str(error)
        summed: Any = gradients
    else:  # the library's function takes the sum
        summed = sum(gradients)
    return [*package.rmsnorm_backward(summed, *given, **options)]


# ---- What each operation's package is ------------------------------------------------------------


class Kind:
    """An operation's front end: the library's module, a use, and the words by which `use` and
    `explain` name the operation."""

    def __init__(
        self, library: Any, use: Callable[..., list[Any]], used: Any = None, **explained: Any
    ) -> None:
        self.library, self.use, self.used, self.explained = library, use, used or {}, explained


def _gated(kind: tuple[str, bool], **way: bool) -> Kind:
    words = dict(zip(("activation", "norm_before_gate"), kind, strict=True))
    return Kind(gated, use_gated, words, **words, **way)


KINDS = {
    **{one.name: _gated(kind, forward=False) for kind, one in GATED_BACKWARDS.items()},
    **{one.name: _gated(kind, forward=True) for kind, one in GATED_FORWARDS.items()},
    RMSNORM_ROPE_FORWARD.name: Kind(rope, use_rotated, forward=True),
    RMSNORM_ROPE_BACKWARD.name: Kind(rope, use_rotated, forward=False),
    ROPE.name: Kind(rope, use_rope, norm=False),
    **{
        one.name: Kind(quantized, use_quantized, {"format": format}, format=format)
        for format, one in FORMATS.items()
    },
    **{
        one.name: Kind(quantized, use_quantized_sum, {}, format=format, residual="bf16")
        for format, one in STREAM_FORMATS.items()
    },
    **{
        one.name: Kind(
            quantized, use_quantized_backward, {"format": format}, format=format, backward=True
        )
        for format, one in BACKWARD_FORMATS.items()
    },
    RMSNORM_ADD_FORWARD.name: Kind(normforge, use_add),
    **{
        one.name: Kind(normforge, use_sum, {"count": count})
        for count, one in RMSNORM_SUM_BACKWARDS.items()
    },
    LAYERNORM_BACKWARD.name: Kind(layernorm, use_layer_norm),
    LAYERNORM_FORWARD.name: Kind(layernorm, use_layer_norm_forward),
}
SUMMED = [one.name for one in RMSNORM_SUM_BACKWARDS.values()]
EXPLAIN_OFFSETS = (RMSNORM_ADD_FORWARD.name, *QUANTIZED, *SUMMED)
of_operation = pytest.mark.parametrize("name", NAMES)


def assert_alike(found: Any, wanted: Any) -> None:
    """Compare results: numbers of eight bits exactly, others within the error of their dtype."""
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, tuple):
            assert_alike(one, other)
        else:
            narrow = one.dtype.itemsize == 1 and one.dtype == other.dtype
            bits = [each.view(torch.uint8) for each in (one, other)] if narrow else (one, other)
            torch.testing.assert_close(*bits)


@of_operation
def test_emitted_package_says_which_kernel_and_does_what_the_library_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, kind = tmp_path / name, KINDS[name]
    shifts = name in EXPLAIN_OFFSETS
    weight = "" if name == ROPE.name else ":fp32"
    shapes = ["4096x128:bf16", f"8192x128:bf16{weight}{'+offset' * shifts}"]
    for _ in range(2):  # on top of itself: the table reads back as the same problems
        problems = emit_first(folder, *(f"{name}:{shape}" for shape in shapes))
        table = Table.load(folder)
        assert {problem_of(tuned) for tuned in table.tuned} == {*problems}
    (first, *_) = table.kernels()
    source = (folder / "kernels" / f"{first.file}.cu").read_text()
    assert f"{name}(ARGUMENTS(Arguments, args))" in source
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(name)
    try:
        assert package.PROVENANCE["shapes"].keys() == {*shapes}
        for tuned in table.tuned:
            spec = tuned.kernel.spec
            for offset in (spec.offset, not spec.offset) if shifts else (spec.offset,):
                way = kind.explained | ({"offset": offset} if shifts else {})
                found = package.explain(tuned.M, 128, "bf16", tuned.weight_dtype, **way)
                served = tuned.kernel.file if offset == spec.offset else None
                assert found["kernel"] == served
        for other in KINDS.values():
            if kind.explained and other.use is kind.use and other is not kind:
                reason = package.explain(4096, 128, "bf16", **other.explained)["reason"]
                assert reason == f"{name} has kernels of {name} alone"
        assert_alike(kind.use(package, **kind.used), kind.use(kind.library, **kind.used))
    finally:
        forget(name)


STANDS_ALONE = """
import sys, torch
from typing import Any
import {name} as package
{use}
found = {called}(package)
assert "normforge" not in sys.modules
torch.save([each for each in found if isinstance(each, torch.Tensor)], {results!r})
print(package.explain(4096, 128, "bf16")["how"])
"""


def run(*line: str) -> str:
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        *("gated_rmsnorm_backward", ROTATED[0], QUANTIZED[0]),
        *(RMSNORM_ADD_FORWARD.name, LAYERNORM_BACKWARD.name, LAYERNORM_FORWARD.name),
    ],
)
def test_a_package_stands_alone(tmp_path: Path, name: str) -> None:
    kind, results = KINDS[name], tmp_path / "results.pt"
    emit_first(tmp_path / name, f"{name}:4096x128:bf16")
    add_library(tmp_path / name)
    words = {"name": name, "results": str(results)}
    use = {"use": inspect.getsource(kind.use), "called": kind.use.__name__}
    done = run_fresh(STANDS_ALONE.format(**words, **use), tmp_path, imported=INDUCTOR)
    assert (done.returncode, done.stdout) == (0, "tuned\n"), done.stderr
    wanted = [one for one in kind.use(kind.library) if isinstance(one, torch.Tensor)]
    assert_alike(torch.load(results), wanted)


def test_a_package_of_another_operation_is_refused(tmp_path: Path) -> None:
    emit_first(tmp_path / "mine", f"{ROTATED[0]}:4096x128:bf16")
    with pytest.raises(ValueError, match="has no kernels of a gated RMSNorm, nor of its backward"):
        open_package(str(tmp_path / "mine" / "__init__.py"), "mine", "gated_rmsnorm_backward")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "name",
    ["gate_first_rmsnorm_backward", "gated_rmsnorm_sigmoid_forward", *ROTATED, *QUANTIZED],
)
def test_the_command_tunes_it_like_others(tmp_path: Path, name: str) -> None:
    """Predicted, as no GPU is asked for, and checked in the emulator."""
    line = [sys.executable, "tune.py", "--op", name, "--gpu", "h200", "--trials", "6", "--json"]
    line += ["--shapes", "4096x1024:bf16", "--out", str(tmp_path)]
    (shape,) = json.loads(run(*line))["shapes"]
    assert any("CPU emulator" in check for check in shape["checks"])
    (kernel,) = Table.load(tmp_path / name).kernels()
    assert kernel.file == shape["variant"]
