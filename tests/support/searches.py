"""A search on a made-up cost, with what most tests of searches have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from generator.kernels.geometry import Config
from generator.kernels.strategies import is_deterministic
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.search.budget import Budget
from generator.search.sampler import LegalSampler, distributions
from generator.search.search import search_problem
from generator.space.family import Family, family_of
from generator.space.legal_configs import LegalConfigs, Values
from generator.space.space import Space
from generator.studies.records import Record, Winner, study_name
from generator.studies.study_log import StudyLog
from tests.support.synthetic import LEGAL, PROBLEM, SPACE, TARGET, FakeEvaluator, FakePool, cost

NAME = study_name(PROBLEM, TARGET, "measured")
DETERMINISTIC = [config for config in LEGAL.reduction_kinds if is_deterministic(config)]


def search(
    storage: BaseStorage,
    evaluator: FakeEvaluator | None = None,
    trials: int = 40,
    pool: FakePool | None = None,
    problem: Problem = PROBLEM,
    space: Space = SPACE,
    budget: Budget | None = None,
    **options: Any,
) -> Winner | None:
    """`search_problem` with what most tests have in common."""
    return search_problem(
        LegalConfigs(space, problem, TARGET),
        pool or FakePool(),
        evaluator or FakeEvaluator(),
        storage,
        budget or Budget(trials=trials),
        **options,
    )


@contextmanager
def quick_proposals() -> Iterator[None]:
    """Let the sampler look at few candidates, with small forests.

    For tests that do not depend on how good its proposals are: three quarters of a search on a
    made-up cost are its looking.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("generator.search.sampler.DRAWN", 8)
        patch.setattr("generator.search.sampler.STEP", (4, 1))
        patch.setattr("generator.search.surrogate.TREES", 3)
        yield


def won(winner: Winner | None) -> Winner:
    assert winner is not None
    return winner


def records(storage: BaseStorage, name: str = NAME) -> list[Record]:
    return [Record.from_trial(trial) for trial in StudyLog(storage, name).trials()]


def ratio_of(config: Config) -> float:
    return cost(make_variant(config, PROBLEM))


def of_families(count: int) -> list[Values]:
    """Legal configs that may win, each of another family."""
    rng = random.Random(5)
    found: dict[Family, Values] = {}
    while len(found) < count:
        config = LEGAL.draw(rng, ())
        assert config is not None
        found.setdefault(family_of(config), config)
    return list(found.values())


def new_study(sampler: LegalSampler) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler)


def ask_and_tell(sampler: LegalSampler, trials: int) -> list[dict[str, int | str]]:
    """The configs that a sampler proposes when every fifth trial fails, as in a real study."""
    study = new_study(sampler)
    configs = []
    for number in range(trials):
        trial = study.ask(distributions(SPACE))
        configs.append(dict(trial.params))
        failed = number % 5 == 4
        trial.set_constraint("infeasible", float(failed))
        if failed:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, ratio_of(trial.params))
    return configs


def killed_after(count: int, add: Callable[..., None]) -> Callable[..., None]:
    """`StudyLog.add`, which a kill ends after so many trials."""

    def killed(log: StudyLog, trial: FrozenTrial) -> None:
        nonlocal count
        if not count:
            raise KeyboardInterrupt
        count -= 1
        add(log, trial)

    return killed
