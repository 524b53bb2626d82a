"""Packages of LayerNorm's have kernels for rows that were not tuned."""

from __future__ import annotations

from pathlib import Path

import pytest

from generator.package.emit import emit_package
from generator.package.fallback_kernels import fallback_variants, first_choices
from generator.package.sources import variant_of
from normforge.packages import open_package
from normforge.table import Table
from tests.support.packages import H200, compiled, first_entry


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
