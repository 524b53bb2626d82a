"""CUDA C++ to cubin through NVRTC, for any target, with no GPU and no driver.

Results live in a content-addressed cache: the key covers source, options and NVRTC version, a file
appears by an atomic rename, and its content carries its own checksum, so that a crash or a second
run at the same time can leave nothing half-written that is later believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.processes import end_pool, end_with_parent, shielded
from generator.render import render
from generator.runtime.plan import MAIN_KERNEL, Launch
from generator.target import Target
from generator.variant import Variant

DEFAULT_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "cubins"
LIVES = 3
"""Processes that one variant may cost, alone, before it is an error."""
ENTRY_FORMAT = 2
"""Version of what a cache entry holds: entries of other versions are never looked at."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel. Bytes are per thread, smem per CTA (static part);
    barriers: CTA barriers, of which an SM has a limited number for all its CTAs."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    barriers: int = 1


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
        return self.kernels[MAIN_KERNEL]

    @property
    def spills(self) -> int:
        """Bytes spilled or kept on the stack by any kernel of the cubin."""
        return sum(k.spill_bytes + k.stack_bytes for k in self.kernels.values())


def resource_fault(variant: Variant, compiled: Compiled, launch: Launch, target: Target) -> str:
    """Why the compiled variant must not run on the target: one sentence, or "" when it may."""
    if compiled.spills:
        return f"spills or stack: {compiled.spills} bytes per thread"
    if compiled.cap_ignored:
        return f"ptxas did not respect the register cap of {variant['register_cap']}"
    main = compiled.main
    cap = variant["register_cap"]
    if cap and main.registers > cap:
        return f"uses {main.registers} registers, the cap is {cap}"
    if main.registers * variant.threads > target.registers_per_sm:
        return f"{variant.threads} threads with {main.registers} registers do not fit one SM"
    smem_bytes = variant.smem_bytes + main.smem_bytes
    fit = target.occupancy(variant.threads, main.registers, smem_bytes, main.barriers)
    if fit == 0:
        return f"no CTA fits an SM of {target} ({main.registers} registers)"
    wanted = variant["ctas_per_sm"]
    # A kernel whose CTAs wait for each other has to fit at any M that a module may serve with it.
    if launch.grid > fit * target.sms or (variant.waits_for_grid and wanted > fit):
        used = f"{main.registers} registers, {main.barriers} barriers"
        return f"{wanted} CTAs per SM wanted, {fit} fit ({used})"
    return ""


