"""The stored study of one problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from generator.errors import NormforgeError
from generator.kernels.geometry import Config
from generator.result import Result
from generator.studies.outage import reason_of, retry_in_outage
from generator.studies.records import UNREADABLE, Winner

_T = TypeVar("_T")
METRIC = "time over the floor"
"""What the value of a trial is, by the name that optuna-dashboard shows."""


class StudyLog:
    """The stored study of one problem, which may still have one of its `older_names`. While a
    database is away its methods wait for it."""

    def __init__(self, storage: BaseStorage, name: str, older_names: Sequence[str] = ()) -> None:
        self.name = name
        self._study = self._retry(lambda: _load_study(storage, name, older_names))
        self.name = self._study.study_name

    def trials(self) -> list[FrozenTrial]:
        """Trials with a record, oldest first, also those that are out of date."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return self._retry(lambda: self._study.get_trials(deepcopy=False, states=states))

    def current_trials(self) -> list[FrozenTrial]:
        """Those that were not out of date when the study was last searched."""
        outdated = self.outdated
        return [trial for trial in self.trials() if trial.number not in outdated]

    def add(self, trial: FrozenTrial) -> None:
        """Write one finished trial in one record."""
        self._retry(lambda: self._study.add_trial(trial))

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


def _load_study(storage: BaseStorage, name: str, older_names: Sequence[str]) -> optuna.Study:
    for known in (name, *older_names):
        with suppress(KeyError):
            return optuna.load_study(study_name=known, storage=storage)
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
