"""The drawings of the page: SVG whose colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

from generator.kernels.strategies import is_deterministic
from generator.report.summary import Standing
from generator.studies.reader import Study

TIMES = "\N{MULTIPLICATION SIGN}"
_WIDTH, _HEIGHT = 300, 110
_LEFT, _RIGHT, _TOP, _BOTTOM = 30, 4, 6, 14
_SPREAD = 1.6
"""A history shows times up to this many times the best; slower ones lie on its upper edge."""
_FAR = 4.0
"""Right end of the comparison of strategies; what is slower lies there."""


def history(study: Study) -> Markup:
    """Trials of one study from left to right, the fastest at the bottom, and the best so far."""
    if not study.ranked:
        return Markup("")
    best = study.over_floor(study.ranked[0])
    inside_x, inside_y = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = inside_x / max(1, len(study.records) - 1)

    def x(number: int) -> float:
        return _LEFT + number * step

    def y(ratio: float) -> float:
        share = math.log(min(ratio / best, _SPREAD)) / math.log(_SPREAD)
        return _TOP + inside_y * (1 - share)

    dots: dict[str, list[str]] = {"may": [], "ineligible": [], "failed": []}
    line: list[str] = []
    lowest = math.inf
    for number, record in enumerate(study.records):
        ratio = study.over_floor(record)
        if ratio == math.inf:
            dots["failed"].append(f"M{x(number):.1f} {_HEIGHT - _BOTTOM + 4}v4")
            continue
        loose = not is_deterministic(record.config)
        ineligible = record.result.outcome == "nondeterministic" or loose
        dots["ineligible" if ineligible else "may"].append(f"M{x(number):.1f} {y(ratio):.1f}h0")
        if record.feasible and ratio < lowest:
            lowest = ratio
            start = "M" if not line else "H"
            line.append(f"{start}{x(number):.1f}" + (" " if not line else "V") + f"{y(lowest):.1f}")
    line.append(f"H{_WIDTH - _RIGHT}")
    label = (
        f"History of {study.problem}: {len(study.records)} trials, "
        f"{len(dots['failed'])} without a time, best {best:.3f} x floor."
    )
    parts = [f"<title>{escape(label)}</title>"]
    parts += [
        f'<path class="rule" d="M{_LEFT} {y(ratio):.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 3}" y="{y(ratio) + 3:.1f}" class="end">{ratio:.2f}</text>'
        for ratio in (best, best * _SPREAD**0.5, best * _SPREAD)
    ]
    parts += [f'<path class="dot {kind}" d="{"".join(path)}"/>' for kind, path in dots.items()]
    parts.append(f'<path class="best" d="{"".join(line)}"/>')
    return _svg(_WIDTH, _HEIGHT, "history", parts, label)


def strategies(standings: Iterable[Standing]) -> Markup:
    """One row of dots for each way to sum dw: a dot for each shape, at its time over the best."""
    standings = list(standings)
    left, right, row, top = 150, 16, 30, 6
    width, height = 760, top + row * len(standings) + 26

    def x(ratio: float) -> float:
        place = math.log(max(min(ratio, _FAR), 0.9) / 0.9) / math.log(_FAR / 0.9)
        return left + (width - left - right) * place

    parts = []
    for ratio in (1.0, 1.2, 1.5, 2.0, 3.0, 4.0):
        at = f"{x(ratio):.1f}"
        text = f"{ratio:g}{TIMES}" if ratio < _FAR else f"≥ {ratio:g}{TIMES}"
        parts.append(f'<path class="rule" d="M{at} {top}V{height - 22}"/>')
        parts.append(f'<text x="{at}" y="{height - 8}" class="middle">{text}</text>')
    for place, standing in enumerate(standings):
        y = top + row * (place + 0.5)
        parts.append(
            f'<text x="0" y="{y + 4:.0f}" class="name">{escape(str(standing.strategy))}</text>'
        )
        kind = escape(f"s-{standing.strategy.name}")
        for study, ratio in standing.behind:
            title = f"{study.problem}: {standing.strategy} takes {ratio:.3f} times the best"
            parts.append(
                f'<circle class="{kind}" cx="{x(ratio):.1f}" cy="{y:.0f}" r="4.5">'
                f"<title>{escape(title)}</title></circle>"
            )
        typical = x(standing.typical)
        title = f"{standing.strategy}: {standing.typical:.3f} in the geometric mean"
        parts.append(
            f'<path class="typical" d="M{typical:.1f} {y - 10:.0f}v20">'
            f"<title>{escape(title)}</title></path>"
        )
    return _svg(
        width, height, "strategies", parts, "Time of every strategy over the best, by shape"
    )


def _svg(width: int, height: int, kind: str, parts: Iterable[str], label: str) -> Markup:
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
