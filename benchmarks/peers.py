"""Other people's RMSNorm-backward kernels, behind one way to call them.

Every peer is called the way its own library calls it in a training step, with what its forward
saves, and does the whole operation: dx and dw, dw in the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from generator.errors import NormforgeError
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs
from generator.report.peers import TITLES

Gradients = tuple[torch.Tensor, torch.Tensor]
Bind = Callable[[Inputs], Callable[[], Gradients]]
"""Inputs to the operation on them: everything that a forward would have left behind is made here;
the operation launches the backward on the current stream and returns (dx, dw)."""

TUNER_ROUNDS = 7
EPS = 1e-6
"""What generator.operations.rmsnorm_backward computes rstd with."""


@dataclass(frozen=True)
class Peer:
    """One implementation that the kernels are compared with.

    needs: the distributions that have to be installed. load: imports it; the timer is for peers
    that tune themselves. tuned: slow to prepare, and so run on some shapes only. overwrites_dy:
    writes dx over dy. compiles: `no`; to the `disk`, where other processes find the result; or for
    this `process` alone, once for all M.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    load: Callable[[Timer], Bind]
    tuned: bool = False
    overwrites_dy: bool = False
    compiles: str = "no"

    def missing(self) -> str:
        """Why it cannot be loaded, "" when it can be tried."""
        absent = [name for name in self.needs if installed_version(name) is None]
        return f"{' and '.join(absent)} not installed" if absent else ""

    def versions(self) -> str:
        """What is installed of its distributions, for example `quack-kernels 0.6.5, …`."""
        return ", ".join(f"{name} {installed_version(name)}" for name in self.needs)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def aten(inputs: Inputs) -> Callable[[], Gradients]:
    """ATen's fused operator."""
    backward = torch.ops.aten._fused_rms_norm_backward
    shape, rstd = [inputs.x.shape[1]], inputs.rstd[:, None]
    return lambda: backward(inputs.dy, inputs.x, shape, rstd, inputs.weight, [True, True])


def decomposed_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """The backward that torch.compile puts into a training step in place of ATen's operator:
    PyTorch's own decomposition of it (torch/_decomp/decompositions.py), operation by operation."""
    N = x.shape[1]
    grad, wide = dy.to(torch.float32), x.to(torch.float32)
    weighted = grad * weight.to(torch.float32)
    normalized = wide * rstd[:, None]
    total = torch.sum(normalized * weighted, dim=1, keepdim=True)
    dx = (weighted - (normalized / N) * total) * rstd[:, None]
    dw = torch.sum(grad * normalized, dim=0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def _inductor(mode: str, timer: Timer) -> Bind:
    # One entry per shape and inputs; beyond the limit Dynamo would silently run without compiling.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    # Kernels are chosen anew in the process that is timed: what the preparing processes chose,
    # with the GPU shared, is not kept. What they compiled is.
    options = {**torch._inductor.list_mode_options(mode), "autotune_local_cache": False}
    compiled = torch.compile(decomposed_backward, dynamic=False, options=options)
    return lambda i: partial(compiled, i.dy, i.x, i.rstd, i.weight)


class _Context:
    """What an autograd.Function keeps between its forward and its backward."""

    needs_input_grad = (True, True)
    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def _bind_liger(function: Any, in_place: bool) -> Bind:
    """The backward of Liger's autograd.Function after its own forward, in the casting mode that is
    its default; the library decides there which kernel serves the shape."""

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        context = _Context()
        function.forward(context, inputs.x, inputs.weight, EPS, 0.0, "llama", in_place)
        return lambda: function.backward(context, inputs.dy)[:2]

    return bind


def _liger_triton(timer: Timer) -> Bind:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # In place is the default; otherwise it fills dx with zeros first.
    return _bind_liger(LigerRMSNormFunction, in_place=True)


def _liger_cutedsl(timer: Timer) -> Bind:
    try:
        from liger_kernel.ops.cutedsl.ops.rms_norm import LigerRMSNormFunction
    except ModuleNotFoundError as error:
        raise NormforgeError(f"this liger-kernel has no CuTe DSL RMSNorm ({error})") from error
    return _bind_liger(LigerRMSNormFunction, in_place=False)


def _quack(timer: Timer) -> Bind:
    from quack.rmsnorm import rmsnorm_bwd

    return lambda i: lambda: rmsnorm_bwd(i.x, i.weight, i.dy, i.rstd)[:2]


def _quack_tuned(timer: Timer) -> Bind:
    """QuACK's tuner over all of its configurations. They are timed by the timer of this benchmark,
    with a cold L2 as QuACK does; its own way takes over a minute per shape."""
    from quack.autotuner import Autotuner
    from quack.rmsnorm import rmsnorm_bwd_tuned
    from quack.rmsnorm_config import get_sm_count, prune_invalid_rmsnorm_bwd_configs

    def do_bench(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        (times,) = timer.block([call], TUNER_ROUNDS)
        return [median(times) * 1e-3] * len(quantiles)

    tuner = Autotuner(
        rmsnorm_bwd_tuned.fn,
        rmsnorm_bwd_tuned.keys,
        rmsnorm_bwd_tuned.configs,
        prune_configs_by={"early_config_prune": prune_invalid_rmsnorm_bwd_configs},
        do_bench=do_bench,
    )

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        x, weight = inputs.x, inputs.weight
        partials = (get_sm_count(x.shape[1], x.device), x.shape[1])

        def backward() -> Gradients:
            dx = torch.empty_like(x)
            partial_dw = torch.empty(partials, dtype=torch.float32, device=x.device)
            tuner(x, weight, inputs.dy, inputs.rstd, dx, partial_dw, has_dw_partial=True)
            return dx, partial_dw.sum(dim=0).to(weight.dtype)

        return backward

    return bind


_LIGER = ("liger-kernel", "triton")
_CUTE = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

PEERS = (
    Peer("aten", TITLES["aten"], ("torch",), lambda timer: aten),
    Peer(
        "inductor",
        TITLES["inductor"],
        ("torch", "triton"),
        partial(_inductor, "default"),
        compiles="disk",
    ),
    Peer(
        "inductor_max",
        TITLES["inductor_max"],
        ("torch", "triton"),
        partial(_inductor, "max-autotune-no-cudagraphs"),
        tuned=True,
        compiles="disk",
    ),
    Peer(
        "liger_triton",
        TITLES["liger_triton"],
        _LIGER,
        _liger_triton,
        overwrites_dy=True,
        compiles="disk",
    ),
    Peer(
        "liger_cutedsl",
        TITLES["liger_cutedsl"],
        ("liger-kernel", *_CUTE),
        _liger_cutedsl,
        compiles="process",
    ),
    Peer("quack", TITLES["quack"], ("quack-kernels", *_CUTE), _quack, compiles="disk"),
    Peer("quack_tuned", TITLES["quack_tuned"], ("quack-kernels", *_CUTE), _quack_tuned, tuned=True),
)


def choose_peers(names: str) -> list[Peer]:
    """The peers of `all` or of a comma-separated list of names.

    Raises NormforgeError for a name that is no peer's.
    """
    if names == "all":
        return list(PEERS)
    known = {peer.name: peer for peer in PEERS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise NormforgeError(f"unknown peer '{name}': use all or some of {', '.join(known)}")
    return [peer for peer in PEERS if peer.name in wanted]
