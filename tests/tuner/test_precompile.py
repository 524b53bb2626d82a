"""Kernels that are compiled while a search runs: found later, and never in its way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.kernels import cubin_cache, precompile
from generator.kernels.cubin_cache import compile_variant, entry_path, find_cached
from generator.kernels.forward import render_forward
from generator.kernels.nvrtc import Compiled
from generator.kernels.precompile import NICE, precompiling
from generator.package.fallback_kernels import (
    DTYPES,
    fallback_variants,
    fallbacks_to_compile,
    first_choices,
)
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.space.forward_space import (
    forward_variants,
    forwards_with,
    generic_forwards,
    tile_forwards,
)
from generator.space.load import space_file
from generator.target import find_target
from generator.tuner import emission, run
from generator.tuner.emission import generic_forwards_of
from generator.tuner.forward import MOST_VARIANTS, forwards_to_compile, space_code
from generator.tuner.plan import longest_first
from generator.tuner.run import kernels_to_precompile, tune
from generator.tuner.task_list import TaskList
from tests.support.fake_devices import FACTS, Quiet, make_plan
from tests.support.fake_gpu import born
from tests.support.patience import patience
from tests.support.synthetic import LEGAL, make_winner

H200 = find_target("h200")
BACKWARD = fallback_variants(H200)[0]
FORWARDS = generic_forwards(DTYPES)
SHORT, LONG, WIDE = map(Problem.parse, ("64x1024:bf16", "65536x1024:bf16", "4096x2048:fp16"))


def workers() -> set[int]:
    return {process.pid for process in active_children() if process.pid is not None}


def await_(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + patience(120)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def all_gone() -> Iterator[None]:
    """What is started inside has ended soon after."""
    before = workers()
    yield
    await_(lambda: workers() <= before)


def refuse(*arguments: object, **named: object) -> Any:
    raise AssertionError("compiled again")


# ---- The cache -----------------------------------------------------------------------------------


def test_what_was_precompiled_is_found_by_who_compiles_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, before = FORWARDS[0], workers()
    assert find_cached(BACKWARD, H200.arch, tmp_path) is None
    with all_gone(), precompiling([BACKWARD, forward], H200.arch, tmp_path):
        await_(lambda: find_cached(forward, H200.arch, tmp_path))
        nice = [os.getpriority(os.PRIO_PROCESS, worker) for worker in workers() - before]
        assert nice and set(nice) == {NICE}
    monkeypatch.setattr(cubin_cache, "compile_source", refuse)
    found = compile_variant(BACKWARD, H200.arch, tmp_path)
    assert found.cubin
    assert found == find_cached(BACKWARD, H200.arch, tmp_path)
    assert compile_variant(forward, H200.arch, tmp_path).cubin

    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=refuse)
    assert emission._compile([BACKWARD], pool, lambda done, count: None) == [found]


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


# ---- Nothing that goes wrong is the search's concern ---------------------------------------------


def test_death_of_a_process_is_harmless(tmp_path: Path) -> None:
    before = workers()
    with all_gone(), precompiling(FORWARDS, H200.arch, tmp_path):
        for worker in workers() - before:
            os.kill(worker, signal.SIGKILL)
        await_(lambda: workers() <= before)


@pytest.mark.parametrize("error", [BrokenProcessPool("dead"), OSError(errno.EAGAIN, "no process")])
def test_processes_that_cannot_be_started_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def submit(*arguments: object) -> None:
        raise error

    def start(*arguments: object) -> Any:
        return SimpleNamespace(
            submit=submit,
            shutdown=lambda **named: None,
            _processes={},
            _executor_manager_thread=None,
        )

    monkeypatch.setattr(precompile, "ProcessPoolExecutor", start)
    searched = False
    with precompiling(FORWARDS, H200.arch, tmp_path):
        searched = True
    assert searched


def test_full_disk_costs_the_entry_only(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file stops even root")
    precompile._fill(FORWARDS[0], H200.arch, tmp_path / "full")
    assert find_cached(FORWARDS[0], H200.arch, tmp_path / "full") is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, NormforgeError])
def test_search_that_ends_early_ends_the_processes(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with all_gone(), pytest.raises(error), precompiling(FORWARDS, H200.arch, tmp_path):
        raise error("planted")


PARENT = """
import signal, sys, time
from multiprocessing import active_children
from pathlib import Path
from generator.space.forward_space import generic_forwards
from generator.kernels.precompile import precompiling
from generator.package.fallback_kernels import DTYPES
from generator.target import find_target
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with precompiling(generic_forwards(DTYPES), find_target("h200").arch, Path(sys.argv[1])):
    print(*(process.pid for process in active_children()), flush=True)
    for _ in range(1000):  # a signal that comes just before a sleep is noticed after it
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, number: int) -> None:
    """SIGINT goes to all of them, as a terminal sends it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    started = {pid: born(pid) for pid in map(int, parent.stdout.readline().split())}
    assert started and None not in started.values()
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)
    else:
        parent.send_signal(number)
    _, said = parent.communicate(timeout=patience(60))
    assert said.count("Traceback") == (number == signal.SIGINT), said
    await_(lambda: not any(born(pid) == time for pid, time in started.items()))


@pytest.mark.parametrize(("cores", "processes"), [(2, 1), (16, 2), (256, 8)])
def test_most_cores_are_left_to_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    started: list[int] = []

    def start(processes: int, *rest: object) -> Any:
        started.append(processes)
        return SimpleNamespace(
            shutdown=lambda **named: None, _processes={}, _executor_manager_thread=None
        )

    monkeypatch.setattr(precompile, "ProcessPoolExecutor", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with precompiling([], H200.arch, tmp_path):
        pass
    assert started == [processes]


# ---- In a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [(), (0,)])
def test_measured_run_compiles_ahead_while_it_searches_and_a_predicted_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...]
) -> None:
    before, seen = workers(), []
    monkeypatch.setattr(run, "run_tasks", lambda *arguments: seen.append(workers() - before))
    measurer: Any = SimpleNamespace(facts=FACTS, close=lambda: None) if devices else None
    plan = make_plan(tmp_path, 1, devices=devices)
    with all_gone():
        outcome = tune(plan, measurer, Quiet())
    assert outcome.emission is None
    assert [bool(started) for started in seen] == [bool(devices)]


def test_workers_of_the_search_are_gone_when_forwards_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose noise they would be taken for."""
    done: list[str] = []

    def search(runner: object, tasks: TaskList, *rest: object) -> None:
        while task := tasks.claim():
            tasks.conclude(task, make_winner(LEGAL.reduction_kinds[0]))

    monkeypatch.setattr(run, "run_tasks", search)
    monkeypatch.setattr(run, "emit", lambda *arguments: done.append("emitted"))
    monkeypatch.setattr(run, "precompiling", lambda *arguments: nullcontext())
    measurer: Any = SimpleNamespace(facts=FACTS, close=lambda: done.append("closed"))
    tune(make_plan(tmp_path, 1, devices=(0,)), measurer, Quiet())
    assert done == ["closed", "emitted"]


