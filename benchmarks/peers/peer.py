"""A peer: another project's implementation, behind one way to call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs
from generator.report.peers import TITLES

Gradients = tuple[torch.Tensor, ...]
"""dx and dw; of LayerNorm dx, dgamma and dbeta."""
Bind = Callable[[Inputs], Callable[[], Gradients]]
"""Inputs to the operation on them: everything that a forward would have left behind is made here;
the operation launches the backward on the current stream and returns the gradients."""

TUNER_ROUNDS = 7


@dataclass(frozen=True)
class Peer:
    """One implementation that the kernels are compared with.

    needs: required distributions; library: the version of what is no distribution. load: imports
    it; the timer is for peers that tune themselves. tuned: slow to prepare, so run on some shapes
    only. overwrites_dy: writes dx over dy. compiles: `no`; to `disk`, where other processes find
    the result; or for this `process`, once for all M.
    """

    name: str
    needs: tuple[str, ...]
    load: Callable[[Timer], Bind]
    tuned: bool = False
    overwrites_dy: bool = False
    compiles: str = "no"
    library: Callable[[], str] | None = None

    @property
    def title(self) -> str:
        return TITLES[self.name]

    def missing(self) -> str:
        """Return why the peer cannot be loaded, "" when it can be tried."""
        absent = [name for name in self.needs if installed_version(name) is None]
        return f"{' and '.join(absent)} not installed" if absent else ""

    def versions(self) -> str:
        """Return the installed versions of the peer's distributions, for example `quack-kernels
        0.6.5, …`."""
        library = [self.library()] if self.library is not None else []
        return ", ".join(library + [f"{name} {installed_version(name)}" for name in self.needs])


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def arguments(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """dy, x, the mean where the operation has one, rstd and weight: in the order of a call."""
    mean = () if not hasattr(inputs, "mean") else (inputs.mean,)
    return (inputs.dy, inputs.x, *mean, inputs.rstd, inputs.weight)
