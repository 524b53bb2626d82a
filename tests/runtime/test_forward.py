"""The forward call: rows in memory, results on the CPU, and what the driver is given."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from generator.paths import template_named
from normforge.launch import forward_call as call_module
from normforge.launch.forward_call import Bindings, ForwardExtent, forward_call
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.launch.row_layout import row_layout
from normforge.serve import forward as serve_module
from normforge.serve.forward import Forward, reference_forward
from normforge.serve.kernels import source_of
from tests.support.entry_points import write_package
from tests.support.fake_driver import FakeDevice, FakeDriver
from tests.support.forward import EPS, of_kind

# ---- Rows in memory ------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=3),
    st.integers(1, 5),
    st.permutations(range(4)),
    st.integers(0, 3),
)
def test_row_layout_finds_every_row_or_asks_for_a_copy(
    sizes: list[int], N: int, order: list[int], gap: int
) -> None:
    shape = (*sizes, N)
    # Dimensions lie in memory in any order, with a gap behind each.
    strides, step = [0] * len(shape), 1
    for place in [len(shape) - 1, *(p for p in order if p < len(shape) - 1)]:
        strides[place] = step
        step = step * shape[place] + (gap if place % 2 else 0)
    tensor = torch.arange(float(step + 1)).as_strided(shape, strides)
    layout = row_layout(tensor)
    if layout is None:
        return
    rows = tensor.reshape(-1, N)
    for i in range(len(rows)):
        at = i * layout.stride
        if layout.inner:
            at = i // layout.inner * layout.outer + i % layout.inner * layout.stride
        assert float(rows[i, 0]) == at


# ---- The call on the CPU -------------------------------------------------------------------------


@pytest.fixture
def forward(tmp_path: Path) -> Forward:
    """Make the forward of a package without forward kernels."""
    write_package(tmp_path)
    return Forward(source_of(tmp_path, "rmsnorm_backward"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_cpu_rows_get_what_pytorch_computes(
    forward: Forward, dtype: torch.dtype, eps: float | None
) -> None:
    torch.manual_seed(0)
    x = (1e-3 * torch.randn(3, 5, 40)).to(dtype)  # small enough for eps to show
    weight = torch.randn(40).to(dtype)
    y, rstd = forward(x, weight, eps)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), weight, eps))
    assert rstd.shape == (3, 5, 1)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bare, _ = forward(x, None, eps)
    torch.testing.assert_close(bare, torch.nn.functional.rms_norm(x, (40,), None, eps))


def test_offset_is_added_to_the_weight_and_to_the_ones_of_no_weight(forward: Forward) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    plain, _ = forward(x, 1 + weight)
    shifted, _ = forward(x, weight, None, 1.0)
    assert torch.equal(plain, shifted)
    twice, _ = forward(x, None, None, 1.0)
    assert torch.equal(twice, forward(x, torch.full((16,), 2.0))[0])


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_residual_is_rounded_before_it_is_normalised(
    forward: Forward, residual_dtype: torch.dtype
) -> None:
    x = torch.randn(4, 64).bfloat16()
    residual = torch.randn(4, 64).to(residual_dtype)
    y, rstd, stream = forward(x, None, EPS, 0.0, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(residual_dtype))
    again, rstd_again = reference_forward(stream.float(), None, EPS)
    assert torch.equal(rstd, rstd_again)
    assert torch.equal(y, again.bfloat16())


def test_no_rows_meta_and_fake_tensors_get_results_of_the_right_shape(forward: Forward) -> None:
    y, rstd = forward(torch.empty(0, 8), torch.ones(8))
    assert (y.shape, rstd.shape) == ((0, 8), (0, 1))
    x = torch.empty(3, 8, 2, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    y, rstd = forward(x)
    assert (y.shape, y.is_contiguous(), rstd.shape) == (x.shape, True, (3, 2, 1))
    with FakeTensorMode():
        fake = torch.empty(3, 8, device="cuda", dtype=torch.bfloat16)
        y, rstd, stream = forward(fake, None, None, 0.0, fake)
        assert (y.shape, y.dtype, stream.dtype) == ((3, 8), torch.bfloat16, torch.bfloat16)
        assert (rstd.shape, rstd.dtype, rstd.device.type) == ((3, 1), torch.float32, "cuda")


def test_a_remembered_signature_serves_no_other_arguments(forward: Forward) -> None:
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    other = torch.randn(3, 5, 8)
    calls: list[tuple[Any, ...]] = [
        (x, weight),
        (x,),
        (x[0], weight),
        (x.double(), weight.double()),
        (x.half(), weight),
        (x.transpose(0, 1), weight),
        (x, None, EPS, 1.0, other),
        (x, weight, EPS, 0.0, other.bfloat16()),
        (x, weight, None, 0.5, x),
        (x.flatten()[1:113].view(14, 8), weight),
    ]
    for known in forward._calls.values():
        known._device = ""  # keep calls on the CPU too
    for _ in range(3):
        for arguments in calls:
            torch.testing.assert_close(
                forward(*arguments), reference_forward(*arguments), rtol=0, atol=0
            )
    assert sum(len(known.recent) for known in forward._calls.values()) >= 6


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ((torch.ones(2, 4).int(),), TypeError, "x must be bfloat16"),
        (([1.0],), TypeError, "x must be a torch.Tensor, got list"),
        ((torch.ones(()),), ValueError, r"x must be \(..., N\)"),
        ((torch.ones(2, 4), torch.ones(3)), ValueError, r"weight must have shape \(4,\)"),
        ((torch.ones(2, 4), torch.ones(4).half()), TypeError, "weight must have x's dtype"),
        ((torch.ones(2, 4), None, None, 0.0, torch.ones(4)), ValueError, "residual must have x's"),
        ((torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(
    forward: Forward, arguments: tuple[Any, ...], kind: type[Exception], sentence: str
) -> None:
    for _ in range(2):  # a refused signature is not remembered as one that fits
        with pytest.raises(kind, match=sentence):
            forward(*arguments)


# ---- The launch, with the driver replaced --------------------------------------------------------


def test_the_host_packs_arguments_as_the_kernel_declares_them() -> None:
    source = template_named("rmsnorm_forward.cu.j2").read_text()
    (body,) = re.findall(r"struct Arguments \{(.*?)\};", source, re.DOTALL)
    codes = {"float": "f", "long long": "q", "int": "i", "unsigned": "I"}
    layout = "@"
    for line in re.sub(r"//.*", "", body).split(";"):
        if names := line.split(","):
            kind = re.match(r"\s*((?:const )?\w+\*|long long|\w+) ", names[0])
            if kind:
                layout += ("Q" if kind[1].endswith("*") else codes[kind[1]]) * len(names)
    assert len(layout) > 10
    assert struct.calcsize(layout) == call_module._ARGUMENTS.size
    assert layout == re.sub(r"(\d)(\w)", lambda m: m[2] * int(m[1]), call_module._ARGUMENTS.format)


def test_a_residual_with_two_strides_is_copied_also_when_it_is_x(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    table = SimpleNamespace(choose=lambda *_: SimpleNamespace(kernel=1), target={})
    kernels = SimpleNamespace(forward=table, loaded={1: "loaded"})
    forward._source = cast(Any, lambda device: kernels)
    monkeypatch.setattr(serve_module, "foreign_device", lambda *_: "")
    monkeypatch.setattr(serve_module, "forward_call", lambda *given: found.append(given[-2:]))
    with FakeTensorMode():
        x = torch.empty(6, 4, 16, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    monkeypatch.setattr(type(x), "data_ptr", lambda self: 256)
    for residual in (x, x.detach()):
        forward._prepare(x, None, residual)
    assert found == [(row_layout(x), None)] * 2
    assert row_layout(x).inner


@pytest.mark.parametrize(
    ("stride", "outer", "alignment"), [(16, 64, 32), (16, 52, 8), (20, 64, 8), (16, 66, 4)]
)
def test_vectors_are_as_wide_as_every_step_between_rows_allows(
    forward: Forward, monkeypatch: pytest.MonkeyPatch, stride: int, outer: int, alignment: int
) -> None:
    """Four heads lie `stride` elements apart, and those of the next token `outer` after them."""
    found: list[int] = []

    def choose(*given: Any) -> Any:
        found.append(given[4])
        return SimpleNamespace(kernel=1)

    table = SimpleNamespace(choose=choose, target={})
    forward._source = cast(Any, lambda _: SimpleNamespace(forward=table, loaded={1: "loaded"}))
    monkeypatch.setattr(serve_module, "foreign_device", lambda *_: "")
    monkeypatch.setattr(serve_module, "forward_call", lambda *_: None)
    with FakeTensorMode():
        buffer = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
        x = buffer.as_strided((6, 3, 16), (outer, stride, 1))
    monkeypatch.setattr(type(x), "data_ptr", lambda self: 256)
    forward._prepare(x, None, None)
    assert found == [alignment]


NO_KERNEL = SimpleNamespace(choose=lambda *_: SimpleNamespace(kernel=None), target={})


@pytest.mark.parametrize(
    ("table", "dtype", "foreign", "says"),
    [
        (NO_KERNEL, torch.float64, "", "there is no forward kernel for torch.float64"),
        (None, torch.bfloat16, "", "this package has no forward kernels"),
        (NO_KERNEL, torch.bfloat16, "these are for an H100", "these are for an H100"),
        (NO_KERNEL, torch.bfloat16, "", "no forward kernel serves rows of 16 torch.bfloat16"),
    ],
)
def test_rows_that_no_kernel_serves_are_pytorchs_and_the_reason_is_told(
    forward: Forward,
    monkeypatch: pytest.MonkeyPatch,
    table: Any,
    dtype: torch.dtype,
    foreign: str,
    says: str,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(forward, "warn", told.append)
    forward._source = cast(Any, lambda _: SimpleNamespace(forward=table))
    monkeypatch.setattr(serve_module, "foreign_device", lambda *_: foreign)
    with FakeTensorMode():
        x = torch.empty(6, 16, device="cuda", dtype=dtype)
    monkeypatch.setattr(type(x), "data_ptr", lambda self: 256)
    assert forward._prepare(x, None, None) is serve_module.aten_forward
    assert told == [f"{says}; using PyTorch's own"]


def test_launch_gets_addresses_extents_and_the_function_for_the_residual(
    driver: FakeDriver, device: FakeDevice
) -> None:
    device.device = -1  # that of CPU tensors
    spec = of_kind("4096x256:bf16").spec(132)
    kernel = LoadedKernel(b"cubin", spec)
    x = torch.empty(3, 5, 2, 256, dtype=torch.bfloat16)[:, :, 0]
    weight = torch.empty(512, dtype=torch.bfloat16)[::2]
    residual = torch.empty(3, 5, 256, dtype=torch.bfloat16)
    call = forward_call(kernel, x, weight, None, row_layout(x), None)
    y, rstd = call(x, weight, None, 1.0, None)
    (first,) = driver.launches
    assert (first.function, first.grid, first.stream) == ("rmsnorm_forward", spec.grid(15), 7)
    copied = first.arguments.weight
    assert copied not in (0, weight.data_ptr())
    addresses = (x.data_ptr(), 0, copied, y.data_ptr(), rstd.data_ptr(), 0)
    eps = torch.finfo(torch.float32).eps
    assert first.arguments == (*addresses, eps, 1.0, 15, 512, 0, 256, 256, 0)
    assert (y.shape, rstd.shape, rstd.dtype) == (x.shape, (3, 5, 1), torch.float32)

    layouts = (row_layout(x), row_layout(residual))
    call = forward_call(kernel, x, None, residual, *layouts)
    y, rstd, stream = call(x, None, 0.5, 0.0, residual)
    second = driver.launches[1]
    assert second.function == "rmsnorm_forward_residual"
    assert second.arguments[1:3] == (residual.data_ptr(), 0)
    assert second.arguments[5:8] == (stream.data_ptr(), 0.5, 0.0)


def test_a_forward_keeps_bindings_of_so_many_streams(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.launch.forward_call.MOST_STREAMS", 3)
    kernel = LoadedKernel(b"cubin", of_kind("4096x256:bf16").spec(132))
    bindings = Bindings(kernel, -1, False, ForwardExtent(15, 256, 0, 256, 256, 0))
    kept = [(bindings[stream], sorted(bindings))[1] for stream in (11, 12, 13, 13, 14, 15)]
    assert kept == [[11], [11, 12], [11, 12, 13], [11, 12, 13], [14], [14, 15]]


def test_forwards_with_and_without_a_residual_may_take_their_shared_memory(
    driver: FakeDriver,
) -> None:
    spec = replace(of_kind("4096x256:bf16").spec(132), smem_bytes=50_000, cluster=16)
    LoadedKernel(b"cubin", spec).load(0)
    kinds = driver.CUfunction_attribute
    size = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    wide = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert driver.attributes == [(size, 50_000), (wide, 1)] * 2
