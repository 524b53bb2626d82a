"""Sums of gradients in graphs that `route` and `inductor_backend` fold into the backwards of norms,
and those that stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normforge.api import Package
from normforge.frontends.graph_pass import make_backend, route
from normforge.frontends.sum_backward import SumBackward
from normforge.operations import GRADIENTS, RMSNORM_SUM_BACKWARDS
from normforge.operations.formula import evaluate
from tests.support.entry_points import needs_whole_forward, write_package
from tests.support.graph_steps import ATEN, METAS, Step, additions, given, marked, norm, trace
from tests.support.graph_steps import results as results_of
from tests.support.layer_classes import model_of, step

pytestmark = pytest.mark.usefixtures("aten")


class Kernels:
    """A stand-in for packages of the operations: their formula, rounded once, on the CPU. calls:
    the numbers of gradients of those that it served; asked: what a pass wanted a kernel for; why:
    whether it serves none."""

    def __init__(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.asked, self.serving = list[int](), list[Any](), True
        package.add_gradients_by(lambda operation: f"there is no package of {operation}")
        monkeypatch.setattr(SumBackward, "serves", self.serves)
        monkeypatch.setattr(SumBackward, "by_kernel", self.serve)

    def serves(self, count: int, x: Any, weight: Any, dresidual: Any, offset: bool) -> bool:
        self.asked.append((count, dresidual is not None, offset))
        return self.serving

    def serve(self, gradients: Any, tensors: Any, offset: float) -> dict[str, torch.Tensor] | None:
        if not self.serving:
            return None
        self.calls.append(len(gradients))
        named = dict(zip(GRADIENTS, gradients, strict=False)) | tensors
        with torch.no_grad():
            operation = RMSNORM_SUM_BACKWARDS[len(gradients)]
            present = {name: given for name, given in named.items() if given is not None}
            found = evaluate(operation, present, offset=offset)
        return {
            "dx": found["dx"].to(tensors["x"].dtype),
            "dw": found["dw"].to(tensors["weight"].dtype),
        }


@pytest.fixture
def served(tmp_path: Path) -> Package:
    return write_package(tmp_path / "package")


@pytest.fixture
def kernels(served: Package, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(served, monkeypatch)


def square(g: torch.Tensor) -> torch.Tensor:
    return g.new_ones(16, 16)


def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, dw: bool = True) -> Any:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    return ATEN._fused_rms_norm_backward(dy, x, [16], rstd, w, [True, dw])


def products(g: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return products of matrices, as projections give gradients back."""
    return [g @ square(g).mul(i + 1) for i in range(count)]


def projections(x: Any, r: Any, g: Any, w: Any) -> Any:
    """A training step of a norm whose result goes through three projections and beside them."""
    x, w = leaves = [each.detach().requires_grad_() for each in (x, w)]
    y = norm(x, w)
    q, k, v = products(y, 3)
    return torch.autograd.grad((q.sin() * k + v) * g + x, leaves, torch.ones_like(x))


def of(count: int) -> Step:
    def summed(x: Any, r: Any, g: Any, w: Any) -> Any:
        return backward(sum(products(g, count)[1:], start=products(g, 1)[0]), x, w)

    return summed


def the_other_way(x: Any, r: Any, g: Any, w: Any) -> Any:
    a, b, c = products(g, 3)
    return backward(a + (b + c), x, w)


def twice_and_another(x: Any, r: Any, g: Any, w: Any) -> Any:
    a, b = products(g, 2)
    return backward(a + b + a, x, w), a


def to_the_stream(x: Any, r: Any, g: Any, w: Any) -> Any:
    a, b = products(g, 2)
    dx, dw = backward(a + b, x, w)
    return r + dx, dw


FOLDED: dict[str, tuple[Step, int, bool]] = {
    "two": (of(2), 2, False),
    "three": (of(3), 3, False),
    "three, the last two first": (the_other_way, 3, False),
    "arguments of the graph": (lambda x, r, g, w: backward(r + g, x, w), 2, False),
    "twice the same": (lambda x, r, g, w: backward(r + r, x, w), 2, False),
    "twice the same and another": (twice_and_another, 3, False),
    "with the stream's gradient": (to_the_stream, 2, True),
    "a training step": (projections, 3, True),
}
"""Steps, the number of gradients of a sum in them, and whether the backward adds another one."""


@needs_whole_forward
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", FOLDED)
def test_sums_become_part_of_backwards(
    served: Package, kernels: Kernels, name: str, mode: str
) -> None:
    run, count, residual = FOLDED[name]
    module, inputs = trace(run, mode), given(seed=9, rows=4 if mode == "fake" else 12)
    copies = [each.clone() for each in inputs]
    wanted, before = module(*inputs), len(additions(module))
    found = route(module, served.ops)(*copies)
    assert before - len(additions(module)) == count - 1 + residual
    torch.testing.assert_close(results_of(found), results_of(wanted), atol=1e-5, rtol=1e-5)
    assert (kernels.calls, kernels.asked) == ([count], [(count, residual, False)])
    assert all(map(torch.equal, inputs, copies))