@cache
def nvrtc_version() -> str:
    """Version of the NVRTC library in use, for example "13.0"."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise NormforgeError("NVRTC does not answer: install the package nvidia-cuda-nvrtc")
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


def compile_source(source: str, arch: str, register_cap: int = 0) -> Compiled:
    """Compile one source for one architecture, without the cache."""
    from cuda.bindings import nvrtc

    success = nvrtc.nvrtcResult.NVRTC_SUCCESS
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"rmsnorm_backward.cu", 0, [], [])
    if status != success:
        raise NormforgeError(f"NVRTC cannot create a program: {status}")
    try:
        options = [option.encode() for option in compile_options(arch, register_cap)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        log = log.rstrip("\0").strip()
        if status != success:
            return Compiled(arch, source, b"", {}, nvrtc_version(), False, log, log or str(status))
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    kernels = read_resources(log)
    if not kernels:
        raise NormforgeError(
            f"NVRTC {nvrtc_version()} reported no resources of any kernel; its log was: {log}"
        )
    cap_ignored = "Overriding global maxrregcount" in log
    return Compiled(arch, source, cubin, kernels, nvrtc_version(), cap_ignored, log)


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    _, size = size_of(program)
    buffer = bytearray(size)
    # The binding writes into the object it is given; bytes of the right size is what it takes.
    content = bytes(buffer)
    read(program, content)
    return content


def read_resources(log: str) -> dict[str, Resources]:
    """Registers, spills, stack and static smem of every kernel in a ptxas -v log."""
    kernels: dict[str, Resources] = {}
    blocks = re.split(r"Compiling entry function '(\w+)'", log)
    for name, block in zip(blocks[1::2], blocks[2::2], strict=True):
        used = re.search(r"Used (\d+) registers", block)
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )
        smem = re.search(r"(\d+) bytes smem", block)
        barriers = re.search(r"used (\d+) barriers", block)
        if used and frame:
            kernels[name] = Resources(
                registers=int(used[1]),
                spill_bytes=int(frame[2]) + int(frame[3]),
                stack_bytes=int(frame[1]),
                smem_bytes=int(smem[1]) if smem else 0,
                barriers=int(barriers[1]) if barriers else 0,
            )
    return kernels


class CubinCache:
    """Compiled results by content, shared by any number of processes."""

    def __init__(self, folder: Path = DEFAULT_CACHE) -> None:
        self.folder = folder

    def path(self, source: str, arch: str, register_cap: int) -> Path:
        options = " ".join(compile_options(arch, register_cap))
        text = f"{ENTRY_FORMAT} {nvrtc_version()}\n{options}\n{source}"
        key = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / arch / key[:2] / f"{key}.json"

    def compile(self, source: str, arch: str, register_cap: int = 0) -> Compiled:
        """The cached result, or a fresh one that is stored. An entry that is damaged is compiled
        again and replaced."""
        found = self.find(source, arch, register_cap)
        if found is not None:
            return found
        compiled = compile_source(source, arch, register_cap)
        self._write(self.path(source, arch, register_cap), compiled)
        return compiled

    def find(self, source: str, arch: str, register_cap: int = 0) -> Compiled | None:
        """The cached result; None where there is none that is sound."""
        found = self._read(self.path(source, arch, register_cap))
        return found if found is not None and found.source == source else None

    @staticmethod
    def _read(path: Path) -> Compiled | None:
        try:
            checksum, _, body = path.read_text().partition("\n")
            if hashlib.sha256(body.encode()).hexdigest() != checksum:
                return None
            data = json.loads(body)
            data["cubin"] = bytes.fromhex(data["cubin"])
            data["kernels"] = {n: Resources(**r) for n, r in data["kernels"].items()}
            return Compiled(**data)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def _write(path: Path, compiled: Compiled) -> None:
        data = asdict(compiled) | {"cubin": compiled.cubin.hex()}
        body = json.dumps(data)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError:
            # The cache saves time only: a full disk costs a compile, not the run.
            return


def compile_variant(variant: Variant, arch: str, cache_folder: Path = DEFAULT_CACHE) -> Compiled:
    """Render and compile one variant through the cache."""
    cap = int(variant["register_cap"])
    return CubinCache(cache_folder).compile(render(variant), arch, cap)


def _begin() -> None:
    """What a compiler process does first: drivers and GPU workers come before it."""
    end_with_parent()
    os.nice(5)


class CompilePool:
    """Compiles variants in worker processes. When one dies, the variants under way are compiled
    again, each alone: the one that kills its process time and again is an error, and one whose
    process somebody else killed is not. method: how multiprocessing starts the processes."""

    def __init__(
        self,
        arch: str,
        processes: int,
        cache_folder: Path = DEFAULT_CACHE,
        *,
        compile: Callable[[Variant, str, Path], Compiled] = compile_variant,
        method: str = "spawn",
    ) -> None:
        self.arch = arch
        self.processes = max(1, processes)
        self.cache_folder = cache_folder
        self._compile, self._method = compile, method
        self._pool = self._start(self.processes)

    def _start(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(processes, get_context(self._method), _begin)

    def _submit(self, pool: ProcessPoolExecutor, variant: Variant) -> Future[Compiled]:
        with shielded():
            return pool.submit(self._compile, variant, self.arch, self.cache_folder)

    def submit(self, variant: Variant) -> Future[Compiled]:
        try:
            return self._submit(self._pool, variant)
        except BrokenProcessPool:
            self._pool = self._start(self.processes)
            return self._submit(self._pool, variant)

    def result(self, variant: Variant, future: Future[Compiled], timeout: float = 120) -> Compiled:
        """The result of `submit`. Whatever goes wrong with one variant is the error in it."""
        try:
            return future.result(timeout)
        except (BrokenProcessPool, CancelledError):
            return self._alone(variant, timeout)
        except TimeoutError:
            end_pool(self._pool)
            self._pool = self._start(self.processes)
            return self._failed(variant, f"NVRTC took more than {timeout:.0f} s")
        except Exception as error:
            return self._failed(variant, f"{type(error).__name__}: {error}")

    def _alone(self, variant: Variant, timeout: float) -> Compiled:
        for _ in range(LIVES):
            pool = self._start(1)
            try:
                return self._submit(pool, variant).result(timeout)
            except BrokenProcessPool:
                continue
            except TimeoutError:
                return self._failed(variant, f"NVRTC took more than {timeout:.0f} s")
            except Exception as error:
                return self._failed(variant, f"{type(error).__name__}: {error}")
            finally:
                end_pool(pool)
        return self._failed(variant, f"NVRTC crashed on this variant {LIVES} times")

    def _failed(self, variant: Variant, error: str) -> Compiled:
        return Compiled(self.arch, "", b"", {}, nvrtc_version(), False, "", error)

    def close(self) -> None:
        """Ends the processes, whatever they are doing: entries of the cache appear whole."""
        end_pool(self._pool)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
