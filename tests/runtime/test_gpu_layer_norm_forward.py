"""LayerNorm's forward on a GPU: by kernels of the operation, in every way to run it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from generator.evaluate.verify.accuracy import compare_all
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.operations import LAYERNORM_FORWARD
from generator.package.emit import emit_package
from generator.package.fallback_kernels import compile_fallbacks, fallbacks_to_compile
from generator.problem import Problem
from generator.target import Target
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.serve.kernels import source_of
from tests.support.entry_points import write_layer_norm_package
from tests.support.samples import plain_variant, planted_entry

pytestmark = pytest.mark.gpu

NAME = LAYERNORM_FORWARD.name
SHAPES = ("4096x4096:bf16", "4096x1000:bf16", "4096x8192:fp16:fp32", "4096x512:fp32")
KNOBS: dict[str, dict[str, int | str]] = {
    "direct": {"pipeline": "direct", "grid": "rows"},
    "bulk": {"pipeline": "bulk", "grid": "full", "stages": 2},
    "async": {"pipeline": "async", "grid": "even", "stages": 2},
    "a cluster": {"pipeline": "bulk", "grid": "full", "stages": 2, "cluster": 2},
    "shared memory": {"pipeline": "direct", "grid": "full", "weight_in": "smem"},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EPS = 1e-5


@pytest.fixture(scope="module")
def folder(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / NAME
    problems = [Problem.parse(shape, NAME) for shape in SHAPES]
    entries = [planted_entry(problem, here, strategy="none") for problem in problems]
    emit_package(entries, [], here, folder)
    return folder


@pytest.fixture
def package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LayerNormPackage:
    """One whose forward is a kernel, or fails."""
    package = write_layer_norm_package(tmp_path / "package")
    package._kernels.by(lambda: source_of(folder, NAME))
    server = package._kernels.server
    by_kernel = server.by_kernel

    def counted(*given: Any) -> Any:
        found = by_kernel(*given)
        assert isinstance(found, dict), found
        return found

    monkeypatch.setattr(server, "by_kernel", counted)
    return package


def drawn(shape: str, mean: float = 0.0) -> list[torch.Tensor]:
    problem = Problem.parse(shape, NAME)
    torch.manual_seed(0)
    x = (torch.randn(777, problem.N, device="cuda") + mean).to(DTYPES[problem.dtype])
    scales = torch.randn(2, problem.N, device="cuda").to(DTYPES[problem.weight_dtype])
    return [one.clone().requires_grad_() for one in (x, *scales)]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("shape", ["4099x4096:bf16", "4099x8192:fp16:fp32"])
def test_kernels_of_every_kind_are_within_the_bounds(here: Target, shape: str, knobs: str) -> None:
    problem = Problem.parse(shape, NAME)
    wide = {"threads_per_row": 256} if "cluster" in KNOBS[knobs] else {}
    variant = plain_variant(problem, here, strategy="none", **KNOBS[knobs], **wide)
    spec = variant.spec(here.sms)
    runner = LAYERNORM_FORWARD.load(compile_variant(variant, here.arch).cubin, spec, problem)
    inputs = LAYERNORM_FORWARD.make_inputs(problem, torch.device("cuda"))
    outputs = {
        out.name: torch.full(out.shape, float("nan"), dtype=DTYPES[out.dtype], device="cuda")
        for out in LAYERNORM_FORWARD.outputs(problem)
    }
    workspace = torch.zeros(max(1, runner.workspace_bytes), dtype=torch.uint8, device="cuda")
    runner.run(inputs, outputs, workspace)
    assert compare_all(outputs, LAYERNORM_FORWARD.bounds(problem, inputs)).fault == ""
    first = {name: out.clone() for name, out in outputs.items()}
    runner.run(inputs, outputs, workspace)
    assert all(torch.equal(out, first[name]) for name, out in outputs.items())


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_not_larger_than_pytorchs(
    package: LayerNormPackage, shape: str, mean: float
) -> None:
    x, weight, bias = (one.detach() for one in drawn(shape, mean))
    found = package.layer_norm_forward(x, weight, bias, EPS)
    N = x.shape[-1]
    exact = torch.native_layer_norm(x.double(), [N], weight.double(), bias.double(), EPS)
    theirs = torch.native_layer_norm(x.float(), [N], weight.float(), bias.float(), EPS)
    if weight.dtype == x.dtype:
        theirs = torch.native_layer_norm(x, [N], weight, bias, EPS)
    names = ("y", "mean", "rstd")
    for name, one, other, wanted in zip(names, found, theirs, exact, strict=True):
        error, bar = ((result.double() - wanted).norm() for result in (one, other.to(one.dtype)))
        # A mean near 0 is the rest of numbers near 1, with half a unit of theirs.
        rest = 2.0**-24 * 777**0.5 if name == "mean" else 0.0
        assert error <= 1.1 * bar + rest, name


@pytest.mark.filterwarnings("ignore::UserWarning")  # there is no kernel of the backward
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_to_run_it_has_one_kernels_bits(package: LayerNormPackage, shape: str) -> None:
    given = drawn(shape)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return package.layer_norm(x, weight, bias, EPS)

    y = norm(*given)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = functional.layer_norm(wide[0], wide[0].shape[1:], wide[1], wide[2], EPS)
    for one, other in zip(found, torch.autograd.grad(exact, wide, dy.double()), strict=True):
        assert (one.double() - other).norm() <= 2.0**-7 * other.norm()
    compiled = torch.compile(norm, fullgraph=True)
    again = compiled(*given)
    assert torch.equal(again, y)
    for one, other in zip(torch.autograd.grad(again, given, dy), found, strict=True):
        torch.testing.assert_close(one, other)
    module = package.LayerNorm(given[0].shape[1], EPS, device="cuda", dtype=given[1].dtype)
    module.load_state_dict({"weight": given[1].detach(), "bias": given[2].detach()})
    assert torch.equal(module(given[0]), y)
    with torch.no_grad():
        assert torch.equal(norm(*given), y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = norm(*given)
        for _ in range(2):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, y)


@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_streams_and_what_is_left_out(package: LayerNormPackage, shape: str) -> None:
    x, weight, bias = (one.detach() for one in drawn(shape))

    def norm(x: torch.Tensor, *scales: Any) -> torch.Tensor:
        return package.layer_norm(x, *scales, eps=EPS)

    y = norm(x, weight, bias)
    packed = torch.stack([x, x + 1], 1)
    for rows in (packed[:, 1], x.t().contiguous().t(), x[:1].expand_as(x), x.view(7, 111, -1)):
        assert torch.equal(norm(rows, weight, bias), norm(rows.contiguous(), weight, bias))
    if weight.dtype == x.dtype:  # without both, that is the dtype of the kernel that is asked for
        ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
        assert torch.equal(norm(x), norm(x, ones, zeros))
    assert torch.equal(norm(x, weight), norm(x, weight, torch.zeros_like(bias)))
    assert torch.equal(norm(x, None, bias), norm(x, torch.ones_like(weight), bias))
    r = torch.randn_like(x)
    both, stream = package.layer_norm(x, weight, bias, EPS, residual=r)
    assert torch.equal(stream, x + r) and torch.equal(both, norm(stream, weight, bias))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        aside = norm(x, weight, bias)
    torch.cuda.synchronize()
    assert torch.equal(aside, y)


# ---- Rows that were not tuned --------------------------------------------------------------------


def fallbacks(here: Target, folder: Path, operation: str) -> Path:
    """A package with fallback kernels for bf16, and a tuned one, which a table has."""
    problem = Problem.parse("4096x1024:bf16", operation)
    strategy = "separate" if operation.endswith("backward") else "none"
    entry = planted_entry(problem, here, strategy=strategy)

    def compile(variants: list[Variant]) -> list[Compiled]:
        return [compile_variant(one, here.arch) for one in variants]

    wanted = fallbacks_to_compile("common", here, [problem], operation)
    made = compile_fallbacks(here, compile, wanted)
    emit_package([entry], made, here, folder / operation)
    return folder / operation


def test_rows_of_any_length_are_served_in_both_directions(here: Target, tmp_path: Path) -> None:
    folder = fallbacks(here, tmp_path, "layernorm_backward")
    fallbacks(here, tmp_path, NAME)
    package = LayerNormPackage(folder)
    assert package._kernels.server.missing == ""
    for M, N in ((4099, 8), (777, 1000), (515, 3072), (130, 3080), (64, 8192)):
        assert package.explain(M, N, "bf16")["how"] == "fallback"
        assert package._kernels.server.explain(M, N, "bf16")["how"] == "fallback"
        torch.manual_seed(N)
        x, dy = (1 + torch.randn(2, M, N, device="cuda")).bfloat16()
        given = [x, *torch.randn(2, N, device="cuda").bfloat16()]
        given = [one.clone().requires_grad_() for one in given]
        wide = [one.detach().double().requires_grad_() for one in given]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = package.layer_norm(*given, EPS)  # type: ignore[call-overload]
            found = [y, *torch.autograd.grad(y, given, dy)]
            again = torch.autograd.grad(package.layer_norm(*given, EPS), given, dy)  # type: ignore[call-overload]
        exact = functional.layer_norm(wide[0], (N,), wide[1], wide[2], EPS)
        wanted = [exact, *torch.autograd.grad(exact, wide, dy.double())]
        theirs = functional.layer_norm(given[0], (N,), given[1], given[2], EPS)
        bars = [theirs, *torch.autograd.grad(theirs, given, dy)]
        for one, bar, other in zip(found, bars, wanted, strict=True):
            error, limit = ((result.double() - other).norm() for result in (one, bar))
            assert error <= 1.1 * limit, (M, N)
        assert all(torch.equal(one, other) for one, other in zip(found[1:], again, strict=True))
