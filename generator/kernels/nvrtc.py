"""Compiles CUDA C++ to a cubin through NVRTC, for any target, with no GPU and no driver."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from generator.errors import CompilerError, CompilerFailedError
from generator.kernels.ptxas import Resources, overrides_cap, read_resources
from normforge.spec import SUM_KERNEL


@dataclass(frozen=True)
class Compiled:
    """A cubin and what is known of it. `error` is "" or NVRTC's complaint, and then the cubin is
    empty. `cap_ignored` is True when ptxas said that it overrode the register cap."""

    arch: str
    source: str
    cubin: bytes
    kernels: Mapping[str, Resources]
    nvrtc: str
    cap_ignored: bool
    log: str
    error: str = ""

    @property
    def digest(self) -> str:
        """Identity of the machine code: equal digests behave equally at equal launches."""
        return hashlib.sha256(self.cubin).hexdigest()[:16]

    @property
    def main(self) -> Resources:
        """Resources of the kernel that goes over the rows; it has the name of its operation."""
        return next(used for name, used in self.kernels.items() if name != SUM_KERNEL)

    @property
    def spills(self) -> int:
        """Bytes spilled or kept on the stack by any kernel of the cubin."""
        return sum(k.spill_bytes + k.stack_bytes for k in self.kernels.values())


LEAST_NVRTC = 13
_NOT_THE_SOURCE = re.compile(
    "memory allocation failure|out of memory|cannot allocate|no space left|internal error"
    "|nvrtcResult",
    re.IGNORECASE,
)
"""Matches the log of NVRTC where NVRTC, or a part of it, gave up. Only old entries of the cache
contain the name of a status."""


@cache
def nvrtc_version() -> str:
    """Version of the NVRTC library in use, for example "13.0". Raises CompilerError for one that
    is too old."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilerError("NVRTC does not answer: install the package nvidia-cuda-nvrtc")
    if major < LEAST_NVRTC:
        raise CompilerError(
            f"NVRTC {major}.{minor} is in use, probably that of PyTorch, and kernels need "
            f"{LEAST_NVRTC}.0 or newer: install a PyTorch for CUDA {LEAST_NVRTC}"
        )
    return f"{major}.{minor}"


def compile_options(arch: str, register_cap: int) -> list[str]:
    """NVRTC options. Contraction is off: every fused multiply-add in the source is written out, so
    that the bits do not depend on the compiler's choices. NVRTC's own cache is off because a hit in
    it comes without ptxas's report. Warning 177 is about constants that a strategy does not use."""
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=false"]
    options += ["--ptxas-options=-v", "--no-cache", "--diag-suppress=177"]
    if register_cap:
        options.append(f"--maxrregcount={register_cap}")
    return options


def compile_source(
    source: str, arch: str, register_cap: int = 0, include: Sequence[Path] = ()
) -> Compiled:
    """Compile one source for one architecture, without the cache. include: the folders that
    the names of included files are relative to. Raises CompilerError where NVRTC lacks a part, and
    CompilerFailedError where it failed and did not say that the source is wrong."""
    from cuda.bindings import nvrtc

    success = nvrtc.nvrtcResult.NVRTC_SUCCESS
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    if status != success:
        raise CompilerFailedError(f"NVRTC cannot create a program: {status}")
    try:
        named = compile_options(arch, register_cap)
        named += [f"--include-path={folder}" for folder in include]
        options = [option.encode() for option in named]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = read_buffer(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        log = log.rstrip("\0").strip()
        if status != success:
            error = _refusal(status.name, log)
            return Compiled(arch, source, b"", {}, nvrtc_version(), False, log, error)
        cubin = read_buffer(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    kernels = read_resources(log)
    if not kernels:
        raise CompilerError(
            f"NVRTC {nvrtc_version()} reported no resources of any kernel; its log was: {log}"
        )
    return Compiled(arch, source, cubin, kernels, nvrtc_version(), overrides_cap(log), log)


def _refusal(status: str, log: str) -> str:
    """NVRTC's complaint about a source. Raises CompilerError where it is about something else."""
    if status == "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE":
        raise CompilerError(f"NVRTC is not whole, install nvidia-cuda-nvrtc again: {log}")
    if status == "NVRTC_ERROR_INVALID_OPTION":
        raise CompilerError(f"NVRTC {nvrtc_version()} does not know an option: {log}")
    if status != "NVRTC_ERROR_COMPILATION" or not blames_source(log):
        raise CompilerFailedError(f"NVRTC failed ({status}): {log}")
    return log


def blames_source(error: str) -> bool:
    """Return True if the error of a compilation is about its source, and would come again."""
    return bool(error) and not _NOT_THE_SOURCE.search(error)


def read_buffer(size_of: Any, read: Any, program: Any) -> bytes:
    _, size = size_of(program)
    content = bytes(size)  # the binding writes into the object that it is given
    read(program, content)
    return content
