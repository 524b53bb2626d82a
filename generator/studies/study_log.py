"""The stored study of one problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, TypeVar

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.result import Result
from generator.studies.outage import reason_of, retry_in_outage
from generator.studies.records import UNREADABLE, Winner, without_space

_T = TypeVar("_T")
METRIC = "time over the floor"
"""The name under which optuna-dashboard shows the value of a trial."""
COPY_OF, CONTINUED_IN = "copy_of", "continued_in"
"""Attributes of the copy of a trial, and of a study whose trials another one has, too."""


class StudyLog:
    """The stored study of one problem: that of the name, or the last one with that name and the
    digest of a search space, which earlier versions wrote. While a database is away its methods
    wait for it."""

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self._storage, self.name = storage, name
        self._study = self._retry(lambda: _load_study(storage, name))
        self.name = self._study.study_name

    def trials(self) -> list[FrozenTrial]:
        """Trials with a record, oldest first, also those that are out of date."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return self._retry(lambda: self._study.get_trials(deepcopy=False, states=states))

    def current_trials(self) -> list[FrozenTrial]:
        """Return the trials that were not out of date when the study was last searched."""
        outdated = self.outdated
        return [trial for trial in self.trials() if trial.number not in outdated]

    def add(self, trial: FrozenTrial) -> None:
        """Write one finished trial in one record."""
        self._retry(lambda: self._study.add_trial(trial))

    def take_over(self) -> None:
        """Copy the trials of other studies with its name but for the search space. What a kill in
        the middle leaves is copied by the next call, and nothing twice. A search then finds all
        that is known of a problem in one study."""
        for name in self._retry(lambda: studies_like(self._storage, self.name)):
            if name != self.name:
                self._copy(StudyLog(self._storage, name))

    def _copy(self, other: StudyLog) -> None:
        own = {_origin(trial, self.name): trial.number for trial in self.trials()}
        before = self._elapsed(lambda t: not _origin(t, self.name).startswith(f"{other.name}#"))
        origins = {trial.number: _origin(trial, other.name) for trial in other.trials()}
        self._add_copies(other, origins, own, before, mark=True)
        if other._attributes().get(CONTINUED_IN) != self.name:
            self._retry(lambda: other._study.set_user_attr(CONTINUED_IN, self.name))

    def join(self, other: StudyLog) -> int:
        """Copy from the study of the same problem in another storage the trials that are not here
        yet, and its finals where they are later ones. Returns how many trials came. A trial is the
        same where the same config was finished in the same second. A kill in the middle leaves a
        part, and the next call copies the rest."""
        own = {_made(trial): trial.number for trial in self.trials()}
        keys = {trial.number: _made(trial) for trial in other.trials()}
        numbers = self._add_copies(other, keys, own, self._elapsed(lambda _: True), mark=False)
        outdated = {numbers[keys[number]] for number in other.outdated if number in keys}
        self.mark_outdated(self.outdated | outdated)
        here, there = self.winner, other.winner
        if there is not None and (here is None or there.date > here.date):
            theirs = other._attributes()
            attributes = {key: theirs.get(key) for key in ("finals", "machine", "winner")}
            self._keep_finals({**attributes, "trials_at_finals": len(numbers)})
        if (continued := other._attributes().get(CONTINUED_IN)) is not None:
            self._retry(lambda: self._study.set_user_attr(CONTINUED_IN, continued))
        return len(numbers) - len(own)

    def _elapsed(self, counts: Callable[[FrozenTrial], bool]) -> float:
        """The seconds of search that the trials took which count."""
        found = (t.user_attrs.get("elapsed", 0.0) for t in self.trials() if counts(t))
        return max(found, default=0.0)

    def _add_copies(
        self,
        other: StudyLog,
        keys: Mapping[int, str],
        known: Mapping[str, int],
        before: float,
        *,
        mark: bool,
    ) -> dict[str, int]:
        """Copy the trials of another study whose keys are not known, and return the numbers that
        all keys have here. keys: by the number of a trial there; before: seconds of search before
        them; mark: whether a copy says of what."""
        numbers = dict(known)
        following = len(self._retry(lambda: self._study.get_trials(deepcopy=False)))
        for trial in other.trials():
            key = keys[trial.number]
            if key in numbers:
                continue
            attributes = trial.user_attrs | ({COPY_OF: key} if mark else {})
            attributes["elapsed"] = round(before + attributes.get("elapsed", 0.0), 3)
            if (shared := attributes.get("shared_with")) is not None:
                attributes["shared_with"] = numbers.get(keys.get(shared, ""))
            copied = copy(trial)
            copied.user_attrs = attributes
            self.add(copied)
            numbers[key] = following
            following += 1
        return numbers

    @property
    def winner(self) -> Winner | None:
        """The winner of the last finals."""
        return winner_of(self._attributes())

    @property
    def outdated(self) -> frozenset[int]:
        """Numbers of the trials whose configs gave other machine code when the study was last
        searched."""
        return frozenset(self._attributes().get("outdated", ()))

    def mark_outdated(self, numbers: Collection[int]) -> None:
        """Keep which trials are out of date, for those who only read the study."""
        if self.outdated != frozenset(numbers):
            self._retry(lambda: self._study.set_user_attr("outdated", sorted(numbers)))

    @property
    def trials_at_finals(self) -> int:
        """Trials that the study had at its last finals, 0 before there were any."""
        attributes = self._attributes()
        counted = attributes.get("trials_at_finals")
        if counted is None:  # written before finals were counted
            winner = winner_of(attributes)
            return winner.trials if winner else 0
        return int(counted)

    @property
    def machine(self) -> Mapping[str, Any]:
        """Facts about the machine that held the finals; empty where it said none."""
        return dict(self._attributes().get("machine") or {})

    def save_finals(
        self,
        winner: Winner | None,
        finals: Sequence[tuple[Config, Result]],
        trials: int,
        machine: Mapping[str, Any],
    ) -> None:
        """Keep the finals and their winner as attributes of the study. The one that says that they
        are over, after `trials` trials in all, is written last."""
        entries = [{"config": dict(c), "result": r.to_json()} for c, r in finals]
        attributes: dict[str, Any] = {"finals": entries, "machine": dict(machine)}
        attributes["winner"] = winner and winner.to_json()
        attributes["trials_at_finals"] = trials
        self._keep_finals(attributes)

    def _keep_finals(self, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            self._retry(partial(self._study.set_user_attr, key, value))

    def _attributes(self) -> Mapping[str, Any]:
        return self._retry(lambda: self._study.user_attrs)

    def _retry(self, work: Callable[[], _T]) -> _T:
        try:
            return retry_in_outage(work)
        except (OSError, StorageInternalError) as error:
            raise NormforgeError(
                f"cannot write to study {self.name} ({reason_of(error)}): finished trials are "
                "kept; put the storage right and run the same command to continue"
            ) from error


def _origin(trial: FrozenTrial, study: str) -> str:
    """Return the identity of a trial, the same in all studies that have copies of it."""
    return str(trial.user_attrs.get(COPY_OF, f"{study}#{trial.number}"))


def _made(trial: FrozenTrial) -> str:
    """Return the identity of a trial, the same in copies of the study in other storages, of which
    some keep whole seconds only."""
    when = trial.datetime_complete
    return f"{when and when.replace(microsecond=0)} {sorted(trial.params.items())}"


def studies_like(storage: BaseStorage, name: str) -> list[str]:
    """The studies in a storage whose names are equal but for the search space, oldest first."""
    names = [study.study_name for study in storage.get_all_studies()]
    return [known for known in names if without_space(known) == without_space(name)]


def without_copied(studies: Sequence[FrozenStudy]) -> list[FrozenStudy]:
    """The studies of a storage but those whose trials another one of them has, too."""
    names = {study.study_name for study in studies}
    return [study for study in studies if study.user_attrs.get(CONTINUED_IN) not in names]


def _load_study(storage: BaseStorage, name: str) -> optuna.Study:
    with suppress(KeyError):
        return optuna.load_study(study_name=name, storage=storage)
    if name == without_space(name) and (older := studies_like(storage, name)):
        return optuna.load_study(study_name=older[-1], storage=storage)
    study = optuna.create_study(
        storage=storage, study_name=name, direction="minimize", load_if_exists=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names([METRIC])
    return study


def stored_winners(storage: BaseStorage) -> list[Winner]:
    """Winners of every study in the storage, oldest first."""
    found = [winner_of(study.user_attrs) for study in storage.get_all_studies()]
    return sorted((winner for winner in found if winner), key=lambda winner: winner.date)


def winner_of(attributes: Mapping[str, Any]) -> Winner | None:
    """The winner that a study has among its attributes."""
    try:
        return Winner.from_json(attributes["winner"])
    except (*UNREADABLE, NormforgeError):
        # No finals yet, none won, or another version of this program wrote them, which may know
        # other operations.
        return None
