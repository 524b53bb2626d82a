"""PTX's memory model forbids the bad outcome of every protocol, and allows it of weaker ones.

The protocols are in tests/support/protocols, the checker in tests/support/ptx_memory_model.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages.blocks import pages
from generator.kernels.render import _fragment
from generator.kernels.row_expressions import Form
from generator.kernels.strategies import STRATEGIES, Strategy
from generator.paths import TEMPLATES
from normforge.operations import Signature, signature_of
from normforge.operations.tensor import added_rows, rows, rows_out
from tests.support.litmus import Event, Program, Thread
from tests.support.primitives import bodies, calls, event, instructions
from tests.support.protocols import PROTOCOLS, protocol
from tests.support.protocols.protocol import Protocol
from tests.support.protocols.stages import refill_in_cluster, row_sums
from tests.support.ptx_memory_model import Model, executions, find

WEAKENINGS = [(name, what) for name, p in PROTOCOLS.items() for what in p.weakenings]
HARMLESS = [(name, what) for name, p in PROTOCOLS.items() for what in p.harmless]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_bad_outcome_is_forbidden(name: str) -> None:
    checked = PROTOCOLS[name]
    assert next(executions(checked.program), None), "not even the good outcome is allowed"
    found = find(checked.program, checked.bad)
    assert found is None, f"{checked.bad_outcome}: {found}"


@pytest.mark.parametrize(("name", "weakening"), WEAKENINGS)
def test_the_bad_outcome_of_a_weaker_protocol_is_found(name: str, weakening: str) -> None:
    checked = PROTOCOLS[name]
    assert find(checked.weakenings[weakening](checked.program), checked.bad) is not None


@pytest.mark.parametrize(("name", "weakening"), HARMLESS)
def test_a_weakening_that_the_model_forgives(name: str, weakening: str) -> None:
    """It takes away what the order does not rest on, or what is there for other reasons."""
    checked = PROTOCOLS[name]
    assert find(checked.harmless[weakening](checked.program), checked.bad) is None


@pytest.mark.parametrize(
    ("exchange", "read", "early"), [(row_sums, "sum of A", 2), (refill_in_cluster, "first", 2)]
)
def test_clusters_rest_on_what_a_sender_did_before_it_sent(
    exchange: Callable[[bool], Protocol], read: str, early: int
) -> None:
    """One step is assumed for using a buffer or a stage again behind an exchange of row sums.

    The complete-tx of st.async is a release at cluster scope. Other releases cover what their
    thread did before. Of bulk copies the ISA denies that ("Asynchronous Operations"); of st.async
    it says nothing. Were it denied there as well, a read could be overtaken by a store that follows
    it, and see what is sent or copied next. That a sum arrives before it is read needs no more.
    """
    assumed, denied = exchange(True), exchange(False)
    assert find(assumed.program, assumed.bad) is None
    assert {found.values[read] for found in executions(denied.program)} == {1, early}


def test_turns_need_the_fence_before_a_copy_in_the_strict_reading_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked, weakening = PROTOCOLS["`bulk_reduce` in turns"], "no proxy fence before B's bulk copy"
    program = checked.weakenings[weakening](checked.program)
    assert find(program, checked.bad)
    monkeypatch.setattr(Model, "acts_for", lambda model, access, fence: True)
    assert find(program, checked.bad) is None


def test_the_page_says_how_large_programs_are() -> None:
    for checked in PROTOCOLS.values():
        threads = checked.program.threads
        assert len({thread.cta for thread in threads}) <= 3
        assert max(Counter((t.cta, t.launch) for t in threads).values()) <= 3
        assert max(thread.launch for thread in threads) < 3


def test_the_page_says_what_was_checked() -> None:
    """The table in docs/emulator.md."""
    rows = [
        f"| {name} | {p.bad_outcome} | {len(p.weakenings)} | {'; '.join(p.harmless)} |"
        for name, p in PROTOCOLS.items()
    ]
    page = next(page for page in pages() if page.name == "emulator.md").read_text()
    table = "\n".join(row.replace("|  |", "| |") for row in rows)
    assert table in page, f"the table should be\n{table}"


# -- What ties the protocols to the source --

EMITS = {
    "load_workspace": "ld.relaxed.gpu.global.v4.f32",
    "store_row": "st.global",
    "store_workspace": "st.global.v4.f32",
    "store_workspace_word": "st.global.f32",
    "add_workspace": "red.relaxed.gpu.global.add.v4.f32",
    "send_words": "st.relaxed.gpu.global.v4.f32",
    "receive_words": "ld.relaxed.gpu.global.v4.f32",
    "empty_words": "st.relaxed.gpu.global.v4.f32",
    "load_acquire": "ld.acquire.gpu.global.u32",
    "load_relaxed": "ld.relaxed.gpu.global.u32",
    "store_release": "st.release.gpu.global.u32",
    "store_relaxed": "st.relaxed.gpu.global.u32",
    "take_ticket": "atom.acq_rel.gpu.global.add.u32",
    "read_acquire": "ld.acquire.gpu.global.u64",
    "read_relaxed": "ld.relaxed.gpu.global.u64",
    "book_relaxed": "red.relaxed.gpu.global.add.u64",
    "book_in_order": "atom.acq_rel.gpu.global.add.u64",
    "book_and_read": "atom.relaxed.gpu.global.add.u64",
    "load_shared": "ld",
    "load_shared4": "ld",
    "load_shared_word": "ld",
    "load_shared_packet": "ld.shared.u16",
    "store_shared4": "st",
    "store_shared_word": "st",
    "warp_barrier": "bar.warp.sync",
    "cta_barrier": "bar.sync",
    "named_barrier": "bar.sync",
    "mbarrier_expect": "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64",
    "mbarrier_wait": "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64",
    "mbarrier_wait_cluster": "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
    "mbarrier_wait_sums": "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64",
    "bulk_load": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "bulk_load_numbers": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
    "bulk_store": "cp.async.bulk.global.shared::cta.bulk_group",
    "bulk_add": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    "bulk_wait_written": "cp.async.bulk.wait_group",
    "fence_async_shared": "fence.proxy.async.shared::cta",
    "fence_async_global": "fence.proxy.async.global",
    "store_cluster": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32",
}
"""The PTX that the event of each primitive stands for. Plain C++ is a weak ld or st."""


@pytest.mark.parametrize("primitive", EMITS)
def test_a_primitive_emits_what_its_event_stands_for(primitive: str) -> None:
    assert instructions(primitive)[0] == EMITS[primitive]


def test_a_fence_restricted_to_shared_memory_orders_nothing_else() -> None:
    """A sum in shared memory that is waited for is seen; one in global memory may be missed."""
    for place, missed in (("shared sum", False), ("sum", True)):
        sent = [Event("write", "sent", place, 1)]
        sent.append(Event("arrive", "told", "phase", order="release", scope="cluster"))
        wait = event("mbarrier_wait_sums", "wait", "phase")
        fence = event("mbarrier_wait_sums", "fence", instruction=1)
        threads = (
            Thread(tuple(sent), "A", "cluster"),
            Thread((wait, fence, Event("read", "read", place)), "B", "cluster"),
        )
        found = find(Program(threads), lambda seen: seen["read"] == 0)
        assert (found is not None) == missed


def test_every_event_of_a_protocol_is_a_primitive_of_the_table() -> None:
    folder = Path(protocol.__file__).parent
    source = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    used = set(re.findall(r"(?:event|sends|bulk_out)\(\s*(?:\*\(\s*)?\"(\w+)\"", source))
    used |= set(re.findall(r"\"((?:bulk|mbarrier_wait)\w*)\"", source))
    used |= {"bulk_load", "bulk_load_numbers", "store_cluster"}
    assert used - {"A", "B", "C"} == set(EMITS)


@pytest.fixture
def edited() -> Iterator[dict[str, str]]:
    """The bodies of the primitives, to be changed."""
    instructions.cache_clear()
    kept = dict(bodies())
    yield bodies()
    bodies().update(kept)
    instructions.cache_clear()


@pytest.mark.parametrize(
    ("primitive", "old", "new", "changed"),
    [
        ("take_ticket", "acq_rel", "relaxed", {"order": "relaxed"}),
        ("store_release", ".gpu", ".cta", {"scope": "cta"}),
        ("load_workspace", ".relaxed.gpu", "", {"order": "weak"}),
        ("bulk_wait_written", "wait_group", "wait_group.read", {"full": False}),
        ("fence_async_global", ".global", ".shared::cta", {"place": "shared"}),
        ("book_and_read", "atom", "red", {"returns": False}),
    ],
)
def test_a_weaker_instruction_makes_a_weaker_event(
    primitive: str, old: str, new: str, changed: dict[str, object], edited: dict[str, str]
) -> None:
    def seen() -> Event:
        instructions.cache_clear()
        return event(primitive, "event")

    assert {name: getattr(seen(), name) for name in changed} != changed
    edited[primitive] = edited[primitive].replace(old, new)
    assert {name: getattr(seen(), name) for name in changed} == changed


WORDS = ["store_shared_word", "store_shared_word", "cta_barrier"]
WORDS += ["load_shared_word", "load_shared_word"]  # of finish_slices: its broadcast of two words
FETCH = ["mbarrier_expect", "bulk_load", "bulk_load", "bulk_load"]
SHARED = {
    ("dw_context", "broadcast"): [
        *("store_shared_word", "cta_barrier", "load_shared_word", "cta_barrier")
    ],
    ("turns", "begin"): ["take_ticket", "broadcast"],
    ("turns", "await"): ["load_acquire", "cta_barrier"],
    ("turns", "pass"): ["cta_barrier", "store_release"],
    ("turns", "reset"): ["store_relaxed"],
    ("turns", "add_group"): ["await", "load_workspace", "store_workspace", "reset", "pass"],
    ("last_arrived", "begin"): ["book_relaxed"],
    ("last_arrived", "await"): ["look", "book_and_read", "store_relaxed", "book_relaxed"],
    ("last_arrived", "take_over"): ["load_relaxed", "store_relaxed", "book_relaxed"],
    ("last_arrived", "finish_slices"): [
        *("cta_barrier", "arrive", "await", *WORDS, "broadcast", "take_over")
    ],
    ("sum_slice", "load"): ["load_workspace"],
    ("partial_dw", "store_partials"): [
        *("cta_barrier", "store_shared4", "store_shared", "store_shared", "cta_barrier")
    ],
    ("rows_bulk", "fetch"): FETCH,
    ("rows_bulk", "await"): ["mbarrier_wait"],
    ("rows_bulk", "refill"): ["fence_async_shared", "fetch"],
    ("rows_bulk_group", "fetch"): FETCH,
    ("rows_bulk_group", "refill"): ["fence_async_shared", "fetch"],
    ("runs", "arrive"): ["mbarrier_expect"],
    ("runs", "wait"): ["mbarrier_wait"],
    ("runs", "end_run"): ["add_written", "store_shared4", "team_barrier", "arrive"],
    ("runs", "add_written"): ["wait", "load_shared4"],
    ("row_sum", "team_barrier"): ["warp_barrier", "cta_barrier", "named_barrier"],
    ("row_sum_cluster", "send"): [
        *("mbarrier_expect", "warp_barrier", "store_cluster", "cluster_rank")
    ],
    ("row_sum_cluster", "receive"): ["mbarrier_wait_cluster"],
}
"""The primitives and helpers that each function of a fragment ("": all of it) calls."""


def steps_of(strategy: Strategy) -> dict[tuple[str, str], list[str]]:
    """Return the same of a strategy's own fragments, as its row says."""
    found = {}
    for said in strategy.steps:
        place, _, calls = said.partition(": ")
        fragment, _, function = place.partition(" ")
        found[fragment, function] = calls.split()
    return found


