"""benchmarks.layouts: what it draws, what it does with candidates that fail, and its result."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import layouts
from benchmarks.layout_candidates import BRACKETS, LONG, SIZES, TIMED_ELEMENTS, Group, draw
from benchmarks.layouts import ROUNDS, LayoutSession, refusals, run, summary
from benchmarks.pages.text import read
from benchmarks.results import json_text
from generator.evaluate.gpu.protocol import Job, WorkerLostError
from generator.kernels.geometry import Config
from generator.package import fallback_kernels
from generator.package.fallback_kernels import Layout, load_layouts
from generator.problem import ITEMSIZE, Problem
from generator.result import Result
from generator.space.space import Space
from generator.target import Target
from tests.support.fake_supervisor import FakeSupervisor, timing_supervisor
from tests.support.synthetic import FakePool


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = read("layouts_h200")
    return found


def fake_gpu(fault: Callable[[Job], Any] = lambda job: None) -> FakeSupervisor:
    """Times that grow with the threads of a candidate, and ATen's behind them."""

    def times(job: Job) -> list[float]:
        return [10.0, *(10 * (1 + c.spec.threads / 1024) for c in job.candidates), 40.0]

    return timing_supervisor(times, fault, ROUNDS)


@pytest.mark.parametrize(
    "group",
    [
        *(Group(size, 1024, "bf16") for size in (2, 4, 8, 16)),
        Group(4, 256, "fp32"),
        Group(8, 12288, "fp16"),
        Group(16, 12288, "bf16"),
        Group(16, 40960, "bf16"),
    ],
    ids=str,
)
def test_drawn_layouts_are_legal_and_of_the_bracket(
    group: Group, target: Target, space: Space
) -> None:
    drawn = draw(group, target, 6, seed=0)
    assert len({variant.id for variant in drawn}) == 6
    problem = Problem(fallback_kernels.MANY_ROWS, group.columns, group.dtype, group.dtype)
    for variant in drawn:
        assert not variant.exact
        assert (variant.N, variant["vector_bytes"]) == (group.columns, group.vector_bytes)
        exact = variant["cluster"] > 1
        assert not space.reject(variant.config, problem, target, exact=exact)


