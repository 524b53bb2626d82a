"""Guards a whole run: one writer per output folder, an end after signals, a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from optuna.exceptions import StorageInternalError

from generator.errors import NormforgeError, one_line
from generator.studies.records import now

LOCK_NAME = ".running"
"""The file in the output folder while a run writes there; it names the process and its host."""
SAME_SIGNAL_SECONDS = 1.0
"""Signals that come this soon after the first are the same request: `timeout` signals a process
and then its group, to which it belongs."""
INTERRUPT_SECONDS = 0.7
"""Seconds that the trial under way has left after Ctrl-C, because a person waits."""
_END = b"\0"
"""A byte in the place of the number of a signal: no more will be looked at."""
GRACE_SECONDS = 2.0
"""Seconds that a run waits for the folder: one that was just killed may have it for a moment."""
_STORAGE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.EFBIG,
    errno.ENODEV,
    errno.ENOTCONN,
}


class Stop:
    """A request to end the run, expressed by SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def at_once(self) -> bool:
        """True when a person waits for the end: then nothing more is written."""
        return self.signal == signal.SIGINT

    def check(self) -> None:
        """Raise KeyboardInterrupt when the run is to end; called where a trial has been stored."""
        if self.signal is not None:
            self.cancel_alarm()
            raise KeyboardInterrupt

    def cancel_alarm(self) -> None:
        """The end has begun: nothing interrupts it."""
        if self.at_once and threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def exclusive_run(
    out: Path, shared: bool = False, database: Path | None = None, option: str = "--out"
) -> Iterator[Stop]:
    """A run that writes to the folder `out`, which is created, and to the file `database`. Raises
    NormforgeError when another run has either, and in place of an error of the disk or the storage.

    The first SIGINT or SIGTERM is noted, for Stop.check to act on when the trial under way is
    stored; INTERRUPT_SECONDS after a SIGINT, KeyboardInterrupt is raised anywhere. A second signal,
    at least a second later, ends the process at once, like kill -9: nothing finished is lost.
    shared: runs with studies in a database may share the folder, but not with one that has none.
    option: that of the command line which names the folder.
    """
    stop = Stop()
    try:
        with ExitStack() as stack:
            stack.enter_context(_signals(stop))  # first: an interrupted lock would leave its file
            stack.enter_context(
                _locked(out, out / LOCK_NAME, shared, f"another folder with {option}")
            )
            if database is not None:
                lock = database.with_name(database.name + LOCK_NAME)
                remedy = "PostgreSQL, which many runs may share, with --storage"
                stack.enter_context(_locked(database, lock, False, remedy))
            stack.callback(stop.cancel_alarm)
            yield stop
    except (OSError, StorageInternalError) as error:
        if isinstance(error, OSError) and error.errno not in _STORAGE_ERRORS:
            raise
        where = getattr(error, "filename", None) or out
        said = getattr(error, "strerror", None) or one_line(error, 200)
        raise NormforgeError(
            f"cannot write to {where} ({said}): finished trials are kept; put that right and run "
            "the same command to continue"
        ) from error


@contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            return
        stop.signal = number  # the next signal may come between two lines
        if stop.at_once:
            signal.setitimer(signal.ITIMER_REAL, INTERRUPT_SECONDS)
            return
        said = "\nSIGTERM: ending after the trial under way; one more in a second ends at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, said.encode())

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers, and only it is interrupted
        return
    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with _second_signal_ends():
            yield
    finally:
        stop.cancel_alarm()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _second_signal_ends() -> Iterator[None]:
    """End the process at a signal that comes at least SAME_SIGNAL_SECONDS after the first. Python
    runs a handler when the main thread gets to it, which can be a whole trial later, for example
    where the kernel gave the signal to another thread. So a thread that does nothing else takes
    the time, when Python writes to a pipe that a signal has arrived."""
    arrivals, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        first = None
        while (number := os.read(arrivals, 1)) not in (b"", _END):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                at = time.monotonic()
                first = first or at
                if at - first >= SAME_SIGNAL_SECONDS:
                    os._exit(128 + number[0])  # workers end with their parent

    thread = threading.Thread(target=watch, name="second signal", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, _END)  # closing it is not enough: a forked process may have it, too
        thread.join()
        os.close(writer)
        os.close(arrivals)


@contextmanager
def _locked(place: Path, lock: Path, shared: bool, remedy: str) -> Iterator[None]:
    """flock on the file `lock`: the kernel drops it with its holder, so kill -9 leaves none. place:
    what it stands for; remedy: what else to choose."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(lock, shared)
    except BlockingIOError:
        raise NormforgeError(
            f"another run writes to {place} ({_holder(lock)}): wait until it has ended, or choose "
            f"{remedy}"
        ) from None
    except OSError as error:
        raise NormforgeError(f"cannot lock {lock} ({error.strerror}): choose {remedy}") from error
    try:
        yield
    finally:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink(missing_ok=True)
        except OSError:
            pass  # others share the folder, or the disk is gone; the lock itself ends here
        os.close(handle)


def _acquire(path: Path, shared: bool) -> int:
    """A handle that holds the lock. Raises BlockingIOError when another run keeps it."""
    until = time.monotonic() + GRACE_SECONDS
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Its last holder may have removed the file between the two calls.
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                entry = {
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "since": now(),
                }
                os.truncate(handle, 0)
                os.pwrite(handle, json.dumps(entry).encode(), 0)
                return handle
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except BaseException:
            os.close(handle)
            raise


def _holder(path: Path) -> str:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return f"process {entry['pid']} on {entry['host']} since {entry['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown process"
