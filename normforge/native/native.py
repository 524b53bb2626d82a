"""The C++ fast path of a package: loaded on request, taught by use.

Off, which is the default, nothing is compiled or loaded. On, the norm has an autograd node in C++,
the operators, which compiled code calls, have kernels in C++, and calls that Python's quick path
has served are launched without Python from then on (native.cpp says which). The two paths share
kernels, and nothing that a kernel writes to: plans.py. What calls there are: kinds.py.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..frontends.library import VERSION, namespace
from ..serve.collect import Called, count_also
from ..serve.options import DTYPES
from ..spec import Launch
from .build import load_extension
from .kinds import Kinds
from .plans import Plans, keep

if TYPE_CHECKING:
    from ..frontends.operators import NormOperators


class Native:
    """The native path of one package; nothing but attributes that are None before `start`.

    norm: the autograd node, which takes x, weight, perhaps a bias, and numbers, and gives y.
    forward, backward: take the tensors of such a call, of a forward three and the numbers, and give
    its results, or None for what they do not serve. take: for `Installation.use_native`, puts a
    kernel of PyTorch's backward before a function. learn, learn_rows, learn_forward: take a call
    that has just served. reserve: (device, stream, launch) takes the memory that learning such a
    call would take.
    """

    def __init__(self) -> None:
        self.norm: Callable[..., torch.Tensor] | None = None
        self.forward: Callable[..., tuple[torch.Tensor, ...] | None] | None = None
        self.backward: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None = None
        self.take: Callable[[Callable[..., Any]], Any] | None = None
        self.learn: Callable[[Any], None] | None = None
        self.learn_rows: Callable[[Any, Mapping[str, Any]], None] | None = None
        self.learn_forward: Callable[[Any], None] | None = None
        self.reserve: Callable[[int, int, Launch], None] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        forward: Callable[..., Any],
        gradients: Callable[..., Any],
        operators: NormOperators,
        module: Any = None,
        driver: Sequence[int] = (),
        on_cpu: bool = False,
    ) -> None:
        """Turn it on, once. forward and gradients: what the node calls for what is not served here
        (`Store` in native.h says of what); operators: those of the package; module, driver: the
        loaded extension and the addresses of its driver, by default those of this machine; on_cpu:
        serve CPU tensors, which only a driver that is none can do. Raises RuntimeError."""
        with self._lock:
            if self.norm is not None:
                return
            driver = driver or _driver_addresses()
            module = module or load_extension()
            kinds = operators.kinds
            described = tuple(kind.described for kind in kinds)
            store = module.Store(tuple(driver), on_cpu, described, forward, gradients)
            keep(store)
            plans = Plans(store, kinds)
            with warnings.catch_warnings():
                # PyTorch says that the kernels of another package are overridden: they come behind.
                warnings.simplefilter("ignore")
                store.take_operators(namespace, VERSION, operators.package)  # first: it may raise
            operators.retire = store.retire
            count_also(partial(_calls_of, store, kinds))
            self.learn, self.reserve = plans.learn, plans.reserve
            self.learn_rows, self.learn_forward = plans.learn_rows, plans.learn_forward
            self.take = partial(store.take_backward, operators.aten[-1])
            self.forward, self.backward, self.norm = store.forward, store.backward, store.norm


def _calls_of(store: Any, kinds: Kinds) -> Iterator[tuple[Called, int]]:
    """The calls that were served in C++ so far. They have no option."""
    for kind, rows, columns, dtype, weight_dtype, calls in store.calls():
        if kinds[kind].counted:
            dtypes = DTYPES[dtype], DTYPES[weight_dtype]
            yield Called(kinds[kind].counted, rows, columns, *dtypes), calls


def _driver_addresses() -> tuple[int, ...]:
    """Return the addresses of the functions in native.h's Driver, in its order."""
    if torch.version.cuda is None:
        raise RuntimeError(
            f"use_native() needs CUDA, and PyTorch {torch.__version__} is built without it: go on "
            "without use_native()"
        )
    torch_folder = Path(torch.__file__).resolve().parent
    names = (
        (str(torch_folder / "lib" / "libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream"),
        ("libcuda.so.1", "cuCtxGetDevice"),
        ("libcuda.so.1", "cuStreamIsCapturing"),
        ("libcuda.so.1", "cuLaunchKernelEx"),
    )
    found = []
    for library, name in names:
        try:
            entry = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"use_native() found no {name} in {library} ({error}): go on without it"
            ) from error
        found.append(int(ctypes.cast(entry, ctypes.c_void_p).value or 0))
    return tuple(found)
