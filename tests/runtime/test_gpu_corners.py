"""Rare steps of training, on a GPU: a weight per head, no rows, autocast, second derivatives,
gradients that nobody wants, inference mode, a fork after the import, graphs that are gone."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from generator.paths import REPOSITORY
from generator.target import Target
from normforge.api import Package
from normforge.launch import workspace
from tests.support import entry_points as entry_points
from tests.support.entry_points import (
    BACKWARD,
    INSTALL,
    MODULE,
    MODULE_WITH_RESIDUAL,
    Training,
    equal_bits,
    function_norm,
    norm_of,
    routed_and_served,
)
from tests.support.samples import training_package

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic", "served_by_kernels")]

ROOT = REPOSITORY


@pytest.fixture(scope="module")
def package(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return training_package(here, tmp_path_factory.mktemp("corners"))


randn = partial(entry_points.randn, dtype=torch.bfloat16, device="cuda")


def normed(
    package: Package, entry_point: str, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Rows through `rms_norm`, or by PyTorch's function, which `install()` routes."""
    if entry_point == INSTALL:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)
    return package.rms_norm(x, weight, 1e-6)


def grads(y: torch.Tensor, leaves: list[torch.Tensor], seed: int = 9) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, leaves, randn(*y.shape, seed=seed, dtype=y.dtype)))


@pytest.mark.parametrize("packed", [False, True])
def test_weight_per_head_gives_the_bits_of_a_call_per_head(package: Package, packed: bool) -> None:
    """Heads that lie side by side, and heads 1 to 3 of a packed tensor of 5."""
    weight = randn(3, 128, seed=1).requires_grad_()
    x = randn(77, 5, 128)[:, 1:4] if packed else randn(77, 3, 128)
    x.requires_grad_()
    y = package.rms_norm(x, weight, 1e-6)
    heads = [package.rms_norm(x[:, h], weight[h], 1e-6) for h in range(3)]
    assert torch.equal(y, torch.stack(heads, 1))
    dx, dw = grads(y, [x, weight])
    assert equal_bits([dx, dw], grads(torch.stack(heads, 1), [x, weight]))
    rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
    dy = randn(77, 3, 128, seed=9)
    main_grad = torch.ones(3, 128, device="cuda")
    found = package.rmsnorm_backward(
        dy, x.detach(), rstd, weight.detach(), dw_out=main_grad, accumulate=True
    )
    assert found[1] is main_grad
    torch.testing.assert_close(main_grad - 1, dw.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_whose_squares_are_almost_zero_have_finite_gradients(
    package: Package, dtype: torch.dtype
) -> None:
    """rstd is about 1e20 at eps = 0, and its square is not finite in fp32."""
    x = (randn(77, 1024, dtype=torch.float32) * 1e-20).to(dtype).requires_grad_()
    weight = randn(1024, seed=1, dtype=dtype).requires_grad_()
    y = package.rms_norm(x, weight, 0.0)
    found = [y, *grads(y, [x, weight])]
    rows, scale = (each.detach().double().requires_grad_() for each in (x, weight))
    exact = functional.rms_norm(rows, (1024,), scale, 0.0)
    dy = randn(77, 1024, seed=9, dtype=dtype).double()
    for one, other in zip(
        found, (exact, *torch.autograd.grad(exact, (rows, scale), dy)), strict=True
    ):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= 2**-7 * other.norm()


@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_results_of_other_dtypes_are_those_of_the_wide_norm(
    package: Package, dtype: torch.dtype, out: torch.dtype
) -> None:
    x = randn(300, 1024, dtype=dtype).requires_grad_()
    residual = randn(300, 1024, dtype=dtype, seed=2)
    weight = randn(1024, dtype=dtype, seed=1).requires_grad_()
    options = {"residual": residual, "residual_dtype": torch.float32, "out_dtype": out}
    y, h = package.rms_norm(x, weight, 1e-6, **options)
    assert (y.dtype, h.dtype) == (out, torch.float32)
    assert torch.equal(h, x.float() + residual.float())
    found = [y, *grads(y, [x, weight])]
    rows, scale = (each.detach().double().requires_grad_() for each in (h, weight))
    exact = functional.rms_norm(rows, (1024,), scale, 1e-6)
    dy = randn(300, 1024, seed=9, dtype=out).double()
    bound = {torch.bfloat16: 2**-8, torch.float32: 2**-20}
    for one, other in zip(
        found, (exact, *torch.autograd.grad(exact, (rows, scale), dy)), strict=True
    ):
        assert (one.double() - other).norm() <= bound[one.dtype] * other.norm()


@pytest.mark.parametrize("entry_point", [BACKWARD, MODULE, INSTALL])
@pytest.mark.parametrize("N", [1024, 1000])
def test_no_rows_give_zeros_for_dw_and_leave_what_accumulates(
    package: Package, entry_point: str, N: int
) -> None:
    x = torch.empty(0, N, device="cuda", dtype=torch.bfloat16)
    weight = randn(N, seed=1)
    if entry_point == BACKWARD:
        rstd = torch.empty(0, 1, device="cuda")
        dx, dw = package.rmsnorm_backward(x, x, rstd, weight)
        main_grad = torch.ones(N, device="cuda")
        package.rmsnorm_backward(x, x, rstd, weight, dw_out=main_grad, accumulate=True)
        assert torch.equal(main_grad, torch.ones_like(main_grad))
    else:
        x.requires_grad_(), weight.requires_grad_()
        with package.installed() if entry_point == INSTALL else nullcontext():
            y = normed(package, entry_point, x, weight)
            dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == (0, N)
    assert torch.equal(dw, torch.zeros_like(weight))


@pytest.mark.parametrize("entry_point", [BACKWARD, MODULE, MODULE_WITH_RESIDUAL])
def test_training_under_autocast_repeats_its_bits(package: Package, entry_point: str) -> None:
    """Layers in fp32 whose products autocast makes bf16: rows of both dtypes, weights in fp32."""
    norm, fused = norm_of(package, entry_point)

    def run() -> list[torch.Tensor]:
        one = Training(norm, fused, "cuda", torch.float32, width=1024, heads=8, tokens=32)
        losses = []
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16):
                losses.append(one.step())
        return losses + one.state()

    first = run()
    assert equal_bits(first, run())
    assert torch.isfinite(first[4]) and float(first[4]) < float(first[0])


