"""RMSNorm that adds a residual stream before and is quantized to FP8 behind: the function and its
gradients, by PyTorch's operators on the CPU, and by a kernel that the driver is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normforge import rms_norm, rms_norm_quantized
from normforge.frontends.quantized import QuantizedFunctions
from normforge.frontends.quantized_node import add_rms_norm_quantized_forward
from normforge.operations import FORMATS, STREAM_FORMATS
from normforge.quantized import explain
from normforge.serve.collect import Recorder, collecting
from tests.support.fake_driver import FakeDevice
from tests.support.quantized import BF16, launches_of

M, N, EPS, FP8 = 12, 256, 1e-5, "fp8_1x128"
each_format = pytest.mark.parametrize("format", FORMATS)


def drawn(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Return x, a residual and a weight."""
    torch.manual_seed(0)
    made = (torch.randn(M, N), torch.randn(M, N) * 3, torch.rand(N) + 0.5)
    return [one.to(dtype).requires_grad_() for one in made]


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@each_format
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_it_is_the_quantized_norm_of_the_rounded_sum(dtype: torch.dtype, format: str) -> None:
    x, residual, weight = (one.detach() for one in drawn(dtype))
    for options in ({}, {"keep_y": True}, {"via": dtype, "weight_offset": 1.0}):
        wanted = rms_norm_quantized(x + residual, weight, EPS, format=format, **options)
        found = rms_norm_quantized(x, weight, EPS, format=format, residual=residual, **options)
        same(found, (*wanted, x + residual))
    turned = residual.view(3, 4, N).transpose(0, 1).contiguous().transpose(0, 1)
    found = rms_norm_quantized(x.view(3, 4, N), weight, EPS, format=format, residual=turned)
    same([one.flatten(0, 1) for one in found], (*wanted_of(x, residual, weight, format),))
    assert found[3].is_contiguous()


def wanted_of(x: Any, residual: Any, weight: Any, format: str) -> list[torch.Tensor]:
    return [*rms_norm_quantized(x + residual, weight, EPS, format=format), x + residual]


