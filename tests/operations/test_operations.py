"""Every operation says what it computes: tensors, inputs, bounds, the bytes moved and the floor."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generator.evaluate.verify.accuracy import compare_all
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import check_repeats, digest
from generator.evaluate.verify.guarded import Guarded
from generator.kernels.render import render
from generator.operations import (
    GATED_BACKWARDS,
    GATED_FORWARDS,
    LAYERNORM_BACKWARD,
    LAYERNORM_FORWARD,
    OPERATIONS,
    RMSNORM_ADD_FORWARD,
    RMSNORM_BACKWARD,
    RMSNORM_FORWARD,
    RMSNORM_INVARIANT_BACKWARD,
    RMSNORM_QUANTIZED,
    RMSNORM_ROPE_BACKWARD,
    RMSNORM_ROPE_FORWARD,
    RMSNORM_SUM_BACKWARDS,
    ROPE,
    Operation,
)
from generator.operations import rmsnorm_forward as forward_module
from generator.operations.operation import TORCH_DTYPE, over_bytes
from generator.operations.rmsnorm_forward import ForwardInputs
from generator.paths import template_named
from generator.problem import FORWARDS, ITEMSIZE, Problem, sums_of
from normforge import operations as library
from normforge.launch.forward_call import _ARGUMENTS
from normforge.operations.formula import evaluate
from normforge.operations.gated_rmsnorm_backward import gated_rmsnorm
from normforge.operations.rmsnorm_quantized import quantize_1x128, quantize_mx
from normforge.operations.rmsnorm_rope import rmsnorm_rope
from normforge.serve.forward import reference_forward
from normforge.serve.reference import reference_backward
from tests.support.forward import EPS, H200, drawn, of_kind, output_fault
from tests.support.samples import DTYPES, sample_variant

CPU = torch.device("cpu")
NAMES = sorted(OPERATIONS)
QUANTIZED_FORWARDS = [one for one in RMSNORM_QUANTIZED if one.name.endswith("forward")]
QUANTIZED_BACKWARDS = [one for one in RMSNORM_QUANTIZED if one.name.endswith("backward")]
SHAPES = ("6x40:bf16", "5x33:fp16:fp32", "7x16:fp32", "6x40:bf16+residual", "3x8:fp16+offset")
any_problem = st.integers(1, 10**5).flatmap(
    lambda M: st.builds(
        lambda N, dtype, kind: replace(Problem(M, N, dtype, dtype), residual=kind and dtype),
        st.integers(1, 10**5),
        st.sampled_from(DTYPES),
        st.sampled_from(("", "residual")),
    )
)


class Doubling:
    """A runner whose "kernel" computes in PyTorch what it is told to."""

    clean_bytes = 0

    def __init__(self, compute: Any, workspace_bytes: int = 0) -> None:
        self.compute, self.workspace_bytes = compute, workspace_bytes

    def run(self, inputs: Any, outputs: Any, workspace: torch.Tensor) -> None:
        for name, value in self.compute(inputs).items():
            outputs[name].copy_(value.reshape(outputs[name].shape))


def exact(operation: Operation, inputs: Any) -> dict[str, torch.Tensor]:
    """Compute the outputs by the formula in plain PyTorch."""
    if operation in (RMSNORM_BACKWARD, RMSNORM_INVARIANT_BACKWARD):
        found = reference_backward(
            *(inputs.dy, inputs.x, inputs.rstd, inputs.weight),
            weight_offset=inputs.offset,
            dresidual=inputs.dresidual,
        )
        return dict(zip(("dx", "dw"), found, strict=False))
    if operation is LAYERNORM_BACKWARD:
        return layer_norm(inputs)
    if operation is LAYERNORM_FORWARD:
        x, weight, bias = (one.double() for one in (inputs.x, inputs.weight, inputs.bias))
        given = (x, x.shape[1:], weight + inputs.offset, bias, inputs.eps)
        y, mean, rstd = torch.ops.aten.native_layer_norm(*given)
        statistics = {"mean": mean.flatten().float(), "rstd": rstd.flatten().float()}
        return {"y": y.to(inputs.x.dtype), **statistics}
    if operation in (RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD, ROPE):
        return rope(operation, inputs)
    if operation in GATED_BACKWARDS:
        return gated(operation, inputs)
    if operation in GATED_FORWARDS:
        kind = next(k for k, one in library.GATED_FORWARDS.items() if one.name == operation.name)
        given = (inputs.x.double(), inputs.z.double(), inputs.weight.double() + inputs.offset)
        return {"y": gated_rmsnorm(*given, inputs.eps, *kind).to(inputs.x.dtype)}
    if operation is RMSNORM_ADD_FORWARD:
        x, r, weight = (one.double() for one in (inputs.x, inputs.r, inputs.weight))
        y, rstd = reference_forward(x, weight, inputs.eps, inputs.offset)
        return {"y": (r + y).to(inputs.x.dtype), "rstd": rstd.flatten().float()}
    if operation in RMSNORM_QUANTIZED:
        return quantized(operation, inputs)
    if operation in RMSNORM_SUM_BACKWARDS:
        count, dtype = len(operation.signature.early) - 1, inputs.x.dtype
        dy = sum(getattr(inputs, name).double() for name in library.GRADIENTS[:count])
        late = {"weight_offset": inputs.offset, "dresidual": inputs.dresidual}
        found = reference_backward(dy, inputs.x, inputs.rstd, inputs.weight, **late)
        dx, dw, *_ = found
        return {"dx": dx.to(dtype), "dw": dw}
    names = ("y", "rstd", "residual_out")
    given = (inputs.x, inputs.weight, EPS, inputs.offset, inputs.residual)
    found = dict(zip(names, reference_forward(*given), strict=False))
    return {**found, "rstd": found["rstd"].reshape(-1)}


def layer_norm(inputs: Any) -> dict[str, torch.Tensor]:
    """Compute LayerNorm's gradients by PyTorch in float64, rounded once."""
    weight, dtype = inputs.weight.double() + inputs.offset, inputs.x.dtype
    statistics = (inputs.mean.double()[:, None], inputs.rstd.double()[:, None])
    dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
        *(inputs.dy.double(), inputs.x.double(), [inputs.x.shape[1]], *statistics),
        *(weight, torch.zeros_like(weight), [True, True, True]),
    )
    if inputs.dresidual is not None:
        dx += inputs.dresidual.double()
    found = {"dx": dx.to(dtype), "dw": torch.cat((dgamma, dbeta)).to(inputs.weight.dtype)}
    return found


