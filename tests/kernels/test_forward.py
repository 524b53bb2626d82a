"""Forward kernels compile for every architecture, and what must not run is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.resource_gate import forward_fault, refuse
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards, forward_variants
from generator.target import load_targets
from normforge.spec import FORWARD_KERNELS
from tests.support.forward import H200, of_kind


@pytest.mark.parametrize("arch", sorted({t.arch for t in load_targets().values()}))
def test_preferred_and_fallback_kernels_compile_without_spills_for(arch: str) -> None:
    target = next(t for t in load_targets().values() if t.arch == arch)
    shapes = ("4096x128:bf16", "4096x4096:bf16:fp32", "4096x16384:fp32")
    variants = [forward_variants(Problem.parse(shape), target)[0] for shape in shapes]
    variants += fallback_forwards((("fp16", "fp32"),))[:3]
    for variant in variants:
        compiled = compile_variant(variant, arch)
        assert forward_fault(variant, compiled, target) == "", f"{variant} for {arch}"
        assert set(compiled.kernels) == set(FORWARD_KERNELS)


def test_a_kernel_that_spills_does_not_compile_or_does_not_fit_is_refused() -> None:
    greedy = ForwardVariant(65536, "bf16", "bf16", "registers", 1024, 1, 1, 16)
    assert "spills" in forward_fault(greedy, compile_variant(greedy, H200.arch), H200)
    fine = of_kind("4096x4096:bf16")
    broken = Compiled(H200.arch, "", b"", {}, "13", False, "", "error: no")
    refused = refuse(fine, broken, Problem.parse("4096x4096:bf16"), H200)
    assert refused is not None
    assert (refused.outcome, refused.note) == ("compile_error", "error: no")
    large = dict.fromkeys(FORWARD_KERNELS, Resources(255, 0, 0, 0))
    wide = replace(fine, threads_per_row=1024)
    compiled = Compiled(H200.arch, "", b"x", large, "13", False, "")
    assert "no CTA fits" in forward_fault(wide, compiled, H200)
