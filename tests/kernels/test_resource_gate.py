"""The decisions about a compiled variant without a GPU, beside what the compiler's tests show."""

from __future__ import annotations

from dataclasses import replace

from generator.kernels.nvrtc import Compiled, compile_options
from generator.kernels.ptxas import Resources
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import make_variant
from normforge.spec import MAIN_KERNEL, SUM_KERNEL
from tests.support.searches import DETERMINISTIC
from tests.support.synthetic import PROBLEM, TARGET

VARIANT = make_variant(DETERMINISTIC[0], PROBLEM)
FITS = Compiled(TARGET.arch, "", b"cubin", {MAIN_KERNEL: Resources(32, 0, 0, 0)}, "13.0", False, "")


def test_static_shared_memory_counts() -> None:
    assert refuse(VARIANT, FITS, PROBLEM, TARGET) is None
    room = TARGET.smem_per_cta - VARIANT.smem_bytes
    large = replace(FITS, kernels={MAIN_KERNEL: Resources(32, 0, 0, room + 1)})
    refused = refuse(VARIANT, large, PROBLEM, TARGET)
    assert refused is not None and refused.outcome == "resource"


def test_spills_of_any_kernel_count() -> None:
    for spilling in (Resources(32, 8, 0, 0), Resources(32, 0, 16, 0)):
        for place in (MAIN_KERNEL, SUM_KERNEL):
            kernels = {MAIN_KERNEL: Resources(32, 0, 0, 0), SUM_KERNEL: Resources(32, 0, 0, 0)}
            refused = refuse(
                VARIANT, replace(FITS, kernels={**kernels, place: spilling}), PROBLEM, TARGET
            )
            assert refused is not None and "spills or stack" in refused.note


def test_contraction_is_off_and_the_report_is_on() -> None:
    """The bits must not depend on what the compiler likes to contract, and without ptxas's report
    nobody would see a spill."""
    for cap in (0, 64):
        options = compile_options("sm_90a", cap)
        assert "--fmad=false" in options and "--ptxas-options=-v" in options
        assert "--no-cache" in options
        assert ("--maxrregcount=64" in options) == bool(cap)
        assert not [o for o in options if "fast" in o or "ftz" in o]
