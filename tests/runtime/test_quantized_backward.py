"""RMSNorm's backward whose dx is also quantized to FP8: the function, by PyTorch's operators on the
CPU, and by a kernel that the driver is given."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import normforge
from generator.paths import REPOSITORY
from normforge.frontends.quantized_backward import SERVED, rms_norm_backward_quantized
from normforge.operations import BACKWARD_FORMATS, FORMATS
from normforge.operations.formula import evaluate
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from normforge.quantized import explain, rms_norm_quantized
from normforge.quantized import rms_norm_backward_quantized as backward
from normforge.serve.reference import reference_backward
from tests.support.fake_driver import (
    SPEC,
    ComputingDriver,
    FakeDevice,
    at_address,
    entry,
    row_server,
    rows_at,
    stand_in,
    use_row_servers,
)
from tests.support.fresh import INDUCTOR, run_fresh

M, N, EPS = 12, 256, 1e-5
FP8, MX = FORMATS
each_format = pytest.mark.parametrize("format", FORMATS)


def drawn(dtype: torch.dtype = torch.float32, residual: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    x, dy = (torch.randn(M, N).to(dtype) for _ in range(2))
    rstd = (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    given = {"dy": dy, "x": x, "rstd": rstd, "weight": (torch.rand(N) + 0.5).to(dtype)}
    return given | ({"dresidual": torch.randn(M, N).to(residual)} if residual else {})


def wanted(given: dict[str, Any]) -> list[torch.Tensor]:
    """Return dx in float64 from the norm's own backward, with the residual's gradient, and dw."""
    wide = {name: tensor.double() for name, tensor in given.items()}
    residual = wide.pop("dresidual", 0.0)
    dx, dw, *_ = reference_backward(*wide.values())
    return [dx + residual, dw]


def quantized(format: str, dx: torch.Tensor, powers: bool = False) -> tuple[torch.Tensor, ...]:
    return quantize_mx(dx) if format == MX else quantize_1x128(dx, powers)


def same(found: Any, other: Any) -> None:
    for one, two in zip(found, other, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_format
def test_via_x_s_dtype_dx8_is_that_of_dx(
    format: str, dtype: torch.dtype, residual: torch.dtype | None
) -> None:
    given = drawn(dtype, residual)
    for powers in (False, True)[: 1 + (format == FP8)]:
        options = {"power_of_two_scales": powers} if powers else {}
        dx, dx8, scales, dw, *more = backward(**given, format=format, via=dtype, **options)
        same((dx8, scales), quantized(format, dx.float(), powers))
        exact_dx, exact_dw = wanted(given)
        torch.testing.assert_close(dx, exact_dx.to(dtype))
        torch.testing.assert_close(dw, exact_dw.to(dtype))
        assert len(more) == (residual is not None)
        if residual:
            torch.testing.assert_close(more[0], exact_dx.to(residual), rtol=1e-2, atol=1e-3)
            assert (more[0] is dx) == (residual == dtype)


@each_format
def test_by_default_dx_is_quantized_as_it_is_in_fp32(format: str) -> None:
    given = drawn(torch.bfloat16, torch.float32)
    *_, wide = found = backward(**given, format=format)
    same(found[1:3], quantized(format, wide))
    assert not torch.equal(found[1].float(), quantized(format, found[0].float())[0].float())


@each_format
def test_options_of_a_norm(format: str) -> None:
    given = drawn()
    plain = backward(**given, format=format)
    without = backward(**(given | {"weight": None}), format=format)
    ones = backward(**(given | {"weight": torch.ones(N)}), format=format)
    same(without[:3], ones[:3])
    assert without[3] is None
    shifted = backward(**(given | {"weight": given["weight"] - 1}), format=format, weight_offset=1)
    torch.testing.assert_close(shifted[0], plain[0])
    torch.testing.assert_close(shifted[3], plain[3])
    shape = (3, 4, N)
    folded = {name: t.reshape(*shape[:-1], -1) if t.dim() == 2 else t for name, t in given.items()}
    again = backward(**folded, format=format)
    assert again[0].shape == again[1].shape == shape
    same([one.flatten() for one in again], [one.flatten() for one in plain])
    narrow = backward(**(given | {"weight": given["weight"].half()}), format=format)
    assert narrow[3].dtype == torch.float16


def test_nothing_has_a_gradient() -> None:
    given = {name: tensor.requires_grad_() for name, tensor in drawn().items()}
    assert not any(result.requires_grad for result in backward(**given))
    run = torch.compile(backward, fullgraph=True, backend="aot_eager")
    assert not any(result.requires_grad for result in run(**given))


@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
@each_format
def test_a_compiled_call_is_the_operator(format: str, residual: torch.dtype | None) -> None:
    given, graphs = drawn(torch.bfloat16, residual), []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(backward, fullgraph=True, backend=keep)
    same(run(**given, format=format), backward(**given, format=format))
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(rms_norm_backward_quantized) == 1
    assert normforge.quantized.operators.rms_norm_backward_quantized.v2 is (
        rms_norm_backward_quantized
    )


@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
@each_format
def test_the_operator_is_what_pytorch_asks_of_one(format: str, residual: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = {"dresidual": None} | drawn(dtype, residual)
        tensors = [given[name] for name in ("dy", "x", "rstd", "weight", "dresidual")]
        torch.library.opcheck(
            rms_norm_backward_quantized, (*tensors, 0.5, format, True, False, "*/quantized")
        )
        turned = [one.t().contiguous().t() for one in tensors[:2]]
        without = (*turned, tensors[2], None, tensors[4])
        torch.library.opcheck(
            rms_norm_backward_quantized, (*without, 0.0, format, False, False, "*/quantized")
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transform_sees_what_a_plain_call_gives(dtype: torch.dtype) -> None:
    given = drawn(dtype, torch.float32)
    dx, *narrow, _, wide = backward(**given)

    def of_one(dy: Any, x: Any, rstd: Any, dresidual: Any) -> Any:
        one = (dy[None], x[None], rstd[None])
        return backward(*one, given["weight"], dresidual=dresidual[None])

    each = (given[name] for name in ("dy", "x", "rstd", "dresidual"))
    found_dx, *found_narrow, _, found_wide = torch.func.vmap(of_one)(*each)
    torch.testing.assert_close(found_dx[:, 0], dx)
    torch.testing.assert_close(found_wide[:, 0], wide, rtol=1e-6, atol=1e-6)
    same([one[:, 0].contiguous() for one in found_narrow], narrow)


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "dy of another shape": (ValueError, "dy must have the shape", {"dy": torch.zeros(3, N)}),
    "dy of another dtype": (TypeError, "dy must be of", {"dy": torch.zeros(M, N).half()}),
    "no dy": (TypeError, "needs dy", {"dy": None}),
    "rstd of fewer rows": (ValueError, "one number for each row", {"rstd": torch.zeros(3, 1)}),
    "a residual of another shape": (
        ValueError,
        "dresidual must have the shape",
        {"dresidual": torch.zeros(3, N)},
    ),
    "a residual of whole numbers": (
        TypeError,
        "dresidual must be of",
        {"dresidual": torch.zeros(M, N, dtype=torch.int32)},
    ),
    "a format that there is not": (ValueError, "format is one of", {"format": "fp4"}),
    "parts of blocks": (ValueError, "a multiple of 128", {"x": torch.zeros(M, 200)}),
    "another dtype": (ValueError, "via is x's dtype", {"via": torch.float16}),
    "one row of dy": (ValueError, "dy must have the shape", {"dy": torch.zeros(1, N)}),
    "powers of MX": (ValueError, "leave power_of_two", {"format": MX, "power_of_two_scales": True}),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("plain", [True, False])
def test_what_does_not_fit_together_is_refused_in_one_sentence(fault: str, plain: bool) -> None:
    kind, said, changed = REFUSED[fault]
    given = drawn() | changed
    if not plain:
        given["rstd"] = given["rstd"].as_subclass(Subclass)
    with pytest.raises(kind, match=said):
        backward(**given)


def test_nested_rows_are_refused() -> None:
    x = torch.nested.nested_tensor([torch.randn(2, N), torch.randn(3, N)], layout=torch.jagged)
    with pytest.raises(ValueError, match="x is a nested tensor: give the backward its values"):
        backward(x, x, torch.ones(5, 1))


# ---- What traces, watches or wraps a call --------------------------------------------------------


class Subclass(torch.Tensor):
    """A tensor that knows PyTorch's operators alone."""


