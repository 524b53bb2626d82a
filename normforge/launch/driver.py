"""The CUDA driver: statuses as errors, captures, launch configurations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or to launch a kernel.

    code: the driver's name of the error, for example CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES.
    """

    def __init__(self, code: str, action: str, kernel: str) -> None:
        super().__init__(f"{code} while {action} {kernel}")
        self.code = code


@cache
def cuda_driver() -> Any:
    """The driver's functions, types and constants, imported when they are first needed."""
    from . import cuda_api

    return cuda_api


def checked(status_and_values: tuple[Any, ...], action: str, kernel: str) -> Any:
    """The value of a driver call. Raises LaunchError when its status is no success."""
    status, *values = status_and_values
    if status != 0:
        raise LaunchError(status.name, action, kernel)
    return values[0] if values else None


@contextmanager
def during_capture(kernel: str) -> Iterator[None]:
    """Lets this thread load modules and allocate memory while a stream is being captured.

    A capture in the mode `global` forbids such calls to every thread and one in `thread_local` to
    its own, because they might synchronise with the captured stream. Those made here do not: they
    work on a stream of their own, and what they do happens now, once, and not in the graph.
    """
    driver = cuda_driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    action = "changing the capture mode for"
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), action, kernel)
    try:
        yield
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before), action, kernel)


def cluster_attribute(ctas: int) -> Any:
    """The attribute of a launch in clusters of so many CTAs."""
    driver = cuda_driver()
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = cluster.value.clusterDim
    dimension.x, dimension.y, dimension.z = ctas, 1, 1
    return cluster


def configure(grid: int, threads: int, smem_bytes: int, stream: int, attributes: list[Any]) -> Any:
    """A launch configuration. stream: its raw handle."""
    config = cuda_driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config
