"""RMSNorm that is quantized to FP8 on a GPU: kernels in the harness that tunes, against float64,
and the functions of packages of them, bit by bit against the formula."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.accuracy import check_accuracy
from generator.evaluate.verify.determinism import check_call_options, check_repeats
from generator.kernels.cubin_cache import compile_variant
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.frontends.quantized import QuantizedFunctions
from normforge.operations import BACKWARD_FORMATS, FORMATS, QUANTIZED
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from normforge.serve.kernels import Source, source_of
from normforge.serve.reference import reference_backward
from tests.support.recipes import up_by_bits
from tests.support.samples import plain_variant, planted_entry

pytestmark = pytest.mark.gpu
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "async": {"pipeline": "async", "stages": 3},
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "producer": {"pipeline": "producer", "stages": 3, "rows_per_cta": 2},
}
EPS = 1e-6
N = 1024
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def with_fp8(here: Target) -> None:
    if not here.has_fp8:
        pytest.skip(f"{here} has no conversions to FP8")


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ("9999x1024:bf16", {}),
        ("999x8192:bf16:fp32", {"cluster": 2, "threads_per_row": 256, "rows_per_cta": 1}),
        ("9999x256:fp16+offset", {"threads_per_row": 32, "rows_per_cta": 8}),
        ("9999x2304:fp32", {"threads_per_row": 192}),
        ("9999x1024:bf16+residual_fp32", {}),
    ],
)
@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_are_accurate_and_repeat_their_bits(
    here: Target, name: str, shape: str, knobs: dict[str, int | str], pipeline: str
) -> None:
    how = {**PIPELINES[pipeline], **knobs}
    if not here.has_bulk_copy and (pipeline in ("bulk", "producer") or "cluster" in knobs):
        pytest.skip(f"{here} has no bulk copies")
    backward = name in [operation.name for operation in BACKWARD_FORMATS.values()]
    if backward:  # it walks over rows, for the sums over them
        how = {"strategy": "column_slices", **how} | {"grid": "full"}
    elif "residual" in shape:
        pytest.skip("a forward has no residual")
    else:
        how["strategy"] = "none"
    problem = Problem.parse(shape, name)
    v = plain_variant(problem, here, **how)
    compiled = compile_variant(v, here.arch)
    assert compiled.error == "" and compiled.spills == 0
    work = Workload(problem, torch.device("cuda", 0))
    bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    assert check_repeats(bench, work.inputs) == ""
    assert check_call_options(bench, work.inputs, v.signature) == ""


@pytest.fixture(scope="module")
def functions(here: Target, tmp_path_factory: pytest.TempPathFactory) -> QuantizedFunctions:
    """The functions of a package for each format, of rows of 1024 columns in every dtype."""
    folder = tmp_path_factory.mktemp("quantized")

    def source(name: str) -> Source | str:
        shapes = [f"{name}:4096x{N}:{of}" for of in ("bf16", "fp16", "fp32", "bf16:fp32")]
        strategy = "none" if "forward" in name else "column_slices"
        shapes += [f"{name}:4096x{N}:bf16+residual_fp32"] * ("backward" in name)
        entries = [planted_entry(Problem.parse(one), here, strategy=strategy) for one in shapes]
        emit_package(entries, [], here, folder / name)
        return source_of(folder / name, name)

    return QuantizedFunctions(source, "of a test")


def drawn(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(*shape, N, device="cuda"), torch.rand(N, device="cuda") + 0.5]
    return [one.to(dtype) for one in made]


def awkward(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows of every size, with zeros of both signs, blocks of them, and what is no number."""
    x, weight = (one.float() for one in drawn(F32, 3, 555))
    rows = x.view(-1, N)
    rows *= torch.exp2(torch.randint(-40, 40, (len(rows), 1), device="cuda"))
    rows[:, 128:256] *= torch.exp2(torch.randint(-60, 9, (len(rows), 1), device="cuda"))
    rows[0], rows[1, ::2], rows[2, :256], rows[6] = 0.0, -0.0, 0.0, 1e-38
    rows[3, 5], rows[4, 300], rows[5] = torch.inf, torch.nan, torch.finfo(BF16).max
    weight[900] = torch.inf
    return [one.to(dtype) for one in (x, weight)]


