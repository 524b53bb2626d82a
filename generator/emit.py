"""Winners to the importable package `generated/<gpu>/rmsnorm_backward/`.

The package is written beside the old one and put in its place by one rename, so that a reader and a
crash see either the whole old package or the whole new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generator.compile import Compiled
from generator.errors import NormforgeError
from generator.forward import ForwardVariant
from generator.forward_tune import Forwards
from generator.problem import Problem
from generator.runtime.dispatch import TABLE, Kernel, Table, Tuned
from generator.runtime.forward_table import (
    FORWARD_TABLE,
    ForwardKernel,
    ForwardTable,
    ForwardTuned,
)
from generator.target import Target
from generator.variant import Variant

RUNTIME = Path(__file__).resolve().parent / "runtime"

PROVENANCE_KEYS = frozenset(
    {
        *("gpu", "driver", "nvrtc", "space", "study", "date", "trials"),
        *("us", "floor_us", "ratio", "tie", "verified", "checks", "reason"),
    }
)
"""What every entry states about itself, as JSON values; more may be added."""

_INIT = '''\
"""RMSNorm for {title}. Written by Normforge; tune again instead of editing."""

from pathlib import Path

from .runtime.api import Package

_package = Package(Path(__file__).resolve().parent)

PROVENANCE = _package.provenance
explain = _package.explain
graph_pass = _package.graph_pass
inductor_backend = _package.inductor_backend
install = _package.install
installed = _package.installed
rms_norm = _package.rms_norm
rmsnorm_backward = _package.rmsnorm_backward
uninstall = _package.uninstall
warmup = _package.warmup

RMSNorm = _package.RMSNorm
RMSNorm.__module__ = __name__  # where pickle finds it

__all__ = [
    "PROVENANCE",
    "RMSNorm",
    "explain",
    "graph_pass",
    "inductor_backend",
    "install",
    "installed",
    "rms_norm",
    "rmsnorm_backward",
    "uninstall",
    "warmup",
]
'''


@dataclass(frozen=True)
class Entry:
    """One winner to emit. evidence: `measured` or `predicted`; provenance: PROVENANCE_KEYS."""

    problem: Problem
    variant: Variant
    compiled: Compiled
    evidence: str
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Emission:
    """What a call of `emit_package` did. refused: predicted winners that would have replaced
    measured ones; kept: other problems that were in the package and stay."""

    package: Path
    written: tuple[Problem, ...]
    refused: tuple[Problem, ...]
    kept: tuple[Problem, ...]


def check_writable(package: Path) -> None:
    """Raise NormforgeError unless a package can be written at `package`; creates its parent."""
    try:
        if package.exists() and not package.is_dir():
            raise NotADirectoryError(f"{package} is a file")
        package.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=package.parent):
            pass
    except OSError as error:
        raise NormforgeError(
            f"cannot write {package} ({error.strerror or error}): choose another folder with --out"
        ) from error


def check_package(package: Path, target: Target) -> None:
    """Raise NormforgeError unless winners for `target` can be added to what is at `package`."""
    check_writable(package)
    _read(package, target)


def emit_package(
    entries: Sequence[Entry],
    generics: Sequence[tuple[Variant, Compiled]],
    target: Target,
    package: Path,
    forwards: Forwards | None = None,
) -> Emission:
    """Write or extend the package at `package`.

    Problems that the package has and `entries` has not are kept with their kernels; a predicted
    entry never replaces a measured one. The generic kernels are always replaced by `generics`.
    forwards: the forward kernels, under the same rules; None keeps those that the package has.
    Raises NormforgeError, leaving the package as it was, for an entry that must not be emitted, a
    package of another GPU, a damaged package and a folder that cannot be written.
    """
    for entry in entries:
        _check(entry, target)
    for variant, compiled in generics:
        _check_cubin(variant, compiled, target)
    check_writable(package)
    with _locked(package):
        if _aside(package).exists() and not package.exists():
            _aside(package).rename(package)
        old = _read(package, target)
        known = {_problem(tuned): tuned for tuned in old.tuned} if old else {}
        files = _Files()
        tuned: dict[Problem, Tuned] = {}
        refused = []
        for entry in entries:
            existing = known.get(entry.problem)
            if existing and existing.evidence == "measured" and entry.evidence == "predicted":
                refused.append(entry.problem)
                continue
            kernel = files.add(entry.variant, entry.compiled, target)
            problem = entry.problem
            tuned[problem] = Tuned(
                *(problem.M, problem.N, problem.dtype, problem.weight_dtype),
                *(entry.evidence, kernel, entry.provenance),
            )
        written = tuple(tuned)
        generic = tuple(files.add(variant, compiled, target) for variant, compiled in generics)
        for problem, existing in known.items():
            if problem not in tuned:
                tuned[problem] = files.keep(existing, package)
        table = Table(_facts(target), tuple(tuned[p] for p in sorted(tuned)), generic)
        forward = _forward_table(forwards, package, target, files)
        _replace(package, files.contents, table, forward)
    kept = tuple(p for p in known if p not in written and p not in refused)
    return Emission(package, written, tuple(refused), kept)


def _check(entry: Entry, target: Target) -> None:
    what = f"{entry.problem}: {entry.variant}"
    if entry.variant.determinism == "none":
        raise NormforgeError(f"{what} is not deterministic and cannot be emitted")
    if entry.evidence not in ("measured", "predicted"):
        raise NormforgeError(f"{what} has evidence '{entry.evidence}': measured or predicted")
    missing = sorted(PROVENANCE_KEYS - entry.provenance.keys())
    if missing:
        raise NormforgeError(f"{what} does not state its {', '.join(missing)}")
    _check_cubin(entry.variant, entry.compiled, target)


def _check_cubin(variant: Variant | ForwardVariant, compiled: Compiled, target: Target) -> None:
    if compiled.error or not compiled.cubin:
        raise NormforgeError(f"{variant} was not compiled: {compiled.error or 'it has no cubin'}")
    if compiled.arch != target.arch:
        raise NormforgeError(f"{variant} is for {compiled.arch} and {target} is {target.arch}")


def _facts(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "title": target.title,
        "arch": target.arch,
        "sms": target.sms,
    }


def _problem(tuned: Tuned) -> Problem:
    spec = tuned.kernel.spec
    return Problem(
        *(tuned.M, tuned.N, tuned.dtype, tuned.weight_dtype), *(spec.offset, spec.residual)
    )


def _read(package: Path, target: Target) -> Table | None:
    """The table of the package that is there, None without one."""
    if not package.exists() or not any(package.iterdir()):
        return None
    try:
        table = Table.load(package)
    except (OSError, ValueError) as error:
        raise NormforgeError(
            f"{package} holds no readable package ({error}): move it away to start a new one"
        ) from error
    if table.target["arch"] != target.arch or table.target["name"] != target.name:
        raise NormforgeError(
            f"{package} is for {table.target['name']} and this run for {target}: "
            "choose another folder with --out"
        )
    return table


def _forward_table(
    forwards: Forwards | None, package: Path, target: Target, files: _Files
) -> ForwardTable | None:
    """The forward table of the new package, whose kernels join `files`; None without one."""
    try:
        old = ForwardTable.load(package)
    except ValueError as error:
        raise NormforgeError(
            f"{package} holds no readable forward table ({error}): move it away to start a new one"
        ) from error
    if old is None and forwards is None:
        return None
    known = {(e.M, e.N, e.dtype, e.weight_dtype): e for e in old.tuned} if old else {}
    tuned: dict[tuple[int, int, str, str], ForwardTuned] = {}
    for new in forwards.tuned if forwards else ():
        problem = new.problem
        key = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
        if key in known and (known[key].evidence, new.evidence) == ("measured", "predicted"):
            continue
        kernel = files.add_forward(new.variant, new.compiled, target)
        tuned[key] = ForwardTuned(*key, new.evidence, kernel, new.provenance)
    for key, entry in known.items():
        if key not in tuned:
            kernel = files.keep_forward(entry.kernel, package)
            tuned[key] = ForwardTuned(*key, entry.evidence, kernel, entry.provenance)
    if forwards is not None:
        generic = tuple(files.add_forward(*made, target) for made in forwards.generic)
    else:
        generic = tuple(files.keep_forward(kernel, package) for kernel in old.generic)  # type: ignore[union-attr]
    return ForwardTable(_facts(target), tuple(tuned[key] for key in sorted(tuned)), generic)


class _Files:
    """The kernels/ folder of the new package: content by file name."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def add(self, variant: Variant, compiled: Compiled, target: Target) -> Kernel:
        file = self._store(variant.id, compiled.digest, compiled.source.encode(), compiled.cubin)
        return Kernel(file, compiled.digest, variant.spec(target.sms))

    def add_forward(
        self, variant: ForwardVariant, compiled: Compiled, target: Target
    ) -> ForwardKernel:
        _check_cubin(variant, compiled, target)
        file = self._store(variant.id, compiled.digest, compiled.source.encode(), compiled.cubin)
        return ForwardKernel(file, compiled.digest, variant.spec(target.sms))

    def keep_forward(self, old: ForwardKernel, package: Path) -> ForwardKernel:
        """A forward taken over from the old package."""
        file = self._keep(old, package, f"forward {old.file}", "move the folder away")
        return ForwardKernel(file, old.digest, old.spec)

    def keep(self, tuned: Tuned, package: Path) -> Tuned:
        """The same entry with its kernel taken over from the old package."""
        old, what = tuned.kernel, f"kernel of {tuned.shape}"
        file = self._keep(old, package, what, "tune that shape again, or move the folder away")
        return Tuned(**{**vars(tuned), "kernel": Kernel(file, old.digest, old.spec)})

    def _keep(self, old: Kernel | ForwardKernel, package: Path, what: str, advice: str) -> str:
        """The file's name in the new package."""
        try:
            cubin = old.read_cubin(package)
            source = (package / "kernels" / f"{old.file}.cu").read_bytes()
        except (OSError, RuntimeError) as error:
            raise NormforgeError(
                f"{package}: the {what} cannot be kept ({error}): {advice} to start a new one"
            ) from error
        return self._store(old.spec.name, old.digest, source, cubin)

    def _store(self, name: str, digest: str, source: bytes, cubin: bytes) -> str:
        # One variant has two cubins when the templates changed between two winners that share it.
        taken = self.contents.get(f"{name}.cubin")
        file = name if taken in (None, cubin) else f"{name}_{digest}"
        self.contents[f"{file}.cubin"] = cubin
        self.contents[f"{file}.cu"] = source
        return file


