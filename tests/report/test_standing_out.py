"""The shapes that the report lists because their winners are behind those of their neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator.kernels.geometry import Config
from generator.problem import Problem
from generator.report.page import render_page
from generator.report.standing_out import BEHIND, standing_out
from generator.report.summary import Summary
from generator.report.text import render_text
from generator.studies.reader import Study
from generator.studies.records import Record
from tests.support.searches import of_families
from tests.support.synthetic import make_winner, timed

FAST, OTHER = of_families(2)


def study(shape: str, ratio: float, won: Config = FAST, evidence: str = "measured") -> Study:
    """One trial, and a winner with that ratio."""
    problem = Problem.parse(shape)
    winner = make_winner(won, ratio, problem=problem, evidence=evidence)
    return Study(
        "name",
        0,
        problem,
        "h200",
        132,
        evidence,
        records=(Record(won, "some_variant", timed(ratio), "search", 1.0),),
        winner=winner,
        finals=(),
        importance={},
    )


ROW = [study("2048x1024:bf16", 1.1), study("4096x1024:bf16", 1.3), study("8192x1024:bf16", 1.2)]


def test_a_winner_behind_those_of_all_its_neighbours_is_listed() -> None:
    (entry,) = standing_out(ROW)
    assert entry.study is ROW[1]
    assert {near.problem for near in entry.neighbours} == {ROW[0].problem, ROW[2].problem}
    assert entry.behind == pytest.approx(1.3 / 1.2)
    slower = study("16384x1024:bf16", 1.19)
    assert [e.study for e in standing_out([*ROW, slower])] == [ROW[1]], "the two nearest count"
    wider = study("4096x2048:bf16", 1.29)
    assert standing_out([*ROW, wider]) == [], "a neighbour in N is as slow"


@pytest.mark.parametrize(
    "neighbour",
    [
        study("8192x1024:bf16", 1.2, evidence="predicted"),
        study("8192x2048:bf16", 1.2),
        replace(ROW[2], winner=None),
        study("4096x1024:bf16+residual", 1.2),  # to a floor without the residual
    ],
    ids=["predicted", "farther in both", "without a winner", "another floor"],
)
def test_one_neighbour_is_too_few(neighbour: Study) -> None:
    assert standing_out([*ROW[:2], neighbour]) == []


def test_a_small_difference_and_a_prediction_are_not_listed() -> None:
    just = study("4096x1024:bf16", 1.2 * BEHIND - 0.001)
    assert standing_out([ROW[0], just, ROW[2]]) == []
    predicted = study("4096x1024:bf16", 2.0, evidence="predicted")
    assert standing_out([ROW[0], predicted, ROW[2]]) == []


def test_the_farthest_comes_first() -> None:
    shapes = ("2000x2048:bf16", "4000x2048:bf16", "8000x2048:bf16")
    far = [study(shape, ratio) for shape, ratio in zip(shapes, (1.1, 1.5, 1.1), strict=True)]
    assert [entry.study for entry in standing_out([*ROW, *far])] == [far[1], ROW[1]]


def test_families_of_neighbours_that_were_never_tried_are_named() -> None:
    tried, untried = ROW[0], study("8192x1024:bf16", 1.2, OTHER)
    (entry,) = standing_out([tried, ROW[1], untried])
    assert entry.untried == [untried]


def test_page_and_text_list_them() -> None:
    untried = study("8192x1024:bf16", 1.2, OTHER)
    listed = Summary("h200", "somewhere", (ROW[0], ROW[1], untried), 0)
    page, text = render_page(listed), render_text(listed)
    assert '<section id="behind">' in page and '<a href="#behind">' in page
    section = page.split('<section id="behind">')[1].split("</section>")[0]
    lines = text.split("Behind their neighbours")[1].split("\n\n")[0]
    for part in (section, lines):
        for said in ("4096x1024:bf16", "1.300", "2048x1024:bf16", "1.100", "2 %"):
            assert said in part.replace("2%", "2 %")
        assert part.count("8192x1024:bf16") == 2, "as a neighbour and as a family"
    quiet = Summary("h200", "somewhere", (ROW[0], ROW[2]), 0)
    assert "ehind their neighbours" not in render_page(quiet) + render_text(quiet)