def same(found: Any, wanted: Any) -> None:
    """Compare bit by bit, but for the NaNs of e4m3, which have two forms."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        number = ~other.detach().float().isnan()
        assert torch.equal(one.detach().float().isnan(), ~number)
        assert torch.equal(one.detach().view(wide)[number], other.detach().view(wide)[number])


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.usefixtures("served_by_kernels")
def test_every_bit_is_that_of_the_formula_of_the_kept_y(
    functions: QuantizedFunctions, dtype: torch.dtype
) -> None:
    for x, weight in (drawn(dtype, 4096), awkward(dtype)):
        for powers in (False, True):
            y8, scales, _, y = functions.rms_norm_quantized(
                x, weight, 1e-12, via=dtype, keep_y=True, power_of_two_scales=powers
            )
            same((y8, scales), quantize_1x128(y.float(), powers))
            if not powers:  # as a recipe writes it
                blocks = y.float().unflatten(-1, (-1, 128))
                eager = blocks.abs().amax(-1).clamp(min=1e-10) / 448.0
                same((scales,), (eager,))
                eager8 = (blocks / eager[..., None]).to(torch.float8_e4m3fn).flatten(-2)
                same((y8,), (eager8,))
        y8, scales, _, y = functions.rms_norm_quantized(
            x, weight, 1e-12, via=dtype, keep_y=True, format="mxfp8_1x32"
        )
        same((y8, scales), quantize_mx(y.float()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("served_by_kernels")
def test_y_in_fp32_is_what_is_quantized_by_default(
    functions: QuantizedFunctions, format: str
) -> None:
    x, weight = drawn(BF16, 4096)
    y8, scales, rstd, y = functions.rms_norm_quantized(x, weight, EPS, format=format, keep_y=True)
    wide = rms_norm(x.double(), (N,), weight.double(), EPS).float()
    exact, _ = quantize_1x128(wide) if format == "fp8_1x128" else quantize_mx(wide)
    differ = y8.view(torch.uint8) != exact.view(torch.uint8)
    assert differ.float().mean() < 1e-3  # of those about halfway
    assert (y.float() - wide).abs().max() <= 2.0**-8 * wide.abs().max()
    again = y8.float() * scales.float().repeat_interleave(N // scales.shape[-1], -1)
    assert (again - wide).norm() < 0.05 * wide.norm()
    assert rstd.shape == (4096, 1) and bool(rstd.isfinite().all())
    without = functions.rms_norm_quantized(x, weight, EPS, format=format)
    same(without, (y8, scales, rstd))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_a_captured_and_a_compiled_step_give_the_bits_of_a_plain_one(
    functions: QuantizedFunctions, format: str
) -> None:
    leaves = [one.requires_grad_() for one in drawn(BF16, 2, 333)]
    dy = torch.randn(2, 333, N, device="cuda").bfloat16()

    def step(run: Any = functions.rms_norm_quantized) -> list[torch.Tensor]:
        *narrow, y = run(*leaves, EPS, format=format, keep_y=True)
        return [*narrow, y.detach(), *torch.autograd.grad(y, leaves, dy)]

    plain = step()
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact = torch.autograd.grad(rms_norm(wide[0], (N,), wide[1], EPS), wide, dy.double())
    for one, other in zip(plain[4:], exact, strict=True):
        assert (one.double() - other).norm() <= 2.0**-7 * other.norm()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same(step(), plain)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for one in captured[:4]:
            one.view(torch.uint8).fill_(255)
        graph.replay()
        same(captured, plain)
    torch.compiler.reset()
    same(step(torch.compile(functions.rms_norm_quantized, fullgraph=True)), plain)
    with torch.autocast("cuda", dtype=F16):
        same(step(), plain)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_rows_in_other_places_give_the_same_bits(
    functions: QuantizedFunctions, format: str
) -> None:
    x, weight = drawn(BF16, 6, 77)

    def run(x: torch.Tensor, weight: torch.Tensor = weight) -> tuple[torch.Tensor, ...]:
        return functions.rms_norm_quantized(x, weight, EPS, format=format, keep_y=True)

    wanted = run(x)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    packed = torch.stack((x, x), 2)[:, :, 1]  # as the heads of a packed tensor
    for other in (turned, packed, torch.cat((x, x), -1)[..., N:]):
        same(run(other), wanted)
    with pytest.warns(UserWarning, match="needs rows at multiples of 16 bytes"):
        run(torch.cat((x[..., :1], x), -1)[..., 1:])
    assert all(one.is_contiguous() for one in run(turned))
    same(run(x, weight.float()), wanted)
    ones = functions.rms_norm_quantized(x, None, EPS, format=format)
    same(ones, functions.rms_norm_quantized(x, torch.ones_like(weight), EPS, format=format))
    shifted = functions.rms_norm_quantized(x, weight, EPS, format=format, weight_offset=1.0)
    same(shifted, functions.rms_norm_quantized(x, weight.float() + 1, EPS, format=format))


def test_rows_that_were_not_tuned_are_the_formulas(functions: QuantizedFunctions) -> None:
    x = torch.randn(5, 256, device="cuda").bfloat16()
    with pytest.warns(UserWarning, match="using the formula of rmsnorm_fp8_forward in PyTorch"):
        y8, scales, _, y = functions.rms_norm_quantized(x, via=BF16, keep_y=True)
    same((y8, scales), quantize_1x128(y.float()))


# ---- The backward --------------------------------------------------------------------------------


def quantized(format: str, dx: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize_1x128(dx) if format == "fp8_1x128" else quantize_mx(dx)


def gradients(dtype: torch.dtype, residual: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    (x, weight), (dy, _) = drawn(dtype, 3, 555), drawn(dtype, 3, 555)
    x = x.roll(1, 0)
    dy.view(-1, N)[7] = 0.0
    rstd = (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    given = {"dy": dy, "x": x, "rstd": rstd, "weight": weight}
    return given | ({"dresidual": torch.randn_like(dy, dtype=residual)} if residual else {})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_every_bit_of_dx8_is_that_of_the_formula_of_dx(
    functions: QuantizedFunctions, dtype: torch.dtype, format: str
) -> None:
    given = gradients(dtype)
    dx, dx8, scales, dw = functions.rms_norm_backward_quantized(**given, format=format, via=dtype)
    same((dx8, scales), quantized(format, dx.float()))
    wide = {name: tensor.double() for name, tensor in given.items()}
    exact_dx, exact_dw, *_ = reference_backward(*wide.values())
    assert (dx.double() - exact_dx).norm() <= 2.0**-8 * exact_dx.norm()
    assert (dw.double() - exact_dw).norm() <= 2.0**-7 * exact_dw.norm()
    for _ in range(5):
        again = functions.rms_norm_backward_quantized(**given, format=format, via=dtype)
        same(again, (dx, dx8, scales, dw))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_dx_with_an_fp32_residual_is_quantized_as_it_is_in_fp32(
    functions: QuantizedFunctions, format: str
) -> None:
    given = gradients(BF16, F32)

    def run(call: Any = functions.rms_norm_backward_quantized) -> list[torch.Tensor]:
        return [*call(**given, format=format)]

    plain = run()
    dx, dx8, scales, _, wide = plain
    same((dx8, scales), quantized(format, wide))
    same((dx,), (wide.bfloat16(),))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for one in captured:
        one.view(torch.uint8).fill_(255)
    graph.replay()
    same(captured, plain)
    torch.compiler.reset()
    compiled = torch.compile(functions.rms_norm_backward_quantized, fullgraph=True)
    same(run(compiled), plain)


def recipe(y: torch.Tensor, powers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = y.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    scale = up_by_bits(scale) if powers else scale
    return (blocks / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


class Narrow(torch.autograd.Function):
    """A product of what is quantized, whose backward quantizes the gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, m)
        return dequantized(y) @ m

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        y, m = ctx.saved_tensors
        dz = dequantized(given[0])
        return dz @ m.T, y.T @ dz


