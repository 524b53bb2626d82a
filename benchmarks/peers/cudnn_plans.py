"""cuDNN's backward through nvidia-cudnn-frontend: a graph of one operation, run by one of the plans
that cuDNN's heuristics offer for it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.peers.peer import TUNER_ROUNDS, Bind, Gradients
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs


def cudnn_version() -> str:
    """Of the library that the frontend has loaded."""
    import cudnn

    return f"cuDNN {cudnn.backend_version_string()}"


class CudnnGraph:
    """One backward on given inputs. plans: how many the heuristics offer, the best guess first.
    Raises what cuDNN raises for a shape or dtype that it does not serve."""

    def __init__(self, cudnn: Any, handle: Any, inputs: Inputs) -> None:
        self.cudnn, self.handle, self.inputs = cudnn, handle, inputs
        real = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=handle,
            io_data_type=self._dtype(inputs.x),
            intermediate_data_type=real,
            compute_data_type=real,
        )
        M, N = inputs.x.shape
        given = {
            "grad": self._tensor(inputs.dy, M, N),
            "input": self._tensor(inputs.x, M, N),
            "scale": self._tensor(inputs.weight, 1, N),
            "inv_variance": self._tensor(inputs.rstd, M, 1),
        }
        buffers = [inputs.dy, inputs.x, inputs.weight, inputs.rstd]
        if inputs.mean is None:
            outputs = self.graph.rmsnorm_backward(**given, has_dbias=False)[:2]
        else:
            given["mean"] = self._tensor(inputs.mean, M, 1)
            buffers.append(inputs.mean)
            outputs = self.graph.layernorm_backward(**given)
        self.buffers = dict(zip(given.values(), buffers, strict=True))
        self.outputs = dict(zip(outputs, (inputs.x, inputs.weight, inputs.weight), strict=False))
        for output, like in self.outputs.items():
            output.set_output(True).set_data_type(self._dtype(like))
        self.graph.validate()
        self.graph.build_operation_graph()
        modes = cudnn.heur_mode
        self.graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
        self.plans = int(self.graph.get_execution_plan_count())

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

    def call(self, plan: int) -> Callable[[], Gradients]:
        """The operation by one of the plans, on the stream that is current when it is called."""
        self.graph.build_plan_at_index(plan)
        size = self.graph.get_workspace_size_plan_at_index(plan)
        device = self.inputs.x.device
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=device)

        def backward() -> Gradients:
            made = {output: torch.empty_like(like) for output, like in self.outputs.items()}
            stream = torch.cuda.current_stream(device).cuda_stream
            self.cudnn.set_stream(self.handle, stream)
            pack = {**self.buffers, **made}
            self.graph.execute_plan_at_index(pack, workspace, plan, self.handle)
            return tuple(made.values())

        return backward


def cudnn_heuristic(timer: Timer) -> Bind:
    """The first plan that can be built."""
    return _bind(None)


def cudnn_best(timer: Timer) -> Bind:
    """The fastest plan by the timer of this benchmark, chosen once for every shape."""
    return _bind(timer)


def _bind(timer: Timer | None) -> Bind:
    import cudnn

    handle = cudnn.create_handle()
    chosen: dict[tuple[Any, ...], int] = {}

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        graph = CudnnGraph(cudnn, handle, inputs)
        kind = (*inputs.x.shape, inputs.x.dtype, inputs.weight.dtype)
        if kind not in chosen:
            chosen[kind] = choose_plan(graph, timer)
        return graph.call(chosen[kind])

    return bind


def choose_plan(graph: CudnnGraph, timer: Timer | None) -> int:
    """The first plan that can be built, with a timer the fastest. Raises RuntimeError for none."""
    calls: dict[int, Callable[[], Gradients]] = {}
    failure: Exception | None = None
    for plan in range(graph.plans):
        try:
            call = graph.call(plan)
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
