"""`import normforge` on a GPU: the package of the tensors' GPU serves, on all GPUs of a machine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import normforge
from generator.paths import results_of
from generator.target import Target
from normforge.packages import chosen
from tests.support.entry_points import equal_bits, randn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic", "served_by_kernels")]


def step(norm: Any, device: int) -> list[torch.Tensor]:
    x = randn(4096, 1024, dtype=torch.bfloat16).to(device).requires_grad_()
    weight = randn(1024, dtype=torch.bfloat16, seed=1).to(device).requires_grad_()
    dy = randn(4096, 1024, dtype=torch.bfloat16, seed=2).to(device)
    y = norm(x, weight, 1e-6)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


@pytest.fixture
def package(here: Target, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of this machine's GPUs, imported by its name."""
    monkeypatch.delenv("NORMFORGE_GPU", raising=False)
    folder = results_of(here.name) / "rmsnorm_backward"
    if not folder.exists():
        pytest.skip(f"needs a GPU with a committed package; {here} has none")
    return import_module(f"generated.{folder.parent.name}.rmsnorm_backward")


@pytest.mark.parametrize("how", ["eager", "compiled", "operator"])
def test_gpu_calls_have_the_bits_of_the_package_of_their_gpu(package: Any, how: str) -> None:
    def norm(x: Any, weight: Any, eps: float) -> Any:
        if how == "operator":
            return normforge.operators.rms_norm.v2(x, weight, eps, 0.0, "")[0]
        return normforge.rms_norm(x, weight, eps)

    run = torch.compile(norm, backend="aot_eager", fullgraph=True) if how == "compiled" else norm
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            assert equal_bits(step(run, device), step(package.rms_norm, device))
    kernels: Any = chosen("rmsnorm_backward")._source(0)
    assert kernels.folder == package._package.folder


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_that_is_not_the_current_one_is_served(package: Any) -> None:
    wanted = step(package.rms_norm, 0)
    found = step(normforge.rms_norm, 1)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True))
