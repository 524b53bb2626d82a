"""Chooses the forward kernels of a package: measured where the GPU is, else by a rule.

The space of a shape is so small that all of it is compiled and timed; there is no study.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from threading import Lock
from typing import Any

import torch

from generator.emulate.build import HostError, find_compiler
from generator.emulate.forward import FORWARD_SCHEDULES
from generator.errors import NormforgeError, ProblemError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.forward import measure_forwards
from generator.evaluate.gpu.supervisor import Supervisor
from generator.evaluate.verify.determinism import RUNS
from generator.kernels.code_digest import digest_of_all
from generator.kernels.compile_pool import CompilePool
from generator.kernels.forward import CompiledForward, ForwardVariant
from generator.kernels.nvrtc import nvrtc_version
from generator.operations import RMSNORM_FORWARD
from generator.package.entries import Entry, Forwards, recorded_bits
from generator.package.fallback_kernels import DTYPES
from generator.problem import Problem
from generator.result import Result
from generator.space.forward_space import fallback_forwards, forward_variants
from generator.studies.records import now
from generator.target import Target
from generator.tuner.forward_compiler import ForwardCompiler
from generator.tuner.plan import longest_first
from normforge.table import ForwardTable

TIE = 0.01
"""Forwards whose ratios are this close, relative to the best, are equal."""

Choices = Callable[[Problem, Target], list[ForwardVariant]]
"""The variants of a shape that there are to choose from, the preferred one first."""


def shapes_to_choose(
    problems: Sequence[Problem],
    target: Target,
    devices: Sequence[int],
    known: ForwardTable | None,
    choices: Choices = forward_variants,
) -> list[Problem]:
    """The shapes (M, N and dtypes) whose forward `tune_forwards` chooses, in its order: all but
    those whose choice in `known` was made among the same code. Measured are the longest first, so
    that all GPUs end at about the same time."""
    kept = set()
    for old in known.tuned if known else ():
        shape = Problem(old.M, old.N, old.dtype, old.weight_dtype)
        fresh = old.provenance.get("code") == space_code(shape, target, choices)
        if fresh and (not devices or old.evidence == "measured"):
            kept.add(shape)
    found = [shape for shape in _shapes(problems) if shape not in kept]
    return longest_first(found) if devices else found


def space_code(problem: Problem, target: Target, choices: Choices = forward_variants) -> str:
    """Digest of the code that a shape's forward is chosen from."""
    return digest_of_all(choices(problem, target), target.arch)


def _shapes(problems: Sequence[Problem]) -> list[Problem]:
    """Without the options of a backward, which its forward does not know."""
    return list(dict.fromkeys(Problem(p.M, p.N, p.dtype, p.weight_dtype) for p in problems))


def forwards_to_compile(
    shapes: Sequence[Problem],
    target: Target,
    fallbacks: Sequence[ForwardVariant],
    choices: Choices = forward_variants,
) -> list[ForwardVariant]:
    """All that `tune_forwards` compiles to measure these shapes, in the order in which it needs
    them: each source once."""
    found = list(fallbacks)
    for shape in shapes:
        found += choices(shape, target)
    return list({variant.id: variant for variant in found}.values())


def open_gpu(device: int, target: Target) -> MeasuredEvaluator:
    """Raises NormforgeError where there is none."""
    return MeasuredEvaluator(target, Supervisor(device), RMSNORM_FORWARD)


def _close(gpu: Future[MeasuredEvaluator]) -> None:
    if gpu.exception() is None:
        gpu.result().close()


def tune_forwards(
    problems: Sequence[Problem],
    target: Target,
    devices: Sequence[int] = (),
    *,
    known: ForwardTable | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
    fallbacks: Sequence[ForwardVariant] | None = None,
    choices: Choices = forward_variants,
    tell: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[], None] = lambda: None,
) -> Forwards:
    """The forwards for these shapes (M, N and dtypes count) and for any other. A shape for which no
    kernel compiles or passes its checks is left to the fallback kernels, and `say` is told.

    devices: indices of GPUs that share the shapes, none to choose by `preference`. known: a table
    whose choices stay while the sources are the same; predicted ones are measured where possible.
    processes: compilers at a time. fallbacks: the forwards for any other shape, default all.
    choices: those for a shape, default all. tell: is told how many kernels and shapes are done, and
    of how many. check: is called before each shape. After a KeyboardInterrupt, from it or from
    Ctrl-C, the rest is left out, and `say` is told how many shapes that is.
    """
    waiting = shapes_to_choose(problems, target, devices, known, choices)
    fallbacks = fallback_forwards(DTYPES) if fallbacks is None else fallbacks
    with ExitStack() as stack:
        # Their processes take seconds to start, in which the kernels are compiled.
        busy = devices[: len(waiting)]
        threads = stack.enter_context(ThreadPoolExecutor(max(1, len(busy))))
        gpus = [threads.submit(open_gpu, device, target) for device in busy]
        for gpu in gpus:
            stack.callback(_close, gpu)
        pool = stack.enter_context(CompilePool(target.arch, processes))
        compiler = stack.enter_context(closing(ForwardCompiler(pool, target, say)))
        if gpus:
            compiler.start(forwards_to_compile(waiting, target, fallbacks, choices))
        steps = len(fallbacks) + len(waiting)
        tell(0, steps)
        compiler.start(fallbacks)
        compiled = []
        for done, variant in enumerate(fallbacks, 1):
            compiled += compiler.usable([variant])
            tell(done, steps)
        chooser = _Chooser(
            waiting,
            target,
            choices,
            compiler,
            compiled,
            say=say,
            check=check,
            tell=lambda done: tell(len(fallbacks) + done, steps),
        )
        try:
            for measured in [threads.submit(chooser.measure, gpu) for gpu in gpus]:
                measured.result()
            chooser.predict()
        except KeyboardInterrupt:
            say(f"forward kernels still to be chosen: {chooser.interrupt()}")
            threads.shutdown()
    found = chooser.found
    chosen = tuple(found[shape] for shape in _shapes(problems) if shape in found)
    return Forwards(chosen, tuple(compiled))


