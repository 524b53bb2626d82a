"""The kernels that a package needs whatever its search finds: fallback kernels and forwards."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from generator.errors import NormforgeError
from generator.kernels import cubin_cache
from generator.kernels.cubin_cache import compile_variant, entry_path, find_cached
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.render import render_forward
from generator.package.fallback_kernels import DTYPES, fallback_variants
from generator.problem import Problem
from generator.space.forward_space import fallback_forwards, tile_forwards
from generator.space.load import space_file
from generator.target import find_target
from generator.tuner import emission
from generator.tuner.emission import fallback_forwards_of, usable_forwards
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.run import tune
from normforge.spec import FORWARD_KERNELS
from tests.support.fake_devices import Quiet, make_plan

H200 = find_target("h200")
BACKWARD = fallback_variants(H200)[0]
FORWARDS = fallback_forwards(DTYPES)


def refuse(*arguments: object, **named: object) -> Any:
    raise AssertionError("compiled again")


# ---- The cache -----------------------------------------------------------------------------------


def test_what_the_cache_has_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cached(BACKWARD, H200.arch, tmp_path) is None
    made = compile_variant(BACKWARD, H200.arch, tmp_path)
    monkeypatch.setattr(cubin_cache, "compile_source", refuse)
    assert compile_variant(BACKWARD, H200.arch, tmp_path) == made
    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=refuse)
    assert emission._compile([BACKWARD], pool, lambda done, count: None) == [made]


def test_what_the_cache_lacks_is_compiled_by_the_pool(tmp_path: Path) -> None:
    made = Compiled(H200.arch, "", b"cubin", {}, "", False, "")
    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=lambda v: "promise")
    pool.result = lambda variant, future: made if future == "promise" else refuse()
    assert emission._compile([BACKWARD], pool, lambda done, count: None) == [made]


def test_damaged_entry_of_the_cache_counts_as_none(tmp_path: Path) -> None:
    compile_variant(FORWARDS[0], H200.arch, tmp_path)
    assert find_cached(FORWARDS[0], H200.arch, tmp_path)
    path = entry_path(tmp_path, render_forward(FORWARDS[0]), H200.arch)
    path.write_bytes(path.read_bytes()[:-10])
    assert find_cached(FORWARDS[0], H200.arch, tmp_path) is None


# ---- In a run ------------------------------------------------------------------------------------


def test_nothing_is_written_after_ctrl_c_while_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, nothing = Stop(), Any

    def interrupted(*arguments: object) -> tuple[()]:
        stop.signal = signal.SIGINT
        return ()

    monkeypatch.setattr(emission, "usable_forwards", interrupted)
    monkeypatch.setattr(emission, "emit_package", refuse)
    plan = make_plan(tmp_path, 1, fallbacks="none")
    with pytest.raises(KeyboardInterrupt):
        emission.emit(plan, [], nothing, nothing, Quiet(), stop)


@pytest.mark.parametrize(("fallbacks", "kept"), [("all", False), ("common", True), ("none", True)])
def test_fallback_kernels_of_before_stay_unless_all_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallbacks: str, kept: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(emission, "usable_forwards", lambda *_: ())
    monkeypatch.setattr(emission, "compile_fallbacks", lambda *_: ())
    monkeypatch.setattr(emission, "emit_package", lambda *_, **options: asked.update(options))
    nothing: Any = None
    plan = make_plan(tmp_path, 1, Plan, fallbacks=fallbacks)
    emission.emit(plan, [], nothing, nothing, Quiet(), Stop())
    assert asked["keep_fallbacks"] is kept


def test_package_of_batch_invariant_kernels_has_the_forwards_of_vllms_arithmetic(
    tmp_path: Path,
) -> None:
    """Kernels for any row; tests/tuner/test_forward.py has those of its own shapes."""
    operation = "rmsnorm_invariant_backward"
    problem = Problem.parse("4096x1024:bf16", operation)
    plan = make_plan(tmp_path, 1, problems=(problem,), space_file=space_file(operation))
    assert fallback_forwards_of(plan) == tile_forwards(H200)
    assert len(tile_forwards(H200)) == 12


def test_forwards_that_do_not_compile_or_do_not_fit_are_left_out(tmp_path: Path) -> None:
    good, spilling, broken = FORWARDS[:3]

    def result(variant: ForwardVariant, future: object) -> Compiled:
        spills = 8 if variant == spilling else 0
        kernels = dict.fromkeys(FORWARD_KERNELS, Resources(32, spills, 0, 0))
        error = "error: no" if variant == broken else ""
        return Compiled(H200.arch, "", b"cubin", kernels, "", False, "", error)

    pool: Any = SimpleNamespace(arch=H200.arch, cache_folder=tmp_path, submit=lambda v: None)
    pool.result = result
    assert [v for v, _ in usable_forwards([good, spilling, broken], H200, pool)] == [good]


def test_run_whose_forward_space_fixes_nothing_for_a_width_is_refused_before_it_searches(
    tmp_path: Path,
) -> None:
    operation = "rmsnorm_invariant_backward"
    space = yaml.safe_load(space_file(operation).read_text())
    space["fixed"].append({"N": [96], "dtype": ["bf16"], "knobs": {"cluster": 1}})
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(space))
    problem = Problem.parse("4096x96:bf16", operation)
    options = {"problems": (problem,), "space_file": path, "devices": ()}
    plan = make_plan(tmp_path / "out", 1, Plan, **options)
    with pytest.raises(NormforgeError, match=r"rmsnorm_invariant_forward\.yaml fixes nothing for"):
        tune(plan, None, Quiet())
    assert not plan.out.exists()
