"""An L2 cache that holds nothing of what is timed next."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from generator.errors import NormforgeError
from generator.kernels.nvrtc import compile_source
from normforge.launch.driver import checked, configure, cuda_driver

FLUSH_BYTES = 256 << 20
"""Bytes written before every timed operation, and more where the L2 needs it."""

_THREADS = 256
_KERNEL = "displace"
_SOURCE = (
    'extern "C" __global__ void '
    + _KERNEL
    + r"""(uint4* from) {
  uint4* place = from + (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  unsigned long long policy;
  uint4 v;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place), "l"(policy) : "memory");
  if (v.x | v.y | v.z | v.w) *place = uint4{};  // they are 0: this keeps the load alive
}
"""
)


class ColdCache:
    """Memory of one device that displaces everything else in its L2. Raises NormforgeError when the
    kernel that reads does not compile, LaunchError when the driver refuses it.

    Writes of `flush_bytes` displace ordinary lines, but not what a kernel has read with the
    priority evict_last, which the next operation on the same inputs would find. Reads with that
    priority, of half as many bytes, come first and displace it, too.
    """

    def __init__(self, device: torch.device, flush_bytes: int | None = None) -> None:
        """flush_bytes: by default FLUSH_BYTES, or what makes the reads at least twice the L2."""
        self.device = device
        if flush_bytes is None:
            l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            flush_bytes = max(FLUSH_BYTES, 4 * l2_bytes)
        self.flush_bytes = flush_bytes
        self._written = torch.empty(flush_bytes // 4, dtype=torch.float32, device=device)
        chunk = 16 * _THREADS
        self._grid = max(1, flush_bytes // 2 // chunk)
        self._read = torch.zeros(self._grid * chunk, dtype=torch.uint8, device=device)
        self._place = ctypes.c_void_p(self._read.data_ptr())
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._place))
        with torch.cuda.device(device):
            self._function = _load()

    def flush(self, value: float) -> None:
        """Displace everything, on the current stream. value: what is written."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config = configure(self._grid, _THREADS, 0, stream, [])
        arguments = ctypes.addressof(self._arguments)
        with torch.cuda.device(self.device):
            launched = cuda_driver().cuLaunchKernelEx(config, self._function, arguments, 0)
        checked(launched, "launching", _KERNEL)
        self.write(value)

    def write(self, value: float) -> None:
        """The writes alone, which leave in place what was read with the priority evict_last."""
        self._written.fill_(value)


def _load() -> Any:
    """The kernel that reads, loaded on the current device."""
    driver, action = cuda_driver(), "loading"
    major, minor = torch.cuda.get_device_capability()
    compiled = compile_source(_SOURCE, f"sm_{major}{minor}")
    if compiled.error:
        raise NormforgeError(f"the kernel of the cache flush does not compile: {compiled.error}")
    module = checked(driver.cuModuleLoadData(compiled.cubin), action, _KERNEL)
    return checked(driver.cuModuleGetFunction(module, _KERNEL.encode()), action, _KERNEL)
