"""Inputs for digests that are compared between machines: always the same, and telling."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.evaluate.verify import determinism
from generator.evaluate.verify import seeded as module
from generator.evaluate.verify.determinism import digest
from generator.evaluate.verify.guarded import Guarded
from generator.evaluate.verify.seeded import seeded
from generator.operations import OPERATIONS, Operation
from generator.problem import Problem
from normforge import operations as library

CPU = torch.device("cpu")
DIGESTS = {
    ("rmsnorm_backward", "48x40:bf16"): "3d4d16be9620d0e2",
    ("rmsnorm_backward", "48x40:fp16:fp32+offset+residual_fp32"): "c4699703a4040ba8",
    ("layernorm_backward", "7x40:fp32"): "1b34d2d14472ea71",
    ("rmsnorm_forward", "48x40:bf16"): "4202d3fe61c28ca1",
}


def inputs_of(operation: Operation, shape: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """seed: of the inputs whose shapes these take."""
    of = operation.name if operation.signature else "rmsnorm_backward"
    made = operation.make_inputs(Problem.parse(shape, of), CPU, seed=seed)
    found = seeded(operation, made)
    assert found.offset == made.offset
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


@pytest.mark.parametrize(("name", "shape"), DIGESTS)
def test_numbers_are_the_same_whoever_makes_them(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of PyTorch and the chunks do not matter: packages record what comes of the
    numbers."""
    found = inputs_of(OPERATIONS[name], shape)
    assert digest_of(found) == DIGESTS[name, shape]
    assert digest_of(inputs_of(OPERATIONS[name], shape, seed=5)) == digest_of(found)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7)
    assert digest_of(inputs_of(OPERATIONS[name], shape)) == digest_of(found)
    for tensor in found.values():
        assert tensor.isfinite().all()
        assert tensor.count_nonzero() > tensor.numel() * 0.9
    assert len({digest_of({"": tensor}) for tensor in found.values()}) == len(found)


def test_a_digest_is_the_same_whoever_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks give the same: packages record the digest."""
    outputs = {
        "dx": Guarded((6, 8), torch.bfloat16, CPU),
        "copy": Guarded((5, 3), torch.bfloat16, CPU),
        "dw": Guarded((8,), torch.float32, CPU),
    }

    def run(factor: int) -> None:
        for out in outputs.values():
            out.inside.copy_(torch.arange(out.bytes) * factor)

    bench: Any = SimpleNamespace(outputs=outputs, poison=lambda: None, run=run)
    known = "3a1738f85567165eedeb497ec26fff39"
    assert digest(bench, 37) == known
    monkeypatch.setattr(determinism, "CHUNK_ELEMENTS", 7)
    assert digest(bench, 37) == known
    assert digest(bench, 38) != known


def test_the_order_of_a_sum_over_rows_shows_in_its_bits() -> None:
    """It shows also once the sum is rounded to bf16, and by a swap of two partial sums."""
    found = inputs_of(OPERATIONS["rmsnorm_backward"], "512x256:bf16")
    terms = found["dy"].float() * found["x"].float() * found["rstd"][:, None]
    parts = terms.view(16, 32, 256).sum(1)

    def total(order: list[int]) -> torch.Tensor:
        sums = torch.zeros(256)
        for place in order:
            sums = sums + parts[place]
        return sums.bfloat16()

    plain = [*range(16)]
    assert (total(plain) != total(plain[::-1])).float().mean() > 0.5
    assert (total(plain) != total([1, 2, 0, *plain[3:]])).any()


@pytest.mark.parametrize("name", ["rmsnorm_sum2_backward", "rmsnorm_sum3_backward"])
def test_every_gradient_of_a_sum_is_taken_back(name: str) -> None:
    """A sum over rows would have the same bits in any order for one that is small."""
    operation = OPERATIONS[name]
    found = inputs_of(operation, "48x40:bf16")
    cancelling = operation.make_cancelling(
        Problem.parse("48x40:bf16", name),
        operation.make_inputs(Problem.parse("48x40:bf16", name), CPU),
    )
    gradients = [n for n in found if n.startswith("dy")]
    assert len(gradients) == library.OPERATIONS[name].incoming
    for one in gradients:
        for rows in (found[one], getattr(cancelling, one)):
            first, second = rows.double()[:24], rows.double()[24:]
            assert 0 < (first + second).norm() < first.norm() / 50
            assert first.norm(dim=-1).max() > 100 * first.norm(dim=-1).min()