def _replace(
    package: Path, kernels: dict[str, bytes], table: Table, forward: ForwardTable | None
) -> None:
    fresh = package.parent / f".{package.name}.part"
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed here
        (fresh / "kernels").mkdir(parents=True)
        (fresh / "runtime").mkdir()
        for source in sorted(RUNTIME.glob("*.py")):
            shutil.copyfile(source, fresh / "runtime" / source.name)
        for name, content in kernels.items():
            (fresh / "kernels" / name).write_bytes(content)
        (fresh / "__init__.py").write_text(_INIT.format(title=table.target["title"]))
        (fresh / TABLE).write_text(_json(table.to_json()))
        if forward is not None:
            (fresh / FORWARD_TABLE).write_text(_json(forward.to_json()))
        _swap(fresh, package)
    except OSError as error:
        raise NormforgeError(
            f"cannot write {package} ({error.strerror or error}); what was there is unchanged"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _swap(fresh: Path, package: Path) -> None:
    """Put `fresh` where `package` is; the old package may be left at `fresh`."""
    if not package.exists():
        fresh.rename(package)
        return
    try:
        _exchange(fresh, package)
    except OSError:
        # A file system without the exchange: two renames, undone if the second one fails, and by
        # the next run if this one is killed between them.
        old = _aside(package)
        shutil.rmtree(old, ignore_errors=True)
        package.rename(old)
        try:
            fresh.rename(package)
        except OSError:
            old.rename(package)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _aside(package: Path) -> Path:
    return package.parent / f".{package.name}.old"


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one step (Linux renameat2 with RENAME_EXCHANGE). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError("this system cannot exchange two names")
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def _locked(package: Path) -> Iterator[None]:
    """One writer at a time: two runs that extend one package must see each other's winners."""
    folder = os.open(package.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
