"""The emulator follows the signature of an operation: kernels written here, of operations that the
library does not have, run as they are, and what they do wrong is named by their tensors' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.emulate import Layout, Runs, Schedule, find_compiler, run_schedules
from generator.emulate.run import CallOptions
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from normforge.operations import OPERATIONS, RowOperation, Signature
from normforge.operations.formula import evaluate
from normforge.operations.tensor import columns, row, rows, rows_out, sums
from normforge.spec import KernelSpec, Launch

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

M, N = 12, 40

BLEND = RowOperation(
    name="blend",
    signature=Signature(
        rows("a"), rows_out("p"), rows("b"), row("s"), columns("g"), sums("t"), rows("c"),
        rows_out("q"),
    ),
    terms=lambda a, b, s, g, c: {"p": (a * s, b * g), "q": (c * a,), "t": (b * c,)},
)  # fmt: skip
"""Three matrices are read, two are written, and one sum is formed of each column."""

SOFTMAX = RowOperation(
    name="softmax_backward",
    signature=Signature(rows("y"), rows("dy"), rows_out("dx")),
    terms=lambda y, dy: {"dx": (y * dy, -y * (y * dy).sum(-1, keepdim=True))},
)
"""No number of a row or a column takes part, and nothing is added up over the rows."""

START = """
#include "normforge_host.h"
using Element = float;
using WeightElement = float;
struct Arguments {
  LEADING
  unsigned* counters;
  float *zeroed, *scratch;
  long long rows, STRIDES, GAPS;
  unsigned gap_factor;
  int columns, group, mode;
  float offset;
};
#define AT(name) args.name + row * args.name##_stride + column
#define IN(name) AT(name) + __umulhi(static_cast<unsigned>(row), args.gap_factor) * args.name##_gap
DEVICE float load(const float* from, AT_LINE) {
  return __uint_as_float(load_row<4>(from, line).words[0]);
}
DEVICE void store(float* to, float value, AT_LINE) {
  store_row<4>(to, {{__float_as_uint(value)}}, line);
}
"""

BODY = {
    "blend": """
  for (int column = threadIdx.x; column < args.columns; column += 32) {
    float g = 1.0f, total = 0.0f;
    if (args.g) g = __uint_as_float(load_weight<4>(args.g + column).words[0]);
    for (long long row = 0; row < args.rows; ++row) {
      const float a = load(IN(a)), b = load(IN(b)), c = load(IN(c)), s = load_rstd(args.s + row);
      total += b * c;
      if (args.p) store(AT(p), a * s + b * (g + args.offset));
      if (args.q) store(AT(q), c * a);
    }
    if (args.t == nullptr) continue;
    float* to = static_cast<float*>(args.t) + column;
    store_dw(to, args.mode == 2 ? total + load_dw(to) : total);
  }
""",
    "softmax_backward": """
  for (long long row = blockIdx.x; row < args.rows; row += gridDim.x) {
    float along = 0.0f;
    for (int column = threadIdx.x; column < args.columns; column += 32)
      along += load(IN(y)) * load(IN(dy));
    for (int mask = 16; mask; mask /= 2) along += shuffle_xor(along, mask);
    for (int column = threadIdx.x; column < args.columns; column += 32)
      store(AT(dx), load(IN(y)) * (load(IN(dy)) - along));
  }
""",
}


def source_of(operation: RowOperation) -> str:
    signature = operation.signature
    leading = "\n  ".join(tensor.cpp for tensor in signature.leading)
    strides = ", ".join(f"{tensor.name}_stride" for tensor in signature.strided)
    gaps = ", ".join(f"{tensor.name}_gap" for tensor in signature.early)
    start = START.replace("LEADING", leading).replace("STRIDES", strides).replace("GAPS", gaps)
    kernel = f'extern "C" void {operation.name}(ARGUMENTS(Arguments, args))'
    return f"{start}{kernel} {{{BODY[operation.name]}}}\n"


def inputs_of(operation: RowOperation) -> SimpleNamespace:
    """Small integers, with which all arithmetic is exact."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (M, N), "row": (M,), "columns": (N,)}
    drawn = {
        tensor.name: torch.randint(-4, 5, shapes[tensor.role], generator=generator).float()
        for tensor in operation.signature.inputs
    }
    return SimpleNamespace(**drawn, offset=2.0 if operation is BLEND else 0.0)


def run(operation: RowOperation, inputs: Any, *planted: str, grid: int = 1, **options: Any) -> Runs:
    """Two schedules. planted: what is in the source, and what takes its place."""
    spec = KernelSpec(
        name=operation.name, N=N, exact=True, dtype="fp32", weight_dtype="fp32", strategy="",
        determinism="gpu_to_gpu", threads=32, sum_threads=32, smem_bytes=0, vector_bytes=4,
        partial_columns=N, partial_stride=0, slice_columns=N, batch_rows=1, rows_per_cta=1,
        cluster=1, dependent=False, levels=1, ctas_per_sm=1, even_grid=False,
        sms=grid, operation=operation.name,
    )  # fmt: skip
    launch = Launch(grid, grid, grid, sum_grid=0, counters=0, zeroed=0, scratch=0, partials=0)
    source = source_of(operation)
    if planted:
        assert planted[0] in source
        source = source.replace(*planted)
    schedules = [Schedule(seed, grid) for seed in (0, 1)]
    return run_schedules(source, spec, launch, inputs, schedules, **options)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in (BLEND, SOFTMAX):
        monkeypatch.setitem(OPERATIONS, operation.name, operation)


