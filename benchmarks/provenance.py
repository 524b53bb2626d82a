"""Records where numbers come from: the commit, the GPU itself, the libraries, and the machine
code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from generator.paths import REPOSITORY

LIBRARIES = (
    "triton",
    "cuda-python",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "transformers",
)
"""Distributions whose kernels or compilers may run, whatever a benchmark compares."""
OF_GPU = ("sms", "uuid", "driver", "cuda_driver", "torch")
OF_TIMER = ("condition", "order", "flush_bytes")
"""Facts of a session: on what, and how its timer times."""


def origin(facts: Mapping[str, Any], *, timed: bool) -> dict[str, Any]:
    """The part of a results file's environment that every benchmark has. facts: of a session;
    timed: whether it is the session's timer that took the times."""
    wanted = OF_GPU + OF_TIMER * timed
    known = {name: facts[name] for name in wanted if name in facts}
    return {"gpu": facts["name"], **known, "commit": commit(), "libraries": libraries()}


@cache
def commit() -> str:
    """Return the checkout's commit, with `+changes` where tracked files differ from it; `unknown`
    where this is no checkout."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return found + "+changes" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def libraries() -> dict[str, str]:
    """Versions of those of LIBRARIES that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cubins_of(table: bytes) -> dict[str, str]:
    """The digest of each cubin that a table of a package names, by its file."""
    content = json.loads(table)
    kernels = [entry["kernel"] for entry in content.get("tuned", ())]
    kernels += content.get("fallback", ())
    return {kernel["file"]: kernel["digest"] for kernel in kernels}
