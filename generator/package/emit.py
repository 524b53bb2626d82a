"""Winners to the importable package `generated/<gpu>/rmsnorm_backward/`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.package.atomic_folder import check_writable, locked, replaced
from generator.package.entries import PROVENANCE_KEYS, Emission, Entry, Forwards
from generator.package.files import KernelFiles, write_package
from generator.problem import Problem
from generator.runtime.forward_table import ForwardTable, ForwardTuned
from generator.runtime.table import Table, Tuned
from generator.target import Target


def check_package(package: Path, target: Target) -> None:
    """Raise NormforgeError unless winners for `target` can be added to what is at `package`."""
    check_writable(package)
    _read(package, target)
    read_forward_table(package)


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
    with locked(package):
        old = _read(package, target)
        known = {_problem(tuned): tuned for tuned in old.tuned} if old else {}
        files = KernelFiles()
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
        with replaced(package) as fresh:
            write_package(fresh, files, table, forward)
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


def read_forward_table(package: Path) -> ForwardTable | None:
    """The forward table of the package that is there, None without one. Raises NormforgeError."""
    try:
        return ForwardTable.load(package)
    except (OSError, ValueError) as error:
        raise NormforgeError(
            f"{package} holds no readable forward table ({error}): move it away to start a new one"
        ) from error


def _forward_table(
    forwards: Forwards | None, package: Path, target: Target, files: KernelFiles
) -> ForwardTable | None:
    """The forward table of the new package, whose kernels join `files`; None without one."""
    old = read_forward_table(package)
    if old is None and forwards is None:
        return None
    known = {(e.M, e.N, e.dtype, e.weight_dtype): e for e in old.tuned} if old else {}
    tuned: dict[tuple[int, int, str, str], ForwardTuned] = {}
    for new in forwards.tuned if forwards else ():
        problem = new.problem
        key = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
        if key in known and (known[key].evidence, new.evidence) == ("measured", "predicted"):
            continue
        _check_cubin(new.variant, new.compiled, target)
        kernel = files.add_forward(new.variant, new.compiled, target)
        tuned[key] = ForwardTuned(*key, new.evidence, kernel, new.provenance)
    for key, entry in known.items():
        if key not in tuned:
            kernel = files.keep_forward(entry.kernel, package)
            tuned[key] = ForwardTuned(*key, entry.evidence, kernel, entry.provenance)
    if forwards is not None:
        for variant, compiled in forwards.generic:
            _check_cubin(variant, compiled, target)
        generic = tuple(files.add_forward(*made, target) for made in forwards.generic)
    else:
        generic = tuple(files.keep_forward(kernel, package) for kernel in old.generic)  # type: ignore[union-attr]
    return ForwardTable(_facts(target), tuple(tuned[key] for key in sorted(tuned)), generic)
