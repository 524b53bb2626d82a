"""A timer that is told how long each operation takes, by the name that its calls write down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from generator.evaluate.gpu.rotation import Operation, calls_of


class NamedTimes:
    """times: of each round, by name. Every operation has a call for each of `number` sets. blocks:
    the names of those that took turns."""

    device = None

    def __init__(
        self, log: list[str], times: Mapping[str, Sequence[float]], number: int = 1
    ) -> None:
        self.log, self.times, self.number = log, times, number
        self.blocks: list[list[str]] = []

    def sets(self, set_bytes: int) -> int:
        return self.number

    def block(self, operations: Sequence[Operation], rounds: int) -> list[list[float]]:
        names = [self._name(operation) for operation in operations]
        self.blocks.append(names)
        return [list(self.times[name]) for name in names]

    def ending(self, operation: Callable[[], object]) -> Callable[[], object]:
        return operation

    def _name(self, operation: Operation) -> str:
        calls = calls_of(operation)
        assert len(calls) == self.number, "a call for each set"
        self.log.clear()
        for call in calls:
            call()
        (name,) = {*self.log}
        assert len(self.log) == len(calls), "each call does the work once"
        return name


class NamedWorkload:
    """Its floor and benches write down who they are; a bench is made of a name."""

    floor_bytes = 1

    def __init__(self, log: list[str], inputs: Any = None) -> None:
        self.log, self.inputs = log, inputs

    def saying(self, name: str) -> Callable[..., None]:
        return lambda *_: self.log.append(name)

    @property
    def floor(self) -> Callable[..., None]:
        return self.saying("floor")

    def operations(self, benches: Sequence[str], sets: int) -> list[list[Callable[[], None]]]:
        return [[self.saying(name)] * sets for name in ("floor", *benches)]

    def sets(self, number: int) -> list[tuple[Any, Any]]:
        return [(self.inputs, {})] * number
