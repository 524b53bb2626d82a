"""Time of one call on the host, ours and PyTorch's.

    python -m benchmarks.host_time [--op layernorm_backward] --out host.json

Every number is microseconds of one call: the median over many short batches, each of which starts
with an idle GPU and stays far below the length of the launch queue, so that nothing waits for the
GPU. Calls take turns for several passes, because a host's times drift, those of autograd's thread
by a fifth and more: a ratio is the median of those of the passes, which are in the document too.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import check_cuda, this_machine
from benchmarks.results import show_json
from generator.evaluate.gpu.order import balanced_orders
from generator.operations import operation_of
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import RMSNORM_BACKWARD, Problem
from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.packages import Chosen
from normforge.serve.kernels import Source

BATCH = 50
BATCHES = 25
PASSES = 9
Calls = dict[str, Callable[[], Any]]
_RMS_NORM = {
    "rmsnorm_backward": "aten op",
    "rmsnorm_backward, operator": "aten op",
    "install() op": "aten op",
    "install() autograd backward": "aten autograd backward",
    "rms_norm backward": "aten autograd backward",
    "rms_norm, operator": "aten forward op",
    "add_rms_norm, operator": "aten add and forward op",
    "rmsnorm_forward": "aten forward op",
    "rms_norm forward": "aten autograd forward",
    "rms_norm without grad": "aten without grad",
    "RMSNorm module forward": "aten module forward",
}
_LAYER_NORM = {
    "layer_norm_backward": "aten op",
    "layer_norm_backward, operator": "aten op",
    "layer_norm backward": "aten autograd backward",
    "layer_norm forward": "aten autograd forward",
    "layer_norm without grad": "aten without grad",
}
COMPARED = (
    *_RMS_NORM.items(),
    *_LAYER_NORM.items(),
    *((f"{name}, native", other) for name, other in (_RMS_NORM | _LAYER_NORM).items()),
)
"""Calls, and PyTorch's with which each is compared."""


def host_us(
    calls: Calls,
    package: Package | LayerNormPackage,
    native: Package | LayerNormPackage | None = None,
) -> dict[str, list[float]]:
    """Microseconds of each call in every pass, the cost of an empty one taken off. The package is
    installed for the lines of `install()` only, and `native` for those of them that are native."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for order in balanced_orders(len(names), PASSES):
        for name in (names[which] for which in order):
            by = native if native is not None and name.endswith(", native") else package
            with by.installed() if name.startswith("install()") else nullcontext():
                found[name].append(_batches(calls[name]) - _batches(_nothing))
    return found


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the ratios of the pairs of `COMPARED` that were timed, in every pass."""
    return {
        f"{one} / {other}": [round(a / b, 3) for a, b in zip(times[one], times[other], strict=True)]
        for one, other in COMPARED
        if one in times
    }


def _nothing() -> None:
    pass


def _batches(call: Callable[[], Any]) -> float:
    for _ in range(20):
        call()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(BATCHES):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(BATCH):
                call()
            times.append((time.perf_counter_ns() - start) / BATCH)
    finally:
        gc.enable()
    return median(times) / 1e3


