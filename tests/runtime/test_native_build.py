"""The C++ extension is built once per machine, and says what it misses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.native import build, native
from tests.support.entry_points import equal_bits, write_package
from tests.support.native import in_threads, outcome, started


def test_nothing_is_built_or_loaded_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load_extension", "_driver_addresses"):
        monkeypatch.delattr(native, name)
    package = write_package(tmp_path)
    assert vars(package._native).keys() >= {"norm", "backward", "learn"}
    outcome(package)
    assert package._native.norm is package._native.backward is package._native.learn is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    package = write_package(tmp_path)
    with pytest.raises(RuntimeError, match=r"needs CUDA, and PyTorch .* is built without"):
        package.use_native()
    outcome(package)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path: Path, content: str) -> str:
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)
    return str(path)


def test_missing_compiler_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(
        RuntimeError, match="needs a C\\+\\+ compiler, and there is no no-such-comp"
    ):
        build.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"there is no c\+\+, g\+\+ or clang\+\+: install one"):
        build.build()


def test_missing_headers_are_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(RuntimeError, match=r"/nowhere/Python.h, which is missing: install the dev"):
        build.build()


def test_words_of_the_compiler_are_passed_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX", script(tmp_path / "cc", "echo native.cpp:1: error: planted >&2; exit 1")
    )
    with pytest.raises(RuntimeError, match=r"could not compile .*native.cpp: .*planted \(set CXX"):
        build.build()
    assert list((cache / "normforge").iterdir()) == []


def test_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set TORCH_EXTENSIONS_DIR to a folder"):
        build.build()


def test_damaged_build_is_said(tmp_path: Path) -> None:
    (tmp_path / "native_0.so").write_bytes(b"no library")
    with pytest.raises(RuntimeError, match=r"could not load .*native_0.so .*: remove it"):
        build.load(tmp_path / "native_0.so")


def test_builds_at_the_same_time_leave_one_whole_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that writes slowly: nobody sees half a file. Another one makes another file."""
    slow = 'for last; do :; done; printf abc > "$last"; sleep 0.2; printf def >> "$last"'
    monkeypatch.setenv("CXX", script(tmp_path / "cc", slow))
    found: list[tuple[Path, bytes]] = []

    def work() -> None:
        path = build.build()
        found.append((path, path.read_bytes()))

    in_threads([work] * 4)
    ((path, content),) = set(found)
    assert content == b"abcdef" and list((cache / "normforge").iterdir()) == [path]
    monkeypatch.setenv("CXX", script(tmp_path / "cc", "exit 1"))
    assert build.build() == path  # no compiler ran
    for where, name, other in (
        (torch, "__version__", "2.13.0+another"),
        (sys, "version", "another"),
        (build.platform, "libc_ver", lambda: ("glibc", "2.17")),
        (build, "SOURCES", build.SOURCES[:2]),
    ):
        with monkeypatch.context() as changed, pytest.raises(RuntimeError, match="not compile"):
            changed.setattr(where, name, other)
            build.build()
    monkeypatch.setenv("CXX", script(tmp_path / "dd", slow))
    assert build.build() != path
    assert build.build(("-O1",)) not in (path, build.build())


@pytest.mark.parametrize(
    ("where", "name", "other"),
    [
        (torch, "__version__", "2.13.0+another"),
        (torch.version, "cuda", "12.0"),
        (torch.version, "git_version", "of another build"),
        (build.sysconfig, "get_config_var", lambda _: "cpython-311t-x86_64-linux-gnu"),
        (build.platform, "machine", lambda: "another"),
        (build, "MAX_ALIGNMENT", 16),
        (build, "SOURCES", build.SOURCES[:2]),
    ],
)
def test_extension_of_a_wheel_fits_one_pytorch_and_python(
    where: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another name is not looked for."""
    here = build.prebuilt_name()
    assert build.prebuilt_name() == here
    monkeypatch.setattr(where, name, other)
    assert build.prebuilt_name() != here


@pytest.mark.slow
def test_extension_that_is_loaded_again_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    again = build.load(Path(module.__file__))
    assert again.Store is not module.Store and "normforge_native" not in sys.modules
    packages = [
        started(write_package(tmp_path / str(i)), loaded)
        for i, loaded in enumerate((module, again))
    ]
    assert equal_bits(*(outcome(package) for package in packages))


@pytest.mark.slow
def test_starting_it_again_changes_nothing(tmp_path: Path, module: Any) -> None:
    package = write_package(tmp_path)
    seen = []

    def work() -> None:
        started(package, module)
        seen.append((package._native.norm, package._native.backward))

    in_threads([work] * 8)
    assert len(set(seen)) == 1
