"""The studies of one GPU, summed up: every number of the page and of the text is from here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import geometric_mean

from generator.errors import NormforgeError
from generator.kernels.strategies import Strategy
from generator.kernels.variant import kernel_of
from generator.problem import Problem
from generator.report.peers import Comparison
from generator.report.standing_out import StandingOut, standing_out
from generator.result import OUTCOMES, PREDICTED_OUTCOMES
from generator.studies.reader import Study
from generator.studies.records import may_win
from generator.target import find_target

REASONS = 8


@dataclass(frozen=True)
class Knob:
    """The importance of a knob. share: mean over the studies, 0 where it means nothing; most: the
    largest share of a study; most_at: that study; winning: values of the winners with their
    numbers, commonest first."""

    name: str
    share: float
    most: float
    most_at: str
    winning: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Standing:
    """A strategy and, by study, the time of its fastest variant over that of the fastest that may
    win."""

    strategy: Strategy
    behind: tuple[tuple[Study, float], ...]

    @property
    def typical(self) -> float:
        return geometric_mean([ratio for _, ratio in self.behind])


@dataclass(frozen=True)
class Summary:
    """The studies of one GPU that count, and what they say together.

    place: where they are stored; left_out: how many studies are older than those that count;
    options: of the command line, that name the place; comparison: with the peers on this GPU; free:
    for batch-invariant kernels the ratio to the floor of the winner that does not promise as much,
    by problem.
    """

    gpu: str
    place: str
    studies: tuple[Study, ...]
    left_out: int
    options: str = ""
    comparison: Comparison | None = None
    free: Mapping[Problem, float] = field(default_factory=dict)

    @property
    def dashboard(self) -> str:
        """The command that opens the studies in optuna-dashboard, which does not read packed files;
        of a URL, user, password and options have to be put back by the reader."""
        unpack = f"xz -dk {self.place} && " if self.place.endswith(".xz") else ""
        return f"{unpack}optuna-dashboard {self.place.removesuffix('.xz')}"

    def explain(self, study: Study) -> str:
        """The command that explains a study; the same parts of a URL have to be put back."""
        place = f"--gpu {self.gpu} {self.options}".rstrip()
        return f"python tune.py explain {place} --shape {study.problem}"

    @staticmethod
    def example_config(study: Study) -> str:
        """Return a config to ask `explain` for, other than the winner's where there is one."""
        tried = [*study.best_by_strategy.values()] or study.records
        config = tried[-1].config
        knob = "form" if "form" in config else "strategy"
        return f"{knob}={config[knob]}"

    @cached_property
    def evidence(self) -> str:
        return " and ".join(sorted({study.evidence for study in self.studies}))

    @property
    def measured(self) -> bool:
        return "measured" in self.evidence

    @property
    def predicted(self) -> bool:
        return "predicted" in self.evidence

    @cached_property
    def meaning(self) -> dict[str, str]:
        """The meanings of its outcomes."""
        if not self.predicted:
            return OUTCOMES
        if not self.measured:
            return PREDICTED_OUTCOMES
        pairs = ((name, text, PREDICTED_OUTCOMES[name]) for name, text in OUTCOMES.items())
        return {name: a if a == b else f"{a}; or {b}" for name, a, b in pairs}

    @cached_property
    def trials(self) -> int:
        return sum(len(study.records) for study in self.studies)

    @cached_property
    def dates(self) -> tuple[str, str]:
        """First and last day of the winners; empty without one."""
        days = sorted(study.winner.date[:10] for study in self.studies if study.winner)
        return (days[0], days[-1]) if days else ("", "")

    @cached_property
    def outcomes(self) -> dict[str, int]:
        """Trials by outcome, in the order of OUTCOMES; those that happened."""
        counts = Counter(r.result.outcome for study in self.studies for r in study.records)
        return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}

    @cached_property
    def reasons(self) -> list[tuple[str, str, int]]:
        """Outcome, reason and number of trials of the commonest failures; numbers inside a reason
        are left out, so that equal ones count together."""
        counts = Counter(
            (record.result.outcome, re.sub(r"\b\d[\d.]*", "…", record.result.note))
            for study in self.studies
            for record in study.records
            if record.result.note and record.result.outcome not in ("ok", "slow")
        )
        return [(outcome, note, n) for (outcome, note), n in counts.most_common(REASONS)]

    @cached_property
    def ratio(self) -> float | None:
        """Geometric mean of the winners' ratios to the floor, without those to a plain one."""
        return _mean(study.ratio for study in self.studies if not study.plain_floor)

    @property
    def norm(self) -> str:
        """The layer that the kernels are the backward of, or their operation where it has none."""
        from generator.operations import operation_of  # this imports PyTorch

        front_end = operation_of(self.studies[0].problem).front_end
        return (front_end and front_end.norm) or self.studies[0].problem.operation

    @cached_property
    def ratio_set(self) -> str:
        """The shapes that the mean of the ratios is of."""
        timed = [s for s in self.studies if not s.plain_floor and s.ratio is not None]
        if self.plain_floors:
            return f"the {len(timed)} shapes without a residual"
        return f"{'all' if len(timed) == len(self.studies) else 'the'} {len(timed)} shapes"

    @cached_property
    def plain_floors(self) -> int:
        """Studies whose ratios are to a floor of fewer bytes."""
        return sum(study.plain_floor for study in self.studies)

    @cached_property
    def overhead(self) -> float | None:
        """Geometric mean of the overhead of determinism where it is known."""
        return _mean(study.overhead for study in self.studies)

    def price_of(self, study: Study) -> float | None:
        """Return the price of batch invariance: the winner's ratio over that of the free winner."""
        free = self.free.get(study.problem)
        return study.ratio / free if free and study.ratio else None

    @cached_property
    def price(self) -> float | None:
        """Geometric mean of the overhead of batch invariance where it is known."""
        return _mean(self.price_of(study) for study in self.studies)

    @cached_property
    def strategies(self) -> list[tuple[str, int]]:
        """Strategies of the winners with the number of shapes, commonest first."""
        won = Counter(str(study.winner.strategy) for study in self.studies if study.winner)
        return won.most_common()

    @cached_property
    def standings(self) -> list[Standing]:
        """Every strategy that was timed, the fastest first."""
        behind: dict[Strategy, list[tuple[Study, float]]] = defaultdict(list)
        for study in self.studies:
            if not study.ranked:
                continue
            best = study.over_floor(study.ranked[0])
            for strategy, record in study.best_by_strategy.items():
                behind[strategy].append((study, study.over_floor(record) / best))
        standings = [Standing(strategy, tuple(own)) for strategy, own in behind.items()]
        return sorted(standings, key=lambda standing: standing.typical)

    @cached_property
    def standing_out(self) -> list[StandingOut]:
        """Shapes whose winners are behind those of all their neighbours."""
        return standing_out(self.studies)

    @cached_property
    def knobs(self) -> list[Knob]:
        """Knobs by their mean importance."""
        shares: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for study in self.studies:
            for name, share in study.importance.items():
                shares[name].append((share, str(study.problem)))
        studies = sum(bool(study.importance) for study in self.studies)
        found = []
        for name, entries in shares.items():
            values = Counter(
                str(study.winner.config[name])
                for study in self.studies
                if study.winner and name in study.winner.config
            )
            most, most_at = max(entries)
            share = sum(share for share, _ in entries) / studies
            found.append(Knob(name, share, most, most_at, tuple(values.most_common())))
        return sorted(found, key=lambda knob: -knob.share)

    @cached_property
    def grids(self) -> list[Grid]:
        """One map of M and N for every dtype, the one with most shapes first."""
        kinds: dict[str, dict[tuple[int, int], Study]] = defaultdict(dict)
        for study in self.studies:
            kinds[kind_of(study.problem)][study.problem.M, study.problem.N] = study
        grids = [Grid(kind, cells) for kind, cells in kinds.items()]
        return sorted(grids, key=lambda grid: (-len(grid.cells), grid.kind))


