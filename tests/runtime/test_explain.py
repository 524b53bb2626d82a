"""Every package's `explain` takes dtypes by name or as PyTorch's, and refuses impossible shapes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from generator.paths import GENERATED
from normforge.table import TABLE

PACKAGES = sorted(table.parent.name for table in GENERATED.glob(f"h200/*/{TABLE}"))


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(f"generated.h200.{request.param}")


def test_a_dtype_is_the_same_in_every_spelling(package: Any) -> None:
    said = package.explain(16384, 4096, "bf16", "fp32")
    assert package.explain(16384, 4096, torch.bfloat16, torch.float32) == said
    assert package.explain(16384, 4096, "bfloat16", "float32") == said
    alone = package.explain(16384, 4096, "bf16")
    assert package.explain(16384, 4096, torch.bfloat16, torch.bfloat16) == alone


@pytest.mark.parametrize("shape", [(0, 4096), (-5, 4096), (1.5, 4096), (8, 0), (8, 0.5)])
def test_an_impossible_shape_is_refused(package: Any, shape: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="M and N must be at least 1"):
        package.explain(*shape, "bf16")


@pytest.mark.parametrize("dtypes", [("nonsense",), ("bf16", "nonsense"), (torch.int8,)])
def test_an_impossible_dtype_is_refused(package: Any, dtypes: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, fp32, got"):
        package.explain(16384, 4096, *dtypes)
