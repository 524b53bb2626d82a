"""The choice of a shape's forward: measured where there is a GPU, else by the rule."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.emulate.build import HostError
from generator.errors import NormforgeError, ProblemError
from generator.kernels.compile_pool import MAX_CRASHES, CompilePool
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.package.fallback_kernels import DTYPES
from generator.problem import Problem
from generator.result import Result
from generator.space.forward_space import (
    fallback_forwards,
    forward_variants,
    forwards_with,
    tile_forwards,
)
from generator.target import Target
from generator.tuner import forward as forward_tune
from generator.tuner import forward_compiler
from generator.tuner.forward import shapes_to_choose, tune_forwards
from tests.support.fake_gpu import CrashingCompiler, Log
from tests.support.fake_run import forks
from tests.support.forward import H200, of_kind
from tests.support.patience import patience

ONE_FALLBACK = fallback_forwards(DTYPES)[:1]


@pytest.mark.slow
def test_rule_gives_every_shape_a_kernel_without_a_gpu() -> None:
    shapes = [Problem.parse("4096x1024:bf16"), Problem.parse("4096x1024:bf16+offset")]
    lines: list[str] = []
    forwards = tune_forwards(shapes, H200, say=lines.append)
    (entry,) = forwards.tuned
    assert entry.evidence == "predicted"
    assert str(entry.problem) == "4096x1024:bf16"
    assert len(lines) == 1
    assert {(v.dtype, v.weight_dtype) for v, _ in forwards.fallback} == set(DTYPES)
    table = SimpleNamespace(
        tuned=[
            SimpleNamespace(
                **{"M": 4096, "N": 1024, "dtype": "bf16", "weight_dtype": "bf16"},
                **{"evidence": "measured", "provenance": entry.provenance},
            )
        ]
    )
    known: Any = table
    assert tune_forwards(shapes, H200, known=known).tuned == ()


def own_kind(problem: Problem, target: Target) -> list[ForwardVariant]:
    """One variant to choose from."""
    return [of_kind(str(problem))]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No process starts for a GPU; which ones would have."""
    started: list[int] = []

    def open_gpu(device: int, target: Target) -> Any:
        started.append(device)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(forward_tune, "open_gpu", open_gpu)
    return started


def measured(made: list[Any]) -> list[Result]:
    return [Result("ok", 1.0, 1.0, 1.0) for _ in made]


@pytest.mark.usefixtures("gpus")
@pytest.mark.slow
def test_longest_shapes_are_measured_first_and_the_order_of_the_result_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 64, 65536, 512)]
    order: list[int] = []

    def measure(gpu: Any, problem: Problem, made: list[Any]) -> list[Result]:
        order.append(problem.M)
        return measured(made)

    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    forwards = tune_forwards(shapes, H200, (0,), fallbacks=(), choices=own_kind)
    assert order == [65536, 4096, 512, 64]
    assert [entry.problem for entry in forwards.tuned] == shapes


