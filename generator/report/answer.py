"""An explanation as text and as a document."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.problem import Problem
from generator.report.explain import Explanation, KnobCost, Timed, Verdict
from generator.report.reason import reason
from generator.report.text import number
from generator.text_table import columns
from normforge.table import TABLE, Choice, Table

_SHOWN = 20
"""Knob values that are shown, those that change the time most first."""


def choose_from_package(folder: Path, problem: Problem) -> Choice | None:
    """Return what the tables of the emitted package choose for the shape, for plain shapes only;
    None where there are none. Nothing of the package is run: whoever looks at a folder need not
    trust it.

    Raises NormforgeError for a table that is damaged."""
    if "+" in str(problem) or not (folder / TABLE).exists():
        return None
    try:
        table = Table.load(folder)
    except (OSError, ValueError) as error:
        raise NormforgeError(str(error)) from error
    return table.choose(problem.M, problem.N, problem.dtype, problem.weight_dtype)


def explain_from_package(folder: Path, problem: Problem) -> dict[str, Any] | None:
    """Return what the package's own `explain` says of the shape; None as in `choose_from_package`.
    This needs PyTorch."""
    if choose_from_package(folder, problem) is None:
        return None
    from normforge.frontends.row_functions import RowFunctions
    from normforge.operations import OPERATIONS
    from normforge.packages import open_package

    try:
        package = open_package(str(folder / "__init__.py"), str(folder), problem.operation)
    except (OSError, ValueError, ImportError) as error:
        raise NormforgeError(str(error)) from error
    if isinstance(package, RowFunctions):  # whose own takes a direction, a form and so on
        package = package.server(OPERATIONS[problem.operation])
    served: dict[str, Any] = package.explain(
        problem.M, problem.N, problem.dtype, problem.weight_dtype
    )
    return served


def render_answer(why: Explanation, verdict: Verdict | None, served: Choice | None) -> str:
    """Render why the winner serves a shape, or, with a verdict, why another config does not."""
    if verdict is not None:
        return _why_not(why, verdict)
    study, winner = why.study, why.study.winner
    counts = ", ".join(f"{count} {outcome}" for outcome, count in study.counts.items())
    parts = []
    if winner is None:
        parts.append(f"{study.problem} on {study.gpu}: no winner yet; the fastest so far is")
    else:
        parts.append(
            f"{study.problem} on {study.gpu}: {winner.variant}\n"
            f"  {number(winner.result.us)} us, {number(winner.result.ratio, 3)} x {winner.floor}, "
            f"{winner.evidence}, determinism {winner.result.determinism}\n"
            f"  {reason(study)}\n"
            f"  checks: {', '.join(winner.result.checks)}"
        )
    if served is not None:
        kernel = served.kernel.file if served.kernel else "none"
        same = winner is not None and kernel == winner.variant
        parts[0] += f"\n  package: {'the same kernel' if same else kernel} ({served.reason})"
    parts[0] += f"\n  {len(study.records)} trials: {counts}"
    parts.append("Config\n" + columns(list(why.winner.items())))
    if winner is not None:
        how = "side by side" if winner.evidence == "measured" else "predicted"
        tied = [(f.variant, number(f.us), number(f.ratio, 3)) for f in winner.tied]
        parts.append(columns([(f"tied for the win (finals, {how})", "us", "x floor"), *tied]))
    strategies = [
        (
            str(strategy) + ("" if strategy.deterministic else " *"),
            number(timed.us),
            number(timed.ratio, 3),
            _behind(timed),
            timed.variant,
        )
        for strategy, timed in why.runners_up
    ]
    parts.append(
        "Runners-up by strategy, from single trials of the search (* may not win)\n"
        + columns([("strategy", "us", "x floor", "vs winner", "its fastest trial"), *strategies])
    )
    costs = sorted(why.costs, key=lambda cost: -abs(_weight(cost)))
    if costs:
        rows = [
            (f"{cost.knob}={cost.value}", _behind(cost.alone), _behind(cost.best), cost.trials)
            for cost in costs[:_SHOWN]
        ]
        parts.append(
            "What changing one knob costs, vs the winner's trial. 'alone': nothing else changes;\n"
            "'best with it': the fastest trial that has the value\n"
            + columns([("instead of the winner's", "alone", "best with it", "trials"), *rows])
        )
    return "\n\n".join(parts)


def _why_not(why: Explanation, verdict: Verdict) -> str:
    study = why.study
    winner = study.winner
    lines = [f"{study.problem} on {study.gpu}: {verdict.kind.replace('_', ' ')}"]
    lines += [f"  {sentence}" for sentence in verdict.sentences]
    if verdict.nearest is not None:
        lines.append(f"  that one: {_line(verdict.nearest)}")
    if verdict.best is not None and verdict.best != verdict.record:
        lines.append(f"  the fastest trial with these values: {_line(verdict.best)}")
    if winner is not None:
        us, ratio = number(winner.result.us), number(winner.result.ratio, 3)
        lines.append(
            f"  the winner: {winner.variant}, {us} us, {ratio} x {winner.floor}, in the finals"
        )
    changed = [(n, v, why.winner.get(n)) for n, v in verdict.config.items() if v != why.winner[n]]
    table = columns([("knob", "asked about", "winner"), *changed]) if changed else ""
    return "\n".join(lines) + (f"\n\n{table}" if table else "")


def _line(timed: Timed) -> str:
    if timed.ratio is None:
        return f"{timed.variant}, {timed.outcome}: {timed.note}"
    behind = "" if timed.behind is None else f", {timed.behind:+.1%} vs the winner"
    outcome = "" if timed.outcome == "ok" else f", {timed.outcome}"
    us, ratio = number(timed.us), number(timed.ratio, 3)
    return f"{timed.variant}, {us} us, {ratio} x floor{behind}{outcome}"


def _behind(timed: Timed | None) -> str:
    return "-" if timed is None or timed.behind is None else f"{timed.behind:+.1%}"


def _weight(cost: KnobCost) -> float:
    for timed in (cost.alone, cost.best):
        if timed is not None and timed.behind is not None:
            return timed.behind
    return 0.0


def document(
    why: Explanation, verdict: Verdict | None, served: dict[str, Any] | None
) -> dict[str, Any]:
    """The explanation as one JSON-able document."""
    study = why.study
    found: dict[str, Any] = {
        "shape": str(study.problem),
        "gpu": study.gpu,
        "evidence": study.evidence,
        "study": study.name,
        "trials": len(study.records),
        "outcomes": study.counts,
        "winner": {**study.winner.to_json(), "reason": reason(study)} if study.winner else None,
        "config": dict(why.winner),
        "package": served,
        "strategies": [
            {"strategy": str(s), "ineligible": not s.deterministic, **asdict(timed)}
            for s, timed in why.runners_up
        ],
        "knobs": [asdict(cost) for cost in why.costs],
    }
    if verdict is not None:
        found["why_not"] = asdict(verdict)
    return found
