"""Explains from recorded trials why a kernel serves a shape, and why a config given by hand does
not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.kernels.strategies import Strategy, is_deterministic
from generator.kernels.variant import kernel_of
from generator.report.reason import reason
from generator.space.legal_configs import LegalConfigs
from generator.space.space import Space
from generator.studies.reader import Study
from generator.studies.records import INCUMBENT_STAYS, Record, Winner
from generator.target import Target

Values = dict[str, int | str]
FINALS = "finals"
"""The origin of a record that is no trial of the study but one of its finalists."""


@dataclass(frozen=True)
class Timed:
    """One variant. behind: its time over the winner's, of the same kind, less 1."""

    variant: str
    us: float | None
    ratio: float | None
    behind: float | None
    outcome: str
    note: str
    config: Config


@dataclass(frozen=True)
class KnobCost:
    """Another value of one knob of the winner. alone: the trial that differs from the winner in
    nothing else; best: the fastest trial with this value, whatever its other knobs; None where
    nothing of the kind was tried and timed. trials: how many have the value."""

    knob: str
    value: int | str
    trials: int
    alone: Timed | None
    best: Timed | None


@dataclass(frozen=True)
class Verdict:
    """The reason why a config does not serve. kind: winner, tied, slower, not_deterministic,
    failed, illegal, meaningless or never_tried; sentences: the answer, the main one first; config:
    the complete config that was looked up, the winner's where the given one leaves it open;
    nearest: a tried neighbour where it was never tried; best: the fastest trial with all the given
    values."""

    kind: str
    sentences: tuple[str, ...]
    config: Config
    record: Timed | None = None
    nearest: Timed | None = None
    best: Timed | None = None


