"""Finished and running studies, read for people. No study changes; to open a database may make
tables that it lacks."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.kernels.strategies import Strategy, strategy_of
from generator.problem import Problem
from generator.result import Result
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space_once, space_file
from generator.studies.excerpt import read_journal
from generator.studies.outage import without_credentials
from generator.studies.records import (
    UNREADABLE,
    Record,
    StudyFacts,
    Winner,
    fastest_first,
    median_floors,
    over_floor,
    plain_floor,
    unreadable_error,
)
from generator.studies.storage import JOURNAL_NAME, database_file, open_storage
from generator.studies.study_log import StudyLog, winner_of, without_copied
from generator.target import Target, find_target


@dataclass(frozen=True)
class Study:
    """One study of one problem.

    number: its number in the storage, by which optuna-dashboard knows it; evidence: "measured" or
    "predicted"; records: finished trials, oldest first, but for those that were out of date when
    the study was last searched; winner: None before the finals, or when nothing may win; finals:
    configs and results of the finals; importance: share of each knob, {} where unknown; machine:
    facts about the one that held the finals.
    """

    name: str
    number: int
    problem: Problem
    gpu: str
    sms: int
    evidence: str
    records: tuple[Record, ...]
    winner: Winner | None
    finals: tuple[tuple[Config, Result], ...]
    importance: Mapping[str, float]
    machine: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def ranked(self) -> tuple[Record, ...]:
        """Records of what may win, fastest first."""
        return tuple(record for record in self.by_time if record.feasible)

    @cached_property
    def by_time(self) -> tuple[Record, ...]:
        """Records with a time, fastest first, whether or not they may win."""
        return tuple(fastest_first(self.records))

    def over_floor(self, record: Record) -> float:
        """The time of one of its records over the median floor; infinite where it has none."""
        return over_floor(record.result, self._floors)

    @cached_property
    def _floors(self) -> dict[str, float]:
        return median_floors(record.result for record in self.records)

    @cached_property
    def plain_floor(self) -> bool:
        """True when its ratios are to a floor of fewer bytes (see records)."""
        results = [self.winner.result] if self.winner else [r.result for r in self.ranked[:1]]
        return any(plain_floor(self.problem, self.evidence, result) for result in results)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Trials by outcome, commonest first."""
        return dict(Counter(record.result.outcome for record in self.records).most_common())

    @cached_property
    def ratio(self) -> float | None:
        """The winner's ratio to the floor in the finals; before them that of the fastest trial."""
        if self.winner is not None:
            return self.winner.result.ratio
        return self.over_floor(self.ranked[0]) if self.ranked else None

    @property
    def overhead(self) -> float | None:
        """The overhead of determinism, where it is known."""
        return self.winner.overhead_of_determinism if self.winner else None

    @cached_property
    def best_by_strategy(self) -> dict[Strategy, Record]:
        """The fastest record of every strategy, the fastest first, among those that are accurate; a
        strategy that may not win has one, too."""
        best: dict[Strategy, Record] = {}
        for record in self.by_time:
            best.setdefault(strategy_of(record.config), record)
        return best


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python does not look for garbage: among records it finds none, in a quarter of the time that
    reading them takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def read_studies(
    where: str | Path,
    *,
    importance: bool = False,
    wanted: Callable[[StudyFacts], bool] | None = None,
    first: int | None = None,
) -> list[Study]:
    """The studies with trials at `where`: a storage URL, or the folder of a GPU with a study file,
    packed or not. Raises NormforgeError when there is none.

    importance: compute that of the knobs, too. wanted: says of each study whether to read it, by
    default all; where it wants none, there are none. first: of a folder, only so many records of
    its journal, as `read_journal` does."""

    if "://" in str(where):
        file = database_file(where)
        if file is not None and not file.exists():
            raise NormforgeError(f"no studies in {file}: there is no such file")
        storage, place = open_storage(where), describe_location(where)
    else:
        place = describe_location(where)
        if not Path(place).exists():
            raise NormforgeError(
                f"no studies in {where}: neither {JOURNAL_NAME} nor {JOURNAL_NAME}.xz; "
                "tune first, or name another folder with --out"
            )
        storage = read_journal(Path(place), wanted and partial(_belongs, wanted), first)
    found = _read(storage, place, importance, wanted)
    if not found and wanted is None:
        raise NormforgeError(f"{place} has no study with finished trials")
    return found


def _belongs(wanted: Callable[[StudyFacts], bool], name: str) -> bool:
    facts = StudyFacts.of_name(name)
    return facts is not None and wanted(facts)


