"""Compiles in processes of their own, which NVRTC may crash or hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

from generator.errors import CompilerError, CompilerFailedError, NormforgeError, one_line
from generator.kernels.code_digest import AnyVariant, code_digest
from generator.kernels.cubin_cache import DEFAULT_CACHE, compile_variant
from generator.kernels.nvrtc import Compiled, compile_source, nvrtc_version
from generator.own_files import OWN_OPERATIONS
from generator.processes import context_of, end_pool, end_with_parent, shielded

NICE = 5
"""The searches and the GPU workers come before the compilers."""
MAX_CRASHES = 3
"""Processes that one variant may cost, alone and on a sound machine, before it is an error."""
MAX_TIMEOUTS = 2
"""Time-outs that one variant may cost in the same way; other work may have caused the first one."""
MACHINE_SECONDS = 120.0
"""Seconds that a machine on which nothing compiles is given to recover."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds between two tries on such a machine; each pause is twice as long as the one before."""
CHECK_SECONDS = 60.0
"""Deadline of the known-good kernel, which takes a second or two with the start of its process."""
KNOWN_GOOD = 'extern "C" __global__ void known_good(float* x) { x[threadIdx.x] = 1.0f; }'
T = TypeVar("T")


def compile_known_good(arch: str) -> None:
    """Compile, without the cache, what every sound machine can compile. Raises CompilerError."""
    if error := compile_source(KNOWN_GOOD, arch).error:
        raise CompilerFailedError(f"NVRTC refuses a kernel that is sound: {error}")


def _begin() -> None:
    """Set up a process of the pool. That needs PyTorch only for a user's operations. A SIGTERM that
    reaches the whole run is for the parent: without its compilers, what it ends with takes long."""
    end_with_parent(NICE, signal.SIG_IGN)
    if os.environ.get(OWN_OPERATIONS):
        import generator.operations  # noqa: F401


