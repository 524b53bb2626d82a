"""The learned correction and the prior: stored as the fit gives them, bounded, and they rank."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pages.text import read
from benchmarks.prediction.fit import examples, fit_all, held_out
from benchmarks.prediction.score import least, score
from benchmarks.prediction.shapes import MEASURED, Shape, Trial, digests_of, physical, read_shapes
from generator.cli.pack import pack
from generator.evaluate.predict.correction import BOUND
from generator.evaluate.predict.evaluator import Predictor
from generator.evaluate.predict.fitted import (
    FITTED_FILE,
    Fitted,
    code_of,
    load_fitted,
    model_revision,
)
from generator.evaluate.predict.model import floor_us
from generator.evaluate.predict.prior import CARRIED, agreement
from generator.kernels.ptxas import Resources
from generator.kernels.variant import make_variant
from generator.paths import GENERATED
from generator.problem import Problem
from generator.result import Result
from generator.search.choose_winner import Preference, choose
from generator.space.load import UNPREDICTED, load_space
from generator.studies.records import INCUMBENT_STAYS, study_name
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.target import find_target
from tests.support.searches import DETERMINISTIC, search, won
from tests.support.synthetic import FLOOR_US, PROBLEM, TARGET, FakeEvaluator, cost

SPACE = load_space()
FITTED = load_fitted()
FOLDERS = [GENERATED / gpu for gpu in MEASURED]
GB200 = find_target("gb200")
PLAIN = Problem.parse("4096x4096:bf16")


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    return read_shapes(FOLDERS, known=FITTED.studies)


def test_fitted_file_is_of_the_committed_studies() -> None:
    """The studies are as they were: searches that go on append, and leave the model as it is."""
    found = digests_of(FOLDERS, FITTED.studies)
    assert found == FITTED.studies, "what was fitted changed: python -m benchmarks.prediction fit"


def test_a_shape_may_get_a_kernel_that_is_never_predicted_and_the_model_stays(
    tmp_path: Path,
) -> None:
    """The model is of the trials that it saw. One that sees the later ones, too, learns of the same
    kinds of kernels: the others are left out, also as winners."""
    folder = tmp_path / "h200"
    folder.mkdir()
    journal = folder / JOURNAL_NAME
    knob, value = UNPREDICTED
    search(open_storage(journal), trials=20, space=SPACE.without(knob, value))
    pack(folder)
    seen, before = digests_of([folder]), read_shapes([folder])
    faster = FakeEvaluator(lambda variant: cost(variant) - 0.4 * (variant[knob] == value))
    winner = won(search(open_storage(journal), faster, trials=36))
    assert winner.config[knob] == value
    pack(folder)
    assert digests_of([folder], seen) == seen != digests_of([folder])
    assert read_shapes([folder], known=seen) == before
    (now,) = read_shapes([folder])
    assert len(before[0].trials) <= len(now.trials) < 36
    assert all(config[knob] != value for config in (now.won, *(t.config for t in now.trials)))


def test_times_over_a_floor_without_the_residual_are_over_one_with_it(tmp_path: Path) -> None:
    """Earlier versions had such floors, and what is predicted is over the longer one."""
    folder, problem = tmp_path / "h200", replace(PROBLEM, residual="bf16")
    folder.mkdir()
    search(open_storage(folder / JOURNAL_NAME), trials=20, problem=problem)
    (shape,) = read_shapes([folder])
    longer = floor_us(problem, TARGET) / floor_us(PROBLEM, TARGET)
    assert shape.floor_us == pytest.approx(FLOOR_US * longer) and longer > 1.1
    for trial in shape.trials:
        assert exp(trial.log_ratio) * longer == pytest.approx(cost(trial.variant))


@pytest.mark.parametrize("name", ["widths", "gpus", "layernorm"])
def test_committed_scores_are_of_the_studies_that_the_fit_saw(name: str) -> None:
    """A page then does not show how an older model ranks."""
    scores = read(f"prediction_{name}")
    for gpu, found in scores.items():
        assert found["studies"] == FITTED.studies, f"{gpu}: docs/prediction.md has the commands"
    if name == "layernorm":
        assert scores["h200"]["facts"]["error_at_choices"] == FITTED.errors["layernorm_backward"]


@pytest.mark.parametrize(("fastest", "slowdown"), [(0, 0.0), (4, 0.0), (5, 1.0)])
def test_the_best_of_five_is_of_five_different_trials(fastest: int, slowdown: float) -> None:
    variant = make_variant(DETERMINISTIC[0], PROBLEM)
    trial = Trial(variant, Resources(32, 0, 0, 0), log(2.0), True)
    trials = [replace(trial, log_ratio=log(1.0 + (place != fastest))) for place in range(7)]
    shape = Shape(PROBLEM, TARGET, tuple(trials), variant.config, FLOOR_US)
    found = score(shape, [1.0 + place for place in range(7)], least)
    assert (found.of_five, found.first) == (slowdown, float(fastest != 0))


def test_held_out_factors_are_learnt_from_the_shapes_of_other_groups() -> None:
    """Each shape has two trials, for which the physical terms leave the same to be explained."""
    trial = Trial(make_variant(DETERMINISTIC[0], PROBLEM), Resources(32, 0, 0, 0), 0.2, True)
    shapes = [Shape(PROBLEM, TARGET, (trial, trial), trial.config, FLOOR_US)] * 4
    groups, left = ["wide", "narrow", "wide", "long"], (0.04, 0.1, -0.02, 0.2)
    rows = [np.array([[0.0], [1.0]])] * 4
    found = held_out(shapes, groups, ("feature",), rows, [np.full(2, each) for each in left])
    wide, narrow, long = (0.1 + 0.2) / 2, (0.04 - 0.02 + 0.2) / 3, (0.04 + 0.1 - 0.02) / 3
    for factors, expected in zip(found, (wide, narrow, wide, long), strict=True):
        assert factors == pytest.approx([expected] * 2, abs=1e-4)


@pytest.mark.slow
def test_fitted_file_is_what_the_fit_gives(shapes: list[Shape]) -> None:
    # Trees are grown one after another: the first ones tell of other trials, features or constants.
    again = fit_all(shapes, trees=2)
    assert again.names == FITTED.correction.names
    assert again.base == FITTED.correction.base
    assert again.trees == FITTED.correction.trees[:2]
    won = {(str(s.problem), s.won["strategy"]) for s in shapes}
    assert {(str(w.problem), w.config["strategy"]) for w in FITTED.prior.winners} == won


@pytest.mark.slow
def test_correction_ranks_better_than_the_physical_terms(shapes: list[Shape]) -> None:
    some = shapes[::9]
    _, rows, _ = examples(some)
    before, after = [], []
    for shape, row in zip(some, rows, strict=True):
        times = physical(shape)
        names = FITTED.correction.names
        factors = [exp(FITTED.correction.log_factor(dict(zip(names, r, strict=True)))) for r in row]
        before.append(score(shape, times, least))
        after.append(score(shape, [t * f for t, f in zip(times, factors, strict=True)], least))
    assert fmean(s.spearman for s in after) > fmean(s.spearman for s in before) + 0.1
    assert fmean(s.first for s in after) < fmean(s.first for s in before)


def test_fitted_survives_its_file() -> None:
    assert Fitted.from_json(json.loads(json.dumps(FITTED.to_json()))) == FITTED
    assert FITTED_FILE.stat().st_size < 100_000


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=len(FITTED.correction.names), max_size=100))
def test_factor_is_bounded_whatever_the_features(values: list[float]) -> None:
    known = dict(zip(FITTED.correction.names, values, strict=False))
    assert abs(FITTED.correction.log_factor(known)) <= BOUND


def test_expected_error_is_a_sober_number() -> None:
    assert all(0.01 < error < 0.2 for error in FITTED.errors.values())
    assert FITTED.errors.keys() == {"rmsnorm_backward", "layernorm_backward"}


def test_revision_follows_the_code_and_not_what_people_read() -> None:
    code = 'import a\n\n\ndef f(x):\n    """Double."""\n    return f"{2 * x}#"  # fast\n'
    assert code_of(code) == 'def f(x):\n    return f"{2 * x}#"'
    for old, new in (
        ("Double", "Twice"),
        ("fast", "slow"),
        ("import a", "from b import c"),
        ("\n\n\n", "\n"),
    ):
        assert code_of(code.replace(old, new)) == code_of(code)
    assert code_of(code) != code_of(code.replace("2 * x", "3 * x"))


def test_committed_predictions_have_the_name_of_todays_model() -> None:
    """The name is the same on every Python, so nobody searches again for what is known."""
    assert model_revision() == "a7019b14", "docs/prediction.md: when the model changes"


# The prior.


@pytest.mark.parametrize("name", ["h200", "gb200", "a100"])
def test_starts_are_measured_winners_near_the_shape(name: str) -> None:
    target = find_target(name)
    starts = Predictor(target).starts(Problem.parse("4096x4096:bf16"))
    assert len(starts) == 8
    nearest = FITTED.prior.nearest(Problem.parse("4096x4096:bf16"), target)
    assert all(1024 <= winner.problem.N <= 16384 for winner in nearest)
    assert nearest[0].problem.dtype == "bf16"


def test_winner_of_the_very_shape_is_the_nearest() -> None:
    assert FITTED.prior.nearest(PLAIN, find_target("h200"))[0].problem == PLAIN


def test_knobs_that_no_term_sees_are_carried_over() -> None:
    predictor = Predictor(GB200)
    won = FITTED.prior.nearest(PLAIN, GB200)[0].config
    assert won["load_hint"] == "evict_last"
    for knob in CARRIED:
        values = [value for k in SPACE.knobs if k.name == knob for value in k.values]
        best = max(values, key=lambda v: predictor.agreement(PLAIN, {**won, knob: v}))
        votes = FITTED.prior.votes(PLAIN, GB200)
        assert votes[knob, best] == max(votes.get((knob, v), 0.0) for v in values)


def test_strategy_counts_more_than_all_carried_knobs() -> None:
    votes = {("strategy", "mailbox"): 0.5, ("strategy", "separate"): 0.45}
    votes |= {(knob, "default"): 1.0 for knob in CARRIED}
    bare = dict.fromkeys(CARRIED, "streaming")
    carried = dict.fromkeys(CARRIED, "default")
    mailbox, separate = {"strategy": "mailbox"}, {"strategy": "separate"}
    assert agreement(votes, mailbox | bare) > agreement(votes, separate | carried)
    assert agreement(votes, mailbox | carried) > agreement(votes, mailbox | bare)


# The consequences for winners.


def final(ratio: float, **knobs: str) -> tuple[dict[str, int | str], Result]:
    config: dict[str, int | str] = {"strategy": "mailbox", "order": "turns", **knobs}
    return config, Result("ok", us=100 * ratio, floor_us=100.0, ratio=ratio)


FINALS = [
    final(1.000, strategy="column_slices"),
    final(1.010, strategy="separate"),
    final(1.015),
    final(1.012),
    final(1.100),
]


@pytest.mark.parametrize(("won", "chosen"), [("mailbox", 3), ("separate", 1)])
def test_equal_predictions_go_to_what_won(won: str, chosen: int) -> None:
    """They do even if that needs a launch more."""
    likes = Preference(0.02, lambda config: float(config["strategy"] == won))
    choice = choose(FINALS, lambda config: (0,), None, likes)
    assert choice is not None
    assert choice.winner == chosen and 4 not in choice.tied
    assert "most like winners on measured GPUs" in choice.reason


@pytest.mark.parametrize("incumbent", [0, 1])
def test_an_incumbent_of_equal_prediction_stays(incumbent: int) -> None:
    likes_mailbox = Preference(0.02, lambda config: float(config["strategy"] == "mailbox"))
    choice = choose(FINALS, lambda config: (0,), FINALS[incumbent][0], likes_mailbox)
    assert choice is not None
    assert choice.winner == incumbent and choice.reason.startswith(INCUMBENT_STAYS)


def test_clear_differences_are_not_overruled() -> None:
    finals = [final(1.0, strategy="separate"), final(1.03)]
    choice = choose(finals, lambda config: (0,), None, Preference(0.02, lambda config: 1.0))
    assert choice is not None
    assert choice.winner == 0


def test_predictions_of_another_model_are_other_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    today = study_name(PLAIN, GB200, "predicted")
    assert model_revision() in today
    assert study_name(PLAIN, GB200, "measured").count(model_revision()) == 0
    monkeypatch.setattr("generator.studies.records.model_revision", lambda: "00000000")
    assert study_name(PLAIN, GB200, "predicted") != today
