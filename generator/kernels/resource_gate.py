"""Decides about a compiled variant without a GPU: may it run, and which others equal it?"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from generator.kernels.forward import ForwardVariant
from generator.kernels.machine_code import illegal_copies
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant, Variant
from generator.problem import Problem
from generator.result import Result
from generator.target import Target
from normforge.spec import FORWARD_KERNELS, ForwardSpec, KernelSpec, Launch, plan_launch


def refuse(
    variant: AnyVariant, compiled: Compiled, problem: Problem, target: Target
) -> Result | None:
    """The result of a variant that must not run on the target, None for one that may."""
    if compiled.error:
        lines = [line.strip() for line in compiled.error.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), " ".join(lines))
        return Result("compile_error", note=first)
    if illegal := illegal_copies(compiled.cubin):
        fault = f"NVRTC {compiled.nvrtc} wrote {illegal} illegal instructions (cp.async, policy)"
        return Result("compile_error", note=fault)
    if isinstance(variant, ForwardVariant):
        fault = forward_fault(variant, compiled, target)
    else:
        launch = plan_launch(variant.spec(target.sms), problem.M)
        fault = resource_fault(variant, compiled, launch, target)
    return Result("resource", note=fault) if fault else None


def forward_fault(variant: ForwardVariant, compiled: Compiled, target: Target) -> str:
    """Return what `resource_fault` does, of a forward, whose grid need not fit at once."""
    if fault := _spilled(compiled):
        return fault
    for name in FORWARD_KERNELS:
        used = compiled.kernels[name]
        smem_bytes = variant.smem_bytes + used.smem_bytes
        if not target.occupancy(variant.threads, used.registers, smem_bytes, used.barriers):
            return f"no CTA fits an SM of {target} ({used.registers} registers)"
    return ""


def resource_fault(variant: Variant, compiled: Compiled, launch: Launch, target: Target) -> str:
    """Return why the compiled variant must not run on the target, in one sentence; "" when it
    may."""
    if fault := _spilled(compiled):
        return fault
    if compiled.cap_ignored:
        return f"ptxas did not respect the register cap of {variant['register_cap']}"
    main = compiled.main
    cap = variant["register_cap"]
    if cap and main.registers > cap:
        return f"uses {main.registers} registers, the cap is {cap}"
    threads = variant.cta_threads
    if main.registers * threads > target.registers_per_sm:
        return f"{threads} threads with {main.registers} registers do not fit one SM"
    smem_bytes = variant.smem_bytes + main.smem_bytes
    fit = target.occupancy(threads, main.registers, smem_bytes, main.barriers)
    if fit == 0:
        return f"no CTA fits an SM of {target} ({main.registers} registers)"
    wanted = variant["ctas_per_sm"]
    # A grid of as many CTAs as the rows need does not have to fit at once.
    if launch.grid > fit * target.sms and variant["grid"] != "rows":
        used = f"{main.registers} registers, {main.barriers} barriers"
        return f"{wanted} CTAs per SM wanted, {fit} fit ({used})"
    return ""


def _spilled(compiled: Compiled) -> str:
    if compiled.spills:
        return f"spills or stack: {compiled.spills} bytes per thread"
    return ""


def identity(variant: AnyVariant, compiled: Compiled, problem: Problem, target: Target) -> str:
    """Sixteen hex digits over the machine code and the launch: variants equal in it do the same
    work on the same number of rows, so that one measurement serves all."""
    spec = variant.spec(target.sms)
    # The fields that are left out of `rest` act through the launch alone.
    rest: str
    launch: Launch | int
    if isinstance(spec, ForwardSpec):
        launch = spec.grid(problem.M)
        rest = repr(replace(spec, name="", ctas_per_sm=0, sms=0))
    else:
        launch = plan_launch(spec, problem.M)
        rest = _as_first_recorded(replace(spec, name="", ctas_per_sm=0, even_grid=False, sms=0))
    text = f"({compiled.digest!r}, {rest}, {launch})"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_first_recorded(spec: KernelSpec) -> str:
    """The facts under the names that they had when the first records were made, so that these stay
    equal to those of today."""
    ways = f"accumulates={spec.way == 'on_arrival'}, turns={spec.way == 'in_turns'}"
    return (
        repr(spec)
        .replace("partial_columns=", "columns=")
        .replace("batch_rows=", "rows_in_flight=")
        .replace(" levels=", f" {ways}, levels=")
    )
