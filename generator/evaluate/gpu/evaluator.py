"""The evaluator where the GPU is: jobs for its worker, and numbers that can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from generator.errors import ProblemError
from generator.evaluate.gpu.noise import (
    SEARCH_PAUSES,
    Block,
    NoisyError,
    Timing,
    blocks_for,
    collect,
    noise_in,
)
from generator.evaluate.gpu.nvml import DeviceMonitor
from generator.evaluate.gpu.protocol import Candidate, Job, WorkerLostError
from generator.evaluate.gpu.rotation import ROTATION
from generator.evaluate.gpu.supervisor import KEPT, Supervisor
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import Result
from generator.target import Target

INTERLEAVINGS = 3
"""Attempts to time the finalists together, when that breaks the worker and none does it alone."""
FINAL_CONDITION = ROTATION
"""The condition of the finals: inputs rotate, as in training, where there is memory for it. Trials
are timed after a flush, as all trials so far: they only choose who is timed again."""
FINAL_PAUSES = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds after each noisy block of the finals: one minute for a neighbour to finish."""

Made = tuple[AnyVariant, Compiled]
"""A variant and its machine code."""


class MeasuredEvaluator:
    """Evaluates candidates on the GPU of a supervisor, which ends with it; the search sees only
    Results. Noisy blocks are measured again."""

    evidence = "measured"

    def __init__(self, target: Target, supervisor: Supervisor) -> None:
        self.target, self._supervisor = target, supervisor
        self._sleep, self.facts = supervisor.sleep, supervisor.facts
        self._floors: dict[Problem, float] = {}
        self._floors_of_finals: dict[Problem, float] = {}
        self._conditions: dict[Problem, str] = {}
        self.discarded = self.noisy = 0
        self.noise: set[str] = set()
        self.monitor = DeviceMonitor(self.facts.get("bus_id"))
        self.causes_at_start = self.monitor.causes(supervisor.pids)
        supervisor.spare()

    @property
    def lost(self) -> int:
        """GPU workers that were lost so far."""
        return self._supervisor.lost

    def close(self) -> None:
        self._supervisor.close()

    def __enter__(self) -> MeasuredEvaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def evaluate(
        self, problem: Problem, variant: AnyVariant, compiled: Compiled, best_us: float | None
    ) -> Result:
        """Check a candidate's accuracy, time it, and run it 20 times for determinism. Never raises
        for a bad candidate."""
        if problem not in self._floors:
            self._probe(problem)
        candidates = self._candidates([(variant, compiled)])
        floor_us = self._floors.get(problem)
        job = self._job("evaluate", problem, candidates, best_us=best_us, floor_us=floor_us)
        result = self._result(job)
        self._supervisor.spare()
        self.discarded += result.extra.get("discarded_blocks", 0)
        if result.floor_us is not None:
            # Floors of different GPUs are not compared (generator.search.finals.noisy).
            result = replace(result, extra={**result.extra, "gpu": self.facts.get("uuid", "")})
        if result.noisy:
            self.noisy += 1
            notes = (result.note, self._describe_noise(result.extra.get("noise", "")))
            return replace(result, note="; ".join(note for note in notes if note))
        if result.floor_us is not None:
            self._update_floor(problem, result.floor_us)
        return result

    def check_accuracy(self, problem: Problem, entries: Sequence[Made]) -> list[Result]:
        """Results of the accuracy check alone, without times."""
        return self._check_each("accuracy", problem, entries)

    def check_determinism(self, problem: Problem, entries: Sequence[Made]) -> list[Result]:
        """Results of the determinism checks alone, without times."""
        return self._check_each("determinism", problem, entries)

    def shortlist(
        self,
        problem: Problem,
        entries: Sequence[Made],
        blocks: int | None = None,
        rounds: int | None = None,
    ) -> list[float]:
        """Ratios from blocks in which all take turns; nothing when they stay noisy or cost the
        worker its life. Whoever did that is found in the finals. blocks, and rounds of each block:
        default as many as in the finals."""
        if problem not in self._floors:
            self._probe(problem)
        job = self._final_job(problem, self._candidates(entries), rounds=rounds)
        try:
            timing = collect(
                lambda: self._measure_block(job),
                blocks or blocks_for(self._floors.get(problem)),
                self._floors_of_finals.get(problem),
                SEARCH_PAUSES,
                self._sleep,
            )
        except WorkerLostError:
            return []
        self.discarded += timing.discarded
        if timing.fault:
            return []
        _lower(self._floors_of_finals, problem, timing.floor_us)
        return list(timing.ratios)

    def finals(self, problem: Problem, entries: Sequence[Made]) -> list[Result]:
        """Check the determinism of each, then time all that passed in the same blocks. What sums
        over rows must have the same bits in a fresh process, too, and what serves calls with other
        options passes for those. Raises NoisyError when a minute brings no clean blocks."""
        served = operation_of(problem).serves(problem)
        of_others = {what: self.check_determinism(other, entries) for what, other in served.items()}
        results = self.check_determinism(problem, entries)
        for what, others in of_others.items():
            results = [_with_other(*pair, what) for pair in zip(results, others, strict=True)]
        candidates = self._candidates(entries)
        if operation_of(problem).sums_rows:
            self._supervisor.renew(self._job("probe", problem))
            for i, candidate in enumerate(candidates):
                if results[i].outcome == "ok":
                    results[i] = self._check_fresh_process(problem, candidate, results[i])
        results = self._time_finalists(problem, candidates, results)
        self._supervisor.spare()  # starts while the next problem is searched
        return results

    def disturbances(self) -> str:
        """Return one sentence about the noise of the run so far, "" without any."""
        said = []
        if self.causes_at_start:
            said.append(f"at the start {'; '.join(self.causes_at_start)}")
        if self.discarded:
            said.append(f"{self.discarded} noisy blocks were measured again")
        if self.noisy:
            said.append(f"{self.noisy} trials stayed noisy")
        if self.noise:
            said.append(f"seen then and in the finals: {', '.join(sorted(self.noise))}")
        elif said and self.monitor.reason:
            said.append(f"NVML was not asked for causes ({self.monitor.reason})")
        return f"Noise on device {self._supervisor.device}: {'; '.join(said)}." if said else ""

    def _probe(self, problem: Problem) -> None:
        """Set a problem up and time its floor, so that no candidate pays for that."""
        try:
            answer = self._supervisor.call(self._job("probe", problem))
        except WorkerLostError:
            return  # replaced, and the new one has done it
        floor_us = median(answer.block[0]) if answer.block else None
        if answer.block and floor_us and not noise_in(answer.block):
            self._update_floor(problem, floor_us)

    def _candidates(self, entries: Sequence[Made]) -> tuple[Candidate, ...]:
        sms = self.target.sms
        return tuple(Candidate(compiled.cubin, v.spec(sms)) for v, compiled in entries)

    def _job(
        self, kind: str, problem: Problem, candidates: tuple[Candidate, ...] = (), **more: Any
    ) -> Job:
        return Job(kind, problem, candidates, **more)

    def _final_job(
        self, problem: Problem, candidates: tuple[Candidate, ...], rounds: int | None = None
    ) -> Job:
        condition = FINAL_CONDITION
        return self._job("interleave", problem, candidates, rounds=rounds, condition=condition)

    def _check_each(self, kind: str, problem: Problem, entries: Sequence[Made]) -> list[Result]:
        self._probe(problem)
        candidates = self._candidates(entries)
        return [self._result(self._job(kind, problem, (one,))) for one in candidates]

    # Noise

    def _update_floor(self, problem: Problem, floor_us: float) -> None:
        _lower(self._floors, problem, floor_us)

    def _find_causes(self) -> tuple[str, ...]:
        """Return what NVML reports right now that may disturb measurements."""
        causes = self.monitor.causes(self._supervisor.pids)
        self.noise.update(causes)
        return causes

    def _describe_noise(self, fault: str) -> str:
        causes = "; ".join(self._find_causes())
        return f"noisy: {fault}" + (f" ({causes})" if causes else "")

    # The finals

    def _check_fresh_process(self, problem: Problem, candidate: Candidate, first: Result) -> Result:
        again = self._result(self._job("digest", problem, (candidate,)))
        if again.outcome != "ok":
            return again
        if again.extra["digest"] != first.extra["digest"]:
            note = "other bits in a fresh process"
            return replace(first, outcome="nondeterministic", determinism="refuted", note=note)
        return replace(first, checks=(*first.checks, "fresh process"))

    def _time_finalists(
        self, problem: Problem, candidates: Sequence[Candidate], results: list[Result]
    ) -> list[Result]:
        """The results with times. Who breaks the worker while all take turns is found by timing
        each alone, and drops out."""
        results = list(results)
        for _ in range(INTERLEAVINGS):
            open_ = [i for i, result in enumerate(results) if result.extra.get("digest")]
            if not open_:
                return results
            try:
                timing = self._time_together(problem, [candidates[i] for i in open_])
            except WorkerLostError as lost:
                reason = lost.note
                for i in open_:
                    results[i] = self._fault_alone(problem, candidates[i]) or results[i]
                continue
            for place, i in enumerate(open_):
                fields = timing.fields(operation_of(problem).traffic_bytes(problem), place)
                timed_under = {"condition": self._conditions[problem]}
                fields["extra"] = results[i].extra | fields["extra"] | timed_under
                results[i] = replace(results[i], **fields)
            return results
        raise ProblemError(f"{problem}: timing the finalists failed: {reason}; {KEPT}")

    def _time_together(self, problem: Problem, candidates: Sequence[Candidate]) -> Timing:
        job = self._final_job(problem, tuple(candidates))
        best = self._floors_of_finals.get(problem)
        count = blocks_for(self._floors.get(problem))
        timing = collect(lambda: self._measure_block(job), count, best, FINAL_PAUSES, self._sleep)
        self.discarded += timing.discarded
        if timing.fault:
            noise = self._describe_noise(timing.fault)
            raise NoisyError(
                f"{problem}: no clean numbers for the finals, {noise}: no winner is chosen; "
                f"{KEPT} with the finals"
            )
        self._find_causes()
        _lower(self._floors_of_finals, problem, timing.floor_us)
        return timing

    def _measure_block(self, job: Job) -> Block:
        answer = self._supervisor.call(job)
        assert answer.block is not None
        self._conditions[job.problem] = answer.condition
        return answer.block

    def _fault_alone(self, problem: Problem, candidate: Candidate) -> Result | None:
        """The outcome of a candidate that breaks the worker by itself, else None."""
        try:
            self._supervisor.call(self._final_job(problem, (candidate,)))
        except WorkerLostError as lost:
            return Result(lost.outcome, note=lost.note)
        return None

    def _result(self, job: Job) -> Result:
        """The worker's Result for a job on one candidate, or the Result that its loss is."""
        try:
            answer = self._supervisor.call(job)
        except WorkerLostError as lost:
            return Result(lost.outcome, note=lost.note)
        assert answer.result is not None
        return answer.result


def _lower(floors: dict[Problem, float], problem: Problem, floor_us: float) -> None:
    """Keep the fastest floor of a problem."""
    floors[problem] = min(floor_us, floors.get(problem, floor_us))


def _with_other(result: Result, other: Result, what: str) -> Result:
    """A finalist's result with what the checks found of it for calls with an option."""
    if result.outcome != "ok" or other.outcome == "ok":
        return replace(result, checks=(*result.checks, what))
    return replace(other, note=f"{what}: {other.note}")
