"""The comparison of GPU and emulator, bit for bit: what is drawn, and the emulator's side of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import bit_exact
from benchmarks.bit_exact import Emulated, compare_case, emulate_case, first_difference, run_on_gpu
from benchmarks.bit_exact_cases import REDUCTIONS, Case, draw_case
from generator.emulate import Layout, find_compiler
from generator.kernels.strategies import STRATEGIES
from generator.target import Target
from normforge.launch.driver import LaunchError
from tests.support.packages import H200

LAYERNORM = "layernorm_backward"


def test_cases_go_through_all_strategies_and_the_fallback_kernels(target: Target) -> None:
    cases = [draw_case(index, 1, target) for index in range(len(REDUCTIONS))]
    kinds = [case.variant["strategy"] for case in cases if case.variant.exact]
    assert kinds == [strategy.name for strategy in STRATEGIES]
    assert not cases[-1].variant.exact


def test_layernorm_has_all_strategies_and_fallback_kernels(target: Target) -> None:
    kinds = len(STRATEGIES) + 1
    cases = [draw_case(index, 1, target, LAYERNORM) for index in range(2 * kinds)]
    assert {case.variant.operation for case in cases} == {LAYERNORM}
    for some in (cases[:kinds], cases[kinds:]):
        names = [case.variant["strategy"] for case in some[:-1]]
        assert names == [strategy.name for strategy in STRATEGIES]
        assert [case.variant.exact for case in some] == [*(True for _ in names), False]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_the_emulator_gives_both_sums_for_both_sets_of_inputs(target: Target) -> None:
    made = emulate_case(1, 1, target, LAYERNORM)
    assert made.failure == ""
    assert made.cubin
    N = made.case.problem.N
    assert [found["dw"].shape for found in made.results] == [(2 * N,)] * 2
    assert all(inputs.mean is not None for inputs in made.case.inputs())


NAN, OTHER_NAN = 0x7FC0, 0x7FC1


def bf16(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([0x3F80, NAN], [0x3F80, NAN], ""),
        ([0, 0], [0, -0x8000], "[1]: CPU 0.0, GPU -0.0; 1 differ"),
        ([NAN, 0], [OTHER_NAN, 0], "[0]: CPU nan, GPU nan; 1 differ"),
        ([0x3F80, 0x3F80], [0x3F81, 0x3F81], "[0]: CPU 1.0, GPU 1.0078125; 2 differ"),
    ],
)
def test_bits_are_compared_not_values(ours: list[int], theirs: list[int], said: str) -> None:
    assert first_difference(bf16(*ours), bf16(*theirs)) == said


@pytest.fixture
def case() -> Case:
    return draw_case(0, 1, H200)


def gpu_that(
    monkeypatch: pytest.MonkeyPatch, launches: Callable[[Any, dict[str, Any], torch.Tensor], object]
) -> None:
    """A GPU whose kernel does so with inputs, outputs and workspace."""
    monkeypatch.setattr(bit_exact, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bit_exact, "LoadedKernel", lambda cubin, spec: SimpleNamespace(spec=spec))
    monkeypatch.setattr(bit_exact, "run_rows", lambda kernel, launch, *given: launches(*given))


def emulated(case: Case) -> Emulated:
    """Outputs that are all 1 and, with the second inputs, all 2."""
    shapes = {"dx": (case.problem.M, case.problem.N), "dw": (case.problem.N,)}
    one = {name: torch.ones(shape) for name, shape in shapes.items()}
    return Emulated(case, [one, {name: 2 * out for name, out in one.items()}], b"", "")


def kernel(changed: str = "", inputs: int = 2, value: float = 7.0) -> Callable[..., None]:
    """Writes the right outputs, but for the last number of `changed` with the inputs of that
    number."""
    calls = iter((1, 2))

    def launches(given: Any, outputs: dict[str, Any], workspace: torch.Tensor) -> None:
        number = next(calls)
        for name, out in outputs.items():
            assert out.isnan().all(), "nothing of the expected outputs is there before"
            out.fill_(number)
            if (name, number) == (changed, inputs):
                out[..., -1] = value

    return launches


def test_a_right_kernel_is_equal(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    gpu_that(monkeypatch, kernel())
    assert compare_case(emulated(case))["outcome"] == "equal"


@pytest.mark.parametrize("name", ["dx", "dw"])
@pytest.mark.parametrize(("inputs", "kind"), [(1, "ordinary"), (2, "cancelling")])
def test_every_output_of_both_inputs_is_compared(
    monkeypatch: pytest.MonkeyPatch, case: Case, name: str, inputs: int, kind: str
) -> None:
    gpu_that(monkeypatch, kernel(name, inputs))
    row = compare_case(emulated(case))
    assert row["outcome"] == "different"
    assert (
        row["why"].startswith(f"{kind} {name}[") and f"CPU {float(inputs)}, GPU 7.0" in row["why"]
    )


def test_a_kernel_that_writes_nothing_is_different(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    gpu_that(monkeypatch, lambda *given: None)
    row = compare_case(emulated(case))
    assert row["outcome"] == "different" and "GPU nan" in row["why"]


def test_failures_are_not_skipped(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def refuse(*given: object) -> None:
        raise LaunchError("launching", "kernel", "CUDA_ERROR_INVALID_CLUSTER_SIZE")

    def leave(inputs: Any, outputs: Any, workspace: torch.Tensor) -> None:
        workspace[0] = 1

    gpu_that(monkeypatch, refuse)
    assert compare_case(emulated(case))["outcome"] == "skipped"
    monkeypatch.setattr(bit_exact, "small_launch", lambda *_: (case.variant.spec(132), LAUNCH))
    gpu_that(monkeypatch, leave)
    row = compare_case(emulated(case))
    assert row["outcome"] == "failed" and "left a counter" in row["why"]
    row = compare_case(Emulated(case, [], b"", "does not compile: planted"))
    assert (row["outcome"], row["why"]) == ("failed", "does not compile: planted")


LAUNCH: Any = SimpleNamespace(grid=1, workspace_bytes=8, scratch_offset=4)


def test_rows_lie_where_the_layout_says(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []

    def launches(inputs: Any, outputs: dict[str, Any], workspace: torch.Tensor) -> None:
        matrices = (inputs.x, inputs.dy, outputs["dx"])
        seen.extend((rows.stride(), rows.storage_offset() * rows.itemsize) for rows in matrices)
        assert workspace.tolist() == [0] * 4 + [0xFF] * 4

    gpu_that(monkeypatch, launches)
    one: Any = SimpleNamespace(spec=case.variant.spec(132))
    (inputs, _), (like, _) = case.inputs(), emulated(case).results
    run_on_gpu(one, LAUNCH, inputs, Layout((8, 24, 16), 16), like)
    N = case.problem.N
    assert seen == [((N + pad, 1), 16) for pad in (8, 24, 16)]


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["equal", "skipped"], 0),
        (["equal", "different"], 1),
        (["equal", "failed"], 1),
        (["skipped", "skipped"], 1),
    ],
)
def test_only_agreement_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[str], code: int
) -> None:
    def emulate(index: int, *_: object) -> Emulated:
        return Emulated(cast(Any, SimpleNamespace(index=index)), [], b"", "")

    def compare(one: Emulated) -> dict[str, str]:
        of = {"outcome": outcomes[one.case.index]}
        return {"variant": "v", "problem": "p", "why": "planted", **of}

    monkeypatch.setattr(bit_exact, "find_compiler", lambda: "c++")
    monkeypatch.setattr(bit_exact, "open_gpu", lambda: (None, H200))
    monkeypatch.setattr(bit_exact, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(bit_exact, "emulate_case", emulate)
    monkeypatch.setattr(bit_exact, "compare_case", compare)
    monkeypatch.setattr(bit_exact, "environment", lambda *_: {})
    out = tmp_path / "out.json"
    assert bit_exact.main(["--out", str(out), "--variants", str(len(outcomes))]) == code
    found = json.loads(out.read_text())
    assert [row["outcome"] for row in found["cases"]] == outcomes
    assert found["outcomes"] == {each: outcomes.count(each) for each in outcomes}
