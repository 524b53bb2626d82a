"""RMSNorm with the rotary embedding on a GPU: kernels of heads in the harness that tunes, and the
functions of packages of them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.accuracy import check_accuracy
from generator.evaluate.verify.determinism import check_call_options, check_repeats
from generator.kernels.cubin_cache import compile_variant
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.target import Target
from normforge.frontends.rope import RotatedFunctions
from normforge.frontends.rope_node import formula
from normforge.frontends.rope_packed import parts_of
from normforge.frontends.rotary_node import formula as rotary_formula
from normforge.operations import ROPE, ROTATED
from normforge.serve.kernels import Source, source_of
from tests.support.rotated import fitting
from tests.support.samples import plain_variant, planted_entry

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
PIPELINES: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct"},
    "async": {"pipeline": "async", "stages": 3},
}
OF_WARPS: dict[str, dict[str, int | str]] = {
    "bulk": {"pipeline": "bulk", "stages": 2, "rows_in_flight": 2},
    "producer": {"pipeline": "producer", "stages": 3},
}
"""Pipelines that refill what all lanes of a warp have read: nothing but their barriers says so
where an operation has no row sums."""


def strategy_of(name: str) -> str:
    return "column_slices" if name.endswith("_backward") else "none"


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize(
    ("shape", "threads_per_row"),
    [
        *(("9999x128:bf16", threads) for threads in (8, 16, 32)),
        ("9999x64:fp16:fp32", 8),
        ("9999x96:bf16", 16),
        ("9999x256:bf16+offset", 16),
        ("9999x128:fp32", 32),
        *(("9999x256:bf16+rotary64", threads) for threads in (8, 16, 32)),
        ("9999x256:bf16:fp32+rotary128", 8),
        ("9999x128:fp16+rotary48", 16),
        ("9999x128:bf16+interleaved", 16),
        ("9999x256:bf16:fp32+rotary64+interleaved", 32),
        *(("9999x1024:bf16+joined128", threads) for threads in (32, 64, 128)),
        ("1999x4096:bf16+joined128", 256),
        ("1999x1280:fp16:fp32+offset+joined128", 64),
        ("1999x384:bf16+joined96", 32),
        ("1999x512:fp32+joined128", 64),
        ("9999x1024:bf16+joined128+interleaved", 64),
    ],
)
@pytest.mark.parametrize("name", ROTATED)
def test_kernels_of_heads_are_accurate_and_repeat_their_bits(
    here: Target, name: str, shape: str, threads_per_row: int, pipeline: str
) -> None:
    if name == ROPE.name and "joined" in shape:
        pytest.skip("it has no rows of joined heads")
    problem = Problem.parse(fitting(name, shape), name)
    teams = max(1, 256 // max(32, threads_per_row))
    knobs = {
        "threads_per_row": threads_per_row,
        "rows_per_cta": teams,
        "strategy": strategy_of(name),
    }
    v = plain_variant(problem, here, **knobs, **PIPELINES[pipeline])
    compiled = compile_variant(v, here.arch)
    assert compiled.error == "" and compiled.spills == 0
    work = Workload(problem, torch.device("cuda", 0))
    bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    assert check_repeats(bench, work.cancelling) == ""
    assert check_call_options(bench, work.inputs, v.signature) == ""


@pytest.mark.parametrize("pipeline", OF_WARPS)
@pytest.mark.parametrize("shape", ["99999x256:bf16", "99999x128:fp32+rotary64+interleaved"])
def test_a_stage_is_not_refilled_before_it_has_been_read(
    here: Target, shape: str, pipeline: str
) -> None:
    problem = Problem.parse(shape, ROPE.name)
    knobs = {"threads_per_row": 32, "rows_per_cta": 8, "strategy": "none"}
    v = plain_variant(problem, here, **knobs, **OF_WARPS[pipeline])
    compiled = compile_variant(v, here.arch)
    assert compiled.error == "" and compiled.spills == 0
    work = Workload(problem, torch.device("cuda", 0))
    bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    assert check_repeats(bench, work.cancelling) == ""


@pytest.fixture(scope="module")
def functions(here: Target, tmp_path_factory: pytest.TempPathFactory) -> RotatedFunctions:
    """The functions of a package for each direction, of heads of 128 columns in bf16: all of them
    rotated, also as neighbours, or 32; and of rows of four heads of 32."""
    folder = tmp_path_factory.mktemp("rope")

    def source(name: str) -> Source | str:
        knobs = {"threads_per_row": 16, "rows_per_cta": 8, "strategy": strategy_of(name)}
        rotations = ("", "+offset", "+rotary32", "+interleaved", "+joined32")
        kinds = [f"{weight}{rotation}" for weight in ("", ":fp32") for rotation in rotations]
        if name == ROPE.name:
            kinds = ["", "+rotary32", "+interleaved"]
        problems = [Problem.parse(f"{name}:4096x128:bf16{kind}") for kind in kinds]
        entries = [planted_entry(problem, here, **knobs) for problem in problems]
        emit_package(entries, [], here, folder / name)
        return source_of(folder / name, name)

    return RotatedFunctions(source, "of a test")


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def turns(*shape: int, dtype: torch.dtype, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(*shape, columns // 2, device="cuda")
    whole = torch.cat((angles, angles), -1)
    return whole.cos().to(dtype), whole.sin().to(dtype)


def check(found: Any, exact: Any) -> None:
    """Compare with a reference in float64, up to a rounding and the arithmetic in fp32."""
    for one, other in zip(found, exact, strict=True):
        unit = torch.finfo(one.dtype).eps / 2
        error = (one.double() - other).abs()
        assert bool((error <= 1.01 * unit * other.abs() + 1e-5 * other.abs().max()).all())


@pytest.mark.parametrize("of_turns", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 70), (1, 70), (70,), (3, 1)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("columns", "interleaved", "offset"),
    [(128, False, 0.0), (128, False, 1.0), (32, False, 0.0), (128, True, 0.0)],
)
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_queries_and_keys_of_a_projection_are_those_of_the_formula(
    functions: RotatedFunctions,
    columns: int,
    interleaved: bool,
    offset: float,
    wide: bool,
    shape: tuple[int, ...],
    of_turns: torch.dtype,
) -> None:
    torch.manual_seed(0)
    qkv = randn(3, 70, 48 * 128).requires_grad_()
    weights = [randn(128, dtype=torch.float32 if wide else BF16).requires_grad_() for _ in "qk"]
    cos, sin = turns(*shape, dtype=of_turns, columns=columns)
    leaves, how = [qkv, *weights], (1e-6, columns, interleaved)
    found = functions.qk_norm_rope(*leaves, cos, sin, (32, 8), *how, offset)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    halves = [one[..., : columns // 2].double().unsqueeze(-2) for one in (cos, sin)]
    q, k, v = parts_of(exact_leaves[0], 32, 8)
    rest, of_both = (*halves, 1e-6, offset), zip((q, k), exact_leaves[1:], strict=True)
    exact = [formula(x, w, *rest, interleaved=interleaved) for x, w in of_both]
    check(found, [*exact, v])
    dy = [randn(*part.shape) for part in found]
    wide_dy = [one.double() for one in dy]
    expected = torch.autograd.grad([*exact, v], exact_leaves, wide_dy)
    check(torch.autograd.grad(found, leaves, dy), expected)


@pytest.mark.parametrize("of_turns", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 70), (1, 70), (3, 1)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_rows_of_heads_are_those_of_the_formula(
    functions: RotatedFunctions, wide: bool, shape: tuple[int, ...], of_turns: torch.dtype
) -> None:
    torch.manual_seed(0)
    qk, weight = randn(3, 70, 256), randn(128, dtype=torch.float32 if wide else BF16)
    leaves = [qk.requires_grad_(), weight.requires_grad_()]
    cos, sin = turns(*shape, dtype=of_turns, columns=32)
    y = functions.rms_norm_rope(qk[..., 128:], weight, cos, sin, heads=4)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    halves = [one[..., :16].double().unsqueeze(-2) for one in (cos, sin)]
    rows = exact_leaves[0][..., None, 128:]
    exact = formula(rows, exact_leaves[1], *halves, 1e-6, 0.0, joined=True).squeeze(-2)
    check([y], [exact])
    dy = randn(*y.shape)
    expected = torch.autograd.grad(exact, exact_leaves, dy.double())
    check(torch.autograd.grad(y, leaves, dy), expected)


@pytest.mark.parametrize("of_turns", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 70), (1, 70), (70,), (3, 1)])
@pytest.mark.parametrize(("columns", "interleaved"), [(128, False), (32, False), (128, True)])
@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_rotated_heads_are_those_of_the_formula(
    functions: RotatedFunctions,
    columns: int,
    interleaved: bool,
    shape: tuple[int, ...],
    of_turns: torch.dtype,
) -> None:
    torch.manual_seed(0)
    x = randn(3, 8, 70, 128).transpose(1, 2).requires_grad_()
    cos, sin = turns(*shape, dtype=of_turns, columns=columns)
    y = functions.apply_rope(x, cos, sin, columns, interleaved)
    exact_x = x.detach().double().requires_grad_()
    halves = [one[..., : columns // 2].double().unsqueeze(-2) for one in (cos, sin)]
    exact = rotary_formula(exact_x, *halves, 1.0, interleaved=interleaved)
    check([y], [exact])
    dy = randn(*y.shape)
    check(torch.autograd.grad(y, x, dy), torch.autograd.grad(exact, exact_x, dy.double()))


@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_a_captured_and_a_compiled_step_give_the_bits_of_a_plain_one(
    functions: RotatedFunctions,
) -> None:
    torch.manual_seed(0)
    qkv, (cos, sin) = randn(2, 33, 8 * 128).requires_grad_(), turns(1, 33, dtype=BF16)
    leaves = [qkv, *(randn(128).requires_grad_() for _ in "qk")]
    dy = [randn(2, 33, heads, 128) for heads in (4, 2, 2)]

    def step(run: Any = functions.qk_norm_rope) -> list[torch.Tensor]:
        found = run(*leaves, cos, sin, (4, 2))
        return [*(part.detach() for part in found), *torch.autograd.grad(found, leaves, dy)]

    plain = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for one in captured[:2]:
            one.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, plain, strict=True))
    torch.compiler.reset()
    compiled = torch.compile(functions.qk_norm_rope, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(one, other) for one, other in zip(step(compiled), plain, strict=True))


@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_heads_in_other_places_give_the_same_bits(functions: RotatedFunctions) -> None:
    torch.manual_seed(0)
    x, weight = randn(2, 33, 5, 128), randn(128)
    cos, sin = turns(2, 33, dtype=torch.float32)
    wanted = functions.rms_norm_rope(x, weight, cos, sin)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # as from a transposed gradient
    for other in (turned, torch.cat((x, x), -1)[..., 128:]):
        assert torch.equal(functions.rms_norm_rope(other, weight, cos, sin), wanted)
    odd = [torch.cat((one[..., :1], one), -1)[..., 1:] for one in (cos, sin)]
    assert torch.equal(functions.rms_norm_rope(x, weight, *odd), wanted)


@pytest.mark.usefixtures("deterministic", "served_by_kernels")
def test_complex_numbers_in_a_compiled_step_give_the_bits_of_a_call(
    functions: RotatedFunctions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("normforge.rope_packages.functions", functions)
    q, k = (randn(2, 33, heads, 128).requires_grad_() for heads in (4, 2))
    numbers = torch.polar(*(torch.randn(1, 33, 1, 64, device="cuda").abs() for _ in "ra"))
    dy = [torch.randn_like(x) for x in (q, k)]

    def rotated(*heads: torch.Tensor) -> list[torch.Tensor]:
        pairs = [torch.view_as_complex(x.float().reshape(2, 33, -1, 64, 2)) for x in heads]
        return [torch.view_as_real(one * numbers).flatten(3).type_as(q) for one in pairs]

    def called(*heads: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = numbers.real[:, :, 0], numbers.imag[:, :, 0]
        return [functions.apply_rope(x, cos, sin, interleaved=True) for x in heads]

    torch.compiler.reset()
    with caplog.at_level("INFO"):
        compiled = torch.compile(rotated, fullgraph=True, backend=normforge.inductor_backend())
        found = compiled(q, k)
    assert "gave 2 rotations by complex numbers" in caplog.text
    wanted = called(q, k)
    found += torch.autograd.grad(found, (q, k), dy)
    wanted += torch.autograd.grad(wanted, (q, k), dy)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
