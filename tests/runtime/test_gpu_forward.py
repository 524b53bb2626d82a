"""The forward on a GPU: errors, options and layouts, equal bits, large and empty inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from generator.operations.rmsnorm_forward import ForwardInputs
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.serve.forward import Forward, reference_forward
from normforge.serve.kernels import source_of
from tests.support.entry_points import write_package
from tests.support.forward import EPS, drawn, output_fault
from tests.support.samples import compiled_forwards

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ours(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Forward:
    """The forward of a package with the fallback kernels and those of two shapes."""
    folder = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    forwards = compiled_forwards(here, "4096x256:bf16", "1024x4096:bf16")
    emit_package([], [], here, folder, forwards)
    return Forward(source_of(folder, "rmsnorm_backward"))


def rows(M: int, N: int, dtype: str) -> torch.Tensor:
    torch.manual_seed(M + N)
    x = torch.randn(M, N, device="cuda") * (0.5 + 3 * torch.rand(M, 1, device="cuda"))
    return x.to(TORCH[dtype])


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize(
    ("M", "N"),
    [(1, 1), (5, 3), (4096, 256), (777, 64), (300, 1001), (1000, 4096), (33, 9999), (9, 65536)],
)
def test_gpu_error_is_not_above_that_of_aten(ours: Forward, dtype: str, M: int, N: int) -> None:
    x = rows(M, N, dtype)
    weight = (1 + 0.1 * torch.randn(N, device="cuda")).to(x.dtype)
    y, rstd = ours(x, weight, EPS)
    theirs, their_rstd = torch.ops.aten._fused_rms_norm(x, [N], weight, EPS)
    exact, exact_rstd = reference_forward(x.double(), weight.double(), EPS)
    few_roundings = 2.0**-23  # of fp32: on few rows chance decides who has one more
    for own, other, truth in ((y, theirs, exact), (rstd, their_rstd, exact_rstd)):
        own_error = float((own.double() - truth).norm() / truth.norm())
        their_error = float((other.double() - truth).norm() / truth.norm())
        assert own_error <= max(
            1.1 * their_error, few_roundings if own.dtype == torch.float32 else 0.0
        )
    inputs = ForwardInputs(x, weight)
    assert output_fault(Problem(M, N, dtype, dtype), inputs, (y, rstd)) == ""


@pytest.mark.parametrize("N", [256, 1001, 4096])
@pytest.mark.parametrize("weight_kind", ["none", "fp32", "same"])
def test_gpu_options_layouts_and_residuals(ours: Forward, N: int, weight_kind: str) -> None:
    problem = Problem(300, N, "bf16", "fp32" if weight_kind == "fp32" else "bf16")
    inputs = drawn(problem, 300, "cuda")
    assert inputs.residual is not None
    weight = None if weight_kind == "none" else inputs.weight
    inputs = replace(inputs, weight=weight)
    shifted = replace(inputs, offset=1.0)
    assert output_fault(problem, shifted, ours(inputs.x, weight, EPS, 1.0)) == ""
    outputs = ours(inputs.x, weight, EPS, 1.0, inputs.residual)
    assert output_fault(problem, shifted, outputs) == ""

    _, expected_rstd = ours(inputs.x, weight, EPS)
    wide = torch.empty(300, N + 8, device="cuda", dtype=torch.bfloat16)
    wide[:, :N] = inputs.x
    packed = torch.empty(75, 3, 4, N, device="cuda", dtype=torch.bfloat16)
    packed[:, 1] = inputs.x.view(75, 4, N)
    odd = torch.empty(300 * N + 1, device="cuda", dtype=torch.bfloat16)[1:].view(300, N)
    odd.copy_(inputs.x)
    for x in (wide[:, :N], packed[:, 1], odd, inputs.x.t().contiguous().t()):
        y, rstd = ours(x, weight, EPS)
        assert y.is_contiguous()
        torch.testing.assert_close(rstd.view(-1), expected_rstd.view(-1), rtol=1e-6, atol=0)
        assert output_fault(problem, inputs, (y.view(300, N), rstd)) == ""
    for stream_dtype in (torch.float32, torch.float16):
        residual = inputs.residual.to(stream_dtype)
        own = ours(inputs.x, weight, EPS, 1.0, residual)
        for a, b in zip(own, reference_forward(inputs.x, weight, EPS, 1.0, residual), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("M", "N"), [(4096, 256), (1000, 4096), (64, 65536)])
def test_gpu_bits_repeat_in_20_runs_and_in_a_graph(ours: Forward, M: int, N: int) -> None:
    x, residual = rows(M, N, "bf16"), rows(M, N, "bf16")
    weight = torch.randn(N, device="cuda").bfloat16()
    first = [t.clone() for t in ours(x, weight, EPS, 0.0, residual)]
    for _ in range(20):
        for out, expected in zip(ours(x, weight, EPS, 0.0, residual), first, strict=True):
            assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(x, weight, EPS, 0.0, residual)
    graph.replay()
    torch.cuda.synchronize()
    for out, expected in zip(captured, first, strict=True):
        assert torch.equal(out, expected)


def test_gpu_no_rows_and_more_than_2_to_31_elements(ours: Forward) -> None:
    y, rstd = ours(torch.empty(0, 256, device="cuda"), torch.ones(256, device="cuda"))
    assert (y.shape, rstd.shape) == ((0, 256), (0, 1))
    free, _ = torch.cuda.mem_get_info()
    if free < 14 << 30:
        pytest.skip("needs 14 GiB of free GPU memory")
    M, N = (1 << 31) // 4096 + 5, 4096
    x = torch.randn(1024, N, device="cuda").bfloat16().repeat(M // 1024 + 1, 1)[:M]
    weight = torch.ones(N, device="cuda").bfloat16()
    y, rstd = ours(x, weight, EPS)
    expected, expected_rstd = ours(x[-700:].clone(), weight, EPS)
    assert torch.equal(y[-700:], expected)
    assert torch.equal(rstd[-700:], expected_rstd)


def test_gpu_what_has_no_kernel_is_served_by_pytorch_with_one_warning(tmp_path: Path) -> None:
    bare = Forward(write_package(tmp_path)._source)
    x, weight = rows(8, 64, "bf16"), torch.ones(64, device="cuda").bfloat16()
    with pytest.warns(UserWarning, match="no forward kernels") as caught:
        for _ in range(3):
            y, _ = bare(x, weight, EPS)
            bare(x, None, EPS, 1.0, x)
    assert len(caught) == 1
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, EPS))
