"""The records of trials and winners, and the names of studies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from math import inf
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial

from generator.errors import NormforgeError, one_line
from generator.evaluate.predict.fitted import model_revision
from generator.kernels.geometry import Config
from generator.kernels.strategies import Strategy, is_deterministic, strategy_of
from generator.problem import Problem
from generator.result import FLOOR_BYTES, Result
from generator.target import Target


def may_win(config: Config, result: Result) -> bool:
    """Return True if a variant with this result can be a winner. The determinism class counts as
    well: an atomic sum that happened to repeat its bits in every run is still not deterministic."""
    return result.may_win and is_deterministic(config)


def plain_floor(problem: Problem, evidence: str, result: Result) -> bool:
    """Return True if the floor of a result moves fewer bytes than the problem: a ratio to it is too
    large. Before results said how many bytes their floor moves, that was torch.add(x, dy, out=dx)
    also with a residual; later ones left out what groups of rows share, such as cos and sin."""
    if evidence != "measured" or result.ratio is None:
        return False
    if unknown_bytes(result):
        return bool(problem.residual)
    if not problem.signature.groups:
        return False
    from generator.operations import operation_of  # this imports PyTorch

    return bool(result.extra[FLOOR_BYTES] < operation_of(problem).traffic_bytes(problem))


def unknown_bytes(result: Result) -> bool:
    """Return True if a result does not say how many bytes its floor moves."""
    return FLOOR_BYTES not in result.extra


def over_median_floor(results: Sequence[Result]) -> list[float]:
    """The times of results of one study, each over the median floor of those of the same GPU;
    infinite where none is known. Below 12 µs a trial's ratio to its own floor scatters by 3.5 %
    around that of the finals, and this by 2 %, because the floor scatters more than the kernels."""
    floors = median_floors(results)
    return [over_floor(result, floors) for result in results]


def median_floors(results: Iterable[Result], moved: int = 0) -> dict[str, float]:
    """The median floor of every GPU that measured one of the results. Floors of fewer bytes than
    `moved` or than others, which were measured before those, count as so much longer: only ratios
    change with that, and not which result is faster."""
    timed = [result for result in results if result.floor_us]
    most = max((result.extra.get(FLOOR_BYTES, 0) for result in timed), default=0)
    most = max(most, moved)
    floors = defaultdict(list)
    for result in timed:
        longer = most / result.extra.get(FLOOR_BYTES, most) if most else 1.0
        floors[result.gpu].append((result.floor_us or 0.0) * longer)
    return {gpu: median(own) for gpu, own in floors.items()}


def over_floor(result: Result, floors: Mapping[str, float]) -> float:
    """Return a result's time over the floor of its GPU, infinite where it has none."""
    return result.us / floors[result.gpu] if result.us and result.floor_us else inf