def gated(operation: Operation, inputs: Any) -> dict[str, torch.Tensor]:
    """Compute the gradients by PyTorch's autograd in float64, rounded once."""
    kind = next(k for k, one in library.GATED_BACKWARDS.items() if one.name == operation.name)
    leaves = [inputs.x.double(), inputs.z.double(), inputs.weight.double() + inputs.offset]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = gated_rmsnorm(*leaves, inputs.eps, *kind)
    found = torch.autograd.grad(y, leaves, inputs.dy.double())
    given = (inputs.x, inputs.z, inputs.weight)
    pairs = zip(("dx", "dz", "dw"), found, given, strict=True)
    return {name: one.to(like.dtype) for name, one, like in pairs}


def quantized(operation: Operation, inputs: Any) -> dict[str, torch.Tensor]:
    """Compute the outputs in float64, rounded once, and quantize the first one by the format's
    function in PyTorch."""
    dtype, weight = inputs.x.dtype, inputs.weight.double() + inputs.offset
    if operation in QUANTIZED_FORWARDS:
        rows = inputs.x + inputs.r if operation.signature.stream else inputs.x
        y, rstd = reference_forward(rows.double(), weight, inputs.eps)
        first, found = y, {"rstd": rstd.flatten().float()}
        found |= {"h": rows} if operation.signature.stream else {}
    else:
        given = (inputs.dy.double(), inputs.x.double(), inputs.rstd.double(), weight)
        first, dw, *_ = reference_backward(*given)
        first = first if inputs.dresidual is None else first + inputs.dresidual.double()
        found = {"dx": first.to(dtype), "dw": dw.to(inputs.weight.dtype)}
    seen = (first.to(dtype) if inputs.rounded else first).float()
    made = quantize_mx(seen) if "mx" in operation.name else quantize_1x128(seen, inputs.powers)
    names = (operation.signature.quantized.name, operation.signature.scales.name)
    return found | dict(zip(names, made, strict=True))


