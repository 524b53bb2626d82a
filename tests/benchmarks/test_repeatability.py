"""benchmarks.repeatability: what is held again, what counts as the same, and what is kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import repeatability, shape_by_shape
from benchmarks.repeatability import agreement, gap, summary, tie
from generator.evaluate.gpu import noise
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant, make_variant
from generator.package.known_winners import known_winners
from generator.problem import Problem
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.storage import open_storage
from tests.support.fake_gpu import FakeCompiler, FakeGpu, FakeSession, Landscape, Log, Weather, key
from tests.support.fake_run import little_space
from tests.support.fake_supervisor import H200_FACTS, FakeSupervisor
from tests.support.synthetic import PROBLEM, TARGET, FakeEvaluator, FakePool

OTHER = Problem.parse("4096x2048:bf16")
TWIN = replace(PROBLEM, weight_dtype="fp32")
CHAMPION = next(
    config
    for config in LegalConfigs(little_space(), PROBLEM, TARGET).first(100)
    if make_variant(config, PROBLEM).determinism != "none"
)


class Pool(FakePool):
    def _compile(self, variant: Variant) -> Compiled:
        return FakeCompiler(Log())(variant, "sm_90a", Path())


class Gpu(FakeSupervisor):
    """Its fresh processes are counted."""

    def __init__(self, landscape: Landscape, weather: Weather) -> None:
        session = FakeSession(FakeGpu(Log(), landscape, weather, seconds=0))
        super().__init__(session.handle, H200_FACTS)
        self.renewed = 0

    def renew(self, problem: object) -> None:
        self.renewed += 1


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Committed studies of three problems, whose winners are not the champion."""
    folder = tmp_path_factory.mktemp("studies")
    storage = open_storage(folder / "studies.journal")
    for problem in (PROBLEM, OTHER, TWIN):
        legal = LegalConfigs(little_space(), problem, TARGET)
        assert search_problem(legal, FakePool(), FakeEvaluator(), storage, Budget(200))
    return folder


