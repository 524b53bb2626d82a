"""The primitives of templates/primitives.cuh as events of litmus programs.

Kind, order and scope of an event are read from the instruction in the primitive's body, so a weaker
instruction makes a weaker litmus program.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from generator.kernels.render import headers
from generator.paths import template_named
from tests.support.litmus import Event

NO_ASM = {
    "__syncthreads()": "bar.sync",
    "__syncwarp()": "bar.warp.sync",
    "return *from": "ld",
    "return *reinterpret_cast<const float4*>(from)": "ld",
    "*to = value": "st",
    "*reinterpret_cast<float4*>(to) = value": "st",
}
"""C++ in the bodies of primitives that have no asm, and the instruction that NVRTC makes of it."""

INSTRUCTION = re.compile(
    r'"[^"]*?((?:ld|st|atom|red|fence|mbarrier|cp\.async|cp\.reduce|bar|barrier)\.[\w.:]+)'
)
SCOPES, ORDERS = ("cta", "cluster", "gpu", "sys"), ("relaxed", "acquire", "release", "acq_rel")
KINDS = {
    "cp.async.bulk.wait_group": "wait_group",
    "fence.proxy.async": "proxy_fence",
    "fence.acquire": "fence",
    "mbarrier.arrive": "arrive",
    "mbarrier.try_wait": "wait",
    "bar": "barrier",
    "ld": "read",
    "st": "write",
    "atom": "rmw",
    "red": "rmw",
}


HELPERS = {
    "await",
    "pass",
    "reset",
    "add_group",
    "broadcast",
    "each_partial",
    "store_row_of",
    "store_partials",
    "last_of",
    "finish_slices",
    "take_over",
    "arrive",
    "look",
    "team_barrier",
    "fetch",
    "add_written",
    "wait",
}
"""Functions of the fragments that order memory by calls of primitives."""


def without_comments(source: str) -> str:
    return re.sub(r"//.*", "", source)


@cache
def bodies() -> dict[str, str]:
    """The text of every primitive's function."""
    names = ("primitives.cuh", "primitives_producer_cluster.cuh", "primitives_staged.cuh")
    source = without_comments("".join(template_named(name).read_text() for name in names))
    starts = list(re.finditer(r"^(?:template <[^>]*> )?DEVICE [^()\n]*?(\w+)\(", source, re.M))
    ends = [start.start() for start in starts[1:]] + [len(source)]
    found: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=True):
        found.setdefault(start[1], source[start.end() : end])
    return found


@cache
def instructions(name: str) -> tuple[str, ...]:
    """The memory instructions of a primitive, or of the one that it calls, in their order."""
    body = bodies()[name]
    found = tuple(INSTRUCTION.findall(body))
    if found:
        return found
    plain = [op for text, op in NO_ASM.items() if text in body]
    called = [c for c in re.findall(r"(\w+)\(", body) if c in bodies() and c != name]
    assert plain or called, f"{name} has no instruction that is known here"
    return (plain[0],) if plain else instructions(called[0])


def event(name: str, label: str, place: str = "", instruction: int = 0, **more: Any) -> Event:
    """Return the event that the primitive is at `place`. more: the other fields of Event."""
    op = instructions(name)[instruction]
    parts = op.split(".")
    kind = next(kind for prefix, kind in KINDS.items() if f"{op}.".startswith(f"{prefix}."))
    order = next((part for part in parts if part in ORDERS), "weak")
    scope = next((part for part in parts if part in SCOPES), "gpu")
    if kind == "barrier":
        scope = "cta"
    if kind == "fence":
        scope = parts[-1]
        place = "shared" if "sync_restrict::shared::cluster" in op else ""
    if kind == "proxy_fence":
        place = "shared" if "shared" in op else "global" if "global" in parts else ""
    returns = parts[0] != "red"
    full = kind != "wait_group" or ".read" not in op
    return Event(kind, label, place, order=order, scope=scope, returns=returns, full=full, **more)


def bulk_load(label: str, to: str, value: int, barrier: str, source: str = "") -> Event:
    """A row into a stage: `value`, where the inputs are read only, else what `source` holds.
    Completion counts on the stage's mbarrier."""
    (op,) = instructions("bulk_load")
    assert op == "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    write = Event("write", f"{label} writes", to, value, proxy="async")
    if not source:
        return Event("async", label, parts=(write, *_completion(barrier)))
    read = Event("read", f"{label} reads", source, proxy="async")
    write = replace(write, value=0, plus=(read.label,))
    return Event("async", label, parts=(read, write, *_completion(barrier)))


def bulk_out(name: str, label: str, to: str, source: str) -> Event:
    """bulk_store or bulk_add: from shared memory to the workspace, as one bulk group."""
    (op,) = instructions(name)
    read = Event("read", f"{label} reads", source, proxy="async")
    if op == "cp.async.bulk.global.shared::cta.bulk_group":
        write = Event("write", f"{label} writes", to, plus=(read.label,), proxy="async")
    else:  # "each reduction has individually .relaxed.gpu memory ordering semantics"
        assert op == "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        rmw = ("rmw", f"{label} writes", to)
        write = Event(*rmw, plus=(read.label,), order="relaxed", proxy="async", returns=False)
    return Event("async", label, parts=(read, write))


def store_cluster(label: str, to: str, value: int, barrier: str, cumulative: bool) -> Event:
    """st.async is "performed in the generic proxy", and counts on the receiver's mbarrier.

    Its complete-tx has .release semantics at cluster scope. Whether that covers what the sender did
    before (`cumulative`), the ISA does not say. It denies that of bulk copies.
    """
    (op,) = instructions("store_cluster")
    assert op == "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"
    write = Event("write", f"{label} writes", to, value)
    arrival = _completion(barrier)[-1]
    return Event("async", label, parts=(write, arrival), cumulative=cumulative)


def _completion(barrier: str) -> tuple[Event, Event]:
    """An implicit proxy fence follows a bulk copy; its complete-tx is .release at cluster scope."""
    fence = Event("proxy_fence", f"{barrier} implicit fence")
    return fence, Event(
        "arrive", f"{barrier} complete-tx", barrier, order="release", scope="cluster"
    )


def calls(fragment: str, function: str = "", text: str = "") -> list[str]:
    """Primitives and helpers that a function of a fragment calls, in the order of its text. text:
    of the fragment, by default as RMSNorm's kernels have it."""
    source = without_comments(text or headers()[f"{fragment}.cuh"])
    if function:
        found = list(re.finditer(rf"DEVICE [^;{{}}]*\b{function}\(", source))
        assert found, f"{fragment}.cuh has no function {function}"
        start = found[-1]  # the last one is for the newest architectures
        source = source[source.index("{", source.index(")", start.end())) :]
        depth = 0
        for end, character in enumerate(source):
            depth += (character == "{") - (character == "}")
            if not depth:
                source = source[:end]
                break
    return [name for name in re.findall(r"\b(\w+)\(", source) if name in {*bodies(), *HELPERS}]
