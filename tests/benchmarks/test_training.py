"""benchmarks/training: every way to compute the norms gives the same step, and cases are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.pages import text as page_text
from benchmarks.training import __main__ as command
from benchmarks.training import model, ways
from benchmarks.training.ranges import RANGE, in_ranges
from benchmarks.training.steps import Case, Steps
from benchmarks.training.summary import Gain, cases, plot
from benchmarks.training.ways import BASELINE, Named, Way
from tests.support.fake_clock import FakeClock

CPU = torch.device("cpu")
SMALL = model.Widths("small", 128, 4, 2, 256, head_norm=True, head=32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(model.MODELS, "small", SMALL)
    monkeypatch.setenv("NORMFORGE_GPU", "h200")
    yield


def steps(case: str) -> Steps:
    return Steps(Case.parse(case), CPU, tokens=64)


@pytest.mark.parametrize("case", ["small,32,eager", "small,32,eager,checkpoint"])
def test_gradients_of_all_ways_agree(case: str) -> None:
    found = steps(case)
    assert {BASELINE, "rms_norm", "install", "batch_invariant"} <= found.calls.keys()
    assert found.calls.keys().isdisjoint(found.reasons)
    found.calls[BASELINE]()
    expected = [gradient.clone() for gradient in found.gradients()]
    assert len(expected) == 1 + 2 * len(found.weights[0])
    for call in found.calls.values():
        call()
        for gradient, reference in zip(found.gradients(), expected, strict=True):
            distance = (gradient.float() - reference.float()).norm()
            assert distance < 0.02 * reference.float().norm()


@pytest.mark.parametrize("mode", ways.MODES)
def test_what_is_timed_as_compiled_is_one_graph(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Otherwise what cannot be compiled would be timed as if it were."""
    seen: list[tuple[object, bool]] = []

    def compiled(function: Any, *, backend: object, fullgraph: bool = False) -> Any:
        seen.append((backend, fullgraph))
        return function

    some = {BASELINE: Named("", Way), "own": Named("", lambda: Way(backend=compiled))}
    monkeypatch.setattr("benchmarks.training.steps.WAYS", some)
    monkeypatch.setattr(torch, "compile", compiled)
    assert steps(f"small,32,{mode}").calls.keys() == some.keys()
    assert seen == ([("inductor", True), (compiled, True)] if mode != "eager" else [])


def test_a_block_normalises_queries_and_keys_only_where_the_model_does() -> None:
    asked: list[int] = []

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(weight.shape[0])
        return ways.pytorch_norm(x, weight)

    plain = model.Widths("plain", 128, 4, 2, 256, head=32)
    for widths, expected in ((SMALL, [128, 32, 32, 128]), (plain, [128, 128])):
        weights = model.make_weights(widths, CPU)
        x = torch.randn(2, 16, 128, dtype=torch.bfloat16)
        y = model.block(x, weights, *model.rotation(16, 32, CPU), widths=widths, norm=norm)
        assert y.shape == x.shape and y.isfinite().all()
        assert asked == expected
        asked.clear()


def test_bits_that_change_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ways.pytorch_norm(x, weight) * (1 + 0.1 * torch.rand(()))

    monkeypatch.setitem(ways.WAYS, "noisy", Named("noisy", lambda: Way(noisy)))
    found = steps("small,32,eager")
    assert found.repeats_bits(BASELINE)
    assert not found.repeats_bits("noisy")


def test_a_way_that_fails_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Way:
        raise ImportError("planted")

    monkeypatch.setitem(ways.WAYS, "absent", Named("absent", refuse))
    found = steps("small,32,eager")
    assert "absent" not in found.calls
    assert "planted" in found.reasons["absent"]


def test_cases_are_read_and_written_alike() -> None:
    for text in command.CASES:
        assert str(Case.parse(text)) == text


@pytest.mark.parametrize("text", ["llama", "small,32", "small,x,eager", "small,32,fast", "a,b,c,d"])
def test_other_cases_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--cases", text, "--out", "unused.json"])
    assert ended.value.code == 2
    assert "MODEL,LENGTH,MODE" in capsys.readouterr().err


