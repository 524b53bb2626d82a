"""GPUs as numbers: the table, its sources, occupancy, and which entry a device is."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from generator import target as target_module
from generator.errors import NormforgeError
from generator.target import (
    GPUS_FILE,
    SMEM_RESERVED_PER_CTA,
    Target,
    find_target,
    load_targets,
    match_device,
)
from normforge.table import runs_on
from tests.support.samples import targets

NUMBERS = ("sms", "l2_mib", "bandwidth_gbs", "clock_mhz")
OCCUPANCY = (
    "registers_per_sm",
    "max_threads_per_sm",
    "max_ctas_per_sm",
    "smem_per_sm_kib",
    "smem_per_cta_kib",
)
FEATURES = ("barriers_per_sm", "has_bulk_copy", "max_vector_bytes")
TABLE = yaml.safe_load(GPUS_FILE.read_text())


# ---- The table -----------------------------------------------------------------------------------


def test_table_has_the_gpus_that_the_project_promises() -> None:
    promised = ("gb200", "b200", "gb300", "h200", "h100", "a100", "l40s", "rtx-pro-6000")
    assert set(load_targets()) >= {*promised, "rtx-5090"}


@pytest.mark.parametrize("name", load_targets())
def test_every_number_of_a_gpu_has_a_source(name: str) -> None:
    entry = TABLE["gpus"][name]
    assert set(entry) == {"title", "device_names", "arch", "sources", *NUMBERS}
    assert set(entry["sources"]) == {"device_names", *NUMBERS}
    for what, source in entry["sources"].items():
        assert len(source.split()) >= 3, f"{what} of {name} has no source"


@pytest.mark.parametrize("arch", TABLE["architectures"])
def test_every_number_of_an_architecture_has_a_source(arch: str) -> None:
    entry = TABLE["architectures"][arch]
    assert set(entry) == {"compute_capability", "sources", *OCCUPANCY, *FEATURES}
    assert set(entry["sources"]) == {"occupancy limits", *FEATURES}
    assert arch in {gpu["arch"] for gpu in TABLE["gpus"].values()}


def test_a_gpu_is_one_entry(tmp_path: Path) -> None:
    """Nothing but the table knows it."""
    content = yaml.safe_load(GPUS_FILE.read_text())
    content["gpus"]["x1"] = {**content["gpus"]["h200"], "title": "X1", "sms": 77}
    path = tmp_path / "gpus.yaml"
    path.write_text(yaml.safe_dump(content))
    added, known = load_targets(path)["x1"], find_target("h200")
    assert added == replace(known, name="x1", title="X1", sms=77)


@pytest.mark.parametrize("name", load_targets())
def test_numbers_of_a_gpu_are_in_their_units(name: str) -> None:
    gpu = find_target(name)
    assert str(gpu) == gpu.name == name
    assert runs_on(gpu.arch, gpu.compute_capability)
    assert 50 <= gpu.sms <= 300
    assert gpu.registers_per_sm == 65536
    assert gpu.max_threads_per_sm % 32 == 0
    assert gpu.smem_per_sm - gpu.smem_per_cta == SMEM_RESERVED_PER_CTA
    assert 32e6 < gpu.l2_bytes < 200e6
    assert 0.5e12 < gpu.bandwidth < 10e12
    assert 1e9 < gpu.clock_hz < 3.5e9
    major = gpu.compute_capability[0]
    assert gpu.has_bulk_copy == (major >= 9)
    assert gpu.max_vector_bytes == (32 if major >= 10 else 16)
    assert gpu.barriers_per_sm == gpu.max_ctas_per_sm * (
        16 if major < 9 else 2 if major < 11 else 1
    )


def test_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NormforgeError) as caught:
        find_target("h20")
    assert "unknown GPU 'h20'" in str(caught.value)
    for name in load_targets():
        assert name in str(caught.value)
    assert "auto" not in str(caught.value), "only a run takes it"


@pytest.mark.parametrize(
    "damage",
    [
        "gpus: [",
        "",
        "gpus:",
        "gpus: {h200: }",
        "gpus: {h200: {sms: 132}}",
        "gpus: [h200]",
        "other: {}",
    ],
)
def test_damaged_table_is_one_sentence(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(damage)
    with pytest.raises(NormforgeError, match=r"gpus\.yaml") as caught:
        load_targets(path)
    assert "\n" not in str(caught.value)


def test_gpus_from_ada_on_convert_to_fp8() -> None:
    """CUDA's table of features by compute capability: 8.9 and up."""
    assert {name for name, gpu in load_targets().items() if not gpu.has_fp8} == {"a100"}


