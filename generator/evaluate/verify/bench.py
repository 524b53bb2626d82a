"""One kernel on one problem, with everything that a run needs."""

from __future__ import annotations

import torch

from generator.evaluate.verify.guarded import Guarded
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem
from generator.runtime.launch.launch import DW_IN_WEIGHT_DTYPE, launch_backward
from generator.runtime.launch.loaded_kernel import LoadedKernel
from generator.runtime.spec import Launch


class Bench:
    """One kernel on one problem: outputs with guards, a workspace, and the way to run it."""

    def __init__(
        self,
        kernel: LoadedKernel,
        problem: Problem,
        launch: Launch,
        dx: Guarded,
        dw: Guarded,
        dresidual: Guarded | None = None,
    ) -> None:
        """dresidual: where the kernel writes dx in the residual's dtype as well."""
        self.kernel, self.problem, self.launch = kernel, problem, launch
        self.dx, self.dw, self.dresidual = dx, dw, dresidual
        device = dx.buffer.device
        self.workspace = Guarded((launch.workspace_bytes,), torch.uint8, device)
        self.clean = self.workspace.tensor[: launch.scratch_offset]
        self.scratch = self.workspace.tensor[launch.scratch_offset :]
        self.clean.zero_()

    @property
    def outputs(self) -> dict[str, Guarded]:
        named = {"dw": self.dw, "dx": self.dx}
        return named | ({"dresidual_out": self.dresidual} if self.dresidual else {})

    def run(
        self,
        inputs: Inputs,
        *,
        want_dx: bool = True,
        want_dw: bool = True,
        dw: torch.Tensor | None = None,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
    ) -> None:
        """Enqueue one call. inputs.weight may be None here, and x and dy packed as (M / H, H, N);
        dw, dw_mode: another place for dw, and what to do with it."""
        dw = self.dw.tensor if dw is None else dw
        launch_backward(
            self.kernel,
            self.launch,
            torch.cuda.current_stream().cuda_stream,
            x=inputs.x,
            dy=inputs.dy,
            rstd=inputs.rstd,
            weight=inputs.weight,
            dx=self.dx.tensor if want_dx else None,
            dw=dw if want_dw else None,
            workspace=self.workspace.tensor.data_ptr(),
            dresidual=inputs.residual,
            dresidual_out=self.dresidual.tensor if self.dresidual and want_dx else None,
            dw_mode=dw_mode,
            weight_offset=inputs.offset,
        )

    def arm(self) -> None:
        """Start a check: guards in order, counters and accumulators at zero."""
        for guarded in (*self.outputs.values(), self.workspace):
            guarded.arm()
        self.clean.zero_()

    def poison(self, byte: int = 0xFF) -> None:
        for guarded in self.outputs.values():
            guarded.poison(byte)
        self.scratch.fill_(byte)

    def fault(self) -> str:
        """What the last run left behind that it should not have."""
        if not all(guarded.intact() for guarded in (*self.outputs.values(), self.workspace)):
            return "wrote outside its outputs or the workspace"
        if bool(self.clean.any()):
            return "left a counter or an accumulator of the workspace changed"
        return ""