def test_autocast_changes_nothing_about_a_norm(package: Package) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = randn(99, 1024, dtype=dtype).requires_grad_()
        weight = randn(1024, seed=1, dtype=torch.float32).requires_grad_()
        wanted = package.rms_norm(x, weight, 1e-6)
        with torch.autocast("cuda", torch.float16):
            found = package.rms_norm(x, weight, 1e-6)
            both = grads(found, [x, weight])
        assert found.dtype == dtype and torch.equal(found, wanted)
        assert equal_bits(both, grads(wanted, [x, weight]))


def penalty(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a gradient penalty."""
    (dx,) = torch.autograd.grad(y.float().square().sum(), leaves[0], create_graph=True)
    return list(torch.autograd.grad(dx.float().square().sum(), leaves))


@pytest.mark.parametrize("entry_point", [MODULE, INSTALL])
def test_second_derivatives_are_those_of_the_formula(package: Package, entry_point: str) -> None:
    """PyTorch alone computes them through `install()`: with create_graph its backward is another
    operator."""
    x = randn(33, 1024, dtype=torch.float32).requires_grad_()
    weight = randn(1024, seed=1, dtype=torch.float32).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    rstd = torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-6)
    wanted = penalty(wide[0] * rstd * wide[1], wide)
    with package.installed() if entry_point == INSTALL else nullcontext():
        found = penalty(normed(package, entry_point, x, weight), [x, weight])
    for one, two in zip(found, wanted, strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-5


def test_second_derivative_of_the_backward_is_refused(package: Package) -> None:
    x = randn(33, 1024).requires_grad_()
    norm = function_norm(package)(1024).to("cuda", torch.bfloat16)
    (dx,) = torch.autograd.grad(norm(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="of its own: differentiate the norm"):
        dx.float().square().sum().backward()


@pytest.mark.parametrize("entry_point", [MODULE, INSTALL])
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_tensor_gets_no_gradient_and_the_other_keeps_its_bits(
    package: Package, entry_point: str, frozen: str
) -> None:
    leaves = {"x": randn(99, 1024), "weight": randn(1024, seed=1)}

    def run(*wanted: str) -> list[torch.Tensor]:
        given = {k: t.detach().requires_grad_(k in wanted) for k, t in leaves.items()}
        with routed_and_served(package) if entry_point == INSTALL else nullcontext():
            normed(package, entry_point, **given).backward(randn(99, 1024, seed=2))
        assert all((given[k].grad is not None) is (k in wanted) for k in given)
        return [t.grad for t in given.values() if t.grad is not None]

    other = "weight" if frozen == "x" else "x"
    both = run("x", "weight")
    assert equal_bits(run(other), [both[list(leaves).index(other)]])


def test_inference_mode_gives_the_same_result_without_a_graph(package: Package) -> None:
    x, weight = randn(99, 1024), torch.nn.Parameter(randn(1024, seed=1))
    given = (randn(99, 1024, seed=2), x, torch.ones(99, 1, device="cuda"), weight.detach())
    both = package.rmsnorm_backward(*given)
    wanted = package.rms_norm(x.detach().requires_grad_(), weight, 1e-6)
    with torch.inference_mode():
        found = package.rms_norm(x, weight, 1e-6)
        dx, dw = package.rmsnorm_backward(*given)
    assert found.is_inference() and not found.requires_grad
    assert torch.equal(found, wanted.detach())
    assert dx.is_inference() and dw.is_inference()
    assert equal_bits([dx, dw], list(both))


FORKED = """
import multiprocessing, sys, warnings
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
from normforge.api import Package
warnings.filterwarnings("error", message=".*using (PyTorch's own|the formula)")
package = Package(Path({folder!r}))
package.install()
package.rms_norm(torch.ones(2, 8), torch.ones(8))

def train(queue):
    generator = torch.Generator().manual_seed(0)
    x, dy, weight = (
        torch.randn(n, generator=generator).bfloat16().cuda()
        for n in ((99, 1024), (99, 1024), (1024,))
    )
    x.requires_grad_(), weight.requires_grad_()
    package.rms_norm(x, weight, 1e-6).backward(dy)
    found = [x.grad.float().cpu(), weight.grad.float().cpu()]
    x.grad = weight.grad = None
    package._calls.recent = ()
    torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6).backward(dy)
    assert package._calls.recent, "served by PyTorch's own kernel"
    queue.put([t.numpy() for t in (*found, x.grad.float().cpu(), weight.grad.float().cpu())])

