"""Decides whether a block of times can be believed, and what to do about one that cannot. No CUDA
here.

A block holds the times of a reference and of candidates that took turns. It is noisy when the
reference is slower than it has already been in this run, or when the times of the steadiest
candidate scatter from round to round. Noisy blocks are discarded and measured again, a bounded
number of times; what is noisy then says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from generator.errors import ProblemError
from generator.result import FLOOR_BYTES

Block = Sequence[Sequence[float]]
"""Microseconds by operation, the reference first, and by round."""

DRIFT = 0.05
JITTER_US = 0.8
"""The microseconds, beside DRIFT, that the reference may be above its best median. Chosen on 16,947
early trials of generated/h200, on GPUs that nobody else used: 99 % were within 1.06 us of the best
of their study and GPU where it takes less than 50 us, and within 3.6 % where it takes more; six
were further from it than this allows. docs/cluster.md says how many trials stayed noisy since."""
SPREAD = 0.05
"""The largest distance between the quartiles of the ratios of one block, relative to their median
and beside JITTER_US: the median of 15 such ratios is uncertain by about 1 %."""
BLOCKS, SHORT_BLOCKS = 3, 15
"""The numbers of blocks in which finalists take turns, and candidates of the shortlist.
SHORT_BLOCKS are for floors below SHORT_US, where the ratio of a block scatters by 2 %. The more
blocks there are, the more often choices agree that are resampled from those in
repeatability_h200.json.xz."""
SHORT_US = 12.0
SEARCH_PAUSES = (0.0, 0.05, 0.25)
"""Seconds after each noisy block of a trial. Short: the finals measure noisy trials once more."""


class NoisyError(ProblemError):
    """No clean numbers could be had for a problem: there is no winner, and nothing was lost."""


@dataclass(frozen=True)
class Timing:
    """Results of blocks of the same operations. us, ratios: the median of every candidate over the
    rounds, a ratio being to the reference of the same round; block_ratios: the same for each block;
    floor_us: median of the reference; spread: interquartile range of the steadiest candidate's
    ratios over their median; discarded: noisy blocks that are left out; fault: "" or why even these
    numbers are noisy."""

    us: tuple[float, ...]
    ratios: tuple[float, ...]
    block_ratios: tuple[tuple[float, ...], ...]
    floor_us: float
    spread: float
    discarded: int = 0
    fault: str = ""

    def fields(self, floor_bytes: int, candidate: int = 0) -> dict[str, Any]:
        """The fields of a Result that say how fast a candidate is and how far to trust that.
        floor_bytes: what the floor moves."""
        extra: dict[str, Any] = {"spread": round(self.spread, 4), FLOOR_BYTES: floor_bytes}
        if self.discarded:
            extra["discarded_blocks"] = self.discarded
        if self.fault:
            extra["noise"] = self.fault
        if len(self.block_ratios[candidate]) > 1:
            extra["block_ratios"] = [round(ratio, 5) for ratio in self.block_ratios[candidate]]
        return {
            "us": self.us[candidate],
            "floor_us": self.floor_us,
            "ratio": self.ratios[candidate],
            "noisy": bool(self.fault),
            "extra": extra,
        }


def blocks_for(floor_us: float | None) -> int:
    """Return the number of blocks that rank candidates with this floor; None is an unknown
    floor."""
    return SHORT_BLOCKS if floor_us is not None and floor_us < SHORT_US else BLOCKS


def drifted(floor_us: float, best_us: float) -> bool:
    """Return True if a reference that has once taken `best_us` is too slow with `floor_us`."""
    return floor_us > best_us * (1 + DRIFT) + JITTER_US


def noise_in(block: Block, best_us: float | None = None) -> str:
    """Return what is wrong with a block, "" when it is clean. best_us: the best median of the
    reference, when known."""
    floor_us = median(block[0])
    if best_us is not None and drifted(floor_us, best_us):
        return f"the reference takes {floor_us:.1f} us, {best_us:.1f} at its best in this run"
    spread = _spread(block)
    if spread > SPREAD + JITTER_US / floor_us:
        return f"the times of one block scatter by {spread:.0%}"
    return ""


def collect(
    measure: Callable[[], Block],
    blocks: int,
    best_us: float | None,
    pauses: Iterable[float],
    sleep: Callable[[float], None],
) -> Timing:
    """Measure until there are `blocks` clean blocks. After a noisy one the next of `pauses`
    (seconds) is slept away; when none is left, BLOCKS clean ones are enough. Without them, the
    blocks with the fastest reference are the numbers, and they are marked as noisy."""
    taken: list[Block] = []
    waits = iter(pauses)
    best = best_us
    while True:
        block = measure()
        taken.append(block)
        if not noise_in(block):
            # A faster reference also tells that earlier blocks, and the run so far, were slow.
            floor_us = median(block[0])
            best = floor_us if best is None else min(best, floor_us)
        clean = [block for block in taken if not noise_in(block, best)]
        if len(clean) >= blocks:
            return _summary(clean, len(taken) - len(clean))
        fault = noise_in(block, best)
        if not fault:
            continue
        pause = next(waits, None)
        if pause is None:
            if len(clean) >= BLOCKS:
                return _summary(clean, len(taken) - len(clean))
            taken.sort(key=lambda block: median(block[0]))
            return _summary(taken[:blocks], len(taken) - len(taken[:blocks]), fault)
        sleep(pause)


def _summary(blocks: Sequence[Block], discarded: int, fault: str = "") -> Timing:
    times = [[t for part in parts for t in part] for parts in zip(*blocks, strict=True)]
    floors, *own = times
    return Timing(
        us=tuple(median(t) for t in own),
        ratios=tuple(median(_ratios(t, floors)) for t in own),
        block_ratios=tuple(
            tuple(median(_ratios(block[place], block[0])) for block in blocks)
            for place in range(1, len(times))
        ),
        floor_us=median(floors),
        spread=_spread(times),
        discarded=discarded,
        fault=fault,
    )


def _ratios(times: Sequence[float], floors: Sequence[float]) -> list[float]:
    return [t / floor for t, floor in zip(times, floors, strict=True)]


def _spread(block: Block) -> float:
    """Return the spread of the steadiest candidate: one that is restless by itself must not pass
    for noise. Without candidates, it is the spread of the reference."""
    floors, *own = block
    series = [_ratios(times, floors) for times in own] or [list(floors)]
    return min(_quartile_distance(values) for values in series)


def _quartile_distance(values: Sequence[float]) -> float:
    if len(values) < 4:
        return 0.0
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle
