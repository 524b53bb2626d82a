"""The checker of tests/support/ptx_memory_model.py answers the classic litmus tests as it should.

What is allowed and what is forbidden follows from the PTX ISA and from Lustig et al. (ASPLOS 2019).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.litmus import Event, Outcome, Program, Thread
from tests.support.ptx_memory_model import Model, executions, find


def load(label: str, place: str, order: str = "relaxed", scope: str = "gpu") -> Event:
    return Event("read", label, place, order=order, scope=scope)


def store(place: str, value: int, order: str = "relaxed", scope: str = "gpu") -> Event:
    return Event("write", f"{place}={value}", place, value, order=order, scope=scope)


def add(label: str, place: str, order: str = "relaxed", scope: str = "gpu") -> Event:
    return Event("rmw", label, place, 1, order=order, scope=scope)


def fence(order: str = "acq_rel", scope: str = "gpu") -> Event:
    return Event("fence", f"fence.{order}", order=order, scope=scope)


def ctas(*threads: list[Event | None]) -> Program:
    """A CTA for each thread. None: an event that this variant of a test leaves out."""
    return Program(
        tuple(Thread(tuple(e for e in t if e), f"cta{i}") for i, t in enumerate(threads))
    )


def one_cta(*threads: list[Event]) -> Program:
    return Program(tuple(Thread(tuple(t), "cta") for t in threads))


def then_read(program: Program, *places: str) -> Program:
    """A second launch reads what the first has left."""
    last = Thread(tuple(load(f"last {p}", p) for p in places), "cta", launch=1)
    return Program((*program.threads, last))


def mp(
    write: Event, *between: Event | None, data: str = "weak", read: Event | None = None
) -> Program:
    """Message passing: data, a flag; the other thread reads the flag, then data."""
    flag = read or load("flag", "y", "acquire")
    return ctas([store("x", 1, data), *between, write], [flag, *between, load("data", "x", data)])


def stale(outcome: Outcome) -> bool:
    return outcome["flag"] == 1 and outcome["data"] == 0


def sb(*between: Event, scope: str = "gpu", order: str = "relaxed") -> Program:
    return ctas(
        [store("x", 1, order, scope), *between, load("a", "y", order, scope)],
        [store("y", 1, order, scope), *between, load("b", "x", order, scope)],
    )


def lb(first: Event, second: Event, order: str = "relaxed") -> Program:
    return ctas([load("a", "x", order), first], [load("b", "y", order), second])


def copy(source: str, to: str) -> Event:
    return Event("write", f"{to}=copy", to, plus=(source,), order="relaxed")


def iriw(*between: Event, order: str = "relaxed") -> Program:
    return ctas(
        [store("x", 1)],
        [store("y", 1)],
        [load("a", "x", order), *between, load("b", "y", order)],
        [load("c", "y", order), *between, load("d", "x", order)],
    )


def two_plus_two(*between: Event, order: str = "relaxed") -> Program:
    return then_read(
        ctas(
            [store("x", 1, order), *between, store("y", 2, order)],
            [store("y", 1, order), *between, store("x", 2, order)],
        ),
        "x",
        "y",
    )


def wrc(pass_on: str, take: str) -> Program:
    return ctas(
        [store("x", 1)],
        [load("a", "x"), store("y", 1, pass_on)],
        [load("b", "y", take), load("c", "x")],
    )


def corr(order: str) -> Program:
    return ctas([store("x", 1, order)], [load("a", "x", order), load("b", "x", order)])


def is_all(**values: int) -> Callable[[Outcome], bool]:
    return lambda outcome: all(outcome[label] == value for label, value in values.items())


def new_then_old(outcome: Outcome) -> bool:
    return (outcome["a"], outcome["b"]) == (1, 0)


SC = fence("sc")
FLAG = store("y", 1, "release")
BOTH_ZERO, BOTH_ONE = is_all(a=0, b=0), is_all(a=1, b=1)
IRIW, WRC = is_all(a=1, b=0, c=1, d=0), is_all(a=1, b=1, c=0)
FIRST_WRITES = is_all(**{"last x": 1, "last y": 1})
LOST = is_all(**{"last x": 1})
BARRIER = Event("barrier", "bar", "0", scope="cta")

FORBIDDEN: dict[str, tuple[Program, Callable[[Outcome], bool]]] = {
    "MP, release and acquire": (mp(FLAG), stale),
    "MP, fences": (mp(store("y", 1), fence(), read=load("flag", "y")), stale),
    "MP, fence.sc": (mp(store("y", 1), SC, read=load("flag", "y")), stale),
    "MP, release continued by a later relaxed store": (
        ctas(
            [store("x", 1), store("y", 2, "release"), store("y", 1)],
            [load("flag", "y", "acquire"), load("data", "x")],
        ),
        stale,
    ),
    "MP, release continued by another thread's atomic": (
        ctas(
            [store("x", 1), store("y", 1, "release")],
            [add("other", "y")],
            [load("flag", "y", "acquire"), load("data", "x")],
        ),
        is_all(flag=2, other=1, data=0),
    ),
    "MP in a CTA, cta scope": (
        one_cta(
            [store("x", 1), store("y", 1, "release", "cta")],
            [load("flag", "y", "acquire", "cta"), load("data", "x")],
        ),
        stale,
    ),
    "MP by a CTA barrier": (
        one_cta([store("x", 1, "weak"), BARRIER], [BARRIER, load("data", "x", "weak")]),
        is_all(data=0),
    ),
    "SB, fence.sc": (sb(SC), BOTH_ZERO),
    "LB with dependencies": (lb(copy("a", "y"), copy("b", "x")), is_all(a=1, b=1)),
    "LB, release and acquire": (
        ctas(
            [load("a", "x", "acquire"), store("y", 1, "release")],
            [load("b", "y", "acquire"), store("x", 1, "release")],
        ),
        BOTH_ONE,
    ),
    "CoRR": (corr("relaxed"), new_then_old),
    "IRIW, fence.sc": (iriw(SC), IRIW),
    "2+2W, fence.sc": (two_plus_two(SC), FIRST_WRITES),
    "WRC, release and acquire": (wrc("release", "acquire"), is_all(b=1, a=1, c=0)),
    "atomics lose nothing": (then_read(ctas([add("a", "x")], [add("b", "x")]), "x"), LOST),
    "a store does not come between": (
        then_read(ctas([add("a", "x")], [store("x", 5)]), "x"),
        lambda outcome: outcome["a"] == 0 and outcome["last x"] != 5,
    ),
    "a launch sees the one before it": (
        then_read(ctas([store("x", 1, "weak")]), "x"),
        is_all(**{"last x": 0}),
    ),
}
ALLOWED: dict[str, tuple[Program, Callable[[Outcome], bool]]] = {
    "MP, relaxed": (mp(store("y", 1), read=load("flag", "y")), stale),
    "MP, no release": (mp(store("y", 1)), stale),
    "MP, no acquire": (mp(FLAG, read=load("flag", "y")), stale),
    "MP, release at cta scope": (mp(store("y", 1, "release", "cta")), stale),
    "MP, acquire at cta scope": (mp(FLAG, read=load("flag", "y", "acquire", "cta")), stale),
    "MP, weak flag behind fences": (
        mp(store("y", 1, "weak"), fence(), read=load("flag", "y")),
        stale,
    ),
    "MP, fences at cta scope": (
        mp(store("y", 1), fence(scope="cta"), read=load("flag", "y")),
        stale,
    ),
    "MP, red and fence are no acquire pattern": (
        ctas(
            [store("x", 1), FLAG],
            [
                Event("rmw", "flag", "y", 0, order="relaxed", returns=False),
                fence(),
                load("data", "x"),
            ],
        ),
        stale,
    ),
    "MP, another thread's store ends the release": (
        ctas(
            [store("x", 1), FLAG],
            [load("seen", "y"), store("y", 2)],
            [load("flag", "y", "acquire"), load("data", "x")],
        ),
        is_all(seen=1, flag=2, data=0),
    ),
    "SB, relaxed": (sb(), BOTH_ZERO),
    "SB, fence.acq_rel": (sb(fence()), BOTH_ZERO),
    "SB, fence.sc at cta scope": (sb(fence("sc", "cta")), BOTH_ZERO),
    "LB": (lb(store("y", 1), store("x", 1)), BOTH_ONE),
    "CoRR, weak": (corr("weak"), new_then_old),
    "IRIW, acquire": (iriw(order="acquire"), IRIW),
    "IRIW, fence.acq_rel": (iriw(fence()), IRIW),
    "2+2W, relaxed": (two_plus_two(), FIRST_WRITES),
    "2+2W, fence.acq_rel": (two_plus_two(fence()), FIRST_WRITES),
    "WRC, relaxed": (wrc("relaxed", "acquire"), WRC),
    "WRC, no acquire": (wrc("release", "relaxed"), WRC),
    "atomics at cta scope lose one": (
        then_read(ctas([add("a", "x", scope="cta")], [add("b", "x")]), "x"),
        LOST,
    ),
    "atomics add up": (
        then_read(ctas([add("a", "x")], [add("b", "x")]), "x"),
        is_all(**{"last x": 2}),
    ),
    "launches that overlap": (
        then_read(ctas([store("x", 1)]), "x").in_one_launch(),
        is_all(**{"last x": 0}),
    ),
}


# -- The asynchronous proxy --


def sent() -> Event:
    """Return the event of the copy engine that reads `shared x` and writes `y`."""
    read = Event("read", "source", "shared x", proxy="async")
    write = Event("write", "y=copy", "y", plus=("source",), proxy="async")
    return Event("async", "copy", parts=(read, write))


def proxy_fence(space: str = "") -> Event:
    return Event("proxy_fence", f"proxy fence {space}", space)


def waited(full: bool = True) -> Event:
    return Event("wait_group", "wait", full=full)


WRITE = store("shared x", 1, "weak")
READ_COPY = load("y", "y", "weak")
IN_TWO_CTAS = [WRITE, store("z", 1, "release")]
OTHER_CTA = load("z", "z", "acquire")
OLD_SOURCE, OLD_COPY = is_all(source=0), is_all(source=1, y=0)

FORBIDDEN |= {
    "a proxy fence before a copy": (one_cta([WRITE, proxy_fence("shared"), sent()]), OLD_SOURCE),
    "a proxy fence before the barrier": (
        one_cta([WRITE, proxy_fence("shared"), BARRIER], [BARRIER, sent()]),
        OLD_SOURCE,
    ),
    "a proxy fence behind the barrier": (
        one_cta([WRITE, BARRIER], [BARRIER, proxy_fence("shared"), sent()]),
        OLD_SOURCE,
    ),
    "a wait for a copy": (
        one_cta([WRITE, proxy_fence(), sent(), waited(), READ_COPY]),
        OLD_COPY,
    ),
    "a proxy fence of the CTA that copies": (
        then_read(ctas(IN_TWO_CTAS, [OTHER_CTA, proxy_fence(), sent()]), "x"),
        is_all(z=1, source=0),
    ),
    "a launch behind a copy": (
        then_read(one_cta([WRITE, proxy_fence(), sent()]), "y"),
        is_all(**{"source": 1, "last y": 0}),
    ),
}
ALLOWED |= {
    "no proxy fence": (one_cta([WRITE, sent()]), OLD_SOURCE),
    "a barrier is no proxy fence": (one_cta([WRITE, BARRIER], [BARRIER, sent()]), OLD_SOURCE),
    "a proxy fence of another state space": (
        one_cta([WRITE, proxy_fence("global"), sent()]),
        OLD_SOURCE,
    ),
    "a proxy fence of another CTA": (
        ctas([IN_TWO_CTAS[0], proxy_fence(), IN_TWO_CTAS[1]], [OTHER_CTA, sent()]),
        is_all(z=1, source=0),
    ),
    "no wait for a copy": (one_cta([WRITE, proxy_fence(), sent(), READ_COPY]), OLD_COPY),
    "`.read` is no wait for what is written": (
        one_cta([WRITE, proxy_fence(), sent(), waited(full=False), READ_COPY]),
        OLD_COPY,
    ),
}


def test_read_waits_until_the_source_has_been_read() -> None:
    later = store("shared x", 2, "weak")
    started = [WRITE, proxy_fence(), sent()]
    seen = is_all(source=2)
    assert find(one_cta([*started, later]), seen)
    assert find(one_cta([*started, waited(full=False), proxy_fence(), later]), seen) is None


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden(name: str) -> None:
    program, bad = FORBIDDEN[name]
    assert list(executions(program)), "nothing is allowed at all"
    assert find(program, bad) is None


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    assert find(*ALLOWED[name]) is not None


def outcomes(program: Program) -> set[tuple[tuple[str, int], ...]]:
    return {tuple(sorted(found.values.items())) for found in executions(program)}


@pytest.fixture
def no_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "hopeless", lambda model: set())
    monkeypatch.setattr(Model, "excludes", lambda model, r, s, w: False)


ALL = FORBIDDEN | ALLOWED


@pytest.mark.parametrize("name", ALL)
def test_shortcuts_of_the_search_change_nothing(name: str, request: pytest.FixtureRequest) -> None:
    program, _ = ALL[name]
    found = outcomes(program)
    request.getfixturevalue("no_shortcuts")
    assert outcomes(program) == found


@pytest.mark.usefixtures("no_shortcuts")
@pytest.mark.parametrize(
    ("axioms", "name"),
    [
        (["keeps_causality"], "MP, release and acquire"),
        # An RMW is one operation here, so order at its place implies that it is atomic.
        (["keeps_atomicity", "keeps_order_of_place"], "atomics lose nothing"),
        # A thread's reads are ordered by causality as well.
        (["keeps_causality", "keeps_order_of_place"], "CoRR"),
    ],
)
def test_what_is_forbidden_rests_on_its_axioms(
    axioms: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for axiom in axioms:
        monkeypatch.setattr(Model, axiom, lambda model, *orders: True)
    assert find(*FORBIDDEN[name]) is not None


def interleaved(program: Program) -> set[tuple[tuple[str, int], ...]]:
    """Outcomes of a machine that does one event after another."""
    found = set()

    def go_on(rest: list[tuple[Event, ...]], memory: Counter[str], seen: dict[str, int]) -> None:
        if not any(rest):
            found.add(tuple(sorted(seen.items())))
        for i, events in enumerate(rest):
            if not events:
                continue
            event, now, known = events[0], memory.copy(), dict(seen)
            if event.kind in ("read", "rmw"):
                known[event.label] = memory[event.place]
            if event.kind in ("write", "rmw"):
                now[event.place] = event.value + memory[event.place] * (event.kind == "rmw")
            go_on([*rest[:i], events[1:], *rest[i + 1 :]], now, known)

    # Fences have nothing to do there.
    memory_events = [tuple(e for e in t.events if e.place) for t in program.threads]
    go_on(memory_events, Counter(), {})
    return found


def random_program(draw: random.Random, *between: Event) -> Program:
    """Three threads of a CTA each, or two where something lies between their events."""
    threads, value = [], 0
    for i in range(2 if between else 3):
        events: list[Event] = []
        for j in range(draw.choice([2, 3])):
            place, label, value = draw.choice("xy"), f"{i}.{j}", value + 1
            order = "relaxed" if between else draw.choice(["weak", "relaxed", "acq_rel"])
            kind = draw.choice(["read", "write", "rmw"])
            # A weak RMW does not exist.
            order = "relaxed" if kind == "rmw" and order == "weak" else order
            events += [*(between if j else ()), Event(kind, label, place, value, order=order)]
        threads.append(events)
    return ctas(*threads)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(100))
def test_every_interleaving_is_allowed(seed: int) -> None:
    program = random_program(random.Random(seed))
    assert interleaved(program) <= outcomes(program)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(100))
def test_nothing_but_interleavings_is_allowed_where_fences_are_between(seed: int) -> None:
    program = random_program(random.Random(seed), SC)
    assert interleaved(program) == outcomes(program)


def test_a_counterexample_can_be_read() -> None:
    found = find(*ALLOWED["MP, relaxed"])
    assert str(found) == "{'flag': 1, 'data': 0}, because flag reads y=1, data reads initial x"
