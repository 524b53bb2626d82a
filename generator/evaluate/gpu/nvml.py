"""Asks NVML about causes of noise on a GPU: other processes, and clocks that are held back.

Needs the package nvidia-ml-py and NVIDIA's driver; where one is missing, nothing is asked and
`reason` says so. NVML needs no CUDA context, so the parent process may ask.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_HELD_BACK = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat (driver)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSwPowerCap": "power cap",
}


class DeviceMonitor:
    """One GPU. bus_id: its PCI bus id, for example "0000:1b:00.0" (indices of NVML and of CUDA
    differ); None when it is not known. reason: why NVML cannot be asked, "" when it can."""

    def __init__(self, bus_id: str | None) -> None:
        self._device: Any = None
        self.reason = ""
        try:
            import pynvml
        except ImportError:
            self.reason = "the package nvidia-ml-py is not installed"
            return
        self._nvml = pynvml
        if bus_id is None:
            self.reason = "the GPU's bus id is not known"
            return
        try:
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        except pynvml.NVMLError as error:
            self.reason = str(error)

    def causes(self, own: Collection[int]) -> tuple[str, ...]:
        """Return what may disturb measurements right now, in words; () when nothing does or NVML
        cannot be asked. own: process ids of the tuner's workers on this GPU."""
        return (*self._others(own), *self._clocks()) if self._device is not None else ()

    def _others(self, own: Collection[int]) -> list[str]:
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except self._nvml.NVMLError:
            return []
        seen = {process.pid for process in running}
        others = sorted(seen - set(own))
        if not seen & set(own):
            # In a container, NVML gives the host's process ids: only their number helps.
            count = len(seen) - len(own)
            return [f"{count} other processes on the GPU"] if count > 0 else []
        return [f"other processes on the GPU (pid {', '.join(map(str, others))})"] if others else []

    def _clocks(self) -> list[str]:
        try:
            reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._device)
        except self._nvml.NVMLError:
            return []
        held = [
            words for name, words in _HELD_BACK.items() if reasons & getattr(self._nvml, name, 0)
        ]
        return [f"clocks held back by {', '.join(held)}"] if held else []
