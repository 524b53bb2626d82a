"""No call after a warmup loads a kernel or takes device memory. Tensors of the CPU say that they
are on a GPU, and the driver counts."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from generator.package.files import write_cubins
from normforge.api import Package
from normforge.frontends import package as package_module
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.launch import forward_call
from normforge.serve import call, rows
from normforge.serve.options import Arguments, Options
from normforge.spec import ForwardSpec, KernelSpec
from normforge.table import (
    FORWARD_TABLE,
    TABLE,
    ForwardKernel,
    ForwardTable,
    ForwardTuned,
    Kernel,
    Table,
    Tuned,
)
from tests.support.accuracy import DTYPES
from tests.support.fake_driver import SPEC, TARGET, TWO_KERNELS, FakeDriver, stand_in

STREAM = 7
NARROW = replace(SPEC, N=512, partial_columns=512, partial_stride=512)
KERNELS = (
    SPEC,
    replace(SPEC, name="wide weight", weight_dtype="fp32", **TWO_KERNELS, cluster=2),
    replace(SPEC, name="offset", offset=True),
    replace(SPEC, name="residual", residual="bf16"),
    replace(SPEC, name="wide weight and residual", weight_dtype="fp32", residual="fp32"),
    replace(NARROW, name="512 columns"),
    replace(NARROW, name="512 columns, wide weight", weight_dtype="fp32"),
    replace(NARROW, name="512 columns, both", weight_dtype="fp32", residual="fp32"),
    replace(
        NARROW, name="256 columns", N=256, partial_columns=256, partial_stride=256, residual="bf16"
    ),
)
"""Kernels of the backward. Rows of 256 columns have no kernel without a residual."""


class Device(FakeDriver):
    """Counts what is loaded, by the text of the cubins, and what memory is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.taken: list[int] = []

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        self.loaded.append(image.decode())
        return super().cuModuleLoadData(image)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return cuda.CUresult.CUDA_SUCCESS, module.decode()

    def cuLaunchKernelEx(  # noqa: N802
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        assert int(config.hStream) == STREAM
        self.launched.append(function)
        return (self.status,)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        self.taken.append(size)
        return super().cuMemAlloc(size)

    @property
    def costs(self) -> tuple[int, int]:
        return len(self.loaded), len(self.taken)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on the GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    is_cuda = True

    def get_device(self) -> int:
        return 0


def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, on_cpu = Device(), torch.empty
    stand_in(monkeypatch, made)
    for user in (call, forward_call, rows):
        monkeypatch.setattr(user, "is_capturing", lambda: False)
    for user in (package_module, call, forward_call, rows):
        monkeypatch.setattr(user, "raw_stream", lambda device: STREAM)
    for user in (call, forward_call, rows):
        monkeypatch.setattr(user, "current_device", lambda: 0)
        monkeypatch.setattr(user, "empty_strided", empty)
    monkeypatch.setattr(torch, "empty", lambda size, device: on_cpu(size))
    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    for name, answer in (
        *(("is_available", True), ("current_device", 0), ("device", nullcontext())),
        ("get_device_properties", here),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return made


def stored(spec: Any) -> tuple[str, str]:
    """The file and digest of a cubin that is its own name."""
    return spec.name, hashlib.sha256(spec.name.encode()).hexdigest()[:16]


def backward_entry(spec: KernelSpec) -> Tuned:
    kernel = Kernel(*stored(spec), spec)
    return Tuned(4096, spec.N, spec.dtype, spec.weight_dtype, "measured", kernel, {})


def forward_entry(N: int, dtype: str, weight_dtype: str) -> ForwardTuned:
    name = f"forward {N} {dtype} {weight_dtype}"
    spec = ForwardSpec(name, N, True, dtype, weight_dtype, 128, 0, 16, 1, 1, 1, 0, 132)
    kernel = ForwardKernel(*stored(spec), spec)
    return ForwardTuned(4096, N, dtype, weight_dtype, "measured", kernel, {})


@pytest.fixture
def package(device: Device, tmp_path: Path) -> Package:
    tuned = tuple(backward_entry(spec) for spec in KERNELS)
    (tmp_path / TABLE).write_text(json.dumps(Table(TARGET, tuned, ()).to_json()))
    forwards = tuple(
        forward_entry(N, *dtypes)
        for N in (1024, 512, 256)
        for dtypes in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    )
    (tmp_path / FORWARD_TABLE).write_text(json.dumps(ForwardTable(TARGET, forwards).to_json()))
    names = [entry.kernel.file for entry in [*tuned, *forwards]]
    write_cubins(tmp_path, {name: name.encode() for name in names})
    return Package(tmp_path)


@pytest.fixture
def layer_norm(device: Device, tmp_path: Path) -> LayerNormPackage:
    """A package of LayerNorm with such kernels, and beside it one of the forward."""

    def of(spec: KernelSpec, operation: str, sums: int, **facts: Any) -> Tuned:
        wide = {"partial_columns": sums * spec.N, "partial_stride": sums * spec.N}
        return backward_entry(replace(spec, operation=operation, **wide, **facts))

    dtypes = (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    named = [
        (spec, f"forward {spec.N} {x} {w}", x, w) for spec in (SPEC, NARROW) for x, w in dtypes
    ]
    without = {"strategy": "none", "way": ""}
    tables = {
        "layernorm_backward": [of(spec, "layernorm_backward", 2) for spec in KERNELS],
        "layernorm_forward": [
            of(spec, "layernorm_forward", 0, name=name, dtype=x, weight_dtype=w, **without)
            for spec, name, x, w in named
        ],
    }
    for operation, entries in tables.items():
        (tmp_path / operation).mkdir()
        table = json.dumps(Table(TARGET, tuple(entries), ()).to_json())
        (tmp_path / operation / TABLE).write_text(table)
        files = [entry.kernel.file for entry in entries]
        write_cubins(tmp_path / operation, {file: file.encode() for file in files})
    return LayerNormPackage(tmp_path / "layernorm_backward")


def step_of_layer_norm(
    package: LayerNormPackage,
    M: int,
    N: int,
    dtype: str = "bf16",
    weight_dtype: str = "bf16",
    *,
    residual: str | None = None,
) -> None:
    """One forward of rows, or of their sum with a residual, and one backward."""
    stream = None if residual is None else tensor(M, N, dtype=residual)
    x, dy = (tensor(M, N, dtype=dtype) for _ in range(2))
    weight, bias = (tensor(N, dtype=weight_dtype) for _ in range(2))
    package._kernels(x if stream is None else stream, weight, bias, 1e-5)
    rstd, mean = (tensor(M, 1, dtype="fp32") for _ in range(2))
    package._run(Arguments(dy, x, rstd, weight, stream, mean=mean), Options())


@pytest.mark.parametrize("shape", [(9, 1024, "bf16"), (9, 1024, "bf16", "fp32"), (7, 512, "bf16")])
@pytest.mark.parametrize("residual", [None, "bf16", "fp32"])
def test_after_a_warmup_a_layer_norm_loads_nothing_and_takes_no_memory(
    layer_norm: LayerNormPackage, device: Device, shape: tuple[Any, ...], residual: str | None
) -> None:
    layer_norm.warmup([shape], residual=residual)
    loaded, ready = list(device.loaded), device.costs
    assert device.launched == []
    step_of_layer_norm(layer_norm, *shape, residual=residual)
    assert device.costs == ready and sorted(set(device.launched)) == sorted(loaded)
    # A sum in fp32 whose weight is bf16 has no kernel.
    forwards = [name for name in loaded if name.startswith("forward")]
    narrow_weight = residual == "fp32" and len(shape) == 3
    assert len(forwards) == (not narrow_weight) and len(loaded) == len(forwards) + 1


def test_layer_norms_that_were_not_warmed_up_pay(
    layer_norm: LayerNormPackage, device: Device
) -> None:
    step_of_layer_norm(layer_norm, 4096, 1024)
    assert len(device.loaded) == 2 and len(device.taken) >= 1


def test_warmup_of_a_layer_norm_on_another_gpu_or_without_a_forward(
    layer_norm: LayerNormPackage, device: Device
) -> None:
    source = layer_norm._kernels.server.source
    assert not isinstance(source, str)
    source(None).backward.target["arch"] = layer_norm.table.target["arch"] = "sm_80"
    layer_norm.warmup([(4096, 1024, "bf16")])
    layer_norm._kernels.by(lambda: "there are none")
    layer_norm.warmup([(4096, 1024, "bf16")])
    assert device.costs == (0, 0)


def tensor(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    """Zeros at an address that suits every kernel."""
    memory = torch.zeros(torch.Size(shape).numel() + 16, dtype=DTYPES[dtype])
    skip = -memory.data_ptr() % 32 // memory.element_size()
    return memory[skip : skip + torch.Size(shape).numel()].view(shape).as_subclass(OnGpu)


def step(
    package: Package,
    M: int,
    N: int,
    dtype: str = "bf16",
    weight_dtype: str = "bf16",
    *,
    offset: bool = False,
    residual: str | None = None,
) -> None:
    """One forward and one backward."""
    x, dy = (tensor(M, N, dtype=dtype) for _ in range(2))
    stream = None if residual is None else tensor(M, N, dtype=residual)
    weight = tensor(N, dtype=weight_dtype)
    package._forward(x, weight, 1e-6, float(offset), stream)
    rstd = tensor(M, 1, dtype="fp32")
    options = Options(weight_offset=float(offset))
    package._run(Arguments(dy, x, rstd, weight, stream), options)


SHAPES = ((4096, 1024, "bf16", "bf16"), (33, 1024, "bf16", "fp32"), (700, 512, "bf16", "bf16"))
CALL_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"offset": True},
    {"residual": "bf16"},
    {"residual": "fp32"},
    {"offset": True, "residual": "bf16"},
    {"offset": True, "residual": "fp32"},
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call_options", CALL_OPTIONS, ids=str)
def test_after_a_warmup_a_call_loads_nothing_and_takes_no_memory(
    package: Package, device: Device, shape: tuple[Any, ...], call_options: dict[str, Any]
) -> None:
    package.warmup([shape], **call_options)
    ready = device.costs
    assert device.launched == []
    step(package, *shape, **call_options)
    assert device.costs == ready
    assert sorted(set(device.launched)) == sorted(device.loaded), "and nothing else was loaded"


@pytest.mark.parametrize("call_options", CALL_OPTIONS, ids=str)
def test_calls_that_were_not_warmed_up_pay(
    package: Package, device: Device, call_options: dict[str, Any]
) -> None:
    """The test above would otherwise hold for anything."""
    step(package, 4096, 1024, **call_options)
    assert len(device.loaded) == 2
    assert len(device.taken) >= 1
    ready = device.costs
    package.warmup([(4096, 1024, "bf16")], **call_options)
    assert device.costs == ready, "what is there is kept"


def test_another_shape_loads_its_own(package: Package, device: Device) -> None:
    package.warmup([SHAPES[0]])
    assert device.loaded == ["forward 1024 bf16 bf16", "example"]
    step(package, *SHAPES[2])
    assert device.loaded[2:] == ["forward 512 bf16 bf16", "512 columns"]
    step(package, *SHAPES[1])
    assert device.loaded[4:] == ["forward 1024 bf16 fp32", "wide weight"]


def test_more_rows_take_more_memory(package: Package, device: Device) -> None:
    package.warmup([(4, 1024, "bf16")])
    before = len(device.taken)
    package.warmup([(4, 1024, "bf16")])
    assert len(device.taken) == before
    package.warmup([(4096, 1024, "bf16")])
    assert len(device.taken) > before
    assert len(device.loaded) == 2


def test_kernels_with_options_are_those_of_explain(package: Package, device: Device) -> None:
    shape = (4096, 1024, torch.bfloat16)
    for call_options in ({"offset": True}, {"residual": torch.bfloat16}):
        package.warmup([shape], **call_options)
        assert device.loaded[-1] == package.explain(*shape, **call_options)["kernel"]
    assert device.loaded == ["forward 1024 bf16 bf16", "offset", "residual"]


@pytest.mark.parametrize(
    ("shape", "call_options", "loaded"),
    [
        ((9, 1024, "bf16"), {"residual": "fp32"}, ["forward 1024 fp32 fp32", "example"]),
        (
            (9, 1024, "bf16"),
            {"residual": "bf16", "offset": True},
            ["forward 1024 bf16 bf16", "offset"],
        ),
        (
            (9, 1024, "bf16", "fp32"),
            {"residual": "fp32", "offset": True},
            ["forward 1024 fp32 fp32", "wide weight and residual"],
        ),
        ((9, 256, "bf16"), {"residual": "bf16"}, ["forward 256 bf16 bf16", "256 columns"]),
        ((9, 256, "bf16"), {}, ["forward 256 bf16 bf16"]),
        (
            (9, 512, "bf16"),
            {"residual": "fp32", "offset": True},
            ["forward 512 fp32 fp32", "512 columns, wide weight"],
        ),
        ((9, 300, "bf16"), {}, []),
    ],
)
def test_options_without_a_kernel_get_what_they_are_composed_of(
    package: Package, device: Device, shape: Any, call_options: dict[str, Any], loaded: list[str]
) -> None:
    package.warmup([shape], **call_options)
    assert device.loaded == loaded


@pytest.mark.parametrize("N", [1024, 300])
def test_no_rows_need_nothing(package: Package, device: Device, N: int) -> None:
    for call_options in CALL_OPTIONS:
        package.warmup([(0, N, "bf16")], **call_options)
    assert device.costs == (0, 0)
    package.warmup([(0, N, "bf16"), SHAPES[0]])
    assert device.costs[0] == 2


@pytest.mark.parametrize(
    ("shapes", "call_options", "sentence"),
    [
        ([(-1, 1024, "bf16")], {}, "M must be at least 0 and N at least 1, got M=-1 and N=1024"),
        ([(0, 0, "bf16")], {}, "got M=0 and N=0"),
        ([(1, 1024, "int8")], {}, "dtype must be one of bf16, fp16, fp32, got int8"),
        ([(1, 1024, "bf16", torch.int8)], {}, "got torch.int8"),
        ([], {"residual": "fp64"}, "got fp64"),
    ],
)
def test_shapes_that_there_cannot_be_are_refused_before_anything_is_loaded(
    package: Package, device: Device, shapes: Any, call_options: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        package.warmup([SHAPES[0], *shapes], **call_options)
    assert device.costs == (0, 0)


def test_machine_without_cuda_is_told_in_one_sentence(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^warmup needs a CUDA device, and PyTorch finds none$"):
        package.warmup([SHAPES[0]])


def test_gpu_of_another_kind_loads_nothing(package: Package, device: Device) -> None:
    package.table.target["arch"] = "sm_80"
    package._forward.table.target["arch"] = "sm_80"  # type: ignore[union-attr]
    package.warmup(SHAPES, offset=True)
    assert device.costs == (0, 0)