class _Chooser:
    """Chooses the forwards of the shapes in `waiting`; several threads measure, with a GPU each."""

    def __init__(
        self,
        waiting: Sequence[Problem],
        target: Target,
        choices: Choices,
        compiler: ForwardCompiler,
        fallbacks: Sequence[CompiledForward],
        *,
        say: Callable[[str], None],
        check: Callable[[], None],
        tell: Callable[[int], None],
    ) -> None:
        self.choices, self.fallbacks = choices, fallbacks
        self._check, self._tell, self._done = check, tell, 0
        self._lock = Lock()
        self.waiting = deque(waiting)
        self.target, self.compiler, self._say = target, compiler, say
        self.found: dict[Problem, Entry] = {}
        self._why = ""

    def interrupt(self) -> int:
        """Measure no more than what is under way; how many shapes that leaves."""
        left = len(self.waiting)
        self.waiting.clear()
        return left

    def measure(self, gpu: Future[MeasuredEvaluator]) -> None:
        """Measure shapes until none waits. One that cannot be measured is left to the rule, and
        when the GPU does not work, all are that no other thread takes."""
        while True:
            if self.waiting:
                self._check()
            try:
                problem = self.waiting.popleft()
            except IndexError:
                return
            made = self.compiler.usable(self.choices(problem, self.target))
            try:
                results = measure_forwards(gpu.result(), problem, made)
            except ProblemError as error:
                self._predict(problem, f", because measuring failed: {error}")
                continue
            except NormforgeError as error:
                self._why = f", because measuring failed: {error}"
                self.waiting.append(problem)
                return
            self._keep(problem, partial(self._fastest, problem, made, results))

    def predict(self) -> None:
        """Choose by the rule where nothing was measured."""
        while self.waiting:
            self._check()
            self._predict(self.waiting.popleft(), self._why)

    def _predict(self, problem: Problem, why: str) -> None:
        reason = f"the rule's first choice that compiles without spills{why}"
        self._keep(problem, partial(self._first, problem, reason))

    def _keep(self, problem: Problem, choose: Callable[[], Entry]) -> None:
        try:
            entry = self.found[problem] = choose()
        except HostError:
            raise  # it is nothing that the shape's kernels have done
        except NormforgeError as error:
            # The backward's winner must not be lost for it.
            found = any(variant.takes(problem) for variant, _ in self.fallbacks)
            rest = "a fallback kernel serves it" if found else "the package has none for it"
            self._say(f"forward {error}; {rest}")
        else:
            facts = entry.provenance
            timed = f"{facts['us']:.1f} us, {facts['ratio']:.3f} of a copy" if "us" in facts else ""
            self._say(f"forward {problem}: {entry.variant} ({timed or 'by rule'})")
        with self._lock:
            self._done += 1
            self._tell(self._done)

    def _first(self, problem: Problem, reason: str) -> Entry:
        """The first in the order of the rule that passes."""
        checks: list[str] = []
        fault = "none compiles"
        for variant in self.choices(problem, self.target):
            for usable, compiled in self.compiler.usable([variant]):
                fault = ""
                if find_compiler() is not None:
                    fault = self.compiler.emulate(usable, problem)
                    checks = [f"{len(FORWARD_SCHEDULES)} schedules on the CPU"]
                if not fault:
                    facts = self._facts(reason, problem) | {"checks": checks}
                    return Entry(problem, usable, compiled, "predicted", facts)
        raise NormforgeError(f"{problem}: no forward kernel for {self.target} passes ({fault})")

    def _fastest(
        self, problem: Problem, made: Sequence[CompiledForward], results: Sequence[Result]
    ) -> Entry:
        """The first, in the order of the rule, of those within TIE of the fastest."""
        ratios = {i: r.ratio for i, r in enumerate(results) if r.may_win and r.ratio is not None}
        if not ratios:
            faults = next((result.note for result in results if result.note), "no candidate")
            raise NormforgeError(f"{problem}: no forward kernel passes its checks ({faults})")
        best = min(ratios.values())
        tied = [i for i, ratio in ratios.items() if ratio <= best * (1 + TIE)]
        chosen = tied[0]  # the candidates are in the order of the rule
        result = results[chosen]
        reason = (
            f"first in the order of the rule of {len(tied)} within {100 * TIE:.0f} % of the best"
        )
        facts = self._facts(reason, problem) | {
            "us": result.us,
            "floor_us": result.floor_us,
            "ratio": result.ratio,
            "condition": result.extra.get("condition"),
            "candidates": len(results),
            "faults": sum(result.outcome != "ok" for result in results),
            "checks": ["accuracy", f"{RUNS} runs", "residual"],
            **recorded_bits(result),
            "tie": [
                {"variant": made[i][0].id, "us": results[i].us, "ratio": ratios[i]} for i in tied
            ],
        }
        return Entry(problem, *made[chosen], "measured", facts)

    def _facts(self, reason: str, problem: Problem) -> dict[str, Any]:
        return {
            "reason": reason,
            "code": space_code(problem, self.target, self.choices),
            "nvrtc": nvrtc_version(),
            "torch": torch.__version__,
            "date": now(),
        }