FRAGMENTS = {place: own for s in STRATEGIES for place, own in steps_of(s).items()} | SHARED


@pytest.mark.parametrize("summed", [False, True])
def test_a_stage_whose_values_may_arrive_late_is_read_with_a_fence(summed: bool) -> None:
    """The barrier of the row sum waits for what goes into it, and not for other reads."""
    tensors = (rows("a"), rows("b"), rows("c"), rows_out("o"), added_rows("d", "residual"))
    text = _fragment("rows_bulk.cuh", True, Signature(*tensors, summed=summed))
    for function, last_read in (("read", "load_shared_packet"), ("read_residual", "gather_chunks")):
        assert calls("rows_bulk", function, text) == ["fence_async_shared"] * (not summed)
        after = text[text.rindex(last_read) :]
        assert summed or after.index("fence_async_shared()") < after.index("DEVICE void")
    assert calls("rows_bulk", "fetch", text) == ["mbarrier_expect", *["bulk_load"] * 4]


def test_shared_numbers_in_a_stage_are_read_with_a_fence() -> None:
    """No barrier waits for them where a row sum does without, as that of x does without cos."""
    form = Form(staged=True)
    text = _fragment("rows_bulk.cuh", True, signature_of("rmsnorm_rope_forward"), form)
    assert calls("rows_bulk", "read_groups", text) == ["fence_async_shared"]
    after = text[text.index("read_numbers<Element>") :]
    assert after.index("fence_async_shared()") < after.index("DEVICE void")
    copies = ["bulk_load_numbers"] * 2 + ["bulk_load"]
    assert calls("rows_bulk", "fetch", text) == ["mbarrier_expect", *copies]


