"""CUDA's graphs, streams and events on a clock of their own, for the loop that times operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

L2_BYTES = 50 << 20
FREE_BYTES = 60 << 30


class FakeClock:
    """A GPU whose operations take what they say. log: what ran, in order; `now`: microseconds.

    What a graph captures runs at once, and again at each replay, as do its events: like those of a
    real one, they keep the times of the last replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, []  # type: float, list[str]
        self._captured: list[Callable[[], None]] | None = None
        clock = self

        class Event:
            def __init__(self, **_: object) -> None:
                self.at = 0.0

            def record(self) -> None:
                clock.do(lambda: setattr(self, "at", clock.now))

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

            def synchronize(self) -> None: ...

        class Graph:
            def __init__(self) -> None:
                self.work: list[Callable[[], None]] = []

            def replay(self) -> None:
                for work in self.work:
                    work()

        class Stream:
            def __init__(self, *_: object) -> None: ...

            def synchronize(self) -> None: ...

            def wait_stream(self, other: object) -> None: ...

        class Cache:
            flush_bytes = 256 << 20

            def __init__(self, *_: object) -> None: ...

            def flush(self, value: float) -> None:
                clock.run("flush", 100.0)

            def write(self, value: float) -> None:
                clock.run("write", 60.0)

        @contextmanager
        def capture(graph: Graph, **_: object) -> Iterator[None]:
            clock._captured = graph.work
            yield
            clock._captured = None

        @contextmanager
        def use(stream: object) -> Iterator[None]:
            yield

        named: dict[str, Any] = {"Event": Event, "CUDAGraph": Graph, "Stream": Stream}
        named |= {"graph": capture, "stream": use, "current_stream": Stream}
        named |= {"synchronize": lambda *_: None}
        named |= {"mem_get_info": lambda _: (FREE_BYTES, 0)}
        named |= {"memory_reserved": lambda _: 0, "memory_allocated": lambda _: 0}
        named |= {"get_device_properties": lambda _: SimpleNamespace(L2_cache_size=L2_BYTES)}
        for name, fake in named.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr("generator.evaluate.gpu.timer.ColdCache", Cache)

    def do(self, work: Callable[[], None]) -> None:
        """Work on the stream: at once, or whenever the graph is replayed that captures it."""
        if self._captured is not None:
            self._captured.append(work)
        else:
            work()

    def run(self, name: str, us: float) -> None:
        """An operation of so many microseconds."""

        def work() -> None:
            self.log.append(name)
            self.now += us

        self.do(work)

    def operation(self, name: str, us: float) -> Callable[[], None]:
        """The call that launches it."""
        return lambda: self.run(name, us)
