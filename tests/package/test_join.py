"""Packages of one operation that were tuned apart, joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.kernels.nvrtc import Compiled
from generator.package import join
from generator.package.emit import emit_package
from generator.package.entries import Entry, Forwards
from generator.package.join import join_package
from generator.package.sources import source_of
from generator.problem import Problem
from normforge.cubins import CUBINS
from normforge.table import TABLE, ForwardTable, Table
from tests.support.forward import of_kind
from tests.support.packages import H200, compiled, entry, put, snapshot

A, B, C = (f"{rows}x1024:bf16" for rows in (4096, 8192, 16384))
EARLY, LATE = "2026-11-01T00:00:00+00:00", "2026-11-02T00:00:00+00:00"


def dated(shape: str, date: str, **knobs: Any) -> Entry:
    made = entry(shape, **knobs)
    return replace(made, provenance={**made.provenance, "date": date})


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Compiles to what a test's entries have. Returns what else cubins begin with, by source."""
    other: dict[str, str] = {}

    def compile_source(source: str, arch: str, register_cap: int) -> Compiled:
        name = source.partition("\n")[0].removeprefix("// ")
        return replace(made[name], cubin=other.get(name, "").encode() + made[name].cubin)

    made: dict[str, Compiled] = {}

    def compiler_input(variant: Any, **_: Any) -> tuple[str, int]:
        made[variant.id] = compiled(variant)
        return f"// {variant.id}\n", 0

    monkeypatch.setattr(join, "compile_source", compile_source)
    monkeypatch.setattr(join, "compiler_input", compiler_input)
    return other


def winners(package: Path) -> dict[str, tuple[str, str]]:
    """The file and the date of each shape's kernel."""
    found = Table.load(package).tuned
    return {tuned.shape: (tuned.kernel.file, tuned.provenance["date"]) for tuned in found}


def test_what_is_missing_and_what_was_chosen_later_comes(package: Path, tmp_path: Path) -> None:
    """The source has a later kernel of A and an earlier one of C, and it alone has B."""
    source = tmp_path / "other" / package.name
    later = dated(A, LATE, store_hint="streaming")
    put(package, dated(A, EARLY), dated(C, LATE))
    put(source, later, dated(B, EARLY), dated(C, EARLY, store_hint="streaming"), fallback=[])
    fallbacks = Table.load(package).fallback
    assert join_package(source, package) == (2, (A,))
    found = winners(package)
    assert found[A] == (later.variant.id, LATE)
    assert found[B][1] == EARLY and found[C] == (dated(C, LATE).variant.id, LATE)
    assert Table.load(package).fallback == fallbacks
    stored = (package / "kernels" / f"{later.variant}.cu").read_text(encoding="utf-8")
    assert stored == source_of(later.variant)
    before = snapshot(package)
    assert join_package(source, package) == (0, ()) and snapshot(package) == before


def test_a_prediction_does_not_come_where_there_is_a_measurement(
    package: Path, tmp_path: Path
) -> None:
    source = tmp_path / "other" / package.name
    put(package, dated(A, EARLY))
    put(source, replace(dated(A, LATE, store_hint="streaming"), evidence="predicted"))
    before = winners(package)
    assert join_package(source, package) == (0, ())
    assert winners(package) == before


def test_where_there_is_no_package_it_becomes_a_copy(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "other" / package.name
    put(source, dated(A, EARLY), dated(B, EARLY))
    assert join_package(source, package) == (2, ())
    assert snapshot(package) == snapshot(source)


def test_a_package_without_its_kernels_is_not_copied(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "other" / package.name
    put(source, dated(A, EARLY))
    (source / CUBINS).unlink()
    with pytest.raises(NormforgeError, match=f"the kernels of {source} are damaged"):
        join_package(source, package)
    assert not package.exists()


def test_forwards_come_also_where_no_backward_does(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "other" / package.name

    def forward(date: str, us: float) -> Forwards:
        variant: Any = of_kind(A)
        facts = {"reason": "test", "us": us, "ratio": 1.1, "date": date}
        return Forwards(
            (Entry(Problem.parse(A), variant, compiled(variant), "measured", facts),), ()
        )

    for folder, *facts in ((package, EARLY, 2.0), (source, LATE, 1.0)):
        emit_package([dated(A, EARLY)], [], H200, folder, forward(*facts))
    assert join_package(source, package) == (1, ())
    assert ForwardTable.load(package).tuned[0].provenance["date"] == LATE
    assert join_package(source, package) == (0, ())


def test_a_kernel_that_is_another_one_today_is_refused(
    package: Path, tmp_path: Path, compiler: dict[str, str]
) -> None:
    source, own = tmp_path / "other" / package.name, dated(B, EARLY)
    put(package, dated(A, EARLY))
    put(source, own)
    compiler[own.variant.id] = "another "
    before = snapshot(package)
    said = rf"kernel of {B} was made by NVRTC 13 and is another one with .* tune that shape again"
    with pytest.raises(NormforgeError, match=said):
        join_package(source, package)
    assert snapshot(package) == before


def test_packages_of_other_gpus_and_damaged_ones_are_refused(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "other" / package.name
    put(package, dated(A, EARLY))
    emit_package([dated(B, EARLY)], [], replace(H200, sms=114), source)
    with pytest.raises(NormforgeError, match="are for different GPUs: join those of one"):
        join_package(source, package)
    (source / TABLE).write_text("{}")
    with pytest.raises(NormforgeError, match="holds no readable package"):
        join_package(source, package)
    assert winners(package).keys() == {A}
