"""The kernels that a package needs whatever its search finds: fallback kernels and forwards."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from generator.errors import NormforgeError
from generator.kernels import cubin_cache
from generator.kernels.cubin_cache import compile_variant, entry_path, find_cached
from generator.kernels.forward import render_forward
from generator.kernels.nvrtc import Compiled
from generator.package.entries import Forwards
from generator.package.fallback_kernels import DTYPES, fallback_variants
from generator.problem import Problem
from generator.space.forward_space import (
    fallback_forwards,
    forward_variants,
    forwards_with,
    tile_forwards,
)
from generator.space.load import space_file
from generator.target import find_target
from generator.tuner import emission, run
from generator.tuner.emission import fallback_forwards_of
from generator.tuner.forward import (
    forwards_to_compile,
    shapes_to_choose,
    space_code,
)
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import longest_first
from generator.tuner.run import tune
from generator.tuner.task_list import TaskList
from tests.support.fake_devices import FACTS, Quiet, make_plan
from tests.support.synthetic import LEGAL, make_winner

H200 = find_target("h200")
BACKWARD = fallback_variants(H200)[0]
FORWARDS = fallback_forwards(DTYPES)
SHORT, LONG, WIDE = map(Problem.parse, ("64x1024:bf16", "65536x1024:bf16", "4096x2048:fp16"))


def refuse(*arguments: object, **named: object) -> Any:
    raise AssertionError("compiled again")


# ---- The cache -----------------------------------------------------------------------------------


def test_what_the_cache_has_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cached(BACKWARD, H200.arch, tmp_path) is None
    made = compile_variant(BACKWARD, H200.arch, tmp_path)
    monkeypatch.setattr(cubin_cache, "compile_source", refuse)
    assert compile_variant(BACKWARD, H200.arch, tmp_path) == made
    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=refuse)
    assert emission._compile([BACKWARD], pool, lambda done, count: None) == [made]


def test_what_the_cache_lacks_is_compiled_by_the_pool(tmp_path: Path) -> None:
    made = Compiled(H200.arch, "", b"cubin", {}, "", False, "")
    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=lambda v: "promise")
    pool.result = lambda variant, future: made if future == "promise" else refuse()
    assert emission._compile([BACKWARD], pool, lambda done, count: None) == [made]


def test_damaged_entry_of_the_cache_counts_as_none(tmp_path: Path) -> None:
    compile_variant(FORWARDS[0], H200.arch, tmp_path)
    assert find_cached(FORWARDS[0], H200.arch, tmp_path)
    path = entry_path(tmp_path, render_forward(FORWARDS[0]), H200.arch)
    path.write_bytes(path.read_bytes()[:-10])
    assert find_cached(FORWARDS[0], H200.arch, tmp_path) is None


# ---- In a run ------------------------------------------------------------------------------------


def test_workers_of_the_search_are_gone_when_forwards_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be taken for noise."""
    done: list[str] = []

    def search(runner: object, tasks: TaskList, *rest: object) -> None:
        while task := tasks.claim():
            tasks.conclude(task, make_winner(LEGAL.reduction_kinds[0]))

    monkeypatch.setattr(run, "run_tasks", search)
    monkeypatch.setattr(run, "emit", lambda *arguments: done.append("emitted"))
    measurer: Any = SimpleNamespace(facts=FACTS, close=lambda: done.append("closed"))
    tune(make_plan(tmp_path, 1, devices=(0,)), measurer, Quiet())
    assert done == ["closed", "emitted"]


def test_nothing_is_written_after_ctrl_c_while_forwards_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, nothing = Stop(), Any

    def interrupted(*arguments: object, **named: object) -> Forwards:
        stop.signal = signal.SIGINT
        return Forwards((), ())

    monkeypatch.setattr(emission, "tune_forwards", interrupted)
    monkeypatch.setattr(emission, "emit_package", refuse)
    plan = make_plan(tmp_path, 1, fallbacks="none")
    with pytest.raises(KeyboardInterrupt):
        emission.emit(plan, [], nothing, nothing, Quiet(), stop)


def test_forwards_are_compiled_once_and_in_the_order_of_need() -> None:
    shapes = longest_first([SHORT, WIDE, LONG])
    names = [variant.id for variant in forwards_to_compile(shapes, H200, FORWARDS)]
    wanted = [variant.id for variant in FORWARDS]
    for shape in shapes:
        wanted += [variant.id for variant in forward_variants(shape, H200)]
    assert names == list(dict.fromkeys(wanted))


def test_forwards_of_a_batch_invariant_run_are_those_that_the_space_fixes(tmp_path: Path) -> None:
    """Forwards with the arithmetic of vLLM's, for any row, are among them."""
    operation = "rmsnorm_invariant_backward"
    problem = Problem.parse("4096x1024:bf16", operation)
    plan = make_plan(tmp_path, 1, problems=(problem,), space_file=space_file(operation))
    wanted = forwards_with({"cluster": 1, "threads_per_row": 64, "vector_bytes": 16}, problem, H200)
    assert 1 < len(wanted) < len(forward_variants(problem, H200)) / 2
    assert fallback_forwards_of(plan) == tile_forwards(H200)
    assert len(tile_forwards(H200)) == 12
    assert plan.forwards(problem, H200) == wanted


def test_run_whose_space_fixes_what_no_forward_has_is_refused_before_it_searches(
    tmp_path: Path,
) -> None:
    operation = "rmsnorm_invariant_backward"
    space = yaml.safe_load(space_file(operation).read_text())
    for entry in space["fixed"]:
        entry["forward"]["threads_per_row"] = 7
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(space))
    problem = Problem.parse("4096x1024:bf16", operation)
    plan = make_plan(tmp_path / "out", 1, problems=(problem,), space_file=path, devices=())
    with pytest.raises(NormforgeError, match=r"no forward for h200 has .*'threads_per_row': 7"):
        tune(plan, None, Quiet())
    assert not plan.out.exists()


def test_forwards_that_the_package_has_are_not_chosen_again() -> None:
    def tuned(problem: Problem, evidence: str, code: str) -> Any:
        shape = {name: getattr(problem, name) for name in ("M", "N", "dtype", "weight_dtype")}
        return SimpleNamespace(**shape, evidence=evidence, provenance={"code": code})

    third = Problem.parse("4096x4096:fp32")
    known: Any = SimpleNamespace(
        tuned=[
            tuned(SHORT, "measured", space_code(SHORT, H200)),
            tuned(WIDE, "predicted", space_code(WIDE, H200)),
            tuned(third, "measured", "old"),
        ]
    )
    assert shapes_to_choose((SHORT, WIDE, third), H200, (0,), known) == longest_first([WIDE, third])
    assert shapes_to_choose((SHORT, WIDE, third), H200, (), known) == [third]
