"""What the plots of all benchmarks share."""

from __future__ import annotations

from typing import Any

NO_PLOT = "No plot: matplotlib is not installed."


def pyplot() -> Any:
    """Matplotlib's, for files alone; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
