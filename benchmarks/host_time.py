"""Host time of one call, piece by piece, on a GPU.

    python benchmarks/host_time.py [--op layernorm_backward] --out host.json

Every number is microseconds of one call on the host: the median over many short batches, each of
which starts with an idle GPU and stays far below the length of the launch queue, so that nothing
waits for the GPU. What is compared takes turns for several passes, because a host's times drift,
those of autograd's thread by a fifth and more: a ratio is the median of those of the passes, which
are in the document as well. Prints one JSON document: what ran, then the pieces of
`rmsnorm_backward`, whole calls, and alternatives that were considered; of LayerNorm whole calls.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.results import write_json  # noqa: E402
from generator.operations import operation_of  # noqa: E402
from generator.operations.rmsnorm_backward import Inputs  # noqa: E402
from generator.problem import RMSNORM_BACKWARD, SUMS, Problem  # noqa: E402
from generator.runtime import torch_internals as cuda  # noqa: E402
from generator.runtime.api import Package  # noqa: E402
from generator.runtime.frontends.layer_norm import LayerNormPackage  # noqa: E402
from generator.runtime.launch.binding import Binding, bind, pack_addresses  # noqa: E402
from generator.runtime.launch.driver import cuda_driver  # noqa: E402
from generator.runtime.launch.launch import plain_extent  # noqa: E402
from generator.runtime.spec import plan_launch  # noqa: E402

BATCH = 50
BATCHES = 25
PASSES = 9
Calls = dict[str, Callable[[], Any]]
COMPARED = (
    ("rmsnorm_backward", "aten op"),
    ("rmsnorm_backward, operator", "aten op"),
    ("install() op", "aten op"),
    ("rms_norm backward", "aten autograd backward"),
    ("rms_norm, operator", "aten forward op"),
    ("add_rms_norm, operator", "aten add and forward op"),
    ("rms_norm forward", "aten autograd forward"),
    ("rms_norm without grad", "aten without grad"),
    ("layer_norm_backward", "aten op"),
    ("layer_norm_backward, operator", "aten op"),
    ("layer_norm backward", "aten autograd backward"),
    ("rmsnorm_backward, native", "aten op"),
    ("rmsnorm_backward, operator, native", "aten op"),
    ("rms_norm backward, native", "aten autograd backward"),
    ("rms_norm, operator, native", "aten forward op"),
    ("add_rms_norm, operator, native", "aten add and forward op"),
    ("rms_norm forward, native", "aten autograd forward"),
    ("rms_norm without grad, native", "aten without grad"),
)


def host_us(calls: Calls, package: Package | LayerNormPackage) -> dict[str, list[float]]:
    """Microseconds of each call in every pass, the cost of an empty one taken off. The package is
    installed for the lines of `install()` only."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(PASSES):
        for name in (*names[turn:], *names[:turn]):
            with package.installed() if hasattr(calls[name], "routed") else nullcontext():
                found[name].append(_batches(calls[name]) - _batches(_nothing))
    return found


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of the pairs of `COMPARED` that were timed, in every pass."""
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


def pieces(package: Package, inputs: Inputs) -> Calls:
    """What a call of `rmsnorm_backward` is made of."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    device = x.device.index
    same = cuda.same_kind(dy, x, rstd, weight)
    dx_size = (tuple(x.shape), cuda.contiguous_strides(x.shape), x.dtype)
    dw_size = (tuple(weight.shape), cuda.contiguous_strides(weight.shape), weight.dtype)
    lock = threading.Lock()
    spare = ctypes.create_string_buffer(64)

    def addresses() -> None:
        x.data_ptr(), dy.data_ptr(), rstd.data_ptr(), weight.data_ptr(), dx.data_ptr()
        dw.data_ptr()

    def locked() -> None:
        with lock:
            pass

    binding = _binding(package, inputs)
    launch = cuda_driver().cuLaunchKernelEx
    addresses_of(binding, x, dy, rstd, weight, dx, dw)

    def main() -> None:
        launch(binding.main_config, binding.main, binding.main_arguments, 0)

    _alive.append((binding, dx, dw))

    def both() -> None:
        launch(binding.main_config, binding.main, binding.main_arguments, 0)
        launch(binding.sum_config, binding.second, binding.sum_arguments, 0)

    found: Calls = {
        "recognise the arguments": lambda: same(dy, x, rstd, weight),
        "current device": cuda.current_device,
        "allocate dx": lambda: cuda.empty_strided(*dx_size),
        "allocate dw": lambda: cuda.empty_strided(*dw_size),
        "stream": lambda: cuda.raw_stream(device),
        "is it capturing": cuda.is_capturing,
        "six addresses": addresses,
        "lock": locked,
        "pack": lambda: pack_addresses(spare, 0, 1, 2, 3, 4, 5, 6, 7, 8),
        "launch the main kernel": main,
    }
    if binding.second is not None:
        found["launch both kernels"] = both
    return found


