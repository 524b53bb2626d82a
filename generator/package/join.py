"""Joins packages of one operation and GPU that were tuned apart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

from generator.errors import NormforgeError
from generator.kernels.code_digest import compiler_input
from generator.kernels.nvrtc import compile_source, nvrtc_version
from generator.package.atomic_folder import check_writable, replacing_folder
from generator.package.emit import check_kernels, emit_package, load_table, read_forward_table
from generator.package.entries import Entry, Forwards, problem_of
from generator.package.sources import variant_of
from generator.studies.records import StudyFacts
from generator.target import Target, find_target
from normforge.table import TABLE, TableOf


def join_package(source: Path, package: Path) -> tuple[int, tuple[str, ...]]:
    """Extend a package by the tuned kernels of another one that it lacks, or that were chosen later
    than its own, but for predicted ones where its own are measured. Returns how many these are, and
    the shapes whose bits may change because they had another kernel. Fallback kernels stay. Where
    there is no package yet, it becomes a copy of the other one, if that has all its kernels.

    Raises NormforgeError, leaving the package as it was, for packages that cannot be read or are
    of different GPUs, and where a kernel is another one with this NVRTC and today's templates.
    """
    table = load_table(source)
    if not package.exists():
        check_kernels(source, table)
        check_writable(package)
        with replacing_folder(package) as fresh:
            shutil.copytree(source, fresh, dirs_exist_ok=True)
        return len(table.tuned), ()
    own = load_table(package)
    if own.target != table.target:
        raise NormforgeError(f"{source} and {package} are for different GPUs: join those of one")
    target = replace(find_target(str(table.target["name"])), sms=int(table.target["sms"]))
    entries = [*_later(table, own, target)]
    theirs = read_forward_table(source)
    forwards = [*_later(theirs, read_forward_table(package), target)] if theirs else []
    if not entries and not forwards:
        return 0, ()
    more = Forwards(tuple(forwards), ()) if forwards else None
    emission = emit_package(entries, (), target, package, more, keep_fallbacks=True)
    return len(entries) + len(forwards) - len(emission.refused), emission.replaced


def check_joinable(folders: Sequence[Path], into: Path, journals: Sequence[BaseStorage]) -> None:
    """Raise NormforgeError unless all packages in some folders can be read, and all studies are of
    the same GPU: nothing is to be written where a part of it will be refused. journals: the studies
    of all folders."""
    for folder in (*folders, into):
        for package in folder.glob(f"*/{TABLE}"):
            load_table(package.parent)
            read_forward_table(package.parent)
    names = (study.study_name for journal in journals for study in journal.get_all_studies())
    gpus = {facts.gpu for facts in map(StudyFacts.of_name, names) if facts is not None}
    if len(gpus) > 1:
        said = " and ".join(sorted(gpus))
        raise NormforgeError(f"these folders have studies of {said}: join those of one GPU")


def _later(table: TableOf[Any], own: TableOf[Any] | None, target: Target) -> Iterator[Entry]:
    """The kernels of a table that another one lacks, or has of an earlier date."""
    dates = {problem_of(tuned): tuned.provenance["date"] for tuned in (own.tuned if own else ())}
    for tuned in table.tuned:
        problem, kernel = problem_of(tuned), tuned.kernel
        if tuned.provenance["date"] <= dates.get(problem, ""):
            continue
        variant = variant_of(kernel)
        source, register_cap = compiler_input(variant, comments=False)
        compiled = compile_source(source, target.arch, register_cap)
        if compiled.digest != kernel.digest:
            raise NormforgeError(
                f"the kernel of {problem} was made by NVRTC {kernel.nvrtc} and is another one with"
                f" {nvrtc_version()} and today's templates: join it where it was tuned, or tune"
                " that shape again"
            )
        yield Entry(problem, variant, compiled, tuned.evidence, tuned.provenance)
