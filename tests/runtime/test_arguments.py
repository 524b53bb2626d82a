"""The checks of a call's arguments, where their rows are, and what is copied."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import normforge
import normforge.batch_invariant as invariant
import normforge.layernorm as layernorm
from normforge.api import Package
from normforge.launch.row_layout import RowLayout, dense, row_layout
from normforge.launch.workspace import StreamWorkspace, Zeros
from normforge.serve.checks import check_arguments
from normforge.serve.layout import Layout, read_layout
from normforge.serve.options import PLAIN, Arguments, Options
from normforge.spec import Launch
from normforge.table import MAX_ALIGNMENT
from tests.support.fake_driver import FakeDriver, tensors


@pytest.mark.parametrize(
    "given", [((16,), 1), (16, 1), ([16], 1, 1e-6), ((16,), 1, 1e-6), ((16,), 1, 1, 1e-6)]
)
def test_arguments_in_pytorchs_order_are_told_which_is_ours(given: Any) -> None:
    shape, *others = given
    x, weight = torch.randn(4, 16), torch.ones(16)
    order = (shape, *(weight if other == 1 else other for other in others))
    says = (
        r"got (tuple|list|int): .* so write rms_norm\(x, weight, eps\) or layer_norm\(x, weight, "
    )
    for function in (normforge.rms_norm, invariant.rms_norm, layernorm.layer_norm):
        with pytest.raises(TypeError, match=says):
            function(x, *order)


def test_what_else_is_given_by_position_is_refused() -> None:
    x, weight = torch.randn(4, 16), torch.ones(16)
    for function in (normforge.rms_norm, invariant.rms_norm):
        with pytest.raises(TypeError, match="takes x, weight and eps by position"):
            function(x, weight, 1e-6, weight)
    with pytest.raises(TypeError, match="takes x, weight, bias and eps by position"):
        layernorm.layer_norm(x, weight, weight, 1e-6, x)


@pytest.mark.parametrize("name", ["install", "uninstall", "installed"])
def test_routing_takes_no_model(name: str) -> None:
    patch = "unpatch" if name == "uninstall" else "patch"
    for module in (normforge, layernorm):
        with pytest.raises(
            TypeError, match=rf"got Linear: write {name}\(\) or, .* {patch}\(model\)"
        ):
            getattr(module, name)(torch.nn.Linear(1, 1))
    assert not inspect.signature(normforge.install).parameters


def test_a_norm_without_dimensions_is_refused() -> None:
    for layer in (normforge.RMSNorm(()), layernorm.LayerNorm(())):
        with pytest.raises(ValueError, match=r"at least one dimension, got \(\)"):
            layer(torch.randn(4))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"x": torch.zeros(6, 8, dtype=torch.int32)}, TypeError, "x must be bfloat16"),
        ({"dy": torch.zeros(6, 8, dtype=torch.half)}, TypeError, "dy must have x's dtype"),
        ({"weight": torch.zeros(8, dtype=torch.half)}, TypeError, "weight must have x's dtype"),
        ({"rstd": torch.zeros(6, dtype=torch.bfloat16)}, TypeError, "rstd must be float32"),
        ({"rstd": torch.zeros(6, dtype=torch.float64)}, TypeError, "rstd must be float32"),
        ({"dy": torch.zeros(5, 8, dtype=torch.bfloat16)}, ValueError, r"got \(5, 8\)"),
        ({"weight": torch.zeros(7)}, ValueError, r"shape \(8,\) or \(6, 8\), got \(7,\)"),
        ({"rstd": torch.zeros(5)}, ValueError, "each of the 6 rows of x, got 5"),
        ({"weight": torch.zeros(8, device="meta")}, ValueError, "weight is on meta and x on cpu"),
        (
            {"x": torch.zeros(6, 0).bfloat16(), "dy": torch.zeros(6, 0).bfloat16()},
            ValueError,
            "N >= 1",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    change: dict[str, torch.Tensor], error: type[Exception], sentence: str
) -> None:
    dy, x, rstd, weight = tensors(6, 8)
    arguments = {"dy": dy, "x": x, "rstd": rstd, "weight": weight} | change
    with pytest.raises(error, match=sentence):
        check_arguments(Arguments(**arguments), PLAIN)


@pytest.mark.parametrize(
    ("tensors_given", "options", "error", "sentence"),
    [
        ({"dresidual": torch.zeros(6, 8)}, {"need_dx": False}, ValueError, "need_dx must be True"),
        ({"dresidual": torch.zeros(5, 8)}, {}, ValueError, "dresidual must have x's shape"),
        ({"dresidual": torch.zeros(6, 8).int()}, {}, TypeError, "dresidual must be of a floating"),
        ({}, {"accumulate": True}, ValueError, "give the tensor to add to"),
        ({}, {"dw_dtype": torch.half}, TypeError, "dw_dtype must be the weight's or torch.float32"),
        ({"dw_out": torch.zeros(7)}, {}, ValueError, "dw_out must have the weight's shape"),
        ({"dw_out": torch.zeros(8).half()}, {}, TypeError, "dw_out must have the weight's dtype"),
        (
            {"dw_out": torch.zeros(8)},
            {"dw_dtype": torch.bfloat16},
            TypeError,
            "dw_out must have dw_",
        ),
        ({"dw_out": torch.zeros(8)}, {"need_dw": False}, ValueError, "dw is not computed"),
        ({"dw_out": torch.zeros(8), "weight": None}, {}, ValueError, "dw is not computed"),
    ],
)
def test_options_that_do_not_fit_are_named(
    tensors_given: Any, options: Any, error: type[Exception], sentence: str
) -> None:
    dy, x, rstd, weight = tensors(6, 8)
    arguments = {"dy": dy, "x": x, "rstd": rstd, "weight": weight} | tensors_given
    with pytest.raises(error, match=sentence):
        check_arguments(Arguments(**arguments), Options(**options))


def test_rows_are_read_in_place_wherever_one_or_two_strides_describe_them() -> None:
    x = torch.empty(4, 6, 16)
    assert row_layout(x) == RowLayout(16)
    assert row_layout(x[:, :, :8]) == RowLayout(16)
    assert row_layout(x.reshape(24, 16)[::2]) == RowLayout(32)
    assert row_layout(torch.empty(16).expand(4, 6, 16)) == RowLayout(0)
    assert row_layout(torch.empty(16)) == RowLayout(16)
    assert row_layout(torch.empty(6, 1)) == RowLayout(1)
    assert row_layout(x[:, ::2, :8]) == RowLayout(32)
    assert row_layout(x[:, :4]) == RowLayout(16, inner=4, outer=96)  # heads of a packed tensor
    assert row_layout(x.transpose(0, 1)) == RowLayout(96, inner=4, outer=16)
    assert row_layout(torch.empty(3, 4, 6, 16)[:, :2, :4]) is None  # three strides
    assert row_layout(x.transpose(1, 2)) is None
    assert row_layout(torch.ones(()).expand(4, 16)) is None


def rows_at(layout: RowLayout, count: int) -> list[int]:
    """Return where a kernel looks for its rows: the arithmetic of `Rows::start` in the template."""
    if layout.inner == 0:
        return [row * layout.stride for row in range(count)]
    return [
        row // layout.inner * layout.outer + row % layout.inner * layout.stride
        for row in range(count)
    ]


@pytest.mark.parametrize("x_kind", ["dense", "heads", "turned", "three", "row", "scalar"])
@pytest.mark.parametrize("dy_kind", ["dense", "heads", "wide heads", "turned", "row", "scalar"])
def test_layout_finds_every_row_of_every_pair_of_tensors(x_kind: str, dy_kind: str) -> None:
    packed = torch.arange(4 * 10 * 16).reshape(4, 10, 16).bfloat16()
    kinds = {
        "dense": torch.empty(4, 6, 16).bfloat16(),
        "heads": packed[:, :6],
        "wide heads": packed[:, 2:8],
        "turned": packed.reshape(10, 4, 16)[:6].transpose(0, 1),
        "three": torch.empty(8, 7, 4, 16).bfloat16()[::4, :6, ::2].reshape(4, 6, 16),
        "row": packed[0, 0].expand(4, 6, 16),
        "scalar": torch.ones(()).bfloat16().expand(4, 6, 16),
    }
    x, dy = kinds[x_kind], kinds[dy_kind]
    layout, alignment = read_layout(Arguments(dy, x, torch.empty(24), None, dresidual=dy.float()))
    assert (layout.rows, layout.columns) == (24, 16)
    strided = layout.strided
    assert strided.keys() == {"x", "dy", "dresidual"} and strided["dresidual"].inner == 0
    for tensor, rows, copied in (
        (dy, strided["dy"], layout.copy.dy),
        (x, strided["x"], layout.copy.x),
        (dy.float(), strided["dresidual"], layout.copy.dresidual),
    ):
        read = dense(tensor) if copied else tensor
        index = torch.arange(4).reshape(4, 1) * read.stride(0) + torch.arange(6) * read.stride(1)
        assert rows_at(rows, 24) == index.flatten().tolist()
    assert strided["x"].inner == strided["dy"].inner
    for rows in (strided["dy"], strided["x"]):
        assert all(step * 2 % alignment == 0 for step in (rows.stride, rows.outer))


@pytest.mark.parametrize(
    ("dtype", "width", "copied"),
    [
        (torch.float32, 24, False),  # 96 bytes from row to row
        (torch.float32, 20, True),
        (torch.bfloat16, 32, False),
        (torch.bfloat16, 24, True),
    ],
)
def test_rows_of_a_residual_are_copied_unless_each_is_aligned(
    dtype: torch.dtype, width: int, copied: bool
) -> None:
    rows, wide = torch.empty(24, 16).bfloat16(), torch.empty(24, width, dtype=dtype)
    assert wide.data_ptr() % MAX_ALIGNMENT == 0
    given = Arguments(rows, rows, torch.empty(24), None, dresidual=wide[:, :16])
    layout, _ = read_layout(given)
    assert layout.copy.dresidual is copied
    assert layout.strided["dresidual"].stride == (16 if copied else width)


def test_repeated_scalar_is_copied_as_one_row() -> None:
    """The gradient that `y.sum().backward()` delivers costs N elements, not M * N."""
    row = dense(torch.ones(()).expand(4, 6, 16))
    assert row.stride() == (0, 0, 1)
    assert torch.equal(row, torch.ones(4, 6, 16))


@pytest.mark.parametrize("weight", [(8,), 8])
def test_a_shape_in_the_place_of_the_weight_is_named(package: Package, weight: Any) -> None:
    """torch.nn.functional.rms_norm takes a shape there."""
    with pytest.raises(TypeError, match=f"got {type(weight).__name__}: .* no normalized_shape"):
        package.rms_norm(torch.ones(4, 8), weight)


# ---- Addresses of rows ---------------------------------------------------------------------------


N = 64
BF16 = torch.bfloat16


def strided(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A view into aligned memory; start: elements from its beginning."""
    memory = torch.zeros(1 << 14, dtype=BF16)
    first = -(memory.data_ptr() // 2) % 16
    return memory[first:].as_strided(shape, strides, memory[first:].storage_offset() + start)


def layout_of(x: torch.Tensor, dy: torch.Tensor) -> tuple[Layout, int]:
    """The layout, and the power of two that divides all addresses and steps."""
    rows = x.numel() // N
    return read_layout(Arguments(dy, x, torch.ones(rows), torch.ones(N, dtype=BF16)))


@pytest.mark.parametrize("start", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_the_address_of_either_tensor_counts(which: str, start: int) -> None:
    given = {"x": strided((6, N), (N, 1)), "dy": strided((6, N), (N, 1))}
    given[which] = strided((6, N), (N, 1), start)
    assert layout_of(**given)[1] == (2 * start or 32)


@pytest.mark.parametrize("gap", [1, 4, 16])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_every_step_between_rows_counts(which: str, gap: int) -> None:
    """Steps are between rows, and between the heads of one token and the next."""
    for strides in ((3 * (N + gap), N + gap, 1), (3 * N + gap, N, 1)):
        given: dict[str, Any] = dict.fromkeys(("x", "dy"), strided((2, 3, N), (3 * N, N, 1)))
        given[which] = strided((2, 3, N), strides)
        layout, alignment = layout_of(**given)
        assert alignment == 2 * gap
        assert not any(layout.copy)


def test_rows_that_are_stepped_through_in_two_ways_are_copied_once() -> None:
    x = strided((2, 3, 4, N), (3 * 5 * N, 5 * N, N, 1))  # a gap behind every 4 rows
    dy = strided((2, 3, 4, N), (13 * N, 4 * N, N, 1))  # behind every 12
    layout, _ = layout_of(x, dy)
    assert layout.copy[:2] == (True, False)
    assert layout.strided["x"] == RowLayout(N, 4, 5 * N)
    assert layout.strided["dy"] == RowLayout(N, 4, 4 * N)
    dense = strided((2, 3, 4, N), (12 * N, 4 * N, N, 1))
    assert layout_of(x, dense)[0].copy[:2] == (False, False), "it goes along with any"


def test_counters_and_scratch_grow_with_the_launch(driver: FakeDriver) -> None:
    own = StreamWorkspace(7, Zeros())

    def fit(counters: int, scratch: int) -> tuple[int, int]:
        launch = Launch(1, 1, 1, 0, counters=counters, zeroed=0, scratch=scratch, partials=1)
        own.fit(launch)
        at, end = own.zeros, own.zeros + launch.scratch_offset
        assert any(slab <= at and end <= slab + size for slab, size in driver.zeroed)
        assert own.scratch_words >= scratch
        return own.zeros, own.scratch

    small = fit(10, 100)
    assert fit(10, 100) == fit(5, 50) == small
    more_counters = fit(40_000, 100)
    assert more_counters[0] != small[0] and more_counters[1] == small[1]
    more_scratch = fit(10, 5000)
    assert more_scratch[0] == more_counters[0] and more_scratch[1] != small[1]