@each_format
@pytest.mark.parametrize("through", ["y", "h", "both"])
def test_gradients_flow_through_y_and_the_sum(format: str, through: str) -> None:
    leaves = drawn(torch.float32)
    x, residual, weight = leaves
    weights = torch.randn(2, M, N)

    def gradients(y: torch.Tensor, h: torch.Tensor) -> list[Any]:
        loss = (y * weights[0]).sum() * (through != "h") + (h * weights[1]).sum() * (through != "y")
        return [*torch.autograd.grad(loss, leaves)]

    found = rms_norm_quantized(x, weight, EPS, format=format, residual=residual, keep_y=True)
    assert [one.requires_grad for one in found] == [False, False, False, True, True]
    h = x + residual
    for one, other in zip(
        gradients(*found[3:]), gradients(rms_norm(h, weight, EPS), h), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_without_y_the_gradient_is_that_of_the_sum() -> None:
    x, residual, weight = drawn()
    *_, h = rms_norm_quantized(x, weight, EPS, residual=residual)
    found = torch.autograd.grad(h, [x, residual, weight], torch.ones_like(h), allow_unused=True)
    assert torch.equal(found[0], torch.ones_like(h)) and torch.equal(found[1], found[0])
    assert found[2] is None


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_gradients_that_nobody_wants_are_none(frozen: int) -> None:
    leaves = drawn(torch.float32)
    leaves[frozen].requires_grad_(False)
    x, residual, weight = leaves
    left = [one for one in leaves if one.requires_grad]
    *_, y, h = rms_norm_quantized(x, weight, EPS, residual=residual, keep_y=True)
    total = x + residual
    wanted = torch.autograd.grad((rms_norm(total, weight, EPS) * total).sum(), left)
    for one, other in zip(torch.autograd.grad((y * h).sum(), left), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients_and_transforms_are_pytorchs() -> None:
    x, residual, weight = (one.detach().double() for one in drawn(torch.float32))

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        *_, y, h = rms_norm_quantized(x, w, EPS, residual=r, keep_y=True)
        return y * h

    given = [one[:2].clone().requires_grad_() for one in (x, residual)]
    columns = weight.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(run, (*given, columns), nondet_tol=1e-9, fast_mode=True)
    by_row = torch.func.vmap(run, (0, 0, None))(x, residual, weight)
    torch.testing.assert_close(by_row, run(x, residual, weight))


@each_format
def test_a_compiled_call_is_one_graph_of_operators(format: str) -> None:
    leaves = drawn(torch.float32)

    def step(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        return rms_norm_quantized(x, w, EPS, format=format, residual=r, keep_y=True)

    torch.compiler.reset()
    found, wanted = torch.compile(step, fullgraph=True)(*leaves), step(*leaves)
    same([one.detach() for one in found], [one.detach() for one in wanted])
    for one, other in zip(
        *(torch.autograd.grad((r[3] * r[4]).sum(), leaves) for r in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)


@each_format
def test_the_operator_is_what_pytorch_asks_of_one(format: str) -> None:
    x, residual, weight = (one.detach() for one in drawn())
    for keep_y in (False, True):
        rest = (EPS, 0.0, format, keep_y, False, False, "*/quantized")
        turned = residual.t().contiguous().t()
        for given in ((x, residual, weight), (x, turned, None)):
            torch.library.opcheck(add_rms_norm_quantized_forward, (*given, *rest))


@pytest.mark.parametrize(
    ("residual", "error", "says"),
    [
        ([1.0], TypeError, "residual must be a torch.Tensor, got list"),
        (torch.zeros(M, 128, dtype=BF16), ValueError, "residual must be like x"),
        (torch.zeros(M, N), ValueError, "torch.bfloat16 of shape .* got torch.float32 of shape"),
        (torch.zeros(M, N, dtype=BF16, device="meta"), ValueError, "on cpu, got .* on meta"),
    ],
)
def test_a_residual_that_does_not_fit_is_one_sentence(
    residual: Any, error: type[Exception], says: str
) -> None:
    x, _, weight = drawn()
    with pytest.raises(error, match=says) as raised:
        rms_norm_quantized(x, weight, residual=residual)
    assert "\n" not in str(raised.value)


# ---- Who serves ----------------------------------------------------------------------------------


def test_it_says_which_kernel_adds() -> None:
    found = explain(4096, 1024, "bf16", residual="bf16")
    assert (found["how"], found["kernel"]) == ("none", None)
    with pytest.raises(ValueError, match="no kernel adds a residual in mxfp8_1x32"):
        explain(4096, 1024, "bf16", format="mxfp8_1x32", residual="bf16")


@pytest.fixture
def launched(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return launches_of(STREAM_FORMATS[FP8], M, N, device, monkeypatch)


@pytest.mark.parametrize("keep_y", [False, True])
def test_a_kernel_is_given_what_a_call_says(launched: list[Any], keep_y: bool) -> None:
    x, residual, weight = (one.detach() for one in drawn())
    for options in ({}, {"via": BF16}, {"power_of_two_scales": True}):
        for _ in range(2):  # the second call is a known one
            given = {"residual": residual, "keep_y": keep_y, **options}
            found = rms_norm_quantized(x, weight, 0.25, **given)
            total = x + residual
            wanted = rms_norm_quantized(total, weight, 0.25, keep_y=keep_y, **options)
            same(found, (*wanted, total))
    assert [bool(one.arguments.y) for one in launched] == [keep_y] * 6


def test_what_its_kernel_does_not_take_is_added_by_pytorch(launched: list[Any]) -> None:
    x, residual, weight = (one.detach()[..., :128].contiguous() for one in drawn())
    found = rms_norm_quantized(x, weight, EPS, residual=residual)
    same(found, (*rms_norm_quantized(x + residual, weight, EPS), x + residual))
    assert launched == []


def test_calls_are_counted_for_the_tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "shapes.yaml")
    monkeypatch.setattr(collecting, "recorder", recorder)
    x, residual, weight = (one.detach() for one in drawn())
    rms_norm_quantized(x, weight, EPS, residual=residual)
    recorder.stop()
    said = (tmp_path / "shapes.yaml").read_text()
    assert f"{STREAM_FORMATS[FP8].name}:\n    {M}x{N}:bf16: 1\n" in said


def test_gradients_are_of_the_package_s_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, with the gradient of the sum."""
    asked: list[Any] = []
    backward = QuantizedFunctions.backward

    def recorded(self: Any, *given: Any) -> Any:
        asked.append(given[6:])
        return backward(self, *given)

    monkeypatch.setattr(QuantizedFunctions, "backward", recorded)
    x, residual, weight = drawn(torch.float32)
    *_, y, h = rms_norm_quantized(x, weight, EPS, residual=residual, keep_y=True)
    torch.autograd.grad((y + 2 * h).sum(), [x, residual, weight])
    ((need_dx, need_dw, dresidual),) = asked
    assert need_dx and need_dw and torch.equal(dresidual, torch.full_like(h, 2.0))


# ---- Memory --------------------------------------------------------------------------------------


def test_the_sum_of_rows_in_another_order_is_contiguous() -> None:
    """It is what the operator says of itself."""
    _, _, weight = (one.detach() for one in drawn(torch.float32))
    leaves = [torch.randn(4, M, N, requires_grad=True) for _ in range(2)]

    def run(x: torch.Tensor, r: torch.Tensor) -> Any:
        x, r = x.transpose(0, 1), r.transpose(0, 1)
        return rms_norm_quantized(x, weight, EPS, residual=r, keep_y=True)

    torch.compiler.reset()
    for found in (run(*leaves), torch.compile(run, fullgraph=True)(*leaves)):
        assert found[4].is_contiguous()
        gradients = torch.autograd.grad((found[3] * found[4]).sum(), leaves)
        total = sum(leaves).transpose(0, 1)  # type: ignore[call-overload]
        wanted = torch.autograd.grad((rms_norm(total, weight, EPS) * total).sum(), leaves)
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", None])
def test_a_change_of_the_sum_is_seen(backend: str | None) -> None:
    x, residual, weight = drawn(torch.float32)

    def run(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        *_, y, rows = rms_norm_quantized(x, w, EPS, residual=r, keep_y=True)
        rows.add_(3.0)
        return (y * rows).sum()

    torch.compiler.reset()
    called = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(called(x, residual, weight), [x, weight])
