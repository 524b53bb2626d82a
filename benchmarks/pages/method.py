"""Measured numbers of the pages that say how the search, the predictions and the emulator work."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.goals import geometric_mean
from benchmarks.pages.text import generated, read, table
from benchmarks.search_replay.replay import CLOSE
from generator.paths import GENERATED

SCORES = {"RMSNorm": "prediction_widths", "LayerNorm": "prediction_layernorm"}


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def ranks(name: str, gpu: str = "h200") -> str:
    """Tabulate how well predictions rank the trials of an operation's studies on a GPU."""
    summaries = read(name)[gpu]["summaries"]
    rows = [
        (
            model,
            *(f"{found[key]:.2f}" for key in ("spearman", "spearman_near")),
            *(percent(found[key], 1) for key in ("first", "first_worst", "of_five")),
            *(percent(found[key]) for key in ("strategy", "launches")),
        )
        for model, found in summaries.items()
    ]
    shapes = f"{gpu.upper()}, {next(iter(summaries.values()))['shapes']} shapes"
    header = (shapes, "Spearman", "near the best", "first", "worst", "best of five")
    return table((*header, "strategy", "launches"), rows)


LONG = 100
"""Trials of a long search. Those of a shorter one are near the winners of other shapes, and easier
to rank."""


def long_searches() -> tuple[int, list[dict[str, Any]]]:
    """Return how many scored shapes of the H200 had a shorter search, and the scores of the
    others."""
    scores = read(SCORES["RMSNorm"])["h200"]["shapes"]["with correction and prior"]
    found = [score for score in scores if score["trials"] >= LONG]
    return len(scores) - len(found), found


def slower(scores: list[dict[str, Any]], name: str) -> str:
    """The geometric mean over the shapes."""
    return percent(geometric_mean([1 + score[name] for score in scores]) - 1, 1)


def prediction_in_short() -> str:
    """Say what choosing by prediction costs, for the top of the page."""
    _, scores = long_searches()
    return (
        f"In short: at {len(scores)} shapes of the H200, with the shape's N left out of the fit,"
        f" the predicted choice is on average {slower(scores, 'first')}\n(at worst"
        f" {percent(max(score['first'] for score in scores))}) slower than the best trial of a"
        f" search on the GPU with at least {LONG} trials."
    )


def prediction_of_long_searches() -> str:
    """The scores at shapes whose best trial is well known."""
    short, scores = long_searches()
    strategy = fmean(score["strategy"] for score in scores)
    return (
        f"At {short} of the H200's shapes, the search had fewer than {LONG} trials, near the"
        " winners of other shapes. These are\neasier to rank."
        f" At the other {len(scores)}, the choice is {slower(scores, 'first')} slower,"
        f" the best of five {slower(scores, 'of_five')}, and the strategy is right in\n"
        f"{percent(strategy)}."
    )


def unseen_gpus() -> str:
    """Tabulate how well the trials of a GPU are ranked by what was learned on the other one."""
    rows = []
    for gpu, document in sorted(read("prediction_gpus").items()):
        found, facts = document["summaries"]["with correction and prior"], document["facts"]
        rows.append(
            (
                f"{gpu.upper()}, {found['shapes']}",
                f"{found['spearman']:.2f}",
                *(percent(found[key], 1) for key in ("first", "first_worst", "of_five")),
                *(percent(found[key]) for key in ("strategy", "launches")),
                percent(facts["error_at_choices"], 1),
            )
        )
    header = ("GPU, shapes", "Spearman", "first", "worst", "best of five", "strategy", "launches")
    return table((*header, "error of the choice"), rows)


def prediction_errors() -> str:
    """Tabulate how far times and floors are off, and how far the correction goes."""
    facts = [read(name)["h200"]["facts"] for name in SCORES.values()]

    def floors(which: str) -> list[str]:
        return [percent(each["floors_over_predicted"][which], 1) for each in facts]

    return table(
        ("", *SCORES),
        [
            ("expected error", *(percent(each["error_at_choices"], 1) for each in facts)),
            (
                "factor of the correction",
                *(f"{least:.2f} to {most:.2f}" for least, most in (f["factors"] for f in facts)),
            ),
            ("measured floors over predicted ones, less 1", *floors("all")),
            ("the same for floors below 12 µs", *floors("short")),
        ],
    )


def search_replay() -> str:
    """Searches of spaces that were measured whole."""
    found = read("search_replay_h200")
    return "\n\n".join(_searches(sweep, found["after"]) for sweep in found["sweeps"])


