"""`tune.py check` from the command line down to the worker of a GPU that does not exist."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import normforge
from generator.cli.main import main
from generator.evaluate.gpu import recheck
from generator.evaluate.gpu.nvml import DeviceMonitor
from generator.evaluate.gpu.protocol import Answer, Candidate, Job, WorkerLostError
from generator.evaluate.gpu.recheck import Rechecker
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry, problem_of
from generator.paths import GENERATED
from generator.problem import RMSNORM_FORWARD, Problem
from generator.result import Result
from generator.target import find_target
from generator.tuner import choose_device, device_process, run
from generator.tuner.check import OTHER_FLOOR, Stored, _recorded_ratio, choose, stored_kernels
from normforge.table import ForwardTable, KernelOf, Table
from tests.support.entry_points import leaf, write_package
from tests.support.fake_gpu import BothWays, FakeGpu, Log, Weather, compile_both, key
from tests.support.fake_run import nap
from tests.support.packages import variant_for
from tests.support.synthetic import TARGET, cost, digest

WIDTHS = (128, 256, 512, 1024)
SHAPES = tuple(f"4096x{N}:bf16" for N in WIDTHS)


def variant_of(shape: str) -> Variant:
    return variant_for(Problem.parse(shape))


@dataclass
class Machine:
    """A machine with a GPU and a package in `out`; check() gives the exit code and the document of
    the command."""

    out: Path
    capsys: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def emit(self, **changes: dict[str, Any]) -> None:
        """A package of SHAPES. changes: of what it states of some shapes, by their widths; None
        for what it does not state."""
        entries = []
        for shape, width in zip(SHAPES, WIDTHS, strict=True):
            variant = variant_of(shape)
            facts = {**dict.fromkeys(PROVENANCE_KEYS, "known"), "floor_bytes": 1, "tie": []}
            facts |= {"ratio": cost(variant), "bits": digest(key(variant.config), 0)}
            facts |= changes.get(f"n{width}", {})
            evidence = facts.pop("evidence", "measured")
            facts = {name: value for name, value in facts.items() if value is not None}
            cubin = json.dumps(sorted(variant.config.items())).encode()
            compiled = Compiled(TARGET.arch, f"// {variant}\n", cubin, {}, "13", False, "")
            entries.append(Entry(Problem.parse(shape), variant, compiled, evidence, facts))
        shutil.rmtree(self.out, ignore_errors=True)
        emit_package(entries, [], TARGET, self.out / "rmsnorm_backward")

    def plug_in(
        self,
        weather: Weather | None = None,
        log: Log | None = None,
        sleep: Callable[[float], None] = nap,
        **faults: str,
    ) -> None:
        """Go on with a GPU on which kernels have these faults, by their widths. sleep: how the
        tuner pauses."""
        by_key = {key(variant_of(f"4096x{n[1:]}:bf16").config): f for n, f in faults.items()}
        gpu = FakeGpu(log or Log(), BothWays(faults=by_key), weather or Weather())
        supervisor = partial(
            device_process.Supervisor,
            seconds=2.0,
            open_handler=gpu,
            method="forkserver",
            sleep=sleep,
        )
        self.patch.setattr(torch.version, "cuda", "13.0")
        self.patch.setattr(device_process, "Supervisor", supervisor)
        self.patch.setattr(choose_device, "match_device", lambda name, sms: TARGET)

    def check(self, *options: str) -> tuple[int, dict[str, Any]]:
        code = main(["check", "--gpu", "auto", "--out", str(self.out), "--json", *options])
        document: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        assert document["passed"] is (code == 0)
        return code, document

    def rows(self, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the exit code, and the kernels by shape."""
        code, document = self.check(*options)
        return code, {row["shape"]: row for row in document["kernels"]}


@pytest.fixture
def machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Machine:
    made = Machine(tmp_path / "out", capsys, monkeypatch)
    made.emit()
    made.plug_in()
    return made


