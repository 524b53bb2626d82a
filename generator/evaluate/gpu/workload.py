"""The memory that the kernels of one problem work on: inputs, room for outputs, and the results
expected there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.rotation import Timed, copies
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.guarded import Guarded
from generator.operations import operation_of
from generator.operations.operation import TORCH_DTYPE
from generator.problem import Problem

Set = tuple[Any, dict[str, torch.Tensor]]
"""Inputs, and places for outputs by name."""


class Workload:
    """One problem of an operation on the device: inputs, what outputs have to be, room for them,
    and the floor."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        operation = operation_of(problem)
        self.problem, self.device, self.operation = problem, device, operation
        self.inputs = operation.make_inputs(problem, device)
        self.cancelling = operation.make_cancelling(problem, self.inputs)
        self.expected = operation.bounds(problem, self.inputs)
        self.outputs = self.new_outputs()
        places = {name: guarded.tensor for name, guarded in self.outputs.items()}
        self.floor_bytes = operation.traffic_bytes(problem)
        self.floor = operation.floor(problem, self.inputs, places)
        self._sets: list[Set] = [(self.inputs, places)]
        self._numbers: dict[str, int] = {}

    def number_of_sets(self, timer: Timer) -> int:
        """Return the number of sets that rotate under the timer's condition, the same each time."""
        if timer.condition not in self._numbers:
            self._numbers[timer.condition] = timer.sets(self.floor_bytes)
        return self._numbers[timer.condition]

    def sets(self, number: int) -> list[Set]:
        """Return `number` sets of inputs, with places for outputs; the first one is the workload's
        own."""
        (inputs, places), missing = self._sets[0], number - len(self._sets)
        for more in copies(inputs, missing + 1)[1:]:
            self._sets.append((more, {name: torch.empty_like(t) for name, t in places.items()}))
        return self._sets[:number]

    def operations(self, benches: Sequence[Bench], sets: int) -> list[list[Timed]]:
        """The floor and kernels, each with a call for each of so many sets."""
        found = self.sets(sets)
        floor = [self.operation.floor(self.problem, inputs, places) for inputs, places in found]
        return [floor] + [
            [partial(bench.run, inputs, instead=places) for inputs, places in found]
            for bench in benches
        ]

    def new_outputs(self) -> dict[str, Guarded]:
        """Room for the outputs of one kernel."""
        return {
            out.name: Guarded(out.shape, TORCH_DTYPE[out.dtype], self.device)
            for out in self.operation.outputs(self.problem)
        }

    def bench(self, candidate: Candidate) -> Bench:
        runner = self.operation.load(candidate.cubin, candidate.spec, self.problem)
        return Bench(runner, self.outputs, self.device)
