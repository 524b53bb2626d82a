"""Host programs: conversions, fibers, compiling, and the command line."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from generator.emulate import build as host_build
from generator.emulate import check_variant, find_compiler
from generator.emulate.__main__ import main
from generator.emulate.build import HostError
from generator.emulate.check import check_source, small_launch
from generator.emulate.run import _run_program
from generator.errors import NormforgeError
from generator.kernels.render import render
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.target import Target
from tests.support.samples import REDUCTION, plain_variant

SEED = int(os.environ.get("NORMFORGE_EMULATE_SEED", "2026"))
"""The seed of the sampled variants; every test id shows it."""
ROOT = REPOSITORY

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
pytestmark = needs_compiler


def test_an_emulator_that_was_edited_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its files is part of the name in the cache."""
    folder, compiler = tmp_path / "host", find_compiler()
    assert compiler is not None
    shutil.copytree(host_build.HOST, folder)
    monkeypatch.setattr(host_build, "HOST", folder)
    monkeypatch.setattr(host_build, "compile_to", lambda *_: None)
    found = {host_build._emulator(compiler, tmp_path)}
    files = sorted(folder.iterdir())
    for path in files:
        path.write_text(path.read_text() + "\n")
        found.add(host_build._emulator(compiler, tmp_path))
    assert len(files) > 1 and len(found) == 1 + len(files)


def test_conversions_round_as_the_gpu_does(tmp_path: Path) -> None:
    source = tmp_path / "numbers.cpp"
    source.write_text(
        '#include "normforge_host.h"\n'
        'extern "C" void widen(const unsigned short* in, float* out, int n) {\n'
        "  for (int i = 0; i < n; ++i) out[i] = widen_fp16(in[i]);\n"
        "}\n"
        'extern "C" void narrow(const float* in, unsigned short* h, unsigned short* b, int n) {\n'
        "  for (int i = 0; i < n; ++i) h[i] = narrow_fp16(in[i]), b[i] = narrow_bf16(in[i]);\n"
        "}\n"
    )
    library = tmp_path / "numbers.so"
    command = [find_compiler(), *host_build.flags(), "-shared", "-fPIC", f"-I{host_build.HOST}"]
    subprocess.run([*map(str, command), str(source), "-o", str(library)], check=True)
    numbers = ctypes.CDLL(str(library))

    halves = np.arange(1 << 16, dtype=np.uint16)
    widened = np.empty(1 << 16, dtype=np.float32)
    numbers.widen(halves.ctypes, widened.ctypes, len(halves))
    expected = torch.from_numpy(halves.view(np.float16)).float().numpy()
    numeric = ~np.isnan(expected)
    assert np.array_equal(widened.view(np.uint32)[numeric], expected.view(np.uint32)[numeric])
    assert np.isnan(widened[~numeric]).all()

    # Every half and its neighbourhood, ties included, and random bits.
    near = expected[numeric].view(np.uint32).astype(np.int64)[:, None] + np.arange(-3, 4) * 1024
    middle = (expected[numeric].view(np.uint32).astype(np.int64) + 4096)[:, None]
    drawn = np.random.default_rng(SEED).integers(0, 1 << 32, 1 << 20)
    bits = np.concatenate([near.ravel(), middle.ravel(), (middle + 1).ravel(), drawn]) % (1 << 32)
    floats = bits.astype(np.uint32).view(np.float32)
    half, brain = np.empty(len(floats), np.uint16), np.empty(len(floats), np.uint16)
    numbers.narrow(floats.ctypes, half.ctypes, brain.ctypes, len(floats))
    number = ~np.isnan(floats)
    for ours, dtype in ((half, torch.float16), (brain, torch.bfloat16)):
        theirs = torch.from_numpy(floats).to(dtype).view(torch.uint16).numpy()
        assert np.array_equal(ours[number], theirs[number])
        assert (ours[~number] == 0x7FFF).all()


