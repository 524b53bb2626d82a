"""The kernels of a step on a GPU, and how long steps take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], None]
Kernels = list[tuple[str, float]]
"""Names of kernels, and their microseconds in one step."""
PRODUCTS = re.compile(
    r"gemm|cutlass|nvjet|xmma|cublas|splitk|sm\d+_|flash|fmha|cudnn|attention|conv_?depthwise|nccl",
    re.I,
)
"""Names of the kernels of matrix products and attention, of short convolutions, and of
communication."""


def kernels_of(step: Step) -> Kernels:
    """Return the kernels of a step on a GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return [(event.name, event.device_time_total) for event in events]


def summary(kernels: Iterable[Kernels]) -> tuple[float, float, list[tuple[str, float, int]]]:
    """Return the milliseconds of all kernels of a step and of those beside matrix products and
    attention, medians of several steps; and these of the last step by name, longest first."""
    whole, others, last = list[float](), list[float](), Kernels()
    for step in kernels:
        last = [(name, us) for name, us in step if not PRODUCTS.search(name)]
        whole.append(sum(us for _, us in step) / 1e3)
        others.append(sum(us for _, us in last) / 1e3)
    times, counts = Counter[str](), Counter[str]()
    for name, us in last:
        times[name] += us  # type: ignore[assignment]
        counts[name] += 1
    by_name = [(name, us / 1e3, counts[name]) for name, us in times.most_common()]
    return median(whole), median(others), by_name


def milliseconds_of(step: Step) -> float:
    """Return how long a step takes between two events on a GPU, which waits for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
