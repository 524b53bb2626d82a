"""A package of LayerNorm's backward: emitted, imported, explained."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.comparison import load_module, operation_of_package
from generator.package.emit import emit_package
from generator.package.entries import problem_of
from generator.package.fallback_kernels import fallback_variants, first_choices
from generator.package.sources import variant_of
from normforge.packages import open_package
from normforge.table import Table
from tests.support.packages import H200, compiled, emit_first, first_entry

SHAPE = "layernorm_backward:4096x1024:bf16"


def test_emitted_package_is_imported_and_says_which_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "layernorm_backward"
    for _ in range(2):  # on top of itself: the table reads back as the same problem
        problems = emit_first(folder, SHAPE)
        assert [problem_of(tuned) for tuned in Table.load(folder).tuned] == problems
    (kernel,) = Table.load(folder).kernels()
    assert operation_of_package(folder) == "layernorm_backward"
    assert load_module(folder).layer_norm_backward
    source = (folder / "kernels" / f"{kernel.file}.cu").read_text()
    assert "layernorm_backward(ARGUMENTS(Arguments, args))" in source

    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("layernorm_backward")
    try:
        assert "layer_norm_backward" in package.__all__
        assert package.explain(4096, 1024, "bf16")["kernel"] == kernel.file
        norm = package.LayerNorm(8)
        x = torch.randn(2, 8, requires_grad=True)
        norm(x).sum().backward()
        assert torch.allclose(norm.bias.grad, torch.full((8,), 2.0))
        assert x.grad is not None
        with package.installed():
            pass
        model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        assert package.patch(model) == ["0"] == package.unpatch(model)
        assert package.graph_pass().__name__ == "normforge_route_layernorm"
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "layernorm_backward"]:
            del sys.modules[name]


@pytest.mark.parametrize("operation", ["layernorm_backward", "layernorm_forward"])
def test_a_package_has_kernels_for_rows_that_were_not_tuned(operation: str, tmp_path: Path) -> None:
    made = first_choices(fallback_variants(H200, [("bf16", "bf16")], operation))
    entry = first_entry(f"{operation}:4096x1024:bf16")
    folder = tmp_path / operation
    emit_package([entry], [(v, compiled(v)) for v in made], H200, folder)
    table = Table.load(folder)
    assert [variant_of(kernel) for kernel in table.fallback] == made
    opened = open_package(str(folder / "__init__.py"), operation, operation)
    for N, how in ((1000, "fallback"), (1001, "fallback"), (1024, "tuned"), (70000, "none")):
        assert opened.explain(4096, N, "bf16")["how"] == how
