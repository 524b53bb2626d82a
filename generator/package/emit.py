"""Writes winners to an importable package, such as `generated/<gpu>/rmsnorm_backward/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.code_digest import AnyVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.package.atomic_folder import check_writable, replacing_folder, writer_lock
from generator.package.cubin_archive import check_cubins
from generator.package.entries import BITS, PROVENANCE_KEYS, Emission, Entry, Forwards, problem_of
from generator.package.files import KernelFiles, write_package
from generator.package.standalone import add_library, stands_alone
from generator.problem import Problem
from generator.target import Target
from normforge.table import ForwardTable, KernelOf, Table, TableOf, TunedOf

ORDER_OF_ROWS = ("cluster", "threads_per_row", "vector_bytes")
"""Fields on which the bits of dx, and of a forward in registers, depend beside the row."""
ORDER_OF_DW = ("rows_per_cta", "run_rows", "group_rows")
"""The fields on which the bits of a batch-invariant dw depend, beside ORDER_OF_ROWS."""


def check_package(package: Path, target: Target) -> None:
    """Raise NormforgeError unless winners for `target` can be added to what is at `package`."""
    check_writable(package)
    table = _read_table(package, target)
    if table is not None:
        check_kernels(package, table)


def check_kernels(package: Path, table: Table) -> None:
    """Raise NormforgeError unless a package has all kernels of its table, and of its forwards'."""
    forward = read_forward_table(package)
    forwards: Iterator[KernelOf[Any]] = forward.kernels() if forward else iter(())
    try:
        check_cubins(package, chain(table.kernels(), forwards))
    except (OSError, ValueError) as error:
        raise NormforgeError(
            f"the kernels of {package} are damaged ({error}): restore them, or move the folder "
            "away, and the same command writes it again from the trials that it finds"
        ) from error


def emit_package(
    entries: Sequence[Entry],
    fallback: Sequence[tuple[Variant, Compiled]],
    target: Target,
    package: Path,
    forwards: Forwards | None = None,
    *,
    keep_fallbacks: bool = False,
    standalone: bool = False,
) -> Emission:
    """Write or extend the package at `package`.

    Problems that only the package has keep their kernels. A predicted entry never replaces a
    measured one; one that says the same as the package leaves the old entry with its date.
    fallback: the fallback kernels; keep_fallbacks: and those of the package for other rows.
    forwards: the forward kernels, under the same rules; None keeps the package's. standalone:
    whether it gets a copy of the library, which a package keeps that has one. Raises
    NormforgeError, leaving the package as it was, for an entry that must not be emitted, a package
    that is damaged or of another GPU, and a folder that cannot be written.
    """
    for entry in entries:
        _check_entry(entry, target)
    for variant, compiled in fallback:
        _check_cubin(variant, compiled, target)
    for forward in forwards.tuned if forwards else ():
        _check_cubin(forward.variant, forward.compiled, target)
    for made in forwards.fallback if forwards else ():
        _check_cubin(*made, target)
    check_writable(package)
    with writer_lock(package):
        old, old_forward = _read_table(package, target), read_forward_table(package)
        files = KernelFiles(package, target.sms)
        replaced: set[Problem] = set()
        tuned, refused = _merge(entries, old, files, "kernel", replaced)
        kept = old.fallback if old and keep_fallbacks else ()
        table = Table(_target_facts(target), tuned, _fallbacks(fallback, kept, files))
        forward_table = _forward_table(
            forwards, old_forward, files, target, keep_fallbacks, replaced
        )
        _check_arithmetic(table, forward_table)
        with replacing_folder(package) as fresh:
            write_package(fresh, files, table, forward_table)
            if standalone or stands_alone(package):
                add_library(fresh)
    shapes = (str(problem).removeprefix(f"{problem.operation}:") for problem in sorted(replaced))
    return Emission(package, refused, tuple(dict.fromkeys(shapes)))


def problems_in(package: Path, target: Target) -> set[Problem]:
    """Return the problems that the package at `package` has a winner for. Raises NormforgeError."""
    table = _read_table(package, target)
    return {problem_of(tuned) for tuned in table.tuned} if table else set()


def _merge(
    entries: Sequence[Entry],
    old: TableOf[Any] | None,
    files: KernelFiles,
    what: str,
    replaced: set[Problem],
) -> tuple[tuple[TunedOf[Any], ...], tuple[Problem, ...]]:
    """The tuned kernels of the new package, sorted by problem: those of entries, and what the old
    table has beside them; all join `files`. And the problems whose measured kernels stay; those
    that get another kernel join `replaced`."""
    known = {problem_of(tuned): tuned for tuned in old.tuned} if old else {}
    tuned: dict[Problem, TunedOf[Any]] = {}
    refused = []
    for entry in entries:
        problem, existing = entry.problem, known.get(entry.problem)
        if existing and (existing.evidence, entry.evidence) == ("measured", "predicted"):
            refused.append(problem)
            continue
        kernel = files.add(entry.variant, entry.compiled, tuned=True)
        shape = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
        fresh = TunedOf(*shape, entry.evidence, kernel, entry.provenance)
        if existing and _launched(existing) != _launched(fresh):
            replaced.add(problem)
        if existing and _same_kernel(existing, fresh):
            fresh = replace(fresh, provenance=existing.provenance)
        tuned[problem] = fresh
    for problem, existing in known.items():
        if problem not in tuned:
            kernel = files.keep(existing.kernel, f"{what} of {existing.shape}", tuned=True)
            tuned[problem] = replace(existing, kernel=kernel)
    return tuple(tuned[p] for p in sorted(tuned)), tuple(refused)