@pytest.mark.parametrize("field", [*NUMBERS, "arch", *OCCUPANCY, *FEATURES, "compute_capability"])
def test_entry_without_a_field_is_refused_by_its_name(tmp_path: Path, field: str) -> None:
    content = yaml.safe_load(GPUS_FILE.read_text())
    gpu = content["gpus"]["h200"]
    (gpu if field in gpu else content["architectures"][gpu["arch"]]).pop(field)
    path = tmp_path / "gpus.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(NormforgeError, match=field):
        load_targets(path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sms", 0, "sms is 0, and not a whole number above 0"),
        ("sms", 131.9, "sms is 131.9, and not a whole number above 0"),
        ("sms", "many", "sms is 'many', and not a whole number above 0"),
        ("clock_mhz", "1.9e3", "clock_mhz is '1.9e3', and not a number above 0 (YAML wants a sign"),
        ("device_names", "NVIDIA H200", "device_names is 'NVIDIA H200', and not a list"),
        ("compute_capability", "90", "compute_capability is '90', and not a list like [9, 0]"),
        ("has_bulk_copy", "false", "has_bulk_copy is 'false', and not true or false"),
        ("clock_mhz", -1, "clock_mhz is -1"),
        ("bandwidth_gbs", float("inf"), "bandwidth_gbs is inf"),
        ("l2_mib", True, "l2_mib is True"),
        ("arch", "sm_100z", "arch sm_100z is not one of 'architectures'"),
        ("smms", 3, "no field is called smms"),
    ],
)
def test_entry_with_a_value_that_cannot_be_is_refused(
    tmp_path: Path, field: str, value: object, says: str
) -> None:
    content = yaml.safe_load(GPUS_FILE.read_text())
    content["gpus"]["h200"][field] = value
    path = tmp_path / "gpus.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(NormforgeError, match=re.escape(says)) as caught:
        load_targets(path)
    assert "'h200'" in str(caught.value)


# ---- Occupancy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "smem_bytes", "barriers", "ctas"),
    [
        # Threads: 2048 on an SM of a data-centre part, 1536 on the others.
        ("h200", 1024, 16, 0, 1, 2),
        ("l40s", 1024, 16, 0, 1, 1),
        ("rtx-5090", 512, 16, 0, 1, 3),
        # CTAs: 32 slots, 24 on sm_89 and sm_120. 33 threads are two warps.
        ("h200", 33, 16, 0, 1, 32),
        ("l40s", 32, 16, 0, 1, 24),
        # Registers: 32 a thread are 1024 a warp, 64 warps: all 2048 threads.
        ("h200", 256, 32, 0, 1, 8),
        # 33 are rounded up to 40 (256 a warp): 1280 a warp, 12 of them in a quarter of 16384.
        ("h200", 256, 33, 0, 1, 6),
        ("h200", 256, 40, 0, 1, 6),
        # 168 are 5376 a warp: 3 in a quarter, 12 in all (a pool of 65536 would not hold a 13th).
        ("h200", 128, 168, 0, 1, 3),
        ("h200", 384, 168, 0, 1, 1),
        ("h200", 512, 128, 0, 1, 1),
        # 136 are 4352 a warp: 3 in a quarter, so 12 warps, although 15 would fit one pool.
        ("h200", 160, 136, 0, 1, 2),
        # 16 warps would take 17 quarters' worth: no CTA fits.
        ("h200", 512, 136, 0, 1, 0),
        ("h200", 1024, 72, 0, 1, 0),
        # Shared memory: 228 KiB on an SM, 1 KiB of it for the driver in every CTA.
        ("h200", 128, 32, 227 * 1024, 1, 1),
        ("h200", 128, 32, 227 * 1024 + 1, 1, 0),
        ("h200", 128, 32, 113 * 1024, 1, 2),
        ("h200", 128, 32, 113 * 1024 + 1, 1, 1),
        # 56 KiB and a byte take 56.125 KiB in units of 128 bytes, 57.125 with the driver's.
        ("h200", 128, 32, 56 * 1024, 1, 4),
        ("h200", 128, 32, 56 * 1024 + 1, 1, 3),
        ("a100", 128, 32, 163 * 1024, 1, 1),
        ("rtx-5090", 128, 32, 49 * 1024, 1, 2),
        # Barriers: two for every CTA slot on sm_90 and sm_100, one on sm_120, no limit before.
        ("h200", 128, 32, 0, 16, 4),
        ("gb200", 128, 32, 0, 16, 4),
        ("h200", 128, 32, 0, 5, 12),
        ("rtx-5090", 128, 32, 0, 16, 1),
        ("l40s", 128, 32, 0, 16, 12),
    ],
)
def test_occupancy_by_hand(
    gpu: str, threads: int, registers: int, smem_bytes: int, barriers: int, ctas: int
) -> None:
    assert find_target(gpu).occupancy(threads, registers, smem_bytes, barriers) == ctas


