"""The time that a test waits for what hangs, on a machine that has other work, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def patience(seconds: float) -> float:
    """A deadline of so many seconds on an idle machine. The load of the last minute stretches it:
    what merely waits for a core has not failed."""
    share = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return seconds * max(1.0, 2 * share)


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(60)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
