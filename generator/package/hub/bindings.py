"""All that the runtime uses of the CUDA driver, by ctypes: no cuda-python is needed.

Names, arguments and results are those of cuda.bindings.driver: a function returns its status, then
its values. Handles and addresses are plain numbers. Signatures and structures are those of cuda.h,
whose macros choose the versions of functions that have several.
"""

# ruff: noqa: N802, N816 (the names are the driver's)

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

LIBRARY = "libcuda.so.1"


def _function(name: str, *arguments: Any) -> Any:
    """A function of the driver. Raises RuntimeError where there is none."""
    try:
        found = getattr(_library, name)
    except AttributeError as error:
        raise RuntimeError(
            f"the CUDA driver has no {name} ({error}): it is too old, update it"
        ) from error
    found.argtypes, found.restype = arguments, c_int
    return found


try:
    _library = ctypes.CDLL(LIBRARY)
except OSError as error:
    raise RuntimeError(f"there is no CUDA driver ({error}): install NVIDIA's") from error


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


CUfunction_attribute = SimpleNamespace(
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14,
)
CUlaunchAttributeID = SimpleNamespace(
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
)
CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1)
CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
CUuserObject_flags = SimpleNamespace(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC=1)
CUuserObjectRetain_flags = SimpleNamespace(CU_GRAPH_USER_OBJECT_MOVE=1)


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
        """Return the address of the structure."""
        return ctypes.addressof(self)


# ---- Functions -----------------------------------------------------------------------------------


def _call(name: str, *arguments: Any) -> Callable[..., tuple[CUresult]]:
    """A function that returns its status alone."""
    function = _function(name, *arguments)
    return lambda *values: (_status[function(*values)],)


def _get(name: str, result: Any, *arguments: Any) -> Callable[..., tuple[CUresult, Any]]:
    """A function that writes its result to where its first argument points."""
    function = _function(name, POINTER(result), *arguments)

    def call(*values: Any) -> tuple[CUresult, Any]:
        found = result()
        return _status[function(byref(found), *values)], found.value

    return call


_config = POINTER(CUlaunchConfig)
cuLaunchKernelEx = _call("cuLaunchKernelEx", _config, c_void_p, c_void_p, c_void_p)
cuOccupancyMaxActiveClusters = _get("cuOccupancyMaxActiveClusters", c_int, c_void_p, _config)
cuModuleLoadData = _get("cuModuleLoadData", c_void_p, c_char_p)
cuModuleGetFunction = _get("cuModuleGetFunction", c_void_p, c_void_p, c_char_p)
cuFuncSetAttribute = _call("cuFuncSetAttribute", c_void_p, c_int, c_int)
cuMemAlloc = _get("cuMemAlloc_v2", c_uint64, c_size_t)
cuMemAllocAsync = _get("cuMemAllocAsync", c_uint64, c_size_t, c_void_p)
cuMemFreeAsync = _call("cuMemFreeAsync", c_uint64, c_void_p)
cuMemsetD8Async = _call("cuMemsetD8Async", c_uint64, c_ubyte, c_size_t, c_void_p)
cuStreamCreate = _get("cuStreamCreate", c_void_p, c_uint)
cuStreamDestroy = _call("cuStreamDestroy_v2", c_void_p)
cuStreamSynchronize = _call("cuStreamSynchronize", c_void_p)

cuUserObjectCreate = _get("cuUserObjectCreate", c_void_p, c_void_p, c_void_p, c_uint, c_uint)
cuGraphRetainUserObject = _call("cuGraphRetainUserObject", c_void_p, c_void_p, c_uint, c_uint)

_exchange_mode = _function("cuThreadExchangeStreamCaptureMode", POINTER(c_int))
_capture_info = _function(
    "cuStreamGetCaptureInfo_v2",
    c_void_p,
    POINTER(c_int),
    POINTER(c_uint64),
    POINTER(c_void_p),
    c_void_p,
    c_void_p,
)


def cuThreadExchangeStreamCaptureMode(mode: int) -> tuple[CUresult, int]:
    before = c_int(mode)
    return _status[_exchange_mode(byref(before))], before.value


def cuStreamGetCaptureInfo(stream: int) -> tuple[CUresult, int, int, int | None]:
    """The status, the id and the graph of the capture. The other values are not requested."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    code = _capture_info(stream, byref(status), byref(number), byref(graph), None, None)
    return _status[code], status.value, number.value, graph.value
