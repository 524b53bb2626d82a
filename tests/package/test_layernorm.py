"""A package of LayerNorm's backward: emitted, imported, explained."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.comparison import load_module, operation_of_package
from generator.kernels.variant import make_variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry, problem_of
from generator.package.fallback_kernels import fallback_variants, first_choices
from generator.package.sources import variant_of
from generator.problem import Problem
from normforge.packages import open_package
from normforge.table import Table
from tests.support.packages import H200, compiled
from tests.support.samples import space_of

SHAPE = "layernorm_backward:4096x1024:bf16"


def test_emitted_package_is_imported_and_says_which_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.parse(SHAPE)
    config = next(space_of(problem.operation).legal(problem, H200))
    variant = make_variant(config, problem)
    provenance = dict.fromkeys(PROVENANCE_KEYS, "known")
    entry = Entry(problem, variant, compiled(variant), "measured", provenance)
    folder = tmp_path / "layernorm_backward"
    for _ in range(2):  # on top of itself: the table reads back as the same problem
        emit_package([entry], [], H200, folder)
        assert [problem_of(tuned) for tuned in Table.load(folder).tuned] == [problem]
    (kernel,) = Table.load(folder).kernels()
    assert variant_of(kernel) == variant
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
    problem = Problem.parse("4096x1024:bf16", operation)
    variant = make_variant(next(space_of(operation).legal(problem, H200)), problem)
    provenance = dict.fromkeys(PROVENANCE_KEYS, "known")
    entry = Entry(problem, variant, compiled(variant), "measured", provenance)
    folder = tmp_path / operation
    emit_package([entry], [(v, compiled(v)) for v in made], H200, folder)
    table = Table.load(folder)
    assert [variant_of(kernel) for kernel in table.fallback] == made
    opened = open_package(str(folder / "__init__.py"), operation, operation)
    for N, how in ((1000, "fallback"), (1001, "fallback"), (1024, "tuned"), (70000, "none")):
        assert opened.explain(4096, N, "bf16")["how"] == how