def test_a_package_that_does_what_it_says_passes(machine: Machine) -> None:
    code, document = machine.check()
    assert (code, document["gpu"]) == (0, "h200")
    assert {row["shape"] for row in document["kernels"]} == {*SHAPES}
    for row in document["kernels"]:
        assert (row["bits"], row["accuracy"], row["time"]) == ("same", "ok", "ok")
        assert abs(row["slower"]) < 0.02
        assert row["errors"] == {"dx": 1e-3}
    text = main(["check", "--gpu", "h200", "--out", str(machine.out)])
    assert text == 0
    said = machine.capsys.readouterr().out
    assert "4 kernels checked: 4 as the package says, 0 not." in said
    assert all(shape in said for shape in SHAPES)


def test_what_a_kernel_does_wrong_is_said_of_it_alone(machine: Machine) -> None:
    machine.plug_in(n128="wrong", n512="segfault")
    code, rows = machine.rows()
    assert code == 1
    assert rows["4096x128:bf16"]["accuracy"] == "wrong: planted"
    assert rows["4096x512:bf16"]["accuracy"].startswith("crashed: the GPU worker died")
    for shape in ("4096x128:bf16", "4096x512:bf16"):
        assert (rows[shape]["bits"], rows[shape]["time"]) == ("not checked", "not checked")
        assert rows[shape]["ratio"] is None
    assert [rows[shape]["passed"] for shape in SHAPES] == [False, True, False, True]


@pytest.mark.parametrize("fault", ["hang", "late_hang", "sticky", "late_sticky"])
def test_a_kernel_that_takes_the_worker_with_it_is_contained(machine: Machine, fault: str) -> None:
    machine.plug_in(n256=fault)
    code, rows = machine.rows("--sample", "2", "--shapes", ",".join(SHAPES[1:]))
    assert code == 1
    outcome = "timeout" if "hang" in fault else "crashed"
    assert rows["4096x256:bf16"]["accuracy"].startswith(f"{outcome}: ")
    assert rows["4096x512:bf16"]["passed"]