def now() -> str:
    """The date of a winner: UTC, ISO 8601, in whole seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)
"""Errors raised where a study has records that this version of the program does not know."""


def unreadable_error(study: str, error: Exception) -> NormforgeError:
    """The error for such a study."""
    reason = one_line(f"{type(error).__name__}: {error}", 200)
    return NormforgeError(
        f"study {study} cannot be read ({reason}): it is damaged, or of another version of this "
        "program: use that one, or another folder with --out"
    )


INCUMBENT_STAYS = "the incumbent: "
"""The first words of the reason of a winner that was the incumbent and counted as equal to the
fastest."""
FLOOR = "floor"
PLAIN_FLOOR = "a torch.add that leaves out the residual, or what groups of rows share"
"""The floors that a ratio can be to."""


@dataclass(frozen=True)
class Finalist:
    """A variant and its time in the finals. ratio is to the floor of the same blocks."""

    variant: str
    config: Mapping[str, int | str]
    us: float
    ratio: float


@dataclass(frozen=True)
class Winner:
    """The chosen variant of one problem and how it was chosen.

    variant: its id; cubin: digest of its machine code; result: that of the finals; evidence:
    "measured" or "predicted"; tied: the finalists that `choose` took for equal, and the winner;
    fastest_nondeterministic: the fastest variant that may not win because its bits change, None
    where none was timed; trials and counts: finished trials, in all and by outcome; reason: one
    sentence; date: end of the finals, UTC, ISO 8601.
    """

    problem: Problem
    target: str
    config: Mapping[str, int | str]
    variant: str
    cubin: str
    result: Result
    evidence: str
    tied: tuple[Finalist, ...]
    fastest_nondeterministic: Finalist | None
    trials: int
    counts: Mapping[str, int]
    study: str
    space_hash: str
    reason: str
    date: str

    @property
    def floor(self) -> str:
        """The floor that its ratios are to: FLOOR or PLAIN_FLOOR."""
        old = plain_floor(self.problem, self.evidence, self.result)
        return PLAIN_FLOOR if old else FLOOR

    @property
    def strategy(self) -> Strategy:
        """The strategy by which it turns the partial dw of all CTAs into dw."""
        return strategy_of(self.config)

    @property
    def overhead_of_determinism(self) -> float | None:
        """Time of the winner over that of the fastest non-deterministic variant."""
        if self.fastest_nondeterministic is None or self.result.ratio is None:
            return None
        return self.result.ratio / self.fastest_nondeterministic.ratio

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"problem": str(self.problem), "result": self.result.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Winner:
        fastest = data["fastest_nondeterministic"]
        known = {
            "problem": Problem.parse(data["problem"]),
            "result": Result.from_json(data["result"]),
            "tied": tuple(Finalist(**entry) for entry in data["tied"]),
            "fastest_nondeterministic": Finalist(**fastest) if fastest else None,
        }
        return cls(**{**data, **known})


def study_name(problem: Problem, target: Target, evidence: str) -> str:
    """Names the study of a problem: results that must not mix have different names. The number of
    SMs takes part because a slice of a GPU keeps its name. Templates and compiler take no part:
    each record says which code it was measured with. Nor does the search space: a result stands
    whatever else may be tried by now. Predictions of another model do not compare, so its revision
    takes part."""
    by = f"{evidence}-{model_revision()}" if evidence == "predicted" else evidence
    return f"{problem}@{target}-{target.sms}sm:{by}"


_NAME = re.compile(
    r"((?P<problem>[^@]+)@(?P<gpu>.+)-(?P<sms>\d+)sm:(?P<evidence>\w+)(-\w+)?)(:\w+)?"
)


def without_space(name: str) -> str:
    """The name of a study as `study_name` has it: earlier versions put a digest of the search space
    behind it, and began another study for every change of the space."""
    match = _NAME.fullmatch(name)
    return match[1] if match else name


class StudyFacts(NamedTuple):
    """The facts in the name of a study."""

    problem: Problem
    gpu: str
    sms: int
    evidence: str

    @classmethod
    def of_name(cls, name: str) -> StudyFacts | None:
        """Parse a study's name; None for a study of another program, or of a version that knows
        other operations."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        try:
            problem = Problem.parse(match["problem"])
        except NormforgeError:
            return None
        return cls(problem, match["gpu"], int(match["sms"]), match["evidence"])


@dataclass(frozen=True)
class Record:
    """One finished trial.

    variant: its id; origin: the part of the search that chose it; elapsed: seconds of search in the
    study when it finished; code: digest of what was compiled (`code_digest`); cubin: digest of the
    machine code; identity: digest of cubin and launch (equal ones are measured once);
    registers per thread and smem bytes per CTA of the main kernel, None without a cubin;
    shared_with: number of the trial whose result this one has, None when it has its own; finished:
    when, in local time, of one that was read from a study.
    """

    config: Config
    variant: str
    result: Result
    origin: str
    elapsed: float
    code: str = ""
    cubin: str = ""
    identity: str = ""
    registers: int | None = None
    smem: int | None = None
    shared_with: int | None = None
    finished: datetime | None = None

    @property
    def feasible(self) -> bool:
        return may_win(self.config, self.result)

    @property
    def ratio(self) -> float:
        """Ratio to the floor; infinite where no time is known."""
        return float("inf") if self.result.ratio is None else self.result.ratio

    def attributes(self) -> dict[str, Any]:
        """The user attributes of the trial, in which the whole record is stored. `outcome`,
        `feasible`, `us` and `floor_us` repeat what follows from the others, for people who look at
        the study."""
        result = self.result
        shown = {"outcome": result.outcome, "feasible": self.feasible}
        shown |= {"us": result.us, "floor_us": result.floor_us}
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        del kept["config"], kept["finished"]  # the trial has them itself
        kept |= {"result": result.to_json(), "elapsed": round(self.elapsed, 3)}
        return {"variant": self.variant} | shown | kept

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> Record:
        stored = {
            name: value
            for name, value in trial.user_attrs.items()
            if name in cls.__dataclass_fields__
        }
        result = Result.from_json(stored["result"])
        known = {"config": trial.params, "result": result, "finished": trial.datetime_complete}
        return cls(**{**stored, **known})


def fastest_first(
    records: Sequence[Record], rank: Callable[[Config], tuple[int, ...]] = lambda config: ()
) -> list[Record]:
    """The records of one study that have a time, in the order of `over_median_floor`, and equal
    ones in that of the `rank` of their configs."""
    times = over_median_floor([record.result for record in records])
    timed = [(t, rank(r.config), r) for t, r in zip(times, records, strict=True) if t < inf]
    return [record for _, _, record in sorted(timed, key=itemgetter(0, 1))]
