"""Training through each door on the CPU: the same bits twice, and as accurate as PyTorch.

tests/test_gpu_training.py has the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from generator.runtime.api import Package
from tests.accuracy import Case, cases, check
from tests.doors import (
    Training,
    aten_on_cpu,
    equal_bits,
    make_door,
    routing_on_cpu,
    write_package,
)

DOORS = ("1", "2", "2 with residual", "3")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_two_trainings_have_the_same_bits(package: Package, door: str, how: str) -> None:
    norm, fused = make_door(package, door)
    wrap = compiled if how == "compiled" else (lambda model: model)
    routed = routing_on_cpu(package).installed() if door == "3" else nullcontext()
    with aten_on_cpu(), routed:
        runs = [Training(norm, fused, wrap=wrap).train() for _ in range(2)]
        other = Training(norm, fused, wrap=wrap, seed=1).train(2)
    assert equal_bits(*runs)
    assert float(runs[0][19]) < float(runs[0][0])
    assert not torch.equal(other[0], runs[0][0]), "the comparison would see a difference"


def test_doors_agree_with_pytorch(package: Package) -> None:
    wanted = Training(lambda width: torch.nn.RMSNorm(width, eps=1e-6), False).train()
    for door in DOORS:
        norm, fused = make_door(package, door)
        found = Training(norm, fused).train()
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), door


@settings(max_examples=60)
@given(case=cases())
def test_errors_are_at_most_those_of_pytorch(package: Package, case: Case) -> None:
    check(case, package.rmsnorm_backward)


def test_worse_backward_is_noticed() -> None:
    """Else the bound above would hold for anything."""
    from generator.runtime.reference import reference_backward

    def rounds_twice(*tensors: Any, **options: Any) -> Any:
        dx, dw, *rest = reference_backward(*tensors, **options)
        assert dx is not None and dw is not None
        return (dx * 1.001).to(dx.dtype), dw, *rest

    case = Case(100, 512, "fp32", False, True, 0.0, "", 1)
    check(case, reference_backward)
    with pytest.raises(AssertionError, match="error of dx"):
        check(case, rounds_twice)
