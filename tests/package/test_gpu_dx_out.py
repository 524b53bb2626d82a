"""The committed packages on a GPU: dx over dy has the bits of a dx of its own, and takes no memory
where the kernel may write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.paths import GENERATED
from normforge.api import Package
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.serve.options import may_overwrite_dy
from normforge.table import ITEMSIZE, Table, Tuned, runs_on

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("served_by_kernels")]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPERATIONS: dict[str, Callable[[Path], Package]] = {
    "rmsnorm_backward": Package,
    "rmsnorm_invariant_backward": BatchInvariantPackage,
}
MOST_BYTES = 1 << 30
"""The most bytes of x."""


def committed(operation: str) -> Package:
    """The package whose kernels run here."""
    capability = torch.cuda.get_device_capability()
    for folder in sorted(GENERATED.glob(f"*/{operation}")):
        if runs_on(Table.load(folder).target["arch"], capability):
            return OPERATIONS[operation](folder)
    pytest.skip(f"no committed package of {operation} runs on {capability}")


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


def arguments(M: int, N: int, dtype: str = "bf16", weight: str = "bf16") -> dict[str, Any]:
    dy, x = (randn(M, N, dtype=DTYPES[dtype], seed=seed) for seed in range(2))
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return {"dy": dy, "x": x, "rstd": rstd, "weight": randn(N, dtype=DTYPES[weight], seed=2)}


def check(package: Package, given: dict[str, Any], in_place: bool | None = None) -> None:
    """dx apart and dx over dy against a plain call. in_place: whether dx over dy takes no memory;
    None where it may."""
    x, dy = given["x"], given["dy"]
    wanted = package.rmsnorm_backward(**given)
    kept = dy.clone()
    for dx_out in (torch.full(x.shape, torch.nan, dtype=x.dtype, device="cuda"), dy):
        for _ in range(2):  # prepared, and known
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = package.rmsnorm_backward(**given, dx_out=dx_out)
            taken = torch.cuda.max_memory_allocated() - before
            assert found[0] is dx_out
            for result, exact in zip(found, wanted, strict=True):
                assert (result is None and exact is None) or torch.equal(result, exact)
            if in_place is not None:
                assert (taken < x.numel() * x.element_size()) is (in_place or dx_out is not dy)
            dy.copy_(kept)


def fits(entry: Tuned) -> bool:
    spec = entry.kernel.spec
    return (
        not (spec.offset or spec.residual)
        and entry.M * entry.N * ITEMSIZE[entry.dtype] <= MOST_BYTES
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_tuned_shape_writes_dx_over_dy(operation: str) -> None:
    package = committed(operation)
    seen = set()
    for entry in filter(fits, package.table.tuned):
        # dw has to be less than dx, for the memory to tell.
        given = arguments(entry.M, entry.N, entry.dtype, entry.weight_dtype)
        check(package, given, in_place=may_overwrite_dy(entry.kernel.config))
        seen.add(entry.kernel.config["pipeline"])
    assert {"async", "bulk"} <= seen


@pytest.mark.parametrize("M", [1, 5, 777])
@pytest.mark.parametrize("N", [1, 7, 100, 414, 1000, 1001, 4096, 8190, 8191])
@pytest.mark.parametrize(
    ("dtype", "weight"), [("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32")]
)
def test_widths_of_fallback_kernels(M: int, N: int, dtype: str, weight: str) -> None:
    check(committed("rmsnorm_backward"), arguments(M, N, dtype, weight))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("N", [1024, 4096])
def test_layouts_and_options(operation: str, N: int) -> None:
    package = committed(operation)
    plain = arguments(777, N)
    x, dy = plain["x"], plain["dy"]
    odd = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(777, N)
    packed = torch.stack([x, x, x], 1)
    for change in (
        {"x": torch.cat([x, x], 1)[:, N:]},
        {"x": x.t().contiguous().t()},
        {"x": packed[:, 1]},
        {"x": x.view(7, 111, N), "dy": dy.view(7, 111, N)},
        {"dy": odd.copy_(dy)},
        {"need_dw": False},
        {"dw_dtype": torch.float32},
    ):
        check(package, plain | change)
    if operation == "rmsnorm_invariant_backward":
        return  # it has no kernels for other options
    for change in (
        {"weight": None},
        {"weight_offset": 1.0},
        {"dresidual": randn(777, N, dtype=x.dtype, seed=3)},
        {"dresidual": randn(777, N, dtype=torch.float32, seed=3)},
    ):
        check(package, plain | change)


def test_dx_out_at_an_odd_address_and_a_weight_per_head() -> None:
    package = committed("rmsnorm_backward")
    given = arguments(777, 1024)
    wanted = package.rmsnorm_backward(**given)
    odd = torch.empty(777 * 1024 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(777, 1024)
    found = package.rmsnorm_backward(**given, dx_out=odd)
    assert found[0] is odd and torch.equal(odd, wanted[0]) and torch.equal(found[1], wanted[1])
    heads = arguments(777 * 4, 128)
    heads |= {name: heads[name].view(777, 4, -1) for name in ("dy", "x", "rstd")}
    heads["weight"] = randn(4, 128, dtype=torch.bfloat16, seed=5)
    check(package, heads)


def test_captured_calls_write_dx_over_dy() -> None:
    package = committed("rmsnorm_backward")
    given = arguments(4096, 4096)
    wanted = package.rmsnorm_backward(**given)
    dy = given["dy"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, dw = package.rmsnorm_backward(**given | {"dy": dy}, dx_out=dy)
    for _ in range(3):
        dy.copy_(given["dy"])
        graph.replay()
        assert torch.equal(dy, wanted[0]) and torch.equal(dw, wanted[1])


def test_repeated_calls_over_dy_repeat_their_bits() -> None:
    package = committed("rmsnorm_backward")
    for entry in filter(fits, package.table.tuned[::8]):
        given = arguments(entry.M, entry.N, entry.dtype, entry.weight_dtype)
        wanted = package.rmsnorm_backward(**given)
        dy = given["dy"].clone()
        for _ in range(20):
            dy.copy_(given["dy"])
            _, dw = package.rmsnorm_backward(**given | {"dy": dy}, dx_out=dy)
            assert torch.equal(dy, wanted[0]) and torch.equal(dw, wanted[1])
