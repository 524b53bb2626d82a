"""RMSNorm that is quantized to FP8: the functions and their gradients, by PyTorch's operators on
the CPU, and by a kernel that the driver is given."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

import normforge
from normforge import rms_norm, rms_norm_quantized
from normforge.frontends.quantized import QuantizedFunctions
from normforge.frontends.quantized_node import (
    rms_norm_quantized_backward,
    rms_norm_quantized_forward,
)
from normforge.operations import FORMATS, RMSNORM_FP8_FORWARD
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from normforge.quantized import explain
from tests.support.fake_driver import FakeDevice
from tests.support.quantized import launches_of

M, N = 12, 256
EPS = 1e-5
BLOCK = {"fp8_1x128": 128, "mxfp8_1x32": 32}
each_format = pytest.mark.parametrize("format", FORMATS)
Results = tuple[torch.Tensor, ...]
VIEWS_IN_BATCHES = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""True where vmap views bits as another dtype, as MX does; PyTorch 2.9 refuses."""


def drawn(dtype: torch.dtype = torch.float32, M: int = M) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(M, N), torch.rand(N) + 0.5
    return [one.to(dtype).requires_grad_() for one in (x, weight)]


def same(found: Any, wanted: Any) -> None:
    """Compare bit by bit, but for the NaNs of e4m3, which have two forms."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        number = ~other.float().isnan()
        assert torch.equal(one.float().isnan(), ~number)
        wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        assert torch.equal(one.detach().view(wide)[number], other.detach().view(wide)[number])


# ---- What is computed ----------------------------------------------------------------------------


def deepseek(y: torch.Tensor, power_of_two: bool = False) -> Results:
    """Quantize as recipes on top of a norm do, with PyTorch's division by a number on a GPU."""
    blocks = y.float().view(*y.shape[:-1], -1, 128)
    amax = blocks.abs().amax(-1).clamp(min=1e-10)
    scales = amax * (1.0 / 448.0)
    if power_of_two:
        finite = torch.frexp(scales)
        up = finite.exponent - (finite.mantissa == 0.5).int()
        scales = torch.where(scales.isfinite(), torch.ldexp(torch.ones_like(scales), up), scales)
    y8 = (blocks / scales[..., None]).to(torch.float8_e4m3fn)
    return y8.view(y.shape), scales


def microscaling(y: torch.Tensor) -> Results:
    """Quantize number by number, after the OCP specification, in float64."""
    rows, every = y.double().flatten(0, -2), []
    scales = torch.empty(*y.shape[:-1], y.shape[-1] // 32)
    for i, block in enumerate(rows.reshape(-1, 32)):
        amax = block.abs().max()
        exponent = -127 if amax == 0 else int(torch.frexp(amax).exponent) - 1 - 8
        scale = torch.tensor(2.0, dtype=torch.float64) ** max(exponent, -127)
        scale = scale if amax.isfinite() else torch.tensor(torch.nan)
        every.append((block / scale).clamp(-448, 448).float())
        scales.view(-1)[i] = scale
    return torch.stack(every).to(torch.float8_e4m3fn).view(y.shape), scales.to(torch.float8_e8m0fnu)


def awkward(dtype: torch.dtype) -> torch.Tensor:
    x = drawn(torch.float32, 40)[0].detach().clone()
    x *= torch.exp2(torch.arange(-20, 20, dtype=torch.float32) * 2)[:, None]
    x[:, :128] *= torch.exp2(torch.arange(40, dtype=torch.float32) - 30)[:, None]
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, 128:] = 0.0
    x[3, 5], x[4, 200] = torch.inf, torch.nan
    x[5] = torch.finfo(torch.bfloat16).max
    return x.to(dtype)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_via_x_s_dtype_every_bit_is_that_of_a_recipe_on_top_of_the_norm(dtype: torch.dtype) -> None:
    x, weight = awkward(dtype), drawn(dtype)[1].detach()
    y = rms_norm(x, weight, 1e-12)
    same(rms_norm_quantized(x, weight, 1e-12, via=dtype)[:2], deepseek(y))
    powers = rms_norm_quantized(x, weight, 1e-12, via=dtype, power_of_two_scales=True)
    same(powers[:2], deepseek(y, power_of_two=True))
    of_mx = rms_norm_quantized(x, weight, 1e-12, via=dtype, format="mxfp8_1x32")
    same(of_mx[:2], microscaling(y))
    for found in (powers, of_mx):
        assert found[2].shape == (40, 1) and found[2].dtype == torch.float32


