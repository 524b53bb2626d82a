"""A package of LayerNorm's forward: emitted, imported, exported to stand alone, and found by
LayerNorm."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generator.package.entries import problem_of
from generator.package.standalone import add_library
from generator.paths import GENERATED, REPOSITORY
from normforge import packages
from normforge.operations import LAYERNORM_BACKWARD, LAYERNORM_FORWARD
from normforge.table import Table
from tests.support.packages import emit_first

NAME = LAYERNORM_FORWARD.name
N = 128


def test_emitted_package_is_imported_and_its_results_are_the_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = emit_first(tmp_path / NAME, f"{NAME}:4096x128:bf16", f"{NAME}:4096x128:bf16:fp32")
    table = Table.load(tmp_path / NAME)
    assert {problem_of(tuned) for tuned in table.tuned} == {*problems}
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(NAME)
    try:
        for tuned in table.tuned:
            found = package.explain(4096, N, "bf16", tuned.weight_dtype)
            assert (found["how"], found["kernel"]) == ("tuned", tuned.kernel.file)
        assert package.PROVENANCE["shapes"].keys() == {"4096x128:bf16", "4096x128:bf16:fp32"}
        x, dy = (3 + torch.randn(2, 2, 5, N)).bfloat16()
        weight, bias = torch.rand(2, N).requires_grad_()
        y, mean, rstd = package.layer_norm_forward(x, weight, bias)
        wide = x.float().requires_grad_()
        exact = torch.nn.functional.layer_norm(wide, (N,), weight, bias)
        torch.testing.assert_close(y, exact.bfloat16())
        for one in (mean, rstd):
            assert (one.shape, one.dtype) == ((2, 5, 1), torch.float32)
        functions = packages.LayerNormPackage(GENERATED / "h200" / LAYERNORM_BACKWARD.name)
        found = functions.layer_norm_backward(dy, x, mean, rstd, weight.detach())
        wanted = torch.autograd.grad(exact, (wide, weight, bias), dy.float())
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)
        y, _, _ = package.layer_norm_forward(x, eps=1.0)
        torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (N,), eps=1.0))
        third = [one.detach().half() for one in (weight, bias)]  # neither x's dtype nor fp32
        for shared in (third, [third[0], bias], [None, third[1]]):
            y, _, _ = package.layer_norm_forward(x, *shared)
            wide_ones = [None if one is None else one.float() for one in shared]
            exact = torch.nn.functional.layer_norm(x.float(), (N,), *wide_ones)
            torch.testing.assert_close(y, exact.bfloat16())
        with pytest.raises(TypeError, match="must be of one dtype, got weight of"):
            package.layer_norm_forward(x, weight, bias.bfloat16())
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == NAME]:
            del sys.modules[loaded]


STANDS_ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package
assert "normforge" not in sys.modules
x = torch.tensor([[1.0, 3.0]])
y, mean, rstd = package.layer_norm_forward(x, bias=torch.ones(2), eps=0.0)
assert y.tolist() == [[0.0, 2.0]] and (mean.item(), rstd.item()) == (2.0, 1.0)
print(package.explain(4096, 128, "bf16")["how"])
"""


def test_a_package_stands_alone(tmp_path: Path) -> None:
    emit_first(tmp_path / NAME, f"{NAME}:4096x128:bf16")
    add_library(tmp_path / NAME)
    line = [sys.executable, "-c", STANDS_ALONE.format(folder=str(tmp_path), name=NAME)]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "tuned"


def test_layer_norm_takes_the_kernels_of_the_package_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "generated" / "h200"
    shutil.copytree(GENERATED / "h200" / LAYERNORM_BACKWARD.name, folder / LAYERNORM_BACKWARD.name)
    monkeypatch.setattr(packages, "_roots", lambda: (tmp_path / "generated",))
    monkeypatch.setattr(packages, "find_gpu", lambda: None)
    without = packages._choose(LAYERNORM_BACKWARD.name)
    assert isinstance(without, packages.LayerNormPackage)
    assert without._kernels.server.missing == f"there is no tuned package of {NAME}"
    emit_first(folder / NAME, f"{NAME}:4096x128:bf16")
    made = packages._choose(LAYERNORM_BACKWARD.name)
    opened = packages.LayerNormPackage(folder / LAYERNORM_BACKWARD.name)
    for functions in (made, opened):
        assert isinstance(functions, packages.LayerNormPackage)
        assert functions._kernels.server.explain(4096, N, "bf16")["how"] == "tuned"
        assert functions.ops.by_kernel is functions._kernels
