"""Orders in whole kernels that no run on the CPU can miss, because its threads do not run ahead of
each other in these ways: they are looked for in the PTX, where instructions of memory keep the
order of the source."""

from __future__ import annotations

import random
import re

import pytest

from generator.kernels.render import render
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.target import find_target
from tests.support.ptx import ptx_of
from tests.support.samples import space_of

TARGET = find_target("h200")
EVENT = re.compile(
    r"ld\.shared|st\.async|shfl\.sync|bar\.warp\.sync|bar\.sync|cp\.async\.bulk\.shared"
    r"|fence\.proxy\.async\.shared::cta|mbarrier\.arrive\.expect_tx|mbarrier\.try_wait"
)
FENCE, WARP, SEND, COPY = (
    "fence.proxy.async.shared::cta",
    "bar.warp.sync",
    "st.async",
    "cp.async.bulk.shared",
)


def events(shape: str, **knobs: int | str) -> list[str]:
    """Return the events of the main kernel of a variant with these knobs in shared memory, in its
    order."""
    problem = Problem.parse(shape)
    space = space_of(problem.operation)
    config = space.sample(problem, TARGET, random.Random(0), knobs)
    ptx = ptx_of(render(make_variant(config, problem)), "90a")
    (kernel,) = (part for part in ptx.split(".entry ") if part.startswith(problem.operation))
    return EVENT.findall(kernel)


def before(found: list[str], place: int, skipped: tuple[str, ...]) -> str:
    """The last event before a place that is none of those."""
    return next(event for event in reversed(found[:place]) if event not in skipped)


@pytest.mark.parametrize("reload", ["none", "smem"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_fence_lies_between_reads_of_a_stage_and_the_copies_that_refill_it(
    cluster: int, reload: str
) -> None:
    """Reads go through the generic proxy, bulk copies through the async one."""
    knobs = {"pipeline": "bulk", "reload": reload, "cluster": cluster}
    found = events("4096x4096:bf16", strategy="separate", **knobs)
    asked = "mbarrier.arrive.expect_tx"
    rounds = [
        place
        for place, event in enumerate(found)
        if event == asked and found[place + 1 : place + 2] == [COPY]
    ]
    assert len(rounds) >= 2, "the first rows and the refill"
    assert "ld.shared" in found[rounds[0] : rounds[-1]]
    assert [before(found, place, (asked, COPY)) for place in rounds] == [FENCE] * len(rounds)


@pytest.mark.parametrize("threads", [32, 256])
def test_rows_without_sums_are_read_with_a_fence_and_a_barrier_before_their_refill(
    threads: int,
) -> None:
    """No row sum waits for what was read: every reader fences, and then all of the team meet."""
    knobs = {"pipeline": "bulk", "threads_per_row": threads}
    found = events(f"rope:4096x{threads * 8}:bf16", **knobs)
    asked, reads = "mbarrier.arrive.expect_tx", [i for i, e in enumerate(found) if e == "ld.shared"]
    refills = [
        place for place, event in enumerate(found) if event == asked and found[place + 1] == COPY
    ]
    for refill in (place for place in refills if reads and place > reads[0]):
        last = max(place for place in reads if place < refill)
        fence, *shuffles, meets, again = found[last + 1 : refill]
        assert {*shuffles} <= {"shfl.sync"}  # partners
        assert (fence, again) == (FENCE, FENCE) and meets in (WARP, "bar.sync")
    assert len(refills) >= 2, "the first rows and the refill"


@pytest.mark.parametrize("pipeline", ["bulk", "async", "direct"])
def test_a_warp_meets_before_a_lane_sends_its_sum_to_the_cluster(pipeline: str) -> None:
    """A lane sends for all lanes of its warp, whose reads of the buffer have to be done."""
    knobs = {"pipeline": pipeline, "cluster": 2, "strategy": "separate"}
    found = events("4096x8192:bf16", **knobs)
    sends = [place for place, event in enumerate(found) if event == SEND]
    assert sends
    assert {before(found, place, (SEND,)) for place in sends} == {WARP}
