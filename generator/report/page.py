"""The page: one file that asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from generator.kernels.knobs import KNOBS
from generator.report import charts
from generator.report.reason import reason
from generator.report.standing_out import BEHIND
from generator.report.summary import (
    Summary,
    bandwidth_share,
    runners_up,
)
from generator.studies.reader import Study
from generator.studies.records import PLAIN_FLOOR

FOLDER = Path(__file__).resolve().parent
RATIO_STEPS = (1.02, 1.05, 1.10, 1.15, 1.20, 1.30, 1.50)
"""Upper ends of the shades of the map of ratios; the last shade has none."""
BANDWIDTH_STEPS = (0.30, 0.45, 0.60, 0.70, 0.80, 0.85, 0.90)
OVERHEAD_STEPS = (0.97, 0.99, 1.01, 1.03, 1.06)
DASHBOARD = "http://127.0.0.1:8080/dashboard/studies"


def render_page(summary: Summary) -> str:
    """The HTML of one GPU. Its policy forbids every request, and every style and script but its own
    two; links are followed by a click only."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kernel"] = kernel
    environment.filters["reason"] = reason
    environment.filters["csp_hash"] = csp_hash
    style = environment.get_template("page.css").render(strategies=KNOBS["strategy"].domain)
    return environment.get_template("page.html.j2").render(
        summary=summary,
        charts=charts,
        meaning=summary.meaning,
        runners_up=runners_up,
        bandwidth_share=bandwidth_share,
        anchor=anchor,
        plain=PLAIN_FLOOR,
        shade=shade,
        behind=f"{100 * (BEHIND - 1):.0f} %",
        style=Markup(style),
        script=Markup((FOLDER / "page.js").read_text(encoding="utf-8")),
        ratio_steps=RATIO_STEPS,
        overhead_steps=OVERHEAD_STEPS,
        bandwidth_steps=BANDWIDTH_STEPS,
        dashboard=DASHBOARD,
        made=datetime.now(timezone.utc).isoformat(timespec="minutes").replace("+00:00", " UTC"),
    )


def csp_hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy names an inline style or script."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def anchor(study: Study) -> str:
    """The place of a study in the page."""
    return "study-" + "".join(c if c.isalnum() else "-" for c in str(study.problem))


def shade(value: float, steps: tuple[float, ...]) -> int:
    """Index of the first step that is not below the value; the number of steps above them all."""
    return sum(value > step for step in steps)


def kernel(study: Study) -> str:
    """Describe how the winner moves its rows: its pipeline and stages."""
    if study.winner is None:
        return ""
    config = study.winner.config
    if "form" in config:
        return str(config["form"])
    stages = f" {charts.TIMES}{config['stages']}" if config["pipeline"] != "direct" else ""
    return f"{config['pipeline']}{stages}"
