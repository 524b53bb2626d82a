"""One kernel on one problem, with everything that a run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from generator.evaluate.verify.guarded import Guarded
from generator.operations.operation import Runner

WROTE_OUTSIDE = "wrote outside its outputs or the workspace"
LEFT_CHANGED = "left a counter or an accumulator of the workspace changed"


class Bench:
    """One kernel on one problem: outputs with guards, a workspace, and the way to run it."""

    def __init__(
        self, runner: Runner, outputs: Mapping[str, Guarded], device: torch.device
    ) -> None:
        self.runner, self.outputs = runner, dict(outputs)
        self.workspace = Guarded((runner.workspace_bytes,), torch.uint8, device)
        self.clean = self.workspace.tensor[: runner.clean_bytes]
        self.scratch = self.workspace.tensor[runner.clean_bytes :]
        self.clean.zero_()

    def run(
        self,
        inputs: Any,
        *,
        instead: Mapping[str, torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """Enqueue one call. instead: other places for some outputs, None for one that is not
        wanted; options: those of the operation's runner."""
        places = {name: guarded.tensor for name, guarded in self.outputs.items()}
        self.runner.run(inputs, {**places, **(instead or {})}, self.workspace.tensor, **options)

    def arm(self) -> None:
        """Start a check: guards in order, counters and accumulators at zero."""
        for guarded in (*self.outputs.values(), self.workspace):
            guarded.arm()
        self.clean.zero_()

    def poison(self, byte: int = 0xFF) -> None:
        for guarded in self.outputs.values():
            guarded.poison(byte)
        self.scratch.fill_(byte)

    def bits(self) -> dict[str, torch.Tensor]:
        """A copy of the bytes of every output."""
        return {name: guarded.inside.clone() for name, guarded in self.outputs.items()}

    def fault(self) -> str:
        """Return what is wrong with the memory that the last run left behind, "" when nothing
        is."""
        if not all(guarded.intact() for guarded in (*self.outputs.values(), self.workspace)):
            return WROTE_OUTSIDE
        if bool(self.clean.any()):
            return LEFT_CHANGED
        return ""
