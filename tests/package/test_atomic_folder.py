"""A package is replaced in one step: whatever fails, the old one stays whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from generator.errors import NormforgeError
from generator.package import atomic_folder
from generator.runtime.table import Table
from tests.support.packages import (
    entry,
    put,
    snapshot,
)


def no_exchange(one: Path, other: Path) -> None:
    raise OSError("not on this file system")


@pytest.mark.parametrize("exchange", [True, False])
def test_failure_at_any_step_leaves_the_old_package(
    package: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    put(package, entry("4096x1024:bf16"))
    before = snapshot(package)
    if not exchange:
        monkeypatch.setattr(atomic_folder, "_exchange", no_exchange)
    step = 0
    steps = (
        *((Path, name, getattr(Path, name)) for name in ("write_bytes", "write_text", "rename")),
        (shutil, "copyfile", shutil.copyfile),
    )

    def counted(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal step
            step += 1
            if step == fail_at:
                raise OSError(28, "No space left on device")
            return original(*arguments)

        return call

    for fail_at in range(1, 200):
        with monkeypatch.context() as patch:
            step = 0
            for owner, name, original in steps:
                patch.setattr(owner, name, counted(original))
            try:
                put(package, entry("8192x1024:bf16"), fallback=[])
                if step < fail_at:
                    break  # nothing was left to fail
            except NormforgeError as error:
                assert "what was there is unchanged" in str(error)
                assert snapshot(package) == before
    else:
        pytest.fail("the loop ends when every step has failed once")
    assert fail_at > 10
    assert len(Table.load(package).tuned) == 2
    assert [path.name for path in package.parent.iterdir()] == ["rmsnorm_backward"]


def test_run_killed_between_two_renames_is_healed_by_the_next(package: Path) -> None:
    put(package, entry("4096x1024:bf16"))
    package.rename(package.parent / ".rmsnorm_backward.old")
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
