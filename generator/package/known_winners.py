"""The winners that a package holds: where a search starts that has no study of its own yet."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.operations import OPERATIONS
from generator.package.entries import problem_of
from generator.package.files import operation_of_table
from generator.problem import Problem
from generator.result import Result
from generator.studies.records import Winner
from normforge.table import ForwardTable, Table, TunedOf


def known_winners(package: Path) -> list[Winner]:
    """The winners of a package, without the others of their finals. None where there is no package,
    or one that cannot be read: a search goes on without them."""
    with suppress(*_UNREADABLE):
        table = Table.load(package)
        return [_winner(tuned, problem_of(tuned), table) for tuned in table.tuned]
    return []


def known_forwards(package: Path) -> list[Winner]:
    """Return the winners of its forwards."""
    with suppress(*_UNREADABLE):
        table, forward = Table.load(package), ForwardTable.load(package)
        of = OPERATIONS[operation_of_table(table)[0]].forward
        found = forward.tuned if forward else ()
        shapes = ((t.M, t.N, t.dtype, t.weight_dtype) for t in found)
        problems = (Problem(*shape, operation=of) for shape in shapes)
        return [_winner(tuned, p, table) for tuned, p in zip(found, problems, strict=True)]
    return []


_UNREADABLE = (OSError, ValueError, KeyError, NormforgeError)


def _winner(tuned: TunedOf[Any], problem: Problem, table: Table) -> Winner:
    """Forwards of older packages state less: they had no studies."""
    kernel, facts = tuned.kernel, tuned.provenance
    return Winner(
        problem=problem,
        target=str(table.target["name"]),
        config=kernel.config,
        variant=kernel.spec.name,
        cubin=kernel.digest,
        result=Result(
            "ok",
            us=facts.get("us"),
            floor_us=facts.get("floor_us"),
            ratio=facts.get("ratio"),
            determinism=facts.get("verified", "unverified"),
        ),
        evidence=tuned.evidence,
        tied=(),
        fastest_nondeterministic=None,
        trials=facts.get("trials", 0),
        counts=facts.get("outcomes", {}),
        study=facts.get("study", ""),
        space_hash=facts.get("space", ""),
        reason=facts["reason"],
        date=facts["date"],
    )
