"""cuDNN's backward through nvidia-cudnn-frontend: a graph of one operation, run by one of the plans
that cuDNN's heuristics offer for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.peers.peer import TUNER_ROUNDS, Bind, Gradients
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs

PLAN_SECONDS = 15.0
"""For building the plans of a shape, which may take seconds each; no further one is built then."""


def cudnn_version() -> str:
    """Of the library that the frontend has loaded."""
    import cudnn

    return f"cuDNN {cudnn.backend_version_string()}"


class CudnnGraph:
    """One backward for the shapes and dtypes of `inputs`. plans: how many the heuristics offer, the
    best guess first. Raises what cuDNN raises for a shape or dtype that it does not serve."""

    def __init__(self, cudnn: Any, handle: Any, inputs: Inputs) -> None:
        self.cudnn, self.handle = cudnn, handle
        real = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=handle,
            io_data_type=self._dtype(inputs.x),
            intermediate_data_type=real,
            compute_data_type=real,
        )
        M, N = inputs.x.shape
        self.given = {
            "grad": self._tensor(inputs.dy, M, N),
            "input": self._tensor(inputs.x, M, N),
            "scale": self._tensor(inputs.weight, 1, N),
            "inv_variance": self._tensor(inputs.rstd, M, 1),
        }
        if inputs.mean is None:
            outputs = self.graph.rmsnorm_backward(**self.given, has_dbias=False)[:2]
        else:
            self.given["mean"] = self._tensor(inputs.mean, M, 1)
            outputs = self.graph.layernorm_backward(**self.given)
        self.outputs = list(outputs)
        for output, like in zip(outputs, _like(inputs), strict=False):
            output.set_output(True).set_data_type(self._dtype(like))
        self.graph.validate()
        self.graph.build_operation_graph()
        modes = cudnn.heur_mode
        self.graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
        self.plans = int(self.graph.get_execution_plan_count())
        self._built: set[int] = set()

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

    def call(self, plan: int, inputs: Inputs) -> Callable[[], Gradients]:
        """The operation by one of the plans, on the stream that is current when it is called."""
        if plan not in self._built:
            self.graph.build_plan_at_index(plan)
            self._built.add(plan)
        size = self.graph.get_workspace_size_plan_at_index(plan)
        device = inputs.x.device
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        # In the order of the arguments and results of the graph.
        buffers = [inputs.dy, inputs.x, inputs.weight, inputs.rstd]
        buffers += [] if inputs.mean is None else [inputs.mean]
        given = dict(zip(self.given.values(), buffers, strict=True))
        like = _like(inputs)

        def backward() -> Gradients:
            made = [torch.empty_like(one) for one, _ in zip(like, self.outputs, strict=False)]
            stream = torch.cuda.current_stream(device).cuda_stream
            self.cudnn.set_stream(self.handle, stream)
            pack = given | dict(zip(self.outputs, made, strict=True))
            self.graph.execute_plan_at_index(pack, workspace, plan, self.handle)
            return tuple(made)

        return backward


def _like(inputs: Inputs) -> Gradients:
    """What each result has the shape and dtype of; the last of LayerNorm only."""
    return inputs.x, inputs.weight, inputs.weight


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
            graph = CudnnGraph(cudnn, handle, inputs)
            chosen[kind] = graph, choose_plan(graph, inputs, timer)
        graph, plan = chosen[kind]
        return graph.call(plan, inputs)

    return bind


def choose_plan(graph: CudnnGraph, inputs: Inputs, timer: Timer | None) -> int:
    """The first plan that can be built, with a timer the fastest. Raises RuntimeError for none."""
    calls: dict[int, Callable[[], Gradients]] = {}
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
            calls[plan] = call
        except Exception as error:
            failure = failure or error
            torch.cuda.synchronize()  # raises where the plan left the GPU unusable
    if timer is None or not calls:
        raise RuntimeError(f"none of cuDNN's {graph.plans} plans runs: {failure}") from failure
    times = map(median, timer.block([*calls.values()], TUNER_ROUNDS))
    return min(zip(times, calls, strict=True))[1]
