"""Models that are trained by four processes, under FSDP2 and with tensor parallelism: the same bits
in every run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.four_gpus import MODELS, RANKS, STEPS, Trained, train_all

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]


def differing(one: Trained, two: Trained) -> list[str]:
    steps = enumerate(zip(one["weights"], two["weights"], strict=True))
    return [f"{w} after {n} steps" for n, (a, b) in steps for w in a if a[w] != b[w]]


@pytest.mark.parametrize("device", DEVICES)
def test_two_trainings_of_four_processes_have_the_same_bits(device: str, tmp_path: Path) -> None:
    """Each training has four processes, and a process group, of its own."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs four GPUs, {torch.cuda.device_count()} is here")
    pytest.importorskip("transformers", reason="needs transformers")
    runs = [train_all(device, tmp_path / str(run)) for run in range(2)]
    for name in MODELS:
        one, two = (run[name] for run in runs)
        for rank in range(RANKS):
            assert not differing(one[rank], two[rank]), f"{name}: other bits in the second run"
            assert two[rank]["losses"] == one[rank]["losses"], name
            # The norms that each rank of tensor parallelism has whole stay the same there.
            assert not differing(one[rank], one[0]), f"{name}: ranks do not agree"
            assert one[rank]["backwards"] == one[rank]["norms"] * STEPS, f"{name}: not all served"
            assert len(set(one[rank]["losses"])) == STEPS, f"{name}: the losses say nothing"
        batches = 2 if name.endswith("tensor") else RANKS
        assert len({tuple(rank["losses"]) for rank in one}) == batches, name
        for before, after in pairwise(one[0]["weights"]):
            same = [weight for weight in before if before[weight] == after[weight]]
            assert not same, f"{name}: a step did not change {same}"