def dequantized(rows: torch.Tensor) -> torch.Tensor:
    narrow, scales = recipe(rows)
    wide = narrow.float().unflatten(-1, (-1, 128)) * scales[..., None]
    return wide.flatten(-2).to(rows.dtype)


@pytest.mark.parametrize("of", ["backend", "operator"])
def test_compiled_recipes_are_kernels_with_the_same_bits(
    here: Target, of: str, own_cache: None
) -> None:
    """Quantizations behind a norm and its backward go to the packages of the GPU."""
    import normforge

    if not normforge.quantized.operators or here.name not in ("h200", "h100"):
        pytest.skip(f"no package for {here}")
    torch.manual_seed(0)
    n = 4096
    x, r = (torch.randn(4096, n, device="cuda", dtype=BF16) for _ in range(2))
    w, m = torch.rand(n, device="cuda", dtype=BF16), torch.randn(n, n, device="cuda", dtype=BF16)
    m /= n**0.5
    norm = normforge.rms_norm if of == "operator" else lambda h, w, eps: rms_norm(h, (n,), w, eps)
    backend: Any = "inductor" if of == "operator" else normforge.inductor_backend()

    @torch.no_grad()
    def check_forward(powers: bool) -> None:
        y8, scales, _, y = normforge.rms_norm_quantized(
            x, w, EPS, keep_y=True, via=BF16, power_of_two_scales=powers
        )
        wanted = (y8, scales)
        assert all(map(torch.equal, map(bytes_of, wanted), map(bytes_of, recipe(y, powers))))
        forward = lambda h, w: recipe(norm(h, w, EPS), powers)  # noqa: E731
        run = torch.compile(forward, backend=backend, fullgraph=True)
        run(x, w)
        found, names = with_kernels(run, x, w)
        assert [name for name in names if "rmsnorm" in name] == names and len(names) == 1
        assert all(map(torch.equal, map(bytes_of, found), map(bytes_of, wanted)))

    for powers in (False, True):
        check_forward(powers)

    def layer(x: Any, r: Any, w: Any, m: Any) -> Any:
        h = x + Narrow.apply(r, m)
        return h + Narrow.apply(norm(h, w, EPS), m)

    def step(run: Any) -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_() for one in (x, r, w, m)]
        y = run(*leaves)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    step(compiled)
    steps, names = with_kernels(step, compiled)
    for said in (r"rmsnorm_fp8_(residual_)?forward", "rmsnorm_fp8_backward"):
        assert sum(re.search(said, one) is not None for one in names) == 1, names
    for one, other in zip(steps, step(layer), strict=True):
        error = (one - other).float().norm() / other.float().norm()
        assert error < 0.02


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def with_kernels(run: Any, *given: Any) -> tuple[Any, list[str]]:
    """Return the result of a call, and the names of its kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        found = run(*given)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.events() if event.device_type == cuda]
    return found, [event.name for event in events if "Mem" not in event.name]
