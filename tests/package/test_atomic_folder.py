"""A package is replaced in one step: whatever fails, the old one stays whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.package import atomic_folder
from normforge.table import Table
from tests.support.packages import (
    entry,
    put,
    snapshot,
)


def no_exchange(one: Path, other: Path) -> None:
    raise OSError("not on this file system")


@pytest.mark.parametrize("exchange", [True, False])
def test_failure_at_any_step_leaves_the_old_package(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Among equal steps that follow each other, such as copies of the library, the first and the
    last fail."""
    put(package, entry("4096x1024:bf16"), standalone=exchange)
    before = snapshot(package)
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", no_exchange)
    taken: list[str] = []
    steps = (
        *((Path, name, getattr(Path, name)) for name in ("write_bytes", "write_text", "rename")),
        (shutil, "copyfile", shutil.copyfile),
    )

    def counted(name: str, original: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            taken.append(name)
            if len(taken) == fail_at:
                raise OSError(28, "No space left on device")
            return original(*arguments, **more)

        return call

    def put_another(folder: Path) -> list[str]:
        taken.clear()
        with monkeypatch.context() as patch:
            for owner, name, original in steps:
                patch.setattr(owner, name, counted(name, original))
            put(folder, entry("8192x1024:bf16"), fallback=[])
        return list(taken)

    fail_at = 0
    names = put_another(shutil.copytree(package, tmp_path / "copy" / package.name))
    assert len(names) > (10 if exchange else 5)
    for fail_at, name in enumerate(names, 1):
        if [name] * 3 == names[fail_at - 2 : fail_at + 1]:
            continue
        with pytest.raises(NormforgeError, match="what was there is unchanged"):
            put_another(package)
        assert taken[:fail_at] == names[:fail_at]
        assert snapshot(package) == before
    fail_at = 0
    assert put_another(package) == names
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_run_killed_between_two_renames_is_healed_by_the_next(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    package.rename(package.parent / ".rmsnorm_backward.old")
    put(package, entry("8192x1024:bf16"))
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_run_killed_behind_its_second_rename_is_continued(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_folder, "_exchange", no_exchange)
    put(package, entry("4096x1024:bf16"))
    shutil.copytree(package, package.parent / ".rmsnorm_backward.old")
    put(package, entry("8192x1024:bf16"))
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_leftovers_of_a_killed_run_do_not_get_into_the_package(package: Path) -> None:
    leftover = package.parent / ".rmsnorm_backward.part" / "kernels"
    leftover.mkdir(parents=True)
    (leftover / "half.cubin").write_bytes(b"half")
    put(package, entry("4096x1024:bf16"))
    assert not any("half" in name for name in snapshot(package))
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


@pytest.mark.parametrize("exchange", [True, False])
def test_power_cut_after_the_swap_finds_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Every new file is on the disk before the folder gets its name, and that name is at the
    end."""
    events: list[str] = []
    fsync, swap = os.fsync, atomic_folder._swap

    def noted(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def swapped(fresh: Path, folder: Path) -> None:
        events.append("swap")
        swap(fresh, folder)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(atomic_folder, "_swap", swapped)
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", no_exchange)
    folder = tmp_path / "out" / "package"
    folder.mkdir(parents=True)
    with atomic_folder.replacing_folder(folder) as fresh:
        (fresh / "kernels").mkdir()
        (fresh / "kernels" / "one.cu").write_text("1")
        (fresh / "table.json").write_text("{}")
    assert set(events[:-2]) == {"kernels", "one.cu", "table.json", ".package.part"}
    assert events[-2:] == ["swap", "out"]
