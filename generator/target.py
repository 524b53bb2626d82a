"""The GPU that kernels are made for, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from generator.disk import read_yaml
from generator.errors import NormforgeError, one_line
from generator.paths import SEARCH_SPACES
from normforge.spec import ceil_div, round_up

GPUS_FILE = SEARCH_SPACES / "gpus.yaml"

WARP = 32
SMEM_RESERVED_PER_CTA = 1024
"""Bytes the driver keeps per CTA on cc 8.0 and later (CUDA programming guide, shared memory)."""
_REGISTER_UNIT = 256  # registers are allocated per warp in this unit (CUDA occupancy calculator)
_SMEM_UNIT = 128
_OTHER_FIELDS = {
    "title",
    "device_names",
    "arch",
    "compute_capability",
    "has_bulk_copy",
    "sources",
    "smem_per_sm_kib",
    "smem_per_cta_kib",
    "l2_mib",
    "bandwidth_gbs",
    "clock_mhz",
}
"""Fields of an entry beside those that are counts."""


@dataclass(frozen=True)
class Target:
    """A GPU. Sizes are bytes, bandwidth bytes per second, clock hertz.

    has_bulk_copy: cp.async.bulk, mbarrier transaction counts, clusters and st.async;
    max_vector_bytes: widest global load or store of one thread; barriers_per_sm: CTA barriers that
    one SM has for all its CTAs.
    """

    name: str
    title: str
    device_names: tuple[str, ...]
    arch: str
    compute_capability: tuple[int, int]
    sms: int
    registers_per_sm: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    smem_per_sm: int
    smem_per_cta: int
    barriers_per_sm: int
    has_bulk_copy: bool
    max_vector_bytes: int
    l2_bytes: int
    bandwidth: float
    clock_hz: float

    def __str__(self) -> str:
        return self.name

    @property
    def has_fp8(self) -> bool:
        """True when the GPU converts to FP8: PTX ISA, cvt with .e4m3x2 needs sm_89."""
        return self.compute_capability >= (8, 9)

    def occupancy(self, threads: int, registers: int, smem_bytes: int, barriers: int = 1) -> int:
        """CTAs of `threads` threads that fit on one SM, by the rules of the CUDA occupancy
        calculator (registers per warp rounded up to 256, smem to 128 bytes plus 1 KiB a CTA).

        registers: of one thread; smem_bytes: of one CTA, static and dynamic; barriers: CTA barriers
        that the kernel uses, of which a barrier whose number is not a constant takes all 16."""
        warps = ceil_div(threads, WARP)
        per_warp = round_up(registers * WARP, _REGISTER_UNIT)
        # Each of the four schedulers of an SM owns a quarter of the registers.
        by_registers = 4 * (self.registers_per_sm // 4 // per_warp) // warps
        if smem_bytes > self.smem_per_cta:
            return 0
        return min(
            by_registers,
            self.max_threads_per_sm // (warps * WARP),
            self.smem_per_sm // self.smem_of_cta(smem_bytes),
            self.max_ctas_per_sm,
            self.barriers_per_sm // max(1, barriers),
        )

    def smem_of_cta(self, smem_bytes: int) -> int:
        """Bytes of an SM's shared memory that one CTA of `smem_bytes` takes."""
        return round_up(smem_bytes, _SMEM_UNIT) + SMEM_RESERVED_PER_CTA


def _target(name: str, entry: dict[str, Any]) -> Target:
    """The target of an entry that holds its architecture's numbers as well."""
    counts = (
        "sms",
        "registers_per_sm",
        "max_threads_per_sm",
        "max_ctas_per_sm",
        "barriers_per_sm",
        "max_vector_bytes",
    )

    def check(field: str, right: bool, wanted: str) -> None:
        if not right:
            raise ValueError(f"{field} is {entry[field]!r}, and not {wanted}")

    def count(field: str) -> int:
        value = entry[field]
        check(field, type(value) is int and value > 0, "a whole number above 0")
        return int(value)

    def number(field: str) -> float:
        value = entry[field]
        right = type(value) in (int, float) and 0 < value < math.inf
        check(field, right, "a number above 0 (YAML wants a sign in 4.8e+3)")
        return float(value)

    names, capability = entry["device_names"], entry["compute_capability"]
    text = isinstance(names, list) and all(type(part) is str and part for part in names)
    check("device_names", text and bool(names), "a list of names")
    integers = isinstance(capability, list) and [type(part) for part in capability] == [int, int]
    check("compute_capability", integers, "a list like [9, 0]")
    check("has_bulk_copy", type(entry["has_bulk_copy"]) is bool, "true or false")
    target = Target(
        name=name,
        title=str(entry["title"]),
        device_names=tuple(names),
        arch=str(entry["arch"]),
        compute_capability=(capability[0], capability[1]),
        **{field: count(field) for field in counts},
        smem_per_sm=count("smem_per_sm_kib") * 1024,
        smem_per_cta=count("smem_per_cta_kib") * 1024,
        has_bulk_copy=entry["has_bulk_copy"],
        l2_bytes=int(number("l2_mib") * 1024 * 1024),
        bandwidth=number("bandwidth_gbs") * 1e9,
        clock_hz=number("clock_mhz") * 1e6,
    )
    if unknown := set(entry) - set(counts) - _OTHER_FIELDS:
        raise ValueError(f"no field is called {', '.join(sorted(unknown))}")
    return target


@cache
def load_targets(path: Path = GPUS_FILE) -> dict[str, Target]:
    """Every GPU of the table by its name. Raises NormforgeError for a table that is damaged."""
    content = read_yaml(path, "the GPUs in ")
    found = {}
    name = ""
    try:
        architectures: dict[str, dict[str, Any]] = dict(content["architectures"])
        entries: dict[str, dict[str, Any]] = dict(content["gpus"])
        for name, entry in entries.items():
            if entry["arch"] not in architectures:
                raise ValueError(f"arch {entry['arch']} is not one of 'architectures'")
            found[name] = _target(name, {**architectures[entry["arch"]], **entry})
    except KeyError as error:
        where = f"the entry '{name}' has" if name else "it has"
        raise NormforgeError(
            f"{path}: {where} no field {error}; every GPU needs the fields that the others have"
        ) from error
    except (TypeError, ValueError) as error:
        where = f"unreadable entry '{name}'" if name else "unreadable"
        raise NormforgeError(f"{path}: {where} ({one_line(error)})") from error
    return found


def find_target(name: str, *also: str) -> Target:
    """The target called `name`. Raises NormforgeError, with the names that there are, and `also`
    with others that the command line takes."""
    targets = load_targets()
    if name not in targets:
        near = get_close_matches(name.lower(), targets, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        known = ", ".join([*targets, *also])
        raise NormforgeError(f"unknown GPU '{name}': {hint}known are {known}")
    return targets[name]


def match_device(device_name: str, sms: int) -> Target | None:
    """The target whose device names occur in the driver's `device_name`, with the live count of
    SMs (a MIG slice or a cut-down part has fewer). None when no entry matches."""
    found = [
        (len(part), target)
        for target in load_targets().values()
        for part in target.device_names
        if part.lower() in device_name.lower()
    ]
    if not found:
        return None
    _, target = max(found, key=lambda pair: pair[0])
    return target if target.sms == sms else replace(target, sms=sms)