@pytest.mark.parametrize("wrapped", ["dy", "x", "rstd", "weight", "dresidual"])
@pytest.mark.parametrize("via", [None, torch.bfloat16])
@each_format
def test_a_subclass_gets_the_bits_of_a_plain_call(format: str, via: Any, wrapped: str) -> None:
    given = drawn(torch.bfloat16, torch.float32)
    powers = {"power_of_two_scales": True} if format == FP8 else {}
    how = {"format": format, "via": via, "weight_offset": 1.0, **powers}
    wanted = backward(**given, **how)
    given[wrapped] = given[wrapped].as_subclass(Subclass)
    found = backward(**given, **how)
    assert any(type(one) is Subclass for one in found)  # PyTorch's operators served
    same([one.as_subclass(torch.Tensor) for one in found], wanted)


def test_results_have_no_tangents() -> None:
    given = drawn(residual=torch.bfloat16)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(given["x"], torch.ones(M, N))
        for one in backward(**(given | {"x": x})):
            assert torch.autograd.forward_ad.unpack_dual(one).tangent is None


def test_a_mode_sees_the_operator() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    given = drawn()
    plain = backward(**given)
    with Watching():
        same(backward(**given), plain)
    assert seen.count(rms_norm_backward_quantized) == 1


FIRST_CALL = """
import torch
from normforge.quantized import rms_norm_backward_quantized as run
x = torch.randn(4, 256)
given = (x, x, torch.ones(4, 1), torch.ones(256))
torch.compile(run, fullgraph=True, backend="eager")(*given, format="{format}")
print("one graph")
"""