@dataclass(frozen=True)
class Grid:
    """The studies of one dtype by (M, N). There are more N than M, so N goes down the page."""

    kind: str
    cells: Mapping[tuple[int, int], Study]

    @property
    def rows(self) -> list[int]:
        return sorted({n for _, n in self.cells})

    @property
    def columns(self) -> list[int]:
        return sorted({m for m, _ in self.cells})


def kind_of(problem: Problem) -> str:
    """Everything about a problem but its shape and operation, for example `bf16` or `bf16:fp32`."""
    return str(problem).removeprefix(f"{problem.operation}:").split(":", 1)[1]


def bandwidth_share(study: Study) -> float | None:
    """Bytes that any implementation moves, over the winner's time and the GPU's nominal bandwidth;
    None without a winner, and for a GPU that search_spaces/gpus.yaml does not know."""
    if study.winner is None or study.winner.result.us is None:
        return None
    try:
        target = find_target(study.gpu)
    except NormforgeError:
        return None
    from generator.operations import operation_of

    seconds = study.winner.result.us * 1e-6
    moved = operation_of(study.problem).traffic_bytes(study.problem)
    return moved / (seconds * target.bandwidth)


def runners_up(study: Study) -> list[tuple[str, float]]:
    """The three best finalists beside the winner: variant, and time over the winner's less 1."""
    winner = study.winner
    if winner is None or not winner.result.ratio:
        return []
    others = [
        (kernel_of(config, study.problem).id, result.ratio / winner.result.ratio - 1)
        for config, result in study.finals
        if result.ratio and may_win(config, result) and config != winner.config
    ]
    return sorted(others, key=lambda other: other[1])[:3]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known else None
