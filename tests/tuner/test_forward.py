"""Forwards in a run: searched behind the shapes that they are of, and put into the same package."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.emulate import evaluator as emulating
from generator.emulate.build import HostError
from generator.emulate.check import Check
from generator.emulate.evaluator import EmulatingPredictor
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import AnyVariant
from generator.package.emit import emit_package
from generator.package.entries import Entry, Forwards
from generator.package.known_winners import known_forwards
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import FORWARD_TRIALS
from generator.search.search import search_problem
from generator.search.starts import incumbent_and_starts
from generator.space.forward_space import forward_variants
from generator.space.legal_configs import LegalConfigs
from generator.space.load import space_file
from generator.studies.records import Winner
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog
from generator.studies.work_queue import open_queue
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.run import tune
from generator.tuner.task_list import TaskList
from normforge.table import ForwardTable
from tests.support import synthetic
from tests.support.fake_devices import DevicePool, FakeDevice, Quiet, make_plan
from tests.support.forward import H200, InstantPool
from tests.support.samples import planted_entry
from tests.support.synthetic import FakeEvaluator, timed

SHAPES = tuple(map(Problem.parse, ("64x1024:bf16", "65536x1024:bf16", "64x1024:bf16+offset")))
FORWARD = Problem.parse("rmsnorm_forward:4096x1024:bf16")


def plan_of(out: Path, *problems: Problem, **options: Any) -> Plan:
    return make_plan(out, 8, Plan, problems=problems or SHAPES, fallbacks="none", **options)


class Compiler:
    """Compiles at once."""

    processes = 2

    def submit(self, variant: AnyVariant) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        future.set_result(compile_variant(variant, H200.arch))
        return future

    def result(self, variant: AnyVariant, future: Future[Compiled]) -> Compiled:
        return future.result()

    def code(self, variant: AnyVariant) -> str:
        return variant.id


def predicted(legal: LegalConfigs, storage: Any, evaluator: Any = None) -> Winner | None:
    """The winner of a forward where there is no GPU."""
    pool: Any = Compiler()
    budget = plan_of(Path(), devices=()).budget(legal.problem)
    return search_problem(legal, pool, evaluator or EmulatingPredictor(H200), storage, budget)


def legal_of(problem: Problem) -> LegalConfigs:
    return LegalConfigs(plan_of(Path()).space_of(problem), problem, H200)


# ---- What is searched ----------------------------------------------------------------------------


def test_a_run_searches_the_forward_of_every_shape_once_and_behind_all_others(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path)
    forwards = tuple(
        Problem.parse(f"rmsnorm_forward:{shape}") for shape in ("64x1024:bf16", "65536x1024:bf16")
    )
    assert plan.searched == (*SHAPES, *forwards)
    assert [plan.budget(problem).trials for problem in plan.searched] == [8, 8, 8, 200, 200]
    timed = replace(plan, seconds=30.0)
    assert [timed.budget(problem).seconds for problem in plan.searched] == [10.0] * 3 + [None] * 2
    assert {plan.space_of(problem).path for problem in forwards} == {space_file("rmsnorm_forward")}
    assert {plan.space_of(problem).path for problem in SHAPES} == {plan.space_file}
    alone, two = (TaskList(p, open_queue(None)) for p in (plan, plan_of(tmp_path, devices=(0, 1))))
    orders: list[list[Problem]] = []
    for tasks in (alone, two):
        orders.append([])
        while task := tasks.claim():
            orders[-1].append(task.problem)
    assert orders[0] == list(plan.searched)
    assert orders[1][-2:] == [*reversed(forwards)], "the longest first, but behind backwards"


def test_packages_without_forwards_search_none(tmp_path: Path) -> None:
    problems = (Problem.parse("layernorm_backward:4096x1024:bf16"),)
    space = space_file("layernorm_backward")
    assert plan_of(tmp_path, *problems, space_file=space).searched == problems


def test_forwards_of_a_batch_invariant_package_are_chosen_among_those_of_one_order(
    tmp_path: Path,
) -> None:
    """In a study of their own: what wins among all may be none of them."""
    operation = "rmsnorm_invariant_backward"
    problems = (Problem.parse("4096x1024:bf16", operation),)
    plan = plan_of(tmp_path, *problems, space_file=space_file(operation))
    (_, forward) = plan.searched
    assert plan.study(forward) == "rmsnorm_invariant_forward:4096x1024:bf16@h200-132sm:measured"
    wanted = {"cluster": 1, "threads_per_row": 64, "vector_bytes": 16, "form": "registers"}
    configs = list(plan.space_of(forward).legal(forward, H200))
    of_all = [v.config for v in forward_variants(FORWARD, H200)]
    assert len(configs) > 1
    assert sorted(map(str, configs)) == sorted(
        str({name: config[name] for name in configs[0]})
        for config in of_all
        if config.items() >= wanted.items()
    )


# ---- Without a GPU -------------------------------------------------------------------------------


def test_rule_chooses_where_nothing_is_measured(tmp_path: Path) -> None:
    first = forward_variants(FORWARD, H200)[0]
    storage = open_storage(tmp_path / "studies.journal")
    winner = predicted(legal_of(FORWARD), storage)
    assert winner is not None
    assert (winner.variant, winner.evidence) == (first.id, "predicted")
    assert winner.trials == FORWARD_TRIALS["predicted"]
    assert winner.reason == "first in the order of the rule of 4 finalists that count as equal"
    assert winner.result.checks[-1] == "CPU emulator, 3 schedules"
    assert predicted(legal_of(FORWARD), storage) == winner
    assert len(StudyLog(storage, winner.study).trials()) == 4


def test_a_kernel_that_the_emulator_refutes_is_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = forward_variants(FORWARD, H200)[:2]

    def check(variant: ForwardVariant, problem: Problem) -> Check:
        found = ("y[0, 0] is 1",) if variant == first else ()
        return Check(variant.id, 3, 1, problems=found)

    monkeypatch.setattr(emulating, "check_forward", check)
    winner = predicted(legal_of(FORWARD), open_storage(tmp_path / "studies.journal"))
    assert winner is not None
    assert winner.variant == second.id


def test_forward_is_executed_once_for_all_m_that_are_reduced_to_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def check(variant: ForwardVariant, problem: Problem) -> Check:
        asked.append(problem.M)
        return Check(variant.id, 3, 1)

    monkeypatch.setattr(emulating, "check_forward", check)
    predictor, variant = EmulatingPredictor(H200), forward_variants(FORWARD, H200)[0]
    for M in (4096, 8192, 1, 65536):
        problem = Problem(M, 1024, "bf16", "bf16", operation="rmsnorm_forward")
        predictor.confirm(problem, variant, timed(1.0))
    assert asked == [4096, 1]


def test_full_disk_is_no_answer_about_a_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the package would keep what the disk decided."""

    def full(variant: ForwardVariant, problem: Problem) -> Check:
        raise HostError("the disk is full")

    monkeypatch.setattr(emulating, "check_forward", full)
    with pytest.raises(HostError):
        predicted(legal_of(FORWARD), open_storage(tmp_path / "studies.journal"))