def _launched(tuned: TunedOf[Any]) -> tuple[object, ...]:
    """Return the facts from which the bits of a shape follow."""
    return tuned.kernel.digest, replace(tuned.kernel.spec, name="")


def _same_kernel(old: TunedOf[Any], new: TunedOf[Any]) -> bool:
    """Return True if two entries of a shape have the same kernel, evidence, times and study. The
    old entry then keeps its number of trials, date and machine."""

    def said(entry: TunedOf[Any]) -> tuple[object, ...]:
        facts = entry.provenance
        return (
            entry.evidence,
            entry.kernel.digest,
            entry.kernel.config,
            entry.kernel.spec,
            *(
                facts.get(key)
                for key in ("us", "floor_us", "study", "code", "checks", "verified", "nvrtc", BITS)
            ),
        )

    return said(old) == said(new)


def _check_entry(entry: Entry, target: Target) -> None:
    what = f"{entry.problem}: {entry.variant}"
    if isinstance(entry.variant, Variant) and entry.variant.determinism == "none":
        raise NormforgeError(f"{what} is not deterministic and cannot be emitted")
    if entry.evidence not in ("measured", "predicted"):
        raise NormforgeError(f"{what} has evidence '{entry.evidence}': measured or predicted")
    missing = sorted(PROVENANCE_KEYS - entry.provenance.keys())
    if missing:
        raise NormforgeError(f"{what} does not state its {', '.join(missing)}")
    _check_cubin(entry.variant, entry.compiled, target)


def _check_arithmetic(table: Table, forward: ForwardTable | None) -> None:
    """Raise NormforgeError unless all batch-invariant kernels of a width add up in one order, which
    search_spaces/rmsnorm_invariant_backward.yaml fixes."""
    if not any(kernel.spec.run_rows for kernel in table.kernels()):
        return
    found: dict[tuple[str, int, str], tuple[str, list[Any]]] = {}
    tables: list[tuple[str, Table | ForwardTable, tuple[str, ...]]]
    tables = [("dx and dw", table, (*ORDER_OF_ROWS, *ORDER_OF_DW))]
    tables += [("y", forward, (*ORDER_OF_ROWS, "form"))] if forward else []
    for what, of, names in tables:
        for entry in of.tuned:
            order = [entry.kernel.config.get(name) for name in names]
            width = (what, entry.N, entry.dtype)
            shape, other = found.setdefault(width, (entry.shape, order))
            if order != other:
                raise NormforgeError(
                    f"{what} of {entry.shape} would have other bits than those of {shape}: tune "
                    "all shapes of a width in one space, or move the package away to start anew"
                )


def _check_cubin(variant: AnyVariant, compiled: Compiled, target: Target) -> None:
    if compiled.error or not compiled.cubin:
        raise NormforgeError(f"{variant} was not compiled: {compiled.error or 'it has no cubin'}")
    if compiled.arch != target.arch:
        raise NormforgeError(f"{variant} is for {compiled.arch} and {target} is {target.arch}")


def _target_facts(target: Target) -> dict[str, Any]:
    return {"name": target.name, "title": target.title, "arch": target.arch, "sms": target.sms}


def load_table(package: Path) -> Table:
    """The table of a package. Raises NormforgeError where none can be read."""
    try:
        return Table.load(package)
    except (OSError, ValueError) as error:
        raise NormforgeError(
            f"{package} holds no readable package ({error}): move it away to start a new one"
        ) from error


def _read_table(package: Path, target: Target) -> Table | None:
    """The table of the package that is there, None without one."""
    if not package.exists() or not any(package.iterdir()):
        return None
    table = load_table(package)
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
    forwards: Forwards | None,
    old: ForwardTable | None,
    files: KernelFiles,
    target: Target,
    keep_fallbacks: bool,
    replaced: set[Problem],
) -> ForwardTable | None:
    """The forward table of the new package, whose kernels join `files`; None without one. Problems
    that get another forward join `replaced`."""
    if old is None and forwards is None:
        return None
    tuned, _ = _merge(forwards.tuned if forwards else (), old, files, "forward", replaced)
    kept = old.fallback if old and (keep_fallbacks or forwards is None) else ()
    fallback = _fallbacks(forwards.fallback if forwards else (), kept, files)
    return ForwardTable(_target_facts(target), tuned, fallback)


def _fallbacks(
    new: Sequence[tuple[Any, Compiled]], kept: Sequence[KernelOf[Any]], files: KernelFiles
) -> tuple[KernelOf[Any], ...]:
    """The fallback kernels of a new package: those of `kept`, each in its place unless a new one
    takes the same rows, and the other new ones behind them. Forwards that differ in their form may
    have different bits, and do not take each other's place."""

    def rows(kernel: KernelOf[Any]) -> tuple[object, ...]:
        spec, form = kernel.spec, kernel.config.get("form")
        return (spec.N, spec.vector_bytes, spec.dtype, spec.weight_dtype, form)

    made = [files.add(*one, tuned=False) for one in new]
    fresh = {rows(kernel): kernel for kernel in made}
    found = [
        fresh.pop(rows(old))
        if rows(old) in fresh
        else files.keep(old, f"kernel {old.file}", tuned=False)
        for old in kept
    ]
    return (*found, *fresh.values())
