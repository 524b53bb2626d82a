"""What the search asks of a compiler and of a GPU, and what it decides without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, runtime_checkable

from generator.compile import Compiled
from generator.problem import Problem
from generator.result import Result
from generator.runtime.plan import Launch, plan_launch
from generator.target import Target
from generator.variant import Variant


class Pool(Protocol):
    """Compiles variants in the background; generator.compile_pool.CompilePool is one."""

    processes: int

    def submit(self, variant: Variant) -> Future[Compiled]: ...

    def result(self, variant: Variant, future: Future[Compiled]) -> Compiled: ...

    def code(self, variant: Variant) -> str:
        """Digest of what `submit` compiles (`generator.revision.code_digest`), without compiling:
        variants equal in it are the same machine code."""
        ...


class Evaluator(Protocol):
    """Answers for compiled variants. A bad variant is a Result, never an exception."""

    @property
    def evidence(self) -> str:
        """`measured` or `predicted`."""
        ...

    def evaluate(
        self, problem: Problem, variant: Variant, compiled: Compiled, best_us: float | None
    ) -> Result:
        """Accuracy, determinism and time. best_us: µs of the best variant so far, with which a slow
        one may be given up early."""
        ...

    def finals(self, problem: Problem, entries: list[tuple[Variant, Compiled]]) -> Sequence[Result]:
        """Interleaved times and the full determinism checks, in the order of the entries."""
        ...


@runtime_checkable
class Sifting(Evaluator, Protocol):
    """An evaluator that can time many candidates side by side: that tells more than their trials,
    each of which had its own moment."""

    def sift(self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]]) -> list[float]:
        """Ratios to the floor, without any check; nothing where no clean times can be had."""
        ...


@runtime_checkable
class Confirming(Evaluator, Protocol):
    """An evaluator with one more check, too slow for all finalists: the one that is to win gets it,
    and when it fails, the one that is to win then."""

    def confirm(self, problem: Problem, variant: Variant, result: Result) -> Result:
        """The result of a finalist with what the check found."""
        ...


def refuse(variant: Variant, compiled: Compiled, problem: Problem, target: Target) -> Result | None:
    """The result of a variant that must not run on the target, None for one that may."""
    if compiled.error:
        lines = [line.strip() for line in compiled.error.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), " ".join(lines))
        return Result("compile_error", note=first)
    launch = plan_launch(variant.spec(target.sms), problem.M)
    fault = resource_fault(variant, compiled, launch, target)
    return Result("resource", note=fault) if fault else None


def resource_fault(variant: Variant, compiled: Compiled, launch: Launch, target: Target) -> str:
    """Why the compiled variant must not run on the target: one sentence, or "" when it may."""
    if compiled.spills:
        return f"spills or stack: {compiled.spills} bytes per thread"
    if compiled.cap_ignored:
        return f"ptxas did not respect the register cap of {variant['register_cap']}"
    main = compiled.main
    cap = variant["register_cap"]
    if cap and main.registers > cap:
        return f"uses {main.registers} registers, the cap is {cap}"
    if main.registers * variant.threads > target.registers_per_sm:
        return f"{variant.threads} threads with {main.registers} registers do not fit one SM"
    smem_bytes = variant.smem_bytes + main.smem_bytes
    fit = target.occupancy(variant.threads, main.registers, smem_bytes, main.barriers)
    if fit == 0:
        return f"no CTA fits an SM of {target} ({main.registers} registers)"
    wanted = variant["ctas_per_sm"]
    if launch.grid > fit * target.sms:
        used = f"{main.registers} registers, {main.barriers} barriers"
        return f"{wanted} CTAs per SM wanted, {fit} fit ({used})"
    return ""


def identity(variant: Variant, compiled: Compiled, problem: Problem, target: Target) -> str:
    """Sixteen hex digits over the machine code and the launch: variants equal in it do the same
    work on the same number of rows, so that one measurement serves all."""
    spec = variant.spec(target.sms)
    launch = plan_launch(spec, problem.M)
    # These fields act through the launch alone.
    rest = replace(spec, name="", ctas_per_sm=0, even_grid=False, sms=0)
    return hashlib.sha256(repr((compiled.digest, rest, launch)).encode()).hexdigest()[:16]
