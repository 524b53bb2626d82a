"""benchmarks.untuned: what it draws, and what a row says of the kernels."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import untuned
from benchmarks.gpu import BLOCKS
from benchmarks.untuned import draw, kernels, named
from generator.errors import ProblemError
from generator.paths import GENERATED
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.target import find_target
from normforge.api import Package
from normforge.table import Table
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.named_times import NamedTimes, NamedWorkload

COMMITTED = GENERATED / "h200" / "rmsnorm_backward"
TARGET = find_target("h200")
DTYPES = ("bf16", "fp16", "fp32")


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(COMMITTED)


def test_drawn_shapes_are_new_and_the_same_for_the_same_seed(package: Package) -> None:
    cases = draw(package, 20, 10, seed=3)
    assert [kind for kind, _ in cases] == ["M"] * 20 + ["N"] * 10
    assert cases == draw(package, 20, 10, seed=3) != draw(package, 20, 10, seed=4)
    tuned = {(t.M, t.N, t.dtype) for t in package.table.tuned}
    widths = {(N, dtype) for _, N, dtype in tuned}
    for kind, problem in cases:
        assert (problem.M, problem.N, problem.dtype) not in tuned
        assert ((problem.N, problem.dtype) in widths) == (kind == "M")
        assert 1 <= problem.M <= 100_000 and problem.N <= 16384
        assert problem.M * problem.N <= 1 << 29
        assert problem.weight_dtype == problem.dtype
    for kind in "MN":
        dtypes = {problem.dtype for found, problem in cases if found == kind}
        assert dtypes == {"bf16", "fp16", "fp32"}
    assert min(problem.M for _, problem in cases) < 64 < 10_000 < max(p.M for _, p in cases)


def test_no_drawn_shape_is_tuned_where_most_are() -> None:
    """Every other one would be, if nobody looked: of all dtypes the lengths that are multiples of
    64, and up to 4096 rows of the shortest, are tuned."""
    entries = [
        SimpleNamespace(M=1, N=N, dtype=dtype) for N in range(128, 16385, 64) for dtype in DTYPES
    ]
    few = [SimpleNamespace(M=M, N=256, dtype=dtype) for M in range(1, 4097) for dtype in DTYPES]
    some: Any = SimpleNamespace(table=SimpleNamespace(tuned=entries))
    drawn = draw(some, 0, 30, seed=0)
    assert [problem for _, problem in drawn if problem.N % 64 == 0] == []
    some.table.tuned = few
    drawn = draw(some, 30, 0, seed=0)
    assert all(problem.N == 256 and problem.M > 4096 for _, problem in drawn)


def test_given_shapes_say_what_of_them_is_unknown(package: Package) -> None:
    cases = named(package, "1205x3072:bf16,68240x3890:bf16")
    assert [(kind, str(p)) for kind, p in cases] == [
        ("M", "1205x3072:bf16"),
        ("N", "68240x3890:bf16"),
    ]


@pytest.mark.parametrize(("N", "how"), [(1024, "nearest"), (1000, "fallback"), (20001, "none")])
def test_row_names_the_kernel_of_the_module_and_the_found_one(
    package: Package, N: int, how: str
) -> None:
    config = {"strategy": "separate", "threads_per_row": 64}
    winner: Any = SimpleNamespace(variant="separate_async2_n1000", config=config)
    row = kernels(Problem(4097, N, "bf16", "bf16"), winner, package)
    assert (row["shape"], row["how"]) == (f"4097x{N}:bf16", how)
    assert (row["tuned"], row["tuned_config"]) == (winner.variant, config)
    if how == "none":
        assert row["ours_kernel"] is None
    else:
        files = [kernel.file for kernel in Table.load(COMMITTED).kernels()]
        assert row["ours_kernel"] in files


def test_a_row_has_ours_over_the_floor_the_tuned_kernel_and_aten(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios are those of one round: over the floor 1, 5 and 4, over the tuned kernel 3, 2 and 0.5,
    over ATen 0.5, 1 and 0.25. The quotients of the medians are others."""
    log: list[str] = []
    inputs = SimpleNamespace(dy="dy", x="x", rstd="rstd", weight="weight")
    workload = NamedWorkload(log, inputs)
    times = {
        "ours": [3.0, 10.0, 4.0],
        "floor": [3.0, 2.0, 1.0],
        "tuned": [1.0, 5.0, 8.0],
        "aten": [6.0, 10.0, 16.0],
    }

    def backward(*given: str) -> None:
        assert given == ("dy", "x", "rstd", "weight")
        log.append("ours")

    module: Any = SimpleNamespace(table=package.table, rmsnorm_backward=backward)
    tuned = SimpleNamespace(run=workload.saying("tuned"))
    monkeypatch.setattr(untuned, "bench_of", lambda own, config, target: tuned)
    monkeypatch.setattr(untuned, "aten", lambda inputs: workload.saying("aten"))
    timer = NamedTimes(log, times)
    session: Any = SimpleNamespace(workload=lambda problem: workload, timer=timer)
    winner: Any = SimpleNamespace(variant="v", config={"stages": 3})
    row = untuned.compare(Problem.parse("7x1024:bf16"), winner, module, session, TARGET)
    assert timer.blocks == [["floor", "ours", "tuned", "aten"]] * BLOCKS
    assert {name: row[f"{name}_us"] for name in times} == {
        **{"ours": 4.0, "floor": 2.0, "tuned": 5.0, "aten": 10.0},
    }
    over = {name: row[f"ours_over_{name}"] for name in ("floor", "tuned", "aten")}
    assert over == {"floor": 4.0, "tuned": 2.0, "aten": 0.5}
    assert (row["tuned"], row["tuned_config"]) == ("v", {"stages": 3})


