"""All that the runtime uses of the CUDA driver, by ctypes: no cuda-python is needed.

Names, arguments and results are those of cuda.bindings.driver: a function returns its status, then
its values. Handles and addresses are plain numbers. Signatures and structures are those of cuda.h,
whose macros choose the versions of functions that have several.
"""

# ruff: noqa: N802 (the names are the driver's)

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

LIBRARY = "libcuda.so.1"


def _function(name: str, *arguments: Any) -> Any:
    """A function of the driver. Raises RuntimeError where there is none."""
    try:
        found = getattr(_library, name)
    except AttributeError as error:
        raise RuntimeError(f"the CUDA driver has no {name} ({error}): it is too old") from error
    found.argtypes, found.restype = arguments, c_int
    return found


try:
    _library = ctypes.CDLL(LIBRARY)
except OSError as error:
    raise RuntimeError(f"there is no CUDA driver ({error})") from error


# ---- Statuses and constants ----------------------------------------------------------------------


class CUresult(int):
    """A status of the driver, 0 for success."""

    @property
    def name(self) -> str:
        """The driver's name of it, for example CUDA_ERROR_OUT_OF_MEMORY."""
        text = c_char_p()
        _error_name(self, byref(text))
        return text.value.decode() if text.value else f"CUDA error {int(self)}"


class _Statuses(dict[int, CUresult]):
    """One object per status, made when it first comes."""

    def __missing__(self, code: int) -> CUresult:
        found = self[code] = CUresult(code)
        return found


_status = _Statuses()
_error_name = _function("cuGetErrorName", c_int, POINTER(c_char_p))


class CUfunction_attribute(IntEnum):  # noqa: N801
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUstreamCaptureStatus(IntEnum):
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class CUstream_flags(IntEnum):  # noqa: N801
    CU_STREAM_NON_BLOCKING = 1


class CUuserObject_flags(IntEnum):  # noqa: N801
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1


class CUuserObjectRetain_flags(IntEnum):  # noqa: N801
    CU_GRAPH_USER_OBJECT_MOVE = 1


# ---- Launches ------------------------------------------------------------------------------------


class _Dimension(ctypes.Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class _LaunchAttributeValue(ctypes.Union):
    _fields_ = (
        ("pad", c_ubyte * 64),
        ("clusterDim", _Dimension),
        ("programmaticStreamSerializationAllowed", c_int),
    )


class CUlaunchAttribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_ubyte * 4), ("value", _LaunchAttributeValue))


class CUlaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, c_uint) for name in ("gridDimX", "gridDimY", "gridDimZ")),
        *((name, c_uint) for name in ("blockDimX", "blockDimY", "blockDimZ")),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("_attributes", POINTER(CUlaunchAttribute)),
        ("numAttrs", c_uint),
    )

    @property
    def attrs(self) -> Any:
        """The launch attributes, as a pointer; what is set is a list, which is copied."""
        return self._attributes

    @attrs.setter
    def attrs(self, attributes: Sequence[CUlaunchAttribute]) -> None:
        array = (CUlaunchAttribute * len(attributes))(*attributes)
        self._attributes = array if attributes else None  # the structure keeps the array

    def getPtr(self) -> int:
        """Its address."""
        return ctypes.addressof(self)


_launch = _function("cuLaunchKernelEx", POINTER(CUlaunchConfig), c_void_p, c_void_p, c_void_p)
_clusters = _function(
    "cuOccupancyMaxActiveClusters", POINTER(c_int), c_void_p, POINTER(CUlaunchConfig)
)


def cuLaunchKernelEx(
    config: CUlaunchConfig, function: int, parameters: int, extra: int
) -> tuple[CUresult]:
    return (_status[_launch(config, function, parameters, extra)],)


def cuOccupancyMaxActiveClusters(function: int, config: CUlaunchConfig) -> tuple[CUresult, int]:
    count = c_int()
    return _status[_clusters(byref(count), function, config)], count.value


# ---- Modules -------------------------------------------------------------------------------------

_load = _function("cuModuleLoadData", POINTER(c_void_p), c_char_p)
_find = _function("cuModuleGetFunction", POINTER(c_void_p), c_void_p, c_char_p)
_set_attribute = _function("cuFuncSetAttribute", c_void_p, c_int, c_int)