@pytest.mark.usefixtures("gpus")
def test_stop_leaves_the_shapes_out_that_are_not_measured_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM leaves time to write the package with what there is."""
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 64, 65536, 512)]
    order: list[int] = []

    def measure(gpu: Any, problem: Problem, made: list[Any]) -> list[Result]:
        order.append(problem.M)
        return measured(made)

    def check() -> None:
        if len(order) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    lines: list[str] = []
    forwards = tune_forwards(
        shapes, H200, (0,), fallbacks=(), say=lines.append, check=check, choices=own_kind
    )
    assert order == [65536, 4096]
    assert [entry.problem.M for entry in forwards.tuned] == [4096, 65536]
    assert lines[-1] == "forward kernels still to be chosen: 2"


def test_gpu_processes_start_before_anything_is_compiled_and_none_that_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int]
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (64, 4096)]
    before: set[tuple[int, ...]] = set()

    def compile_where(variant: ForwardVariant, arch: str, folder: Path) -> Compiled:
        until = time.monotonic() + patience(10)
        while not before and len(gpus) < 2 and time.monotonic() < until:
            time.sleep(0.01)  # they start in threads of their own
        before.add(tuple(sorted(gpus)))
        return compile_variant(variant, arch)

    monkeypatch.setattr(forward_compiler, "find_cached", compile_where)
    monkeypatch.setattr(forward_tune, "measure_forwards", lambda gpu, p, made: measured(made))
    forwards = tune_forwards(shapes, H200, (0, 2, 5), fallbacks=ONE_FALLBACK, choices=own_kind)
    assert before == {(0, 2)}

    known: Any = SimpleNamespace(
        tuned=[
            SimpleNamespace(**vars(e.problem), evidence="measured", provenance=e.provenance)
            for e in forwards.tuned
        ]
    )
    gpus.clear()
    again = tune_forwards(
        shapes, H200, (0, 2, 5), fallbacks=ONE_FALLBACK, known=known, choices=own_kind
    )
    assert again.tuned == ()
    assert gpus == []


@pytest.mark.usefixtures("gpus")
def test_kernels_of_later_shapes_are_compiled_while_the_first_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [Problem.parse(f"4096x{N}:bf16") for N in (512, 1024, 2048)]
    asked: set[int] = set()
    before: list[set[int]] = []

    def compile_where(variant: ForwardVariant, arch: str, folder: Path) -> Compiled:
        if variant.exact:
            asked.add(variant.N)
        return compile_variant(variant, arch)

    def measure(gpu: Any, problem: Problem, made: list[Any]) -> list[Result]:
        before.append(set(asked))
        return measured(made)

    monkeypatch.setattr(forward_compiler, "find_cached", compile_where)
    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    tune_forwards(shapes, H200, (0,), fallbacks=ONE_FALLBACK, choices=own_kind)
    assert before[0] == {512, 1024, 2048}


@pytest.mark.usefixtures("gpus")
def test_no_compiler_starts_for_kernels_that_the_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*arguments: object) -> None:
        raise AssertionError("compiled again")

    variants = [of_kind("4096x1024:bf16")]
    for variant in [*variants, *ONE_FALLBACK]:
        compile_variant(variant, H200.arch)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    monkeypatch.setattr(forward_tune, "measure_forwards", lambda gpu, p, made: measured(made))
    shapes = [Problem.parse("4096x1024:bf16")]
    (entry,) = tune_forwards(
        shapes, H200, (0,), fallbacks=ONE_FALLBACK, choices=lambda p, t: variants
    ).tuned
    assert entry.variant == variants[0]


@pytest.fixture
def crashing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CrashingCompiler:
    """The compiler of a run whose cache is empty; the parameter is the variant that kills it."""
    forks()
    compiler = CrashingCompiler(Log(tmp_path / "log"), request.param.id)
    monkeypatch.setattr(forward_compiler, "find_cached", lambda *_: None)
    monkeypatch.setattr(
        forward_tune, "CompilePool", partial(CompilePool, method="forkserver", compile=compiler)
    )
    return compiler


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("crashing", [of_kind("4096x1024:bf16")], indirect=True)
def test_crash_of_the_compiler_costs_the_run_one_variant_and_those_that_wait_no_process(
    monkeypatch: pytest.MonkeyPatch, crashing: CrashingCompiler
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 8192)]
    candidates = {v.id for shape in shapes for v in forward_variants(shape, H200)}
    seen: list[set[str]] = []

    def measure(gpu: Any, problem: Problem, made: list[Any]) -> list[Result]:
        seen.append({variant.id for variant, _ in made})
        return measured(made)

    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    said: list[str] = []
    forwards = tune_forwards(shapes, H200, (0,), say=said.append)
    assert [entry.evidence for entry in forwards.tuned] == ["measured", "measured"]
    assert seen == [candidates - {crashing.doomed}] * 2
    assert [v for v, _ in forwards.fallback] == fallback_forwards(DTYPES)
    told = [line for line in said if "crashed" in line]
    assert told == [f"forward {crashing.doomed}: NVRTC crashed on this variant {MAX_CRASHES} times"]
    # With one compiler nothing else is under way at a crash: one process until then, the lives of
    # the variant, and one for all that waited.
    given = crashing.log.read()
    assert len({entry["pid"] for entry in given}) == 1 + MAX_CRASHES + 1
    assert Counter(entry["variant"] for entry in given) == {
        **dict.fromkeys(candidates | {v.id for v in fallback_forwards(DTYPES)}, 1),
        crashing.doomed: 1 + MAX_CRASHES,
    }


@pytest.mark.parametrize("crashing", [fallback_forwards(DTYPES)[0]], indirect=True)
def test_crash_on_a_fallback_kernel_leaves_the_others(crashing: CrashingCompiler) -> None:
    forwards = tune_forwards([], H200, processes=2)
    assert [v for v, _ in forwards.fallback] == fallback_forwards(DTYPES)[1:]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([1.30, 1.105, 1.10, 1.2], 1),  # within 1 % of the best, and earlier in the rule
        ([1.30, 1.12, 1.10, 1.2], 2),
        ([None, 1.12, 1.2, None], 1),  # None: these failed their checks
    ],
)
def test_measured_choice_is_the_rules_first_within_one_percent_of_the_best(
    monkeypatch: pytest.MonkeyPatch, times: list[float | None], chosen: int
) -> None:
    problem = Problem.parse("4096x1024:bf16")
    variants = forward_variants(problem, H200)[:4]
    answer = [
        Result("wrong", note="planted")
        if ratio is None
        else Result("ok", ratio, 1.0, ratio, extra={"condition": "rotation"})
        for ratio in times
    ]
    monkeypatch.setattr(forward_tune, "measure_forwards", lambda *_: answer)
    (entry,) = tune_forwards([problem], H200, (0,), fallbacks=(), choices=lambda *_: variants).tuned
    assert (entry.evidence, entry.variant) == ("measured", variants[chosen])
    assert entry.provenance["ratio"] == times[chosen]
    assert entry.provenance["condition"] == "rotation"
    assert entry.provenance["faults"] == times.count(None)


@pytest.mark.usefixtures("gpus")
def test_a_lost_gpu_leaves_the_choice_to_the_rule_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def measure(*_: object) -> list[Result]:
        raise NormforgeError("the lost GPU worker cannot be replaced")

    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 64)]
    for entry in tune_forwards(shapes, H200, (0,), choices=own_kind).tuned:
        assert entry.evidence == "predicted"
        assert "the lost GPU worker cannot be replaced" in entry.provenance["reason"]


@pytest.mark.usefixtures("gpus")
def test_a_shape_that_cannot_be_measured_is_left_to_the_rule_and_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(gpu: Any, problem: Problem, made: list[Any]) -> list[Result]:
        if problem.M == 4096:
            raise ProblemError("no clean numbers")
        return measured(made)

    monkeypatch.setattr(forward_tune, "measure_forwards", measure)
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 64)]
    noisy, clean = tune_forwards(shapes, H200, (0,), choices=own_kind).tuned
    assert (noisy.evidence, clean.evidence) == ("predicted", "measured")
    assert "no clean numbers" in noisy.provenance["reason"]


def test_a_kernel_that_the_emulator_refutes_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.parse("4096x1024:bf16")
    first, second = forward_variants(problem, H200)[:2]
    monkeypatch.setattr(forward_tune, "find_compiler", lambda: "c++")
    monkeypatch.setattr(
        forward_compiler, "emulate_forward", lambda v, p: "y[0, 0] is 1" if v == first else ""
    )
    (entry,) = tune_forwards([problem], H200).tuned
    assert entry.variant == second
    said: list[str] = []
    forwards = tune_forwards([problem], H200, say=said.append, choices=lambda p, t: [first])
    # The backward's winner is not lost for it: any row is served by fallback kernels.
    assert forwards.tuned == () and forwards.fallback != ()
    assert "no forward kernel for" in said[0] and "passes (y[0, 0] is 1)" in said[0]
    assert said[0].endswith("; a fallback kernel serves it")
    for fallbacks in ([], tile_forwards(H200)):
        said.clear()
        tune_forwards(
            [problem], H200, say=said.append, fallbacks=fallbacks, choices=lambda p, t: [first]
        )
        assert said[0].endswith("; the package has none for it")


@pytest.mark.parametrize("devices", [(), (0,)])
@pytest.mark.usefixtures("gpus")
def test_forward_is_one_of_the_choices_that_there_are(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...]
) -> None:
    problem = Problem.parse("4096x1024:bf16")
    fields = {"threads_per_row": 128}

    def choices(problem: Problem, target: Target) -> list[ForwardVariant]:
        return forwards_with(fields, problem, target)[:2]

    monkeypatch.setattr(forward_tune, "measure_forwards", lambda gpu, p, made: measured(made))
    (entry,) = tune_forwards([problem], H200, devices, fallbacks=[], choices=choices).tuned
    assert entry.evidence == ("measured" if devices else "predicted")
    assert entry.variant in choices(problem, H200)
    assert forward_variants(problem, H200)[0] not in choices(problem, H200)
    # The choice stays as long as it would be made among the same.
    known: Any = SimpleNamespace(
        tuned=[SimpleNamespace(**vars(problem), evidence="measured", provenance=entry.provenance)]
    )
    assert shapes_to_choose([problem], H200, devices, known, choices) == []
    assert shapes_to_choose([problem], H200, devices, known) == [problem]


def test_forward_is_executed_once_for_all_m_that_are_reduced_to_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def emulate(variant: ForwardVariant, problem: Problem) -> str:
        asked.append(problem.M)
        return ""

    monkeypatch.setattr(forward_tune, "find_compiler", lambda: "c++")
    monkeypatch.setattr(forward_compiler, "emulate_forward", emulate)
    problems = [Problem.parse(f"{M}x4096:bf16") for M in (1, 4096, 8192)]
    first = forward_variants(problems[1], H200)[0]
    tune_forwards(problems, H200, fallbacks=[], choices=lambda p, t: [first])
    assert len(asked) == 2
    assert asked[0] == 1 < asked[1] < 4096


def test_a_full_emulator_cache_ends_the_choice_of_a_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(variant: ForwardVariant, problem: Problem) -> str:
        raise HostError("no space left on device")

    monkeypatch.setattr(forward_tune, "find_compiler", lambda: "c++")
    monkeypatch.setattr(forward_compiler, "emulate_forward", full)
    monkeypatch.setattr(forward_tune, "fallback_forwards", lambda dtypes: [])
    with pytest.raises(HostError, match="no space left"):
        tune_forwards([Problem.parse("4096x1024:bf16")], H200, choices=own_kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_measuring_without_a_gpu_ends_in_the_rule_and_not_in_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (entry,) = tune_forwards([Problem.parse("4096x1024:bf16")], H200, (0,), choices=own_kind).tuned
    assert entry.evidence == "predicted"
    assert "measuring failed" in entry.provenance["reason"]
