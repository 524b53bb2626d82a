"""Cold-L2 timing by CUDA graphs: blocks in which candidates and a reference take turns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from generator.evaluate.gpu.l2_flush import ColdCache
from generator.evaluate.gpu.order import balanced_orders
from generator.evaluate.gpu.rotation import FLUSH, Operation, Timed, calls_of, sets_for

WARM_SECONDS = 0.005


class Timer:
    """Times operations on the current device. A block is one CUDA graph: event, operation, event,
    for every operation in turn and several rounds, in a balanced order (see order.py), and before
    each what the condition asks for (see rotation.py). So no interval contains the host or a graph
    launch, all operations of a block see the same clocks, and none has always the same one before
    it."""

    def __init__(
        self, device: torch.device, flush_bytes: int | None = None, condition: str = FLUSH
    ) -> None:
        self.device, self.condition = device, condition
        self.cold = ColdCache(device, flush_bytes)
        self.stream = torch.cuda.Stream(device)
        self._blocks = 0

    def sets(self, set_bytes: int) -> int:
        """Return the number of sets of inputs and outputs, with so many bytes each, that operations
        shall have. It is asked before they are made."""
        if self.condition == FLUSH:
            return 1
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free_bytes = torch.cuda.mem_get_info(self.device)[0] + kept
        return sets_for(set_bytes, l2_bytes, free_bytes)

    def facts(self) -> dict[str, Any]:
        """Return the facts about how times were taken that a result file states."""
        return {
            "condition": self.condition,
            "order": "balanced",
            "flush_bytes": self.cold.flush_bytes,
        }

    def prepare(self, value: float) -> None:
        """Do what precedes an operation on its only inputs, outside its interval. value: written by
        the flush, another one in each round."""
        self.cold.flush(value)

    def block(self, operations: Sequence[Operation], rounds: int) -> list[list[float]]:
        """Return microseconds by operation and round. Every call of them runs once, untimed,
        before. Operations with several sets take these in turns, and nothing comes between."""
        every = [calls_of(operation) for operation in operations]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for call in (call for calls in every for call in calls):
                call()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            events = self._launch(every, balanced_orders(len(every), rounds, self._blocks))
        self._blocks += 1
        # Replay until clocks and memory have settled; the events keep the last replay's times.
        until = time.monotonic() + WARM_SECONDS
        replays = 0
        while replays < 2 or time.monotonic() < until:
            with torch.cuda.stream(self.stream):
                graph.replay()
            self.stream.synchronize()
            replays += 1
        return [[a.elapsed_time(b) * 1e3 for a, b in pairs] for pairs in events]

    def _launch(
        self, every: Sequence[Sequence[Timed]], orders: Sequence[Sequence[int]]
    ) -> list[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
        """Enqueue all rounds; the events around each operation, by round. The end of the rounds
        comes before them once more, without events, on all sets: so the first ones, too, take what
        was used longest ago. What a call returns lives until its set is taken again."""
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in every]
        sets, turns = max(map(len, every)), count()
        kept: deque[object] = deque(maxlen=sets - 1)

        def call(which: int) -> None:
            calls = every[which]
            kept.append(calls[next(turns) % len(calls)]())

        line = [which for order in orders for which in order]
        for which in (line * sets)[-sets:] if sets > 1 else ():
            call(which)
        for round_, order in enumerate(orders):
            for which in order:
                start = torch.cuda.Event(enable_timing=True, external=True)
                end = torch.cuda.Event(enable_timing=True, external=True)
                if len(every[which]) == 1:
                    self.prepare(float(round_))
                start.record()
                call(which)
                end.record()
                events[which].append((start, end))
        return events
