"""Measured numbers about ours beside all peers under both conditions, rotation first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.goals import geometric_mean
from benchmarks.pages.comparison import comparison
from benchmarks.pages.text import paragraph, read, table
from benchmarks.results import problem_of
from generator.evaluate.gpu.rotation import FLUSH, ROTATION
from generator.report.peers import Comparison, peer_us

ORDER = {ROTATION: "Under rotation", FLUSH: "After a flush"}
"""The conditions as pages show them: first the one that is closest to training."""


def under(name: str) -> str:
    """Ours and all peers over the floor, geometric means, and the peers' lowest times over ours. Of
    a peer that was not timed at all shapes, ours at those is beside it."""
    found = {condition: comparison(name.format(condition)) for condition in ORDER}
    ours = (f"**{one.ours:.3f}**" for one in found.values())
    lines = [["**Normforge**", *ours, *[""] * len(found)]]
    standings = {
        condition: {peer.name: peer for peer in one.standings} for condition, one in found.items()
    }
    for peer in found[ROTATION].standings:
        here = [standings[condition][peer.name] for condition in found]
        partly = [
            f" ({_shapes(one.shapes)})" * (one.shapes < len(all_of.rows))
            for one, all_of in zip(here, found.values(), strict=True)
        ]
        alike = partly[0] * (len(set(partly)) == 1)  # said once, beside the name
        apart = [""] * len(here) if alike else partly
        over = [
            f"{one.over_floor:.3f}{said}"
            + f", ours {one.over_floor / one.over_ours:.3f}" * bool(part)
            for one, said, part in zip(here, apart, partly, strict=True)
        ]
        least = [f"{min(one.over_ours(peer.name).values()):.3f}" for one in found.values()]
        lines.append([f"{peer.title} {peer.version}{alike}", *over, *least])
    header = [f"time / floor, {condition}" for condition in found]
    header += [f"lowest time / Normforge's, {condition}" for condition in found]
    said = " ".join(f"{ORDER[condition]}, {_closest(one)}." for condition, one in found.items())
    return f"{table(['', *header], lines)}\n\n{paragraph(said)}"


def _shapes(number: int) -> str:
    return f"{number} shape{'s' * (number != 1)}"


def _closest(found: Comparison) -> str:
    """Say at how many shapes a peer is ahead, and how long the fastest ones take."""
    best = found.best_peers.values()
    ahead, (least, where) = sum(ratio < 1 for ratio in best), found.least
    mean = f"the fastest peer of a shape takes {geometric_mean(best):.2f} times as long on average"
    if ahead:
        by = f"{100 * (1 / least - 1):.1f} %"
        return (
            f"a peer is faster at {ahead} of {_shapes(len(best))}, by up to {by} ({where}); {mean}"
        )
    return (
        f"no peer is faster at any of the {_shapes(len(best))}; {mean}, and at least {least:.3f}"
        f" times ({where})"
    )


def on_h200_in_short() -> str:
    """The comparison on an H200 in a sentence."""
    found = comparison("h200_rotation")
    return paragraph(
        f"On an [H200](docs/performance.md#on-an-h200), under rotation, Normforge takes"
        f" {found.ours:.3f} times the floor; {_closest(found)}."
    )


def fp32_weights_on_h100() -> str:
    """The fastest peer beside kernels whose weight is fp32, in an earlier comparison."""
    over = {
        str(problem_of(row)): min(filter(None, (peer_us(row, name) for name in row["peers"])))
        / row["ours_us"]
        for row in read("h100")["rows"]
        if row["weight_dtype"] != row["dtype"]
    }
    ratios = ", ".join(f"{ratio:.3f} times at {shape}" for shape, ratio in over.items())
    return paragraph(
        f"With an fp32 weight, the fastest peer takes {ratios}. An older run measured this, after a"
        " flush, in cyclic order and with older kernels (`h100.json.xz`)."
    )


BOTH_CONDITIONS_BLOCKS: dict[str, Callable[[], str]] = {
    "on_h200": partial(under, "h200_{}"),
    "on_h200_in_short": on_h200_in_short,
    "on_h100": partial(under, "h100_{}"),
    "fp32_weights_on_h100": fp32_weights_on_h100,
}
