"""The page: one file that asks nothing of the network."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from generator.kernels.knobs import KNOBS
from generator.report import charts
from generator.report.summary import Summary, overhead_of, ratio_of, runners_up
from generator.studies.reader import Study, reduction_kind
from generator.studies.records import PLAIN_FLOOR

FOLDER = Path(__file__).resolve().parent
RATIO_STEPS = (1.02, 1.05, 1.10, 1.15, 1.20, 1.30, 1.50)
"""Upper ends of the shades of the map of ratios; the last shade has none."""
OVERHEAD_STEPS = (0.97, 0.99, 1.01, 1.03, 1.06)
DASHBOARD = "http://127.0.0.1:8080/dashboard/studies"


def render_page(summary: Summary) -> str:
    """The HTML of one GPU. Its policy forbids every request; links are followed by a click only."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kernel"] = kernel
    return environment.get_template("page.html.j2").render(
        summary=summary,
        charts=charts,
        meaning=summary.meaning,
        runners_up=runners_up,
        ratio_of=ratio_of,
        overhead_of=overhead_of,
        reduction_kind=reduction_kind,
        anchor=anchor,
        plain=PLAIN_FLOOR,
        shade=shade,
        strategies=KNOBS["strategy"].domain,
        ratio_steps=RATIO_STEPS,
        overhead_steps=OVERHEAD_STEPS,
        dashboard=DASHBOARD,
        made=datetime.now(timezone.utc).isoformat(timespec="minutes").replace("+00:00", " UTC"),
    )


def anchor(study: Study) -> str:
    """The place of a study in the page."""
    return "study-" + "".join(c if c.isalnum() else "-" for c in str(study.problem))


def shade(value: float, steps: tuple[float, ...]) -> int:
    """Index of the first step that is not below the value; the number of steps above them all."""
    return sum(value > step for step in steps)


def kernel(study: Study) -> str:
    """How the winner moves its rows, its pipeline and stages."""
    if study.winner is None:
        return ""
    config = study.winner.config
    stages = f" {charts.TIMES}{config['stages']}" if config["pipeline"] != "direct" else ""
    return f"{config['pipeline']}{stages}"