def describe_location(where: str | Path) -> str:
    """The place of studies for people: a URL without user, password and options, or a file."""
    if "://" in str(where):
        return without_credentials(str(where))
    journal = Path(where) / JOURNAL_NAME
    packed = journal.with_name(f"{JOURNAL_NAME}.xz")
    return str(packed if packed.exists() and not journal.exists() else journal)


def _read(
    storage: BaseStorage,
    place: str,
    importance: bool,
    wanted: Callable[[StudyFacts], bool] | None,
) -> list[Study]:
    found = []
    for entry in without_copied(storage.get_all_studies()):
        facts = StudyFacts.of_name(entry.study_name)
        if facts is None or (wanted is not None and not wanted(facts)):
            continue
        try:
            study = _read_study(storage, entry, facts, importance)
        except UNREADABLE as error:
            told = unreadable_error(entry.study_name, error)
            raise NormforgeError(f"{place}: {told}") from error
        if study.records:
            found.append(study)
    return found


def _read_study(
    storage: BaseStorage,
    entry: FrozenStudy,
    facts: StudyFacts,
    importance: bool,
) -> Study:
    attributes = entry.user_attrs
    trials = StudyLog(storage, entry.study_name).current_trials()
    records, winner = tuple(map(Record.from_trial, trials)), winner_of(attributes)
    complete = _completing(facts)
    records = tuple(replace(record, config=complete(record.config)) for record in records)
    if winner is not None:
        winner = replace(winner, config=complete(winner.config))
    finals = [
        (complete(f["config"]), Result.from_json(f["result"])) for f in attributes.get("finals", ())
    ]
    for config in [r.config for r in records] + ([winner.config] if winner else []):
        strategy_of(config)  # one that is unknown is told here
    return Study(
        name=entry.study_name,
        number=entry._study_id,
        **facts._asdict(),
        records=records,
        winner=winner,
        finals=tuple(finals),
        machine=dict(attributes.get("machine") or {}),
        importance=_importance(trials, records, facts) if importance else {},
    )


def _completing(facts: StudyFacts) -> Callable[[Config], Config]:
    """Return the function that gives recorded configs the knobs that were added to the space since;
    for a GPU that search_spaces/gpus.yaml does not know, it adds none."""
    space = load_space_once(space_file(facts.problem.operation))
    target = _target(facts)
    return LegalConfigs(space, facts.problem, target).complete if target else dict


def _target(facts: StudyFacts) -> Target | None:
    try:
        return replace(find_target(facts.gpu), sms=facts.sms)
    except NormforgeError:
        return None


def _importance(
    trials: Sequence[FrozenTrial], records: Sequence[Record], facts: StudyFacts
) -> dict[str, float]:
    """Share of each knob in being among the fastest tenth, by PED-ANOVA (Watanabe, Bansal and
    Hutter, "PED-ANOVA: Efficiently Quantifying Hyperparameter Importance in Arbitrary Subspaces",
    IJCAI 2023): the evaluator that needs nothing but Optuna, and the one optuna-dashboard shows.
    A knob counts in the trials where it means something; elsewhere its value only repeats what
    other knobs say. For a GPU that search_spaces/gpus.yaml does not know, all count everywhere."""
    problem, target = facts.problem, _target(facts)
    space = load_space_once(space_file(problem.operation))
    # One for each knob, though its choices may have grown between trials.
    choices: dict[str, dict[Any, None]] = {}
    for trial, record in zip(trials, records, strict=True):
        for knob, value in record.config.items():
            had = getattr(trial.distributions.get(knob), "choices", ())
            choices.setdefault(knob, {}).update(dict.fromkeys((*had, value)))
    known = {knob: CategoricalDistribution(tuple(found)) for knob, found in choices.items()}
    timed = []
    for trial, record in zip(map(copy, trials), records, strict=True):
        if trial.state != TrialState.COMPLETE:
            continue
        kept = space.active_knobs(record.config, problem, target) if target else {*record.config}
        trial.params = {knob: value for knob, value in record.config.items() if knob in kept}
        trial.distributions = {knob: known[knob] for knob in trial.params}
        timed.append(trial)
    if len(timed) < 2:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances  # a second

    study = optuna.create_study()
    # To add them would take ten times as long as what follows.
    study.get_trials = lambda *_, **__: timed  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Some regimes", UserWarning)  # a value tried once
        try:
            shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
        except (RuntimeError, ValueError):
            return {}  # too few trials, or all with the same time
    return dict(sorted(shares.items(), key=lambda entry: (-entry[1], entry[0])))