@pytest.mark.parametrize("exponent", [-20, 0, 30])
def test_scales_at_powers_of_two(exponent: int) -> None:
    """Each block has one number; y8 is what it is divided by its scale, and 448 at most."""
    largest = torch.tensor([447.0, 448.0, 449.0, 511.0, 512.0]) * 2.0**exponent
    y = torch.zeros(5, 128)
    y[:, 77] = -largest
    y8, scales = quantize_1x128(y, power_of_two=True)
    assert (scales[:, 0] * 2.0**-exponent).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert y8.float()[:, 77].tolist() == [-448.0, -448.0, -224.0, -256.0, -256.0]
    y8, scales = quantize_mx(y)
    assert scales.float()[:, 2].tolist() == [2.0**exponent] * 4 + [2.0 ** (exponent + 1)]
    assert y8.float()[:, 77].tolist() == [-448.0] * 4 + [-256.0]
    assert scales.view(torch.uint8)[:, [0, 1, 3]].max() == 0
    exact = torch.full((1, 128), 448.0 * 2.0**exponent)
    assert quantize_1x128(exact)[1].item() == 2.0**exponent


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_by_default_y_is_quantized_as_it_is_in_fp32(dtype: torch.dtype, format: str) -> None:
    x, weight = (one.detach() for one in drawn(dtype))
    y8, scales, rstd, y = rms_norm_quantized(x, weight, EPS, format=format, keep_y=True)
    wide = rms_norm(x.float(), weight.float(), EPS)
    same((y8, scales), (deepseek if format == "fp8_1x128" else microscaling)(wide))
    assert torch.equal(y, wide.to(dtype)) and torch.equal(y, rms_norm(x, weight, EPS))
    assert torch.equal(rstd, normforge.rmsnorm_forward(x, weight, EPS)[1])
    same(rms_norm_quantized(x, weight, EPS, format=format), (y8, scales, rstd))
    again = y8.float() * scales.float().repeat_interleave(BLOCK[format], -1)
    slack = scales.float().repeat_interleave(BLOCK[format], -1) * 2.0**-10
    least = 2.0**-4 if format == "fp8_1x128" else 0.13  # beyond 448 there is 1 / 8 more
    assert ((again - wide).abs() <= wide.abs() * least + slack).all()