def rope(operation: Operation, inputs: Any) -> dict[str, torch.Tensor]:
    """Compute y or the gradients by PyTorch's autograd in float64, rounded once."""
    groups = torch.arange(len(inputs.x)) // inputs.heads
    turns = (inputs.cos.double()[groups], inputs.sin.double()[groups])
    if operation is ROPE:
        cos, sin = (torch.cat((one, one), -1) for one in turns)
        first, second = inputs.x.double().chunk(2, -1)
        y = inputs.x * cos + torch.cat((-second, first), -1) * (inputs.sign * sin)
        return {"y": y.to(inputs.x.dtype)}
    leaves = [inputs.x.double(), inputs.weight.double() + inputs.offset]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = rmsnorm_rope(*leaves, *turns, inputs.eps)
    if operation is RMSNORM_ROPE_FORWARD:
        return {"y": y.detach().to(inputs.x.dtype)}
    dx, dw = torch.autograd.grad(y, leaves, inputs.dy.double())
    return {"dx": dx.to(inputs.x.dtype), "dw": dw.to(inputs.weight.dtype)}


def problem_for(name: str, shape: str) -> Problem:
    """Return a problem with blocks of columns for columns where an operation has those. Skip where
    it has pairs of columns and the shape has one without a partner."""
    signature, problem = OPERATIONS[name].signature, Problem.parse(shape)
    if signature is not None and signature.pairs and problem.N % 2:
        pytest.skip("columns in pairs")
    blocks = signature.scales if signature is not None else None
    return replace(problem, N=problem.N * blocks.block) if blocks else problem


