"""Renders the report as text, with the content of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from generator.report.peers import Comparison
from generator.report.standing_out import BEHIND
from generator.report.summary import (
    Grid,
    Summary,
    bandwidth_share,
    runners_up,
)
from generator.studies.reader import Study
from generator.studies.records import PLAIN_FLOOR
from generator.text_table import columns

_SHORT = 3
"""Letters of a strategy in the map of winners, which then fits a terminal."""


def render_text(summary: Summary) -> str:
    """The summary of one GPU, about a screen for every ten shapes."""
    parts = [_head(summary)]
    names = sorted({_strategy(study) for study in summary.studies} - {"-"})
    legend = ", ".join(f"{name[:_SHORT]} = {name}" for name in names)
    for title, cell in (
        (f"Winning strategy ({legend})", lambda study: _strategy(study)[:_SHORT]),
        ("Ratio to the floor", lambda study: _ratio(study, 2)),
        ("Overhead of batch invariance", lambda study: number(summary.price_of(study)))
        if summary.free
        else ("Overhead of determinism", lambda study: number(study.overhead)),
        ("Percent of the nominal bandwidth", lambda study: _percent(bandwidth_share(study))),
    ):
        parts += [_map(title, grid, cell) for grid in summary.grids]
    if summary.comparison:
        parts.append(_peers(summary.comparison))
    if summary.standing_out:
        parts.append(_standing_out(summary))
    parts.append(_standings(summary))
    if summary.knobs:
        parts.append(_knobs(summary))
    outcomes = [
        (outcome, count, f"{count / summary.trials:.1%}", summary.meaning[outcome])
        for outcome, count in summary.outcomes.items()
    ]
    parts.append(_table("Outcomes", ("outcome", "trials", "share", ""), outcomes))
    if summary.reasons:
        reasons = [(count, outcome, note) for outcome, note, count in summary.reasons]
        parts.append(_table("Commonest reasons", ("trials", "outcome", "reason"), reasons))
    parts.append(_table("Studies", _STUDY_HEAD, map(_study, summary.studies)))
    if summary.predicted:
        parts.append(_predicted(summary))
    parts.append(f"Every trial: {summary.dashboard}")
    return "\n\n".join(parts)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return f"{title}\n" + columns([head, *rows])


def _head(summary: Summary) -> str:
    """Render the lines on how much there is, with the means."""
    first, last = summary.dates
    when = f", {first}" + (f" to {last}" if last != first else "") if first else ""
    lines = [
        f"Normforge on {summary.gpu}: {len(summary.studies)} shapes, {summary.trials} trials, "
        f"{summary.evidence}{when}",
        f"Time over the floor, geometric mean of {summary.ratio_set}: {number(summary.ratio, 3)}",
        f"Overhead of batch invariance, geometric mean: {number(summary.price, 3)} "
        "(winner over the winner whose bits may depend on the batch)"
        if summary.free
        else f"Overhead of determinism, geometric mean: {number(summary.overhead, 3)} "
        "(winner over the fastest variant whose bits change; those get few trials)",
    ]
    if summary.comparison:
        lines.append(_compared(summary.comparison))
    if summary.plain_floors:
        lines.append(f"* {summary.plain_floors} shapes, not in the mean: over {PLAIN_FLOOR}")
    return "\n".join(lines)


def _compared(comparison: Comparison) -> str:
    least, shape = comparison.least
    return (
        f"Compared with peers, {len(comparison.rows)} shapes in one run: "
        f"{number(comparison.ours, 3)} of the floor; "
        f"the fastest peer takes at least {number(least, 3)} times as long ({shape})"
    )


def _peers(comparison: Comparison) -> str:
    rows = [
        (peer.title, peer.shapes, number(peer.over_floor), number(peer.over_ours))
        for peer in comparison.standings
    ]
    return _table("Peers", ("implementation", "shapes", "x floor", "x ours"), rows)


def _standings(summary: Summary) -> str:
    rows = [
        (
            str(standing.strategy) + ("" if standing.strategy.deterministic else " *"),
            number(standing.typical, 3),
            number(min(ratio for _, ratio in standing.behind)),
            number(max(ratio for _, ratio in standing.behind)),
            len(standing.behind),
        )
        for standing in summary.standings
    ]
    title = "Strategies: the fastest trial over the fastest that may win (* cannot win)"
    return _table(title, ("strategy", "mean", "least", "most", "shapes"), rows)


def _standing_out(summary: Summary) -> str:
    rows = [
        (
            entry.study.problem,
            _ratio(entry.study, 3),
            ", ".join(f"{near.problem} {_ratio(near, 3)}" for near in entry.neighbours),
            ", ".join(str(near.problem) for near in entry.untried) or "-",
        )
        for entry in summary.standing_out
    ]
    title = f"Behind their neighbours: winners {BEHIND - 1:.0%} or more behind those of all of them"
    return _table(title, ("shape", "x floor", "neighbours", "family never tried here"), rows)


def _knobs(summary: Summary) -> str:
    rows = [
        (
            knob.name,
            f"{knob.share:.1%}",
            f"{knob.most:.0%} ({knob.most_at})",
            ", ".join(f"{value}: {count}" for value, count in knob.winning[:4]),
        )
        for knob in summary.knobs
    ]
    head = ("knob", "mean", "largest", "winners have")
    return _table("Importance of knobs (PED-ANOVA)", head, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _predicted(summary: Summary) -> str:
    """Render every predicted winner with its expected error and what came next."""
    rows = [("shape", "expected error", "runners-up, predicted time vs the winner's")]
    for study in summary.studies:
        if study.evidence == "predicted" and study.winner:
            error = study.winner.result.extra.get("expected_error")
            others = ", ".join(f"{name} {behind:+.1%}" for name, behind in runners_up(study))
            rows.append((str(study.problem), f"{error:.0%}" if error else "-", others or "none"))
    return "Predicted winners: nothing ran on this GPU\n" + columns(rows)


_STUDY_HEAD = ("shape", "winner", "us", "x floor", "trials", "found at", "no time")


def _study(study: Study) -> tuple[Any, ...]:
    """Render a study: its winner, and its history in two numbers: the trial that was the fastest of
    those that may win, and the trials without a time."""
    winner = study.winner
    best = study.records.index(study.ranked[0]) + 1 if study.ranked else "-"
    return (
        study.problem,
        winner.variant if winner else "none yet",
        number(winner.result.us if winner else None),
        _ratio(study, 3),
        len(study.records),
        best,
        len(study.records) - len(study.by_time),
    )


def _ratio(study: Study, digits: int) -> str:
    return number(study.ratio, digits) + "*" * study.plain_floor


def _strategy(study: Study) -> str:
    return str(study.winner.strategy) if study.winner else "-"


def _map(title: str, grid: Grid, cell: Callable[[Study], str]) -> str:
    rows: list[tuple[Any, ...]] = [("N \\ M", *grid.columns)]
    for n in grid.rows:
        studies = [grid.cells.get((m, n)) for m in grid.columns]
        rows.append((n, *(cell(study) if study else "" for study in studies)))
    return f"{title}, {grid.kind}\n" + columns(rows)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