@given(
    gpu=targets(),
    warps=st.integers(1, 32),
    registers=st.integers(16, 255),
    smem_bytes=st.integers(0, 240 * 1024),
    barriers=st.integers(1, 16),
    more=st.integers(0, 64),
)
def test_resident_ctas_stay_within_every_limit_and_one_more_breaks_one(
    gpu: Target,
    warps: int,
    registers: int,
    smem_bytes: int,
    barriers: int,
    more: int,
) -> None:
    def within(ctas: int) -> bool:
        # Warps are dealt to the four schedulers; each holds its own quarter of the registers.
        per_scheduler = -(-ctas * warps // 4)
        return (
            ctas <= gpu.max_ctas_per_sm
            and ctas * warps * 32 <= gpu.max_threads_per_sm
            and per_scheduler * -(-registers * 32 // 256) * 256 <= gpu.registers_per_sm // 4
            and ctas * (-(-smem_bytes // 128) * 128 + 1024) <= gpu.smem_per_sm
            and ctas * barriers <= gpu.barriers_per_sm
        )

    ctas = gpu.occupancy(32 * warps, registers, smem_bytes, barriers)
    assert within(ctas)
    assert not within(ctas + 1)
    assert gpu.occupancy(32 * warps, min(255, registers + more), smem_bytes, barriers) <= ctas
    assert gpu.occupancy(32 * warps, registers, smem_bytes + 512 * more, barriers) <= ctas


# ---- Devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("nvidia h100 80gb hbm3", "h100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_device_is_matched_by_its_name(device: str, name: str) -> None:
    target = find_target(name)
    assert match_device(device, target.sms) == target


def test_longest_name_wins_where_one_contains_another(monkeypatch: pytest.MonkeyPatch) -> None:
    vague = replace(find_target("h100"), device_names=("NVIDIA H",))
    known = {"vague": vague, "h200": find_target("h200"), "again": replace(vague, name="again")}
    monkeypatch.setattr(target_module, "load_targets", lambda: known)
    found = match_device("NVIDIA H200", 132)
    assert found is not None
    assert found.name == "h200"


@pytest.mark.parametrize("device", ["NVIDIA L40", "Tesla V100-SXM2-16GB", "NVIDIA GH100", ""])
def test_device_that_is_not_in_the_table_matches_nothing(device: str) -> None:
    assert match_device(device, 108) is None


def test_device_with_fewer_sms_is_the_same_gpu_with_fewer_sms() -> None:
    whole = find_target("h200")
    part = match_device("NVIDIA H200", 60)
    assert part is not None
    assert part.sms == 60
    for field in fields(whole):
        if field.name != "sms":
            assert getattr(part, field.name) == getattr(whole, field.name)
