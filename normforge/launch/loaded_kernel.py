"""Loads a cubin: the functions of one variant on each device, and their configurations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..spec import FORWARD_KERNELS, SUM_KERNEL, UNBOUNDED, ForwardSpec, KernelSpec
from ..table import ForwardKernel, Kernel
from .driver import checked, cluster_attribute, configure, cuda_driver, during_capture

PORTABLE_CLUSTER = 8
"""Largest cluster that every GPU with clusters takes without opting in (CUDA programming guide)."""
_MOST_CONFIGS = 4096


class LoadedKernel:
    """One variant, forward or backward, loaded on each device when it is first launched there.

    Safe to share between threads. A launch needs the device to be the thread's current one and its
    context to exist, which is so after any PyTorch call that reached the device.
    """

    def __init__(
        self,
        cubin: bytes,
        spec: KernelSpec | ForwardSpec,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """warn: is told when the device has no room for all clusters at once."""
        self.cubin = cubin
        self.spec: Any = spec
        self._warn = warn
        self._lock = threading.Lock()
        self._functions: dict[int, tuple[Any, Any]] = {}
        # Made once for a grid and a stream and never written to again, so threads share them.
        self.main_config = lru_cache(_MOST_CONFIGS)(self._main_config)
        self.sum_config = lru_cache(_MOST_CONFIGS)(self._sum_config)

    def load(self, device: int) -> tuple[Any, Any]:
        """The two functions of the variant on the current device, whose index is `device`: of a
        backward the main kernel and the second one (None without one), of a forward that without
        and that with a residual. Loads the cubin at the first call.

        Raises LaunchError when the driver refuses the cubin or its shared memory or cluster.
        """
        functions = self._functions.get(device)
        if functions is not None:
            return functions
        with self._lock:
            fresh = device not in self._functions
            if fresh:
                with during_capture(self.spec.name):
                    self._functions[device] = self._load()
            functions = self._functions[device]
        waits = isinstance(self.spec, KernelSpec) and self.spec.sms != UNBOUNDED
        if fresh and self._warn and self.spec.cluster > 1 and waits:
            self._warn_of_waves(functions[0], self._warn)
        return functions

    def _load(self) -> tuple[Any, Any]:
        driver, name = cuda_driver(), self.spec.name
        module = checked(driver.cuModuleLoadData(self.cubin), "loading", name)

        def function(kernel: str) -> Any:
            found = driver.cuModuleGetFunction(module, kernel.encode())
            return checked(found, "loading", name)

        if isinstance(self.spec, ForwardSpec):
            plain, with_residual = map(function, FORWARD_KERNELS)
            self._allow(plain)
            self._allow(with_residual)
            return plain, with_residual
        main = function(self.spec.operation)
        self._allow(main)
        return main, function(SUM_KERNEL) if self.spec.has_second_kernel else None

    def _allow(self, function: Any) -> None:
        """Opt in to the shared memory and the cluster of a function."""
        driver, spec = cuda_driver(), self.spec
        attributes = driver.CUfunction_attribute
        if spec.smem_bytes:
            size = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            action = f"allowing {spec.smem_bytes} bytes of shared memory for"
            checked(driver.cuFuncSetAttribute(function, size, spec.smem_bytes), action, spec.name)
        if spec.cluster > PORTABLE_CLUSTER:
            wide = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            action = f"allowing clusters of {spec.cluster} for"
            checked(driver.cuFuncSetAttribute(function, wide, 1), action, spec.name)

    def _warn_of_waves(self, main: Any, warn: Callable[[str], None]) -> None:
        """Warn where not all clusters fit at once. GPUs of one model differ in how many SMs each of
        their GPCs has, and a cluster lives in one GPC."""
        spec = self.spec
        attributes = [cluster_attribute(spec.cluster)]
        config = configure(spec.cluster, spec.threads, spec.smem_bytes, 0, attributes)
        status, room = cuda_driver().cuOccupancyMaxActiveClusters(main, config)
        if status == 0 and 0 < room < spec.participants:  # with no room at all, the launch says why
            warn(
                f"{spec.name} runs {spec.participants} clusters of {spec.cluster} CTAs, and this "
                f"GPU has room for {room} at once: right but slow here, tune for this very GPU"
            )

    def _main_config(self, grid: int, stream: int) -> Any:
        """The launch configuration of a forward, or of the main kernel of a backward, on a raw
        stream."""
        spec = self.spec
        attributes = [cluster_attribute(spec.cluster)] if spec.cluster > 1 else []
        return configure(grid, spec.threads, spec.smem_bytes, stream, attributes)

    def _sum_config(self, grid: int, stream: int) -> Any:
        """Return the launch configuration of the second kernel of a backward, on a raw stream."""
        attributes = []
        if self.spec.dependent:
            driver = cuda_driver()
            early = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        return configure(grid, self.spec.sum_threads, 0, stream, attributes)


class LoadedKernels:
    """The kernels of a package as they get loaded, one object each. Thread-safe."""

    def __init__(self, package: Path, warn: Callable[[str], None]) -> None:
        self._package, self._warn = package, warn
        self._lock = threading.Lock()
        self._loaded: dict[Kernel | ForwardKernel, LoadedKernel] = {}

    def get(self, kernel: Kernel | ForwardKernel) -> LoadedKernel:
        """Raises RuntimeError when the kernel's machine code cannot be read."""
        with self._lock:
            if kernel not in self._loaded:
                cubin = kernel.read_cubin(self._package)
                self._loaded[kernel] = LoadedKernel(cubin, kernel.spec, self._warn)
            return self._loaded[kernel]