def alternatives(package: Package, inputs: Inputs) -> Calls:
    """Other ways to do the same, for the record."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    shape, strides = tuple(x.shape), tuple(x.stride())
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    binding = _binding(package, inputs)
    addresses_of(binding, x, dy, rstd, weight, dx, dw)
    driver = cuda_driver()
    config, function, at = binding.main_config, binding.main, binding.main_arguments
    grid, threads, smem = config.gridDimX, config.blockDimX, config.sharedMemBytes

    def attributes() -> Any:
        return (
            *(x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device()),
            *(dy.shape, dy.is_contiguous() or dy.stride(), dy.dtype, dy.get_device()),
            *(rstd.numel(), rstd.is_contiguous(), rstd.dtype, rstd.get_device()),
            *(weight.shape, weight.is_contiguous(), weight.dtype, weight.get_device()),
            (x.data_ptr() | dy.data_ptr()) % 32,
            weight.data_ptr() % 32,
        )

    pointer = ctypes.c_void_p
    _alive.append((binding, dx, dw))  # the arguments of the launches below
    found: Calls = {
        "main kernel, cuLaunchKernelEx by cuda-python": lambda: driver.cuLaunchKernelEx(
            config, function, at, 0
        ),
        "signature read in Python": attributes,
        "torch.empty_like": lambda: torch.empty_like(x),
        "torch.empty_like, contiguous_format": lambda: torch.empty_like(
            x, memory_format=torch.contiguous_format
        ),
        "torch.empty_strided": lambda: torch.empty_strided(
            shape, strides, dtype=x.dtype, device=x.device
        ),
        "new_empty": lambda: x.new_empty(shape),
        "torch.cuda.current_device": torch.cuda.current_device,
        "torch.cuda.is_current_stream_capturing": torch.cuda.is_current_stream_capturing,
        "main kernel, cuLaunchKernel by cuda-python": lambda: driver.cuLaunchKernel(
            function, grid, 1, 1, threads, 1, 1, smem, config.hStream, at, 0
        ),
    }
    if binding.second is not None:
        second, second_at = binding.second, binding.sum_arguments
        second_config = binding.sum_config
        blocks, block_threads = second_config.gridDimX, second_config.blockDimX
        found["sum kernel alone, as emitted"] = lambda: driver.cuLaunchKernelEx(
            second_config, second, second_at, 0
        )
        found["sum kernel alone, cuLaunchKernel"] = lambda: driver.cuLaunchKernel(
            second, blocks, 1, 1, block_threads, 1, 1, 0, second_config.hStream, second_at, 0
        )
    for name, kind in (("CDLL", ctypes.CDLL), ("PyDLL", ctypes.PyDLL)):
        try:
            entry = kind("libcuda.so.1").cuLaunchKernelEx
        except OSError:
            continue
        values = (pointer(config.getPtr()), pointer(int(function)), pointer(at), pointer(0))
        found[f"main kernel, cuLaunchKernelEx by ctypes.{name}"] = partial(entry, *values)
    for name, call in found.items():
        if "kernel" in name and call() not in (0, (0,)):
            raise RuntimeError(f"{name} was refused: {call()}")
    return found


def addresses_of(binding: Binding, *tensors: torch.Tensor) -> None:
    pack_addresses(binding.values, 0, *(tensor.data_ptr() for tensor in tensors), 0, 0)


_alive: list[Any] = []


def _binding(package: Package, inputs: Inputs) -> Binding:
    x, weight = inputs.x, inputs.weight
    M, N = x.shape
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    choice = package._choose(x.device.index, M, N, names[x.dtype], names[weight.dtype])
    assert choice.kernel is not None, choice.reason
    launch = plan_launch(choice.kernel.spec, M)
    stream = cuda.raw_stream(x.device.index)
    workspace = package._workspaces.of_stream(x.device.index, stream)
    kernel, extent = package._kernels.get(choice.kernel), plain_extent(launch, M, N, N, N)
    return bind(
        kernel,
        launch,
        extent,
        device=x.device.index,
        stream=stream,
        workspace=workspace,
        wants_dw=True,
    )


def routed(call: Callable[[], Any]) -> Callable[[], Any]:
    """A line of `install()`."""

    def run() -> Any:
        return call()

    run.routed = True  # type: ignore[attr-defined]
    return run


def grad(result: torch.Tensor, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Any:
    """A line of autograd."""
    return lambda: torch.autograd.grad(result, leaves, dy, retain_graph=True)


def whole_calls(package: Package, inputs: Inputs) -> Calls:
    """The entry points and what they are compared with."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    N = x.shape[-1]
    mask = [True, True]
    aten = torch.ops.aten._fused_rms_norm_backward
    column = rstd.reshape(-1, 1)
    leaf = x.detach().requires_grad_()
    scale = torch.nn.Parameter(weight.detach().clone())
    y = torch.nn.functional.rms_norm(leaf, (N,), scale, 1e-6)
    mine = package.rms_norm(leaf, scale, 1e-6)
    main_grad = torch.zeros(N, device=x.device)
    norm, eager = torch.nn.functional.rms_norm, package.rmsnorm_backward
    forward = torch.ops.aten._fused_rms_norm
    leaves = (leaf, scale)
    return {
        "rmsnorm_backward": lambda: eager(dy, x, rstd, weight),
        "rmsnorm_backward, dw only": lambda: eager(dy, x, rstd, weight, need_dx=False),
        "rmsnorm_backward, main_grad": lambda: eager(
            dy, x, rstd, weight, dw_out=main_grad, accumulate=True
        ),
        **operator_calls(package, inputs),
        "aten op": lambda: aten(dy, x, [N], column, weight, mask),
        "aten op, overload": lambda: aten.default(dy, x, [N], column, weight, mask),
        "install() op": routed(lambda: aten(dy, x, [N], column, weight, mask)),
        "rms_norm backward": grad(mine, leaves, dy),
        "aten autograd backward": grad(y, leaves, dy),
        "install() autograd backward": routed(grad(y, leaves, dy)),
        "rms_norm forward": lambda: package.rms_norm(leaf, scale, 1e-6),
        "aten autograd forward": lambda: norm(leaf, (N,), scale, 1e-6),
        "rms_norm without grad": lambda: package.rms_norm(x, weight, 1e-6),
        "aten without grad": lambda: norm(x, (N,), weight, 1e-6),
        "aten forward op": lambda: forward(x, [N], weight, 1e-6),
        "aten add and forward op": lambda: forward(x + dy, [N], weight, 1e-6),
    }


