"""A package of RMSNorm that is quantized to FP8: emitted, imported, exported to stand alone, and
tuned by the command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generator.emulate import find_compiler
from generator.package.entries import problem_of
from generator.package.standalone import add_library
from generator.paths import REPOSITORY
from normforge import rms_norm, rms_norm_quantized
from normforge.operations import FORMATS, QUANTIZED
from normforge.table import Table
from tests.support.packages import emit_first

FORMAT_OF = {operation.name: format for format, operation in FORMATS.items()}


@pytest.mark.parametrize("name", QUANTIZED)
def test_emitted_package_is_imported_and_says_which_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    (problem,) = emit_first(folder, f"{name}:4096x128:bf16")
    assert [problem_of(tuned) for tuned in Table.load(folder).tuned] == [problem]
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(name)
    try:
        (kernel,) = Table.load(folder).kernels()
        for of, format in FORMAT_OF.items():
            found = package.explain(4096, 128, "bf16", format=format)
            assert found["kernel"] == (kernel.file if of == name else None)
            shifted = package.explain(4096, 128, "bf16", format=format, offset=True)
            assert (shifted["kernel"] is None and "offset" in shifted["reason"]) or of != name
            assert of == name or found["reason"] == f"{name} has kernels of {name} alone"
        assert package.PROVENANCE["shapes"].keys() == {"4096x128:bf16"}
        x, weight = torch.randn(2, 5, 128, requires_grad=True), torch.rand(128, requires_grad=True)
        given = {"format": FORMAT_OF[name], "keep_y": True, "weight_offset": 1.0}
        found = package.rms_norm_quantized(x, weight, 1e-6, **given)
        wanted = rms_norm_quantized(x, weight, 1e-6, **given)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))
        gradients = torch.autograd.grad(found[3].square().sum(), (x, weight))
        plain = rms_norm(x, weight, 1e-6, weight_offset=1.0)
        exact = torch.autograd.grad(plain.square().sum(), (x, weight))
        for one, other in zip(gradients, exact, strict=True):
            torch.testing.assert_close(one, other)
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == name]:
            del sys.modules[loaded]


STANDS_ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package
assert "normforge" not in sys.modules
x = torch.ones(3, 128, requires_grad=True)
y8, scales, rstd, y = package.rms_norm_quantized(x, eps=0.0, keep_y=True)
assert y8.float().tolist() == [[448.0] * 128] * 3 and rstd.tolist() == [[1.0]] * 3
y.sum().backward()
assert x.grad.tolist() == [[0.0] * 128] * 3
print(package.explain(4096, 128, "bf16")["how"])
"""


def run(*line: str) -> str:
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_stands_alone(tmp_path: Path) -> None:
    name = QUANTIZED[0]
    emit_first(tmp_path / name, f"{name}:4096x128:bf16")
    add_library(tmp_path / name)
    code = STANDS_ALONE.format(folder=str(tmp_path), name=name)
    assert run(sys.executable, "-c", code).strip() == "tuned"


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_command_tunes_it(tmp_path: Path, name: str) -> None:
    line = (sys.executable, "tune.py", "--op", name, "--gpu", "h200")
    given = ("--shapes", "4096x1024:bf16", "--trials", "3", "--out", str(tmp_path), "--json")
    (shape,) = json.loads(run(*line, *given))["shapes"]
    assert any("CPU emulator" in check for check in shape["checks"])
    assert (tmp_path / name / "table.json").exists()