def test_same_seed_draws_the_same(target: Target) -> None:
    group = Group(8, 2048, "bf16")
    drawn = [draw(group, target, 6, seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_nothing_is_drawn_where_nothing_fits(target: Target) -> None:
    assert draw(Group(2, 16384, "bf16"), target, 6, seed=0) == []


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_timed_rows_are_of_the_bracket_and_of_no_wider_vector(dtype: str) -> None:
    itemsize = ITEMSIZE[dtype]
    for size in (s for s in SIZES if s >= itemsize):
        lows = (BRACKETS[size][0] // 2, *BRACKETS[size])
        for low, columns in zip(lows, BRACKETS[size], strict=False):
            problems = Group(size, columns, dtype).problems()
            assert len(set(problems)) == 4
            for problem in problems:
                assert low < problem.N <= columns
                assert problem.N * itemsize % (2 * size) == size
                assert problem.M * problem.N <= TIMED_ELEMENTS


def test_refused_candidates_carry_their_reason(target: Target) -> None:
    group = Group(4, 512, "bf16")
    broken, spilling, wrong, deadly, good = drawn = draw(group, target, 5, seed=0)

    def fault(job: Job) -> Any:
        name = job.candidates[0].spec.name
        if name == deadly.id:
            return WorkerLostError("crashed", "the GPU worker died")
        return Result("wrong", note="dx is off") if name == wrong.id else None

    def of(variant: Any) -> Callable[[Config], bool]:
        return lambda config: config == variant.config

    pool, gpu = FakePool(of(broken), of(spilling)), cast(Any, fake_gpu(fault))
    made = {v.id: (v, pool.submit(v).result()) for v in drawn}
    assert refusals(gpu, group, made, target) == {
        broken.id: "rmsnorm_backward.cu(7): error: planted",
        spilling.id: "spills or stack: 8 bytes per thread",
        wrong.id: "wrong: dx is off",
        deadly.id: "crashed: the GPU worker died",
    }
    assert {job.kind for job in gpu.jobs} == {"accuracy"}
    checked = [(job.problem.M, job.candidates[0].spec.name) for job in gpu.jobs]
    assert checked.count((777, good.id)) == 2 and checked.count((777, deadly.id)) == 1


def test_a_group_compares_its_layouts_and_has_atens_times_beside(target: Target) -> None:
    group = Group(4, 512, "bf16")
    two, problems = draw(group, target, 2, seed=0), len(group.problems())
    ratios = [[1.0, 2.0, 0.5], *[[3.0, 2.0, 0.5]] * (problems - 1)]
    found = summary(group, two, [9.0] * problems, ratios, ["wrong: dx", "spills: 8", "wrong: dw"])
    rows = sorted((*found["best"], *filter(None, [found.get("in_a_row")])), key=itemgetter("worst"))
    assert [row["worst"] for row in rows] == [1.5, 2.0]
    assert [row["ratios"][:2] for row in rows] == [[1.0, 3.0], [2.0, 2.0]]
    assert (found["aten"], found["timed"]) == ([0.5] * problems, 2)
    assert found["refused"] == {"wrong": 2, "spills": 1}


def test_aten_is_timed_last() -> None:
    blocks: list[Any] = []
    problem, mixed = Problem.parse("2x8:fp32"), Problem.parse("2x8:bf16:fp32")
    session: Any = LayoutSession.__new__(LayoutSession)
    session.timer = SimpleNamespace(block=lambda *given: blocks.append(given))
    inputs = SimpleNamespace(x=torch.ones(2, 8), rstd=torch.ones(2))
    workload: Any = SimpleNamespace(
        floor=lambda: "floor",
        inputs=inputs,
        expected=None,
        bench=lambda candidate: SimpleNamespace(run=lambda inputs: candidate),
    )
    session._interleave(workload, SimpleNamespace(problem=problem, candidates=("one", "two")))
    session._interleave(workload, SimpleNamespace(problem=mixed, candidates=("one", "two")))
    (operations, rounds), (without, _) = blocks
    assert [operation() for operation in without] == ["floor", "one", "two"]
    assert [operation() for operation in operations[:-1]] == ["floor", "one", "two"]
    assert rounds == ROUNDS and len(operations) == 4


def measured(
    tmp_path: Path,
    target: Target,
    gpu: Any,
    sizes: tuple[int, ...] = (4, 8),
    until: float = float("inf"),
) -> dict[str, Any]:
    """Return what a run on a fake GPU writes."""
    out = tmp_path / "out.json"
    columns = {columns for each in BRACKETS.values() for columns in each}
    args = Namespace(
        dtype="bf16", weight_dtype="", sizes=sizes, columns=columns, draws=4, seed=0, out=out
    )
    run(args, gpu, target, cast(Any, FakePool()), until)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def rows_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in (*group["best"], group["narrower"]) if row]


def form(document: dict[str, Any]) -> list[set[tuple[str, ...]]]:
    """The keys of a document, of its groups and of their rows, but for what some of them have."""
    groups = document["groups"]
    rows = [row for group in groups for row in rows_of(group)]
    some = ("in_a_row", "in_blocks")
    return [
        {tuple(key for key in one if key not in some) for one in alike}
        for alike in ([document], groups, rows)
    ]


@pytest.mark.slow
def test_best_of_neighbours_are_timed_along(tmp_path: Path, target: Target) -> None:
    found = measured(tmp_path, target, fake_gpu())
    assert [(g["vector_bytes"], g["columns"]) for g in found["groups"]] == [
        (size, columns) for size in (4, 8) for columns in reversed(BRACKETS[size])
    ]
    groups = {(g["vector_bytes"], g["columns"]): g for g in found["groups"]}
    compared = set()
    for (size, columns), group in groups.items():
        narrower = groups.get((size // 2, columns))
        if Group(4, columns, "bf16").least > Group(size, columns, "bf16").least:
            narrower = None  # its kernels are for fewer N
        layout = group["narrower"] and group["narrower"]["layout"]
        assert layout == (narrower and narrower["best"][0]["layout"])
        compared.add(layout is not None)
        means = [row["mean"] for row in group["best"]]
        assert means == sorted(means)
    assert compared == {True, False}
    assert found["left"] == []


def test_group_without_times_is_left_and_the_others_go_on(tmp_path: Path, target: Target) -> None:
    def fault(job: Job) -> Any:
        lost = job.kind == "interleave" and 8192 < job.problem.N <= 12288
        return WorkerLostError("timeout", "no answer") if lost else None

    found = measured(tmp_path, target, fake_gpu(fault), sizes=(4,))
    assert found["left"] == [{"vector_bytes": 4, "columns": 12288, "reason": "no answer"}]
    assert len(found["groups"]) == len(BRACKETS[4]) - 1


@pytest.mark.slow
def test_no_group_begins_after_the_time(tmp_path: Path, target: Target) -> None:
    gpu = fake_gpu()
    found = measured(tmp_path, target, gpu, sizes=(4,), until=0.0)
    assert found["groups"] == [] and gpu.jobs == []
    assert {left["reason"] for left in found["left"]} == {"no time was left"}


@pytest.mark.slow
def test_committed_result_is_what_the_benchmark_writes(
    tmp_path: Path, target: Target, committed: dict[str, Any]
) -> None:
    assert form(committed) == form(measured(tmp_path, target, fake_gpu()))
    for group in committed["groups"]:
        problems = Group(group["vector_bytes"], group["columns"], committed["dtype"]).problems()
        assert group["shapes"] == [str(problem) for problem in problems]
        numbers = [group["floor_us"], group["aten"], *(row["ratios"] for row in rows_of(group))]
        assert {len(each) for each in numbers} == {len(problems)}
        assert len(group["best"]) <= layouts.KEPT
    assert {tuple(left) for left in committed["left"]} == {("vector_bytes", "columns", "reason")}
    assert len(json_text(committed)) < 110_000


def shown(layout: Layout) -> str:
    """Return a layout in the form of the results, which are older than layouts with clusters."""
    return str(layout).replace(", cluster=1, spare_sms=0", "")


@pytest.mark.parametrize(
    ("vector_bytes", "table"),
    [
        (16, load_layouts().groups["wide"]),
        (8, load_layouts().groups["eight"]),
        (4, load_layouts().groups["four"]),
        (2, load_layouts().groups["two"]),
    ],
)
def test_fallback_layouts_won_their_groups(
    committed: dict[str, Any], vector_bytes: int, table: tuple[Layout, ...]
) -> None:
    groups = {(g["vector_bytes"], g["columns"]): g for g in committed["groups"]}
    longest = 12288 if vector_bytes == 2 else 16384
    assert tuple(layout.columns for layout in table) == (
        tuple(n for n in BRACKETS[vector_bytes] if n <= longest)
    )
    left = [(left["vector_bytes"], left["columns"]) for left in committed["left"]]
    for layout in table:
        if (vector_bytes, layout.columns) in left:
            continue  # it takes any row up to its own, for want of registers
        best = groups[vector_bytes, layout.columns]["best"]
        assert shown(layout) == best[0]["layout"]


def test_layouts_of_long_rows_won_their_groups_or_tie() -> None:
    groups = {group["columns"]: group for group in read("layouts_long_h100")["groups"]}
    assert sorted(groups) == list(LONG)
    firsts: dict[int, Layout] = {}
    for layout in load_layouts().groups["long"]:
        firsts.setdefault(layout.columns, layout)
    for columns, layout in firsts.items():
        rows = [*groups[columns]["best"], groups[columns]["in_a_row"]]
        mean = next(row["mean"] for row in rows if row["layout"] == str(layout))
        assert mean <= 1.003 * min(row["mean"] for row in rows)


@pytest.mark.parametrize(("itemsize", "name"), [(2, "bf16_fp32"), (4, "fp32")])
def test_layouts_of_an_fp32_weight_won_their_groups(itemsize: int, name: str) -> None:
    """The two that are left out lost to one without blocks."""
    groups = {(g["vector_bytes"], g["columns"]): g for g in read(f"layouts_{name}_h200")["groups"]}
    known = {
        (size, layout.columns): shown(layout)
        for size, layouts in load_layouts().fp32_weight[itemsize].items()
        for layout in layouts
    }
    for key, group in groups.items():
        if key in known:
            assert known[key] == group["best"][0]["layout"]
        elif group["best"]:
            assert key in ((4, 2560), (4, 3072)) and itemsize == 4
            assert group["best"][0]["mean"] > 1.02 * group["in_a_row"]["mean"]
    assert known.keys() <= groups.keys()