@each_format
def test_the_first_call_of_a_process_may_be_compiled(format: str) -> None:
    done = run_fresh(FIRST_CALL.format(format=format), REPOSITORY, imported=INDUCTOR)
    assert done.stdout.strip() == "one graph", done.stderr


def test_an_exported_graph_takes_as_many_rows_as_columns() -> None:
    class Module(torch.nn.Module):
        def forward(self, dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
            return backward(dy, x, rstd, weight)

    given = drawn()
    rows = {0: torch.export.Dim("B", min=2)}
    shapes = {"dy": rows, "x": rows, "rstd": rows, "weight": None}
    program = torch.export.export(
        Module(), tuple(given.values()), dynamic_shapes=shapes, strict=False
    )
    more = [t.repeat(-(-N // M), 1)[:N] if t.dim() == 2 else t for t in given.values()]
    same(program.module()(*more), backward(*more))


# ---- Who serves ----------------------------------------------------------------------------------


def test_a_weight_in_a_third_dtype_is_served_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    served: Any = SERVED("*/quantized")
    asked: list[Any] = []
    run = served.backward_quantized

    def spy(given: Any, call: Any) -> Any:
        asked.append(given["weight"].dtype)
        return run(given, call)

    monkeypatch.setattr(served, "backward_quantized", spy)
    given = drawn(torch.bfloat16)
    dw = backward(**(given | {"weight": given["weight"].half()}))[3]
    assert (asked, dw.dtype) == ([torch.float32], torch.float16)


def test_it_explains_the_kernel_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    served: Any = SERVED("*/quantized")
    asked: list[Any] = []
    server = SimpleNamespace(explain=lambda *given, **how: asked.append((given, how)))
    monkeypatch.setattr(served, "server", lambda operation: asked.append(operation) or server)
    explain(4096, 1024, "bf16", "fp32", format=MX, backward=True, residual="fp32", offset=True)
    assert asked == [
        BACKWARD_FORMATS[MX],
        ((4096, 1024, "bf16", "fp32"), {"offset": True, "residual": "fp32"}),
    ]


@each_format
def test_it_says_why_no_kernel_serves(format: str) -> None:
    found = explain(4096, 1024, "bf16", format=format, backward=True, residual="bf16")
    assert (found["how"], found["kernel"]) == ("none", None)
    said = "fp8_backward|nothing like 4096x1024:bf16"  # no package, or none of such a length
    assert re.search(said, found["reason"])


class Device(ComputingDriver):
    """Computes the operation from the arguments of its kernel."""

    def compute(self, function: str, args: Any) -> None:
        rows = {name: torch.stack(rows_at(args, name, torch.bfloat16)) for name in ("x", "dy")}
        rstd = at_address(args.rstd, M, torch.float32)
        weight = at_address(args.weight, args.columns, torch.bfloat16)
        numbers = {name: getattr(args, name) for name in ("rounded", "powers")}
        operation = BACKWARD_FORMATS[FP8]
        given = rows | {"rstd": rstd, "weight": weight} | numbers
        found = evaluate(operation, given, offset=args.weight_offset)
        narrow = {name: found[name].bfloat16() for name in ("dx", "dw")}
        for name, value in (found | narrow).items():
            at_address(getattr(args, name), value.numel(), value.dtype).copy_(value.flatten())


@pytest.fixture
def launched(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of kernels, which take CPU tensors, of rows of 256 columns in bf16."""
    driver = Device()
    stand_in(monkeypatch, driver)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    use_row_servers(monkeypatch, device)
    operation = BACKWARD_FORMATS[FP8]
    server = row_server(operation, entry(M, replace(SPEC, operation=operation.name, N=N)))
    monkeypatch.setattr(server, "is_without_kernels", lambda x: False)
    served: Any = SERVED("*/quantized")
    monkeypatch.setitem(served._servers, operation.name, server)
    return driver.launches


def test_a_kernel_is_given_what_a_call_says(launched: list[Any]) -> None:
    given = drawn(torch.bfloat16)
    for options in ({}, {"via": torch.bfloat16}, {"power_of_two_scales": True}):
        for _ in range(2):  # the second call is a known one
            dx, dx8, scales, dw = backward(**given, **options)
            exact_dx, exact_dw = wanted(given)
            seen = exact_dx.bfloat16() if "via" in options else exact_dx
            made = quantize_1x128(seen.float(), "power_of_two_scales" in options)
            torch.testing.assert_close(dx, exact_dx.bfloat16())
            torch.testing.assert_close(dw, exact_dw.bfloat16())
            torch.testing.assert_close(scales, made.scales, rtol=1e-2, atol=0)
            again = dx8.float() * scales.repeat_interleave(128, -1)
            assert (again - exact_dx).norm() < 0.05 * exact_dx.norm()
    assert len(launched) == 6
    numbers = [(one.arguments.rounded, one.arguments.powers) for one in launched]
    assert numbers == [(0.0, 0.0)] * 2 + [(1.0, 0.0)] * 2 + [(0.0, 1.0)] * 2


def test_a_layer_before_the_norm_takes_both() -> None:
    """A layer that multiplies by FP8 gradients trains as one that multiplies by dequantized ones
    does."""
    torch.manual_seed(1)
    a, layer = torch.randn(M, 64), (torch.randn(N, 64) / 8).requires_grad_()
    weight = torch.rand(N) + 0.5

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, layer: Any) -> Any:
            h = a @ layer.T
            *_, rstd, y = rms_norm_quantized(h, weight, EPS, keep_y=True)
            ctx.save_for_backward(a, h, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            a, h, rstd = ctx.saved_tensors
            _, dh8, scales, _ = backward(dy, h, rstd, weight)
            return None, (dh8.float() * scales.repeat_interleave(128, -1)).T @ a

    dy = torch.randn(M, N)
    (found,) = torch.autograd.grad(Fused.apply(a, layer), layer, dy)
    y = torch.nn.functional.rms_norm(a @ layer.T, (N,), weight, EPS)
    (exact,) = torch.autograd.grad(y, layer, dy)
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.05
