"""Shapes whose winner is behind those of all neighbouring shapes: a longer search may pay there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from generator.search.neighbours import neighbours
from generator.space.family import family_of
from generator.studies.reader import Study

BEHIND = 1.02
"""Its ratio to the floor over the largest of its neighbours', from which a winner stands out."""
FEWEST = 2
"""Neighbours without which nothing stands out."""


@dataclass(frozen=True)
class StandingOut:
    """A study whose winner is behind, with the studies of its neighbours, nearest first."""

    study: Study
    neighbours: tuple[Study, ...]

    @property
    def behind(self) -> float:
        """The winner's ratio over the largest of the neighbours'."""
        return _ratio(self.study) / max(map(_ratio, self.neighbours))

    @property
    def untried(self) -> list[Study]:
        """Neighbours whose winners are of families of which nothing was tried here."""
        tried = {family_of(record.config) for record in self.study.records}
        return [s for s in self.neighbours if s.winner and family_of(s.winner.config) not in tried]


def standing_out(studies: Iterable[Study]) -> list[StandingOut]:
    """Measured studies of one GPU whose winners are more than BEHIND, the farthest first. Ratios to
    a floor of fewer bytes compare with no others."""
    known = {
        study.problem: study
        for study in studies
        if study.winner and study.winner.result.ratio and not study.plain_floor
    }
    winners = [study.winner for study in known.values() if study.winner]
    found = []
    for problem, study in known.items():
        near = neighbours(problem, study.gpu, winners)
        entry = StandingOut(study, tuple(known[winner.problem] for winner in near))
        if study.evidence == "measured" and len(near) >= FEWEST and entry.behind > BEHIND:
            found.append(entry)
    return sorted(found, key=lambda entry: -entry.behind)


def _ratio(study: Study) -> float:
    assert study.ratio is not None
    return study.ratio