def grad(result: torch.Tensor, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Any:
    """A line of autograd."""
    return lambda: torch.autograd.grad(result, leaves, dy, retain_graph=True)


def entry_points(package: Package, inputs: Inputs) -> Calls:
    """Return the calls of a training program and of compiled code."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    ops, name, leaves = package.ops, package.name, leaves_of(inputs)
    module = package.RMSNorm(x.shape[-1], 1e-6, device=x.device, dtype=weight.dtype)
    return {
        "rmsnorm_backward": lambda: package.rmsnorm_backward(dy, x, rstd, weight),
        "rmsnorm_backward, operator": lambda: ops.rms_norm_backward(
            dy, x, rstd, weight, None, None, 0.0, True, True, name
        ),
        "rms_norm, operator": lambda: ops.rms_norm(x, weight, 1e-6, 0.0, name),
        "add_rms_norm, operator": lambda: ops.add_rms_norm(x, dy, weight, 1e-6, 0.0, name),
        "rms_norm backward": grad(package.rms_norm(*leaves, 1e-6), leaves, dy),
        "rmsnorm_forward": lambda: package.rmsnorm_forward(x, weight, 1e-6),
        "rms_norm forward": lambda: package.rms_norm(*leaves, 1e-6),
        "rms_norm without grad": lambda: package.rms_norm(x, weight, 1e-6),
        "RMSNorm module forward": lambda: module(leaves[0]),
        **{f"install() {name}": call for name, call in pytorchs_backward(inputs).items()},
    }


def pytorchs_backward(inputs: Inputs) -> Calls:
    """The calls that `install()` routes."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    N, column, mask, leaves = x.shape[-1], rstd.reshape(-1, 1), [True, True], leaves_of(inputs)
    aten = torch.ops.aten._fused_rms_norm_backward
    y = torch.nn.functional.rms_norm(leaves[0], (N,), leaves[1], 1e-6)
    return {
        "op": lambda: aten(dy, x, [N], column, weight, mask),
        "autograd backward": grad(y, leaves, dy),
    }


def leaves_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weight, with gradients."""
    scale = torch.nn.Parameter(inputs.weight.detach().clone())
    return inputs.x.detach().requires_grad_(), scale


def whole_calls(package: Package, inputs: Inputs) -> Calls:
    """The entry points and what they are compared with."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    N, column, mask = x.shape[-1], rstd.reshape(-1, 1), [True, True]
    aten = torch.ops.aten._fused_rms_norm_backward.default
    leaf, scale = leaves_of(inputs)
    norm, eager = torch.nn.functional.rms_norm, package.rmsnorm_backward
    forward = torch.ops.aten._fused_rms_norm
    module = torch.nn.RMSNorm(N, 1e-6, device=x.device, dtype=weight.dtype)
    main_grad = torch.zeros(N, device=x.device)
    return {
        **entry_points(package, inputs),
        "rmsnorm_backward, dw only": lambda: eager(dy, x, rstd, weight, need_dx=False),
        "rmsnorm_backward, main_grad": lambda: eager(
            dy, x, rstd, weight, dw_out=main_grad, accumulate=True
        ),
        **{f"aten {name}": call for name, call in pytorchs_backward(inputs).items()},
        "aten op, overload": lambda: aten(dy, x, [N], column, weight, mask),
        "aten autograd forward": lambda: norm(leaf, (N,), scale, 1e-6),
        "aten without grad": lambda: norm(x, (N,), weight, 1e-6),
        "aten module forward": lambda: module(leaf),
        "aten forward op": lambda: forward(x, [N], weight, 1e-6),
        "aten add and forward op": lambda: forward(x + dy, [N], weight, 1e-6),
    }


def layer_norm_calls(package: LayerNormPackage, inputs: Inputs) -> Calls:
    """Return the calls of a LayerNorm with a bias."""
    dy, x, weight, rstd = inputs.dy, inputs.x, inputs.weight, inputs.rstd
    mean = getattr(inputs, "mean", None)
    assert mean is not None
    N, mask, aten = x.shape[-1], [True, True, True], torch.ops.aten.native_layer_norm_backward
    mean, rstd = mean.reshape(-1, 1), rstd.reshape(-1, 1)
    module = torch.nn.LayerNorm(N, device=x.device, dtype=weight.dtype)
    leaf, bias = x.detach().requires_grad_(), module.bias
    leaves = (leaf, module.weight, bias)
    y, mine = module(leaf), package.layer_norm(*leaves)
    eager = package.layer_norm_backward
    return {
        "layer_norm_backward": lambda: eager(dy, x, mean, rstd, weight),
        "layer_norm_backward, dw only": lambda: eager(dy, x, mean, rstd, weight, need_dx=False),
        "layer_norm_backward, operator": lambda: package.ops.layer_norm_backward(
            dy, x, rstd, weight, None, None, 0.0, True, True, package.name, mean
        ),
        "aten op": lambda: aten(dy, x, [N], mean, rstd, weight, weight, mask),
        "install() op": lambda: aten(dy, x, [N], mean, rstd, weight, weight, mask),
        "layer_norm backward": grad(mine, leaves, dy),
        "aten autograd backward": grad(y, leaves, dy),
        "install() autograd backward": grad(y, leaves, dy),
        "layer_norm forward": lambda: package.layer_norm(*leaves),
        "aten autograd forward": lambda: module(leaf),
        "layer_norm without grad": lambda: package.layer_norm(x, weight, weight),
        "aten without grad": lambda: torch.layer_norm(x, (N,), weight, weight),
    }


def run(of: Path | Source, problem: Problem) -> dict[str, Any]:
    """The document for one problem on the current device. of: as of a package."""
    device = torch.device("cuda", 0)
    inputs, refused = operation_of(problem).make_inputs(problem, device), ""
    makes: tuple[Any, ...] = (LayerNormPackage, layer_norm_calls, layer_norm_calls)
    if problem.operation == RMSNORM_BACKWARD:
        makes = (Package, whole_calls, entry_points)
    made, calls_of, native_calls_of = makes
    package, native = made(of, "python"), made(of, "native")
    calls = calls_of(package, inputs)
    try:
        native.use_native()
        of_native = {f"{name}, native": f for name, f in native_calls_of(native, inputs).items()}
        calls |= {name: call for name, call in of_native.items() if name in dict(COMPARED)}
    except RuntimeError as error:
        refused = str(error)
    said = package.explain(problem.M, problem.N, problem.dtype, problem.weight_dtype)
    times = host_us(calls, package, native)
    of_passes = ratios(times)
    return {
        "shape": str(problem),
        "kernel": said.get("kernel"),
        **this_machine(),
        "python": sys.version.split()[0],
        **({"native refused": refused} if refused else {}),
        "whole calls": {name: round(median(each), 3) for name, each in times.items()},
        "ratios": {name: median(each) for name, each in of_passes.items()},
        "ratios of the passes": of_passes,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, op=RMSNORM_BACKWARD, out=None)
    parser.add_argument("--package", type=Path, help="default: that of this GPU")
    parser.add_argument("--shape", default="4096x256:bf16")
    args = parser.parse_args(argv)

    def print_document() -> int:
        check_cuda()
        of = args.package or Chosen(args.op)
        document = run(of, Problem.parse(args.shape, args.op))
        show_json(document, args.out)
        return 0

    return exit_code(__file__, print_document)


if __name__ == "__main__":
    sys.exit(main())
