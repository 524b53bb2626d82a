"""Measured numbers of the pages that say how the search, the predictions and the executor work."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable
from functools import partial

from benchmarks.page_text import read, table
from benchmarks.search_replay.replay import CLOSE
from generator.paths import GENERATED

SCORES = {"RMSNorm": "prediction_h200", "LayerNorm": "prediction_layernorm_h200"}


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def ranks(name: str) -> str:
    """How well predictions rank the trials of an operation's studies."""
    summaries = read(name)["summaries"]
    rows = [
        (
            model,
            *(f"{found[key]:.2f}" for key in ("spearman", "spearman_near")),
            *(percent(found[key], 1) for key in ("first", "first_worst", "of_five")),
            *(percent(found[key]) for key in ("strategy", "launches")),
        )
        for model, found in summaries.items()
    ]
    shapes = f"{next(iter(summaries.values()))['shapes']} shapes"
    header = (shapes, "Spearman", "near the best", "first", "worst", "best of five")
    return table((*header, "strategy", "launches"), rows)


def prediction_errors() -> str:
    """How far times and floors are off, and how far the correction goes."""
    facts = [read(name)["facts"] for name in SCORES.values()]

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
            ("measured floors are longer by", *floors("all")),
            ("those below 12 µs by", *floors("short")),
        ],
    )


def search_replay() -> str:
    """Searches of a space that was measured whole."""
    found = read("search_replay_h200")
    rows = [
        (row["name"], *(f"{r:.3f}, {percent(c)}" for r, c in pairs))
        for row in found["searches"]
        for pairs in [zip(row["reached"], row["close"], strict=True)]
    ]
    seeds = found["searches"][0]["seeds"]
    return (
        f"{found['facts']['gpu']}, {found['problem']}: {found['legal']:,} legal configs,"
        f" {found['close']} of them within {percent(CLOSE)} of the best.\nEach cell has the mean"
        f" share of the optimum's speed, and the share of {seeds} seeds within {percent(CLOSE)} of"
        " it.\n\n" + table(("trials", *map(str, found["after"])), rows)
    )


def bit_exact() -> str:
    """Kernels on the GPU and in the executor."""
    found = read("bit_exact_h200")
    cases = [case for case in found["cases"] if case["outcome"] != "skipped"]
    any_n = sum(re.search(r"_n\d+to\d+_", case["variant"]) is not None for case in cases)
    return (
        f"On one {found['environment']['gpu']}, {found['outcomes']['equal']} of {len(cases)}"
        f" sampled variants agreed, {any_n} of them kernels for any N."
    )


def noisy_trials() -> str:
    """How many trials stayed noisy."""
    trials = noisy = 0
    with lzma.open(GENERATED / "h200" / "studies.journal.xz", "rt") as journal:
        for line in journal:
            trials += '"op_code":4' in line
            noisy += '"noisy":true' in line
    return f"Of the {trials:,} trials of `generated/h200`, {noisy} stayed noisy."


METHOD_BLOCKS: dict[str, Callable[[], str]] = {
    "prediction_ranks": partial(ranks, SCORES["RMSNorm"]),
    "prediction_ranks_layernorm": partial(ranks, SCORES["LayerNorm"]),
    "prediction_errors": prediction_errors,
    "search_replay": search_replay,
    "bit_exact": bit_exact,
    "noisy_trials": noisy_trials,
}