# ---- Into the package ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["4096x1024:bf16", "4096x1024:bf16:fp32"])
def test_forwards_go_into_the_package_of_their_shapes(tmp_path: Path, shape: str) -> None:
    """Predicted ones state no time: no model knows it."""
    problem = Problem.parse(shape)
    outcome = tune(plan_of(tmp_path, problem, devices=()), None, Quiet())
    assert outcome.emission is not None
    assert [shape for shape, _ in outcome.winners] == [problem]
    table = ForwardTable.load(outcome.emission.package)
    assert table is not None
    (entry,) = table.tuned
    assert entry.kernel.spec == forward_variants(problem, H200)[0].spec(132)
    assert entry.evidence == "predicted"
    assert entry.provenance["study"].startswith(f"rmsnorm_forward:{shape}@h200")
    assert (entry.dtype, entry.weight_dtype) == (problem.dtype, problem.weight_dtype)
    assert not entry.provenance.keys() & {"us", "ratio", "tie"}
    assert table.fallback == ()


def cost(variant: AnyVariant) -> float:
    """The third forward in the order of the rule is the fastest."""
    if not isinstance(variant, ForwardVariant):
        return synthetic.cost(variant)
    return 1.0 if variant.config == forward_variants(FORWARD, H200)[2].config else 1.1


class Device(FakeDevice):
    """One of two that take turns, so that both get some."""

    def evaluator(self, target: Any) -> Any:
        (self.folder / f"{os.getpid()}").touch()
        return FakeEvaluator(cost, delay=0.002)

    def pool(self, arch: str, processes: int) -> Any:
        return nullcontext(InstantPool())


def test_several_gpus_share_the_forwards(tmp_path: Path) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 8192, 16384)]
    plan = plan_of(tmp_path, *shapes, devices=(0, 1))
    tasks = TaskList(plan, open_queue(None))
    with DevicePool((0, 1), lambda index: Device(tmp_path)) as pool:
        pool.search(plan, tasks, Stop(), Quiet())
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2
    assert tasks.winners.keys() == {*plan.searched}
    fastest = forward_variants(FORWARD, H200)[2].config
    storage = open_storage(plan.where)
    for problem in plan.searched[3:]:
        winner = tasks.winners[problem]
        assert winner is not None
        assert (winner.config, winner.evidence) == (fastest, "measured")
        trials = len(StudyLog(storage, plan.study(problem)).trials())
        assert winner.trials == trials == len(legal_of(problem).first(200))


def test_forward_of_a_package_without_studies_is_the_incumbent(tmp_path: Path) -> None:
    """One of before forwards had studies: it states a reason, a date, and the digest of a code."""
    problem = Problem(4096, 1024, "bf16", "bf16")
    variant = forward_variants(problem, H200)[7]
    facts = {
        **{"reason": "first in the order of the rule of 3", "date": "2026-01-01", "code": "0"},
        **{"us": 10.0, "floor_us": 9.0, "ratio": 1.11, "checks": ["accuracy"], "tie": []},
    }
    entry = Entry(problem, variant, compile_variant(variant, H200.arch), "measured", facts)
    package = tmp_path / "rmsnorm_backward"
    backward = planted_entry(problem, H200)
    emit_package([backward], [], H200, package, Forwards((entry,), ()))
    (winner,) = known_forwards(package)
    assert (winner.problem, winner.config) == (FORWARD, variant.config)
    assert winner.result == Result("ok", 10.0, 9.0, 1.11, "unverified")
    assert (winner.trials, winner.counts, winner.study, winner.space_hash) == (0, {}, "", "")
    evaluator: Any = FakeEvaluator()
    found, _ = incumbent_and_starts(legal_of(FORWARD), evaluator, [winner], "study", None)  # type: ignore[arg-type]
    assert found == variant.config
