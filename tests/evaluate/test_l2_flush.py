"""The cache flush's requests to the driver. Its effect on a cache is in
tests/evaluate/test_gpu.py."""

# ruff: noqa: N802 (the fake driver has the names of the real one)

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.evaluate.gpu import l2_flush as cold
from generator.evaluate.gpu.l2_flush import ColdCache
from normforge.launch import driver as driver_module
from normforge.launch.driver import LaunchError

OK, REFUSED = 0, SimpleNamespace(name="CUDA_ERROR_NO_BINARY_FOR_GPU")


class FakeDriver:
    """Records launches: grid, threads, stream, the kernel's argument."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int, int]] = []
        self.loading: Any = OK
        self.CUlaunchConfig = SimpleNamespace

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        assert cubin[:4] == b"\x7fELF"
        return self.loading, cubin

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        assert name in module
        return OK, name

    def cuLaunchKernelEx(self, config: Any, function: bytes, at: int, extra: int) -> tuple[Any]:
        pointer = ctypes.cast(at, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        place = pointer[0][0]
        self.launches.append((config.gridDimX, config.blockDimX, config.hStream, place))
        return (OK,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cold, "cuda_driver", lambda: fake)
    monkeypatch.setattr(driver_module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return fake


@pytest.mark.parametrize("size", [4, 1024, 1 << 20])
def test_flush_reads_half_of_what_it_writes_with_priority(driver: FakeDriver, size: int) -> None:
    cache = ColdCache(torch.device("cpu"), size)
    cache.flush(3.0)
    ((grid, threads, stream, place),) = driver.launches
    assert grid * threads * 16 == cache._read.numel()
    assert size // 2 <= cache._read.numel() <= max(size // 2, 16 * threads)
    assert (place, stream) == (cache._read.data_ptr(), 7)
    assert not cache._read.any(), "the kernel writes nothing where it finds zeros"
    assert cache._written.nbytes == size
    assert bool((cache._written == 3.0).all())


@pytest.mark.parametrize(("l2_mib", "flush_mib"), [(50, 256), (60, 256), (129, 516)])
def test_flush_is_as_large_as_the_l2_needs(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, l2_mib: int, flush_mib: int
) -> None:
    properties = SimpleNamespace(L2_cache_size=l2_mib << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("meta")  # meta tensors have no such memory

    def place(tensor: Any) -> int:
        return 0

    monkeypatch.setattr(torch.Tensor, "data_ptr", place)
    cache = ColdCache(device)
    assert cache.flush_bytes == cache._written.nbytes == flush_mib << 20
    assert cache._read.nbytes >= 2 * (l2_mib << 20)


def test_refused_kernel_is_an_error(driver: FakeDriver) -> None:
    driver.loading = REFUSED
    with pytest.raises(LaunchError, match="CUDA_ERROR_NO_BINARY_FOR_GPU while loading displace"):
        ColdCache(torch.device("cpu"), 1024)