def test_a_sum_is_rounded_once(served: Package, kernels: Kernels) -> None:
    run, inputs = FOLDED["three"][0], given(torch.bfloat16)
    module = trace(run, dtype=torch.bfloat16)
    exact = [one.bfloat16() for one in run(*(each.double() for each in inputs))]
    twice = results_of(module(*inputs))
    once = results_of(route(module, served.ops)(*inputs))
    errors = [(one[0].float() - exact[0].float()).abs().sum() for one in (once, twice)]
    assert errors[0] < errors[1]


# ---- What is left alone --------------------------------------------------------------------------


def changed_between(x: Any, r: Any, g: Any, w: Any) -> Any:
    total = r + g
    r.add_(1)
    return backward(total, x, w)


def changed_inside(x: Any, r: Any, g: Any, w: Any) -> Any:
    total = r + g
    g.mul_(2)
    return backward(total + products(x, 1)[0], x, w)


def view_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    total = r + g
    r[1:].zero_()
    return backward(total, x, w)


def four_of_two(x: Any, r: Any, g: Any, w: Any) -> Any:
    half = r + g
    return backward(half + half, x, w)


LEFT: dict[str, Step] = {
    "four": of(4),
    "one": of(1),
    "one that Inductor computes": lambda x, r, g, w: backward(g.sin() + products(g, 1)[0], x, w),
    "one that Inductor computes, and views": lambda x, r, g, w: backward(
        g.sin().view(8, 8).view(4, 16) + products(g, 1)[0], x, w
    ),
    "taken by others": lambda x, r, g, w: (*backward(t := r + g, x, w), t),
    "a row": lambda x, r, g, w: backward(g + w, x, w),
    "a factor": lambda x, r, g, w: backward(torch.add(r, g, alpha=2), x, w),
    "columns first": lambda x, r, g, w: backward(r + products(g, 1)[0].t().contiguous().t(), x, w),
    "without a weight": lambda x, r, g, w: backward(r + g, x, None, False)[0],
    "no gradient of the weight": lambda x, r, g, w: backward(r + g, x, w, False)[0],
    "a term changes": changed_between,
    "a view of a term changes": view_changes,
    "a term of the inner sum changes": changed_inside,
    "twice a sum": four_of_two,
    "the weight needs the sum": lambda x, r, g, w: backward(t := r + g, x, t[0].contiguous()),
    "the sum is the rows": lambda x, r, g, w: backward(t := r + g, t, w),
}


@needs_whole_forward
@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(served: Package, kernels: Kernels, name: str) -> None:
    module, inputs = trace(LEFT[name]), given(seed=9)
    copies = [each.clone() for each in inputs]
    wanted, before = module(*inputs), len(additions(module))
    found = route(module, served.ops)(*copies)
    assert (len(additions(module)), kernels.calls) == (before, [])
    torch.testing.assert_close(results_of(found), results_of(wanted), atol=1e-5, rtol=1e-5)


def by_package(package: Package, **options: Any) -> Step:
    """Return a step with a backward that this package serves."""

    def run(x: Any, r: Any, g: Any, w: Any) -> Any:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
        found = package.rmsnorm_backward(r + g, x, rstd, w, **options)
        return tuple(one for one in found if one is not None)

    return run


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"weight_offset": 0.5}, 1),
        ({"dw_dtype": torch.float32}, 0),
        ({"need_dx": False}, 0),
    ],
)
def test_backwards_have_the_options_that_they_had(
    served: Package, kernels: Kernels, options: dict[str, Any], count: int
) -> None:
    run, inputs = by_package(served, **options), given(torch.bfloat16, seed=9)
    module = trace(run, dtype=torch.bfloat16)
    wanted = results_of(module(*inputs))
    found = results_of(route(module, served.ops)(*inputs))
    assert len(kernels.calls) == count == 1 - len(additions(module))
    assert kernels.asked == [(2, False, "weight_offset" in options)] * count
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.02)


def test_sums_of_another_package_stay(served: Package, kernels: Kernels, tmp_path: Path) -> None:
    module = trace(by_package(write_package(tmp_path / "other")))
    route(module, served.ops)
    assert (len(additions(module)), kernels.asked) == (1, [])