class CompilePool:
    """Compiles variants in worker processes, for any number of threads. When a process dies, each
    variant under way is compiled again in a process of its own. One that keeps killing its process
    is an error, if a known-good kernel can be compiled then. If not, the machine is at fault: the
    pool waits for it, MACHINE_SECONDS at most, and then raises CompilerError.

    compile: called in a worker with a variant, the arch and the cache's folder; method: how
    multiprocessing starts the workers, which it does with the first variant; check: called in a
    worker with the arch, raises where nothing can be compiled. Raises NormforgeError where the
    program cannot be imported by the workers.
    """

    def __init__(
        self,
        arch: str,
        processes: int,
        cache_folder: Path = DEFAULT_CACHE,
        *,
        compile: Callable[[AnyVariant, str, Path], Compiled] = compile_variant,
        method: str = "spawn",
        check: Callable[[str], None] = compile_known_good,
    ) -> None:
        self.arch = arch
        self.processes = max(1, processes)
        self.cache_folder = cache_folder
        self._compile, self._method, self._check = compile, method, check
        self._pool = self._start(self.processes)
        self._replacing = Lock()
        self._homes: WeakKeyDictionary[Future[Compiled], ProcessPoolExecutor] = WeakKeyDictionary()
        self._closed = Event()

    def _start(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(processes, context_of(self._method), _begin)

    def _replace(self) -> None:
        """Begin another pool, with the lock, and end the one before."""
        end_pool(self._pool)
        self._pool = self._start(self.processes)

    def _submit(self, pool: ProcessPoolExecutor, variant: AnyVariant) -> Future[Compiled]:
        with shielded():
            return pool.submit(self._compile, variant, self.arch, self.cache_folder)

    def submit(self, variant: AnyVariant) -> Future[Compiled]:
        with self._replacing:
            try:
                try:
                    future = self._submit(self._pool, variant)
                except BrokenProcessPool:
                    self._replace()
                    future = self._submit(self._pool, variant)
            except (OSError, RuntimeError) as error:  # no process or no thread can be started now
                future = Future()
                future.set_exception(error)
            self._homes[future] = self._pool
            return future

    def result(
        self, variant: AnyVariant, future: Future[Compiled], timeout: float = 120
    ) -> Compiled:
        """The result of `submit`. Whatever goes wrong with one variant is the error in it. Raises
        CompilerError when it is the machine where nothing compiles."""
        try:
            return future.result(timeout)
        except BrokenProcessPool:  # perhaps by another variant
            return self._alone(variant, timeout)
        except CancelledError:  # it waited in a pool that was ended for another variant
            if self._closed.is_set():
                return self._failed("the run was ended")
            return self.result(variant, self.submit(variant), timeout)
        except TimeoutError as error:
            with self._replacing:
                if self._homes[future] is self._pool:  # else another thread has replaced it
                    self._replace()
            return self._alone(variant, timeout, error)
        except Exception as error:
            return self._alone(variant, timeout, error)

    def _alone(
        self, variant: AnyVariant, timeout: float, error: Exception | None = None
    ) -> Compiled:
        """The result from processes of its own. error: what has happened to the variant before."""
        blamed, pause, until = 0, FIRST_PAUSE, time.monotonic() + MACHINE_SECONDS
        while not self._closed.is_set():
            if error is not None:
                if type(error) is CompilerError:  # NVRTC lacks a part, which it will lack again
                    raise error
                if (fault := self._fault_of_machine(error)) is None:
                    blamed += 1
                    late = isinstance(error, TimeoutError)
                    if blamed >= (MAX_TIMEOUTS if late else MAX_CRASHES):
                        return self._failed(_blame(error, timeout))
                elif time.monotonic() >= until:
                    raise CompilerError(
                        f"this machine has compiled nothing for {MACHINE_SECONDS:.0f} s ({fault}): "
                        "finished trials are kept; put that right (is there memory, and does "
                        "Python start?) and run the same command to continue"
                    )
                else:
                    self._closed.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return self._in_fresh_process(lambda pool: self._submit(pool, variant), timeout)
            except Exception as happened:
                error = happened
        return self._failed("the run was ended")

    def _fault_of_machine(self, error: Exception) -> str | None:
        """Return what is wrong with the machine just after an error; None when a known-good kernel
        can be compiled there, and the error is none that only a machine makes."""
        try:
            self._in_fresh_process(lambda pool: pool.submit(self._check, self.arch), CHECK_SECONDS)
        except BrokenProcessPool:
            return "the processes of the compiler die"
        except TimeoutError:
            return f"a small kernel takes more than {CHECK_SECONDS:.0f} s"
        except Exception as fault:
            return _told(fault)
        machine = isinstance(error, ImportError | MemoryError | OSError)
        return _told(error) if machine and not isinstance(error, TimeoutError) else None

    def _in_fresh_process(
        self, submit: Callable[[ProcessPoolExecutor], Future[T]], timeout: float
    ) -> T:
        pool = self._start(1)
        try:
            with shielded():
                future = submit(pool)
            return future.result(timeout)
        finally:
            end_pool(pool)

    def _failed(self, error: str) -> Compiled:
        return Compiled(self.arch, "", b"", {}, nvrtc_version(), False, "", error)

    def code(self, variant: AnyVariant) -> str:
        """See `generator.evaluate.evaluator.Pool`."""
        return code_digest(variant, self.arch)

    def close(self) -> None:
        """Ends the processes, whatever they are doing: entries of the cache appear whole."""
        self._closed.set()
        end_pool(self._pool)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _blame(error: Exception, timeout: float) -> str:
    """Return what is recorded for a variant whose error is its own."""
    if isinstance(error, BrokenProcessPool):
        return f"NVRTC crashed on this variant {MAX_CRASHES} times"
    if isinstance(error, TimeoutError):
        return f"NVRTC took more than {timeout:.0f} s"
    return _told(error)


def _told(error: Exception) -> str:
    said = one_line(error)
    return said if isinstance(error, NormforgeError) else f"{type(error).__name__}: {said}"
