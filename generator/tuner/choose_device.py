"""Chooses the GPU that a run is for, and finds out if it is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.protocol import NoGpuError
from generator.target import Target, find_target, match_device
from generator.tuner.device_pool import DevicePool
from generator.tuner.device_process import Gpu

_Opened = TypeVar("_Opened", Gpu, DevicePool)


def choose_target(name: str, device: int) -> tuple[Target, MeasuredEvaluator | None, str]:
    """The target called `name` ("auto": the GPU of this machine), an evaluator when that very GPU
    is here, and a sentence that says what will happen."""
    target, gpu, sentence = _choose(name, lambda: Gpu(device), f"device {device}")
    return target, gpu.evaluator(target) if gpu else None, sentence


def choose_devices(name: str, devices: Sequence[int]) -> tuple[Target, DevicePool | None, str]:
    """Choose several GPUs of this machine, which are of one model, as `choose_target` does one."""
    return _choose(name, lambda: DevicePool(devices), f"devices {', '.join(map(str, devices))}")


def open_gpu(name: str, device: int) -> tuple[Target, Gpu]:
    """The GPU called `name` ("auto": whichever this machine has), for what cannot be done without
    it. Raises NormforgeError where it is not here."""
    gpu = None
    if torch.version.cuda is not None:
        with suppress(NoGpuError):
            gpu = Gpu(device)
    if gpu is None:
        raise NormforgeError("kernels are checked on a GPU, and this machine has no CUDA GPU")
    here = match_device(gpu.facts["name"], gpu.facts["sms"])
    if here is not None and name in ("auto", here.name):
        return here, gpu
    gpu.close()
    wanted = "search_spaces/gpus.yaml does not know it" if name == "auto" else f"not a {name}"
    raise NormforgeError(f"this machine has a {gpu.facts['name']}, and {wanted}")


def _choose(
    name: str, start: Callable[[], _Opened], where: str
) -> tuple[Target, _Opened | None, str]:
    if name != "auto":
        find_target(name)  # an unknown name is told at once, not after a worker has started
    opened = None
    if torch.version.cuda is not None:
        with suppress(NoGpuError):
            opened = start()
    facts = opened.facts if opened else None
    here = match_device(facts["name"], facts["sms"]) if facts else None
    if opened and here and name in ("auto", here.name):
        return here, opened, f"Measuring on {where}: {opened.facts['name']}."
    if opened:
        opened.close()
    if name == "auto" and facts is None:
        raise NormforgeError("--gpu auto found no CUDA GPU: name one, for example --gpu gb200")
    if name == "auto":
        raise NormforgeError(
            f"--gpu auto found a {facts and facts['name']}, which search_spaces/gpus.yaml does not "
            "know: add it there"
        )
    found = f"this machine has a {facts['name']}" if facts else "this machine has no CUDA GPU"
    sentence = (
        f"No {name} here ({found}): nothing is measured. Times are predicted from the "
        "compiled kernels, winners are executed on the CPU under many schedules, and every one is "
        "marked `predicted`."
    )
    return find_target(name), None, sentence
