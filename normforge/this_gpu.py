"""The GPUs of this process, as PyTorch will see them, asked without initialising CUDA."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A GPU of this process. sms: its number of SMs, 0 while that is not known."""

    name: str
    capability: tuple[int, int]
    sms: int = 0


def find_gpu() -> Gpu | None:
    """PyTorch's current GPU, or the one that it will use once CUDA is initialised. None without a
    GPU."""
    if torch.version.cuda is None:
        return None
    if not torch.cuda.is_initialized():
        try:
            return _first_visible(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip())
        except Exception:  # no NVML, or it cannot tell which device that is: ask CUDA itself
            pass
    return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else None


def gpu_of(device: int) -> Gpu:
    """The GPU of an index, once CUDA is initialised."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, capability, properties.multi_processor_count)


def _first_visible(device: str) -> Gpu | None:
    """A device by its index or UUID, asked of NVML, which initialises nothing of CUDA."""
    if device in ("", "-1"):
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID
        if device.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            all_of_them = map(by_index, range(pynvml.nvmlDeviceGetCount()))
            if len(set(map(pynvml.nvmlDeviceGetName, all_of_them))) > 1:
                raise LookupError("CUDA has the fastest GPU first, and NVML counts along the bus")
        handle = by_index(int(device)) if device.isdigit() else by_uuid(device)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(str(pynvml.nvmlDeviceGetName(handle)), (major, minor))
    finally:
        pynvml.nvmlShutdown()