def test_foreseen_are_fallback_kernels_and_the_forwards_to_be_measured_in_the_order_of_need(
    tmp_path: Path,
) -> None:
    options = Problem.parse("64x1024:bf16+offset+residual")
    plan = make_plan(tmp_path, 1, problems=(SHORT, options, WIDE, LONG))
    plan = replace(plan, fallbacks="all")
    fallbacks = first_choices(fallback_variants(H200))
    found = kernels_to_precompile(plan)
    assert found[: len(fallbacks)] == fallbacks
    names = [variant.id for variant in found[len(fallbacks) :]]
    assert len(set(names)) == len(names), "compiled twice"
    wanted = [v.id for v in FORWARDS]
    for shape in longest_first([SHORT, WIDE, LONG]):
        wanted += [v.id for v in forward_variants(shape, H200)[:MOST_VARIANTS]]
    assert names == list(dict.fromkeys(wanted))
    assert kernels_to_precompile(make_plan(tmp_path, 1, devices=())) == []


def test_foreseen_of_a_batch_invariant_run_are_forwards_of_what_the_space_fixes(
    tmp_path: Path,
) -> None:
    """And the forwards with the arithmetic of vLLM's, for any row. No fallback kernel, whose bits
    are another's."""
    operation = "rmsnorm_invariant_backward"
    problem = Problem.parse("4096x1024:bf16", operation)
    plan = make_plan(tmp_path, 1, problems=(problem,), space_file=space_file(operation))
    fields = {"cluster": 1, "threads_per_row": 64, "vector_bytes": 16}
    wanted = forwards_with(fields, problem, H200)
    assert 1 < len(wanted) < len(forward_variants(problem, H200)) / 2
    tiles = tile_forwards(H200)
    assert len(tiles) == 12
    assert kernels_to_precompile(plan) == [*tiles, *{v.id: v for v in wanted}.values()]


def test_forwards_that_the_package_keeps_are_not_precompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tuned(problem: Problem, evidence: str, code: str) -> Any:
        return SimpleNamespace(
            M=problem.M,
            N=problem.N,
            dtype=problem.dtype,
            weight_dtype=problem.weight_dtype,
            evidence=evidence,
            provenance={"code": code},
        )

    third = Problem.parse("4096x4096:fp32")
    table = [tuned(SHORT, "measured", space_code(SHORT, H200))]
    table.append(tuned(WIDE, "predicted", space_code(WIDE, H200)))
    table.append(tuned(third, "measured", "old"))
    monkeypatch.setattr(run, "read_forward_table", lambda package: SimpleNamespace(tuned=table))
    plan = make_plan(tmp_path, 1, problems=(SHORT, WIDE, third))
    found = kernels_to_precompile(plan)
    wanted = forwards_to_compile(longest_first([WIDE, third]), H200, generic_forwards_of(plan))
    common = fallbacks_to_compile("common", H200, plan.problems)
    assert 0 < len(common) < len(fallback_variants(H200))
    assert found == [*first_choices(common), *wanted]