class Bench:
    """The command on a fake GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, studies: Path) -> None:
        self.patch, self.studies, self.out = patch, studies, folder / "out.json"
        self.seeds: list[int] = []
        self.known: list[set[Problem]] = []

    def run(self, *arguments: str, jitter: float = 0.0) -> tuple[int, Gpu]:
        gpu = Gpu(Landscape(champion=key(CHAMPION)), Weather(jitter, drift=0))

        def search(*given: Any, known_winners: Any, seed: int) -> Any:
            self.seeds.append(seed)
            self.known.append({winner.problem for winner in known_winners})
            return search_problem(*given, known_winners=known_winners, seed=seed)

        self.patch.setattr(repeatability, "Supervisor", lambda device: gpu)
        self.patch.setattr(repeatability, "CompilePool", lambda *_: nullcontext(Pool()))
        self.patch.setattr(repeatability, "load_space", little_space)
        self.patch.setattr(repeatability, "search_problem", search)
        where = ["--studies", str(self.studies), "--out", str(self.out)]
        return repeatability.main([*where, "--trials", "200", *arguments]), gpu

    def rows(self) -> list[dict[str, Any]]:
        return list(json.loads(self.out.read_text())["rows"])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, studies: Path) -> Bench:
    return Bench(monkeypatch, tmp_path, studies)


def test_finals_and_searches_are_held_again_in_fresh_processes(bench: Bench) -> None:
    options = ("--shapes", str(PROBLEM), "--repeats", "3", "--searches", "2")
    code, gpu = bench.run(*options)
    (row,) = bench.rows()
    assert code == 0
    assert [winner["by"] for winner in row["winners"]] == ["search"] * 2 + ["finals"] * 3 + [
        "committed"
    ]
    assert len({winner["kernel"] for winner in row["winners"][:5]}) == 1, "all find the champion"
    assert row["agreement"] == {"search": [1, 1, 0], "finals": [3, 3, 0], "all": [15, 10, 0]}
    assert gpu.renewed == 2 + 3 + repeatability.PROCESSES
    assert gpu.closed
    blocks = [len(kernel["blocks"]) for kernel in row["kernels"]]
    assert blocks == [repeatability.PROCESSES * repeatability.BLOCKS] * 2
    champion = make_variant(CHAMPION, PROBLEM).id
    assert [len(held["block_ratios"][champion]) for held in row["finals"]] == [noise.BLOCKS] * 3


def test_a_search_knows_nothing_of_its_own_shape(bench: Bench) -> None:
    bench.run("--shapes", f"{PROBLEM},{OTHER}", "--repeats", "1", "--searches", "2")
    assert bench.seeds == [0, 1, 0, 1]
    assert bench.known == [{OTHER}, {OTHER}, {PROBLEM, TWIN}, {PROBLEM, TWIN}]


def test_a_run_out_of_time_goes_on_where_it_was(bench: Bench) -> None:
    options = ("--shapes", f"{PROBLEM},{OTHER}", "--repeats", "1", "--searches", "1")
    clock = SimpleNamespace(monotonic=iter(range(99)).__next__)
    for module in (repeatability, shape_by_shape):
        bench.patch.setattr(module, "time", clock)
    code, _ = bench.run(*options, "--seconds", "8")
    first = bench.rows()
    assert (code, [row["shape"] for row in first]) == (1, [str(PROBLEM)])
    bench.patch.undo()
    code, _ = bench.run(*options, "--resume")
    assert (code, len(bench.seeds)) == (0, 2)
    assert bench.rows()[0] == first[0]
    assert [row["shape"] for row in bench.rows()] == [str(PROBLEM), str(OTHER)]


def test_rows_that_were_measured_otherwise_are_not_mixed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--shapes", str(PROBLEM), "--searches", "0")
    bench.run(*options, "--repeats", "1")
    code, _ = bench.run(*options, "--repeats", "2", "--resume")
    assert code == 2
    assert "measured with another repeats (1, now 2)" in capsys.readouterr().err


def test_noise_that_does_not_end_leaves_the_shape_and_no_more(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.patch.setattr("generator.evaluate.gpu.evaluator.FINAL_PAUSES", (0.0,))
    options = ("--shapes", str(PROBLEM), "--searches", "0", "--repeats", "1")
    code, _ = bench.run(*options, jitter=0.3)
    assert code == 1
    assert not bench.out.exists()
    assert "no clean numbers" in capsys.readouterr().err


def test_without_a_winner_in_the_studies_it_says_so(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = bench.run("--shapes", "4096x512:bf16")
    assert code == 2
    assert "no measured winner of 4096x512:bf16" in capsys.readouterr().err


def test_default_shapes_have_committed_winners() -> None:
    problems = repeatability.load_problems(repeatability.SHAPES)
    winners = known_winners(repeatability.GENERATED / "h200" / "rmsnorm_backward")
    known = {winner.problem for winner in winners if winner.evidence == "measured"}
    assert len(set(problems)) == 12
    assert set(problems) <= known


def test_kernels_tie_within_one_percent_or_two_standard_errors() -> None:
    base = [1.1] * 4
    assert tie(base, [1.1 * 1.0099] * 4) and tie([1.1 * 1.0099] * 4, base)
    assert not tie(base, [1.1 * 1.0111] * 4)
    wide = [1.1 * factor for factor in (1.00, 1.04, 1.00, 1.04)]  # 2 % by two errors of 1.15 %
    narrow = [1.1 * factor for factor in (1.015, 1.025, 1.015, 1.025)]
    assert tie(wide, base)
    assert not tie(narrow, base)
    drifting = [1.0, 1.1, 1.2, 1.3]
    assert not tie([1.02 * ratio for ratio in drifting], drifting), "the blocks are paired"
    # 3 % slower: by three standard errors of 1 %, and by one and a half of 2 %.
    assert not tie([1.02, 1.04], [1.0, 1.0]) and tie([1.01, 1.05], [1.0, 1.0])
    few, many = ([1.0, 1.03] * count for count in (1, 8))
    assert tie(few, [1.0] * 2) and not tie(many, [1.0] * 16), "more blocks make it surer"
    assert gap(many, [1.0] * 16) == pytest.approx((0.015, 0.015 / 15**0.5))


def test_agreement_counts_pairs_by_who_chose() -> None:
    names = ("a", "b", "c")
    kernels = [
        {"kernel": n, "blocks": [r] * 3} for n, r in zip(names, (1.1, 1.105, 1.2), strict=True)
    ]
    won = {"finals": "aab", "search": "ac", "committed": "b"}
    winners = [{"by": by, "kernel": name} for by, each in won.items() for name in each]
    found = agreement({"kernels": kernels, "winners": winners})
    # Of all: aa 3, bb 1; ab ties: 3 * 2; c with nobody.
    assert found == {"finals": [3, 1, 2], "search": [1, 0, 0], "all": [15, 4, 6]}
    text = summary([{"agreement": found}, {"agreement": found}])
    assert text.splitlines()[1].startswith("search: 0 of 2 pairs are one kernel and 0 tie")
    assert "all: 8 of 30 pairs are one kernel and 12 tie, P(same winner or tie) = 0.67" in text
