"""RMSNorm's backward of a sum of gradients on a GPU: by kernels of the operations, called as
operator, in compiled code and from a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from generator.operations import OPERATIONS
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.api import Package
from normforge.frontends.sum_backward import SumBackward, SumBackwardPackage
from normforge.operations import RMSNORM_SUM_BACKWARDS
from normforge.serve.kernels import source_of
from tests.support.entry_points import needs_whole_forward, write_package
from tests.support.samples import planted_entry

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

SHAPES = ("777x1024:bf16", "777x1024:bf16+residual", "777x4096:fp16:fp32+offset", "777x512:fp32")
COUNTS = {operation.name: count for count, operation in RMSNORM_SUM_BACKWARDS.items()}


@pytest.fixture(scope="module")
def root(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu")
    for name in COUNTS:
        problems = [Problem.parse(shape, name) for shape in SHAPES]
        entries = [planted_entry(problem, here, strategy="column_slices") for problem in problems]
        emit_package(entries, [], here, root / name)
    return root


@pytest.fixture
def package(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """One whose backwards of sums are served by a kernel, or fail."""
    package = write_package(tmp_path / "package")
    package.add_gradients_by(lambda operation: source_of(root / operation, operation))
    by_kernel = SumBackward.by_kernel

    def served(self: SumBackward, *given: Any) -> Any:
        found = by_kernel(self, *given)
        assert found is not None
        return found

    monkeypatch.setattr(SumBackward, "by_kernel", served)
    return package


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_is_right_and_the_same_by_operator_and_package(
    package: Package, root: Path, name: str, shape: str
) -> None:
    problem, operation = Problem.parse(shape, name), OPERATIONS[name]
    given = operation.make_inputs(problem, torch.device("cuda"))
    rows = [given.dy, given.dy2, getattr(given, "dy3", None)]
    call = (given.x, given.rstd, given.weight, given.dresidual, given.offset)
    runs = [package.ops.backward_of_sum(*rows, *call, package.name)[:2] for _ in range(3)]
    others = {"weight_offset": given.offset, "dresidual": given.dresidual}
    alone = SumBackwardPackage(root / name)
    gradients = [row for row in rows if row is not None]
    runs.append(alone.rmsnorm_backward(gradients, *call[:3], **others)[:2])
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
    for output, bound in operation.bounds(problem, given).items():
        found = dict(zip(("dx", "dw"), runs[0], strict=True))[output].double()
        error = (found - bound.reference.double()).abs()
        assert bool((error <= bound.unit * bound.reference.double().abs() + bound.slack).all())


@needs_whole_forward
def test_compiled_projections_have_no_additions_before_the_backward(package: Package) -> None:
    """The gradients of three projections of a norm are added by its backward's kernel."""
    torch.manual_seed(0)
    x, w = torch.randn(777, 1024, device="cuda"), torch.rand(1024, device="cuda")
    weights = torch.randn(3, 1024, 1024, device="cuda") / 32
    leaves = [one.bfloat16().requires_grad_() for one in (x, w, *weights)]
    called = []
    operator = torch.ops.normforge.rms_norm_backward_of_sum.v2

    def run(x: torch.Tensor, w: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        y = functional.rms_norm(x, (1024,), w, 1e-6)
        q, k, v = (y @ projection for projection in projections)
        return x + q.sin() * k + v

    compiled = torch.compile(run, backend=package.inductor_backend(), fullgraph=True)
    found = []
    for function in (compiled, compiled, run):
        with torch.profiler.profile() as profiler:
            y = function(*leaves)
            found.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
        called.append(sum(operator.name().split(".")[0] in e.name for e in profiler.events()))
    assert called[1:] == [1, 0]
    assert all(map(torch.equal, found[0], found[1]))
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact = torch.autograd.grad(run(*wide), wide, torch.ones_like(wide[0]))
    for one, other, right in zip(found[0], found[2], exact, strict=True):
        errors = [(each.double() - right).norm() for each in (one, other)]
        assert errors[0] <= 1.1 * errors[1]
