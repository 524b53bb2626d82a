"""Collects the studies of a storage into one summary for each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from generator.paths import REPOSITORY
from generator.problem import RMSNORM_BACKWARD, Problem
from generator.report.peers import Comparison
from generator.report.summary import Summary, kind_of
from generator.studies.reader import Study

FREE = {"rmsnorm_invariant_backward": RMSNORM_BACKWARD}
"""Operations that promise more about bits than another one that computes the same."""


def _comparison(gpu: str, operation: str) -> Comparison | None:
    """Load the repository's comparison for a GPU and an operation; None where it has none."""
    of = "" if operation == RMSNORM_BACKWARD else operation.removesuffix("backward")
    return Comparison.load(REPOSITORY / "benchmarks" / "results" / f"{of}{gpu}.json")


def summaries(
    studies: Sequence[Study],
    place: str,
    operation: str = RMSNORM_BACKWARD,
    *,
    options: str = "",
    context: bool = False,
) -> list[Summary]:
    """One summary for each GPU that has studies of the operation. Of several studies of one problem
    that one counts which is measured rather than predicted, has a winner, and has the latest one.
    options: see Summary; context: read the comparison with the peers on that GPU, too."""
    found = []
    own = [study for study in studies if study.problem.operation == operation]
    for gpu in sorted({study.gpu for study in own}):
        mine = [study for study in own if study.gpu == gpu]
        kept = sorted(
            latest(mine).values(), key=lambda s: (kind_of(s.problem), s.problem.N, s.problem.M)
        )
        summary = Summary(gpu, place, tuple(kept), len(mine) - len(kept), options)
        if free := FREE.get(operation):
            others = [s for s in studies if (s.gpu, s.problem.operation) == (gpu, free)]
            summary = replace(summary, free=_free(kept, others))
        if context and summary.evidence == "measured":
            summary = replace(summary, comparison=_comparison(gpu, operation))
        found.append(summary)
    return found


def latest(studies: Iterable[Study]) -> dict[Problem, Study]:
    """The study of each problem that counts."""

    def standing(study: Study) -> tuple[bool, str, int]:
        date = study.winner.date if study.winner else ""
        return study.evidence == "measured", date, study.number

    return {study.problem: study for study in sorted(studies, key=standing)}


def _free(studies: Sequence[Study], others: Iterable[Study]) -> dict[Problem, float]:
    """Ratios of the winners of another operation at the problems of studies, of equal evidence."""
    operation, found = studies[0].problem.operation, {}
    same = {replace(p, operation=operation): study for p, study in latest(others).items()}
    for study in studies:
        other = same.get(study.problem)
        if other and other.evidence == study.evidence and other.ratio is not None:
            found[study.problem] = other.ratio
    return found
