"""The learned correction: a factor for a prediction that covers what the physical terms leave out,
from trees fitted offline and stored as plain data.

Fitted by `python -m benchmarks.prediction fit`; docs/prediction.md says to what and how well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BOUND = 0.25
"""The logarithm of the factor stays within this: a prediction changes by 1.28 times at most."""


@dataclass(frozen=True)
class Tree:
    """One split on each level, the same for all nodes of it: (place of the feature, threshold); the
    leaf's number has a bit for every level, the first one highest, that is set above the
    threshold."""

    splits: tuple[tuple[int, float], ...]
    leaves: tuple[float, ...]

    def value(self, row: Sequence[float]) -> float:
        leaf = 0
        for place, threshold in self.splits:
            leaf = 2 * leaf + (row[place] > threshold)
        return self.leaves[leaf]


@dataclass(frozen=True)
class Correction:
    """A sum of trees. names: of the features, in the order of a row."""

    names: tuple[str, ...]
    base: float
    trees: tuple[Tree, ...]

    def log_factor(self, features: Mapping[str, float]) -> float:
        """The logarithm of measured over physical time that is to be expected."""
        row = [features[name] for name in self.names]
        total = self.base + sum(tree.value(row) for tree in self.trees)
        return max(-BOUND, min(BOUND, total))

    def to_json(self) -> dict[str, Any]:
        trees = [[list(map(list, tree.splits)), list(tree.leaves)] for tree in self.trees]
        return {"names": list(self.names), "base": self.base, "trees": trees}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Correction:
        trees = (
            Tree(tuple((place, threshold) for place, threshold in splits), tuple(leaves))
            for splits, leaves in data["trees"]
        )
        return cls(tuple(data["names"]), data["base"], tuple(trees))