def cuModuleLoadData(image: bytes) -> tuple[CUresult, int | None]:
    module = c_void_p()
    return _status[_load(byref(module), image)], module.value


def cuModuleGetFunction(module: int, name: bytes) -> tuple[CUresult, int | None]:
    function = c_void_p()
    return _status[_find(byref(function), module, name)], function.value


def cuFuncSetAttribute(function: int, attribute: int, value: int) -> tuple[CUresult]:
    return (_status[_set_attribute(function, attribute, value)],)


# ---- Memory --------------------------------------------------------------------------------------

_allocate = _function("cuMemAlloc_v2", POINTER(c_uint64), c_size_t)
_allocate_async = _function("cuMemAllocAsync", POINTER(c_uint64), c_size_t, c_void_p)
_free_async = _function("cuMemFreeAsync", c_uint64, c_void_p)
_set = _function("cuMemsetD8Async", c_uint64, c_ubyte, c_size_t, c_void_p)


def cuMemAlloc(size: int) -> tuple[CUresult, int]:
    address = c_uint64()
    return _status[_allocate(byref(address), size)], address.value


def cuMemAllocAsync(size: int, stream: int) -> tuple[CUresult, int]:
    address = c_uint64()
    return _status[_allocate_async(byref(address), size, stream)], address.value


def cuMemFreeAsync(address: int, stream: int) -> tuple[CUresult]:
    return (_status[_free_async(address, stream)],)


def cuMemsetD8Async(address: int, value: int, count: int, stream: int) -> tuple[CUresult]:
    return (_status[_set(address, value, count, stream)],)


# ---- Streams -------------------------------------------------------------------------------------

_create = _function("cuStreamCreate", POINTER(c_void_p), c_uint)
_destroy = _function("cuStreamDestroy_v2", c_void_p)
_wait = _function("cuStreamSynchronize", c_void_p)
_exchange_mode = _function("cuThreadExchangeStreamCaptureMode", POINTER(c_int))
_capture_info = _function(
    "cuStreamGetCaptureInfo_v2",
    *(c_void_p, POINTER(c_int), POINTER(c_uint64)),
    *(POINTER(c_void_p), c_void_p, c_void_p),
)
_user_object = _function(
    "cuUserObjectCreate", POINTER(c_void_p), c_void_p, c_void_p, c_uint, c_uint
)
_retain = _function("cuGraphRetainUserObject", c_void_p, c_void_p, c_uint, c_uint)


def cuStreamCreate(flags: int) -> tuple[CUresult, int | None]:
    stream = c_void_p()
    return _status[_create(byref(stream), flags)], stream.value


def cuStreamDestroy(stream: int) -> tuple[CUresult]:
    return (_status[_destroy(stream)],)


def cuStreamSynchronize(stream: int) -> tuple[CUresult]:
    return (_status[_wait(stream)],)


def cuStreamGetCaptureInfo(stream: int) -> tuple[CUresult, int, int, int | None]:
    """The status, the id and the graph of the capture; the rest is not asked for."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    code = _capture_info(stream, byref(status), byref(number), byref(graph), None, None)
    return _status[code], status.value, number.value, graph.value


def cuThreadExchangeStreamCaptureMode(mode: int) -> tuple[CUresult, int]:
    before = c_int(mode)
    return _status[_exchange_mode(byref(before))], before.value


def cuUserObjectCreate(
    value: int, destroy: int, references: int, flags: int
) -> tuple[CUresult, int | None]:
    made = c_void_p()
    return _status[_user_object(byref(made), value, destroy, references, flags)], made.value


def cuGraphRetainUserObject(graph: int, owned: int, count: int, flags: int) -> tuple[CUresult]:
    return (_status[_retain(graph, owned, count, flags)],)


__all__ = [
    "CUfunction_attribute",
    "CUlaunchAttribute",
    "CUlaunchAttributeID",
    "CUlaunchConfig",
    "CUstreamCaptureMode",
    "CUstreamCaptureStatus",
    "CUstream_flags",
    "CUuserObjectRetain_flags",
    "CUuserObject_flags",
    "cuFuncSetAttribute",
    "cuGraphRetainUserObject",
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
    "cuUserObjectCreate",
]
