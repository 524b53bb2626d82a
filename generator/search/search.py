"""The search of one problem: trials until the budget ends, then the finals.

The value of a trial is its time over the median floor of the trials so far. One without a time (a
compile error, a crash, wrong numbers) ends PRUNED: a made-up value would distort every plot of the
study. Whatever may not win violates the constraint `infeasible`.

Trials are asked and told in memory; the storage receives each one when it is finished.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from generator.evaluate.evaluator import Evaluator, Pool
from generator.kernels.nvrtc import Compiled
from generator.kernels.resource_gate import identity, refuse
from generator.kernels.variant import AnyVariant, kernel_of
from generator.result import Result
from generator.search import resume
from generator.search.budget import Budget, Progress
from generator.search.choose_winner import choose, expected_error, preference_of
from generator.search.experience import Experience, learn
from generator.search.finals import fastest_ineligible, hold_finals
from generator.search.pipeline import Pipeline, Proposal
from generator.search.proposals import Proposals
from generator.search.sampler import LegalSampler, NothingLeftError, distributions
from generator.search.starts import incumbent_and_starts
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import (
    Record,
    Winner,
    fastest_first,
    now,
    over_median_floor,
    study_name,
)
from generator.studies.study_log import StudyLog, stored_winners


def search_problem(
    legal: LegalConfigs,
    pool: Pool,
    evaluator: Evaluator,
    storage: BaseStorage,
    budget: Budget,
    *,
    known_winners: Sequence[Winner] = (),
    seed: int = 0,
    machine: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Winner | None:
    """Run or resume the study of one problem and return its winner, None when no variant may win.

    legal: the configs to choose from, of one space for one problem and target. known_winners: those
    of packages, for what the storage has none of; the incumbent is the last for the same problem,
    target and evidence. machine: facts to store with the finals, about the machine that holds them.
    Stored trials count, of any space, whose configs are legal and still give the machine code that
    was measured, and whose floor is the problem's. A study that has used up its budget and held its
    finals answers with the winner it has, and nothing is measured. Raises NormforgeError when no
    config is legal for the problem or the storage fails.
    """
    log = StudyLog(storage, study_name(legal.problem, legal.target, evaluator.evidence))
    log.take_over()
    trials = log.trials()
    known = resume.up_to_date(log.name, trials, legal, pool)
    if len(known) == len(trials) and (
        winner := resume.answer(log, known, legal, pool, budget.trials)
    ):
        return winner
    known = resume.comparable(known, legal.problem, evaluator.evidence)
    log.mark_outdated([trial.number for trial in trials if trial.number not in known])
    search = _Search(
        legal=legal,
        pool=pool,
        evaluator=evaluator,
        log=log,
        budget=budget,
        winners=lambda: [*known_winners, *stored_winners(storage)],
        experience=learn(legal, storage, evaluator.evidence),
        seed=seed,
        on_progress=on_progress,
        known=known,
        stored=len(trials),
    )
    search.run()
    return search.finish(machine or {})


@dataclass(frozen=True)
class _Measured:
    """The result of a trial, the identity of what ran, and the trial that it shares both with."""

    result: Result
    identity: str = ""
    shared_with: int | None = None


class _Search:
    """One running search."""

    def __init__(
        self,
        *,
        legal: LegalConfigs,
        pool: Pool,
        evaluator: Evaluator,
        log: StudyLog,
        budget: Budget,
        winners: Callable[[], list[Winner]],
        experience: Experience | None,
        seed: int,
        on_progress: Callable[[Progress], None] | None,
        known: Mapping[int, resume.Known],
        stored: int,
    ) -> None:
        """known: stored trials that are up to date, by their numbers; stored: how many there are
        in all."""
        self.legal, self.pool, self.evaluator, self.log = legal, pool, evaluator, log
        self.budget, self.on_progress = budget, on_progress
        candidates = resume.candidates_of(known, legal)  # measurements stand of the others, too
        self.records = [record for record, _ in candidates.values()]
        self.measured: dict[str, tuple[int, Result]] = {}
        for number, (record, _) in known.items():
            self._keep_measured(number, record)
        self.stored = stored
        self.before = max((record.elapsed for record in self.records), default=0.0)
        self.started = time.monotonic()
        self.pipeline = Pipeline(pool, self._propose)

        # A resumed search draws a new sequence: the first one would propose what is known.
        rng = random.Random(f"{seed}/{stored}")
        self.sampler = LegalSampler(legal, rng.randrange(2**32), experience)
        self.sampler.taken |= {legal.key(record.config) for record in self.records}
        self.study = optuna.create_study(sampler=self.sampler)
        self.study.add_trials([trial for _, trial in candidates.values()])

        self.incumbent, starts = incumbent_and_starts(
            legal, evaluator, winners(), log.name, rng, experience.expect if experience else None
        )
        self.proposals = Proposals(
            legal=legal,
            rng=rng,
            starts=starts,
            records=self.records,
            taken=self.sampler.taken,
            used=self._used,
            trials=budget.trials,
            sweep_limit=budget.sweep_limit,
            added=resume.added_values(legal, known.values()),
            winners=winners if evaluator.evidence == "measured" else tuple,
        )
        self.plan = self.proposals.plan()

    def run(self) -> None:
        """Run trials until the budget or the space ends."""
        with self.pipeline:
            for finished in self.pipeline.results(self._measure):
                self._tell(*finished)
                if self._late():
                    break

    def finish(self, machine: Mapping[str, Any]) -> Winner | None:
        """The stored winner where it is up to date, else that of new finals."""
        winner = self.log.winner
        if self.records and self.log.trials_at_finals == self.stored:
            still = winner and resume.standing(winner, self.legal, self.pool, len(self.records))
            if still or winner is None:
                return still
        self._report("finals")
        finals = hold_finals(self.legal, self.pool, self.evaluator, self.records, self.incumbent)
        results = [(final.variant.config, final.result) for final in finals]
        preference = preference_of(self.evaluator, self.legal.problem)
        choice = choose(results, self.legal.rank, self.incumbent, preference)
        winner = None
        if choice is not None:
            final = finals[choice.winner]
            winner = Winner(
                problem=self.legal.problem,
                target=self.legal.target.name,
                config=dict(final.variant.config),
                variant=final.variant.id,
                cubin=final.compiled.digest,
                result=final.result,
                evidence=self.evaluator.evidence,
                tied=tuple(finals[place].finalist for place in choice.tied),
                fastest_nondeterministic=fastest_ineligible(finals),
                trials=len(self.records),
                counts=self._counts(),
                study=self.log.name,
                space_hash=self.legal.space.digest(self.legal.problem),
                reason=choice.reason + expected_error(final.result),
                date=now(),
            )
        self.log.save_finals(winner, results, self.stored, machine)
        return winner

    def _propose(self) -> Proposal | None:
        """Return what to try next; None where there is no budget, or nothing left."""
        if self._used() >= 1:
            return None
        for origin, config in self.plan:
            if config is not None:
                self.sampler.planned.append(config)
            try:
                trial = self.study.ask(distributions(self.legal.space))
            except NothingLeftError:
                self.proposals.exhausted = True
                continue
            return Proposal(trial, origin, kernel_of(trial.params, self.legal.problem))
        return None

    def _measure(self, variant: AnyVariant, compiled: Compiled) -> _Measured:
        """Evaluate machine code, unless what was measured before says it all."""
        problem, target = self.legal.problem, self.legal.target
        result = refuse(variant, compiled, problem, target)
        if result is not None:
            return _Measured(result)
        same = identity(variant, compiled, problem, target)
        if same in self.measured:
            number, result = self.measured[same]
            return _Measured(result, same, number)
        result = self.evaluator.evaluate(problem, variant, compiled, self._best_us())
        return _Measured(result, same)

    def _tell(self, proposal: Proposal, compiled: Compiled, measured: _Measured) -> None:
        """Keep a finished trial."""
        variant = proposal.variant
        record = Record(
            config=variant.config,
            variant=variant.id,
            result=measured.result.rounded(),
            origin=proposal.origin,
            elapsed=self._elapsed(),
            code=self.pool.code(variant),
            cubin="" if compiled.error else compiled.digest,
            identity=measured.identity,
            registers=None if compiled.error else compiled.main.registers,
            smem=None if compiled.error else variant.smem_bytes + compiled.main.smem_bytes,
            shared_with=measured.shared_with,
        )
        trial = proposal.trial
        for name, value in record.attributes().items():
            trial.set_user_attr(name, value)
        trial.set_constraint("infeasible", 0.0 if record.feasible else 1.0)
        self.records.append(record)
        self._keep_measured(self.stored, record)
        timed = measured.result.ratio is not None
        value = None
        if timed:
            value = round(over_median_floor([r.result for r in self.records])[-1], 6)
        state = TrialState.COMPLETE if timed else TrialState.PRUNED
        self.log.add(self.study.tell(trial, value, state))
        self.stored += 1
        self._report(proposal.origin)

    def _keep_measured(self, number: int, record: Record) -> None:
        if record.identity:
            self.measured.setdefault(record.identity, (number, record.result))

    def _elapsed(self) -> float:
        return self.before + time.monotonic() - self.started

    def _used(self) -> float:
        return self.budget.used(len(self.records) + len(self.pipeline), self._elapsed())

    def _late(self) -> bool:
        return self.budget.seconds is not None and self._elapsed() >= self.budget.seconds

    def _best_us(self) -> float | None:
        ranked = fastest_first(self.records)
        return next((record.result.us for record in ranked if record.feasible), None)

    def _counts(self) -> dict[str, int]:
        return dict(Counter(record.result.outcome for record in self.records))

    def _report(self, phase: str) -> None:
        if self.on_progress is not None:
            progress = Progress(
                problem=self.legal.problem,
                phase=phase,
                done=len(self.records),
                total=self.budget.trials,
                best_us=self._best_us(),
                counts=self._counts(),
            )
            self.on_progress(progress)
