"""The report's context beside the studies: the peers, and former committed results."""

from __future__ import annotations

import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tune
from generator.disk import read_json
from generator.paths import REPOSITORY
from generator.report.collect import summaries
from generator.report.page import render_page
from generator.report.peers import TITLES, Comparison
from generator.report.text import render_text
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.studies.storage import JOURNAL_NAME, open_storage
from tests.support.committed import committed_studies
from tests.support.synthetic import PROBLEM, TARGET, FakeEvaluator, FakePool


def row(N: int, ours: float | None, weight_dtype: str = "bf16", **peers: float | None) -> Any:
    return {
        "M": 4096,
        "N": N,
        "dtype": "bf16",
        "weight_dtype": weight_dtype,
        "add_us": 10.0,
        "ours_us": ours,
        "peers": {name: {"us": us} for name, us in peers.items()},
    }


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    rows = [
        row(256, 10.0, aten=30.0, quack=15.0, quack_tuned=12.0),
        row(512, 20.0, aten=30.0, quack=60.0, quack_tuned=None),
        row(1024, None, aten=30.0, quack=15.0),
        row(2048, 20.0, "fp32", aten=5.0, quack=15.0),
        row(4096, 30.0, aten=30.0, quack=15.0) | {"how": "none"},  # no kernel of ours
    ]
    peers = {"aten": "torch 2.11.0", "quack": "quack-kernels 0.6.5, x 4.8", "quack_tuned": "q 0.6"}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"environment": {"peers": peers}, "rows": rows}))
    found = Comparison.load(path)
    assert found is not None
    return found


def test_rows_that_not_everybody_serves_do_not_count(comparison: Comparison) -> None:
    assert [(r["N"], r["ours_us"]) for r in comparison.rows] == [(256, 10.0), (512, 20.0)]
    assert comparison.ours == pytest.approx((1.0 * 2.0) ** 0.5)


def test_peers_are_set_against_ours_at_the_shapes_they_have(comparison: Comparison) -> None:
    found = {s.name: (s.shapes, round(s.over_ours, 3)) for s in comparison.standings}
    assert found == {
        "aten": (2, round((3.0 * 1.5) ** 0.5, 3)),
        "quack": (2, round((1.5 * 3.0) ** 0.5, 3)),
        "quack_tuned": (1, 1.2),
    }
    assert [s.name for s in comparison.standings][-1] == "quack_tuned"
    assert {s.name: s.version for s in comparison.standings}["quack"] == "0.6.5"


def test_the_closest_peer_is_found(comparison: Comparison) -> None:
    assert comparison.least == (1.2, "4096x256:bf16")


def test_no_comparison(tmp_path: Path) -> None:
    assert Comparison.load(tmp_path / "none.json") is None


def test_every_peer_of_the_benchmark_has_a_title() -> None:
    from benchmarks.peers import PEERS

    assert {peer.name for peers in PEERS.values() for peer in peers} == TITLES.keys()


@pytest.mark.parametrize(
    ("option", "operation"),
    [
        ("--out", "layernorm_backward"),
        ("--storage", "layernorm_backward"),
        ("--out", "rmsnorm_invariant_backward"),
    ],
)
def test_the_commands_of_a_page_find_its_studies(
    option: str, operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The studies are those of another operation, in a place of their own, whose name has a
    space."""
    folder = tmp_path / "my run"
    where = {"--out": str(folder), "--storage": f"sqlite:///{folder}/studies.db"}[option]
    folder.mkdir()
    problem = replace(PROBLEM, operation=operation)
    space = load_space(space_file(problem.operation))
    storage = open_storage(where if option == "--storage" else folder / JOURNAL_NAME)
    legal = LegalConfigs(space, problem, TARGET)
    search_problem(legal, FakePool(), FakeEvaluator(), storage, Budget(trials=12))
    line = ["report", option, where, "--op", problem.operation, "--html", str(tmp_path)]
    assert tune.main(line) == 0
    (page,) = tmp_path.glob("report_*.html")
    commands = re.findall(r"python tune\.py ([^<\n]+)", html.unescape(page.read_text()))
    assert len(commands) == 3
    for command in commands:
        capsys.readouterr()
        assert tune.main(shlex.split(command)) == 0
        assert capsys.readouterr().out.startswith(f"{problem} on {TARGET}")
    file = tmp_path / "trials.json"  # the shape names the operation here, too
    assert tune.main(["export", option, where, "--shape", str(problem), "--t4", str(file)]) == 0
    assert file.exists()


@pytest.mark.slow
def test_the_page_of_an_operation_has_its_own_shapes_and_peers(tmp_path: Path) -> None:
    """The committed studies give a few for each operation."""
    every = committed_studies("h200")
    of = ("rmsnorm_backward", "layernorm_backward", "rmsnorm_invariant_backward")
    found = {name: summaries(every, "x", name, context=True)[0] for name in of}
    layer_norm, invariant = found[of[1]], found[of[2]]
    assert [grid.kind for grid in layer_norm.grids] == ["bf16", "fp16", "fp32"]
    assert "layernorm_backward" in str(layer_norm.studies[0].problem)
    peers = [found[name].comparison for name in of[:2]]
    assert all(peers) and peers[0] != peers[1]
    assert layer_norm.comparison is not None
    results = REPOSITORY / "benchmarks" / "results" / "layernorm_h200.json"
    assert len(layer_norm.comparison.rows) == len(read_json(results)["rows"])
    assert "LayerNorm backward whose bits" in render_page(layer_norm)
    assert "batch invariance" not in render_page(layer_norm) + render_text(layer_norm)
    assert len(invariant.free) == len(invariant.studies) == 47
    assert invariant.price is not None and 1 < invariant.price < 1.2
    assert '<section id="overhead">' in render_page(invariant)
    assert "Overhead of determinism" not in render_page(invariant) + render_text(invariant)
    assert f"Overhead of batch invariance, geometric mean: {invariant.price:.3f}" in render_text(
        invariant
    )
