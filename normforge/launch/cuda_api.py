"""All that the runtime's Python uses of the CUDA driver, from cuda-python.

A package that is exported for Hugging Face's `kernels` has another file of this name, with the same
names by ctypes."""

# ruff: noqa: F401
from cuda.bindings.driver import (
    CUfunction_attribute,
    CUlaunchAttribute,
    CUlaunchAttributeID,
    CUlaunchConfig,
    CUstream_flags,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    CUuserObject_flags,
    CUuserObjectRetain_flags,
    cuFuncSetAttribute,
    cuGraphRetainUserObject,
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
    cuUserObjectCreate,
)
