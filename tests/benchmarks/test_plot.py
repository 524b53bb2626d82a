"""The plot of a comparison, with and without Matplotlib."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks.pages import text as page_text
from benchmarks.report import plot
from generator.problem import Problem
from tests.support.comparison import ENVIRONMENT, cell, row


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot(ENVIRONMENT, [row(Problem.parse("4096x256:bf16"))], tmp_path / "h200.svg") == ""
    assert "<svg" in (tmp_path / "h200.svg").read_text()


def test_the_plot_has_those_that_ran_at_most_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that tunes itself at few shapes would have a mean over other shapes. Means are
    geometric, fastest first; dots are the shapes in bf16, and nobody is drawn at a shape where it
    failed, or where the weight has another dtype."""
    pyplot, bars, dots = MagicMock(), MagicMock(), MagicMock()
    pyplot.subplots.return_value = MagicMock(), (bars, dots)
    monkeypatch.setattr(page_text, "pyplot", lambda: pyplot)
    shapes = ("1024x256:bf16", "2048x256:bf16", "4096x256:fp32", "4096x256:bf16:fp32")
    ours, aten = (1.0, 4.0, 2.0, 9.0), (3.0, None, 12.0, 1.0)
    some = [
        row(Problem.parse(shape), ratio, {"quack": 1.5}) | {"add_us": 10.0}
        for shape, ratio in zip(shapes, ours, strict=True)
    ]
    for each, own, other in zip(some, ours, aten, strict=True):
        each["ours_us"] = 10.0 * own
        each["peers"] = {"quack": cell(15.0), "aten": cell(other and 10.0 * other)}
    some[0]["peers"]["quack_tuned"] = cell(1.0)
    assert plot(ENVIRONMENT | {"harness": {"condition": "rotation"}}, some, Path("x.svg")) == ""
    figure = pyplot.subplots.return_value[0]
    assert figure.suptitle.call_args.args == ("RMSNorm backward on NVIDIA H200, rotation",)
    labels, means = bars.barh.call_args.args
    assert labels == ["QuACK (3)", "Normforge (3)", "ATen (2)"]
    assert means == pytest.approx([1.5, 2.0, 6.0])
    drawn = [list(zip(*call.args[:2], strict=True)) for call in dots.plot.call_args_list]
    small, large = 1024 * 256, 2048 * 256
    wanted = [[(small, 3.0)], [(small, 1.0), (large, 4.0)], [(small, 1.5), (large, 1.5)]]
    assert drawn == wanted, "the fastest one last, and so on top"
