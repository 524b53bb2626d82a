"""The set-up and the end of every process that the tuner starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import context, parent_process
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from threading import Thread
from typing import Any

from generator.errors import NormforgeError

MANAGER_SECONDS = 1.0
"""Seconds for a killed process to go, and for the thread of its pool to notice."""


class _Spawned(context.SpawnProcess):
    terminate = context.SpawnProcess.kill


class _Forked(context.ForkProcess):
    terminate = context.ForkProcess.kill


class _ForkedByServer(context.ForkServerProcess):
    terminate = context.ForkServerProcess.kill


class _SpawnContext(context.SpawnContext):
    Process = _Spawned


class _ForkContext(context.ForkContext):
    Process = _Forked


class _ForkServerContext(context.ForkServerContext):
    Process = _ForkedByServer


_CONTEXTS = {"spawn": _SpawnContext, "fork": _ForkContext, "forkserver": _ForkServerContext}


def context_of(method: str) -> Any:
    """Return multiprocessing's context for a method of starting processes, whose `terminate` kills:
    where one process of a pool has died, Python terminates the others, and from 3.12 on it waits
    for them with the pool's lock, for ever for one that ignores SIGTERM. Raises NormforgeError
    where "spawn" cannot work: each process imports the program again, and one that Python reads
    from its standard input is no file."""
    if method == "spawn":
        program = get_preparation_data("").get("init_main_from_path")
        if program is not None and not Path(program).exists():
            raise NormforgeError(
                f"the program is not a file ({Path(program).name}), and every process that "
                "compiles or measures has to import it: save it as a file, and start that"
            )
    return _CONTEXTS[method]()


def end_with_parent(niceness: int = 0, sigterm: signal.Handlers = signal.SIG_DFL) -> None:
    """End this process when the one that started it is gone: nobody else would after a kill -9.
    Ctrl-C, which a terminal sends to all of them, is for the parent to act upon. niceness: added to
    that of this process. sigterm: SIG_IGN where the parent decides what ends when, as a batch
    system sends it to every process of a job."""
    os.nice(niceness)
    signal.set_wakeup_fd(-1)  # a forked process has its parent's pipe, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, sigterm)  # a forked process has its parent's handler
    parent = parent_process()
    if parent is None:
        raise RuntimeError("end_with_parent is for processes started by multiprocessing")

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, name="end with parent", daemon=True).start()


@contextmanager
def shielded() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even before `end_with_parent` runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_pool(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, whatever they are doing. They must not have been forked while
    other children ran, which would hold on to their pipes."""
    processes = list((pool._processes or {}).values())
    manager: Thread | None = pool._executor_manager_thread  # type: ignore[assignment]
    results: Any = pool._result_queue
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    until = time.monotonic() + MANAGER_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    if manager is not None:
        # If a process has sent only part of a result, the thread would wait for the rest, and
        # Python for the thread, for ever: now that nobody else can send, this is the end of it.
        results._writer.close()
        # Python wakes this thread when it exits, which fails where the thread ends at that moment.
        manager.join(MANAGER_SECONDS)
