"""benchmarks.forward: rows of one GPU, PyTorch and package are not mixed with others."""

from __future__ import annotations

import json
from argparse import Namespace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import forward
from generator.errors import NormforgeError
from generator.paths import GENERATED
from generator.problem import Problem, load_problems

FACTS = {"name": "NVIDIA H200", "sms": 132, "driver": "1", "cuda_driver": "2", "torch": "3"}
MODULE = GENERATED / "h200" / "rmsnorm_backward"


def test_resume_keeps_rows_of_the_same_gpu_and_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(problem: Problem, *_: object) -> dict[str, Any]:
        measured.append(str(problem))
        return {"shape": str(problem), "copy_us": 1.0, "cells": {"ours": {"ratio": 1.0}}}

    monkeypatch.setattr(forward, "measure", measure)
    args = Namespace(out=tmp_path / "out.json", resume=True)

    def run(shapes: str, module: Path = MODULE, **other: str) -> int:
        session: Any = SimpleNamespace(facts=FACTS | other, timer=None)
        return forward.compare(load_problems(shapes), module, session, args, inf)

    assert run("4096x256:bf16") == 0
    assert run("4096x256:bf16,4096x512:bf16") == 0
    assert measured == ["4096x256:bf16", "4096x512:bf16"]
    kept = args.out.read_text()
    assert [row["shape"] for row in json.loads(kept)["rows"]] == measured
    with pytest.raises(NormforgeError, match=r"another gpu .*leave out --resume"):
        run("4096x1024:bf16", name="NVIDIA H100")
    with pytest.raises(NormforgeError, match=r"another module .*leave out --resume"):
        run("4096x1024:bf16", GENERATED / "h100" / "rmsnorm_backward")
    assert args.out.read_text() == kept
