"""The command that compiles the kernels of a package anew."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rebuild
from generator.kernels.nvrtc import nvrtc_version
from generator.package.emit import emit_package
from generator.package.entries import Forwards
from generator.paths import GENERATED
from normforge.table import TABLE
from tests.support.packages import H200, unsealed
from tests.support.samples import planted_entry

SHAPES = {"4096x1024:bf16": "separate", "512x1024:bf16": "column_slices"}


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like generated/, with a package of two kernels."""
    folder = tmp_path_factory.mktemp("generated")
    entries = [planted_entry(shape, H200, strategy=name) for shape, name in SHAPES.items()]
    emit_package(entries, [], H200, folder / "h200" / "rmsnorm_backward", Forwards((), ()))
    return folder


@pytest.fixture
def generated(emitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be damaged; `rebuild` looks there."""
    folder = tmp_path / "generated"
    shutil.copytree(emitted, folder)
    monkeypatch.setattr(rebuild, "GENERATED", folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = rebuild.main([*arguments, "--processes", "1"])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("arguments", [[], ["--sources"], ["--gpu", "h200"]])
def test_kernels_that_agree(
    generated: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, said = run(capsys, *arguments)
    version = nvrtc_version()
    assert said == (
        "h200/rmsnorm_backward: 2 of 2 kernels agree with the table, of 2 in all; "
        f"made by NVRTC {version}, compiled by {version}\n"
    )
    assert code == 0


@pytest.mark.parametrize(("version", "code"), [("", 1), ("12.4", 0)])
def test_another_digest_is_a_fault_only_under_its_own_compiler(
    generated: Path, capsys: pytest.CaptureFixture[str], version: str, code: int
) -> None:
    package = rebuild.open_package(generated / "h200" / "rmsnorm_backward")
    wrong = package.kernels[0]
    table = package.folder / TABLE
    table.write_text(unsealed(table.read_text()))
    replace_in(table, wrong.digest, "0123456789abcdef")
    if version:
        replace_in(table, f'"nvrtc": "{wrong.nvrtc}",', f'"nvrtc": "{version}",')
    found, said = run(capsys)
    assert found == code
    assert f"{wrong.file} is 0123456789abcdef in the table and {wrong.digest} anew" in said
    assert f"(NVRTC {version or wrong.nvrtc}, now {nvrtc_version()})" in said
    assert ("proves nothing" in said) == bool(version)
    assert "1 of 2 kernels agree" in said


def test_a_source_that_is_not_what_was_compiled_differs(
    generated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = generated / "h200" / "rmsnorm_backward"
    for source in (folder / "kernels").iterdir():
        kept = source.read_text()
        source.write_text("#error planted\n" + kept)
        code, said = run(capsys, "--sources")
        assert code == 1
        assert f"{source.stem} does not compile" in said and "planted" in said
        source.write_text(kept)
    assert run(capsys)[0] == 0  # this renders the templates


def test_what_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    package = rebuild.open_package(GENERATED / "gb200" / "rmsnorm_backward")
    kernel = package.kernels[0]
    here: dict[str, Any] = {"folder": tmp_path, "arch": package.arch, "sms": package.sms}
    assert "No such file" in rebuild.rebuild(kernel, **here, sources=True).fault
    older = replace(kernel, config={"strategy": "separate"})
    assert "was made for other templates" in rebuild.rebuild(older, **here).fault
    other = replace(kernel, spec=replace(kernel.spec, sms=1))  # type: ignore[type-var]
    assert rebuild.rebuild(other, **here).fault == "has another launch"


def test_missing_and_damaged_packages_are_one_sentence(
    generated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--gpu", "b300")[0] == 1
    (generated / "h200" / "rmsnorm_backward" / TABLE).write_text("{}")
    code, said = run(capsys)
    assert code == 1
    assert "table.json is damaged" in said


EARLIER = {
    *("h100/rmsnorm_rope_backward", "h100/rmsnorm_rope_forward"),
    *("h100/rmsnorm_fp8_forward", "h100/rmsnorm_mxfp8_forward"),
}
"""Packages that were tuned before their templates were changed: their sources are as they were."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--sources"]])
def test_some_kernels_of_the_committed_packages_agree(
    mode: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All that are drawn from a package that this NVRTC made."""
    _, said = run(capsys, "--kernels", "1", *mode)
    made_here = f"made by NVRTC {nvrtc_version()},"
    told = dict(line.split(": ", 1) for line in said.splitlines() if made_here in line)
    differ = {name for name, rest in told.items() if not rest.startswith("1 of 1 kernels agree")}
    assert differ == (set() if mode else EARLIER)
    packages = {"/".join(path.parts[-3:-1]) for path in GENERATED.glob(f"*/*/{TABLE}")}
    assert told.keys() in (packages, set()), "all packages were made by one version"
