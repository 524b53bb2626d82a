"""A package after a smaller run, or one that finds the same again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from generator.kernels.forward import CompiledForward
from generator.package.emit import emit_package
from generator.package.entries import Forwards
from generator.package.fallback_kernels import (
    fallback_variants,
    fallbacks_to_compile,
    first_choices,
)
from generator.package.known_winners import known_winners
from generator.problem import Problem
from generator.result import Result
from generator.space.forward_space import fallback_forwards, tile_forwards
from normforge.table import ForwardTable, Table
from tests.support.packages import H200, compiled, entry, put, snapshot


def test_a_run_that_makes_fewer_fallback_kernels_keeps_the_others(package: Path) -> None:
    """`--fallbacks common` and `none` on a package that has all: each in its place."""
    put(package, entry("4096x1024:bf16"))
    before, all_kernels = snapshot(package), Table.load(package).fallback
    wanted = fallbacks_to_compile("common", H200, [Problem.parse("4096x1024:bf16")])
    common = [(variant, compiled(variant)) for variant in first_choices(wanted)]
    assert 0 < len(common) < len(all_kernels)
    for made in (common, []):
        emit_package([entry("4096x1024:bf16")], made, H200, package, keep_fallbacks=True)
        assert snapshot(package) == before

    newer = [(variant, compiled(variant, "newer")) for variant, _ in common]
    emit_package([entry("4096x1024:bf16")], newer, H200, package, keep_fallbacks=True)
    after = Table.load(package).fallback
    assert [kernel.spec for kernel in after] == [kernel.spec for kernel in all_kernels]
    changed = {new.spec.name for new, old in zip(after, all_kernels, strict=True) if new != old}
    assert changed == {variant.id for variant, _ in common}
    assert all(kernel.read_cubin(package) for kernel in after)


def test_forward_fallbacks_are_kept_in_the_same_way(package: Path) -> None:
    def made(pair: tuple[str, str]) -> list[CompiledForward]:
        return [(variant, compiled(variant)) for variant in fallback_forwards((pair,))]

    both = Forwards((), (*made(("bf16", "bf16")), *made(("fp32", "fp32"))))
    emit_package([], [], H200, package, both)
    before = snapshot(package)
    for fewer in (made(("fp32", "fp32")), []):
        forwards = Forwards((), tuple(fewer))
        emit_package([], [], H200, package, forwards, keep_fallbacks=True)
        assert snapshot(package) == before
    emit_package([], [], H200, package, Forwards((), ()))
    table = ForwardTable.load(package)
    assert table is not None
    assert table.fallback == ()


def test_forwards_of_two_orders_do_not_take_each_others_place(package: Path) -> None:
    tiles = [(variant, compiled(variant)) for variant in tile_forwards(H200)]
    emit_package([], [], H200, package, Forwards((), tuple(tiles)))
    emit_package([], [], H200, package, Forwards((), tuple(tiles[:6])), keep_fallbacks=True)
    table = ForwardTable.load(package)
    assert table is not None
    assert [kernel.spec.name for kernel in table.fallback] == [v.id for v, _ in tiles]


@pytest.mark.parametrize("which", ["none", "common", "all"])
def test_what_the_sets_of_fallback_kernels_hold(which: str) -> None:
    problems = [Problem.parse("4096x1024:bf16"), Problem.parse("64x1000:fp16:fp32")]
    variants = fallbacks_to_compile(which, H200, problems)
    kinds = {(v.dtype, v.weight_dtype, v["vector_bytes"]) for v in variants}
    expected = {
        "none": set(),
        "common": {("bf16", "bf16", 16), ("fp16", "fp32", 16)},
        "all": {(v.dtype, v.weight_dtype, v["vector_bytes"]) for v in fallback_variants(H200)},
    }
    assert kinds == expected[which]
    if which == "common":  # every row of whole vectors has one
        assert {v.N for v in variants} == {
            v.N for v in fallback_variants(H200) if v["vector_bytes"] == 16
        }


def test_the_same_answer_again_changes_no_file(package: Path) -> None:
    """Another date, other trials, another machine: what is shipped is the same."""
    first = entry("4096x1024:bf16", "predicted")
    put(package, first)
    before = snapshot(package)
    later = first.provenance | {"date": "later", "trials": 24, "driver": "other", "tie": []}
    put(package, replace(first, provenance=later))
    assert snapshot(package) == before
    for change in ({"us": 12.0}, {"checks": ["another"]}):
        put(package, replace(first, provenance=later | change))
        (tuned,) = Table.load(package).tuned
        assert tuned.provenance == later | change
    put(package, replace(first, evidence="measured", provenance=later))
    (tuned,) = Table.load(package).tuned
    assert (tuned.evidence, tuned.provenance["date"]) == ("measured", "later")


def test_winners_of_a_package_are_read_back(package: Path, tmp_path: Path) -> None:
    first = entry("4096x1024:bf16+residual")
    facts = {
        **first.provenance,
        **{"us": 2.0, "floor_us": 1.0, "ratio": 2.0, "verified": "verified"},
        **{"trials": 9, "outcomes": {"ok": 9}, "study": "a study", "space": "a space"},
    }
    put(package, replace(first, provenance=facts))
    (winner,) = known_winners(package)
    assert (winner.problem, winner.target, winner.evidence) == (first.problem, "h200", "measured")
    assert winner.config == dict(first.variant.config)
    assert winner.result == Result("ok", 2.0, 1.0, 2.0, "verified")
    assert (winner.trials, winner.reason, winner.date) == (9, facts["reason"], facts["date"])
    assert (winner.counts, winner.study, winner.space_hash) == ({"ok": 9}, "a study", "a space")
    first_line, _, *others = (package / "table.json").read_text().splitlines()
    foreign = "\n".join([first_line, *others]).replace("rmsnorm_backward", "softmax_backward")
    for damaged in (foreign, "{"):
        (package / "table.json").write_text(damaged)
        assert known_winners(package) == []
    assert known_winners(tmp_path / "nothing") == []