@dataclass(frozen=True)
class Explanation:
    """The study of one problem, asked for reasons. space and target: those of today, by whose rules
    a config is legal."""

    study: Study
    space: Space
    target: Target

    @cached_property
    def winner(self) -> Config:
        """The winner's config; before the finals that of the fastest trial that may win."""
        if self.study.winner is not None:
            return self._today(self.study.winner.config) or self.study.winner.config
        if not self.study.ranked:
            raise NormforgeError(f"{self.study.name} has no trial that may win")
        return self._today(self.study.ranked[0].config) or self.study.ranked[0].config

    @cached_property
    def runners_up(self) -> list[tuple[Strategy, Timed]]:
        """The fastest trial of every strategy, fastest first."""
        return [(s, self._timed(record)) for s, record in self.study.best_by_strategy.items()]

    @cached_property
    def costs(self) -> list[KnobCost]:
        """Other values of every knob of the winner that were tried."""
        found = []
        for knob in self.space.knobs:
            for value in knob.choices:
                having = [r for config, r in self._known if config[knob.name] == value]
                if value == self.winner[knob.name] or not having:
                    continue
                moved = self._complete({knob.name: value})
                alone = [r for config, r in self._known if config == moved and _may_count(r)]
                counted = sorted(filter(_may_count, having), key=self.study.over_floor)
                found.append(
                    KnobCost(
                        knob.name,
                        value,
                        len(having),
                        self._timed(alone[0]) if alone else None,
                        self._timed(counted[0]) if counted else None,
                    )
                )
        return found

    def why_not(self, given: Config) -> Verdict:
        """Say what became, or would become, of a config of which some knobs are given.

        Raises NormforgeError for a knob or a value that the space does not have."""
        config = self._complete(given)
        having = [r for known, r in self._known if given.items() <= known.items()]
        fastest = min(filter(_may_count, having), key=self.study.over_floor, default=None)
        best = self._timed(fastest) if fastest else None
        fixed = self.space.fixed_for(self.study.problem)
        other = {name: value for name, value in given.items() if fixed.get(name, value) != value}
        if other:
            sentences = tuple(
                f"{name}={value} cannot be chosen for this row length and dtype, where the space "
                f"fixes {name}={fixed[name]}: the bits of all batches depend on it"
                for name, value in other.items()
            )
            return Verdict("illegal", sentences, config, best=best)
        lost = [name for name, value in given.items() if config[name] != value]
        if lost:
            knobs = {knob.name: knob for knob in self.space.knobs}
            sentences = tuple(
                f"{name}={given[name]} means nothing here: it needs {knobs[name].when}"
                if knobs[name].when
                else f"{name}={given[name]} is not a value of the space"
                for name in lost
            )
            return Verdict("meaningless", sentences, config, best=best)
        broken = self.space.broken_rules(config, self.study.problem, self.target)
        if broken:
            sentences = (*map(str, broken), self._way_out(given))
            return Verdict("illegal", sentences, config, best=best)
        record = next((r for known, r in self._known if known == config), self._final(config))
        if record is not None:
            kind, sentence = self._judge(config, record)
            return Verdict(kind, (sentence,), config, self._timed(record), best=best)
        near = min(
            self._known,
            key=lambda entry: (_distance(entry[0], config), self.study.over_floor(entry[1])),
            default=None,  # the space has none of the values that were tried
        )
        answer = [f"never tried among the {len(self.study.records)} trials of this study"]
        if not is_deterministic(config):
            answer.append("it could not win: its bits depend on the order in which CTAs finish")
        if near is None:
            return Verdict("never_tried", tuple(answer), config, best=best)
        differences = ", ".join(
            f"{name}={value}" for name, value in near[0].items() if config[name] != value
        )
        answer.append(f"the nearest that was tried has {differences}")
        return Verdict("never_tried", tuple(answer), config, None, self._timed(near[1]), best)

    def _final(self, config: Config) -> Record | None:
        """A config of the finals as a record, whether or not a trial of this study tried it."""
        for known, result in self.study.finals:
            if self._today(known) == config:
                name = kernel_of(config, self.study.problem).id
                return Record(config, name, result, FINALS, 0.0)
        return None

    def _judge(self, config: Config, record: Record) -> tuple[str, str]:
        """Kind and sentence for a config that was tried."""
        study, result = self.study, record.result
        if config == self.winner:
            return "winner", reason(study) if study.winner else "the fastest trial so far"
        if not is_deterministic(config) or result.outcome == "nondeterministic":
            why = result.note or "its bits depend on the order in which CTAs finish"
            behind = self._behind(record)
            timed = "" if behind is None else f"; it takes {1 + behind:.3f} times the winner's time"
            return "not_deterministic", f"not deterministic: {why}{timed}"
        final = next((r for c, r in study.finals if self._today(c) == config), None)
        reference = study.winner.result.ratio if study.winner else None
        if final is not None and reference and final.outcome != "ok":
            return "failed", f"{final.outcome} in the finals: {final.note}"
        if final is not None and reference and final.ratio:
            behind = final.ratio / reference - 1
            if study.winner and any(self._today(t.config) == config for t in study.winner.tied):
                then = self._tie_breaker(study.winner)
                return "tied", f"{behind:+.1%} vs the winner in the finals: counts as equal, {then}"
            if behind < 0:
                return "tied", (
                    f"{behind:+.1%} vs the winner in the finals, which is worth less than the "
                    "launch that the winner saves"
                )
            how = "side by side with the winner" if study.evidence == "measured" else "predicted"
            return "slower", f"{behind:+.1%} in the finals, {how}"
        if result.ratio is None:
            return "failed", f"{result.outcome}: {result.note}"
        behind = self._behind(record)
        shown = f"{behind:+.1%} in the search" if behind is not None else "slower in the search"
        us = f"{result.us:.2f} us" if result.us else "no time"
        return "slower", f"{shown} ({us}, {study.over_floor(record):.3f} x floor)"

    def _tie_breaker(self, winner: Winner) -> str:
        if winner.reason.startswith(INCUMBENT_STAYS):
            return "and the incumbent stays"
        if self.study.evidence == "predicted":
            return "and then the one most like winners on measured GPUs wins"
        return "and then one launch comes before two and the first in the order of the space wins"

    def _way_out(self, given: Config) -> str:
        legal = LegalConfigs(self.space, self.study.problem, self.target)
        near = legal.nearest({**self.winner, **given}, Random(0), held=list(given))
        if near is None or any(near[name] != value for name, value in given.items()):
            return "no legal config with these values was found near the winner"
        changed = ", ".join(f"{n}={v}" for n, v in near.items() if self.winner[n] != v)
        return f"legal would be the winner with {changed}"

    def _complete(self, given: Config) -> Values:
        config = {**self.winner, **given}
        return self.space.normalize(config, self.study.problem, self.target)

    def _today(self, config: Config) -> Values | None:
        """A recorded config with the knobs of today's space; None where it has lost a value."""
        try:
            return self.space.normalize(config, self.study.problem, self.target)
        except NormforgeError:
            return None

    @cached_property
    def _known(self) -> list[tuple[Values, Record]]:
        known = ((self._today(record.config), record) for record in self.study.records)
        return [(config, record) for config, record in known if config is not None]

    @cached_property
    def _reference(self) -> float | None:
        """The winner's time in the search, to which those of other trials compare; without it that
        of the fastest."""
        own = [r for c, r in self._known if c == self.winner and _may_count(r)]
        return next(map(self.study.over_floor, (*own, *self.study.ranked)), None)

    def _ratio(self, record: Record) -> float | None:
        """A trial's time over the median floor. That of the finals is over their own."""
        result = record.result
        if record.origin == FINALS or result.ratio is None:
            return result.ratio
        return self.study.over_floor(record)

    def _behind(self, record: Record) -> float | None:
        ratio, reference = self._ratio(record), self._reference
        if record.origin == FINALS and self.study.winner:
            reference = self.study.winner.result.ratio
        return None if ratio is None or reference is None else ratio / reference - 1

    def _timed(self, record: Record) -> Timed:
        result = record.result
        return Timed(
            variant=record.variant,
            us=result.us,
            ratio=self._ratio(record),
            behind=self._behind(record),
            outcome=result.outcome,
            note=result.note,
            config=record.config,
        )


def _may_count(record: Record) -> bool:
    """Return True for a record that is timed and of a class that may win; one that was slow
    counts."""
    return record.result.ratio is not None and is_deterministic(record.config)


def _distance(one: Config, other: Config) -> int:
    return sum(other[name] != value for name, value in one.items())
