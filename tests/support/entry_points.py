"""The helpers of the entry points' tests: a package, PyTorch's operators on the CPU, a model."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends.install import RMS_NORM, Installation
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.frontends.layer_norm_routes import LAYER_NORM, dw_and_db
from normforge.operations import LAYERNORM_FORWARD
from normforge.operations.formula import evaluate
from normforge.serve.reference import Results, reference_backward, reference_forward
from normforge.table import TABLE, Table

WHOLE_FROM = (2, 10)
"""The first PyTorch in whose graphs, traced or compiled, its RMSNorm is one operator."""
FORWARD_STAYS_WHOLE = torch.torch_version.TorchVersion(torch.__version__) >= WHOLE_FROM
needs_whole_forward = pytest.mark.skipif(
    not FORWARD_STAYS_WHOLE,
    reason="PyTorch 2.9 takes the forward apart before a pass sees the graph",
)


def write_package(folder: Path) -> Package:
    """A package without kernels: on the CPU the formula serves everything."""
    return Package(_write_table(folder))


def write_layer_norm_package(folder: Path) -> LayerNormPackage:
    """Write a package of LayerNorm without kernels."""
    return LayerNormPackage(_write_table(folder))


def _write_table(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = {"name": "none", "title": "no GPU", "arch": "sm_90a", "sms": 1}
    (folder / TABLE).write_text(json.dumps(Table(target, (), ()).to_json()))
    return folder


@contextmanager
def aten_on_cpu(calls: list[str] | None = None, layer_norm: bool = False) -> Iterator[None]:
    """Gives PyTorch's two fused operators CPU kernels, so that torch.nn.RMSNorm takes the same way
    on the CPU as on a GPU; or those of torch.nn.LayerNorm others, which save wide numbers of narrow
    rows, too. calls: which of them ran."""

    def forward(x: Any, shape: Any, weight: Any, *others: Any) -> Any:
        if calls is not None:
            calls.append("forward")
        if layer_norm:
            bias, eps = others
            given = {"x": x, "weight": weight, "bias": bias, "eps": eps}
            found = evaluate(LAYERNORM_FORWARD, given)
            return found["y"].to(x.dtype), found["mean"], found["rstd"]
        return reference_forward(x, weight, *others)

    def backward(dy: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        if calls is not None:
            calls.append("backward")
        return reference_backward(dy, x, rstd, weight, need_dx=mask[0], need_dw=mask[1])

    def centred(
        dy: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, *others: Any
    ) -> Any:
        _, (need_dx, *needed) = others
        if calls is not None:
            calls.append("backward")
        wanted = {"need_dx": need_dx, "need_dw": any(needed)}
        dx, sums = reference_backward(dy, x, rstd, weight, mean=mean, **wanted)
        halves = zip(dw_and_db(sums), needed, strict=True)
        return dx, *(half if wants else None for half, wants in halves)

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has kernels of LayerNorm for the CPU
        norm = "native_layer_norm" if layer_norm else "_fused_rms_norm"
        library.impl(norm, forward, "CPU")
        library.impl(f"{norm}_backward", centred if layer_norm else backward, "CPU")
        # Traces with symbols keep which kernels there are.
        operators = torch.ops.aten.rms_norm, getattr(torch.ops.aten, norm)
        known = [operator.default._dispatch_cache for operator in operators]
        try:
            for each in known:
                each.clear()
            yield
        finally:
            for each in known:
                each.clear()


def routing_on_cpu(package: Package | LayerNormPackage) -> Installation:
    """`install()` of a package for CPU tensors."""
    routed = LAYER_NORM if isinstance(package, LayerNormPackage) else RMS_NORM
    return Installation(package._quick, package._route, "CPU", routed=routed)


@contextmanager
def routed_and_served(package: Package, device: str = "CUDA") -> Iterator[None]:
    """`install()`, and proof of it: some backward of PyTorch's norm comes inside the block, and the
    package serves every one. Without it PyTorch's own kernel would pass most tests."""
    served: list[bool] = []

    def route(*given: Any) -> Results | None:
        found = package._route(*given)
        served.append(found is not None)
        return found

    with Installation(lambda *_: None, route, device).installed():
        yield
    assert served and all(served)


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """Normal numbers, the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return random numbers on the CPU, of which a gradient is wanted."""
    return randn(*shape, dtype=dtype, seed=seed).requires_grad_()


def filled(model: Any) -> Any:
    """A model whose parameters are normal numbers, the same each time."""
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    return model


