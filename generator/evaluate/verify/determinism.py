"""Checks that the bits of a kernel are the same in every run, and for every call option."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.guarded import Guarded
from generator.operations.operation import CHUNK_ELEMENTS
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from normforge.launch.row_layout import gap_factor
from normforge.operations import Signature
from normforge.spec import CHUNK_ROWS

RUNS = 20


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype have the same bits; a NaN equals itself."""
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def check_repeats(
    bench: Bench, inputs: Any, runs: int = RUNS, around: Callable[[int], None] | None = None
) -> str:
    """Runs `runs` times, each on outputs and scratch filled with another byte, and compares all
    bits with the first run. `around(i)` is called before run i, to disturb it. Returns "" or which
    run differed in what."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    firsts = bench.bits()
    for i in range(1, runs):
        bench.poison((0xFF, 0x7F, 0x00, 0x3C)[i % 4])
        if around is not None:
            around(i)
        bench.run(inputs)
        for name, out in bench.outputs.items():
            if not torch.equal(out.inside, firsts[name]):
                count = int((out.inside != firsts[name]).sum())
                return f"{name} of run {i} differs from run 0 in {count} bytes"
    return bench.fault()


def check_call_options(
    bench: Bench,
    inputs: Any,
    signature: Signature,
    batch_invariant: bool = False,
    packs: bool = True,
) -> str:
    """Compare calls with options that kernels accept at run time with plain calls, bit by bit: any
    output left out, no columns, sums as fp32 and added to an fp32 buffer, and where the kernel
    `packs`, rows as the heads of packed tensors. batch_invariant: sums are added to a buffer chunk
    by chunk (CHUNK_ROWS). Returns "" or what differed."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    plain = bench.bits()

    def differs(option: str, *names: str) -> str:
        for name in names:
            if not torch.equal(bench.outputs[name].inside, plain[name]):
                return f"{name} of a call {option} is not that of a plain call"
        return bench.fault()

    early = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.early}
    M, fault = len(next(iter(early.values()))), ""
    copies = {copy.name: copy.copy_of for copy in signature.copies}
    for left_out in plain:
        if left_out in copies:
            continue
        bench.poison()
        bench.run(inputs, instead={left_out: None})
        others = (n for n in plain if left_out not in (n, copies.get(n)))
        fault = fault or differs(f"without {left_out}", *others)
    if signature.sums:
        in_chunks = batch_invariant and M > CHUNK_ROWS
        fault = fault or _check_sums(bench, inputs, signature.sums.name, plain, in_chunks)
    for tensor in signature.all_columns:
        name, given = tensor.name, getattr(inputs, tensor.name)
        bench.run(replace(inputs, **{name: torch.full_like(given, float(not tensor.added))}))
        plain = bench.bits()
        bench.poison()
        inputs = replace(inputs, **{name: None})
        bench.run(inputs)
        fault = fault or differs(f"without {name}", *plain)
    for heads in (32, 8, 3, 2) if packs else ():
        if M % heads == 0 and gap_factor(M, heads):
            bench.poison()
            packed = {
                name: pack(t, heads, 1 + (i > 0)) for i, (name, t) in enumerate(early.items())
            }
            bench.run(replace(inputs, **packed))
            return fault or differs(f"with {heads} packed heads", *plain)
    return fault


def _check_sums(
    bench: Bench, inputs: Any, name: str, plain: Mapping[str, torch.Tensor], in_chunks: bool
) -> str:
    """Compare sums over the rows as fp32, and added to an fp32 buffer. in_chunks: they are added to
    a buffer chunk by chunk, which other bits than those of zeros would show."""
    sums = bench.outputs[name].tensor
    wide = Guarded((sums.numel(),), torch.float32, sums.device)
    wide.poison()
    bench.run(inputs, instead={name: wide.tensor}, dw_mode=DW_IN_FP32)
    narrowed = wide.tensor.to(sums.dtype)
    fault = ""
    if not torch.equal(narrowed.view(torch.uint8), plain[name].view(torch.uint8)):
        fault = f"{name} as fp32 does not round to {name}"
    start = torch.linspace(-3, 5, sums.numel(), device=sums.device)
    if in_chunks:
        start.zero_()
    expected = start + wide.tensor
    wide.tensor.copy_(start)
    bench.run(inputs, instead={name: wide.tensor}, dw_mode=DW_ADDED)
    if not (torch.equal(wide.tensor, expected) and wide.intact()):
        fault = fault or f"{name} added to a buffer is not the buffer and {name}"
    return fault


def pack(rows: torch.Tensor, heads: int, gap: int) -> torch.Tensor:
    """A copy of (M, N) rows as (M / heads, heads, N) with room for `gap` more heads in between, as
    in a slice of a packed QKV tensor."""
    M, N = rows.shape
    packed = rows.new_empty((M // heads, heads + gap, N))
    packed[:, :heads] = rows.view(M // heads, heads, N)
    return packed[:, :heads]


class Disturbance:
    """Work on another stream that takes SMs away and thrashes the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(1024, 1024, device=device)
        self.memory = torch.empty(64 << 20, dtype=torch.uint8, device=device)

    def __call__(self, i: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(1 + i % 3):
                self.memory.fill_(i % 251)
                torch.mm(self.matrix, self.matrix)


def digest(bench: Bench, inputs: Any) -> str:
    """Hash of the bits of all outputs, for comparing runs in different processes, and with what
    packages record: another way to make it would be other bits to them. Matrices enter through two
    sums, modulo 2^64, over their 32-bit (or smaller) words, one of them weighted by position."""
    bench.poison()
    bench.run(inputs)
    hasher = hashlib.sha256()
    for guarded in bench.outputs.values():
        words = guarded.inside
        if guarded.tensor.dim() == 1:
            hasher.update(words.cpu().numpy().tobytes())
            continue
        if words.numel() % 4 == 0:
            words = words.view(torch.int32)
        total = weighted = 0
        for start in range(0, words.numel(), CHUNK_ELEMENTS):
            part = words[start : start + CHUNK_ELEMENTS].to(torch.int64)
            place = torch.arange(start, start + len(part), device=part.device)
            total += int(part.sum())
            weighted += int((part * (place * 2654435761 + 1)).sum())
        hasher.update(f"{total % 2**64} {weighted % 2**64}".encode())
    return hasher.hexdigest()[:32]
