"""`rms_norm` with `add` on a GPU: by kernels of the operation, in every way to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.api import Package
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.serve.kernels import source_of
from tests.support.entry_points import write_package
from tests.support.samples import planted_entry

pytestmark = pytest.mark.gpu

NAME = RMSNORM_ADD_FORWARD.name
SHAPES = ("4096x4096:bf16", "4096x1024:bf16+offset", "4096x8192:fp16:fp32", "4096x512:fp32")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EPS = 1e-6


@pytest.fixture(scope="module")
def folder(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / NAME
    problems = [Problem.parse(shape, NAME) for shape in SHAPES]
    entries = [planted_entry(problem, here, strategy="none") for problem in problems]
    emit_package(entries, [], here, folder)
    return folder


@pytest.fixture
def package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """One whose calls with `add` are served by a kernel, or fail."""
    package = write_package(tmp_path / "package")
    package.add_by(lambda: source_of(folder, NAME))
    served = package._norm.added
    assert served is not None
    by_kernel = served.server.by_kernel

    def counted(*given: Any) -> Any:
        found = by_kernel(*given)
        assert isinstance(found, dict), found
        return found

    monkeypatch.setattr(served.server, "by_kernel", counted)
    return package


def drawn(shape: str) -> tuple[Problem, list[torch.Tensor]]:
    problem = Problem.parse(shape, NAME)
    torch.manual_seed(0)
    x, r = torch.randn(2, 777, problem.N, device="cuda").to(DTYPES[problem.dtype])
    weight = torch.rand(problem.N, device="cuda").to(DTYPES[problem.weight_dtype])
    return problem, [one.requires_grad_() for one in (x, weight, r)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # there is no kernel of the backward
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_to_run_it_has_one_kernels_bits(package: Package, shape: str) -> None:
    problem, given = drawn(shape)
    offset = float(problem.offset)

    def norm(x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(x, weight, EPS, add=r, weight_offset=offset)

    def eager(x: torch.Tensor, weight: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return r + functional.rms_norm(x, (problem.N,), weight + offset, EPS)

    y = norm(*given)
    dy = torch.randn_like(y)
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = eager(*wide)
    theirs = eager(given[0], given[1].to(y.dtype), given[2])
    error, bar = ((one.double() - exact).norm() for one in (y, theirs))
    assert error <= 1.1 * bar
    found = torch.autograd.grad(y, given, dy)
    for one, other in zip(found, torch.autograd.grad(exact, wide, dy.double()), strict=True):
        assert (one.double() - other).norm() <= 2.0**-7 * other.norm()
    assert torch.equal(found[2], dy)
    compiled = torch.compile(norm, fullgraph=True)
    again = compiled(*given)
    assert torch.equal(again, y)
    for one, other in zip(torch.autograd.grad(again, given, dy), found, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert torch.equal(norm(*given), y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = norm(*given)
        for _ in range(2):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, y)


@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_and_streams(package: Package, shape: str) -> None:
    problem, (x, weight, r) = drawn(shape)
    offset = float(problem.offset)
    x, weight, r = (one.detach() for one in (x, weight, r))

    def norm(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(x, weight, EPS, add=r, weight_offset=offset)

    y = norm(x, r)
    packed = torch.stack([x, r, x], 1)
    side = torch.cuda.Stream()
    for one, other in (
        (packed[:, 0], packed[:, 1]),
        (x.t().contiguous().t(), r),
        (x, r[:1].expand_as(r)),
        (x.view(7, 111, -1), r.view(7, 111, -1)),
    ):
        wanted = norm(one.contiguous(), other.contiguous())
        assert torch.equal(norm(one, other), wanted)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        aside = norm(x, r)
    torch.cuda.synchronize()
    assert torch.equal(aside, y)
    (dx,) = torch.autograd.grad(norm(x.requires_grad_(), r).sum(), x)
    assert dx.shape == x.shape and dx.isfinite().all()
