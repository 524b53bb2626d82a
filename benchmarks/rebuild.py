"""Check that the kernels of packages are what their tables say, by compiling all of them anew.

    python -m benchmarks.rebuild [--gpu h200 ...] [--sources] [--kernels 20] [--processes 4]

Every kernel goes from its config in the table to a variant, to source and to a cubin, whose digest
has to be that of the table; so has the launch. With --sources it is the kernels/*.cu that are
compiled, with the headers of templates/ and generated/include/. Another version of NVRTC than the
one that made a kernel may make another, and then a difference proves nothing. Needs no GPU. Exit
code 1 for a kernel that differs under its own version.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from generator.errors import CompilerError, NormforgeError
from generator.kernels.code_digest import compiler_input
from generator.kernels.nvrtc import compile_source, nvrtc_version
from generator.package.sources import variant_of
from generator.paths import GENERATED, header_folders
from normforge.table import TABLE, ForwardKernel, ForwardTable, Kernel, Table

Stored = Kernel | ForwardKernel


@dataclass(frozen=True)
class Opened:
    """A package, the GPU that it is for and its kernels, each once. with_source: the winners of the
    backward, and forward kernels that have a source."""

    folder: Path
    arch: str
    sms: int
    kernels: tuple[Stored, ...]
    with_source: tuple[Stored, ...]


@dataclass(frozen=True)
class Rebuilt:
    """One kernel compiled anew. then, now: versions of NVRTC; fault: "" where it is the same."""

    kernel: Stored
    then: str
    now: str
    fault: str

    @property
    def proves(self) -> bool:
        """True when a difference is one of the kernel, not of the compiler."""
        return self.then == self.now

    def __str__(self) -> str:
        doubt = "" if self.proves else ": proves nothing"
        return f"{self.kernel.file} {self.fault} (NVRTC {self.then}, now {self.now}){doubt}"


def open_package(folder: Path) -> Opened:
    """Raises OSError, ValueError."""
    table, forward = Table.load(folder), ForwardTable.load(folder)
    kernels: list[Stored] = [*table.kernels(), *(forward.kernels() if forward else ())]
    read: list[Stored] = [entry.kernel for entry in table.tuned]
    forwards = [entry.kernel for entry in forward.tuned] if forward else []
    read += [k for k in forwards if (folder / "kernels" / f"{k.file}.cu").exists()]
    arch, sms = table.target["arch"], table.target["sms"]
    return Opened(folder, arch, sms, tuple(dict.fromkeys(kernels)), tuple(dict.fromkeys(read)))


def rebuild(kernel: Stored, folder: Path, arch: str, sms: int, sources: bool = False) -> Rebuilt:
    """Compile one kernel of the package in `folder` from its config, or from its .cu."""
    done = partial(Rebuilt, kernel, kernel.nvrtc, nvrtc_version())
    try:
        variant = variant_of(kernel)
        source, register_cap = compiler_input(variant)
        if sources:
            source = (folder / "kernels" / f"{kernel.file}.cu").read_text(encoding="utf-8")
        if variant.spec(sms) != kernel.spec:
            return done("has another launch")
    except (NormforgeError, TypeError, OSError) as error:
        return done(f"has no source ({error})")
    compiled = compile_source(source, arch, register_cap, header_folders() if sources else ())
    if compiled.error:
        return done(f"does not compile ({compiled.error.splitlines()[0]})")
    same = compiled.digest == kernel.digest
    return done("" if same else f"is {kernel.digest} in the table and {compiled.digest} anew")


def report(package: Opened, drawn: Sequence[Stored], pool: Executor, sources: bool) -> bool:
    """Print what became of the kernels; whether no difference is theirs."""
    job = partial(
        rebuild, folder=package.folder, arch=package.arch, sms=package.sms, sources=sources
    )
    found = list(pool.map(job, drawn))
    name = package.folder.relative_to(GENERATED)
    different = [one for one in found if one.fault]
    for one in different:
        print(f"{name}: {one}")
    versions = ", ".join(sorted({one.then for one in found}))
    print(
        f"{name}: {len(found) - len(different)} of {len(found)} kernels agree with the table, of "
        f"{len(package.kernels)} in all; made by NVRTC {versions}, compiled by {nvrtc_version()}"
    )
    return not any(one.proves for one in different)


def packages_of(gpus: Sequence[str] | None) -> list[Path]:
    """The folders of all packages, or of those for some GPUs; for one that has none, of its main
    package."""
    if gpus is None:
        return sorted(table.parent for table in GENERATED.glob(f"*/*/{TABLE}"))
    folders = []
    for gpu in gpus:
        main_package = GENERATED / gpu / "rmsnorm_backward"
        tables = sorted(main_package.parent.glob(f"*/{TABLE}"))
        folders += [table.parent for table in tables] or [main_package]
    return folders


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels of packages anew.")
    parser.add_argument("--gpu", nargs="+", help="default: every package of generated/")
    parser.add_argument("--sources", action="store_true", help="compile the kernels/*.cu")
    parser.add_argument("--kernels", type=int, help="at most so many, spread over the tables")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(arguments)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        return report_all(args, pool)


def report_all(args: argparse.Namespace, pool: Executor) -> int:
    """Report on the packages of a command line in turn; the exit code."""
    sound = True
    for folder in packages_of(args.gpu):
        try:
            package = open_package(folder)
        except (OSError, ValueError) as error:
            print(f"{folder.relative_to(GENERATED)}: {error}", file=sys.stderr)
            sound = False
            continue
        drawn = package.with_source if args.sources else package.kernels
        step = -(-len(drawn) // args.kernels) if args.kernels else 1
        try:
            sound &= report(package, drawn[::step], pool, args.sources)
        except CompilerError as error:
            print(f"rebuild: {error}", file=sys.stderr)
            return 2
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