def operator_calls(package: Package, inputs: Inputs) -> Calls:
    """What compiled code calls."""
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    ops = package.ops
    return {
        "rmsnorm_backward, operator": lambda: ops.rms_norm_backward(
            dy, x, rstd, weight, None, None, 0.0, True, True
        ),
        "rms_norm, operator": lambda: ops.rms_norm(x, weight, 1e-6, 0.0),
        "add_rms_norm, operator": lambda: ops.add_rms_norm(x, dy, weight, 1e-6, 0.0),
    }


def layer_norm_calls(package: LayerNormPackage, inputs: Inputs) -> Calls:
    """The same of LayerNorm, with a bias."""
    dy, x, weight, mean, rstd = inputs.dy, inputs.x, inputs.weight, inputs.mean, inputs.rstd
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
            dy, x, rstd, weight, None, None, 0.0, True, True, mean
        ),
        "aten op": lambda: aten(dy, x, [N], mean, rstd, weight, weight, mask),
        "install() op": routed(lambda: aten(dy, x, [N], mean, rstd, weight, weight, mask)),
        "layer_norm backward": grad(mine, leaves, dy),
        "aten autograd backward": grad(y, leaves, dy),
        "install() autograd backward": routed(grad(y, leaves, dy)),
        "layer_norm forward": lambda: package.layer_norm(*leaves),
        "aten autograd forward": lambda: module(leaf),
        "layer_norm without grad": lambda: package.layer_norm(x, weight, weight),
        "aten without grad": lambda: torch.layer_norm(x, (N,), weight, weight),
    }


