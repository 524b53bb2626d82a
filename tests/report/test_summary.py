"""Summaries of the studies of a GPU, on studies that are made up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from generator.kernels.strategies import Strategy, is_deterministic
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.report import charts
from generator.report.collect import summaries
from generator.report.explain import Explanation
from generator.report.summary import Standing, Summary, bandwidth_share, kind_of, runners_up
from generator.report.text import render_text
from generator.result import Result
from generator.studies.reader import Study
from generator.studies.records import Record, Winner
from tests.support.searches import DETERMINISTIC, of_families
from tests.support.synthetic import FLOOR_US, LEGAL, PROBLEM, SPACE, TARGET, make_winner, timed

CONFIG = DETERMINISTIC[0]


def record(result: Result) -> Record:
    return Record(CONFIG, "some_variant", result, "seed", 1.0)


def study(
    evidence: str = "measured",
    *records: Record,
    winner: Winner | None = None,
    problem: Problem = PROBLEM,
    number: int = 0,
) -> Study:
    kept = records or (record(timed(1.2)),)
    return Study(
        *("name", number, problem, "h200", 132, evidence),
        records=kept,
        winner=winner,
        finals=(),
        importance={},
    )


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("rmsnorm_backward", "bf16:fp32+offset+residual"),
        ("rmsnorm_rope_backward", "bf16:fp32+rotary64+interleaved"),
        ("rmsnorm_rope_forward", "bf16+offset+interleaved"),
        ("gated_rmsnorm_forward", "fp16"),
    ],
)
def test_kinds_of_problems_have_the_options_of_their_operation(operation: str, kind: str) -> None:
    problem = Problem.parse(f"4096x256:{kind}", operation)
    assert kind_of(problem) == kind
    (summary,) = summaries([study(problem=problem)], "here", operation)
    assert [grid.kind for grid in summary.grids] == [kind]


def test_a_later_prediction_hides_no_measurement() -> None:
    old, new = (make_winner(CONFIG, date=f"2026-0{month}-01T00:00:00") for month in (1, 2))
    measured = study("measured", winner=old, number=1)
    predicted = study("predicted", winner=new, number=2)
    newer = study("measured", winner=new, number=0)
    for given, kept in (
        ([measured, predicted], measured),
        ([predicted, measured], measured),
        ([newer, measured], newer),
        ([measured, newer, predicted], newer),
        ([study("measured", number=9), measured], measured),
    ):
        (summary,) = summaries(given, "somewhere")
        assert summary.studies == (kept,)
        assert summary.left_out == len(given) - 1


def test_the_price_of_batch_invariance_is_over_the_free_winner() -> None:
    promised = replace(PROBLEM, operation="rmsnorm_invariant_backward")
    wide = replace(promised, M=2 * promised.M)

    def finished(problem: Problem, ratio: float, evidence: str = "measured") -> Study:
        winner = replace(make_winner(CONFIG), problem=problem, result=timed(ratio))
        return study(evidence, winner=winner, problem=problem)

    own = [finished(promised, 1.21), finished(wide, 1.3)]
    free = [finished(PROBLEM, 1.1), finished(replace(PROBLEM, M=wide.M), 1.0, "predicted")]
    (summary,) = summaries([*free, *own], "somewhere", promised.operation)
    assert [study.problem for study in summary.studies] == [promised, wide]
    assert summary.price_of(own[0]) == pytest.approx(1.1)
    assert summary.price_of(own[1]) is None
    assert summary.price == pytest.approx(1.1)
    (plain,) = summaries([*free, *own], "somewhere")
    assert [study.problem for study in plain.studies] == [s.problem for s in free]
    assert (plain.free, plain.price) == ({}, None)


def test_runners_up_are_the_nearest_that_may_win() -> None:
    """Five do, among them the winner; two are faster, but may not."""
    won, *others = of_families(5)
    results = zip(others, map(timed, (1.5, 1.2, 0.99, 1.32)), strict=True)
    free = next(kind for kind in LEGAL.reduction_kinds if not is_deterministic(kind))
    barred = [(free, timed(0.5)), (others[0], timed(0.6, "nondeterministic", "refuted"))]
    finals = [*barred, *results, (won, timed(1.1))]
    winner = replace(make_winner(won, 1.1), config=won)
    own = replace(study("measured", winner=winner), finals=tuple(finals))
    names = [make_variant(others[place], PROBLEM).id for place in (2, 1, 3)]
    # -0.11, 0.1 and 0.22 of 1.1.
    gaps = [pytest.approx(gap) for gap in (-0.1, 0.1 / 1.1, 0.2)]
    assert runners_up(own) == list(zip(names, gaps, strict=True))
    assert runners_up(study("measured")) == []


def test_a_share_of_the_bandwidth_is_of_the_winners_time() -> None:
    """x and dy are read and dx is written, 8 MiB each: 24 MiB. At 1.2 times the floor's 20 us that
    is 1.048576 of 4.8 TB/s."""
    own = study("measured", winner=make_winner(CONFIG, 1.2))
    assert TARGET.bandwidth == 4.8e12
    assert bandwidth_share(own) == pytest.approx(1.048576 / 4.8)
    assert bandwidth_share(study("measured")) is None
    assert bandwidth_share(replace(own, gpu="unknown")) is None


def test_notes_of_healthy_trials_are_no_failures() -> None:
    trials = [
        record(replace(timed(1.2), note="noisy: 3 us")),
        record(Result("slow", note="12 us, the best has 3")),
        record(Result("wrong", note="dx[3, 7] is 4.5")),
        record(Result("wrong", note="dx[1, 9] is 6.25")),
        record(Result("crashed", note="")),
    ]
    summary = Summary("h200", "somewhere", (study("measured", *trials),), 0)
    assert summary.reasons == [("wrong", "dx[…, …] is …", 2)]


def test_the_share_of_a_knob_is_its_mean_over_the_studies_that_know_importances() -> None:
    """A knob that a study does not have means nothing there; the last study knows none at all."""
    wide = replace(PROBLEM, N=2 * PROBLEM.N)
    studies = (
        replace(study(), importance={"cluster": 0.6, "stages": 0.4}),
        replace(study(problem=wide), importance={"stages": 1.0}),
        study(problem=replace(PROBLEM, M=1)),
    )
    summary = Summary("h200", "somewhere", studies, 0)
    found = [(knob.name, knob.share, knob.most, knob.most_at) for knob in summary.knobs]
    assert found == [
        ("stages", pytest.approx(0.7), 1.0, str(wide)),
        ("cluster", pytest.approx(0.3), 0.6, str(PROBLEM)),
    ]


def test_ratios_to_another_floor_are_left_out_of_the_mean() -> None:
    residual = Problem.parse("4096x1024:bf16+residual")
    plain, own = timed(3.0), replace(timed(2.0), extra={"floor_bytes": 1})
    studies = (
        study("measured", record(timed(1.5))),
        study("measured", record(plain), problem=residual),
        study("measured", record(own), problem=residual),
    )
    summary = Summary("h200", "somewhere", studies, 0)
    assert summary.plain_floors == 1
    assert summary.ratio is not None
    assert abs(summary.ratio - (1.5 * 2.0) ** 0.5) < 1e-12


def test_before_the_finals_the_fastest_trial_has_the_ratio() -> None:
    trials = [record(timed(r)) for r in (1.4, 1.2, 1.3)]
    assert study("measured", *trials).ratio == 1.2
    assert study("measured", *trials, winner=make_winner(CONFIG, 1.25)).ratio == 1.25


def test_a_drawing_escapes_what_a_journal_says() -> None:
    evil = '"><script>evil()</script>'
    own = study("measured", winner=make_winner(CONFIG))
    drawing = str(charts.strategies([Standing(Strategy(evil, (), way=""), ((own, 1.1),))]))
    assert "<script" not in drawing
    assert 'class="s-&#34;&gt;&lt;script&gt;' in drawing


def test_a_trial_whose_own_floor_was_slow_is_not_the_fastest() -> None:
    """Its time is over the median floor, in every number and in the drawing."""
    slow = replace(record(timed(1.0, floor_us=1.5 * FLOOR_US)), config=DETERMINISTIC[1])
    own = study("measured", *(record(timed(ratio)) for ratio in (1.3, 1.2)), slow)
    assert [r.result.us for r in own.ranked] == [1.2 * FLOOR_US, 1.3 * FLOOR_US, 1.5 * FLOOR_US]
    assert own.ratio == pytest.approx(1.2)
    summary = Summary("h200", "somewhere", (own,), 0)
    behind = [ratio for standing in summary.standings for _, ratio in standing.behind]
    assert behind == pytest.approx([1.0, 1.5 / 1.2])
    assert "best 1.200 x floor" in charts.history(own)
    why = Explanation(own, SPACE, TARGET)
    assert [timed.ratio for _, timed in why.runners_up] == pytest.approx([1.2, 1.5])


def test_the_best_so_far_in_a_history_is_of_trials_that_may_win() -> None:
    """The line falls once, and not for the trial between them, whose bits change."""
    barred = record(timed(1.3, "nondeterministic", "refuted"))
    own = study("measured", record(timed(1.4)), barred, record(timed(1.2)))
    (line,) = re.findall(r'class="best" d="([^"]+)"', charts.history(own))
    assert re.sub(r"[\d. ]", "", line) == "MHVH"


def test_a_slow_strategy_stays_inside_its_drawing() -> None:
    own = study("measured", winner=make_winner(CONFIG))
    slow = Standing(Strategy("slow", (), way=""), ((own, 50.0), (own, 0.1)))
    drawing = charts.strategies([slow])
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', drawing)
    places = [float(x) for x in re.findall(r' cx="([^"]+)"', drawing)]
    assert len(places) == 2
    assert all(0 < x < int(width) for x in places)


def test_the_history_of_a_study_is_two_numbers_of_its_line() -> None:
    """The trial that was the fastest, counted from 1, and those without a time."""
    trials = [record(Result("crashed")), *(record(timed(r)) for r in (1.4, 1.2, 1.3))]
    text = render_text(Summary("h200", "somewhere", (study("measured", *trials),), 0))
    lines = text.partition("found at")[2].splitlines()
    assert lines[1].split()[-3:] == ["4", "3", "1"]


def test_strategies_are_compared_with_the_fastest_that_may_win() -> None:
    free = next(kind for kind in LEGAL.reduction_kinds if not is_deterministic(kind))
    own = study("measured", record(timed(1.25)), replace(record(timed(1.0)), config=free))
    summary = Summary("h200", "somewhere", (own,), 0)
    assert [standing.typical for standing in summary.standings] == pytest.approx([0.8, 1.0])
