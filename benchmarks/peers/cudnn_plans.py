"""cuDNN through nvidia-cudnn-frontend: a graph of one operation, run by one of the plans that
cuDNN's heuristics offer for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.peers.peer import TUNER_ROUNDS, Bind, Gradients
from generator.evaluate.gpu.rotation import Timed, copies
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs
from generator.operations.rmsnorm_forward import EPS, ForwardInputs

PLAN_SECONDS = 15.0
"""Seconds for building the plans of a shape, each of which may take several; no further one is
built then."""


def cudnn_version() -> str:
    """Return the version of the library that the frontend has loaded."""
    import cudnn

    return f"cuDNN {cudnn.backend_version_string()}"


class CudnnGraph:
    """One operation for the shapes and dtypes of its inputs. plans: how many the heuristics offer,
    the best guess first. Raises what cuDNN raises for a shape or dtype that it does not serve."""

    def __init__(self, cudnn: Any, handle: Any, inputs: Any) -> None:
        self.cudnn, self.handle = cudnn, handle
        real = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=handle,
            io_data_type=self._dtype(inputs.x),
            intermediate_data_type=real,
            compute_data_type=real,
        )
        self.given, self.outputs = self.operation(inputs)
        for output, like in zip(self.outputs, self.like(inputs), strict=True):
            output.set_output(True).set_data_type(self._dtype(like))
        self.graph.validate()
        self.graph.build_operation_graph()
        modes = cudnn.heur_mode
        self.graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
        self.plans = int(self.graph.get_execution_plan_count())
        self._built: set[int] = set()

    def operation(self, inputs: Any) -> tuple[list[Any], list[Any]]:
        """Puts the operation into the graph: its arguments and its results."""
        raise NotImplementedError

    def buffers(self, inputs: Any) -> list[torch.Tensor]:
        """The memory of each argument."""
        raise NotImplementedError

    def like(self, inputs: Any) -> list[torch.Tensor]:
        """Return tensors that have the shapes and dtypes of the results."""
        raise NotImplementedError

    def _dtype(self, tensor: torch.Tensor) -> Any:
        types = self.cudnn.data_type
        return {
            torch.bfloat16: types.BFLOAT16,
            torch.float16: types.HALF,
            torch.float32: types.FLOAT,
        }[tensor.dtype]

    def _tensor(self, tensor: torch.Tensor, rows: int, columns: int) -> Any:
        shape, strides = [rows, columns, 1, 1], [columns, 1, columns, columns]
        return self.graph.tensor(dim=shape, stride=strides, data_type=self._dtype(tensor))

    def call(self, plan: int, inputs: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The operation by one of the plans, on the stream that is current when it is called."""
        if plan not in self._built:
            self.graph.build_plan_at_index(plan)
            self._built.add(plan)
        size = self.graph.get_workspace_size_plan_at_index(plan)
        device = inputs.x.device
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        given = dict(zip(self.given, self.buffers(inputs), strict=True))
        like = self.like(inputs)

        def run() -> tuple[torch.Tensor, ...]:
            made = [torch.empty_like(one) for one in like]
            stream = torch.cuda.current_stream(device).cuda_stream
            self.cudnn.set_stream(self.handle, stream)
            pack = given | dict(zip(self.outputs, made, strict=True))
            self.graph.execute_plan_at_index(pack, workspace, plan, self.handle)
            return tuple(made)

        return run


