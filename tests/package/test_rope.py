"""A package of RMSNorm with the rotary embedding, or of its backward: emitted, imported, exported
to stand alone, and tuned by the command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.emulate import find_compiler
from generator.package.entries import problem_of
from generator.package.standalone import add_library
from generator.paths import REPOSITORY
from normforge.operations import ROTATED
from normforge.packages import open_package
from normforge.table import Table
from tests.support.packages import emit_first


def use(package: Any) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 8 * 16, requires_grad=True)
    weights = [torch.rand(16, requires_grad=True) for _ in range(2)]
    angles = torch.randn(3, 8)
    given = (qkv, *weights, angles.cos(), angles.sin(), (4, 2))
    q, k, v = package.qk_norm_rope(*given)
    heads = qkv.unflatten(-1, (-1, 16))
    turned = package.rms_norm_rope(heads[:, :4], weights[0], *given[3:5])
    assert torch.equal(q, turned) and torch.equal(v, heads[:, 6:]) and k.shape == (3, 2, 16)
    exact = torch.autograd.grad(q.sum() + k.square().sum(), [qkv, *weights])
    torch.compiler.reset()
    run = torch.compile(package.qk_norm_rope, fullgraph=True, backend="aot_eager")
    q, k, _ = run(*given)
    found = torch.autograd.grad(q.sum() + k.square().sum(), [qkv, *weights])
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ROTATED)
def test_emitted_package_is_imported_and_says_which_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    for _ in range(2):  # on top of itself: the table reads back as the same problem
        (problem,) = emit_first(folder, f"{name}:4096x128:bf16")
        assert [problem_of(tuned) for tuned in Table.load(folder).tuned] == [problem]
    (kernel,) = Table.load(folder).kernels()
    source = (folder / "kernels" / f"{kernel.file}.cu").read_text()
    assert f"{name}(ARGUMENTS(Arguments, args))" in source
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(name)
    try:
        forward = name.endswith("_forward")
        assert package.explain(4096, 128, "bf16", forward=forward)["kernel"] == kernel.file
        reason = package.explain(4096, 128, "bf16", forward=not forward)["reason"]
        assert reason == f"{name} has kernels of {name} alone"
        assert package.PROVENANCE["shapes"].keys() == {"4096x128:bf16"}
        use(package)
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == name]:
            del sys.modules[loaded]


def test_a_package_of_another_operation_is_refused(tmp_path: Path) -> None:
    emit_first(tmp_path / "mine", f"{ROTATED[0]}:4096x128:bf16")
    with pytest.raises(ValueError, match="has no kernels of a gated RMSNorm, nor of its backward"):
        open_package(str(tmp_path / "mine" / "__init__.py"), "mine", "gated_rmsnorm_backward")


STANDS_ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package
from {name}.runtime.frontends.rope import RotatedPackage
assert "normforge" not in sys.modules
x, angles = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 4)
weight = torch.rand(8, requires_grad=True)
package.rms_norm_rope(x, weight, angles.cos(), angles.sin()).sum().backward()
assert x.grad is not None and weight.grad is not None
print(package.explain(4096, 128, "bf16")["how"])
"""


def run(*line: str) -> str:
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_stands_alone(tmp_path: Path) -> None:
    name = ROTATED[0]
    emit_first(tmp_path / name, f"{name}:4096x128:bf16")
    add_library(tmp_path / name)
    code = STANDS_ALONE.format(folder=str(tmp_path), name=name)
    assert run(sys.executable, "-c", code).strip() == "tuned"


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ROTATED)
def test_the_command_tunes_it(tmp_path: Path, name: str) -> None:
    line = (sys.executable, "tune.py", "--op", name, "--gpu", "h200")
    given = ("--shapes", "4096x128:bf16", "--trials", "3", "--out", str(tmp_path), "--json")
    (shape,) = json.loads(run(*line, *given))["shapes"]
    assert any("CPU emulator" in check for check in shape["checks"])
    assert (tmp_path / name / "table.json").exists()
