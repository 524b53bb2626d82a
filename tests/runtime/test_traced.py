"""The operators, and what is traced around them, which compilers keep on disk of a norm. An old
graph calls today's operators, so nothing of this may change under one VERSION.

An old graph calls today's operators, so nothing of this may change under one VERSION.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normforge.api import Package
from normforge.frontends.layer_norm_operators import LAYER_NORM_SCHEMAS, LayerNormOperators
from normforge.frontends.library import VERSION
from normforge.frontends.operators import SCHEMAS, Operators
from tests.support.entry_points import write_layer_norm_package

WRITTEN_BY = "2.13."
"""The PyTorch that wrote the text."""
KNOWN = Path(__file__).with_name(f"traced_{VERSION}.txt")
BF16 = torch.bfloat16


def leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def calls(rms: Package, layer: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Norms of the kinds that differ in what is traced, and their arguments."""
    x, residual, weight = leaf(4, 8), leaf(4, 8), leaf(8)
    wide_weight, wide_residual = leaf(8, dtype=torch.float32), leaf(4, 8, dtype=torch.float32)
    return {
        "rms_norm": (rms.rms_norm, (x, weight)),
        "rms_norm, fp32 weight": (rms.rms_norm, (x, wide_weight)),
        "rms_norm, no weight": (rms.rms_norm, (x,)),
        "rms_norm, offset": (lambda x, w: rms.rms_norm(x, w, 1e-5, weight_offset=1.0), (x, weight)),
        "rms_norm, tiny eps": (lambda x, w: rms.rms_norm(x, w, 1e-40), (x, weight)),
        "rms_norm, residual": (
            lambda x, w, r: rms.rms_norm(x, w, 1e-5, residual=r),
            (x, weight, residual),
        ),
        "rms_norm, fp32 residual": (
            lambda x, w, r: rms.rms_norm(x, w, 1e-5, residual=r),
            (x, weight, wide_residual),
        ),
        "rms_norm, added": (
            lambda x, w, r: rms.ops.rms_norm_and_add(x, r, w, 1e-5, 0.0, rms.name)[0],
            (x, weight, residual),
        ),
        "rms_norm, bias": (lambda x, w: rms.rms_norm(x, w, bias=w), (x, weight)),
        "layer_norm": (layer.layer_norm, (x, weight, weight)),
        "layer_norm, no bias": (layer.layer_norm, (x, weight)),
        "layer_norm, fp32 bias": (layer.layer_norm, (x, weight, wide_weight)),
        "layer_norm, residual": (
            lambda x, w, r: layer.layer_norm(x, w, w, residual=r),
            (x, weight, residual),
        ),
    }


def traced(norm: Callable[..., Any], given: tuple[Any, ...]) -> Iterator[str]:
    """Every node of a forward with its backward."""

    def step(*given: torch.Tensor) -> Any:
        results = norm(*given)
        results = results if isinstance(results, tuple) else (results,)
        return results, torch.autograd.grad(results, given, [torch.ones_like(y) for y in results])

    for node in make_fx(step, tracing_mode="fake")(*given).graph.nodes:
        if node.op in ("call_function", "output"):
            yield f"  {node.name} = {node.target}{node.args}{node.kwargs or ''}"


def results_of_backward(dtype: torch.dtype, residual: torch.dtype | None) -> str:
    with FakeTensorMode():
        rows, rstd = torch.empty(4, 8, dtype=dtype), torch.empty(4, 1)
        weight = torch.empty(8, dtype=dtype)
        third = None if residual is None else torch.empty(4, 8, dtype=residual)
        found = Operators.rms_norm_backward(
            rows, rows, rstd, weight, third, None, 0.0, True, True, ""
        )
        return "; ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in found)


@pytest.mark.skipif(
    not torch.__version__.startswith(WRITTEN_BY),
    reason="other versions of PyTorch write the same graphs in other words",
)
def test_nothing_that_compilers_keep_changes_under_one_version(
    package: Package, tmp_path: Path
) -> None:
    layer = write_layer_norm_package(tmp_path)
    schemas = {**SCHEMAS, **LAYER_NORM_SCHEMAS}
    lines = [f"{name}{schema}" for name, schema in schemas.items()]
    assert len(Operators.all) + len(LayerNormOperators.all) == len(schemas)
    lines += [
        f"rms_norm_backward, residual {residual}: {results_of_backward(BF16, residual)}"
        for residual in (None, BF16, torch.float32)
    ]
    for name, (norm, given) in calls(package, layer).items():
        lines += [name, *traced(norm, given)]
    text = "\n".join(lines) + "\n"
    for name in (package.name, layer.name):
        text = text.replace(name, "PACKAGE")
    text = re.sub(r"(?<=device\(type=')\w+", "cpu", text)
    fresh = tmp_path / KNOWN.name
    fresh.write_text(text)
    assert text == (KNOWN.read_text() if KNOWN.exists() else ""), (
        "graphs that were compiled before call operators that mean something else now: give "
        f"normforge/frontends/library.py another VERSION, and move {fresh} here"
    )
