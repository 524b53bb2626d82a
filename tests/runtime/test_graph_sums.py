"""Sums of a residual stream and a norm's result in graphs, `r + norm(x)`: which of them become
`rms_norm` with `add`, and which stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from generator.paths import REPOSITORY
from normforge.api import Package
from normforge.frontends.graph_pass import make_backend, route
from normforge.frontends.norm_add import NormAndAdd
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.serve.kernels import source_of
from tests.support.entry_points import needs_whole_forward, write_package
from tests.support.graph_steps import (
    ATEN,
    METAS,
    N,
    Step,
    additions,
    check_routed,
    given,
    marked,
    norm,
    trace,
)
from tests.support.layer_classes import model_of, step
from tests.support.norm_add import Kernels

pytestmark = pytest.mark.usefixtures("aten")


@pytest.fixture
def served(tmp_path: Path) -> Package:
    return write_package(tmp_path / "package")


@pytest.fixture
def kernels(served: Package, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(served, monkeypatch)


def step_of_training(x: Any, r: Any, g: Any, w: Any) -> Any:
    x, r, w = leaves = [each.detach().requires_grad_() for each in (x, r, w)]
    h = r + norm(x, w)
    return h, *torch.autograd.grad(h + norm(h.tanh(), w) * g, leaves, torch.ones_like(h))


def post_norm(x: Any, r: Any, g: Any, w: Any) -> Any:
    return r + norm(x, w)


def post_norm_and_next(x: Any, r: Any, g: Any, w: Any) -> Any:
    """Gemma's order: the sum goes through another norm, which it would be folded into, too."""
    return (h := r + norm(x, w)), norm(h, w)


def stream_comes_later(x: Any, r: Any, g: Any, w: Any) -> Any:
    y = norm(x, w)
    return r.sin() * g + y


FOLDED: dict[str, Step] = {
    "post norm": post_norm,
    "other order": lambda x, r, g, w: norm(x, None) + r,
    "the stream comes later": stream_comes_later,
    "the weight is computed": lambda x, r, g, w: r + norm(x.sin(), w.exp()),
    "post norm and the next": post_norm_and_next,
    "two post norms": lambda x, r, g, w: norm(x, w) + norm(r, w),
    "a training step": step_of_training,
}
"""Steps of which one addition becomes part of a norm."""


@needs_whole_forward
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", FOLDED)
def test_sums_become_part_of_norms(served: Package, kernels: Kernels, name: str, mode: str) -> None:
    rows = 4 if mode == "fake" else 12
    check_routed(served, trace(FOLDED[name], mode), 1, sums=1, rows=rows)
    assert kernels.calls == [0.0]


@needs_whole_forward
def test_a_sum_is_rounded_once(served: Package, kernels: Kernels) -> None:
    inputs, module = given(torch.bfloat16), trace(post_norm, dtype=torch.bfloat16)
    exact = post_norm(*(each.double() for each in inputs))
    twice = module(*inputs)
    assert torch.equal(route(module, served.ops)(*inputs), exact.bfloat16())
    assert not torch.equal(twice, exact.bfloat16())


@needs_whole_forward
def test_nodes_keep_what_tracing_knew(served: Package, kernels: Kernels) -> None:
    module = trace(post_norm)
    (total,) = additions(module)
    total.meta["stack_trace"] = "model.py, line 7"
    before = dict(total.meta)
    route(module, served.ops)
    (fused,) = (n for n in module.graph.nodes if n.target is served.ops.rms_norm_and_add)
    (y,) = (node for node in fused.users if node.args[1] == 0)
    assert y.meta == before
    assert [value.shape for value in fused.meta["val"]] == [(4, N), (4, 1)]


# ---- What stays ----------------------------------------------------------------------------------


def with_result(use: Step) -> Step:
    """Return a step with a norm, of whose y, and of r, `use` makes something."""
    return lambda x, r, g, w: use(norm(x, w), r)


def statistic_comes_before(x: Any, r: Any, g: Any, w: Any) -> Any:
    y, rstd = ATEN._fused_rms_norm(x, [N], w, 1e-5)
    return r * rstd + y


