"""The winners that a package holds: where a search starts that has no study of its own yet."""

from __future__ import annotations

from pathlib import Path

from generator.errors import NormforgeError
from generator.package.entries import problem_of
from generator.result import Result
from generator.studies.records import Winner
from normforge.table import Table, Tuned


def known_winners(package: Path) -> list[Winner]:
    """The winners of a package, without the others of their finals. None where there is no package,
    or one that cannot be read: a search goes on without them."""
    try:
        table = Table.load(package)
        return [_winner(tuned, str(table.target["name"])) for tuned in table.tuned]
    except (OSError, ValueError, KeyError, NormforgeError):
        return []


def _winner(tuned: Tuned, target: str) -> Winner:
    kernel, facts = tuned.kernel, tuned.provenance
    return Winner(
        problem=problem_of(tuned),
        target=target,
        config=kernel.config,
        variant=kernel.spec.name,
        cubin=kernel.digest,
        result=Result(
            "ok",
            us=facts["us"],
            floor_us=facts["floor_us"],
            ratio=facts["ratio"],
            determinism=facts["verified"],
        ),
        evidence=tuned.evidence,
        tied=(),
        fastest_nondeterministic=None,
        trials=facts["trials"],
        counts=facts.get("outcomes", {}),
        study=facts["study"],
        space_hash=facts["space"],
        reason=facts["reason"],
        date=facts["date"],
    )