@pytest.mark.parametrize("count", [3, 7])
def test_ways_take_turns_in_balanced_order(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    clock, found = FakeClock(monkeypatch), object.__new__(Steps)
    names = [f"way {number}" for number in range(count)]
    found.calls = {name: clock.operation(name, 1e3 + us) for us, name in enumerate(names)}
    assert found.time(20, 4, 0) == {
        name: [pytest.approx(1 + us / 1e3)] * 20 for us, name in enumerate(names)
    }
    rounds = [clock.log[first : first + count + 1] for first in range(0, len(clock.log), count + 1)]
    assert len(rounds) == 24 and all({*row[1:]} == {*names} for row in rounds)
    before = Counter(pair for row in rounds[4:] for pair in pairwise(row[1:]))
    often = [before[pair] for pair in permutations(names, 2)]
    assert max(often) - min(often) <= 2 and min(often) > 0
    seeds = []
    for process in (0, 0, 1):
        clock.log.clear()
        found.time(20, 4, process)
        seeds.append(clock.log[4 * (count + 1) :])
    assert seeds[0] == seeds[1] != seeds[2], "processes have orders of their own"


class _Marked(torch.autograd.Function):
    """The identity, as a norm that calls operators of its own: one forward, one backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(weight)
        return x + 0 * torch.cumsum(x, dim=-1)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dy + 0 * torch.cumprod(dy, dim=-1), torch.zeros_like(context.saved_tensors[0])


def _operators_in_ranges(norm: model.Norm) -> tuple[set[str], set[str]]:
    """The operators of a norm between two matrix products: in ranges, and elsewhere."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    matrix = torch.randn(8, 8)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        (in_ranges(norm)(x.sin() @ matrix, weight) @ matrix).sum().backward()
    names: tuple[set[str], set[str]] = set(), set()
    for event in profiler.events():
        above = event
        while above is not None and above.name != RANGE:
            above = above.cpu_parent
        names[above is None].add(event.name)
    return names


def test_ranges_hold_what_norms_call_and_nothing_else() -> None:
    ours, others = _operators_in_ranges(_Marked.apply)
    assert {"aten::cumsum", "aten::cumprod"} <= ours - others
    assert {"aten::mm", "aten::sin", "aten::cos", "aten::sum"} <= others - ours


def test_ranges_hold_every_node_of_a_norm_of_many_operators() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    ours, others = _operators_in_ranges(norm)
    assert {"aten::rsqrt", "aten::mean", "PowBackward0", "RsqrtBackward0", "MeanBackward1"} <= ours
    assert not {"PowBackward0", "RsqrtBackward0", "MeanBackward1", "MulBackward0"} & others
    assert {"MmBackward0", "SinBackward0"} <= others - ours


@pytest.mark.parametrize(("n", "low", "high"), [(5, 1, 5), (10, 2, 9), (20, 6, 15), (60, 22, 39)])
def test_intervals_of_a_median_are_those_of_the_textbooks(n: int, low: int, high: int) -> None:
    values = [float(rank) for rank in range(1, n + 1)]
    Random(0).shuffle(values)
    assert Gain.of(values) == Gain((n + 1) / 2, float(low), float(high))


def test_gains_are_of_pairs_of_one_round_and_each_process_counts_once() -> None:
    runs = [
        {
            "ms": {BASELINE: [10.0, 20.0, 25.0], "rms_norm": [5.0, 9.0, 12.5]},
            "norm_ms": {BASELINE: 3.0},
        },
        {
            "ms": {BASELINE: [30.0], "rms_norm": [15.0], "quack": [10.0]},
            "norm_ms": {BASELINE: 5.0},
        },
    ]
    document = {"cases": {"llama3_8b,4096,eager": runs, "qwen3_2b,4096,eager": []}}
    (found,) = cases(document)
    assert found.title == "Llama 3 8B, sequences of 4096, eager"
    assert found.gains == {"quack": Gain(3.0, 3.0, 3.0), "rms_norm": Gain(2.0, 2.0, 2.0)}
    assert (found.baseline_ms, found.norm_ms(BASELINE), found.norm_ms("quack")) == (22.5, 4.0, None)


def test_the_plot_has_gains_with_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of six processes goes from the least to the most."""
    pyplot, axes = MagicMock(), MagicMock()
    pyplot.subplots.return_value = MagicMock(), axes
    monkeypatch.setattr(page_text, "pyplot", lambda: pyplot)
    base = [100.0, 101.0, 102.0, 104.0, 105.0, 110.0]
    ours = [{"ms": {BASELINE: [ms], "rms_norm": [100.0]}} for ms in base]
    both = [{"ms": {**each["ms"], "quack": [50.0]}} for each in ours]
    found = {"llama3_8b,4096,eager": ours, "qwen3_2b,4096,eager": both}
    assert plot({"cases": found, "environment": {"gpu": "GPU"}}, Path("x.svg")) == ""
    titles = [case.title for case in cases({"cases": found})]
    assert axes.set_yticks.call_args.args == (range(2), titles)
    drawn = {call.kwargs["label"]: call for call in axes.errorbar.call_args_list}
    own, quack = drawn[ways.WAYS["rms_norm"].title.replace("`", "")], drawn["QuACK"]
    assert own.args[0] == pytest.approx([1.03, 1.03])
    assert [pytest.approx([0.03] * 2), pytest.approx([0.07] * 2)] == own.kwargs["xerr"]
    # 100 to 110 of 50, at the row of its case alone.
    assert quack.args[0] == pytest.approx([2.06])
    assert [pytest.approx([0.06]), pytest.approx([0.14])] == quack.kwargs["xerr"]
    assert [round(row) for row in quack.args[1]] == [
        place for place, title in enumerate(titles) if "Qwen" in title
    ]


def test_resume_refuses_a_file_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "tokens": 3, "blocks": 4}
    monkeypatch.setattr(command, "environment", lambda *counts: here)
    out = tmp_path / "out.json"
    text = json.dumps({"environment": here | {"gpu": "NVIDIA L40S"}, "cases": {}})
    out.write_text(text)
    asked = ["--out", str(out), "--resume", "--seconds", "-1", "--cases", "llama3_8b,4096,eager"]
    assert command.main(asked) == 2
    said = capsys.readouterr().err
    assert "was measured with another gpu (NVIDIA L40S," in said and "leave out --resume" in said
    assert out.read_text() == text
    out.write_text(json.dumps({"environment": here, "cases": {}}))
    assert command.main(asked) == 1


ONE = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
for name in ("one", "rounds", "warmups", "process"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
if (args.one, args.process) == ("qwen3_2b,4096,eager", "1"):
    sys.exit("planted")
print(json.dumps(vars(args) | {"gpu": os.environ["CUDA_VISIBLE_DEVICES"]}))
"""


def test_processes_run_on_all_gpus_and_their_numbers_have_no_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "training.py").write_text(ONE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(command.ENVIRONMENT, "PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(command, "environment", lambda *counts: {"gpu": "GPU"})
    monkeypatch.setattr(command, "plot", lambda *_: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = ["--out", "out.json", "--devices", "3,5", "--processes", "4"]
    models = ["llama3_8b,4096,eager", "qwen3_2b,4096,eager"]
    assert command.main([*asked, "--cases", ";".join(models)]) == 1
    found = json.loads(Path("out.json").read_text())["cases"]
    assert [each["process"] for each in found[models[0]]] == ["0", "1", "2", "3"]
    assert {each["gpu"] for each in found[models[0]]} == {"3", "5"}
    assert [each["process"] for each in found[models[1]]] == ["0"]
    assert "planted" in capsys.readouterr().err
    more = [*asked, "--cases", models[0], "--resume", "--processes", "6"]
    assert command.main(more) == 0
    found = json.loads(Path("out.json").read_text())["cases"]
    assert [each["process"] for each in found[models[0]]] == [str(number) for number in range(6)]