def run(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    *arguments: str,
    fail_at: int = 99,
    noisy: tuple[str, ...] = (),
) -> tuple[int, list[str]]:
    """The exit code and the shapes that were searched; the search of number `fail_at` is killed."""
    searched: list[str] = []

    def search(legal: LegalConfigs, *_: object, **__: object) -> object:
        if len(searched) == fail_at:
            raise KeyboardInterrupt
        if str(legal.problem) in noisy:
            raise ProblemError(f"{legal.problem}: too noisy")
        searched.append(str(legal.problem))
        return SimpleNamespace(variant="v", config={})

    def timed(problem: Problem, *_: object) -> dict[str, object]:
        return {
            "shape": str(problem),
            "how": "nearest",
            "ours_over_tuned": 1.0,
            "ours_over_aten": 0.5,
        }

    monkeypatch.setattr(
        untuned, "choose_target", lambda *_: (TARGET, FakeSupervisor(), "Measuring.")
    )
    monkeypatch.setattr(untuned, "CompilePool", lambda *_, **__: nullcontext())
    monkeypatch.setattr(untuned, "open_session", lambda: None)
    monkeypatch.setattr(untuned, "search_problem", search)
    monkeypatch.setattr(untuned, "compare", timed)
    code = untuned.main(["--module", str(COMMITTED), "--out", str(out), *arguments])
    return code, searched


def test_results_of_every_shape_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    code, searched = run(monkeypatch, out, "--rows", "3", "--widths", "2")
    rows = json.loads(out.read_text())["rows"]
    assert (code, [row["shape"] for row in rows]) == (0, searched)
    assert [row["unknown"] for row in rows] == ["M"] * 3 + ["N"] * 2
    assert out.with_suffix(".journal").exists(), "the studies stay: a stopped run goes on"


def test_used_up_seconds_leave_shapes_and_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(untuned, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    out = tmp_path / "found.json"
    code, searched = run(monkeypatch, out, "--rows", "5", "--widths", "0", "--seconds", "3.5")
    assert (code, len(searched)) == (1, 3)
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert "2 shapes are left" in capsys.readouterr().err


def test_a_noisy_shape_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, noisy = tmp_path / "found.json", "4096x3000:bf16"
    shapes = ("--shapes", f"{noisy},4096x5000:bf16")
    code, searched = run(monkeypatch, out, *shapes, noisy=(noisy,))
    assert (code, searched) == (1, ["4096x5000:bf16"])
    assert len(json.loads(out.read_text())["rows"]) == 1
    assert f"{noisy}: too noisy" in capsys.readouterr().err


def test_a_killed_search_leaves_the_studies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, out, "--rows", "3", "--widths", "0", fail_at=2)
    assert out.with_suffix(".journal").exists()