def changed(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with another number at its end: what is narrow has twice of it."""
    found = value.clone()
    if found.element_size() == 1:
        found.view(torch.uint8).view(-1)[-1] += 8 if found.dtype == torch.float8_e4m3fn else 1
    else:
        found.view(-1)[-1] += 1
    return found


def bench_of(operation: Operation, problem: Problem, compute: Any) -> Bench:
    outputs = {
        out.name: Guarded(out.shape, TORCH_DTYPE[out.dtype], CPU)
        for out in operation.outputs(problem)
    }
    return Bench(Doubling(compute), outputs, CPU)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_has_its_template_and_its_name(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation.name == name
    if name in FORWARDS:
        assert FORWARDS[name] in OPERATIONS
        assert OPERATIONS[FORWARDS[name]].forward == name
        name = RMSNORM_FORWARD.name
    source = template_named(f"{name}.cu.j2").read_text()
    if operation.signature is not None:
        source = render(sample_variant(Problem.parse("4096x1024:bf16", name), H200))
    assert f" {name}(" in source


def test_what_kernels_add_up_is_what_the_operations_say() -> None:
    assert set(library.OPERATIONS) == {name for name, one in OPERATIONS.items() if one.signature}
    problem = Problem.parse("7x40:bf16")
    for name in library.OPERATIONS:
        sums = sums_of(name)
        added = [o.shape for o in OPERATIONS[name].outputs(problem) if o.name == "dw"]
        assert added == ([(40 * sums.column_sums,)] if OPERATIONS[name].sums_rows else [])
        assert OPERATIONS[name].sums_rows == (name.removesuffix("_backward") != name)
        saved = [a for a in OPERATIONS[name].arguments(problem) if a.shape == (7,)]
        assert len(saved) == sums.statistics


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_bounds_have_the_shapes_and_dtypes_that_it_says(name: str, shape: str) -> None:
    operation, problem = OPERATIONS[name], problem_for(name, shape)
    inputs = operation.make_inputs(problem, CPU)
    for tensor in operation.arguments(problem):
        made = getattr(inputs, tensor.name)
        assert (made.shape, made.dtype) == (tensor.shape, TORCH_DTYPE[tensor.dtype]), tensor
    bounds = operation.bounds(problem, inputs)
    assert list(bounds) == [out.name for out in operation.outputs(problem)]
    for out in operation.outputs(problem):
        assert bounds[out.name].reference.shape == out.shape
        assert len(bounds[out.name].slack) == out.shape[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_formula_passes_the_checks_and_a_changed_element_does_not(
    name: str, shape: str
) -> None:
    operation, problem = OPERATIONS[name], problem_for(name, shape)
    inputs = operation.make_inputs(problem, CPU)
    bounds = operation.bounds(problem, inputs)
    right = exact(operation, inputs)
    assert compare_all(right, bounds).fault == ""
    for out in right:
        wrong = right | {out: changed(right[out])}
        assert compare_all(wrong, bounds).fault.startswith(f"{out}[")


@pytest.mark.parametrize("name", sorted({*library.OPERATIONS} - {ROPE.name}))
def test_inputs_have_the_offset_of_the_shape(name: str) -> None:
    """Else no kernel with an offset would ever be checked."""
    for option, offset in (("", 0.0), ("+offset", 1.0)):
        problem = problem_for(name, f"6x40:bf16{option}")
        assert OPERATIONS[name].make_inputs(problem, CPU).offset == offset


@pytest.mark.parametrize("numbers", [{"rounded": 1.0}, {"powers": 1.0}])
@pytest.mark.parametrize("operation", RMSNORM_QUANTIZED, ids=lambda operation: operation.name)
def test_bounds_of_what_is_quantized_are_those_of_the_numbers_of_the_call(
    operation: Operation, numbers: dict[str, float]
) -> None:
    problem = problem_for(operation.name, "60x8:bf16")
    plain = operation.make_inputs(problem, CPU)
    if not hasattr(plain, *numbers):
        pytest.skip("its scales are powers of two")
    inputs = replace(plain, **numbers)
    found, other = (quantized(operation, given) for given in (inputs, plain))
    bounds = operation.bounds(problem, inputs)
    assert compare_all(found, bounds).fault == ""
    assert compare_all(other, bounds).fault != ""


@pytest.mark.parametrize("operation", QUANTIZED_BACKWARDS, ids=lambda operation: operation.name)
def test_a_dx_that_cancels_may_be_off_by_its_terms(operation: Operation) -> None:
    """The residual's gradient takes nearly all of dx back, so that fp32 arithmetic shows."""
    problem = problem_for(operation.name, "60x8:bf16+residual")
    inputs = operation.make_inputs(problem, CPU)
    dx = reference_backward(inputs.dy.double(), inputs.x.double(), inputs.rstd, inputs.weight)[0]
    assert dx is not None
    inputs = replace(inputs, dresidual=(-dx).to(inputs.x.dtype))
    found = evaluate(library.OPERATIONS[operation.name], vars(inputs))
    found |= {"dx": found["dx"].to(inputs.x.dtype), "dw": found["dw"].to(inputs.weight.dtype)}
    assert compare_all(found, operation.bounds(problem, inputs)).fault == ""
    cancelling = operation.make_cancelling(problem, inputs)
    assert not torch.equal(cancelling.dy, inputs.dy)


@pytest.mark.parametrize("name", NAMES)
def test_repeats_and_digest_see_every_output(name: str) -> None:
    operation, problem = OPERATIONS[name], problem_for(name, "6x40:bf16+residual")
    inputs = operation.make_inputs(problem, CPU)
    right = exact(operation, inputs)
    steady = bench_of(operation, problem, lambda inputs: right)
    assert check_repeats(steady, inputs) == ""
    before = digest(steady, inputs)
    assert digest(steady, inputs) == before
    for out in right:
        wrong = right | {out: changed(right[out])}
        turns = iter([right, *[wrong] * 20])
        moody = bench_of(operation, problem, lambda inputs, turns=turns: next(turns))
        assert check_repeats(moody, inputs).startswith(f"{out} of run 1 differs")
        assert digest(bench_of(operation, problem, lambda inputs, w=wrong: w), inputs) != before


# ---- Bytes and floors ----------------------------------------------------------------------------


@given(any_problem)
def test_traffic_is_every_matrix_once(problem: Problem) -> None:
    matrix = problem.M * problem.N * ITEMSIZE[problem.dtype]
    more = 1 if problem.residual else 0
    assert RMSNORM_BACKWARD.traffic_bytes(problem) == (3 + more) * matrix
    assert LAYERNORM_BACKWARD.traffic_bytes(problem) == (3 + more) * matrix
    assert RMSNORM_FORWARD.traffic_bytes(problem) == (2 + 2 * more) * matrix


def test_a_residual_of_its_own_dtype_is_read_and_dx_written_in_it_as_well() -> None:
    problem = Problem.parse("16384x4096:bf16+residual_fp32")
    assert RMSNORM_BACKWARD.traffic_bytes(problem) == 16384 * 4096 * (3 * 2 + 2 * 4)


def tensors_of(operation: Operation, problem: Problem) -> tuple[Any, dict[str, torch.Tensor]]:
    outputs = {
        out.name: torch.zeros(out.shape, dtype=TORCH_DTYPE[out.dtype])
        for out in operation.outputs(problem)
    }
    return operation.make_inputs(problem, CPU), outputs


def test_without_a_residual_the_floors_are_an_add_and_a_copy_of_the_tensors_themselves() -> None:
    problem = Problem.parse("6x40:bf16+offset")
    inputs, outputs = tensors_of(RMSNORM_BACKWARD, problem)
    RMSNORM_BACKWARD.floor(problem, inputs, outputs)()
    assert torch.equal(outputs["dx"], inputs.x + inputs.dy)
    inputs, outputs = tensors_of(RMSNORM_FORWARD, problem)
    RMSNORM_FORWARD.floor(problem, inputs, outputs)()
    assert torch.equal(outputs["y"], inputs.x * 1.5)


@pytest.mark.parametrize("option", ["+residual", "+residual_fp32", "+offset+residual"])
@pytest.mark.parametrize(("operation", "streams"), [(RMSNORM_BACKWARD, 3), (RMSNORM_FORWARD, 2)])
def test_with_a_residual_the_floor_moves_its_bytes_too(
    monkeypatch: pytest.MonkeyPatch, operation: Operation, streams: int, option: str
) -> None:
    problem = Problem.parse(f"12x40:bf16{option}")
    inputs, outputs = tensors_of(operation, problem)
    moved: list[int] = []

    def spy(one: Any, two: Any, out: torch.Tensor) -> None:
        touched = [tensor for tensor in (one, two, out) if isinstance(tensor, torch.Tensor)]
        assert len(touched) == streams
        assert {tensor.dtype for tensor in touched} == {torch.bfloat16}
        assert all(tensor.is_contiguous() and tensor.isfinite().all() for tensor in touched[:-1])
        moved.append(sum(tensor.numel() * 2 for tensor in touched))

    monkeypatch.setattr(torch, "add", spy)
    monkeypatch.setattr(torch, "mul", spy)
    operation.floor(problem, inputs, outputs)()
    assert moved == [operation.traffic_bytes(problem)]
    assert torch.equal(outputs["dx" if streams == 3 else "y"], torch.zeros(12, 40).bfloat16())


@pytest.mark.parametrize(
    ("shape", "rows", "angles"),
    [
        ("rope:64x128:bf16", 2, 2 * 64),  # of two tokens
        ("rope:65x128:bf16+rotary32", 2, 3 * 16),
        ("rmsnorm_rope_forward:64x256:fp32+joined64", 2, 64 * 32),
        ("rmsnorm_rope_backward:64x256:bf16+joined64+interleaved", 3, 64 * 32),
    ],
)
def test_the_floor_of_rotated_rows_moves_the_bytes_of_cos_and_sin_too(
    shape: str, rows: int, angles: int
) -> None:
    problem = Problem.parse(shape)
    operation = OPERATIONS[problem.operation]
    itemsize = 4 if problem.dtype == "fp32" else 2
    expected = rows * problem.M * problem.N * itemsize + 2 * angles * 4
    assert operation.traffic_bytes(problem) == expected
    inputs, outputs = tensors_of(operation, problem)
    moved = operation.floor(problem, inputs, outputs)()
    assert isinstance(moved, torch.Tensor)
    assert 0 <= 3 * moved.numel() * itemsize - expected < 3 * itemsize  # of torch.add


@pytest.mark.parametrize("operation", QUANTIZED_FORWARDS, ids=lambda operation: operation.name)
def test_the_floor_of_what_is_quantized_writes_over_nothing(operation: Operation) -> None:
    """Its output is narrower than what it reads, and y is not written."""
    problem = problem_for(operation.name, "6x2:bf16")
    inputs, outputs = tensors_of(operation, problem)
    stream = operation.signature.stream is not None
    assert outputs.keys() == {"y8", "y_scales", "rstd", *(["h"] if stream else [])}
    assert operation.traffic_bytes(problem) == (7 if stream else 3) * problem.M * problem.N
    before = inputs.x.clone()
    moved = operation.floor(problem, inputs, outputs)()
    assert isinstance(moved, torch.Tensor)
    assert 3 * moved.numel() * 2 == operation.traffic_bytes(problem)
    assert torch.equal(inputs.x, before) and not any(
        o.view(torch.uint8).any() for o in outputs.values()
    )


def test_bytes_that_do_not_divide_are_rounded_up() -> None:
    like = tuple(torch.zeros(4, 4, dtype=torch.bfloat16) for _ in range(3))
    assert all(one is two for one, two in zip(over_bytes(96, like), like, strict=True))
    assert [len(tensor) for tensor in over_bytes(128, like)] == [22, 22, 22]


# ---- The forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
def test_the_forwards_runner_gives_the_kernel_what_a_call_of_a_package_does(
    monkeypatch: pytest.MonkeyPatch, residual: bool
) -> None:
    """rows, x_stride, x_outer, residual_stride, columns and x_inner of contiguous rows; see
    tests/runtime/test_forward.py for the same of a call."""
    problem = Problem.parse("15x256:bf16")
    inputs = drawn(problem, 15)
    if not residual:
        inputs = replace(inputs, residual=None)
    launched: list[tuple[Any, ...]] = []

    def launch(config: Any, function: Any, arguments: int, extra: int) -> tuple[int]:
        (block,) = (ctypes.c_void_p * 1).from_address(arguments)
        values = _ARGUMENTS.unpack(ctypes.string_at(block, _ARGUMENTS.size))
        launched.append((config, function, values))
        return (0,)

    driver = SimpleNamespace(cuLaunchKernelEx=launch)
    monkeypatch.setattr(forward_module, "cuda_driver", lambda: driver)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    runner: Any = RMSNORM_FORWARD.load(b"", of_kind("4096x256:bf16").spec(132), problem)
    runner.kernel.load = lambda device: ("plain", "with residual")
    runner.kernel.main_config = lambda grid, stream: (grid, stream)
    shape = replace(problem, residual="bf16" if residual else "")
    _, outputs = tensors_of(RMSNORM_FORWARD, shape)
    runner.run(inputs, outputs, torch.empty(0))
    ((config, function, values),) = launched
    assert (config, function) == (
        (runner.kernel.spec.grid(15), 7),
        "with residual" if residual else "plain",
    )
    tensors = (inputs.x, inputs.residual, inputs.weight, *outputs.values())
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    assert values[:6] == (*addresses, *[0] * (6 - len(addresses)))
    assert values[6:] == (pytest.approx(EPS), 0.0, 15, 256, 0, 256, 256, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pytorch_computes_in_fp32_is_within_the_forwards_bounds(dtype: str) -> None:
    problem = Problem(40, 96, dtype, dtype)
    inputs = drawn(problem, 40)
    assert inputs.residual is not None
    results = reference_forward(inputs.x, inputs.weight, EPS, 0.0, inputs.residual)
    assert output_fault(problem, inputs, results) == ""
    swapped = ForwardInputs(inputs.x.flip(0), inputs.weight, inputs.residual)
    assert output_fault(problem, swapped, results) != ""


@pytest.mark.parametrize("name", [o.name for o in library.RMSNORM_SUM_BACKWARDS.values()])
def test_each_gradient_of_a_sum_shows(name: str) -> None:
    inputs = OPERATIONS[name].make_inputs(Problem.parse("64x256:fp32", name), CPU)
    gradients = [getattr(inputs, n) for n in library.GRADIENTS if hasattr(inputs, n)]
    sizes = torch.corrcoef(torch.stack([one.flatten() for one in gradients])).abs()
    assert len(gradients) == library.OPERATIONS[name].incoming
    assert all(0.5 < one.std() < 2 for one in gradients)
    assert bool((sizes < 0.1).fill_diagonal_(True).all())
