"""Learning from other shapes: which configs are fast, and which studies count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from statistics import median
from typing import Any

import pytest
from optuna.storages import BaseStorage, InMemoryStorage
from sklearn.ensemble import HistGradientBoostingRegressor

from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.search.experience import (
    FEWEST_TRIALS,
    STUDIES,
    Experience,
    Timed,
    TooFewTrialsError,
    by_distance,
    learn,
)
from generator.search.sampler import FIRST, LegalSampler
from generator.search.starts import distance
from generator.space.legal_configs import LegalConfigs, Values
from generator.studies.records import study_name
from tests.support.searches import ask_and_tell, ratio_of, records, search
from tests.support.synthetic import LEGAL, PROBLEM, SPACE, TARGET, FakeEvaluator, cost

OTHERS = ("4096x512:bf16", "8192x1024:bf16", "2048x2048:bf16")


def drawn(legal: LegalConfigs, count: int, seed: int = 0) -> list[Values]:
    rng = random.Random(seed)
    return [config for _ in range(count) if (config := legal.draw(rng, ()))]


def trials(shape: str, count: int = 60) -> Timed:
    problem = Problem.parse(shape)
    configs = drawn(LegalConfigs(SPACE, problem, TARGET), count)
    return problem, [(config, 7.0 * cost(make_variant(config, problem))) for config in configs]


@pytest.fixture(scope="module")
def experience() -> Experience:
    return Experience(LEGAL, map(trials, OTHERS))


def test_configs_that_are_fast_at_other_shapes_are_expected_to_be(experience: Experience) -> None:
    configs = drawn(LEGAL, 200, seed=1)
    expected = experience.expect(configs)
    by_expectation = sorted(range(200), key=expected.__getitem__)
    ratios = [ratio_of(configs[place]) for place in by_expectation]
    assert sum(ratios[:40]) < sum(ratios[80:120]) < sum(ratios[160:])
    assert experience.expect(configs) == expected and experience.expect([]) == []


def test_fast_trials_of_a_shape_count_most(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fit(model: Any, rows: Any, logs: Any, sample_weight: list[float]) -> Any:
        given.update(logs=logs, weights=sample_weight)
        return model

    monkeypatch.setattr(HistGradientBoostingRegressor, "fit", fit)
    Experience(LEGAL, [trials(OTHERS[0], FEWEST_TRIALS)])
    # The logarithm has an end, the weight has none.
    pairs = sorted(zip(given["logs"], given["weights"], strict=True), key=lambda p: (p[0], -p[1]))
    weights = [weight for _, weight in pairs]
    assert weights == sorted(weights, reverse=True) and weights[0] > 2 * weights[-1]


def test_the_window_is_among_what_is_learned_from(experience: Experience) -> None:
    config = {**LEGAL.first(1)[0], "rows_per_cta": 2}
    assert LEGAL.window(config) in experience._features(config, PROBLEM)


def test_what_is_expected_is_relative_to_the_best_of_a_shape(experience: Experience) -> None:
    """The unit of its times does not matter, and trials that may not win count for nothing."""
    slower = [(p, [(c, 3 * t) for c, t in own]) for p, own in map(trials, OTHERS)]
    more = [(p, [*own, (own[0][0], inf)]) for p, own in slower]
    configs = drawn(LEGAL, 20, seed=2)
    wanted = experience.expect(configs)
    for studies in (slower, more):
        assert Experience(LEGAL, studies).expect(configs) == pytest.approx(wanted, abs=1e-9)


def test_too_few_trials_are_no_experience() -> None:
    problem, own = trials(OTHERS[0], FEWEST_TRIALS)
    assert Experience(LEGAL, [(problem, own)])
    with pytest.raises(TooFewTrialsError):
        Experience(LEGAL, [(problem, [*own[1:], (own[0][0], inf)])])
    foreign = [({**config, "strategy": "of another time"}, time) for config, time in own]
    with pytest.raises(TooFewTrialsError):
        Experience(LEGAL, [(problem, foreign)])


def test_trials_from_before_a_knob_have_its_neutral_value() -> None:
    problem, own = trials(OTHERS[0], 2 * FEWEST_TRIALS)
    late = [(config, time) for config, time in own if config["arrival"] == "late"]
    older = [({k: v for k, v in config.items() if k != "arrival"}, time) for config, time in late]
    assert len(late) > FEWEST_TRIALS
    configs = drawn(LEGAL, 5)
    expected = Experience(LEGAL, [(problem, late)]).expect(configs)
    assert Experience(LEGAL, [(problem, older)]).expect(configs) == expected


@pytest.mark.parametrize("knob", ["spare_sms", "cluster"])
def test_trials_without_a_knob_of_today_are_left_out(knob: str) -> None:
    problem, own = trials(OTHERS[0], FEWEST_TRIALS)
    older = [({k: v for k, v in config.items() if k != knob}, time) for config, time in own]
    with pytest.raises(TooFewTrialsError):
        Experience(LEGAL, [(problem, older)])
    configs = drawn(LEGAL, 5)
    both = Experience(LEGAL, [(problem, own), (problem, older)])
    assert both.expect(configs) == Experience(LEGAL, [(problem, own)]).expect(configs)


def test_the_nearest_shapes_with_times_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.search.experience.FEWEST_TRIALS", 2)
    _, own = trials(OTHERS[0], 1)
    studies: list[Timed] = [
        (Problem.parse(f"{64 * m}x1024:bf16"), own if m % 2 else []) for m in range(1, 90)
    ]
    asked: list[Problem] = []

    def watched() -> Iterator[Timed]:
        for problem, some in by_distance(PROBLEM, studies):
            asked.append(problem)
            yield problem, some

    Experience(LEGAL, watched())
    with_times = [problem for problem in asked if (problem, own) in studies]
    assert len(with_times) == STUDIES and asked[-1] == with_times[-1]
    far = distance(asked[-1], PROBLEM)
    assert all(distance(p, PROBLEM) >= far for p, _ in studies if p not in asked)


def test_a_sampler_with_experience_begins_with_what_it_expects(experience: Experience) -> None:
    first, again = (ask_and_tell(LegalSampler(LEGAL, 1, experience), FIRST) for _ in range(2))
    assert first == again
    without = ask_and_tell(LegalSampler(LEGAL, 1), FIRST)
    best, usual = (sorted(map(ratio_of, configs)) for configs in (first, without))
    assert sum(best[:10]) < sum(usual[:10])
    assert len({LEGAL.key(config) for config in first}) == FIRST


def test_with_experience_the_surrogate_is_told_the_window(
    experience: Experience, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the window of what was tried, of what is under way and of the candidates."""
    told: list[tuple[float, ...]] = []

    def watched(tried: Any, times: Any, pending: Any, candidates: Any, expected: Any) -> int:
        told.extend((*tried, *pending, *candidates))
        return 0

    monkeypatch.setattr("generator.search.sampler.most_promising", watched)
    configs = ask_and_tell(LegalSampler(LEGAL, 1, experience), 4)
    rows = {LEGAL.rank(config): LEGAL.window(config) for config in configs}
    assert rows.keys() <= {row[:-2] for row in told}
    assert all(
        window == rows.get(rank, window) for *rank_, window, _ in told for rank in [tuple(rank_)]
    )
    told.clear()
    configs = ask_and_tell(LegalSampler(LEGAL, 1), FIRST + 3)
    assert set(map(LEGAL.rank, configs)) <= set(told), "it would mislead where nothing is known"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.search.experience.FEWEST_TRIALS", 10)


