"""Families of configs: those of one family are variations of one kernel."""

from __future__ import annotations

from generator.kernels.geometry import Config
from generator.kernels.strategies import strategy_of

KNOBS_OF_FAMILY = ("pipeline", "cluster", "threads_per_row", "rows_in_flight", "ctas_per_sm")
Family = tuple[int | str, ...]


def family_of(config: Config) -> Family:
    """The family of a config, which need not be legal: how CTAs add their partial dw
    (`Strategy.adds`), and the values of KNOBS_OF_FAMILY.

    These decide how rows reach the threads and how many are under way. All other knobs, such as
    hints, stages and slices, vary a kernel by a few per cent.
    """
    return (strategy_of(config).adds, *(config.get(knob, "") for knob in KNOBS_OF_FAMILY))
