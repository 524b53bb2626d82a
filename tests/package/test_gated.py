"""A package of gated RMSNorms or of their backward: emitted, imported, exported to stand alone, and
tuned by the command."""

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
from normforge.operations import GATED_BACKWARDS, GATED_FORWARDS
from normforge.table import Table
from tests.support.packages import emit_first

KINDS = {one.name: kind for some in (GATED_BACKWARDS, GATED_FORWARDS) for kind, one in some.items()}


def use(package: Any, kind: tuple[str, bool]) -> None:
    """Its functions, the operation's and others."""
    torch.manual_seed(0)
    norm = package.RMSNormGated(8, activation=kind[0], norm_before_gate=kind[1])
    x, z = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    norm(x, z).sum().backward()
    leaves = [x, z, norm.weight]
    assert all(leaf.grad is not None for leaf in leaves)
    y = package.rms_norm_gated(*leaves, norm.eps, *kind)
    for one, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert torch.equal(one, leaf.grad)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, z).sum(), leaves)
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad)
    assert package.patch(torch.nn.Sequential(norm)) == []


@pytest.mark.parametrize("name", KINDS)
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
        kind = KINDS[name]
        way = {"forward": name.endswith("_forward")}
        assert package.explain(4096, 128, "bf16", "", *kind, **way)["kernel"] == kernel.file
        other = ("silu" if kind[0] == "sigmoid" else "sigmoid", kind[1])
        for no_kind, no_way in ((other, way), (kind, {"forward": not way["forward"]})):
            reason = package.explain(4096, 128, "bf16", "", *no_kind, **no_way)["reason"]
            assert reason == f"{name} has kernels of {name} alone"
        assert package.PROVENANCE["shapes"].keys() == {"4096x128:bf16"}
        use(package, kind)
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == name]:
            del sys.modules[loaded]


STANDS_ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package
from {name}.runtime.frontends.gated import GatedPackage
assert "normforge" not in sys.modules
norm = package.RMSNormGated(8)
x, z = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
norm(x, z).sum().backward()
assert x.grad is not None and norm.weight.grad is not None
print(package.explain(4096, 128, "bf16")["how"])
"""


def run(*line: str) -> str:
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_stands_alone(tmp_path: Path) -> None:
    name = "gated_rmsnorm_backward"
    emit_first(tmp_path / name, f"{name}:4096x128:bf16")
    add_library(tmp_path / name)
    code = STANDS_ALONE.format(folder=str(tmp_path), name=name)
    assert run(sys.executable, "-c", code).strip() == "tuned"


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["gate_first_rmsnorm_backward", "gated_rmsnorm_sigmoid_forward"])
def test_the_command_tunes_it_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Predicted, as no GPU is asked for, and checked in the emulator."""
    line = [sys.executable, "tune.py", "--op", name, "--gpu", "gb200", "--trials", "3", "--json"]
    line += ["--shapes", "4096x128:bf16:fp32", "--out", str(tmp_path)]
    (shape,) = json.loads(run(*line))["shapes"]
    assert any("CPU emulator" in check for check in shape["checks"])
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(name)
    try:
        way = name.endswith("_forward")
        found = package.explain(4096, 128, "bf16", "fp32", *KINDS[name], forward=way)
        assert found["kernel"] == shape["variant"]
        use(package, KINDS[name])
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == name]:
            del sys.modules[loaded]
