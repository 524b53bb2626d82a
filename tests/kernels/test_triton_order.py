"""The order in which Triton adds is the one that tests/support/triton_order.py has in PyTorch.

Needs Triton 3.5 to 3.9 (pip install triton), and no GPU but for the last test: the order is read
off the PTX, and one contraction off the machine code."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from generator.operations.operation import TORCH_DTYPE
from generator.paths import GENERATED
from generator.target import Target
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.frontends.matching import form_of
from tests.support.triton_order import OF_THREAD, fused, sum_of_thread

triton = pytest.importorskip("triton", reason="needs Triton (pip install triton)")

from tests.support.triton_norm import compiled, rms_norm  # noqa: E402

try:
    FORM = form_of("vllm-triton" + ".".join(triton.__version__.split(".")[:2]))
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

KERNELS = [(dtype, whole) for dtype in ("bf16", "fp16", "fp32") for whole in (True, False)]
INSTRUCTION = re.compile(r"^\s+(?:@%p\d+ )?([a-z][\w.:]*)\s+(.*?);", re.MULTILINE)
of_kernels = pytest.mark.parametrize(("dtype", "whole"), KERNELS)


def instructions(ptx: str) -> list[tuple[str, list[str]]]:
    """Names, and operands without brackets, of the kernel."""
    found = INSTRUCTION.findall(ptx)
    return [(name, re.findall(r"[%\w.+-]+", text)) for name, text in found]


def evaluated(ptx: str, elements: list[torch.Tensor]) -> torch.Tensor:
    """Return what a thread sends to others first: its sum of a tile, of the elements that it
    loads."""
    values: dict[str, torch.Tensor] = {}
    words: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # two elements of 16 bits
    left = list(elements)
    for name, (target, *given) in instructions(ptx):
        if name.startswith("ld.global.v4") and re.search(r"cvt\.f32\.b?f16", ptx):
            for register in (target, *given[:3]):
                words[register] = (left.pop(0), left.pop(0))
        elif name.startswith("ld.global"):
            for register in (target, *given[: 3 if "v4" in name else 0]):
                values[register] = left.pop(0)
        elif name == "mov.b32" and given[-1] in words:
            values[target], values[given[0]] = words[given[-1]]
        elif name == "mov.b32" and len(given) == 2:
            words[target] = (values[given[0]], values[given[1]])
        elif name.startswith(("cvt.f32.bf16", "cvt.f32.f16", "selp.f32")):
            values[target] = values[given[0]]
        elif name == "mul.f32":
            values[target] = values[given[0]] * values[given[1]]
        elif name == "fma.rn.f32":
            values[target] = fused(*(values[register] for register in given))
        elif name == "add.f32":
            values[target] = values[given[0]] + values[given[1]]
        elif name.startswith("shfl"):
            assert left == []
            return values[given[0]]
    raise AssertionError("no shuffle")


@of_kernels
def test_thread_has_runs_of_16_bytes(dtype: str, whole: bool) -> None:
    text = compiled(dtype, whole).asm["ttgir"]
    load = re.search(r"tt\.load .*?, (#\w+)>", text)
    assert load is not None
    run = 4 if dtype == "fp32" else 8
    layout = rf"sizePerThread = \[{run}\], threadsPerWarp = \[32\], warpsPerCTA = \[4\]"
    assert re.search(
        rf"^{load[1]} = #ttg\.blocked<{{{layout}, order = \[0\]}}>", text, re.MULTILINE
    )


@of_kernels
def test_thread_adds_its_squares_in_this_order(dtype: str, whole: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (OF_THREAD, 4096)
    exponents = torch.randint(-6, 7, shape, generator=generator)
    numbers = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    elements = numbers.to(TORCH_DTYPE[dtype]).float().unbind()
    contracted = (4 if dtype == "fp32" else 8) if whole else 0
    found = evaluated(compiled(dtype, whole).asm["ptx"], list(elements))
    assert torch.equal(found, sum_of_thread(elements, FORM, contracted))
    for other in {"tiles_in_turn", "tiles_in_pairs"} - {FORM}:
        assert not torch.equal(found, sum_of_thread(elements, other, contracted))


@of_kernels
def test_lanes_then_warps_add_in_butterflies_and_tiles_in_turn(dtype: str, whole: bool) -> None:
    found = instructions(compiled(dtype, whole).asm["ptx"])
    first = next(i for i, (name, _) in enumerate(found) if name.startswith("shfl"))
    wanted = r"shfl\.sync\.bfly|(add|mul|fma|div|sqrt)\.\S*f32|(ld|st)\.shared"
    sums = [(name, given) for name, given in found[first:] if re.match(wanted, name)]
    masks = [given[2] for name, given in sums if name.startswith("shfl")]
    assert masks == ["16", "8", "4", "2", "1", "2", "1"]
    for (name, given), (then, added) in pairwise(sums):
        if name.startswith("shfl"):
            assert then == "add.f32" and set(added[1:]) == set(given[:2])
    names = [name.split(".")[0] for name, _ in sums if not name.startswith(("ld", "st"))]
    butterflies = ["shfl", "add"] * 7
    assert names[:14] == butterflies
    assert names[14:19] == ["add", "div", "add", "sqrt", "div"]
    total, mean, shifted, root, rstd = [given for name, given in sums if "shared" not in name][
        14:19
    ]
    assert total[0] == total[1] == mean[1]
    assert mean[0] in shifted[1:] and root[1] == shifted[0] and rstd[2] == root[0]
    assert [name for name, _ in sums if name[:3] in ("div", "sqr")] == [
        "div.full.f32",
        "sqrt.approx.ftz.f32",
        "div.full.f32",
    ]
    assert set(names[19:]) == {"mul"}


@of_kernels
def test_ptxas_contracts_the_division_with_the_addition_of_eps(
    dtype: str, whole: bool, tmp_path: Path
) -> None:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    (tmp_path / "kernel.cubin").write_bytes(compiled(dtype, whole).asm["cubin"])
    command = [str(tool), "-c", str(tmp_path / "kernel.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, root, after = text.partition("MUFU.SQRT")
    assert root
    names = re.findall(r"(?<= )(MUFU\.\w+|FFMA|FADD|FMUL)(?= )", before)
    assert names[-2:] == ["MUFU.RCP", "FFMA"]
    assert re.findall(r"(?<= )MUFU\.\w+", after) == ["MUFU.RCP"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("N", [16, 48, 1000, 1023, 1024, 1040, 3001, 4096, 5120, 8200, 16384])
def test_gpu_bits_are_those_of_triton(here: Target, dtype: str, N: int) -> None:
    if here.arch != "sm_90a":
        pytest.skip(f"the order was read off for sm_90a, and {here} is {here.arch}")
    package = BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")
    torch.manual_seed(N)
    for M in (1, 7, 1000):
        exponents = torch.randint(-6, 7, (M, N), device="cuda")
        exponents[1::2] -= 13  # a mean square that is not much larger than eps
        x = torch.ldexp(torch.randn(M, N, device="cuda"), exponents).to(TORCH_DTYPE[dtype])
        weight = (1 + 0.1 * torch.randn(N, device="cuda")).to(x.dtype)
        for eps in (1e-6, 1e-5):
            found = package.rms_norm(x, weight, eps, matches="vllm")
            theirs = rms_norm(x, weight, eps)
            rows = (found.view(torch.uint8) != theirs.view(torch.uint8)).any(1)
            assert int(rows.sum()) == 0, f"rows {rows.nonzero().flatten()[:5].tolist()} of {M}"
