"""benchmarks.knob: which configs it takes, what it times, its rows and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import knob
from benchmarks.knob import families, measure
from generator.evaluate.gpu.protocol import Answer, Job, WorkerLostError
from generator.evaluate.gpu.supervisor import Supervisor
from generator.problem import Problem
from generator.result import Result
from generator.space.space import Space
from generator.studies.reader import Study
from generator.studies.records import Record
from generator.target import Target
from tests.support.fake_supervisor import FakeSupervisor, timing_supervisor
from tests.support.samples import PLAIN
from tests.support.synthetic import PROBLEM, FakePool

MAILBOX = {**PLAIN, "strategy": "mailbox", "slice_columns": 32, "overlap": "none"}
MAILBOX |= {"pipeline": "async", "stages": 2}


def fake_gpu(wrong: str = "", lost: str = "") -> FakeSupervisor:
    """Takes 10 us for the floor and 1 us more for each candidate of a block. wrong, lost: part of
    the name of a kernel that is wrong or costs the worker its life."""

    def fault(job: Job) -> Result | Exception | None:
        names = [candidate.spec.name for candidate in job.candidates]
        if lost and any(lost in name for name in names):
            return WorkerLostError("crashed", "the GPU worker died")
        return Result("wrong", note="planted") if wrong and wrong in names[0] else None

    return timing_supervisor(lambda job: [10.0 + i for i in range(len(job.candidates) + 1)], fault)


def study(space: Space, target: Target, *configs: dict[str, Any], **fields: Any) -> Study:
    records = tuple(
        Record(
            config=space.normalize({**config}, PROBLEM, target),
            variant=str(place),
            result=Result("ok", 10.0 + place, 10.0, 1.0 + place / 10),
            origin="random",
            elapsed=0.0,
        )
        for place, config in enumerate(configs)
    )
    where = {"problem": PROBLEM, "gpu": "h200", "sms": 132, "evidence": "measured"} | fields
    return Study(
        name="a study",
        number=0,
        **where,
        records=records,
        winner=None,
        finals=(),
        importance={},
    )


def found(space: Space, target: Target, name: str, *studies: Study, count: int = 9) -> list[Any]:
    return families(space, name, studies, PROBLEM, target, count)


def test_configs_for_which_the_knob_means_something(space: Space, target: Target) -> None:
    fast, slow = MAILBOX, {**MAILBOX, "stages": 3, "arrival": "early"}
    own = study(space, target, {**PLAIN, "strategy": "separate"}, fast, slow, fast)
    got = found(space, target, "arrival", own)
    assert [family.keys() for family in got] == [{"late", "early"}] * 2
    assert [family["late"]["stages"] for family in got] == [2, 3]
    for family in got:
        rest = [{**variant.config, "arrival": ""} for variant in family.values()]
        assert rest[0] == rest[1]
    assert len(found(space, target, "arrival", own, count=1)) == 1


@pytest.mark.parametrize(
    "fields",
    [{"evidence": "predicted"}, {"gpu": "gb200"}, {"problem": Problem.parse("8192x1024:bf16")}],
)
def test_studies_of_something_else_do_not_count(
    space: Space, target: Target, fields: dict[str, Any]
) -> None:
    assert found(space, target, "arrival", study(space, target, MAILBOX, **fields)) == []


def test_only_legal_values_are_taken(space: Space, target: Target) -> None:
    (family,) = found(space, target, "rows_per_cta", study(space, target, MAILBOX))
    (values,) = [each.choices for each in space.knobs if each.name == "rows_per_cta"]
    assert 1 < len(family) < len(values)
    for value, variant in family.items():
        assert variant["rows_per_cta"] == value
        assert not space.reject(variant.config, PROBLEM, target)


def test_blocks_are_set_beside_rows_one_after_another(space: Space, target: Target) -> None:
    """The configs have room for blocks."""
    crowded = {**PLAIN, "pipeline": "bulk", "stages": 6, "rows_in_flight": 2, "rows_per_cta": 8}
    got = found(space, target, "in_blocks", study(space, target, MAILBOX, crowded))
    assert space.reject(space.normalize(crowded, PROBLEM, target), PROBLEM, target)
    ((blocked, plain),) = [family.values() for family in got]
    assert (blocked.in_blocks, plain.in_blocks) == (True, False)
    assert blocked.config == plain.config and blocked.id != plain.id


def rows_of(space: Space, target: Target, gpu: FakeSupervisor, **pool: Any) -> list[dict[str, Any]]:
    (family,) = found(space, target, "stages", study(space, target, MAILBOX))
    return measure(cast(Supervisor, gpu), FakePool(**pool), PROBLEM, target, "stages", family)


def test_values_of_a_config_share_a_block(space: Space, target: Target) -> None:
    gpu = fake_gpu()
    rows = rows_of(space, target, gpu)
    blocks = [len(job.candidates) for job in gpu.jobs if job.kind == "interleave"]
    assert blocks == [len(rows)]
    assert [row["us"] for row in rows] == [11.0 + i for i in range(len(rows))]
    assert [row["ratio"] for row in rows] == [round(1.1 + i / 10, 4) for i in range(len(rows))]
    assert all(row["floor_us"] == 10.0 and "stages" not in row["config"] for row in rows)
    assert len({row["value"] for row in rows}) == len(rows)


def test_times_are_those_of_the_rounds(space: Space, target: Target) -> None:
    """The ratio is the middle of 3, 5 and 1; the quotient of the medians is 2."""
    gpu = fake_gpu()
    call, rounds = gpu.call, [[1.0, 2.0, 4.0], [3.0, 10.0, 4.0]]

    def timed(job: Job) -> Answer:
        answer = call(job)
        block = [rounds[0], *rounds[1:] * len(job.candidates)]
        return replace(answer, block=block) if job.kind == "interleave" else answer

    gpu.call = timed  # type: ignore[method-assign]
    for row in rows_of(space, target, gpu):
        assert (row["us"], row["floor_us"], row["ratio"]) == (4.0, 2.0, 3.0)


def test_what_may_not_run_says_why_and_the_others_are_timed(space: Space, target: Target) -> None:
    broken = rows_of(space, target, fake_gpu(), broken=lambda config: config["stages"] == 2)
    wrong = rows_of(space, target, fake_gpu(wrong="async2"))
    lost = rows_of(space, target, fake_gpu(lost="async2"))
    for rows, why in ((broken, "error: planted"), (wrong, "wrong: planted"), (lost, "crashed: ")):
        faults = {row["value"]: row["fault"] for row in rows if "fault" in row}
        assert list(faults) == [2]
        assert why in faults[2]
        assert all("us" in row for row in rows if row["value"] != 2)


@pytest.fixture
def machine(space: Space, target: Target, monkeypatch: pytest.MonkeyPatch) -> FakeSupervisor:
    gpu = fake_gpu()
    own = [study(space, target, MAILBOX)]
    monkeypatch.setattr(knob, "Supervisor", lambda device: gpu)
    monkeypatch.setattr(knob, "read_studies", lambda where: own)

    class Pool(FakePool):
        def __enter__(self) -> FakePool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(knob, "CompilePool", lambda *_, **__: Pool())
    return gpu


def test_document_and_exit_code(machine: FakeSupervisor, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "knob.json"
    arguments = ["arrival", "--out", str(out), "--shapes"]
    assert knob.main([*arguments, str(PROBLEM)]) == 0
    document = json.loads(out.read_text())
    assert document["knob"] == "arrival"
    assert document["environment"]["gpu"] == "NVIDIA H200"
    assert [row["value"] for row in document["rows"]] == ["late", "early"]
    assert "early" in capsys.readouterr().out
    assert knob.main([*arguments, f"{PROBLEM},8192x1024:bf16"]) == 1
    assert "8192x1024:bf16: no measured config" in capsys.readouterr().err


def test_blocks_are_timed_like_the_values_of_a_knob(
    machine: FakeSupervisor, tmp_path: Path
) -> None:
    out = tmp_path / "blocks.json"
    assert knob.main(["in_blocks", "--out", str(out), "--shapes", str(PROBLEM)]) == 0
    document = json.loads(out.read_text())
    assert document["knob"] == "in_blocks"
    assert [(row["value"], row["us"]) for row in document["rows"]] == [(True, 11.0), (False, 12.0)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["colour", "--shapes", str(PROBLEM)], "the space has no knob 'colour', but strategy"),
        (["stages", "--shapes", "nonsense"], "nonsense"),
        (["stages", "--shapes", str(PROBLEM), "--gpu", "gb200"], "no --gpu gb200: this machine"),
    ],
)
def test_bad_input(
    machine: FakeSupervisor, tmp_path: Path, capsys: Any, arguments: list[str], sentence: str
) -> None:
    assert knob.main([*arguments, "--out", str(tmp_path / "out.json")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