assert not torch.cuda.is_initialized(), "the import has left CUDA alone"
context = multiprocessing.get_context("fork")
queue = context.Queue()
children = [context.Process(target=train, args=(queue,)) for _ in range(2)]
for child in children:
    child.start()
results = [queue.get(timeout=120) for _ in children]
for child in children:
    child.join()
train(queue)
results.append(queue.get(timeout=120))
first = results[0]
assert all((a == b).all() for other in results[1:] for a, b in zip(first, other))
for ours, routed in zip(first[:2], first[2:]):  # two forwards, whose rstd may differ
    assert abs(ours - routed).max() <= 2**-7 * abs(ours).max()
print("done")
"""


def test_children_forked_after_the_import_train_like_their_parent(package: Package) -> None:
    script = FORKED.format(root=str(ROOT), folder=str(package.folder))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "done", done.stderr[-3000:]


def test_eager_checkpointed_compiled_and_routed_norms_in_one_step(package: Package) -> None:
    """One after another, with one weight: right, and the same in the next step."""
    weight = randn(1024, seed=1).requires_grad_()
    dy = randn(99, 1024, seed=2)
    compiled: Any = torch.compile(package.rms_norm)

    def run() -> list[torch.Tensor]:
        x = randn(99, 1024).requires_grad_()
        y = package.rms_norm(x, weight, 1e-6)
        y = checkpoint(package.rms_norm, y, weight, 1e-6, use_reentrant=False)
        y = compiled(y, weight, 1e-6)
        with routed_and_served(package):
            y = functional.rms_norm(y, (1024,), weight, 1e-6)
            return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    found = run()
    assert equal_bits(found, run())
    wide = [t.double().detach().requires_grad_() for t in (randn(99, 1024), weight)]
    y = wide[0]
    for _ in range(4):
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * wide[1]
    wanted = [y.detach(), *torch.autograd.grad(y, wide, dy.double())]
    for one, two in zip(found, wanted, strict=True):
        assert float((one - two).norm() / two.norm()) < 2**-6


def test_graphs_that_are_gone_give_back_their_words(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that captures again and again, and replays each graph."""
    slabs: list[int] = []
    zeroed_slab = workspace._zeroed_slab
    monkeypatch.setattr(
        workspace, "_zeroed_slab", lambda size: slabs.append(size) or zeroed_slab(size)
    )
    x, weight = randn(68, 1024), randn(1024, seed=1)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wanted = list(package.rmsnorm_backward(x, x, rstd, weight))
    taken = []
    for _ in range(60):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # One call has a few lines: so many that every capture fills more than a slab.
            found = [package.rmsnorm_backward(x, x, rstd, weight) for _ in range(600)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(equal_bits(list(each), wanted) for each in found[::100])
        del found
        graph.reset()
        time.sleep(0.02)  # a thread of the driver's says that it is gone
        taken.append(sum(slabs))
    assert taken[0] > 0
    assert taken[-1] <= 3 * taken[0]
