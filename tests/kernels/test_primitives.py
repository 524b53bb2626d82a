"""NVRTC makes of the primitives what they promise about the order of memory. The emulator takes the
place of primitives.cuh, so nothing that runs on the CPU sees a weaker instruction."""

from __future__ import annotations

import re

import pytest

from generator.paths import template_named
from tests.support.ptx import ptx_of

PRELUDE = """
#define DEVICE __device__ __forceinline__
#define ROW_LOAD "ld.global"
#define ROW_STORE "st.global"
#define ROW_POLICY ""
#define ROW_HINT ""
#define ROW_OPERAND ""
#define LEAST_COLUMNS 1
constexpr int kVectorBytes = 16;
"""

# Primitive: a call of it, and the instructions that it has to be, in order.
ORDERED = {
    "load_acquire": ("*out = load_acquire(word)", ["ld.acquire.gpu.global.u32"]),
    "store_release": ("store_release(word, 1)", ["st.release.gpu.global.u32"]),
    "take_ticket": ("*out = take_ticket(word)", ["atom.acq_rel.gpu.global.add.u32"]),
    "read_acquire": ("*wide = read_acquire(ledger)", ["ld.acquire.gpu.global.u64"]),
    "book_in_order": (
        "*wide = book_in_order(ledger, 1)",
        ["atom.acq_rel.gpu.global.add.u64"],
    ),
    "mbarrier_init_fence": (
        "mbarrier_init_fence()",
        ["fence.mbarrier_init.release.cluster", "fence.proxy.async.shared::cta"],
    ),
    "mbarrier_expect": (
        "mbarrier_expect(barrier, 16)",
        ["mbarrier.arrive.expect_tx.release.cta.shared::cta.b64"],
    ),
    "mbarrier_wait": (
        "mbarrier_wait(barrier, 0)",
        ["mbarrier.try_wait.parity.acquire.cta.shared::cta.b64"],
    ),
    "mbarrier_wait_cluster": (
        "mbarrier_wait_cluster(barrier, 0)",
        ["mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"],
    ),
    "mbarrier_wait_sums": (
        "mbarrier_wait_sums(barrier, 0)",
        [
            "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64",
            "fence.acquire.sync_restrict::shared::cluster.cluster",
        ],
    ),
    "bulk_wait_written": ("bulk_wait_written()", ["cp.async.bulk.wait_group"]),
    "fence_async_shared": ("fence_async_shared()", ["fence.proxy.async.shared::cta"]),
    "fence_async_global": ("fence_async_global()", ["fence.proxy.async.global"]),
    "cluster_barrier": (
        "cluster_barrier()",
        ["barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"],
    ),
    "cluster_barrier_of_inits": (
        "cluster_barrier_of_inits()",
        ["barrier.cluster.arrive.relaxed.aligned", "barrier.cluster.wait.acquire.aligned"],
    ),
    "mbarrier_arrive": (
        "mbarrier_arrive(barrier)",
        ["mbarrier.arrive.release.cta.shared::cta.b64"],
    ),
    "wait_for_primary": ("wait_for_primary()", ["griddepcontrol.wait"]),
    "allow_dependents": ("allow_dependents()", ["griddepcontrol.launch_dependents"]),
}
ORDERING = re.compile(
    r"^\s*(?:@\S+\s+)?((?:ld\.acquire|ld\.relaxed|st\.release|st\.relaxed|atom|red|fence|mbarrier"
    r"|barrier\.cluster|cp\.async\.bulk\.wait_group|griddepcontrol)[\w.:]*)",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[str]]:
    """Return by primitive the instructions that order memory of a kernel that calls nothing
    else."""
    kernels = [
        f'extern "C" __global__ void k_{name}(unsigned* word, unsigned* out, Ledger* ledger,'
        f" Ledger* wide) {{ __shared__ unsigned long long barrier[1]; (void)barrier; {call}; }}"
        for name, (call, _) in ORDERED.items()
    ]
    names = ("primitives", "primitives_producer", "primitives_producer_cluster")
    primitives = [template_named(f"{name}.cuh").read_text() for name in names]
    ptx = ptx_of("\n".join([PRELUDE, *primitives, *kernels]), "90a")
    bodies = re.findall(r"\.entry k_(\w+)\((.*?)ret;", ptx, re.DOTALL)
    return {name: ORDERING.findall(body) for name, body in bodies}


@pytest.mark.parametrize("name", ORDERED)
def test_primitive_orders_memory_as_its_name_says(
    instructions: dict[str, list[str]], name: str
) -> None:
    assert instructions[name] == ORDERED[name][1]
