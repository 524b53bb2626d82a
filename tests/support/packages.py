"""The helpers of the tests of packages: entries whose machine code nobody launches, and their
files."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant, make_variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Emission, Entry
from generator.package.fallback_kernels import fallback_variants, first_choices
from generator.package.sources import variant_of
from generator.problem import Problem
from generator.space.load import load_space
from generator.target import Target, find_target
from normforge.cubins import CUBINS
from normforge.table import Table
from tests.support.samples import space_of

SPACE = load_space()
H200 = find_target("h200")
BEFORE = Path(__file__).parent.parent / "data" / "before_library.tar.xz"
"""A package that the commit before the library wrote, of two shapes of the H200 with their cubins:
with a runtime and headers of its own."""


def forget(package: str) -> None:
    """Let the next import of a package read its files again."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()


def unsealed(text: str) -> str:
    """The text of a table without its digest, to be changed by who knows what he does."""
    return re.sub(r'^ "digest": "[0-9a-f]{16}",\n', "", text, count=1, flags=re.MULTILINE)


def digest_of(cubin: bytes) -> str:
    """Return the digest of a cubin in the form that tables have."""
    return hashlib.sha256(cubin).hexdigest()[:16]


def archived_cubins(package: Path) -> dict[str, bytes]:
    """All cubins of a package by name, as any program unpacks them."""
    found = {}
    with tarfile.open(package / CUBINS) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removesuffix(".cubin")] = file.read()
    return found


def variant_for(problem: Problem, target: Target = H200, **knobs: Any) -> Variant:
    """A legal variant with plain loads; `knobs` are those of the space."""
    row = {"threads_per_row": problem.N // 8, "rows_per_cta": 1024 // problem.N * 2}
    config = SPACE.normalize({"pipeline": "direct"} | row | knobs, problem, target)
    assert SPACE.reject(config, problem, target) is None, SPACE.reject(config, problem, target)
    return make_variant(config, problem)


def compiled(variant: Variant, text: str = "cubin", arch: str = H200.arch) -> Compiled:
    """Stands for a compiled variant where nothing gets launched."""
    return Compiled(arch, f"// {variant}\n", f"{text} {variant}".encode(), {}, "13", False, "")


def entry(shape: str, evidence: str = "measured", text: str = "cubin", **knobs: Any) -> Entry:
    problem = Problem.parse(shape)
    variant = variant_for(problem, **knobs)
    provenance = dict.fromkeys(PROVENANCE_KEYS, "known") | {"us": 12.5, "tie": ["another"]}
    return Entry(problem, variant, compiled(variant, text), evidence, provenance)


def first_entry(problem: Problem | str) -> Entry:
    """Return an entry for a problem of any operation, with the first legal config of its space."""
    if isinstance(problem, str):
        problem = Problem.parse(problem)
    variant = make_variant(next(space_of(problem.operation).legal(problem, H200)), problem)
    facts = dict.fromkeys(PROVENANCE_KEYS, "known")
    return Entry(problem, variant, compiled(variant), "measured", facts)


def emit_first(folder: Path, *problems: str) -> list[Problem]:
    """Emit a package with such entries, whose sources are those of their variants; the problems."""
    entries = [first_entry(problem) for problem in problems]
    emit_package(entries, [], H200, folder)
    found = {variant.id: variant for variant in map(variant_of, Table.load(folder).kernels())}
    assert found == {entry.variant.id: entry.variant for entry in entries}
    return [entry.problem for entry in entries]


@cache
def fallbacks() -> list[tuple[Variant, Compiled]]:
    return [(variant, compiled(variant)) for variant in first_choices(fallback_variants(H200))]


def put(package: Path, *entries: Entry, fallback: Any = None, standalone: bool = False) -> Emission:
    """Emit a package with these entries. fallback: all those of the H200 by default."""
    made = fallbacks() if fallback is None else fallback
    return emit_package(entries, made, H200, package, standalone=standalone)


def snapshot(package: Path) -> dict[str, bytes]:
    """The content of all files by their paths."""
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
