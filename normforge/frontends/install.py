"""`install()`: serve existing models without changing their code.

While installed, a package serves one of PyTorch's CUDA operators. For RMSNorm that is
`aten::_fused_rms_norm_backward`, which torch.nn.RMSNorm and torch.nn.functional.rms_norm call in
their backward. Calls without a kernel in the package go to the kernel that was registered before.
torch.compile decomposes the operator before it gets here; graph_pass.py serves that case. After
`use_native()` a kernel in C++ comes first.

From 2.13 on, PyTorch itself puts kernels in Python before its own (torch.backends.python_native; of
RMSNorm that of a QuACK which it carries). Each holds what was there when it was registered, and
must not call it when that is gone, so they are registered anew below what is installed here, and
when that is taken away. Who switches them off and on has them first until `install` comes again.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch

Serve = Callable[..., "tuple[torch.Tensor | None, ...] | None"]
"""Takes dy, x, rstd, weight and perhaps more; None for what it does not serve."""
Take = Callable[[Callable[..., Any]], Any]
"""Puts a kernel in C++ before one in Python. It stays until what this gives is freed."""


class Routed(NamedTuple):
    """An operator of PyTorch that is routed. mark: where PyTorch says that it is, a name for each
    operator; instead: what there is for a PyTorch that has no such operator; make: makes its kernel
    of `quick`, `route` and `leave`, which takes the operator's arguments to PyTorch's kernel."""

    operator: str
    mark: str
    instead: str
    make: Callable[[Serve, Serve, Callable[..., Any]], Callable[..., Any]]


def _rms_norm_backward(quick: Serve, route: Serve, leave: Callable[..., Any]) -> Callable[..., Any]:
    both = [True, True]

    def routed(
        dy: torch.Tensor,
        x: torch.Tensor,
        normalized_shape: list[int],
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        output_mask: list[bool],
    ) -> Any:
        if len(normalized_shape) == 1 and len(output_mask) == 2:
            if output_mask == both and weight is not None:
                results = quick(dy, x, rstd, weight)
                if results is not None:
                    return results
            results = route(dy, x, rstd, weight, *output_mask)
            if results is not None:
                return results
        return leave(dy, x, normalized_shape, rstd, weight, output_mask)

    return routed


F = TypeVar("F", bound=Callable[..., Any])


def _of_all_models(function: F) -> F:
    """A function that takes no argument, and tells who gives it a model."""

    @wraps(function)
    def checked(self: Any, *given: Any) -> Any:
        if given:
            name, got = function.__name__, type(given[0]).__name__
            patch = "unpatch" if name == "uninstall" else "patch"
            raise TypeError(
                f"{name}() is for all of PyTorch's norms and takes no argument, got {got}: write "
                f"{name}() or, for one model, {patch}(model)"
            )
        return function(self)

    return cast(F, checked)


RMS_NORM = Routed(
    "_fused_rms_norm_backward",
    "_normforge_installed",
    "rms_norm or RMSNorm",
    _rms_norm_backward,
)


class Installation:
    """The routing of one package. Thread-safe; nothing happens before `install`.

    quick: serves plain calls that came before. route: serves what there is a kernel for; takes
    need_dx and need_dw as well, and perhaps the mean. package: says whose it is; a package
    that is loaded again takes the place of its former self. routed: the operator.
    """

    of: Any = None
    """The package that has this, for whoever pickles its functions."""

    def __init__(
        self,
        quick: Serve,
        route: Serve,
        device: str = "CUDA",
        package: object = None,
        routed: Routed = RMS_NORM,
    ) -> None:
        self._quick, self._route, self._device, self._routed = quick, route, device, routed
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        self.package = self if package is None else package
        self._lock = threading.RLock()
        self._library: torch.library.Library | None = None
        self._kernel: Any = None
        self._original: Any = None
        self._take: Take | None = None
        self._native: Any = None
        self._wanted = False
        self._blocks = 0

    def __deepcopy__(self, _: Any) -> Installation:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, "_installation")

    @_of_all_models
    def install(self) -> None:
        """Route PyTorch's backward to this package from now on. A second call changes nothing but
        where others have registered a kernel since: this package comes first again.

        Raises RuntimeError if this PyTorch has no such operator, or if another package
        is installed.
        """
        with self._lock:
            self._wanted = True
            self._apply(again=True)

    @_of_all_models
    def uninstall(self) -> None:
        """Restore PyTorch's kernel, as soon as no `installed()` block is open."""
        with self._lock:
            self._wanted = False
            self._end_predecessor()
            self._apply()

    @_of_all_models
    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route inside a `with` block, for all threads. Blocks can be nested. A backward that is
        under way in another thread when the block ends is finished by this package."""
        with self._lock:
            self._blocks += 1
            try:
                self._apply()
            except BaseException:
                self._blocks -= 1
                raise
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                self._apply()

    def use_native(self, take: Take) -> None:
        """Serve in C++ what can be, whenever this is installed."""
        with self._lock:
            self._take = take
            if self._library is not None:
                self._put_native_first()

    def _put_native_first(self) -> None:
        take, kernel = self._take, self._kernel
        if take is not None:
            with _registering(self._routed, self._device, kernel):
                self._native = take(kernel)

    def _apply(self, again: bool = False) -> None:
        wanted = self._wanted or self._blocks > 0
        if wanted and again:
            self._take_away()
        if wanted and self._library is None:
            self._end_predecessor()
            try:
                self._override()
                setattr(torch.library, self._routed.mark, self)
                self._put_native_first()
            except BaseException:
                self.end()
                raise
        elif not wanted:
            self.end()

    def end(self) -> None:
        """Restore PyTorch's kernel at once and permanently."""
        self._wanted = False
        self._take_away()

    def _take_away(self) -> None:
        if self._library is not None:
            self._native = None
            self._library._destroy()
            self._library = None
            delattr(torch.library, self._routed.mark)
            _register_anew(self._routed.operator, self._device)

    def _override(self) -> None:
        """Put a kernel in the place of PyTorch's."""
        name = f"aten::{self._routed.operator}"
        if not hasattr(torch.ops.aten, self._routed.operator):
            instead = self._routed.instead
            raise RuntimeError(f"PyTorch {torch.__version__} has no {name}: use {instead}")
        # On PyTorch, because packages carry copies of this file. Each would take the other's kernel
        # for PyTorch's own and call it after it is gone.
        if hasattr(torch.library, self._routed.mark):
            raise RuntimeError("another package of Normforge is installed: uninstall it first")
        try:
            self._original = torch.library.get_kernel(name, self._device)
        except RuntimeError:  # PyTorch was built without this device: there are no tensors on it
            self._original = None
        library = torch.library.Library("aten", "IMPL")
        kernel = self._routed.make(self._quick, self._route, self._leave)
        with _registering(self._routed, self._device, kernel):
            library.impl(self._routed.operator, kernel, self._device, allow_override=True)
        self._library, self._kernel = library, kernel

    def _leave(self, *given: Any) -> Any:
        """Call the kernel that was there before."""
        original = self._original
        if original is None:
            name = f"aten::{self._routed.operator}"
            raise RuntimeError(f"PyTorch has no {name} for {self._device} to fall back to")
        try:
            return original.call_boxed(self._keys, *given)
        except RuntimeError as error:
            if "SafeKernelFunction has been invalidated" not in str(error):
                raise
        # A kernel of torch.backends.python_native, or what it falls back to, is no longer there.
        with self._lock:
            if self._original is original and self._library is not None:
                self._apply(again=True)
        return self._original.call_boxed(self._keys, *given)

    def _end_predecessor(self) -> None:
        """End the routing of this package from before it was loaded again."""
        other = getattr(torch.library, self._routed.mark, None)
        if other is not None and other is not self and other.package == self.package:
            other.end()


_KEPT: deque[Any] = deque(maxlen=1000)
"""The last kernels and their functions in Python, also after they were replaced: PyTorch would free
one while a thread that has found it waits for the interpreter. Each takes two kilobytes."""


@contextmanager
def _registering(routed: Routed, device: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """A context for the registration of this kernel, or of one in C++ that calls it."""
    with warnings.catch_warnings():
        # PyTorch says that a kernel of its own is overridden, which is the purpose.
        warnings.simplefilter("ignore")
        yield
    _KEPT.append((torch.library.get_kernel(f"aten::{routed.operator}", device), kernel))


def _register_anew(operator: str, device: str) -> None:
    """Have the kernels of torch.backends.python_native find what serves an operator now."""
    native = getattr(torch.backends, "python_native", None)
    if native is not None and not native.is_operation_disabled(operator):
        with suppress(RuntimeError):  # PyTorch may be built without this device
            _KEPT.append((torch.library.get_kernel(f"aten::{operator}", device), None))
        with native.operations_disabled(operator):
            pass
