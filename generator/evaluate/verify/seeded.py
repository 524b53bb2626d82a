"""Inputs that have the same bits on every machine and with every version of PyTorch.

PyTorch promises neither of its random numbers. These come from integer arithmetic, and from sums
and products that are exact or rounded once, so that a digest of a kernel's outputs can be compared
with one from another machine.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from zlib import crc32

import torch

from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import digest
from generator.operations import Operation
from generator.operations.operation import CHUNK_ELEMENTS, row_slices
from generator.operations.row_inputs import incoming_gradients
from normforge import operations

_WORD = 0xFFFFFFFF
_POWERS = 11
"""The number of powers of 2, from 1, by which rows of the incoming gradient are scaled."""


def bits_of(operation: Operation, bench: Bench, inputs: Any) -> str:
    """Digest of a kernel's outputs for seeded inputs of the shapes and dtypes of `inputs`."""
    return digest(bench, seeded(operation, inputs))


def seeded(operation: Operation, inputs: Any) -> Any:
    """Return inputs of the same shapes and dtypes that have the same bits everywhere. Where an
    operation sums over rows, the second half of the rows takes back, but for small noise, what the
    first half adds: then the order of a sum shows in its bits."""
    tensors = {
        field.name: value
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    changed = {name: _numbers(tensor, crc32(name.encode())) for name, tensor in tensors.items()}
    if operation.sums_rows:
        signature = operations.OPERATIONS[operation.name].signature
        rows = [t.name for t in signature.inputs if t.role in ("rows", "row") and not t.late]
        incoming = incoming_gradients(operations.OPERATIONS[operation.name])
        half = len(changed[incoming[0]]) // 2
        for name in rows if half else ():
            first, second = changed[name][:half], changed[name][half : 2 * half]
            if name in incoming:
                _take_back(first, second)
            else:
                second.copy_(first)
        for group in signature.groups:  # alike in both halves
            changed[group.name] = changed[group.name][:1].clone()
    return replace(inputs, **changed)


def _numbers(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of eight significant bits, which every dtype holds, from 1/8 to 2 in magnitude."""
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    flat = made.view(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        part = flat[start : start + CHUNK_ELEMENTS]
        word = _words(start, len(part), seed, like.device)
        significand = ((word & 127) + 128).float()
        sign = 1.0 - 2.0 * ((word >> 7) & 1).float()
        part.copy_(significand * sign * _power(-7 - ((word >> 8) & 3)))
    return made


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two, exactly: by their exponents' bits, as exp2 need not be exact."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def _words(start: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Pseudo-random 32-bit words, by their places. A product wraps, and its low 32 bits stand."""
    word = torch.arange(start, start + count, device=device)
    word = (word * 2654435761 + seed) & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> 16)


def _take_back(first: torch.Tensor, second: torch.Tensor) -> None:
    """Return rows of different sizes, and rows that are the negative of these but for a small part
    of their own numbers, rounded once."""
    for part in row_slices(*first.shape):
        rows = torch.arange(part.start, part.stop, device=first.device)
        sizes = _power((rows * 7) % _POWERS)[:, None]
        noise = second[part].float() * 2.0**-7
        first[part] = first[part].float() * sizes
        second[part] = noise - first[part].float()
