"""Cold-L2 timing by CUDA graphs: blocks in which candidates and a reference take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from generator.evaluate.gpu.l2_flush import ColdCache
from generator.evaluate.gpu.order import balanced_orders

Timed = Callable[[], object]
"""Launches one whole operation on the current stream, without waiting."""

WARM_SECONDS = 0.005


class Timer:
    """Times operations on the current device. A block is one CUDA graph: flush, event, operation,
    event, for every operation in turn and several rounds, in a balanced order (see order.py). So no
    interval contains the host or a graph launch, all operations of a block see the same clocks, and
    none has always the same one before it."""

    def __init__(self, device: torch.device, flush_bytes: int | None = None) -> None:
        self.device = device
        self.cold = ColdCache(device, flush_bytes)
        self.stream = torch.cuda.Stream(device)
        self._blocks = 0

    def prepare(self, value: float) -> None:
        """What comes before every operation, outside its interval. value: another in each round."""
        self.cold.flush(value)

    def block(self, operations: Sequence[Timed], rounds: int) -> list[list[float]]:
        """Microseconds by operation and round. Every operation runs once, untimed, before."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for operation in operations:
                operation()
        self.stream.synchronize()
        orders = balanced_orders(len(operations), rounds, self._blocks)
        self._blocks += 1
        graph = torch.cuda.CUDAGraph()
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in operations]
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for round_, order in enumerate(orders):
                for which in order:
                    before = torch.cuda.Event(enable_timing=True, external=True)
                    after = torch.cuda.Event(enable_timing=True, external=True)
                    self.prepare(float(round_))
                    before.record()
                    operations[which]()
                    after.record()
                    events[which].append((before, after))
        # Replay until clocks and memory have settled; the events keep the last replay's times.
        until = time.monotonic() + WARM_SECONDS
        replays = 0
        while replays < 2 or time.monotonic() < until:
            with torch.cuda.stream(self.stream):
                graph.replay()
            self.stream.synchronize()
            replays += 1
        return [[a.elapsed_time(b) * 1e3 for a, b in pairs] for pairs in events]