def _searches(sweep: dict[str, Any], after: list[int]) -> str:
    rows = [
        (row["name"], str(row["seeds"]), *(f"{r:.3f} ± {e:.3f}, {percent(c)}" for r, e, c in cells))
        for row in sweep["searches"]
        for cells in [zip(row["reached"], row["errors"], row["close"], strict=True)]
    ]
    return (
        f"{sweep['facts']['gpu']}, {sweep['problem']}: {sweep['legal']:,} legal configs,"
        f" {sweep['close']} of them within {percent(CLOSE)} of the best.\n\n"
        + table(("after so many trials", "searches", *map(str, after)), rows)
    )


def bit_exact(name: str = "bit_exact_h200") -> str:
    """Kernels on the GPU and in the emulator."""
    found = read(name)
    cases = [case for case in found["cases"] if case["outcome"] != "skipped"]
    any_n = sum(re.search(r"_n\d+to\d+_", case["variant"]) is not None for case in cases)
    return (
        f"On one {found['environment']['gpu']}, {found['outcomes']['equal']} of {len(cases)}"
        " sampled variants agreed" + (f", {any_n} of them kernels for any N." if any_n else ".")
    )


def noisy_trials() -> str:
    """Say how many trials stayed noisy."""
    trials = noisy = 0
    with lzma.open(GENERATED / "h200" / "studies.journal.xz", "rt", encoding="utf-8") as journal:
        for line in journal:
            trials += '"op_code":4' in line
            noisy += '"noisy":true' in line
    return f"Of the {trials:,} trials of `generated/h200`, {noisy} stayed noisy."


Shapes = dict[tuple[int, int, str], float]
"""Numbers by M, N and dtype."""


def tuned_ratios(operation: str, gpu: str) -> Shapes:
    """Times over the floor in the finals of a GPU's winners, without options."""
    tuned = generated(gpu, operation, "table.json")["tuned"]
    return {
        (entry["M"], entry["N"], entry["dtype"]): facts["ratio"]
        for entry in tuned
        for facts, spec in [(entry["provenance"], entry["kernel"]["spec"])]
        if entry["dtype"] == entry["weight_dtype"] and not (spec["offset"] or spec["residual"])
    }


def invariance_cases() -> str:
    """Random batches whose bits were compared, by package and GPU."""
    rows = []
    for package, gpu, name in (
        ("H200", "H200", "h200"),
        ("H200", "H100", "h200_on_h100"),
        ("H100", "H100", "h100"),
    ):
        found = read(f"batch_invariance_{name}")["rows"]
        cases = [row["cases"] for row in found]
        differing = sum(row["differing"] for row in found)
        counts = (len(cases), sum(cases), min(cases), differing)
        rows.append((package, gpu, *(f"{count:,}" for count in counts)))
    header = (
        "package of",
        "run on",
        "widths and dtypes",
        "random batches",
        "fewest per width and dtype",
    )
    return table((*header, "with a differing bit"), rows)


def stress() -> str:
    """Kernels with their timing disturbed, planted bugs, and compute-sanitizer."""
    found = read("stress_h200")
    real = [row for row in found["rows"] if not row["planted"]]
    lines = [
        ("launches of unchanged kernels", f"{sum(row['launches'] for row in real):,}"),
        ("of these, with different bits", str(sum(row["differing"] for row in real))),
    ]
    planted = [row for row in found["rows"] if row["planted"]]
    for bug in dict.fromkeys((row["strategy"], row["planted"]) for row in planted):
        rows = [row for row in planted if (row["strategy"], row["planted"]) == bug]
        differing, launches = (sum(row[key] for row in rows) for key in ("differing", "launches"))
        share = f"{differing:,} of {launches:,} launches with different bits"
        lines.append((f"planted in `{bug[0]}`: {bug[1]}", share))
    lines += [(f"compute-sanitizer, {tool}", said) for tool, said in found["sanitizer"].items()]
    return table([f"{len(real)} kernels", "result"], lines)


METHOD_BLOCKS: dict[str, Callable[[], str]] = {
    "stress": stress,
    "prediction_ranks": partial(ranks, SCORES["RMSNorm"]),
    "prediction_of_long_searches": prediction_of_long_searches,
    "prediction_ranks_h100": partial(ranks, SCORES["RMSNorm"], "h100"),
    "prediction_ranks_layernorm": partial(ranks, SCORES["LayerNorm"]),
    "prediction_in_short": prediction_in_short,
    "prediction_gpus": unseen_gpus,
    "prediction_errors": prediction_errors,
    "search_replay": search_replay,
    "bit_exact": bit_exact,
    "bit_exact_layernorm": partial(bit_exact, "bit_exact_layernorm_h200"),
    "noisy_trials": noisy_trials,
    "invariance_cases": invariance_cases,
}