def native_calls(folder: Path, inputs: Inputs) -> Calls:
    """The entry points of a second copy of the package, whose native path is on. Raises
    RuntimeError where it cannot be built."""
    package = Package(folder)
    package.use_native()
    dy, x, rstd, weight = inputs.dy, inputs.x, inputs.rstd, inputs.weight
    leaf = x.detach().requires_grad_()
    scale = torch.nn.Parameter(weight.detach().clone())
    y = package.rms_norm(leaf, scale, 1e-6)
    operators = operator_calls(package, inputs)
    return {
        **{f"{name}, native": call for name, call in operators.items()},
        "rmsnorm_backward, native": lambda: package.rmsnorm_backward(dy, x, rstd, weight),
        "rms_norm backward, native": lambda: torch.autograd.grad(
            y, (leaf, scale), dy, retain_graph=True
        ),
        "rms_norm forward, native": lambda: package.rms_norm(leaf, scale, 1e-6),
        "rms_norm without grad, native": lambda: package.rms_norm(x, weight, 1e-6),
    }


def run(folder: Path, problem: Problem) -> dict[str, Any]:
    """The document for one problem on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    inputs, refused = operation_of(problem).make_inputs(problem, device), ""
    package: Package | LayerNormPackage
    if problem.operation == RMSNORM_BACKWARD:
        package, native = Package(folder), {}
        try:
            native = native_calls(folder, inputs)
        except RuntimeError as error:
            refused = str(error)
        groups = {
            "whole calls": whole_calls(package, inputs) | native,
            "pieces of rmsnorm_backward": pieces(package, inputs),
            "alternatives": alternatives(package, inputs),
        }
    else:
        package = LayerNormPackage(folder)
        groups = {"whole calls": layer_norm_calls(package, inputs)}
    document: dict[str, Any] = {
        "shape": str(problem),
        "kernel": package.explain(problem.M, problem.N, problem.dtype, problem.weight_dtype).get(
            "kernel"
        ),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
    if refused:
        document["native"] = refused
    times = {title: host_us(calls, package) for title, calls in groups.items()}
    for title, lines in times.items():
        document[title] = {name: round(median(each), 3) for name, each in lines.items()}
    found = ratios(times["whole calls"])
    document["ratios"] = {name: median(each) for name, each in found.items()}
    document["ratios of the passes"] = found
    return document


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(SUMS), default=RMSNORM_BACKWARD)
    parser.add_argument("--package", type=Path, help="default: the H200's for the operation")
    parser.add_argument("--shape", default="4096x256:bf16")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("host_time.py: needs a CUDA GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    folder = options.package or ROOT / "generated" / "h200" / options.op
    document = run(folder, Problem.parse(options.shape, options.op))
    print(json.dumps(document, indent=1))
    if options.out:
        write_json(options.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
