"""An emitted package when it is imported, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.package.entries import PROVENANCE_KEYS
from generator.package.files import UNVERIFIED
from generator.package.sources import source_of
from generator.paths import REPOSITORY
from tests.support.packages import (
    entry,
    put,
)
from tests.support.patience import patience


def test_import_compiles_nothing_and_leaves_cuda_alone(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    program = (
        "import sys, torch\n"
        # Newer PyTorch imports the bindings itself; what is gone would be imported again.
        "for m in [m for m in sys.modules if m.split('.')[0] == 'cuda']: del sys.modules[m]\n"
        "import rmsnorm_backward as r\n"
        "x = torch.ones(4, 8); r.rmsnorm_backward(x, x, torch.ones(4), torch.ones(8))\n"
        "r.explain(4096, 1024, 'bf16')\n"
        "assert not torch.cuda.is_initialized()\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('cuda', 'generator', 'optuna')]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": f"{package.parent}{os.pathsep}{REPOSITORY}"},
        check=True,
        timeout=patience(60),
    )


def test_explain_tells_which_kernel_and_what_is_known(package: Path, imported: Any) -> None:
    winner = entry("4096x1024:bf16", "predicted")
    put(package, winner)
    module = imported()
    facts = module.explain(4096, 1024, "bf16")
    assert facts["how"] == "tuned"
    assert facts["kernel"] == winner.variant.id
    assert Path(facts["source"]).read_text() == UNVERIFIED + source_of(winner.variant)
    assert (facts["evidence"], facts["determinism"]) == ("predicted", "gpu_to_gpu")
    assert facts["provenance"] == winner.provenance
    assert facts["launch"]["grid"] == 132
    assert module.explain(4096, 1024, "bfloat16") == facts
    near = module.explain(5000, 1024, torch.bfloat16)
    assert (near["how"], near["tuned_shape"]) == ("nearest", "4096x1024:bf16")
    other = module.explain(4096, 1000, "bf16", "fp32")
    assert (other["how"], other["strategy"]) == ("fallback", "separate")
    assert other["source"] is None
    assert "kernel" not in module.explain(4096, 1 << 20, "bf16")
    json.dumps([facts, near, other])  # plain values
    asked = module.explain(4096, 1024, "bf16", offset=True, residual="fp32")
    assert asked["how"] == "none" and "4096x1024:bf16+offset+residual_fp32" in asked["reason"]
    with pytest.raises(ValueError, match="M and N must be at least 1"):
        module.explain(0, 1024, "bf16")
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, fp32, got int8"):
        module.explain(1, 1024, "int8")


def test_provenance_lists_every_tuned_shape(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"), entry("4096x512:bf16:fp32", "predicted"))
    provenance = imported().PROVENANCE
    assert provenance["target"]["arch"] == "sm_90a"
    assert set(provenance["shapes"]) == {"4096x1024:bf16", "4096x512:bf16:fp32"}
    facts = provenance["shapes"]["4096x512:bf16:fp32"]
    assert PROVENANCE_KEYS | {"kernel", "determinism", "evidence"} <= facts.keys()


def test_cpu_tensors_of_any_layout_are_served(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"))
    backward = imported().rmsnorm_backward
    torch.manual_seed(0)
    x, dy = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    rstd, weight = torch.rand(3, 5, 1), torch.rand(8)
    dx, dw = backward(dy, x, rstd, weight)
    for layout in (
        (dy.transpose(0, 1).contiguous().transpose(0, 1), x),
        (dy, x.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
    ):
        again = backward(*layout, rstd.flatten(), weight)
        assert torch.equal(again[0], dx) and again[0].is_contiguous()
        torch.testing.assert_close(again[1], dw)
    ones = torch.ones(()).expand(3, 5, 8)
    torch.testing.assert_close(
        backward(ones, x, rstd, weight), backward(ones.contiguous(), x, rstd, weight)
    )
    one_row = backward(dy[0, 0], x[0, 0], rstd[0, 0], weight)
    torch.testing.assert_close(one_row[0], dx[0, 0])
    no_rows = backward(dy[:0], x[:0], rstd[:0], weight)
    assert no_rows[0].shape == (0, 5, 8) and not no_rows[1].any()
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        backward(dy, leaf, rstd, weight)[0].sum().backward()


def test_arguments_are_checked_at_every_call(package: Path, imported: Any) -> None:
    put(package, entry("4096x1024:bf16"))
    backward = imported().rmsnorm_backward
    x, rstd, weight = torch.ones(4, 8), torch.ones(4), torch.ones(8)
    backward(x, x, rstd, weight)
    with pytest.raises(TypeError, match=r"dy must be a torch\.Tensor, got list"):
        backward([1.0], x, rstd, weight)
    with pytest.raises(ValueError, match="each of the 4 rows of x, got 3"):
        backward(x, x, rstd[:3], weight)
    with pytest.raises(ValueError, match="weight must have shape"):
        backward(x, x, rstd, weight[:7])
    with pytest.raises(ValueError, match="dy must have x's shape"):
        backward(x.t(), x, rstd, weight)
    dx, dw = backward(*(tensor.to("meta") for tensor in (x, x, rstd, weight)))
    assert (dx.shape, dw.shape, dx.is_meta) == ((4, 8), (8,), True)