def test_what_was_found_before_memory_ran_out_stands(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that rotate take more than those of the checks."""
    machine.plug_in()
    call = Supervisor.call

    def short(self: Supervisor, job: Job) -> Answer:
        if job.kind == "interleave" and job.problem.N == 256:
            raise WorkerLostError("launch_error", "CUDA out of memory")
        return call(self, job)

    monkeypatch.setattr(Supervisor, "call", short)
    code, rows = machine.rows()
    row = rows["4096x256:bf16"]
    assert (code, row["accuracy"], row["bits"]) == (0, "ok", "same")
    assert row["time"] == "not timed: CUDA out of memory"


def test_other_bits_and_more_time_fail_and_are_named(machine: Machine) -> None:
    slower = cost(variant_of("4096x512:bf16")) / 1.2
    machine.emit(n128={"bits": "0" * 32}, n512={"ratio": slower})
    code, rows = machine.rows()
    assert code == 1
    assert rows["4096x128:bf16"]["bits"] == "differ"
    assert rows["4096x128:bf16"]["accuracy"] == rows["4096x128:bf16"]["time"] == "ok"
    row = rows["4096x512:bf16"]
    assert (row["time"], row["bits"], round(row["slower"], 1)) == ("slow", "same", 0.2)
    assert [rows[shape]["passed"] for shape in SHAPES] == [False, True, False, True]
    machine.emit(n512={"ratio": slower})
    assert machine.check("--tolerance", "25")[0] == 0
    assert machine.check("--tolerance", "15")[0] == 1


def test_faster_than_the_package_says_is_no_fault(machine: Machine) -> None:
    machine.emit(n128={"ratio": 3.0})
    code, rows = machine.rows()
    assert code == 0
    assert rows["4096x128:bf16"]["slower"] < -0.3


def test_what_the_package_does_not_say_is_not_compared_and_that_is_said(machine: Machine) -> None:
    machine.emit(n128={"bits": None}, n256={"bits": None, "evidence": "predicted", "ratio": 0.01})
    code, rows = machine.rows()
    assert code == 0
    assert rows["4096x128:bf16"]["bits"] == rows["4096x256:bf16"]["bits"] == "not recorded"
    assert rows["4096x256:bf16"]["time"] == "predicted"
    main(["check", "--gpu", "auto", "--out", str(machine.out)])
    said = machine.capsys.readouterr().out
    assert "2 have no record of their bits" in said
    assert "1 have no measured time to compare with" in said


def test_noise_is_said_and_blamed_on_no_kernel(machine: Machine) -> None:
    machine.plug_in(Weather(jitter=0.4))
    code, rows = machine.rows("--shapes", SHAPES[0], "--tolerance", "0.001")
    assert code == 0
    assert rows[SHAPES[0]]["time"].startswith("noisy: ")
    assert rows[SHAPES[0]]["bits"] == "same"


def test_a_damaged_kernel_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = KernelOf.read_cubin

    def damaged(kernel: Any, package: Path) -> bytes:
        if kernel.spec.N == 128:
            raise RuntimeError("the cubin is damaged")
        return read(kernel, package)

    monkeypatch.setattr(KernelOf, "read_cubin", damaged)
    code, rows = machine.rows()
    assert code == 1
    assert rows["4096x128:bf16"]["accuracy"] == "unchecked: the cubin is damaged"
    assert sum(row["passed"] for row in rows.values()) == 3


def test_a_sample_is_spread_over_the_table_and_the_same_each_time(machine: Machine) -> None:
    found = [[*machine.rows("--sample", "2")[1]] for _ in range(2)]
    assert found == [["4096x128:bf16", "4096x512:bf16"]] * 2
    assert len(machine.rows("--sample", "99")[1]) == 4


OTHER: dict[str, tuple[list[str], str]] = {
    "no shape of it": (["--shapes", "64x64:bf16"], "the package has no kernel for 64x64:bf16"),
    "no sample": (["--sample", "0"], "--sample: '0' must be above 0"),
    "no tolerance": (["--tolerance", "x"], "--tolerance: 'x' is not a number"),
    "two devices": (["--device", "0,1"], "'0,1' is more than one GPU"),
    "no GPU of that name": (["--gpu", "h2oo"], "unknown GPU 'h2oo'"),
    "another GPU": (["--gpu", "h100"], "is for h200 and"),
    "another operation": (["--op", "layernorm_backward"], "holds no package"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_cannot_be_checked_is_refused_in_one_sentence(machine: Machine, name: str) -> None:
    options, says = OTHER[name]
    assert main(["check", "--gpu", "auto", "--out", str(machine.out), *options]) == 2
    captured = machine.capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tune.py check: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("gpu", ["auto", "h200"])
def test_without_a_gpu_there_is_one_sentence(
    machine: Machine, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["check", "--gpu", gpu, "--out", str(machine.out)]) == 2
    captured = machine.capsys.readouterr()
    assert captured.err == (
        "tune.py check: kernels are checked on a GPU, and this machine has no CUDA GPU\n"
    )


def test_a_time_is_taken_under_the_condition_of_the_table(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of before name none: it was the flush."""
    machine.emit(n256={"condition": "rotation"})
    machine.plug_in()
    check_kernel, conditions = Rechecker.check, {}

    def noting(self: Rechecker, problem: Problem, *rest: Any) -> Result:
        conditions[problem.N] = rest[-1]
        return check_kernel(self, problem, *rest)

    monkeypatch.setattr(Rechecker, "check", noting)
    asked: list[tuple[str, str]] = []
    call = Supervisor.call
    monkeypatch.setattr(
        Supervisor,
        "call",
        lambda self, job: asked.append((job.kind, job.condition)) or call(self, job),
    )
    assert machine.check()[0] == 0
    assert conditions == dict.fromkeys(WIDTHS, "flush") | {256: "rotation"}
    assert {condition for kind, condition in asked if kind == "interleave"} == {"flush", "rotation"}


@pytest.mark.parametrize("trouble", ["no GPU", "a GPU that breaks", "no such shape"])
def test_an_error_is_a_document_as_well(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Readers of nothing but the output learn of it."""
    options = []
    if trouble == "no GPU":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif trouble == "no such shape":
        options = ["--shapes", "64x64:bf17"]
    else:
        machine.plug_in(log=Log(tmp_path / "log"), n256="segfault")
        check_kernel = Rechecker.check

        def breaking(self: Rechecker, problem: Problem, one: Candidate, condition: str) -> Result:
            if problem.N == 256:
                (tmp_path / "broken").write_text("die")
            return check_kernel(self, problem, one, condition)

        monkeypatch.setattr(Rechecker, "check", breaking)
    assert main(["check", "--gpu", "auto", "--out", str(machine.out), "--json", *options]) == 2
    captured = machine.capsys.readouterr()
    document = json.loads(captured.out)
    assert document["passed"] is False
    assert captured.err == f"tune.py check: {document['error']}\n"
    breaks = trouble == "a GPU that breaks"
    known = [row["shape"] for row in document["kernels"]]
    assert known == (["4096x128:bf16"] if breaks else [])
    assert breaks == document["error"].startswith("the lost GPU worker cannot be replaced: ")


def test_pauses_after_noise_are_few_in_all(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of many kernels on a GPU that is never quiet takes no minutes."""
    pauses: list[float] = []
    monkeypatch.setattr(recheck, "PAUSES_IN_ALL", 5.0)
    machine.plug_in(Weather(jitter=0.4), sleep=pauses.append)
    code, rows = machine.rows()
    assert code == 0
    assert all(row["time"].startswith("noisy: ") for row in rows.values())
    assert sum(map(bool, pauses)) < 4 * sum(map(bool, recheck.PAUSES))
    assert sum(pauses) == pytest.approx(5.0)


def test_a_package_without_tuned_kernels_does_not_pass(machine: Machine) -> None:
    package = machine.out / "rmsnorm_backward"
    shutil.rmtree(package)
    emit_package([], [], TARGET, package)
    assert main(["check", "--gpu", "auto", "--out", str(machine.out)]) == 2
    assert "has no tuned kernel" in machine.capsys.readouterr().err


def test_what_a_program_calls_is_tuned_recorded_and_checked(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: `collect`, `tune.py --shapes` and `tune.py check`, but for kernels that run."""
    package = write_package(tmp_path / "package")
    recorder = normforge.collect(tmp_path / "shapes.yaml")
    for M in (64, 2048):
        x, weight = leaf(M, 256, dtype=torch.bfloat16), leaf(256, dtype=torch.bfloat16)
        package.rms_norm(x, weight).sum().backward()
    recorder.stop()
    folders = {"cache_folder": tmp_path / "cache", "compile": compile_both, "method": "forkserver"}
    monkeypatch.setattr(run, "CompilePool", partial(CompilePool, **folders))
    out = tmp_path / "tuned"
    line = ["--gpu", "auto", "--out", str(out), "--json"]
    assert (
        main([*line, "--shapes", str(recorder.path), "--trials", "5", "--fallbacks", "none"]) == 0
    )
    tuned = json.loads(machine.capsys.readouterr().out)["shapes"]
    assert [shape["shape"] for shape in tuned] == ["2048x256:bf16", "64x256:bf16"]
    assert main(["check", *line]) == 0
    document = json.loads(machine.capsys.readouterr().out)
    found = {row["shape"]: (row["bits"], row["accuracy"]) for row in document["kernels"]}
    shapes = ("2048x256:bf16", "64x256:bf16")
    names = [*shapes, *(f"{shape} forward" for shape in shapes)]
    assert found == dict.fromkeys(names, ("same", "ok"))
    assert "4 as the package says, 0 not." in document["summary"]


COMMITTED = sorted(path.parent for path in GENERATED.glob("*/*/table.json"))


@pytest.mark.parametrize("package", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_packages_of_before_are_checked_but_for_what_they_do_not_record(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed ones, with their own cubins, under the condition that the table names."""
    table = Table.load(package)
    backward = {str(problem_of(entry)): entry.provenance for entry in table.tuned}
    found = ForwardTable.load(package)
    forward = {str(problem_of(entry)): entry.provenance for entry in (found.tuned if found else ())}
    told = backward | {f"{RMSNORM_FORWARD}:{shape}": facts for shape, facts in forward.items()}

    class Machine:
        facts: ClassVar = {"name": "fake"}
        monitor = DeviceMonitor(None)

        def rechecker(self) -> Any:
            return self

        def check(self, problem: Problem, candidate: Candidate, condition: str) -> Result:
            known = told.get(str(problem), {})
            assert condition == (known.get("condition") or "flush")
            assert candidate.cubin.startswith(b"\x7fELF")
            bits = known.get("bits") or "b"
            return Result("ok", us=9.0, floor_us=10.0, ratio=0.9, extra={"bits": bits})

        def close(self) -> None:
            pass

    target = find_target(package.parent.name)
    monkeypatch.setattr(choose_device, "open_gpu", lambda *_: (target, Machine()))
    line = ["--gpu", target.name, "--op", package.name, "--sample", "20", "--json"]
    assert main(["check", *line]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["kernels"]
    backwards = [row for row in rows if row["shape"] in backward]
    assert len(backwards) == min(20, len(backward))
    of_rows = backward | {f"{shape} forward": facts for shape, facts in forward.items()}
    recorded = {row["shape"] for row in rows if of_rows[row["shape"]].get("bits")}
    unrecorded = len(rows) - len(recorded)
    assert unrecorded == 0 or f"{unrecorded} have no record of their bits" in document["summary"]
    predicted = {row["time"] == "predicted" for row in rows}
    assert predicted == {target.name == "gb200"}
    assert all(row["passed"] for row in rows)
    assert {r["shape"] for r in rows if r["bits"] != "not recorded"} == recorded


def test_times_beside_another_floor_are_not_compared() -> None:
    facts = {"ratio": 1.1, "us": 1.0}
    shapes = {"8x64:bf16": 1.1, "8x64:bf16+residual": OTHER_FLOOR}
    for shape, wanted in shapes.items():
        for evidence, found in (("measured", wanted), ("predicted", "predicted")):
            tuned: Any = SimpleNamespace(provenance=facts, evidence=evidence)
            problem = Problem.parse(shape)
            assert _recorded_ratio(Stored(problem, tuned)) == found
    forward: Any = SimpleNamespace(provenance=facts, evidence="measured")
    problem = Problem.parse("rmsnorm_forward:8x64:bf16+residual")
    assert _recorded_ratio(Stored(problem, forward)) == 1.1


def test_forwards_are_checked_with_their_shapes() -> None:
    """The committed package of the H200 has them."""
    package = GENERATED / "h200" / "rmsnorm_backward"
    stored = stored_kernels(package, TARGET, "rmsnorm_backward")
    assert sum(one.forward for one in stored) > 100
    problem = Problem.parse("4096x4096:bf16")
    names = [str(one) for one in choose(stored, [problem], 5)]
    assert names == ["4096x4096:bf16", "4096x4096:bf16 forward"]
    assert len([one for one in choose(stored, None, 20) if not one.forward]) == 20
    forwards = [str(one.problem) for one in stored if one.forward]
    assert len(forwards) == len({*forwards}), "one that serves several shapes is checked once"


def test_a_sample_is_spread_over_the_table() -> None:
    problems = [Problem.parse(f"{M}x64:bf16") for M in range(1, 10)]
    stored = [Stored(problem, SimpleNamespace(provenance={})) for problem in problems]  # type: ignore[arg-type]
    for sample, rows in ((5, [1, 2, 4, 6, 8]), (3, [1, 4, 7]), (9, [*range(1, 10)])):
        assert [one.problem.M for one in choose(stored, None, sample)] == rows
