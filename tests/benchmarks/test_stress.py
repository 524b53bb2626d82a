"""benchmarks.stress: the kernels it takes, where it delays them, what it makes of a tool."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import stress
from benchmarks.stress import SANITIZED_ROWS, sanitize
from benchmarks.stress_kernels import CONTROLS, DELAY, PROBLEMS, build, variants, with_delays
from generator.emulate.check import check_source
from generator.errors import NormforgeError
from generator.kernels.render import render
from generator.kernels.strategies import STRATEGIES, strategy_of
from generator.kernels.variant import Variant
from generator.paths import template_named
from normforge.spec import plan_launch
from tests.support.fake_clock import FakeClock
from tests.support.packages import H200

ORDERS = re.compile(
    r"asm volatile\(\"(?:st|ld)\.(?:relaxed|acquire|release)|\"(?:atom|red)\.|\"fence\.|\"cp\.async"
    r"|\"mbarrier\.|\"barrier\.|\"bar\.|\"griddepcontrol\.|__syncthreads|__syncwarp"
)


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Variant, str]]:
    return list(variants(H200, seed=0))


def test_every_deterministic_strategy_of_every_operation_takes_part(
    drawn: list[tuple[Variant, str]],
) -> None:
    found = {(v.operation, str(strategy_of(v.config))) for v, _ in drawn}
    for strategy in STRATEGIES:
        for operation in ("rmsnorm_backward", "layernorm_backward"):
            assert ((operation, str(strategy)) in found) == (strategy.determinism != "none")
    assert ("rmsnorm_invariant_backward", "separate") in found
    assert {int(v["cluster"]) for v, _ in drawn} == {1, 2, 8}
    assert {bug for _, bug in drawn} == {"", *CONTROLS}


def test_every_primitive_that_orders_something_is_delayed() -> None:
    text = template_named("primitives.cuh").read_text()
    delayed = with_delays(text)
    assert delayed.count(DELAY) == 1
    body = delayed.replace(DELAY, "")
    functions = re.split(r"\n(?=DEVICE |template )", body)
    ordering = [f for f in functions if f.startswith(("DEVICE", "template")) and ORDERS.search(f)]
    assert len(ordering) > 25
    missed = [f.split("(")[0] for f in ordering if " delay();" not in f]
    assert missed == []


def test_a_source_without_primitives_is_refused() -> None:
    with pytest.raises(NormforgeError, match="no primitives to delay"):
        with_delays("int main() {}")


def test_every_control_changes_the_text_of_the_kernels_it_names(
    drawn: list[tuple[Variant, str]],
) -> None:
    for variant, bug in drawn:
        if bug:
            assert CONTROLS[bug][1] in render(variant)


def test_a_kernel_compiles_with_delays_and_is_another_one(drawn: list[tuple[Variant, str]]) -> None:
    kernel = next(found for job in drawn if (found := build(job, H200)))
    assert kernel.plain.spec == kernel.delayed.spec
    assert kernel.plain.cubin != kernel.delayed.cubin


@pytest.mark.parametrize(
    ("prints", "says"),
    [
        ("========= ERROR SUMMARY: 0 errors", "ERROR SUMMARY: 0 errors"),
        ("========= Invalid read\n========= ERROR SUMMARY: 1 error", "ERROR SUMMARY: 1 error"),
    ],
)
def test_last_line_of_a_tool_is_kept_and_the_report_of_one_that_found_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, says: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\necho "{prints}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said, reports = sanitize([], 20.0)
    assert said == dict.fromkeys(stress.TOOLS, says)
    kept = dict.fromkeys(stress.TOOLS, prints.splitlines()) if "Invalid" in prints else {}
    assert reports == kept


def test_a_tool_that_is_not_installed_or_does_not_end_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress.shutil, "which", lambda name: None)
    assert set(sanitize([], 1.0)[0].values()) == {"compute-sanitizer is not installed"}
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setattr(stress.shutil, "which", lambda name: str(program))
    assert set(sanitize([], 0.2)[0].values()) == {"stopped after 0 s"}


CLEAN = "ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("differing", "faults", "said", "code"),
    [
        ((0, 5), ("", ""), CLEAN, 0),
        ((1, 5), ("", ""), CLEAN, 1),
        ((0, 0), ("", ""), CLEAN, 1),  # the planted bug does not show
        ((0, 5), ("wrote outside", ""), CLEAN, 1),
        ((0, 5), ("", ""), "ERROR SUMMARY: 10 errors", 1),
        ((0, 5), ("", ""), "compute-sanitizer is not installed", 1),
    ],
)
def test_only_quiet_kernels_and_seen_bugs_end_well(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    differing: tuple[int, int],
    faults: tuple[str, str],
    said: str,
    code: int,
) -> None:
    found = [SimpleNamespace(planted=planted, label="") for planted in ("", "", "no fence")]
    launches, sanitized = [], []

    def disturb(session: Any, kernel: Any, count: int) -> dict[str, Any]:
        place = bool(kernel.planted)
        launches.append(count)
        of = {"differing": differing[place], "fault": faults[place]}
        return {"planted": kernel.planted, "launches": count, **of}

    def sanitizer(kernels: Any, seconds: float) -> Any:
        sanitized.extend(kernels)
        return {**dict.fromkeys(stress.TOOLS, CLEAN), "racecheck": said}, {}

    monkeypatch.setattr(stress, "open_gpu", lambda: (SimpleNamespace(facts={}), H200))
    monkeypatch.setattr(stress, "machine", lambda facts: {})
    monkeypatch.setattr(stress, "kernels", lambda target, seed: found)
    monkeypatch.setattr(stress, "disturb", disturb)
    monkeypatch.setattr(stress, "sanitize", sanitizer)
    out = tmp_path / "out.json"
    assert stress.main(["--out", str(out), "--launches", "7"]) == code
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert launches == [4, 4, 4], "so many in all of the real kernels, here two"
    assert sanitized == found[:2]


class FakeBench:
    """Two outputs, which the runner writes. poisoned: they hold nothing of the last launch."""

    def __init__(self, runner: Any, outputs: Any, device: Any) -> None:
        self.runner, self.outputs = runner, outputs

    def arm(self) -> None: ...

    def poison(self) -> None:
        for out in self.outputs.values():
            out.inside.fill_(0xFF)

    def run(self, inputs: str) -> None:
        assert inputs == "cancelling"
        self.runner(self.outputs)

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: out.inside.clone() for name, out in self.outputs.items()}

    def fault(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("wrong", "differing"),
    [
        (lambda launch, name: [1, 1], 0),
        (lambda launch, name: [1, 2] if launch in (2, 5) and name == "dw" else [1, 1], 2),
        (lambda launch, name: [2, 2] if launch == 3 else [1, 1], 1),
        (lambda launch, name: [] if launch == 7 else [1, 1], 1),
        (lambda launch, name: [1] if name == "dx" else [1, 1], 8),
    ],
    ids=["none", "one output", "both outputs", "nothing written", "one element never written"],
)
def test_a_launch_with_other_bits_counts_once(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, differing: int
) -> None:
    FakeClock(monkeypatch)
    monkeypatch.setattr(stress, "Bench", FakeBench)
    launches = count()

    def plain(outputs: Any) -> None:
        for out in outputs.values():
            out.inside.fill_(1)

    def delayed(outputs: Any) -> None:
        launch = next(launches)
        for name, out in outputs.items():
            written = wrong(launch, name)
            out.inside[: len(written)] = torch.tensor(written, dtype=torch.uint8)

    def outputs() -> Any:
        names = ("dx", "dw")
        return {n: SimpleNamespace(inside=torch.ones(2, dtype=torch.uint8)) for n in names}

    workload = SimpleNamespace(
        cancelling="cancelling",
        device=torch.device("cpu"),
        bench=lambda candidate: FakeBench(candidate, outputs(), None),
        new_outputs=outputs,
    )
    session: Any = SimpleNamespace(workload=lambda problem: workload)
    said = dict.fromkeys(("strategy", "pipeline", "cluster", "planted"), "")
    problem = next(iter(PROBLEMS))
    kernel: Any = SimpleNamespace(plain=plain, delayed=delayed, problem=problem, **said)
    row = stress.disturb(session, kernel, 9)
    assert (row["launches"], row["differing"], next(launches)) == (8, differing, 8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [str(s) for s in STRATEGIES if s.determinism != "none"])
def test_kernels_under_the_sanitizer_pass_in_the_emulator(
    drawn: list[tuple[Variant, str]], strategy: str
) -> None:
    """They have the rows and the grid that compute-sanitizer gets. The emulator checks every
    access. Of kernels that were drawn for the same, which take seconds each, it gets the first."""
    first: dict[tuple[str, int], Variant] = {}
    for variant, bug in drawn:
        if not bug and str(strategy_of(variant.config)) == strategy:
            first.setdefault((variant.operation, variant.N), variant)
    assert len(first) >= 4
    for variant in first.values():
        problem = next(p for p in PROBLEMS if (p.operation, p.N) == (variant.operation, variant.N))
        problem = replace(problem, M=SANITIZED_ROWS)
        spec = variant.spec(H200.sms)
        launch = plan_launch(spec, problem.M)
        checked = check_source(render(variant), spec, launch, problem, schedules=1)
        assert checked.passed, (variant.id, checked.problems)