@pytest.mark.slow
def test_portable_fibers_give_the_same_bits(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = plain_variant("13x1024:bf16", target, **REDUCTION["atomic"])
    problem = Problem.parse("13x1024:bf16")
    spec, launch = small_launch(variant, problem.M)
    fast = check_source(render(variant), spec, launch, problem, schedules=9)
    flags = (*host_build.flags(), "-DNORMFORGE_UCONTEXT")
    monkeypatch.setattr(host_build, "flags", lambda: flags)
    portable = check_source(
        render(variant), spec, launch, problem, schedules=9, cache_folder=tmp_path
    )
    assert portable == fast


def test_source_that_does_not_compile_is_refused_with_the_reason() -> None:
    with pytest.raises(NormforgeError, match=r"refuses the source: .*error"):
        host_build.build("this is no C++\n")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 64 kB, as where a disk is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_not_the_fault_of_the_source(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(HostError, match="is there room on the disks"):
        host_build.build('extern "C" void rmsnorm_backward() {}\n', tmp_path)
    assert list(tmp_path.rglob("*.part")) == []


def test_damaged_cached_program_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compile(command: list[str]) -> None:
        made.append(command[-1])
        Path(command[-1]).write_bytes(b"\x7fELF" * 1000)

    monkeypatch.setattr(host_build, "_compile", compile)
    program = host_build.build("source", tmp_path)
    whole = program.read_bytes()
    assert (host_build.build("source", tmp_path), len(made)) == (program, 2), "emulator, program"
    emulator = next(tmp_path.glob("emulator-*.o"))
    bit = bytes([whole[0] ^ 1])
    for path in (program, emulator):
        for damaged in (b"", whole[:-1], whole[:2000], bit + whole[1:], whole + whole):
            path.write_bytes(damaged)
            made.clear()
            assert host_build.build("source", tmp_path) == program
            assert len(made) == 1
            assert path.read_bytes() == whole


def test_program_that_is_killed_from_outside_is_not_the_variants_fault(tmp_path: Path) -> None:
    for end in ("kill -9 $$", "kill -15 $$", "echo std::bad_alloc >&2; exit 134"):
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\ncat > /dev/null\n{end}\n")
        program.chmod(0o755)
        with pytest.raises(HostError, match="from outside or had no memory"):
            _run_program(program, b"", 10)
    # A Ctrl-C that reaches the program before it has a session of its own.
    # (A shell started in the background ignores SIGINT, and so would its children.)
    interrupted = "signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)"
    program.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nsys.stdin.buffer.read()\n{interrupted}\n"
    )
    with pytest.raises(KeyboardInterrupt):
        _run_program(program, b"", 10)
    program.write_text("#!/bin/sh\ncat > /dev/null\nkill -11 $$\n")
    assert _run_program(program, b"", 10)[1].startswith("the emulator ended with code -11")


def test_no_part_of_a_program_is_left_behind(tmp_path: Path) -> None:
    program = tmp_path / "program"
    compiler = find_compiler()
    assert compiler is not None
    with pytest.raises(NormforgeError):
        host_build.compile_to(compiler, [str(tmp_path / "absent.cpp")], program)
    assert list(tmp_path.iterdir()) == []


def test_command_line_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--strategy", "semaphore", "--shape", "64x1024:bf16", "--schedules", "50"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["variant"].startswith("semaphore_")
    assert document["schedules"] == 50
    assert document["distinct_results"] == 1
    assert document["errors"].keys() == {"dx", "dw"}
    assert all(0 < error < 0.01 for error in document["errors"].values())
    assert document["problems"] == []
    assert main(arguments) == 0
    assert "50 schedules, 1 different results" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--strategy", "nonsense"), "knob 'strategy' has no value 'nonsense'"),
        (("--strategy", "semaphore", "--set", "stages"), "expected KNOB=VALUE"),
        (("--strategy", "semaphore", "--set", "colour=red"), "unknown knob 'colour'"),
        (("--strategy", "semaphore", "--schedules", "0"), "--schedules 0"),
        (("--strategy", "semaphore", "--gpu", "abacus"), "unknown GPU 'abacus'"),
    ],
)
def test_command_line_refuses_with_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--shape", "64x1024:bf16", *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_without_a_compiler_the_checks_are_reported_as_not_run(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "generator.emulate",
            "--strategy",
            "semaphore",
            "--shape",
            "64x1024:bf16",
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": "", "CXX": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no C++ compiler found" in done.stderr
    monkeypatch.setattr("generator.emulate.check.find_compiler", lambda: None)
    variant = plain_variant("64x1024:bf16", target, **REDUCTION["semaphore"])
    check = check_variant(variant, Problem.parse("64x1024:bf16"))
    assert not check.passed
    assert (check.schedules, check.problems) == (0, ())
    assert "not run" in check.note
