"""Builds host programs from rendered sources: the C++ compiler, and a cache of what it made.

A program is one variant linked with the emulator. Programs live in a content-addressed cache and
appear by an atomic rename, as cubins do. Each ends with its own checksum, which neither the linker
nor the loader looks at; one that is damaged is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from generator.disk import replacing
from generator.errors import NormforgeError
from generator.paths import CACHE
from generator.problem import RMSNORM_BACKWARD

HOST = Path(__file__).resolve().parent / "host"
DEFAULT_CACHE = CACHE / "host"
NO_COMPILER = (
    "no C++ compiler found (g++ or clang++, or the one that CXX names): kernels cannot be run "
    "without a GPU, and checks that do so are not run"
)
_COMPILE_SECONDS = 300
_IN_THE_SOURCE = re.compile(r":\d+: error: ")
"""Matches a compiler's errors about the source. About a full disk and the like, it writes `fatal
error`, or nothing that has a line number."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MOST_STACK_BYTES = 16384  # the kernel's frame; the emulator needs some, too


class HostError(NormforgeError):
    """This machine cannot compile or run what it was given: nobody's outcome."""


@cache
def find_compiler() -> str | None:
    """The path of the host's C++ compiler: $CXX, else g++, else clang++; None without one."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


@cache
def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


@cache
def flags() -> tuple[str, ...]:
    """Compiler flags. Contraction is off, as in the GPU build; fused multiply-adds are written out
    and take the CPU's instruction where it has one (libm's exact one otherwise)."""
    common = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions")
    return (*common, "-mfma") if _has_x86_fma() else common


def _has_x86_fma() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "fma" in words


def build(
    source: str, cache_folder: Path = DEFAULT_CACHE, *, kernel: str = RMSNORM_BACKWARD
) -> Path:
    """The program that runs `source`, cached or compiled now. kernel: name of the main one. Raises
    NormforgeError with the compiler's first error when it refuses the source, HostError without a
    compiler or when the program cannot be made."""
    compiler = find_compiler()
    if compiler is None:
        raise HostError(NO_COMPILER)
    emulator = _emulator(compiler, cache_folder)
    key = _key(compiler, emulator.name, kernel, source)
    program = cache_folder / key[:2] / key
    if not _is_whole(program):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / f"{kernel}.cpp"
            text.write_text(source, encoding="utf-8")
            options = [
                "-DNORMFORGE_HOST",
                f"-D{kernel}=main_kernel",
                "-O1",  # compiles faster than -O2 and runs as fast: the emulator takes the time
                "-Wno-unknown-pragmas",
                f"-I{HOST}",
            ]
            options.append(f"-Werror=frame-larger-than={_MOST_STACK_BYTES}")
            compile_to(compiler, [*options, str(text), str(emulator)], program)
    return program


def _emulator(compiler: str, cache_folder: Path) -> Path:
    """The emulator as one object file."""
    sources = sorted(HOST.glob("*.cpp"))
    contents = [path.read_text(encoding="utf-8") for path in sorted(HOST.iterdir())]
    program = cache_folder / f"emulator-{_key(compiler, *contents)}.o"
    if not _is_whole(program):
        compile_to(compiler, ["-r", "-nostdlib", *map(str, sources)], program)
    return program


def _key(compiler: str, *contents: str) -> str:
    parts = (_version(compiler), *flags(), *contents)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_whole(program: Path) -> bool:
    """Return True if the cached program still matches its checksum."""
    try:
        content = program.read_bytes()
    except OSError:
        return False
    body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return hashlib.sha256(body).digest() == checksum


def compile_to(compiler: str, arguments: list[str], result: Path) -> None:
    """Run the compiler with `flags()` and these arguments; `result` appears whole, with its
    checksum, or not at all. Raises NormforgeError with the compiler's first error, HostError when
    that is not about the source."""
    try:
        with replacing(result) as part:
            _compile([compiler, *flags(), *arguments, "-o", str(part)])
            with part.open("r+b") as file:
                file.write(hashlib.sha256(file.read()).digest())
    except OSError as error:
        raise HostError(
            f"cannot write to the cache {result.parent} ({error.strerror}): make room there and "
            "let it be writable"
        ) from error


def _compile(command: list[str]) -> None:
    """Raises NormforgeError and HostError as `compile_to`, and OSError."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMPILE_SECONDS,
            start_new_session=True,  # a terminal's Ctrl-C is no verdict on a source
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{command[0]} took more than {_COMPILE_SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        refused = next(filter(_IN_THE_SOURCE.search, lines), None)
        if refused is not None:
            raise NormforgeError(f"{command[0]} refuses the source: {refused}")
        said = next((line for line in lines if "error" in line), (lines or ["no message"])[-1])
        raise HostError(
            f"{command[0]} failed on something else than the source ({said}): is there room on "
            f"the disks of {command[-1]} and {tempfile.gettempdir()}?"
        )