class BackwardGraph(CudnnGraph):
    """The backward of RMSNorm, or of LayerNorm where the inputs have a mean."""

    def operation(self, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        M, N = inputs.x.shape
        given = {
            "grad": self._tensor(inputs.dy, M, N),
            "input": self._tensor(inputs.x, M, N),
            "scale": self._tensor(inputs.weight, 1, N),
            "inv_variance": self._tensor(inputs.rstd, M, 1),
        }
        if not hasattr(inputs, "mean"):
            outputs = self.graph.rmsnorm_backward(**given, has_dbias=False)[:2]
        else:
            given["mean"] = self._tensor(inputs.mean, M, 1)
            outputs = self.graph.layernorm_backward(**given)
        return list(given.values()), list(outputs)

    def buffers(self, inputs: Inputs) -> list[torch.Tensor]:
        mean = [] if not hasattr(inputs, "mean") else [inputs.mean]
        return [inputs.dy, inputs.x, inputs.weight, inputs.rstd, *mean]

    def like(self, inputs: Inputs) -> list[torch.Tensor]:
        dbeta = [] if not hasattr(inputs, "mean") else [inputs.weight]
        return [inputs.x, inputs.weight, *dbeta]


class ForwardGraph(CudnnGraph):
    """The forward of RMSNorm in training: y and rstd."""

    def operation(self, inputs: ForwardInputs) -> tuple[list[Any], list[Any]]:
        assert inputs.weight is not None
        M, N = inputs.x.shape
        one, real = [1, 1, 1, 1], self.cudnn.data_type.FLOAT
        epsilon = self.graph.tensor(dim=one, stride=one, data_type=real, is_pass_by_value=True)
        given = {
            "input": self._tensor(inputs.x, M, N),
            "scale": self._tensor(inputs.weight, 1, N),
            "epsilon": epsilon,
        }
        phase = self.cudnn.norm_forward_phase.TRAINING
        return list(given.values()), list(self.graph.rmsnorm(norm_forward_phase=phase, **given))

    def buffers(self, inputs: ForwardInputs) -> list[torch.Tensor]:
        assert inputs.weight is not None
        return [inputs.x, inputs.weight, torch.full((1, 1, 1, 1), EPS)]

    def like(self, inputs: ForwardInputs) -> list[torch.Tensor]:
        return [inputs.x, inputs.x.new_empty((len(inputs.x), 1), dtype=torch.float32)]


def cudnn_heuristic(timer: Timer) -> Bind:
    """The first plan that can be built."""
    return _bind(None)


def cudnn_best(timer: Timer) -> Bind:
    """The fastest plan by the timer of this benchmark, chosen once for every shape."""
    return _bind(timer)


def _bind(timer: Timer | None) -> Bind:
    import cudnn

    handle = cudnn.create_handle()
    chosen: dict[tuple[Any, ...], tuple[CudnnGraph, int]] = {}

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        kind = (*inputs.x.shape, inputs.x.dtype, inputs.weight.dtype)
        if kind not in chosen:
            made = BackwardGraph(cudnn, handle, inputs)
            chosen[kind] = made, choose_plan(made, inputs, timer)
        graph, plan = chosen[kind]
        return graph.call(plan, inputs)

    return bind


def cudnn_forward(inputs: ForwardInputs, timer: Timer) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The forward by its fastest plan."""
    import cudnn

    graph = ForwardGraph(cudnn, cudnn.create_handle(), inputs)
    return graph.call(choose_plan(graph, inputs, timer), inputs)


def choose_plan(graph: CudnnGraph, inputs: Any, timer: Timer | None) -> int:
    """The first plan that can be built, with a timer the fastest, under the timer's condition.
    Raises RuntimeError for none."""
    calls: dict[int, list[Timed]] = {}
    moved = sum(tensor.nbytes for tensor in (*graph.buffers(inputs), *graph.like(inputs)))
    sets = copies(inputs, timer.sets(moved)) if timer else [inputs]
    failure: Exception | None = None
    until = time.monotonic() + PLAN_SECONDS
    for plan in range(graph.plans):
        if calls and time.monotonic() > until:
            break
        try:
            call = graph.call(plan, inputs)
            if timer is None:
                return plan
            call()
            torch.cuda.synchronize()
            calls[plan] = [call, *(graph.call(plan, more) for more in sets[1:])]
        except Exception as error:
            failure = failure or error
            torch.cuda.synchronize()  # raises where the plan left the GPU unusable
    if timer is None or not calls:
        raise RuntimeError(f"none of cuDNN's {graph.plans} plans runs: {failure}") from failure
    times = map(median, timer.block([*calls.values()], TUNER_ROUNDS))
    return min(zip(times, calls, strict=True))[1]
