"""The package of batch-invariant kernels: one kernel for tensors wherever they lie, and none of
another order. A driver that launches nothing serves the committed package."""

# ruff: noqa: N802 (the fake driver has the names of the real one)

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from generator.cli.main import make_parser
from generator.paths import GENERATED
from generator.problem import Problem
from normforge import torch_internals
from normforge.frontends import rms_norm as rms_norm_module
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.launch import forward_call
from normforge.launch.kernel_arguments import DW_ADDED
from normforge.serve import call
from normforge.serve.reference import reference_backward, reference_forward
from normforge.spec import plan_launch
from normforge.table import ForwardTable
from tests.support.entry_points import routing_on_cpu, same
from tests.support.fake_driver import FakeDevice, FakeDriver, stand_in, tensors

FOLDER = GENERATED / "h200" / "rmsnorm_invariant_backward"
MAIN, SECOND = "rmsnorm_invariant_backward", "sum_partials"
M, N = 2048, 1024


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on the GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0


def on_gpu(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(OnGpu)


class Function(str):
    """The name of a kernel, and the machine code that it is from."""

    cubin: bytes


class Recorder(FakeDriver):
    """Knows of every launch which cubin it runs."""

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        function = Function(name.decode())
        function.cubin = module
        return cuda.CUresult.CUDA_SUCCESS, function


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    stand_in(monkeypatch, recorder)
    return recorder


@pytest.fixture
def package(
    driver: Recorder, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> BatchInvariantPackage:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return on_gpu(torch.zeros(0, dtype=dtype).new_empty(size).as_strided(size, stride))

    for module in (call, forward_call):
        monkeypatch.setattr(module, "empty_strided", empty)
    for module in (rms_norm_module, torch_internals):
        monkeypatch.setattr(module, "PLAIN_TYPES", (torch.Tensor, OnGpu))
    return BatchInvariantPackage(FOLDER)


def given(M: int = M, N: int = N, **change: torch.Tensor) -> dict[str, Any]:
    """The tensors of a call, on the GPU."""
    plain = dict(zip(("dy", "x", "rstd", "weight"), tensors(M, N), strict=True)) | change
    return {name: on_gpu(tensor) for name, tensor in plain.items()}


def repeated(M: int, N: int) -> dict[str, Any]:
    """Many rows that take no memory."""
    row = torch.zeros(1, N, dtype=torch.bfloat16)
    return given(1, N, x=row.expand(M, N), dy=row.expand(M, N), rstd=torch.zeros(M))


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers two elements behind an aligned address."""
    moved = tensor.new_empty(tensor.numel() + 2)[2:].view(tensor.shape)
    return moved.copy_(tensor)


def with_gaps(rows: torch.Tensor) -> torch.Tensor:
    """Return the same rows at a stride that is no multiple of 32 bytes."""
    wide = rows.new_empty((len(rows), rows.shape[1] + 4))
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def by_column(rows: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, those of a column one after another."""
    return rows.t().contiguous().t()


def misplaced(*rows: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return which of these is moved, and how; a weight is one row."""
    moves = (odd, with_gaps, by_column)
    return [("weight", odd), *((name, move) for name in rows for move in moves)]


def of(driver: Recorder, name: str) -> list[Any]:
    """The launches of a kernel so far, which are forgotten."""
    found = [seen for seen in driver.launches if seen.function == name]
    driver.launches = [seen for seen in driver.launches if seen.function != name]
    return found


# ---- Tensors that do not lie as a kernel reads them ----------------------------------------------


@pytest.mark.parametrize(
    ("backward", "name", "move"),
    [
        *((True, *move) for move in misplaced("x", "dy", "dresidual")),
        *((False, *move) for move in misplaced("x", "residual")),
    ],
)
def test_misplaced_tensors_are_copied_for_the_same_kernel(
    package: BatchInvariantPackage, driver: Recorder, backward: bool, name: str, move: Any
) -> None:
    plain, rows = given(), on_gpu(tensors(M, N)[1])
    run, kernel, numbers, results = package.rmsnorm_backward, MAIN, "rows", ("dx", "dw")
    if not backward:
        plain = {"x": plain["x"], "weight": plain["weight"]}
        kernel = "rmsnorm_forward" + "_residual" * (name == "residual")
        run, numbers, results = package.rmsnorm_forward, "eps", ("y", "rstd")
    if name in ("residual", "dresidual"):
        plain[name] = rows
    run(**plain)
    (aligned,) = of(driver, kernel)
    moved = {**plain, name: on_gpu(move(plain[name]))}
    for _ in range(2):  # prepared, and known
        found = run(**moved)
        (seen,) = of(driver, kernel)
        assert seen.function.cubin == aligned.function.cubin
        assert (seen.grid, seen.block) == (aligned.grid, aligned.block)
        got = seen.arguments
        assert not any(address % 32 for address in got[:6])
        assert [getattr(got, one) for one in results] == [one.data_ptr() for one in found[:2]]
        first = got._fields.index(numbers)
        assert got[first:] == aligned.arguments[first:]  # the rows lie as they did there
        for tensor in moved.keys() - {"dresidual"}:
            assert (getattr(got, tensor) == moved[tensor].data_ptr()) == (tensor != name)


def test_rows_at_an_aligned_stride_are_read_in_place(
    package: BatchInvariantPackage, driver: Recorder
) -> None:
    """A copy costs as much as the kernel: slices of a packed tensor need none."""
    packed = torch.zeros(M, 3, N, dtype=torch.bfloat16)
    change = given(x=packed[:, 1], dy=packed[:, 2])
    package.rmsnorm_backward(**change)
    (seen,) = of(driver, MAIN)
    got = seen.arguments
    assert (got.x, got.dy) == (change["x"].data_ptr(), change["dy"].data_ptr())
    assert (got.x_stride, got.dy_stride) == (3 * N, 3 * N)


@pytest.mark.parametrize("move", [odd, lambda dw: dw.new_zeros(2 * N)[::2]])
def test_sum_is_added_to_a_misplaced_dw_by_the_kernel(
    package: BatchInvariantPackage, driver: Recorder, move: Callable[..., Any]
) -> None:
    """Added afterwards it would be another order: that of a batch is chunk after chunk."""
    total = on_gpu(move(torch.full((N,), 3.0)))
    total.fill_(3.0)
    _, dw = package.rmsnorm_backward(**given(), dw_out=total, accumulate=True)
    (seen,) = of(driver, MAIN)
    assert seen.arguments.dw_mode == DW_ADDED
    assert seen.arguments.dw not in (0, total.data_ptr()) and seen.arguments.dw % 32 == 0
    assert dw is total and torch.equal(total.as_subclass(torch.Tensor), torch.full((N,), 3.0))
    place = on_gpu(torch.zeros(N))
    package.rmsnorm_backward(**given(), dw_out=place, accumulate=True)
    (seen,) = of(driver, MAIN)
    assert (seen.arguments.dw, seen.arguments.dw_mode) == (place.data_ptr(), DW_ADDED)


# ---- Which kernel serves -------------------------------------------------------------------------


def test_any_number_of_rows_is_served_by_kernels_of_one_order(
    package: BatchInvariantPackage, driver: Recorder
) -> None:
    orders, cubins = set(), set()
    for rows in (1, 2, 63, 64, 65, 1025, 30_000, 1 << 21):
        choice = package.table.choose(rows, N, "bf16", "bf16")
        assert choice.kernel is not None
        spec = choice.kernel.spec
        orders.add(
            (spec.run_rows, spec.group_rows, spec.cluster, spec.threads // spec.rows_per_cta)
        )
        package.rmsnorm_backward(**repeated(rows, N), need_dx=False)
        (seen,) = of(driver, MAIN)
        cubins.add(seen.function.cubin)
        assert seen.function.cubin == choice.kernel.read_cubin(FOLDER)
        assert seen.grid == plan_launch(spec, rows).grid
    assert len(orders) == 1 < len(cubins)


def test_second_kernel_gets_the_sums_in_the_workspace_and_the_whole_groups_among_them(
    package: BatchInvariantPackage, driver: Recorder
) -> None:
    seen_groups = set()
    for rows in (8192, 16384, 32768, 32774):
        choice = package.table.choose(rows, 256, "bf16", "bf16")
        assert choice.kernel is not None and choice.kernel.spec.strategy == "separate"
        plan = plan_launch(choice.kernel.spec, rows)
        for _ in range(3):  # prepared, known, quick
            package.rmsnorm_backward(**repeated(rows, 256))
            (main,), (second,) = of(driver, MAIN), of(driver, SECOND)
            assert main.arguments.group == plan.group
            places = (main.arguments.scratch, main.arguments.dw)
            assert second.arguments == (*places, plan.partials, 256, 0, plan.group)
            assert second.grid == plan.sum_grid
        seen_groups.add(plan.group)
    assert 0 in seen_groups and max(seen_groups) > 0


def test_margin_of_sms_changes_the_grid_of_the_same_kernel(
    package: BatchInvariantPackage, driver: Recorder
) -> None:
    rows = 30_000
    kernel = package.table.choose(rows, N, "bf16", "bf16").kernel
    assert kernel is not None
    grids = []
    for margin in (0, 16, 131, 0):
        package.set_sm_margin(margin)
        plan = plan_launch(replace(kernel.spec, sms=132 - margin), rows)
        for _ in range(3):  # prepared, known, quick
            package.rmsnorm_backward(**repeated(rows, N))
            (seen,) = of(driver, MAIN)
            assert seen.function.cubin == kernel.read_cubin(FOLDER)
            assert (seen.grid, seen.arguments.group) == (plan.grid, plan.group)
        assert package.explain(rows, N, "bf16")["launch"]["grid"] == plan.grid
        grids.append(plan.grid)
    assert grids[0] == grids[3] > grids[1] > grids[2] > 0
    for margin in (-1, 132, 1.5):
        with pytest.raises(ValueError, match="must be 0 to 131 SMs"):
            package.set_sm_margin(margin)


class WideningNorm(torch.nn.Module):
    """A norm like Llama's, which is rounded before the product: with a wider weight, so is the
    result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(N)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_patch_leaves_no_sum_over_the_rows_to_pytorch(package: BatchInvariantPackage) -> None:
    model = torch.nn.Sequential(WideningNorm())
    x = torch.randn(4, N, generator=torch.manual_seed(0)).bfloat16()
    wanted = model(x)
    assert package.patch(model) == ["0"]
    y = model(x)
    assert y.dtype == torch.float32
    assert torch.allclose(y, wanted, rtol=2**-8)
    assert "Mul" not in type(y.grad_fn).__name__


def test_margin_that_is_set_during_a_call_holds_for_the_next(
    package: BatchInvariantPackage, driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, prepare = repeated(30_000, N), package._prepare

    def late(*arguments: Any) -> Any:
        call = prepare(*arguments)
        package.set_sm_margin(131)
        return call

    with monkeypatch.context() as patch:
        patch.setattr(package, "_prepare", late)
        package.rmsnorm_backward(**given)
    (before,) = of(driver, MAIN)
    package.rmsnorm_backward(**given)
    (after,) = of(driver, MAIN)
    assert after.grid < before.grid


def test_cpp_serves_no_calls_as_it_knows_no_order_of_sums(package: BatchInvariantPackage) -> None:
    with pytest.raises(RuntimeError, match=r"have no use_native\(\): go on without it"):
        package.use_native()


# ---- Calls without a kernel ----------------------------------------------------------------------

NOT_TUNED = [(96, None), (1000, None), (1001, None), (4100, None), (N, torch.float32)]
"""Widths, and dtypes of the weight; rows of 1000 and 4100 columns are never at multiples of 32."""


def sentence(width: int, wide: Any) -> str:
    kind = "bf16:fp32" if wide else "bf16"
    return rf"nothing like 6x{width}:{kind} was tuned, and no fallback .* {command(width, wide)}"


def command(width: int, wide: Any) -> str:
    """Return the command that makes the missing kernel, after a check that tune.py takes it."""
    operation, shape = "rmsnorm_invariant_backward", f"6x{width}:{'bf16:fp32' if wide else 'bf16'}"
    given = f"--op {operation} --gpu auto --shapes {shape}"
    options = make_parser().parse_args(given.split())
    problem = Problem.parse(options.shapes, options.op)
    assert str(problem) == f"{operation}:{shape}"
    return rf"Tune this width \(python tune\.py {given}; docs/determinism\.md says more\)"


@pytest.mark.parametrize(("width", "wide"), NOT_TUNED)
def test_backward_without_a_kernel_is_refused_with_the_reason(
    package: BatchInvariantPackage, width: int, wide: Any
) -> None:
    dy, x, rstd, weight = map(on_gpu, tensors(6, width, weight=wide))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=sentence(width, wide)):
            package.rmsnorm_backward(dy, x, rstd, weight)
    with routing_on_cpu(package).installed():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=sentence(width, wide)):
                torch.ops.aten._fused_rms_norm_backward(dy, x, [width], rstd, weight, [True, True])


@pytest.mark.parametrize(("width", "wide"), NOT_TUNED)
def test_forward_without_a_kernel_is_refused_with_the_reason(
    package: BatchInvariantPackage, width: int, wide: Any
) -> None:
    _, x, _, weight = map(on_gpu, tensors(6, width, weight=wide))
    told = rf"no forward kernel serves rows of {width} .* {command(width, wide)}"
    for serve in (package.rmsnorm_forward, package.rms_norm):
        with pytest.raises(RuntimeError, match=told):
            serve(x, weight)
        with pytest.raises(RuntimeError, match=told), torch.no_grad():
            serve(x, weight, residual=x)


def test_device_of_another_kind_is_refused_with_the_reason(
    package: BatchInvariantPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.get_device_properties(0), "major", 8)
    dy, x, rstd, weight = given().values()
    told = r"these kernels are for NVIDIA H200 .* and do not run on H200, and the bits of"
    with pytest.raises(RuntimeError, match=told):
        package.rmsnorm_backward(dy, x, rstd, weight)
    with pytest.raises(RuntimeError, match=told):
        package.rms_norm(x, weight)
    with routing_on_cpu(package).installed(), pytest.raises(RuntimeError, match=told):
        torch.ops.aten._fused_rms_norm_backward(dy, x, [N], rstd, weight, [True, True])


def test_float64_is_refused_with_the_reason(package: BatchInvariantPackage) -> None:
    x = on_gpu(torch.zeros(4, 64, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"no kernel for torch\.float64, .*: take the"):
        package.rmsnorm_backward(x, x, on_gpu(torch.ones(4)), x[0])
    with pytest.raises(RuntimeError, match=r"no forward kernel for torch\.float64, and the bits"):
        package.rms_norm(x)


def test_arguments_that_do_not_fit_are_named_before_any_copy(
    package: BatchInvariantPackage,
) -> None:
    x = on_gpu(odd(tensors(M, N)[1]))
    with pytest.raises(ValueError, match=r"x must be \(..., N\)"):
        package.rmsnorm_forward(on_gpu(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="weight must have shape"):
        package.rmsnorm_forward(x, on_gpu(torch.ones(()).bfloat16()))
    with pytest.raises(ValueError, match="weight must have shape"):
        package.rmsnorm_backward(x, x, on_gpu(torch.ones(M)), on_gpu(odd(torch.ones(8).bfloat16())))


def test_no_rows_need_no_kernel(package: BatchInvariantPackage, driver: Recorder) -> None:
    x, weight = on_gpu(torch.empty(0, 100)), on_gpu(torch.ones(100))
    y, rstd = package.rmsnorm_forward(x, weight)
    dx, dw = package.rmsnorm_backward(x, x, rstd, weight)
    assert dx is not None and dw is not None
    assert (y.shape, dx.shape, float(dw.sum())) == ((0, 100), (0, 100), 0.0)
    assert driver.launches == []


@pytest.mark.parametrize("width", [1000, N])
def test_formula_serves_the_cpu(
    package: BatchInvariantPackage, driver: Recorder, width: int
) -> None:
    dy, x, _, weight = tensors(6, width)
    y, rstd = package.rmsnorm_forward(odd(x), weight)
    assert same((y, rstd), reference_forward(x, weight, None))
    found = package.rmsnorm_backward(dy, with_gaps(x), rstd, odd(weight))
    assert same(found, reference_backward(dy, x, rstd, weight))
    assert driver.launches == []


# ---- Forwards with the bits of vLLM's ------------------------------------------------------------

ORDERS = {"vllm-triton3.7": "tiles_in_turn", "vllm-triton3.8": "tiles_in_pairs"}


@pytest.mark.parametrize("matches", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 24, 1000, 1001, N, 1040])
def test_matching_forward_has_one_kernel_for_all_rows_of_a_kind(
    package: BatchInvariantPackage, driver: Recorder, matches: str, dtype: torch.dtype, width: int
) -> None:
    """Triton makes another kernel for rows of a multiple of 16 columns."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    table = ForwardTable.load(FOLDER)
    assert table is not None
    in_vectors = width % 16 == 0
    (wanted,) = (
        kernel
        for kernel in table.fallback
        if (kernel.config["form"], kernel.spec.dtype) == (ORDERS[matches], name)
        and (kernel.spec.vector_bytes == 16) == in_vectors
    )
    x, weight = torch.zeros(6, width, dtype=dtype), torch.ones(width, dtype=dtype)
    for rows in (x, odd(x), by_column(x), with_gaps(x), x[:1], x[:0]):
        y = package.rms_norm(on_gpu(rows), on_gpu(weight), 1e-5, matches=matches)
        assert y.shape == rows.shape
        seen = of(driver, "rmsnorm_forward")
        assert len(seen) == (len(rows) > 0)
        for one in seen:
            assert one.function.cubin == wanted.read_cubin(FOLDER)
            assert (one.grid, one.block) == (len(rows), 128)
            assert not in_vectors or not any(address % 16 for address in one.arguments[:5])


def test_gradients_of_a_matching_forward_are_the_packages_from_its_rstd(
    package: BatchInvariantPackage, driver: Recorder
) -> None:
    x, dy = (on_gpu(tensor).requires_grad_() for tensor in tensors(M, N)[:2])
    weight = on_gpu(tensors(M, N)[3]).requires_grad_()
    package.rms_norm(x, weight, matches="vllm-triton3.7").backward(dy)
    (forward,), (backward,) = of(driver, "rmsnorm_forward"), of(driver, MAIN)
    kernel = package.table.choose(M, N, "bf16", "bf16").kernel
    assert kernel is not None and backward.function.cubin == kernel.read_cubin(FOLDER)
    assert backward.arguments.rstd == forward.arguments.rstd != 0


def test_what_vllm_does_not_have_is_refused(package: BatchInvariantPackage) -> None:
    x, weight = on_gpu(torch.zeros(6, N)), on_gpu(torch.ones(N))
    serve = partial(package.rms_norm, matches="vllm-triton3.7")
    with pytest.raises(ValueError, match=r"no residual.* rms_norm\(h"):
        serve(x, weight, residual=x)
    with pytest.raises(ValueError, match="weight_offset must be 0"):
        serve(x, weight, weight_offset=1.0)
    with pytest.raises(ValueError, match=r"x's dtype, torch.bfloat16, got torch.float32"):
        serve(x.bfloat16(), weight)
    with pytest.raises(RuntimeError, match=r"no forward kernel for torch.float64, and no other"):
        serve(x.double(), weight.double())


def test_gpu_without_such_kernels_is_told_so(driver: Recorder, package: object) -> None:
    other = BatchInvariantPackage(GENERATED / "gb200" / "rmsnorm_invariant_backward")
    with pytest.raises(RuntimeError, match=r"and no other adds as vLLM's does"):
        other.rms_norm(on_gpu(torch.zeros(6, N)), matches="vllm-triton3.7")


def test_warmup_loads_the_matching_kernels_that_were_asked_for(
    package: BatchInvariantPackage, driver: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, on_cpu = package.RMSNorm(1000, matches="vllm-triton3.8"), torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device: on_cpu(size))
    for name, answer in (("is_available", True), ("device", nullcontext()), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    package.warmup([(6, 1000, "bf16")])
    assert driver.loads == 1
    norm._norm().rms_norm(on_gpu(torch.zeros(6, 1000).bfloat16()))
    assert len(of(driver, "rmsnorm_forward")) == driver.loads == 1
