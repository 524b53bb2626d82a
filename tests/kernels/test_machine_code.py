"""Machine code that no GPU executes is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from generator.kernels.cubin_cache import compile_variant
from generator.kernels.machine_code import illegal_copies
from generator.kernels.resource_gate import refuse
from generator.problem import Problem
from generator.target import find_target
from tests.support.samples import plain_variant

LEGAL, ILLEGAL = 0xFAE, 0xDAE


@pytest.mark.parametrize("gpu", ["h200", "gb200", "a100"])
def test_a_copy_with_an_odd_register_for_its_policy_is_refused(gpu: str) -> None:
    target, problem = find_target(gpu), Problem.parse("4096x4096:bf16")
    variant = plain_variant(problem, target, pipeline="async", load_hint="evict_last")
    compiled = compile_variant(variant, target.arch)
    assert refuse(variant, compiled, problem, target) is None
    copies = [
        at
        for at in range(0, len(compiled.cubin) - 15, 16)
        if struct.unpack_from("<H", compiled.cubin, at)[0] & 0xFFF == LEGAL
    ]
    assert copies and illegal_copies(compiled.cubin) == 0
    planted = bytearray(compiled.cubin)
    for at in copies[:2]:
        (word,) = struct.unpack_from("<H", planted, at)
        struct.pack_into("<H", planted, at, word & 0xF000 | ILLEGAL)
    broken = replace(compiled, cubin=bytes(planted))
    assert illegal_copies(broken.cubin) == 2
    refused = refuse(variant, broken, problem, target)
    assert refused is not None and refused.outcome == "compile_error"
    assert "2 illegal instructions" in refused.note


def test_what_is_no_cubin_has_none() -> None:
    assert illegal_copies(b"") == illegal_copies(b"cubin") == 0
