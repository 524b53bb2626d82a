"""The fit of the learned correction: gradient boosting with trees of one split per level, in numpy.

Such trees are CatBoost's (Prokhorenkova et al., "CatBoost: unbiased boosting with categorical
features", 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.prediction.shapes import Shape
from generator.evaluate.predict.correction import Correction, Tree
from generator.evaluate.predict.evaluator import features_of

TREES, DEPTH, RATE = 120, 4, 0.08
SHRINKAGE = 20.0
"""Weight of trials that a leaf is assumed to have beside its own, with nothing to correct."""
BINS = 16
"""Thresholds tried of a feature, at its quantiles, and one more."""
NEAR = 0.15
"""A trial's weight falls by e with every such step of the logarithm of its time over the best."""
FAR = 0.6
"""Trials beyond are left out."""

Floats = NDArray[np.float64]


def examples(shapes: Sequence[Shape]) -> tuple[tuple[str, ...], list[Floats], list[Floats]]:
    """Names of the features and, of every shape, their rows for all trials and what the physical
    terms leave to be explained."""
    rows, rest = [], []
    names: tuple[str, ...] = ()
    for shape in shapes:
        found = [
            features_of(t.variant, t.resources, shape.problem, shape.target) for t in shape.trials
        ]
        names = tuple(found[0])
        rows.append(np.array([list(each.values()) for each in found]))
        physical = np.array([each["physical over floor"] for each in found])
        rest.append(np.array([t.log_ratio for t in shape.trials]) - physical)
    return names, rows, rest


def weights(shape: Shape) -> Floats:
    """Return the weights of a shape's trials: most for the fastest, none for those that may not
    win."""
    fastest = min(shape.trials[place].log_ratio for place in shape.feasible)
    behind = np.array([t.log_ratio - fastest for t in shape.trials])
    fixed = np.array([t.variant.determinism != "none" for t in shape.trials])
    return np.where(fixed & (behind < FAR), np.exp(-np.maximum(behind, 0) / NEAR), 0.0)


def fit(
    names: tuple[str, ...], rows: Floats, rest: Floats, weight: Floats, trees: int = TREES
) -> Correction:
    """Trees for `rest` of the rows, one after another for what those before it leave."""
    used = weight > 0
    rows, rest, weight = rows[used], rest[used], weight[used]
    edges = [_thresholds(column) for column in rows.T]
    binned = np.stack(
        [np.searchsorted(edge, column) for edge, column in zip(edges, rows.T, strict=True)], axis=1
    )
    base = float(np.average(rest, weights=weight))
    left = rest - base
    grown = []
    for _ in range(trees):
        splits, leaf = _grow(binned, [len(edge) for edge in edges], left, weight)
        sums, counts = (np.bincount(leaf, w, 1 << DEPTH) for w in (weight * left, weight))
        values = np.round(RATE * sums / (counts + SHRINKAGE), 5)
        left = left - values[leaf]
        chosen = tuple((place, float(edges[place][bin_])) for place, bin_ in splits)
        grown.append(Tree(chosen, tuple(map(float, values))))
    return Correction(names, round(base, 5), tuple(grown))


def _thresholds(column: Floats) -> Floats:
    inner = np.linspace(0, 1, BINS + 1)[1:-1]
    found = np.unique(np.quantile(column, inner, method="lower"))
    rare = np.unique(column)[:-1]
    return found if len(rare) >= BINS else rare


def _grow(
    binned: NDArray[np.int64], counts: list[int], left: Floats, weight: Floats
) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """The splits of one tree, each (feature, bin) the one that explains most, and every row's
    leaf."""
    leaf = np.zeros(len(left), np.int64)
    splits = []
    for level in range(DEPTH):
        best, where = 0.0, (0, 0)
        for place, count in enumerate(counts):
            if not count:
                continue
            gains = _gains(leaf * BINS + binned[:, place], 1 << level, left * weight, weight)
            bin_ = int(np.argmax(gains[:count]))
            if gains[bin_] > best * (1 + 1e-9):
                best, where = float(gains[bin_]), (place, bin_)
        splits.append(where)
        leaf = 2 * leaf + (binned[:, where[0]] > where[1])
    return splits, leaf


def _gains(cell: NDArray[np.int64], leaves: int, pull: Floats, weight: Floats) -> Floats:
    """Return what a split above each bin explains, summed over the leaves."""
    pulls, total = (
        np.bincount(cell, each, leaves * BINS).reshape(leaves, BINS) for each in (pull, weight)
    )
    below, known = pulls.cumsum(axis=1), total.cumsum(axis=1)
    above, others = below[:, -1:] - below, known[:, -1:] - known
    gains: Floats = (below**2 / (known + SHRINKAGE) + above**2 / (others + SHRINKAGE)).sum(axis=0)
    return gains


def fit_all(shapes: Sequence[Shape], trees: int = TREES) -> Correction:
    """The correction of all shapes."""
    names, rows, rest = examples(shapes)
    weight = [weights(shape) for shape in shapes]
    return fit(names, np.concatenate(rows), np.concatenate(rest), np.concatenate(weight), trees)


def held_out(
    shapes: Sequence[Shape],
    groups: Sequence[object],
    names: tuple[str, ...],
    rows: list[Floats],
    rest: list[Floats],
) -> list[list[float]]:
    """Return for every shape the logarithms of the factors by a correction that was fitted without
    the shapes of its group. groups: one for each shape; the others are as in `examples`."""
    weight = [weights(shape) for shape in shapes]
    found: list[list[float]] = [[] for _ in shapes]
    for group in dict.fromkeys(groups):
        learnt = [place for place, other in enumerate(groups) if other != group]
        known, left, heavy = (
            np.concatenate([part[p] for p in learnt]) for part in (rows, rest, weight)
        )
        model = fit(names, known, left, heavy)
        for place, own in enumerate(groups):
            if own == group:
                described = [dict(zip(names, row, strict=True)) for row in rows[place].tolist()]
                found[place] = list(map(model.log_factor, described))
    return found
