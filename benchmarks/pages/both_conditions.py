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


def found_under(name: str) -> dict[str, Comparison]:
    """The comparison of a name, by condition."""
    return {condition: comparison(name.format(condition)) for condition in ORDER}


def under_both(name: str) -> str:
    """Ours and all peers over the floor, and the peers' lowest times over ours."""
    found = found_under(name)
    lines = [["**Normforge**", *(f"**{one.ours:.3f}**" for one in found.values()), "", ""]]
    standings = {
        condition: {peer.name: peer for peer in one.standings} for condition, one in found.items()
    }
    for peer in found[ROTATION].standings:
        over = [f"{standings[condition][peer.name].over_floor:.3f}" for condition in found]
        least = [f"{min(one.over_ours(peer.name).values()):.3f}" for one in found.values()]
        partly = f" ({_shapes(peer.shapes)})" * (peer.shapes < len(found[ROTATION].rows))
        lines.append([f"{peer.title} {peer.version}{partly}", *over, *least])
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
    mean = f"the fastest one of each takes {geometric_mean(best):.2f} times as long in the mean"
    if ahead:
        by = f"{100 * (1 / least - 1):.1f} %"
        return (
            f"a peer is faster at {ahead} of {_shapes(len(best))}, by up to {by} ({where}); {mean}"
        )
    return (
        f"no peer is faster at any of the {_shapes(len(best))}; {mean}, and {least:.3f} times at"
        f" least ({where})"
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
    "five_on_h200": partial(under_both, "five_{}_h200"),
    "on_h100": partial(under_both, "h100_{}"),
    "fp32_weights_on_h100": fp32_weights_on_h100,
}