def searched(storage: BaseStorage, shape: str, trials: int = 20, **options: Any) -> None:
    search(storage, FakeEvaluator(**options), trials=trials, problem=Problem.parse(shape))


@pytest.mark.usefixtures("few", "quick_proposals")
def test_the_studies_of_the_same_gpu_are_learned_from() -> None:
    storage = InMemoryStorage()
    assert learn(LEGAL, storage, "measured") is None
    searched(storage, str(PROBLEM))
    assert learn(LEGAL, storage, "measured") is None, "its own trials are no experience"
    searched(storage, "4096x512:bf16", evidence="predicted")
    assert learn(LEGAL, storage, "measured") is None and learn(LEGAL, storage, "predicted") is None
    searched(storage, "4096x512:bf16")
    assert learn(LEGAL, storage, "measured") is not None
    for elsewhere in ({"sms": 16}, {"name": "h100"}):
        target = TARGET.__class__(**{**TARGET.__dict__, **elsewhere})
        assert learn(LegalConfigs(SPACE, PROBLEM, target), storage, "measured") is None


@pytest.mark.usefixtures("few", "quick_proposals")
def test_a_search_begins_with_what_it_learned_from_its_storage() -> None:
    def first_proposals(storage: BaseStorage) -> float:
        search(storage, trials=30)
        return median([r.ratio for r in records(storage) if r.origin == "search"][:10])

    storage = InMemoryStorage()
    searched(storage, "4096x512:bf16", trials=60)
    assert first_proposals(storage) < first_proposals(InMemoryStorage())


@pytest.mark.usefixtures("few")
def test_a_damaged_study_is_left_out() -> None:
    storage = InMemoryStorage()
    searched(storage, "4096x512:bf16")
    name = study_name(Problem.parse("4096x512:bf16"), TARGET, "measured")
    number = storage.get_study_id_from_name(name)
    for trial in storage.get_all_trials(number, deepcopy=False):
        trial.user_attrs.pop("result")
    assert learn(LEGAL, storage, "measured") is None
