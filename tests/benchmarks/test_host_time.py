"""benchmarks.host_time: what is compared takes turns, and ratios are those of one pass."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import host_against, host_time
from generator.operations import LAYERNORM_BACKWARD, RMSNORM_BACKWARD
from generator.problem import Problem
from tests.support.entry_points import aten_on_cpu, write_layer_norm_package, write_package
from tests.support.fake_clock import FakeClock


class FakePackage:
    def __init__(self) -> None:
        self.open = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        self.open = True
        yield
        self.open = False


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of few calls, without a GPU and without what the times of many are cleaned by."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, few in (("PASSES", 3), ("BATCHES", 2), ("BATCH", 2)):
        monkeypatch.setattr(host_time, name, few)


@pytest.mark.usefixtures("quick")
def test_lines_take_turns_and_the_package_is_installed_for_its_own_only() -> None:
    package: Any = FakePackage()
    seen: list[tuple[str, bool]] = []

    def line(name: str) -> Any:
        def call() -> None:
            seen.append((name, package.open))

        return call

    calls = {name: line(name) for name in ("rmsnorm_backward", "install() op", "aten op")}
    times = host_time.host_us(calls, package)
    assert set(seen) == {
        ("rmsnorm_backward", False),
        ("install() op", True),
        ("aten op", False),
    }
    turns = [name for name, before in zip(seen, [None, *seen], strict=False) if name != before]
    ran = [name for name, _ in turns]
    assert len(ran) == 9 and all({*ran[first : first + 3]} == {*calls} for first in (0, 3, 6))
    assert all({*ran[place::3]} == {*calls} for place in range(3)), "each takes each place"
    assert len({*pairwise(ran)}) >= 5, "each follows each other one"
    assert {len(each) for each in times.values()} == {3}


@pytest.mark.usefixtures("quick")
def test_native_lines_of_install_are_those_of_the_native_package() -> None:
    package: Any = FakePackage()
    native: Any = FakePackage()
    seen: set[tuple[str, bool, bool]] = set()
    names = ("install() op", "install() op, native", "rms_norm forward, native")
    calls: Any = {
        name: lambda name=name: seen.add((name, package.open, native.open)) for name in names
    }
    host_time.host_us(calls, package, native)
    assert seen == {(names[0], True, False), (names[1], False, True), (names[2], False, False)}


def test_a_time_is_that_of_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty call's time is taken off, of PyTorch's calls as well; batches begin with an idle GPU
    and without the first calls, which take longer."""
    clock = FakeClock(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.operation("wait", 500.0))
    monkeypatch.setattr(host_time.time, "perf_counter_ns", lambda: 1e3 * clock.now)
    monkeypatch.setattr(host_time, "_nothing", clock.operation("nothing", 2.0))
    for name in ("PASSES", "BATCHES"):
        monkeypatch.setattr(host_time, name, 1)

    def call(name: str, us: float) -> Any:
        return lambda: clock.run(name, us if clock.log.count(name) >= 20 else 1e6)

    lines = {"rmsnorm_backward": 9.0, "aten op": 12.0}
    package: Any = FakePackage()
    found = host_time.host_us({name: call(name, us) for name, us in lines.items()}, package)
    assert found == {"rmsnorm_backward": [pytest.approx(7.0)], "aten op": [pytest.approx(10.0)]}


def test_ratios_are_of_one_pass() -> None:
    times = {"rmsnorm_backward": [1.0, 4.0], "aten op": [2.0, 16.0], "other": [0.0, 0.0]}
    assert host_time.ratios(times) == {"rmsnorm_backward / aten op": [0.5, 0.25]}


