"""The steps of one case under every way, in turns, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import sentence
from benchmarks.training.model import MODELS, Norm, Weights, block, make_weights, rotation
from benchmarks.training.ranges import RANGE, in_ranges
from benchmarks.training.ways import MODES, WAYS
from generator.evaluate.gpu.order import balanced_orders

TOKENS = 16384
BLOCKS = 2


@dataclass(frozen=True)
class Case:
    """One row of models and settings. mode: of MODES, where `blocks` compiles each by itself and
    `whole` all in one graph; checkpointed: a block's activations are computed again for its
    backward."""

    model: str
    length: int
    mode: str
    checkpointed: bool = False

    def __str__(self) -> str:
        return f"{self.model},{self.length},{self.mode}" + ",checkpoint" * self.checkpointed

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse `MODEL,LENGTH,MODE[,checkpoint]`. Raises ValueError."""
        if text.count(",") < 2:
            raise ValueError(text)
        model, length, mode, *more = text.split(",")
        if model not in MODELS or mode not in MODES or not length.isdigit():
            raise ValueError(text)
        if more not in ([], ["checkpoint"]):
            raise ValueError(text)
        return cls(model, int(length), mode, bool(more))


class Steps:
    """Forward and backward of a case's blocks: of all ways on the same weights and inputs."""

    def __init__(self, case: Case, device: torch.device, tokens: int = TOKENS) -> None:
        # Every way compiles the same function, with and without deterministic algorithms.
        torch._dynamo.config.recompile_limit = 4 * len(WAYS)
        torch.manual_seed(0)
        self.case, self.widths = case, MODELS[case.model]
        self.weights = [make_weights(self.widths, device) for _ in range(BLOCKS)]
        shape = (tokens // case.length, case.length, self.widths.hidden)
        self.x = torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_()
        self.dy = torch.randn(shape, device=device).to(torch.bfloat16)
        self.rotation = rotation(case.length, self.widths.head, device)
        self.calls: dict[str, Callable[[], None]] = {}
        self.reasons: dict[str, str] = {}
        for name, way in WAYS.items():
            if case.mode in way.modes:
                try:
                    self.calls[name] = self._step(name)
                    self.calls[name]()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                except Exception as error:
                    self.calls.pop(name, None)
                    self.reasons[name] = sentence(error)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of everything, by the last step."""
        tensors = [self.x, *(w for weights in self.weights for w in weights.values())]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def _forget(self) -> None:
        self.x.grad = None
        for weights in self.weights:
            for weight in weights.values():
                weight.grad = None

    def _step(self, name: str, *, ranges: bool = False) -> Callable[[], None]:
        """ranges: the profiler shows what belongs to the norms."""
        way = WAYS[name].load()
        norm = in_ranges(way.norm) if ranges else way.norm

        def compiled(function: Any) -> Any:
            # Without fullgraph, code that cannot be compiled would be timed as if it were.
            return torch.compile(function, backend=way.backend or "inductor", fullgraph=True)

        model = self._model(norm, compiled if self.case.mode == "blocks" else None)
        if self.case.mode == "whole":
            model = compiled(model)

        def step() -> None:
            self._forget()
            with way.inside():
                model(self.x, self.weights).backward(self.dy)

        return step

    def _model(
        self, norm: Norm, compiled: Callable[[Any], Any] | None
    ) -> Callable[[torch.Tensor, list[Weights]], torch.Tensor]:
        cos, sin = self.rotation

        def one(x: torch.Tensor, weights: Weights) -> torch.Tensor:
            return block(x, weights, cos, sin, widths=self.widths, norm=norm)

        if compiled is not None:
            one = compiled(one)

        def model(x: torch.Tensor, blocks: list[Weights]) -> torch.Tensor:
            for weights in blocks:
                if self.case.checkpointed:
                    x = checkpoint(one, x, weights, use_reentrant=False)
                else:
                    x = one(x, weights)
            return x

        return model

    def time(self, rounds: int, warmups: int, seed: int) -> dict[str, list[float]]:
        """Milliseconds of every step. All ways take turns in a balanced order, which each process
        has of its own, by its seed. The first step on an idle GPU takes longer than others and is
        not timed."""
        names = list(self.calls)
        found: dict[str, list[float]] = {name: [] for name in names}
        before = balanced_orders(len(names), warmups, seed)
        for number, order in enumerate([*before, *balanced_orders(len(names), rounds, seed)]):
            self.calls[names[0]]()
            events = {}
            for name in (names[which] for which in order):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.calls[name]()
                end.record()
                events[name] = start, end
            torch.cuda.synchronize()
            if number >= warmups:
                for name, (start, end) in events.items():
                    found[name].append(start.elapsed_time(end))
        return found

    def repeats_bits(self, name: str) -> bool:
        """Return True if all gradients have the same bits in three runs. Attention is deterministic
        then: with warn_only it would stay as it is."""
        torch.use_deterministic_algorithms(True)
        try:
            self.calls[name]()
            first = [gradient.clone() for gradient in self.gradients()]
            for _ in range(2):
                self.calls[name]()
                if not all(map(torch.equal, first, self.gradients())):
                    return False
            return True
        finally:
            torch.use_deterministic_algorithms(False)

    def norm_ms(self, name: str) -> float:
        """Milliseconds of all kernels that the norms of a step launch, copies and sums too: the
        median of three steps. Only of eager code, because a compiler fuses norms with what is
        around them."""
        step, found = self._step(name, ranges=True), []
        for _ in range(3):
            step()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                step()
                torch.cuda.synchronize()
            calls = [e for e in profiler.events() if e.name == RANGE]
            on_cpu = [e for e in calls if e.device_type == DeviceType.CPU]
            found.append(sum(event.device_time_total for event in on_cpu) / 1e3)
        return median(found)


def measure(case: Case, rounds: int, warmups: int, process: int) -> dict[str, Any]:
    """Measure a case in one process: milliseconds of every step by way, why ways are missing, and
    the GPU's `uuid`. The first of several processes, number 0, also finds out whether bits repeat
    and, of eager steps, what norms take."""
    steps = Steps(case, torch.device("cuda"))
    found: dict[str, Any] = {"ms": steps.time(rounds, warmups, process), "missing": steps.reasons}
    found["uuid"] = str(torch.cuda.get_device_properties(0).uuid)
    if process == 0:
        found["repeats_bits"] = {name: steps.repeats_bits(name) for name in steps.calls}
        if case.mode == "eager":
            found["norm_ms"] = {name: steps.norm_ms(name) for name in steps.calls}
    return found
