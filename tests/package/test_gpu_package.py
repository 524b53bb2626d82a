"""An emitted package on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from generator.kernels.cubin_cache import compile_variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry
from generator.problem import Problem
from generator.target import match_device
from normforge.api import Package
from normforge.serve.reference import reference_backward
from tests.support.packages import (
    variant_for,
)
from tests.support.samples import compiled_fallbacks

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU and its driver; none is here"
)
EXACT: dict[str, dict[str, Any]] = {
    "777x1024:bf16": {"strategy": "column_slices"},
    "778x1024:bf16": {"strategy": "separate"},
    "779x1024:bf16": {"strategy": "semaphore"},
    "780x1024:bf16": {"strategy": "last_cta"},
}
"""The shapes and knobs that the package of the GPU tests was "tuned" for."""


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package for the GPU that is here, and a function that opens it with nothing loaded yet."""
    properties = torch.cuda.get_device_properties(0)
    target = match_device(properties.name, properties.multi_processor_count)
    if target is None:
        pytest.skip(f"search_spaces/gpus.yaml does not know {properties.name}")
    folder = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    entries = []
    for shape, knobs in EXACT.items():
        problem = Problem.parse(shape)
        variant = variant_for(problem, target, **knobs)
        code = compile_variant(variant, target.arch)
        facts = dict.fromkeys(PROVENANCE_KEYS, "known")
        entries.append(Entry(problem, variant, code, "measured", facts))
    emit_package(entries, compiled_fallbacks(target), target, folder)
    return lambda: Package(folder)


def gpu_tensors(*shape: int, dtype: torch.dtype, weight: torch.dtype) -> list[torch.Tensor]:
    x, dy = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(2))
    scale = torch.randn(shape[-1], device="cuda", dtype=weight)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return [dy, x, rstd, scale]


def assert_close(got: tuple[torch.Tensor, ...], arguments: list[torch.Tensor]) -> None:
    """Compare with float64, within a few roundings of the output's dtype and of fp32 sums. dx is
    measured by its first term, from which the second takes away nearly everything where N is small,
    and dw by the root of the sum of the squares of its terms, which may cancel."""
    dy, x, rstd, weight = (tensor.double() for tensor in arguments)
    wanted = reference_backward(dy, x, rstd, weight)
    rows = (-1, len(weight))
    first = (rstd.view(-1, 1) * (dy * weight).view(rows)).abs().view_as(x)
    summed = ((dy * x).view(rows) * rstd.view(-1, 1)).square().sum(0).sqrt()
    terms = first, summed
    for result, exact, term in zip(got, wanted, terms, strict=True):
        bound = 2 * torch.finfo(result.dtype).eps + 1e-5
        scale = term.abs() + exact.abs() + exact.square().mean().sqrt()
        assert ((result.double() - exact).abs() <= bound * scale).all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 7, 256, 414, 1000, 1024, 1025, 3890, 4096, 8190, 8191])
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_gpu_any_width_agrees_with_float64(
    on_gpu: Any, N: int, dtype: torch.dtype, weight: torch.dtype
) -> None:
    package = on_gpu()
    for M in (1, 5, 777):
        arguments = gpu_tensors(M, N, dtype=dtype, weight=weight)
        assert_close(package.rmsnorm_backward(*arguments), arguments)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_strategies_repeat_their_bits_and_restore_their_workspace(
    on_gpu: Any, shape: str
) -> None:
    package, problem = on_gpu(), Problem.parse(shape)
    arguments = gpu_tensors(problem.M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    first = package.rmsnorm_backward(*arguments)
    assert_close(first, arguments)
    for _ in range(20):
        again = package.rmsnorm_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_gpu_layouts_are_read_where_they_lie(on_gpu: Any) -> None:
    package = on_gpu()
    dy, x, rstd, weight = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    wide = torch.cat([x, x], 1)
    unaligned = torch.empty(777 * 1024 + 1, device="cuda", dtype=x.dtype)[1:].view(777, 1024)
    for layout in (
        [dy, wide[:, 1024:], rstd, weight],
        [dy, wide[:, 3:1027], rstd, weight],
        [dy[:1].expand(777, 1024), x, rstd, weight],
        [torch.ones((), device="cuda", dtype=x.dtype).expand(777, 1024), x, rstd, weight],
        [dy, x.t().contiguous().t(), rstd, weight],
        [unaligned.copy_(dy), x, rstd, weight],
        [dy, x, rstd, torch.cat([weight, weight])[1:1025]],
        [dy, x, rstd, torch.stack([weight, weight], 1)[:, 0]],
        [dy.view(7, 111, 1024), x.view(7, 111, 1024), rstd, weight],
    ):
        assert_close(package.rmsnorm_backward(*layout), layout)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_first_call_may_be_a_captured_one(on_gpu: Any, shape: str, mode: str) -> None:
    package, M = on_gpu(), Problem.parse(shape).M
    graphs = []
    for _ in range(2):
        arguments = gpu_tensors(M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            # The second call finds the scratch of the first one in the graph's pool.
            package.rmsnorm_backward(*arguments)
            results = package.rmsnorm_backward(*arguments)
        graphs.append((graph, arguments, results, torch.cuda.Stream()))
    for _ in range(20):
        for graph, _, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, arguments, results, _ in graphs:
        assert_close(results, arguments)
        eager = package.rmsnorm_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(results, eager, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", EXACT)
def test_gpu_threads_and_streams_do_not_disturb_each_other(on_gpu: Any, shape: str) -> None:
    package, M = on_gpu(), Problem.parse(shape).M
    inputs = [gpu_tensors(M, 1024, dtype=torch.bfloat16, weight=torch.bfloat16) for _ in range(4)]
    streams = [torch.cuda.default_stream(), torch.cuda.default_stream()]
    streams += [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    faults: list[str] = []

    def work(index: int) -> None:
        with torch.cuda.stream(streams[index]):
            results = [package.rmsnorm_backward(*inputs[index]) for _ in range(50)]
            streams[index].synchronize()
            if not all(torch.equal(dw, results[0][1]) for _, dw in results):
                faults.append(f"dw of thread {index} changed")
            assert_close(results[-1], inputs[index])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, index) for index in range(4)]:
            done.result()
    assert not faults


@pytest.mark.gpu
@needs_gpu
def test_gpu_plain_thread_needs_no_setup(on_gpu: Any) -> None:
    """A thread that never used CUDA has no current context yet."""
    package = on_gpu()
    arguments = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    package.warmup([(777, 1024, "bf16")])
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(package.rmsnorm_backward, *arguments).result()
    assert_close(results, arguments)


@pytest.mark.gpu
@needs_gpu
def test_gpu_of_another_kind_gets_pytorchs_kernel_and_one_warning(on_gpu: Any) -> None:
    package = on_gpu()
    package.table.target["arch"] = "sm_30a"
    arguments = gpu_tensors(777, 1024, dtype=torch.bfloat16, weight=torch.bfloat16)
    with pytest.warns(UserWarning, match="do not run on") as seen:
        assert_close(package.rmsnorm_backward(*arguments), arguments)
        package.rmsnorm_backward(*gpu_tensors(5, 64, dtype=torch.half, weight=torch.half))
    assert len(seen) == 1