@pytest.mark.parametrize("name", ["x", "w"])
def test_sums_stay_where_tracing_left_no_values(
    served: Package, kernels: Kernels, name: str
) -> None:
    """The terms have some, and the rows or the weight do not."""
    module = trace(by_package(served))
    for node in module.graph.nodes:
        if node.name.startswith(name):
            del node.meta["val"]
    route(module, served.ops)
    assert (len(additions(module)), kernels.asked) == (1, [])


@needs_whole_forward
def test_a_sum_that_is_added_behind_the_backward_is_written(
    served: Package, kernels: Kernels
) -> None:
    def run(x: Any, r: Any, g: Any, w: Any) -> Any:
        dx, dw = backward(total := r + g, x, w)
        return dx + total, dw

    module, inputs = trace(run), given(seed=9)
    wanted = module(*inputs)
    found = route(module, served.ops)(*inputs)
    assert (len(additions(module)), kernels.calls) == (1, [])
    torch.testing.assert_close(results_of(found), results_of(wanted), atol=1e-5, rtol=1e-5)


@needs_whole_forward
@pytest.mark.parametrize("narrow", ["rows", "gradients"])
def test_sums_of_another_dtype_than_the_rows_stay(
    served: Package, kernels: Kernels, narrow: str
) -> None:
    """Kernels read both in one dtype."""

    def run(x: Any, r: Any, g: Any, w: Any) -> Any:
        if narrow == "rows":
            return backward(r + g, x.bfloat16(), w.bfloat16())
        return backward(products(r.bfloat16(), 1)[0] + products(g.bfloat16(), 1)[0], x, w)

    route(module := trace(run), served.ops)
    assert len(additions(module)) == 1


@needs_whole_forward
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("meta", METAS)
def test_sums_of_which_a_part_is_elsewhere_stay(
    served: Package, kernels: Kernels, meta: dict[str, Any], place: int
) -> None:
    additions(module := trace(FOLDED["three"][0]))[place].meta.update(meta)
    route(module, served.ops)
    assert len(additions(module)) == 2


@needs_whole_forward
@pytest.mark.parametrize("meta", METAS)
def test_sums_of_another_stream_or_region_stay(
    served: Package, kernels: Kernels, meta: dict[str, Any]
) -> None:
    route(module := marked(trace(FOLDED["three"][0]), meta), served.ops)
    assert len(additions(module)) == 2


@needs_whole_forward
def test_sums_stay_where_no_kernel_adds(served: Package, kernels: Kernels) -> None:
    kernels.serving = False
    module = trace(FOLDED["three"][0])
    route(module, served.ops)
    assert (len(additions(module)), kernels.asked) == (2, [(3, False, False)])


def test_a_call_without_a_kernel_is_served_by_the_norms_backward(
    served: Package, kernels: Kernels
) -> None:
    """A graph may meet rows for which there is no kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        x, r, g, w = given(dtype, rows=4)
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
        operator, wide = served.ops.backward_of_sum, r.double()
        found = []
        for kernels.serving in (True, False):
            calls = (
                (g, r, None, x, rstd, w, None),
                (g, r, x, x, rstd, w, r),
                (g, r, x, x, rstd, w, wide),
            )
            found.append([operator(*call, 0.0, served.name)[:2] for call in calls])
        torch.testing.assert_close(*found, atol=0.1 if dtype != torch.float32 else 1e-5, rtol=1e-2)
        third = operator(g, r, x, x, rstd, w, wide, 0.0, served.name)[2]
        assert (third.dtype, third.shape) == (torch.float64, x.shape)


# ---- inductor_backend ----------------------------------------------------------------------------


def test_what_is_compiled_with_kernels_that_add_is_kept_apart(
    served: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    def compile_fx(*_: Any, config_patches: dict[str, Any], **__: Any) -> None:
        keys.append(config_patches["post_grad_custom_pre_pass"].uuid())

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    sources: Any = (*["there are none"] * 2, SimpleNamespace())
    for source in sources:
        served.add_gradients_by(lambda operation, source=source: source)
        make_backend(served.ops)(torch.fx.GraphModule({}, torch.fx.Graph()), [])
    assert keys[0] == keys[1] != keys[2]


@needs_whole_forward
@pytest.mark.slow
def test_a_llama_has_no_additions_before_its_norms(
    served: Package, kernels: Kernels, own_cache: None
) -> None:
    """In each of two layers, the gradients of queries, keys and values are added by a backward, and
    so are those of the gate. The last norm's result goes to one product."""
    model, ids = model_of("Llama"), torch.arange(12).reshape(2, 6)
    wanted = step(model, ids)
    model.model.forward = torch.compile(model.model.forward, backend=make_backend(served.ops))
    torch.testing.assert_close(step(model, ids), wanted, atol=1e-4, rtol=1e-4)
    assert sorted(kernels.calls) == [2, 2, 3, 3]
