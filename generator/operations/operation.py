"""The description of an operation: all that the tuner has to know about what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from generator.problem import Problem
from normforge.operations import Signature

TORCH_DTYPE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}
HALF_UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Largest relative error of rounding once to nearest, by dtype."""
FP32_SLACK = 64 * 2.0**-24
"""The error that fp32 arithmetic may add to a result, relative to the magnitude of what it was
computed from: a few dozen roundings, well above what any order of summation showed and well below
one lost row."""
CHUNK_ELEMENTS = 1 << 26
"""Elements that float64 arithmetic works on at once: half a GiB for each intermediate result."""


def row_slices(M: int, N: int) -> Iterator[slice]:
    """M rows of N elements in slices of at most CHUNK_ELEMENTS elements, or of one row."""
    step = max(1, CHUNK_ELEMENTS // N)
    return (slice(start, min(M, start + step)) for start in range(0, M, step))


def half_subnormal(dtype: str) -> float:
    """Half a unit of a subnormal number: the error of rounding one."""
    info = torch.finfo(TORCH_DTYPE[dtype])
    return info.tiny * info.eps / 2


@dataclass(frozen=True)
class TensorSpec:
    """An argument or an output: its name, shape and dtype (of TORCH_DTYPE)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * TORCH_DTYPE[self.dtype].itemsize


@dataclass(frozen=True)
class Bound:
    """The values that an output may have: within `unit * |reference| + slack` of the reference,
    which is like the output, in float32 or float64, from float64 arithmetic on the rounded inputs.
    slack: broadcasts against it and has as many rows."""

    reference: torch.Tensor
    unit: float
    slack: torch.Tensor


class Runner(Protocol):
    """A loaded kernel on the rows of one problem. workspace_bytes: what a run needs; clean_bytes:
    those at the start of it that a run finds at zero and leaves at zero."""

    workspace_bytes: int
    clean_bytes: int

    @property
    def run(self) -> Callable[..., None]:
        """`run(inputs, outputs, workspace, **options)` enqueues one call on the current stream.
        outputs: by name, None where one is not wanted; options: what a call of the operation may
        ask for. Raises LaunchError."""
        ...


@dataclass(frozen=True)
class FrontEnd:
    """The classes and functions that the package of an operation gives its users. norm: the layer,
    a class of the package object, or "" without one; module, package: the module of the library and
    the class there of that object; functions: its other functions."""

    norm: str
    module: str
    package: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Operation:
    """One operation. Every function takes the problem first; `Any` are the operation's own inputs.

    name: also of its template; front_end: None for a part of another's package, and for one that a
    user brought. signature: None for a forward. sums_rows: whether
    an output is a sum over rows, whose bits depend on the order of additions. arguments, outputs:
    tensors of a call. make_inputs: random, on a device, from a `seed`; make_cancelling: made from
    those and a `seed`, so that any other order of additions shows. bounds: what the outputs have to
    be for some inputs. floor: an operation of PyTorch on these inputs and outputs that moves
    `traffic_bytes` and computes next to nothing, timed beside the kernels as their reference.
    load: machine code and its spec to what runs it. forward: the operation whose kernels go into
    the same package, or ""; fallbacks: whether fallback kernels do; tiles: whether forwards with
    the arithmetic of vLLM's do. serves: other problems that a
    kernel for this one serves as well, by what they have more.
    """

    name: str
    front_end: FrontEnd | None
    sums_rows: bool
    arguments: Callable[[Problem], tuple[TensorSpec, ...]]
    outputs: Callable[[Problem], tuple[TensorSpec, ...]]
    make_inputs: Callable[..., Any]
    make_cancelling: Callable[..., Any]
    bounds: Callable[[Problem, Any], dict[str, Bound]]
    floor: Callable[[Problem, Any, Mapping[str, torch.Tensor]], Callable[[], object]]
    load: Callable[[bytes, Any, Problem], Runner]
    signature: Signature | None = None
    forward: str = ""
    fallbacks: bool = False
    tiles: bool = False
    serves: Callable[[Problem], Mapping[str, Problem]] = lambda problem: {}

    def traffic_bytes(self, problem: Problem) -> int:
        """Bytes that any implementation moves: every matrix read once or written once, and what
        groups of rows share, such as cos and sin. Numbers of a row or of a column are left out."""
        tensors = (*self.arguments(problem), *self.outputs(problem))
        shapes = {(problem.M, problem.N)}
        if self.signature is not None and self.signature.groups:
            shapes.add(problem.group_shape)
        return sum(tensor.bytes for tensor in tensors if tensor.shape in shapes)


def over_bytes(size: int, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return as many equal contiguous tensors as `like`, of its dtype and with `size` bytes in all,
    up to whole elements: `like` itself where it has as many. All but the last hold random numbers:
    what a GPU moves shows in its clocks."""
    elements = -(-size // (len(like) * like[0].element_size()))
    if elements == like[0].numel():
        return like
    made = tuple(tensor.new_empty(elements) for tensor in like)
    generator = torch.Generator(like[0].device).manual_seed(0)
    for tensor in made[:-1]:
        tensor.normal_(generator=generator)
    return made