def expected(operation: RowOperation, inputs: Any) -> Mapping[str, torch.Tensor]:
    return evaluate(operation, vars(inputs), offset=inputs.offset)


def check(runs: Runs, wanted: Mapping[str, torch.Tensor]) -> None:
    assert runs.faults == []
    assert runs.results.keys() == wanted.keys()
    for name, (result,) in runs.results.items():
        assert torch.equal(result, wanted[name]), name


@pytest.mark.parametrize("inner", [0, 3, 4])
@pytest.mark.parametrize("layout", [Layout(), Layout((3, 8, 0, 5, 1), misaligned_bytes=4)])
@pytest.mark.parametrize(("operation", "grid"), [(BLEND, 1), (SOFTMAX, 5)])
def test_every_output_is_found(
    operation: RowOperation, grid: int, layout: Layout, inner: int
) -> None:
    inputs = inputs_of(operation)
    options = CallOptions(inner=inner)
    runs = run(operation, inputs, grid=grid, layout=layout, call_options=options)
    check(runs, expected(operation, inputs))


def test_what_a_call_asks_for_is_given_by_names() -> None:
    inputs = inputs_of(BLEND)
    plain = expected(BLEND, inputs)
    for left_out in ({"p"}, {"q", "t"}, {"p", "q"}):
        options = CallOptions(without=frozenset(left_out))
        wanted = {name: out for name, out in plain.items() if name not in left_out}
        check(run(BLEND, inputs, call_options=options), wanted)
    start = torch.arange(N).float()
    options = CallOptions(dw_mode=DW_ADDED, added_to=start)
    check(run(BLEND, inputs, call_options=options), {**plain, "t": plain["t"] + start})
    ones = SimpleNamespace(**{**vars(inputs), "g": torch.ones(N)})
    check(run(BLEND, inputs, call_options=CallOptions(columns=False)), expected(BLEND, ones))
    for over in ({"q": "c"}, {"p": "b", "q": "a"}):
        check(run(BLEND, inputs, call_options=CallOptions(over=over)), plain)


STORED = "if (args.q) store(AT(q), c * a);"
WRONG: dict[str, tuple[RowOperation, str, str, CallOptions, str]] = {
    "a matrix is written twice": (
        *(BLEND, STORED, STORED + STORED, CallOptions()),
        r"writes q\[0, \d+\] a second time",
    ),
    "the last row is not written": (
        *(BLEND, "if (args.q)", "if (args.q && row + 1 < args.rows)", CallOptions()),
        r"q\[11, 0\] was never written, nor 39 more elements",
    ),
    "a sum is not written": (
        *(BLEND, "if (args.t == nullptr)", "if (column == 7)", CallOptions()),
        r"t\[7\] was never written, nor 0 more elements",
    ),
    "a row too many is read": (
        *(BLEND, "row < args.rows", "row <= args.rows", CallOptions(inner=4)),
        r"out of bounds: reads 4 bytes at a\[15, \d+\]",  # it lies behind three gaps of one row
    ),
    "rows between those of two tokens are read": (
        *(BLEND, "* args.name##_gap", "* 0 + args.name##_gap", CallOptions(inner=3)),
        r"out of bounds: reads 4 bytes at b\[3, \d+\], between its rows, outside a or b or c",
    ),
    "a number of a row is read of the columns": (
        *(BLEND, "load_rstd(args.s + row)", "load_rstd(args.g + row)", CallOptions()),
        r"out of bounds: reads 4 bytes at g\[0\], outside s",
    ),
    "what is written is read": (
        *(BLEND, "c = load(IN(c))", "c = load(AT(q))", CallOptions()),
        r"out of bounds: reads 4 bytes at q\[0, \d+\], outside a or b or c",
    ),
    "an output that is not wanted is written": (
        *(BLEND, "if (args.q) ", "", CallOptions(without=frozenset({"q"}))),
        r"out of bounds: writes 4 bytes at .*, outside p",
    ),
    "sums are read that are not added to": (
        *(BLEND, "args.mode == 2", "true", CallOptions(dw_mode=DW_IN_FP32)),
        r"reads t\[\d+\], which it is not to add to",
    ),
    "an input is read after an output has been written there": (
        *(BLEND, STORED, STORED + " total += load(IN(c));", CallOptions(over={"q": "c"})),
        r"reads c\[0, \d+\], over which q has been written",
    ),
    "columns are written that there are none of": (
        *(SOFTMAX, "store(AT(dx)", "store_dw(AT(dx)", CallOptions()),
        r"out of bounds: writes 4 bytes at dx\[\d+, \d+\], outside all that it was given",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
def test_wrong_kernel_is_found_and_its_tensor_is_named(bug: str) -> None:
    operation, old, new, options, sentence = WRONG[bug]
    runs = run(operation, inputs_of(operation), old, new, call_options=options)
    assert len(runs.faults) == 2
    assert all(re.search(sentence, fault) for fault in runs.faults), runs.faults