@each_format
def test_options_of_a_norm(format: str) -> None:
    x, weight = (one.detach() for one in drawn())
    shifted = rms_norm_quantized(x, weight, format=format, weight_offset=1.0)
    same(shifted, rms_norm_quantized(x, weight + 1, format=format))
    plain = rms_norm_quantized(x, format=format)
    same(plain, rms_norm_quantized(x, torch.ones(N), torch.finfo(torch.float32).eps, format=format))
    many = rms_norm_quantized(x.view(3, 4, N), weight, format=format, keep_y=True)
    flat = rms_norm_quantized(x, weight, format=format, keep_y=True)
    same(many, [one.view(3, 4, -1) for one in flat])
    turned = rms_norm_quantized(x.t().contiguous().t(), weight, format=format, keep_y=True)
    same(turned[:2], (deepseek if format == "fp8_1x128" else microscaling)(turned[3]))
    torch.testing.assert_close(turned[3], flat[3])
    assert all(one.is_contiguous() for one in turned)
    narrow = x.bfloat16() * 1e-4  # beside which an eps counts
    same(
        rms_norm_quantized(narrow, format=format),
        rms_norm_quantized(narrow, None, torch.finfo(torch.float32).eps, format=format),
    )
    nothing = rms_norm_quantized(x[:0], weight, format=format)
    assert [one.shape for one in nothing] == [(0, N), (0, N // BLOCK[format]), (0, 1)]
    meta = rms_norm_quantized(x.to("meta"), weight.to("meta"), format=format, keep_y=True)
    assert [(a.shape, a.dtype) for a in meta] == [(b.shape, b.dtype) for b in flat]
    wide = rms_norm_quantized(x.double(), weight.double(), format=format)
    assert wide[2].dtype == torch.float64


# ---- Gradients -----------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_flow_through_y_as_through_the_norm(dtype: torch.dtype, format: str) -> None:
    leaves = drawn(dtype)
    y8, scales, rstd, y = rms_norm_quantized(*leaves, EPS, format=format, keep_y=True)
    assert [one.requires_grad for one in (y8, scales, rstd, y)] == [False, False, False, True]
    dy = torch.randn(M, N).to(dtype)
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    wanted = torch.autograd.grad(rms_norm(*leaves, EPS), leaves, dy)
    same(found, wanted)
    (alone,) = torch.autograd.grad(y, leaves[:1], dy)
    assert torch.equal(alone, found[0])
    x = leaves[0]
    without = rms_norm_quantized(x, None, EPS, format=format, keep_y=True)[3]
    wanted = torch.autograd.grad(rms_norm(x, None, EPS), [x], dy)
    assert torch.equal(torch.autograd.grad(without, x, dy)[0], wanted[0])
    given = {"format": format, "keep_y": True, "weight_offset": 1.0}
    shifted = rms_norm_quantized(*leaves, EPS, **given)[3]
    wanted = torch.autograd.grad(rms_norm(*leaves, EPS, weight_offset=1.0), leaves, dy)
    found = torch.autograd.grad(shifted, leaves, dy)
    same(found, wanted)
    for one in rms_norm_quantized(*leaves, EPS, format=format):
        assert not one.requires_grad and one.grad_fn is None


def test_a_linear_layer_of_fp8_trains_straight_through() -> None:
    """Its gradient arrives for the dequantized y, and goes into y."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, y8: Any, scales: Any, w: torch.Tensor) -> Any:
            ctx.save_for_backward(y8, scales, w)
            return Linear.dequantized(y8, scales) @ w

        @staticmethod
        def dequantized(y8: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return y8.float() * scales.repeat_interleave(128, -1)

        @staticmethod
        def backward(ctx: Any, dz: torch.Tensor) -> Any:
            y8, scales, w = ctx.saved_tensors
            return dz @ w.t(), None, None, Linear.dequantized(y8, scales).t() @ dz

    leaves = [*drawn(), torch.randn(N, 8, requires_grad=True)]
    y8, scales, _, y = rms_norm_quantized(*leaves[:2], EPS, keep_y=True)
    found = torch.autograd.grad(Linear.apply(y, y8, scales, leaves[2]).sum(), leaves)
    exact = rms_norm(*leaves[:2], EPS)
    seen = exact + (Linear.dequantized(y8, scales) - exact).detach()
    torch.testing.assert_close(found, torch.autograd.grad((seen @ leaves[2]).sum(), leaves))


@each_format
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transform_sees_what_a_plain_call_gives(
    dtype: torch.dtype, options: dict[str, float], format: str
) -> None:
    x, weight = (one.detach() for one in drawn(dtype))

    def run(*given: torch.Tensor) -> Results:
        return rms_norm_quantized(*given, EPS, format=format, keep_y=True, **options)

    wanted = run(x, weight)
    if format == "fp8_1x128" or VIEWS_IN_BATCHES:
        same(torch.func.vmap(run, (0, None))(x, weight), wanted)
    same(torch.func.functionalize(run)(x, weight), wanted)
    same(torch.func.vjp(run, x, weight)[0], wanted)


@pytest.mark.parametrize("keep_y", [False, True])
def test_rows_of_a_jagged_tensor_are_pytorchs(keep_y: bool) -> None:
    x, weight = (one.detach() for one in drawn())
    jagged = torch.nested.nested_tensor([x[:5], x[5:]], layout=torch.jagged)
    found = rms_norm_quantized(jagged, weight, EPS, keep_y=keep_y)
    same([one.values() for one in found], rms_norm_quantized(x, weight, EPS, keep_y=keep_y))


# ---- Compilers and modes -------------------------------------------------------------------------


@each_format
def test_a_compiled_call_is_one_graph_of_operators(format: str) -> None:
    leaves = drawn()

    def step(*given: torch.Tensor) -> Any:
        return rms_norm_quantized(*given, EPS, format=format, keep_y=True)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True)
    found, wanted = compiled(*leaves), step(*leaves)
    same(found, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(r[3].square().sum(), leaves) for r in (found, wanted))
    )
    few = torch.compile(
        lambda x: rms_norm_quantized(x, format=format), fullgraph=True, dynamic=True
    )
    for rows in (3, 8):
        same(few(leaves[0][:rows]), rms_norm_quantized(leaves[0][:rows], format=format))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_gradient_that_nobody_wants_is_not_computed(
    frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    backward = QuantizedFunctions.backward

    def recorded(self: Any, *given: Any) -> Any:
        found = backward(self, *given)
        asked.append((*given[6:8], *(one is not None for one in found)))
        return found

    monkeypatch.setattr(QuantizedFunctions, "backward", recorded)
    leaves = drawn()

    def gradients(*wanted: torch.Tensor, run: Any = rms_norm_quantized) -> Any:
        return torch.autograd.grad(run(*leaves, EPS, keep_y=True)[3].square().sum(), wanted)

    both = gradients(*leaves)
    leaves[frozen].requires_grad_(False)
    left = leaves[1 - frozen]
    run = torch.compile(rms_norm_quantized, fullgraph=True, backend="aot_eager")
    for found in (gradients(left), gradients(left, run=run)):
        torch.testing.assert_close(found, (both[1 - frozen],))
    assert asked[0] == (True,) * 4
    assert asked[1:] == [(frozen == 1, frozen == 0) * 2] * 2


@each_format
def test_the_operators_are_what_pytorch_asks_of_one(format: str) -> None:
    for dtype, options in ((torch.float32, (True, False)), (torch.bfloat16, (False, True))):
        x, weight = (one.detach() for one in drawn(dtype))
        rest = (EPS, 0.0, format, *options, False, "*/quantized")
        torch.library.opcheck(rms_norm_quantized_forward, (x, weight, *rest))
        torch.library.opcheck(rms_norm_quantized_forward, (x.t().contiguous().t(), None, *rest))
        rstd = rms_norm_quantized(x, weight, EPS)[2]
        given = (torch.randn_like(x), x, weight, rstd, EPS, 0.0)
        for wanted in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(rms_norm_quantized_backward, (*given, *wanted, "*/quantized"))
        # PyTorch's operators give dx in the layout of x, and a wide weight has a wide gradient.
        alone = QuantizedFunctions(lambda name: "there are no kernels", f"alone {format} {dtype}")
        turned = [one.t().contiguous().t() for one in given[:2]]
        for weight in (given[2].float(), None):
            given = (*turned, weight, rstd, EPS, 0.5, True, weight is not None, alone.name)
            torch.library.opcheck(rms_norm_quantized_backward, given)
    assert normforge.quantized.operators.rms_norm_quantized.v2 is rms_norm_quantized_forward


def test_a_function_is_pickled_by_its_name() -> None:
    again = pickle.loads(pickle.dumps(rms_norm_quantized))
    assert again.__self__ is rms_norm_quantized.__self__  # type: ignore[attr-defined]


# ---- Who serves ----------------------------------------------------------------------------------


@each_format
def test_it_says_why_no_kernel_serves(format: str) -> None:
    found = explain(4096, 1024, "bf16", format=format)
    assert (found["how"], found["kernel"]) == ("none", None)
    said = "rmsnorm_fp8_forward|nothing like 4096x1024:bf16"  # no package, or none of such a length
    assert re.search(said, found["reason"])
    with pytest.raises(ValueError, match="format is one of"):
        explain(4096, 1024, "bf16", format="fp4")


@pytest.fixture
def launched(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return launches_of(RMSNORM_FP8_FORWARD, M, N, device, monkeypatch)


@pytest.mark.parametrize("keep_y", [False, True])
def test_a_kernel_is_given_what_a_call_says(launched: list[Any], keep_y: bool) -> None:
    x, weight = (one.detach() for one in drawn(torch.bfloat16))
    for options in ({}, {"via": torch.bfloat16}, {"power_of_two_scales": True}):
        for _ in range(2):  # the second call is a known one
            found = rms_norm_quantized(x, weight, 0.25, keep_y=keep_y, **options)
            assert len(found) == 3 + keep_y
            y = rms_norm(x.float(), weight.float(), 0.25)
            seen = y.bfloat16() if "via" in options else y
            same(found[:2], deepseek(seen, "power_of_two_scales" in options))
            assert not keep_y or torch.equal(found[3], y.bfloat16())
            assert found[2].shape == (M, 1)
    assert [bool(one.arguments.y) for one in launched] == [keep_y] * 6