@pytest.mark.parametrize("refused", ["", "no compiler"])
def test_a_document_has_the_middle_of_the_passes(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A ratio is the middle of those of the passes: 0.5, 0.9 and 0.25; natively 0.25, 0.2, 0.4."""
    times = {
        "rmsnorm_backward": [4.0, 9.0, 5.0],
        "rmsnorm_backward, native": [2.0, 2.0, 8.0],
        "aten op": [8.0, 10.0, 20.0],
    }
    made: list[Any] = []

    class Package:
        def __init__(self, of: Path, name: str) -> None:
            self.name = name
            made.append(self)

        def use_native(self) -> None:
            assert self.name == "native"
            if refused:
                raise RuntimeError(refused)

        def explain(self, *shape: object) -> dict[str, str]:
            return {"kernel": "k"}

    def timed(calls: Any, package: Package, native: Package | None) -> dict[str, list[float]]:
        assert [package, native] == made
        return {name: times[name] for name in calls}

    one: Any = SimpleNamespace(make_inputs=lambda *_: None)
    monkeypatch.setattr(host_time, "operation_of", lambda problem: one)
    monkeypatch.setattr(host_time, "this_machine", dict)
    monkeypatch.setattr(host_time, "Package", Package)
    lines = {"rmsnorm_backward": print, "aten op": print}
    monkeypatch.setattr(host_time, "whole_calls", lambda *_: dict(lines))
    monkeypatch.setattr(host_time, "entry_points", lambda *_: {"rmsnorm_backward": print})
    monkeypatch.setattr(host_time, "host_us", timed)
    found = host_time.run(Path(), Problem.parse("4096x256:bf16"))
    native = {} if refused else {"rmsnorm_backward, native": 2.0}
    assert found["whole calls"] == {"rmsnorm_backward": 5.0, "aten op": 10.0, **native}
    ratios = {"rmsnorm_backward / aten op": 0.5, "rmsnorm_backward, native / aten op": 0.25}
    assert found["ratios"] == dict([*ratios.items()][: 1 + bool(native)])
    assert found.get("native refused", "") == refused


def test_lines_of_rms_norm_run(tmp_path: Path) -> None:
    """They run on the CPU, where the formula serves them, PyTorch's operators too."""
    problem = Problem.parse("6x16:fp32")
    inputs = RMSNORM_BACKWARD.make_inputs(problem, torch.device("cpu"))
    with aten_on_cpu():
        calls = host_time.whole_calls(write_package(tmp_path), inputs)
        results = {name: call() for name, call in calls.items()}
        points = host_time.entry_points(write_package(tmp_path / "another"), inputs)
    pairs = [pair for pair in host_time.COMPARED if pair[0] in calls]
    assert {one for one, _ in pairs} == points.keys(), "every entry point has a ratio"
    for one, other in pairs:
        found = [
            [value] if torch.is_tensor(value) else value for value in map(results.get, (one, other))
        ]
        for mine, theirs in zip(*found, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    natively = {one for one, _ in host_time.COMPARED if one.endswith("native")}
    assert natively.issuperset(f"{name}, native" for name in points)


def test_lines_of_layer_norm_run(tmp_path: Path) -> None:
    """They run on the CPU, where the formula serves them."""
    problem = Problem.parse("6x16:fp32", LAYERNORM_BACKWARD.name)
    inputs = LAYERNORM_BACKWARD.make_inputs(problem, torch.device("cpu"))
    calls = host_time.layer_norm_calls(write_layer_norm_package(tmp_path), inputs)
    results = {name: call() for name, call in calls.items()}
    dx, dw, db = results["aten op"]
    for one, other in zip((dx, dw, db), results["layer_norm_backward"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    operator_dx, sums, _ = results["layer_norm_backward, operator"]
    torch.testing.assert_close((operator_dx, *sums), (dx, dw, db), rtol=1e-4, atol=1e-4)
    compared = {one for one, other in host_time.COMPARED if {one, other} <= {*calls}}
    lines = {name for name in calls if not name.startswith("aten ")}
    assert lines - compared == {"layer_norm_backward, dw only"}
    assert [name for name in calls if name.startswith("install()")] == [
        "install() op",
        "install() autograd backward",
    ]


@pytest.mark.parametrize("line", [host_time.main, lambda out: host_against.main(["folder", *out])])
def test_a_document_is_printed_and_kept(
    line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    for module in (host_time, host_against):
        monkeypatch.setattr(module, "check_cuda", lambda: None)
        monkeypatch.setattr(module, "run", lambda *_: {"us": 1.5})
    monkeypatch.setattr(host_time, "Chosen", lambda operation: operation)
    assert line([]) == 0
    assert not out.exists()
    assert line(["--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"us": 1.5}
    assert capsys.readouterr().out.count('{"us": 1.5}') == 2
