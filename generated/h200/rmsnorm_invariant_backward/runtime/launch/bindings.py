"""All that the runtime uses of the CUDA driver, from cuda-python.

A package that is exported for Hugging Face's `kernels` has another file of this name, with the same
names by ctypes."""

from cuda.bindings.driver import (
    CUfunction_attribute,
    CUlaunchAttribute,
    CUlaunchAttributeID,
    CUlaunchConfig,
    CUstream_flags,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    cuFuncSetAttribute,
    cuLaunchKernelEx,
    cuMemAlloc,
    cuMemAllocAsync,
    cuMemFreeAsync,
    cuMemsetD8Async,
    cuModuleGetFunction,
    cuModuleLoadData,
    cuOccupancyMaxActiveClusters,
    cuStreamCreate,
    cuStreamDestroy,
    cuStreamGetCaptureInfo,
    cuStreamSynchronize,
    cuThreadExchangeStreamCaptureMode,
)

__all__ = [
    "CUfunction_attribute",
    "CUlaunchAttribute",
    "CUlaunchAttributeID",
    "CUlaunchConfig",
    "CUstreamCaptureMode",
    "CUstreamCaptureStatus",
    "CUstream_flags",
    "cuFuncSetAttribute",
    "cuLaunchKernelEx",
    "cuMemAlloc",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuOccupancyMaxActiveClusters",
    "cuStreamCreate",
    "cuStreamDestroy",
    "cuStreamGetCaptureInfo",
    "cuStreamSynchronize",
    "cuThreadExchangeStreamCaptureMode",
]
