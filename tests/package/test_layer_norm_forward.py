"""A package of LayerNorm's forward is found by LayerNorm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from generator.paths import GENERATED
from normforge import packages
from normforge.operations import LAYERNORM_BACKWARD, LAYERNORM_FORWARD
from tests.support.packages import emit_first

NAME = LAYERNORM_FORWARD.name
N = 128


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
