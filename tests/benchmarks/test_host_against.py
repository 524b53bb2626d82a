"""Host times beside another package: who is timed, and packages of older versions."""

from __future__ import annotations

import tarfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host_against
from benchmarks.host_time import entry_points
from generator.errors import NormforgeError
from generator.operations import RMSNORM_BACKWARD
from generator.package.standalone import export_standalone
from generator.paths import GENERATED
from generator.problem import Problem
from normforge.api import Package
from tests.support.entry_points import aten_on_cpu
from tests.support.packages import BEFORE


@pytest.mark.parametrize("version", ["older", "today"])
def test_every_line_of_both_packages_runs(tmp_path: Path, version: str) -> None:
    folder = tmp_path / "before_library"
    if version == "older":
        with tarfile.open(BEFORE) as archive:
            archive.extractall(tmp_path, filter="data")
    else:
        export_standalone(GENERATED / "gb200" / "rmsnorm_backward", folder)
    before = host_against.Side(host_against.load(folder))
    inputs = RMSNORM_BACKWARD.make_inputs(Problem.parse("6x16:fp32"), torch.device("cpu"))
    with aten_on_cpu():
        one: Any = entry_points(before, inputs)  # type: ignore[arg-type]
        ours = host_against.Side(Package(GENERATED / "h200" / "rmsnorm_backward", "ours"))
        two: Any = entry_points(ours, inputs)  # type: ignore[arg-type]
        assert one.keys() == two.keys()
        for name in one:
            first, second = (calls[name]() for calls in (one, two))
            for a, b in zip(first, second, strict=True):
                torch.testing.assert_close(a, b)


def test_differences_are_ours_less_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def takes(who: str, us: float) -> Any:
        def call() -> None:
            order.append(who)
            now[0] += us * 1e3

        return call

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    one, two = {"a": takes("before", 10.0)}, {"a": takes("ours", 12.5), "new": takes("ours", 1.0)}
    found = host_against.compare(one, two, lambda *_: nullcontext(), 0.01)
    assert found == {"a": {"before": 10.0, "difference": 2.5}}
    batches = order[:: host_against.BATCH][2:]
    assert batches[:4] == ["ours", "before", "before", "ours"] and len(batches) % 4 == 0


def test_what_is_no_package_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="is no package that stands alone"):
        host_against.load(tmp_path)
    (tmp_path / "__init__.py").write_text("")
    with pytest.raises(NormforgeError, match="is no package that stands alone"):
        host_against.load(tmp_path)
