"""Training through each entry point on a GPU: equal bits run to run, on two streams, under graph
replay; errors at most PyTorch's; what may go wrong between threads, streams and captures."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from generator.target import Target
from normforge.api import Package
from normforge.frontends.graph_pass import find_norms, make_backend
from normforge.frontends.operators import Operators
from tests.support.accuracy import Case, cases, check
from tests.support.entry_points import ENTRY_POINTS, INSTALL, Training, equal_bits, norm_of
from tests.support.samples import training_package

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic", "served_by_kernels")]

SIZES = {"width": 1024, "heads": 8, "tokens": 32}
"""Hidden norms of 1024 columns and QK-norms of 128, on slices of a packed QKV."""


@pytest.fixture(scope="module")
def package(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return training_package(here, tmp_path_factory.mktemp("training"))


def training(package: Package, entry_point: str, how: str = "eager", seed: int = 0) -> Training:
    norm, fused = norm_of(package, entry_point)
    backend = make_backend(package.ops) if entry_point == INSTALL else "inductor"

    def wrap(model: Any) -> Any:
        return torch.compile(model, backend=backend) if how == "compiled" else model

    return Training(norm, fused, "cuda", torch.bfloat16, wrap, seed, **SIZES)


def routed(package: Package, entry_point: str) -> Any:
    return package.installed() if entry_point == INSTALL else nullcontext()


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_two_trainings_have_the_same_bits(package: Package, entry_point: str, how: str) -> None:
    with routed(package, entry_point):
        runs = [training(package, entry_point, how).train() for _ in range(2)]
        other = training(package, entry_point, how, seed=1).train(2)
    assert equal_bits(*runs)
    assert torch.isfinite(runs[0][19])
    assert float(runs[0][19]) < float(runs[0][0])
    assert not torch.equal(other[0], runs[0][0]), "the comparison would see a difference"


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_concurrent_trainings_have_the_bits_of_lonely_ones(
    package: Package, entry_point: str
) -> None:
    """Two threads, a stream each; the backward runs in autograd's thread, on those streams."""
    with routed(package, entry_point):
        alone = [training(package, entry_point, seed=seed).train() for seed in range(2)]
        both = [training(package, entry_point, seed=seed) for seed in range(2)]
        torch.cuda.synchronize()
        found: dict[int, list[torch.Tensor]] = {}

        def work(index: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[index] = both[index].train()
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(equal_bits(found[index], alone[index]) for index in range(2))


def captured(one: Training) -> torch.cuda.CUDAGraph:
    """A whole step in a graph, after the warm-up on a side stream that PyTorch asks for. Captured
    on a stream of its own: PyTorch keeps one cuBLAS workspace per stream, and graphs that were
    captured on the same one would write to it at the same time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        one.step()
    return graph


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_replayed_steps_have_the_bits_of_eager_ones(package: Package, entry_point: str) -> None:
    with routed(package, entry_point):
        eager = training(package, entry_point)
        eager.train(3 + 10)
        one = training(package, entry_point)
        graph = captured(one)
        for _ in range(10):
            graph.replay()
    assert equal_bits(one.state(), eager.state())


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_two_graphs_may_replay_at_once(package: Package, entry_point: str) -> None:
    with routed(package, entry_point):
        alone, both = (
            [training(package, entry_point, seed=seed) for seed in range(2)] for _ in range(2)
        )
        for one in alone:
            one.train(3 + 20)
        graphs = [captured(one) for one in both]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for one, two in zip(alone, both, strict=True):
        assert equal_bits(one.state(), two.state())


@settings(max_examples=80)
@given(case=cases(most_rows=2000, most_columns=5000))
def test_errors_are_at_most_those_of_pytorch(package: Package, case: Case) -> None:
    check(case, package.rmsnorm_backward, "cuda")


@settings(max_examples=40)
@given(case=cases(most_rows=2000, most_columns=5000))
def test_gradients_of_the_function_are_those_of_the_kernel(package: Package, case: Case) -> None:
    t = case.tensors("cuda")
    x, weight = t["x"].requires_grad_(), t["weight"]
    leaves = [x] if weight is None else [x, weight.requires_grad_()]
    y = package.rms_norm(x, weight, 1e-6, weight_offset=case.offset)
    rstd = package.ops.rms_norm(x.detach(), weight, 1e-6, case.offset, package.name)[1].detach()
    found = torch.autograd.grad(y, leaves, t["dy"])
    wanted = package.rmsnorm_backward(t["dy"], x.detach(), rstd, weight, weight_offset=case.offset)
    assert equal_bits(list(found), [result for result in wanted if result is not None])


def test_more_than_two_to_the_31_elements_in_training(package: Package) -> None:
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    torch.use_deterministic_algorithms(False)  # filling this much memory takes long
    M, N = (1 << 21) + 3, 1024
    x = torch.randn(M, N, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(N, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
    package.rms_norm(x, weight, 1e-6).backward(dy)
    assert x.grad is not None and weight.grad is not None
    for rows in (slice(0, 64), slice(M - 64, M)):
        part = x.detach()[rows].double().requires_grad_()
        y = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6)
        (wanted,) = torch.autograd.grad(y, part, dy[rows].double())
        assert torch.allclose(x.grad[rows].double(), wanted, rtol=2**-7, atol=2**-7)
    total = torch.zeros(N, device="cuda", dtype=torch.float64)
    for start in range(0, M, 1 << 17):
        rows = slice(start, start + (1 << 17))
        part = x.detach()[rows].double()
        xhat = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6)
        total += (dy[rows].double() * xhat).sum(0)
    assert (weight.grad.double() - total).norm() / total.norm() < 2**-8


def packed_heads(M: int, heads: int, N: int, outer: int) -> torch.Tensor:
    """Slices of a packed QKV, (M, heads, N), with `outer` heads in each row of the whole."""
    generator = torch.Generator("cuda").manual_seed(M + heads)
    whole = torch.randn(M, outer, N, device="cuda", generator=generator).bfloat16()
    return whole[:, 1 : 1 + heads]


@pytest.mark.parametrize("N", [64, 128, 256, 1024])
@pytest.mark.parametrize("dy_packed", [False, True])
def test_slices_of_a_packed_tensor_are_read_in_place(
    package: Package, N: int, dy_packed: bool
) -> None:
    x, dy = packed_heads(999, 5, N, 16), packed_heads(999, 5, N, 8)
    dy = dy if dy_packed else dy.contiguous()
    weight = torch.ones(N, device="cuda", dtype=torch.bfloat16)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    wanted = package.rmsnorm_backward(dy.contiguous(), x.contiguous(), rstd, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    found = package.rmsnorm_backward(dy, x, rstd, weight)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2, "dx and dw only"
    assert equal_bits(list(found), list(wanted))


def test_scalar_gradient_is_not_wrong(package: Package) -> None:
    x = torch.randn(100, 1024, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1024, device="cuda").bfloat16().requires_grad_()
    y = package.rms_norm(x, weight)
    summed = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    assert equal_bits(list(summed), list(torch.autograd.grad(y, (x, weight), torch.ones_like(y))))


def test_main_grad_is_added_to_in_the_same_order(package: Package) -> None:
    for case in (Case(777, 1024, "bf16", False, True, 0.0, "", s) for s in range(3)):
        t = case.tensors("cuda")
        given = (t["dy"], t["x"], t["rstd"], t["weight"])
        wide = package.rmsnorm_backward(*given, dw_dtype=torch.float32)[1]
        main_grad = torch.randn(1024, device="cuda")
        wanted = main_grad + wide
        package.rmsnorm_backward(*given, dw_out=main_grad, accumulate=True, need_dx=False)
        assert torch.equal(main_grad, wanted)


def test_options_leave_the_bits_of_what_they_do_not_touch(package: Package) -> None:
    t = Case(777, 1024, "bf16", False, True, 0.0, "", 1).tensors("cuda")
    given = (t["dy"], t["x"], t["rstd"], t["weight"])
    dx, dw = package.rmsnorm_backward(*given)
    assert torch.equal(package.rmsnorm_backward(*given, need_dw=False)[0], dx)
    assert torch.equal(package.rmsnorm_backward(*given, need_dx=False)[1], dw)
    wide = package.rmsnorm_backward(*given, dw_dtype=torch.float32)[1]
    assert torch.equal(wide.bfloat16(), dw)
    ones = package.rmsnorm_backward(*given[:3], torch.ones_like(t["weight"]))[0]
    assert torch.equal(package.rmsnorm_backward(*given[:3])[0], ones)


def test_tensors_of_another_device_than_the_current_one(package: Package) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    t = Case(777, 1024, "bf16", False, True, 0.0, "", 1).tensors("cuda:0")
    wanted = package.rmsnorm_backward(t["dy"], t["x"], t["rstd"], t["weight"])
    there = {k: None if v is None else v.to("cuda:1") for k, v in t.items()}
    for _ in range(3):  # prepared, remembered, recognised
        found = package.rmsnorm_backward(there["dy"], there["x"], there["rstd"], there["weight"])
        assert torch.cuda.current_device() == 0
        assert equal_bits([f.cpu() for f in found], [w.cpu() for w in wanted])


def test_recognised_calls_have_the_bits_of_the_first(package: Package) -> None:
    """The third call of a signature takes the short way; so do other tensors of its kind, and
    those that differ in one property do not."""
    t = Case(333, 1024, "bf16", False, True, 0.0, "", 1).tensors("cuda")
    given = [t["dy"], t["x"], t["rstd"], t["weight"]]
    first = package.rmsnorm_backward(*given)
    for _ in range(4):
        assert equal_bits(list(package.rmsnorm_backward(*given)), list(first))
    assert package._calls.recent
    half = package.rmsnorm_backward(*(tensor[:100] for tensor in given[:3]), t["weight"])
    assert half[0].shape == (100, 1024)
    unaligned = torch.empty(333 * 1024 + 1, device="cuda", dtype=torch.bfloat16)[1:]
    moved = unaligned.view(333, 1024).copy_(t["x"])
    other = package.rmsnorm_backward(t["dy"], moved, t["rstd"], t["weight"])
    assert torch.allclose(other[0].float(), first[0].float(), rtol=2**-7, atol=2**-7)


def tagged_steps(device: str, how: Any, steps: int = 5) -> list[torch.Tensor]:
    """A training step traced into one graph, its norms tagged and compiled by Inductor, run so many
    times: the losses, then the weights."""
    from torch._guards import TracingContext, tracing
    from torch.func import functional_call
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.regional_inductor import regional_inductor

    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [torch.nn.RMSNorm(1024, 1e-6), torch.nn.Linear(1024, 1024), torch.nn.RMSNorm(1024)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    names, weights = zip(*model.named_parameters(), strict=True)
    x = torch.randn(512, 1024, device=device).bfloat16()

    def step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        y = functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        loss = y.float().sin().square().mean()
        return loss, *torch.autograd.grad(loss, weights)

    graph = how(make_fx(step, tracing_mode="fake")(x, *weights), (x, *weights))
    (mode,) = {n.meta["val"].fake_mode for n in graph.graph.nodes if n.op == "placeholder"}
    with tracing(TracingContext(mode)):
        compiled = regional_inductor(graph)
    assert not find_norms(compiled.graph, Operators)
    losses = []
    for _ in range(steps):
        loss, *gradients = compiled([x, *weights])
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= gradient
        losses.append(loss)
    return [*losses, *(weight.detach() for weight in weights)]


def test_tagged_graph_has_the_same_bits_in_every_run(package: Package) -> None:
    runs = [tagged_steps("cuda", package.graph_pass("tag")) for _ in range(2)]
    assert equal_bits(*runs)
    assert not torch.equal(runs[0][0], runs[0][4])
