"""A package of RMSNorm that is added to a residual stream: emitted, imported, and exported to stand
alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generator.package.entries import problem_of
from generator.package.standalone import add_library
from generator.paths import REPOSITORY
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.table import Table
from tests.support.packages import emit_first

NAME = RMSNORM_ADD_FORWARD.name


def test_emitted_package_is_imported_and_says_which_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = emit_first(tmp_path / NAME, f"{NAME}:4096x128:bf16", f"{NAME}:4096x128:bf16+offset")
    table = Table.load(tmp_path / NAME)
    assert {problem_of(tuned) for tuned in table.tuned} == {*problems}
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(NAME)
    try:
        files = {problem_of(tuned).offset: tuned.kernel.file for tuned in table.tuned}
        for offset, file in files.items():
            assert package.explain(4096, 128, "bf16", offset=offset)["kernel"] == file
        assert package.PROVENANCE["shapes"].keys() == {"4096x128:bf16", "4096x128:bf16+offset"}
        x, r = torch.randn(2, 2, 5, 128).bfloat16()
        weight = torch.rand(128)
        y, rstd = package.rmsnorm_forward(x, weight, add=r, weight_offset=1.0)
        wide = torch.nn.functional.rms_norm(x.float(), (128,), weight + 1)
        torch.testing.assert_close(y, (wide + r.float()).bfloat16())
        assert (rstd.shape, rstd.dtype) == ((2, 5, 1), torch.float32)
        with pytest.raises(TypeError, match="add must have x's dtype"):
            package.rmsnorm_forward(x, add=r.float())
    finally:
        for loaded in [n for n in sys.modules if n.split(".")[0] == NAME]:
            del sys.modules[loaded]


STANDS_ALONE = """
import sys, torch
sys.path.insert(0, {folder!r})
import {name} as package
assert "normforge" not in sys.modules
x = torch.ones(3, 8)
y, rstd = package.rmsnorm_forward(x, eps=0.0, add=x)
assert y.tolist() == [[2.0] * 8] * 3 and rstd.tolist() == [[1.0]] * 3
print(package.explain(4096, 128, "bf16")["how"])
"""


def test_a_package_stands_alone(tmp_path: Path) -> None:
    emit_first(tmp_path / NAME, f"{NAME}:4096x128:bf16")
    add_library(tmp_path / NAME)
    line = [sys.executable, "-c", STANDS_ALONE.format(folder=str(tmp_path), name=NAME)]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "tuned"
