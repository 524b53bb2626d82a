"""Several GPUs of one machine: a process for each, and this one hands out problems.

Processes and not threads, because what a search does between two measurements is Python: 6 ms of
it a trial, beside as little as 13 ms on the GPU. Each process has compiler processes of its own, so
that no machine code passes through a third process; the cubins are shared on disk.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from generator.errors import NormforgeError
from generator.problem import Problem
from generator.processes import context_of, shielded
from generator.tuner.device_process import Device, Gpu, run_device
from generator.tuner.display import Status
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_list import Task, TaskList

_MAX_DEATHS = 3  # processes that one problem may cost before the run ends
_TICK_SECONDS = 0.5
_START_SECONDS = 300.0
_END_SECONDS = 30.0


class _LostError(Exception):
    """The process of a GPU is gone."""


class _DeviceProcess:
    """The process of one GPU, as its parent sees it."""

    def __init__(self, index: int, open_device: Callable[[int], Device], method: str) -> None:
        context: Any = context_of(method)
        self.index = index
        self.connection, child = context.Pipe()
        self._process = context.Process(target=run_device, args=(child, index, open_device))
        with shielded():
            self._process.start()
        child.close()
        self.task: Task | None = None

    def facts(self) -> Mapping[str, Any]:
        """Return the facts about its GPU. Raises NormforgeError when it has none."""
        try:
            if not self.connection.poll(_START_SECONDS):
                raise NormforgeError(f"device {self.index} does not answer")
            kind, value = self.receive()
        except _LostError as lost:
            raise NormforgeError(f"device {self.index}: {lost}") from lost
        if kind != "facts":
            raise type(value)(f"device {self.index}: {value}")
        return dict(value)

    def send(self, message: object) -> None:
        with suppress(OSError):  # it is gone, which the next `receive` finds out
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            raise _LostError(f"its process died (exit {self._process.exitcode})") from error
        return kind, value

    def close(self, seconds: float = 0.0) -> str:
        """End the process, by itself within `seconds`. What it says then about noise, or ""."""
        noise, until = "", time.monotonic() + seconds
        if seconds:
            self.send(None)
            with suppress(EOFError, OSError):  # it has ended
                while self.connection.poll(max(0.0, until - time.monotonic())):
                    kind, value = self.connection.recv()
                    noise = value if kind == "noise" else noise
            self._process.join(max(0.0, until - time.monotonic()))
        self._process.kill()
        self._process.join()
        self.connection.close()
        return noise


class DevicePool:
    """Processes that have started, one for each of `devices`. open_device: called with the index in
    each process; method: how multiprocessing starts it. Raises NormforgeError when a device cannot
    be used (NoGpuError where there is none) or is of another model than the first."""

    def __init__(
        self,
        devices: Sequence[int],
        open_device: Callable[[int], Device] = Gpu,
        method: str = "spawn",
    ) -> None:
        self._open = lambda index: _DeviceProcess(index, open_device, method)
        self._devices = [self._open(index) for index in devices]
        self._say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
        try:
            facts = [device.facts() for device in self._devices]
            for device, own in zip(self._devices, facts, strict=True):
                _check_same(facts[0], own, device.index)
        except BaseException:
            self.close(0)
            raise
        self.facts = facts[0]
        self._deaths: Counter[Problem] = Counter()

    def close(self, seconds: float = _END_SECONDS) -> None:
        """End all processes, by themselves within `seconds`, and say what disturbed them."""
        until = time.monotonic() + seconds
        for device in self._devices:
            device.send(None)
        for device in self._devices:
            if noise := device.close(max(0.0, until - time.monotonic())):
                self._say(noise)

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def search(self, plan: Plan, tasks: TaskList, stop: Stop, status: Status) -> None:
        """Search what is open until everything is concluded. Raises KeyboardInterrupt when it is
        to end early, after the trials under way, and NormforgeError when it cannot go on."""
        self._say = status.say
        for device in self._devices:
            device.send(plan)
        ending, reason = False, ""
        while not tasks.done:
            if not self._devices:
                stop.check()
                raise NormforgeError(f"{reason}; no other GPU is left to this run")
            if stop.signal is not None and not ending:
                ending = True
                for device in self._devices:
                    device.send("stop")
            for device in self._devices:
                if device.task is None and not ending:
                    device.task = tasks.claim()
                    if device.task is not None:
                        device.send(device.task)
            if not any(device.task for device in self._devices):
                stop.check()
                status.waiting(tasks.wait())
                continue
            by_connection = {device.connection: device for device in self._devices}
            for ready in wait(list(by_connection), _TICK_SECONDS):
                device = by_connection[ready]
                try:
                    kind, value = device.receive()
                except _LostError as lost:
                    reason = self._handle_loss(device, str(lost), None if ending else plan, tasks)
                    continue
                if kind == "noise":  # its last word, while others still search
                    self._say(value)
                elif kind == "error":
                    reason = self._handle_loss(device, str(value), None, tasks)
                else:
                    self._handle_message(device, kind, value, tasks, status)

    @staticmethod
    def _handle_message(
        device: _DeviceProcess, kind: str, value: Any, tasks: TaskList, status: Status
    ) -> None:
        """Handle what a device says about its task: progress, and winner, failed or open at its
        end."""
        task = device.task
        assert task is not None
        if kind == "progress":
            status.progress(task.index, value)
            return
        device.task = None
        if kind == "open":
            tasks.give_back(task)
            return
        if kind == "failed":
            tasks.fail(task, value)
        else:
            tasks.conclude(task, value)
        tasks.tell(task, status)

    def _handle_loss(
        self, device: _DeviceProcess, reason: str, plan: Plan | None, tasks: TaskList
    ) -> str:
        """Do without a device: its task goes back, and with a `plan` a new process takes its place.
        Returns what happened, as a sentence."""
        self._devices.remove(device)
        device.close()
        reason = f"device {device.index}: {reason}"
        if device.task is not None:
            problem = device.task.problem
            tasks.give_back(device.task)
            reason += f" while it searched {problem}"
            self._deaths[problem] += 1
            if plan is not None and self._deaths[problem] >= _MAX_DEATHS:
                raise NormforgeError(f"{reason}, which has happened {self._deaths[problem]} times")
            print(f"D{reason[1:]}.", file=sys.stderr, flush=True)
        if plan is None:
            return reason
        fresh = self._open(device.index)
        try:
            _check_same(self.facts, fresh.facts(), fresh.index)
        except NormforgeError as error:
            fresh.close()
            print(f"Going on without it: {error}.", file=sys.stderr, flush=True)
            return str(error)
        fresh.send(plan)
        self._devices.append(fresh)
        return reason


def _check_same(facts: Mapping[str, Any], other: Mapping[str, Any], index: int) -> None:
    """Raise NormforgeError for GPUs of different models: their results never mix."""
    model, here = [(f["name"], f["sms"]) for f in (facts, other)]
    if model != here:
        raise NormforgeError(
            f"device {index} is a {here[0]} with {here[1]} SMs, and the first one of this run a "
            f"{model[0]} with {model[1]}: a run tunes for one model, start another for the others"
        )