class Block(torch.nn.Module):
    """A layer of a small Llama: attention with QK-norm on slices of a packed QKV, and an MLP; with
    `fused` the residual stream goes through the norms."""

    def __init__(self, norm: Any, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.size, self.fused = heads, width // heads, fused
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q_norm, self.k_norm = norm(self.size), norm(self.size)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.qkv(x).view(batch, length, 3 * self.heads, self.size)
        q, k, v = packed.split(self.heads, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        scores = (q @ k.transpose(2, 3) * self.size**-0.5).softmax(-1)
        return self.out((scores @ v.transpose(1, 2)).transpose(1, 2).reshape(batch, length, width))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fused:
            y, stream = self.norm1(x, stream)
            y, stream = self.norm2(self.attention(y), stream)
            return self.mlp(y), stream
        stream = stream + x
        stream = stream + self.attention(self.norm1(stream))
        return self.mlp(self.norm2(stream)), stream


class Llama(torch.nn.Module):
    """Two layers, a residual stream, QK-norm. norm: makes a norm of a width."""

    def __init__(
        self, norm: Any, width: int = 64, heads: int = 4, tokens: int = 32, fused: bool = False
    ) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(tokens, width)
        self.blocks = torch.nn.ModuleList(Block(norm, width, heads, fused) for _ in range(2))
        self.norm = norm(width)
        self.head = torch.nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        stream = torch.zeros_like(x)
        for block in self.blocks:
            x, stream = block(x, stream)
        return self.head(self.norm(stream + x))


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )


BACKWARD, MODULE, MODULE_WITH_RESIDUAL, INSTALL = "backward", "module", "with residual", "install"
"""Ways of a model to the kernels: a Function of the user's own around `rmsnorm_backward`, the
package's RMSNorm (and with the residual stream through it), torch.nn.RMSNorm under `install()`."""
ENTRY_POINTS = (BACKWARD, MODULE, MODULE_WITH_RESIDUAL, INSTALL)


def norm_of(package: Package, entry_point: str) -> tuple[Any, bool]:
    """A norm for `Llama` by one of ENTRY_POINTS, and whether the residual goes through it."""
    if entry_point == BACKWARD:
        return function_norm(package), False
    if entry_point == INSTALL:
        return lambda width: torch.nn.RMSNorm(width, eps=1e-6), False
    return lambda width: package.RMSNorm(width, eps=1e-6), entry_point == MODULE_WITH_RESIDUAL


def function_norm(package: Package) -> Any:
    """A norm as somebody writes it who has only `rmsnorm_backward`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, rstd)
            return (wide * rstd * weight.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            x, weight, rstd = ctx.saved_tensors
            return package.rmsnorm_backward(dy, x, rstd, weight)

    class Norm(torch.nn.RMSNorm):
        def __init__(self, width: int) -> None:
            super().__init__(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Function.apply(x, self.weight)

    return Norm


class Training:
    """A small Llama and its optimizer. `step` is one step on one batch."""

    def __init__(
        self,
        norm: Any,
        fused: bool,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        wrap: Any = lambda model: model,
        seed: int = 0,
        **sizes: int,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Llama(norm, fused=fused, **sizes).to(device, dtype)
        self.run = wrap(self.model)
        self.ids = torch.randint(0, 32, (4, 17), device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, foreach=False)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.run, self.ids)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int = 20) -> list[torch.Tensor]:
        """Losses of all steps, then the last gradients, then the weights."""
        losses = [self.step().clone() for _ in range(steps)]
        return losses + self.state()

    def state(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        grads = [p.grad.clone() for p in parameters if p.grad is not None]
        return grads + [p.detach().clone() for p in parameters]


def equal_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def grads(result: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    weights = randn(*result.shape, dtype=result.dtype, seed=9)
    return list(torch.autograd.grad((result * weights).sum(), leaves))


def same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def spied(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    note: Callable[..., Any] = lambda *given, **_: given,
) -> list[Any]:
    """Let the calls of a method do what they do. Returns a list that gets what `note` makes of the
    arguments of each."""
    seen, ran = [], getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        seen.append(note(*given, **named))
        return ran(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return seen


def check_that_backwards_end_as_they_began(aten: list[str], take: Any = None) -> None:
    """Assert that a backward which is about to run the kernel of an Installation runs it though
    another thread uninstalls that. aten: the calls that PyTorch's operators get; take: what the
    native path is registered by."""
    x, weight, rstd = randn(4, 16), randn(16), torch.ones(4, 1)
    one = Installation(lambda *_: None, lambda *_: (x, weight), "CPU")
    another = Installation(lambda *_: None, lambda *_: (-x, weight), "CPU")
    backward = torch.ops.aten._fused_rms_norm_backward.default
    times, interval, found = 5, sys.getswitchinterval(), list[Any]()

    def work() -> None:
        try:
            found.append(backward(x, x, [16], rstd, weight, [True, True]))
        except RuntimeError as error:
            found.append(error)

    if take is not None:
        for each in (one, another):
            each.use_native(take)
    for _ in range(times):
        one.install()
        thread = threading.Thread(target=work)
        sys.setswitchinterval(100)  # a running thread goes on until it waits
        try:
            thread.start()
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                pass
        finally:
            one.uninstall()
            another.install()  # it takes the memory that the former kernel would leave
            sys.setswitchinterval(interval)
        thread.join()
        another.uninstall()
    assert all(same(each, (x, weight)) for each in found) and len(found) == times
    work()
    assert not same(found[-1], (x, weight)) and aten == ["backward"]


class Swallowed(torch.autograd.Function):
    """A copy of a tensor, to which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> None:
        return None