def test_shared_numbers_of_a_warp_are_copied_and_read_behind_its_barrier() -> None:
    """Lanes read what others have copied: they meet behind the wait for the copies, and before what
    they have read is replaced."""
    form = Form(staged=True)
    text = _fragment("rows_async.cuh", True, signature_of("rope"), form)
    assert calls("rows_async", "read_groups", text) == ["warp_barrier"]
    assert calls("rows_async", "fetch_groups", text) == ["warp_barrier"]
    begins = text[text.index("DEVICE void fetch_groups(") :]
    assert begins.index("warp_barrier()") < begins.index("::copy(")


def test_sums_of_a_cluster_with_a_producer_are_waited_for_by_their_own_fence() -> None:
    tensors = (rows("a"), rows_out("o"))
    text = _fragment(
        "row_sum_cluster.cuh", True, Signature(*tensors, summed=True), Form(producer=True)
    )
    assert calls("row_sum_cluster", "receive", text) == ["mbarrier_wait_sums"]


def unsaid(strategy: Strategy) -> set[str]:
    """Own fragments of a strategy of which its row does not say what they call."""
    own = {*strategy.fragments, *strategy.group_fragments}
    return {name for name in own if name.startswith("dw_")} - {
        name for name, _ in steps_of(strategy)
    }


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_strategy_says_its_steps_and_the_protocol_that_stands_for_them(
    strategy: Strategy,
) -> None:
    assert unsaid(strategy) == set()
    assert strategy.protocol in {name.replace("`", "") for name in PROTOCOLS}
    assert unsaid(replace(strategy, steps=())) >= {f"dw_{strategy.template}"}


def test_every_fragment_of_groups_is_of_a_strategy() -> None:
    found = {path.stem for path in TEMPLATES.rglob("dw_groups_*.cuh")}
    assert found == {name for s in STRATEGIES for name in s.group_fragments if "groups" in name}


@pytest.mark.parametrize(("fragment", "function"), FRAGMENTS)
def test_a_fragment_calls_what_its_protocol_says(fragment: str, function: str) -> None:
    """Calls are in the order of its text. A change here asks for the same change of the
    protocol."""
    assert calls(fragment, function) == FRAGMENTS[fragment, function]
