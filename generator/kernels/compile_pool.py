"""Compiles in processes of their own, which NVRTC may crash or hang."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from generator.errors import CompilerError
from generator.kernels.code_digest import AnyVariant, code_digest
from generator.kernels.cubin_cache import DEFAULT_CACHE, compile_variant
from generator.kernels.nvrtc import Compiled, nvrtc_version
from generator.processes import end_pool, end_with_parent, shielded

NICE = 5
"""The searches and the GPU workers come before the compilers."""
MAX_CRASHES = 3
"""Processes that one variant may cost, alone, before it is an error."""


class CompilePool:
    """Compiles variants in worker processes, for any number of threads. When a process dies, each
    variant under way is compiled again in a process of its own; one that keeps killing its process
    is an error.

    compile: called in a worker with a variant, the arch and the cache's folder; method: how
    multiprocessing starts the workers, which it does with the first variant.
    """

    def __init__(
        self,
        arch: str,
        processes: int,
        cache_folder: Path = DEFAULT_CACHE,
        *,
        compile: Callable[[AnyVariant, str, Path], Compiled] = compile_variant,
        method: str = "spawn",
    ) -> None:
        self.arch = arch
        self.processes = max(1, processes)
        self.cache_folder = cache_folder
        self._compile, self._method = compile, method
        self._pool = self._start(self.processes)
        self._replacing = Lock()
        self._homes: WeakKeyDictionary[Future[Compiled], ProcessPoolExecutor] = WeakKeyDictionary()
        self._closed = False

    def _start(self, processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(processes, get_context(self._method), end_with_parent, (NICE,))

    def _submit(self, pool: ProcessPoolExecutor, variant: AnyVariant) -> Future[Compiled]:
        with shielded():
            return pool.submit(self._compile, variant, self.arch, self.cache_folder)

    def submit(self, variant: AnyVariant) -> Future[Compiled]:
        with self._replacing:
            try:
                future = self._submit(self._pool, variant)
            except BrokenProcessPool:
                self._pool = self._start(self.processes)
                future = self._submit(self._pool, variant)
            self._homes[future] = self._pool
            return future

    def result(
        self, variant: AnyVariant, future: Future[Compiled], timeout: float = 120
    ) -> Compiled:
        """The result of `submit`. Whatever goes wrong with one variant is the error in it."""
        try:
            return future.result(timeout)
        except BrokenProcessPool:
            return self._alone(variant, timeout)
        except CancelledError:  # it waited in a pool that was ended for another variant
            if self._closed:
                return self._failed("the run was ended")
            return self.result(variant, self.submit(variant), timeout)
        except TimeoutError:
            with self._replacing:
                if self._homes[future] is self._pool:  # else another thread has replaced it
                    end_pool(self._pool)
                    self._pool = self._start(self.processes)
            return self._failed(f"NVRTC took more than {timeout:.0f} s")
        except CompilerError:
            raise
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}")

    def _alone(self, variant: AnyVariant, timeout: float) -> Compiled:
        for _ in range(MAX_CRASHES):
            if self._closed:
                return self._failed("the run was ended")
            pool = self._start(1)
            try:
                return self._submit(pool, variant).result(timeout)
            except BrokenProcessPool:
                continue
            except TimeoutError:
                return self._failed(f"NVRTC took more than {timeout:.0f} s")
            except CompilerError:
                raise
            except Exception as error:
                return self._failed(f"{type(error).__name__}: {error}")
            finally:
                end_pool(pool)
        return self._failed(f"NVRTC crashed on this variant {MAX_CRASHES} times")

    def _failed(self, error: str) -> Compiled:
        return Compiled(self.arch, "", b"", {}, nvrtc_version(), False, "", error)

    def code(self, variant: AnyVariant) -> str:
        """See `generator.evaluate.evaluator.Pool`."""
        return code_digest(variant, self.arch)

    def close(self) -> None:
        """Ends the processes, whatever they are doing: entries of the cache appear whole."""
        self._closed = True
        end_pool(self._pool)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