def rows_change(x: Any, r: Any, g: Any, w: Any) -> Any:
    y = norm(x, w)
    x.mul_(2)
    return r + y


def transposed(x: Any, r: Any, g: Any, w: Any) -> Any:
    """PyTorch lays the sum out as the stream: its transpose is contiguous."""
    x, r = (each.reshape(2, 2, N).transpose(0, 1) for each in (x, r))
    return r + functional.rms_norm(x, (N,), w, 1e-5).transpose(0, 1).contiguous().transpose(0, 1)


LEFT: dict[str, Step] = {
    "the result is used": with_result(lambda y, r: (r + y, y.sin())),
    "the result is returned": with_result(lambda y, r: (r + y, y)),
    "twice the result": with_result(lambda y, r: y + y),
    "a factor": with_result(lambda y, r: torch.add(r, y, alpha=2)),
    "one row": with_result(lambda y, r: r[:1] + y),
    "two dtypes": lambda x, r, g, w: r + norm(x.bfloat16(), w.bfloat16()),
    "the statistic comes before": statistic_comes_before,
    "the rows change": rows_change,
    "transposed": transposed,
}


@needs_whole_forward
@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(served: Package, kernels: Kernels, name: str) -> None:
    check_routed(served, trace(LEFT[name]), 0)


@needs_whole_forward
@pytest.mark.parametrize("meta", METAS)
def test_sums_of_another_stream_or_region_stay(
    served: Package, kernels: Kernels, meta: dict[str, Any]
) -> None:
    check_routed(served, marked(trace(post_norm), meta), 0)


@needs_whole_forward
def test_sums_stay_where_no_kernel_adds(
    package: Package, served: Package, kernels: Kernels
) -> None:
    """In a package without the operation, and for rows that it has no kernel for. The sum then
    belongs to the next norm, if there is one."""
    kernels.why = "another length of rows"
    for each in (package, served):
        check_routed(each, trace(post_norm), 0)
        check_routed(each, trace(post_norm_and_next), 1)
    assert kernels.asked == [False] * 2
    assert kernels.calls == []


def test_a_pass_knows_the_rows_that_kernels_add() -> None:
    """The committed package for the H200 is asked with fakes, which need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    name = RMSNORM_ADD_FORWARD.name
    source = source_of(REPOSITORY / "generated" / "h200" / name, name)
    added = NormAndAdd(lambda: source, lambda *_: ())
    none = NormAndAdd(lambda: "there is no package", lambda *_: ())

    def ask(width: int, offset: bool = False, device: str = "cuda", which: Any = added) -> bool:
        with FakeTensorMode():
            x = torch.empty(4, 4096, width, dtype=torch.bfloat16, device=device)
            return bool(which.serves(x, x.new_empty(width), offset))

    assert ask(4096)
    assert not ask(100)
    assert not ask(4096, device="cpu")
    assert not ask(4096, which=none)
    # A kernel of fp32 weights serves the sum of weight and offset.
    fp32 = source(None).backward.choose(16384, 4096, "bf16", "fp32").kernel
    assert ask(4096, offset=True) == (fp32 is not None)


# ---- Models of transformers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "offset"), [("Olmo2", 0.0), ("Gemma2", 1.0), ("Gemma3", 1.0)])
@pytest.mark.usefixtures("own_cache", "fresh")
def test_post_norms_of_transformers(
    served: Package, kernels: Kernels, name: str, offset: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A step through the backend has the loss and the gradients of eager code, and the kernel of
    the sum behind attention and feed-forward of each layer, without a graph break."""
    model, ids = model_of(name), torch.randint(1, 32, (2, 9))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.3)
    wanted = step(model, ids)
    compiled = torch.compile(model, backend=make_backend(served.ops), fullgraph=True)
    with caplog.at_level("INFO"):
        found = step(compiled, ids)
    assert kernels.calls == [offset] * 4
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    told = [message for message in caplog.messages if "additions folded" in message]
    assert [message.rpartition(": ")[2] for message in told][:2] == ["0", "4"]
