"""The emulator finds bugs planted where CTAs wait for each other: each test breaks one line of a
rendered kernel that passes as it stands, and names what has to be reported."""

from __future__ import annotations

import pytest

from generator.emulate.build import find_compiler
from generator.emulate.check import check_source, small_launch
from generator.kernels.render import render
from generator.problem import Problem
from generator.target import Target
from tests.support.mutations import (
    EARLY,
    HANDOVER,
    IMPATIENT,
    PATIENT,
    SCHEDULES,
    Mutation,
    check_planted,
    check_untouched,
    make,
    run,
    untouched,
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

PLANTED = {
    # The six bugs that this emulator was built to find.
    "barrier before the ticket removed (last_cta)": Mutation(
        "last_cta",
        "    cta_barrier();\n    unsigned ticket = 0;",
        "    unsigned ticket = 0;",
        r"CTA \d+ thread \d+: race: reads scratch\[.*which CTA \d+ thread \d+ wrote",
        {"levels": 1},
    ),
    "barrier before the ticket removed (atomic)": Mutation(
        "atomic",
        "    cta_barrier();\n    unsigned ticket = 0;",
        "    unsigned ticket = 0;",
        r"race: reads zeroed\[.*which CTA \d+ thread \d+ wrote",
    ),
    "barrier before the release removed (semaphore)": Mutation(
        "semaphore",
        "    cta_barrier();\n    if (threadIdx.x == 0) store_release(turn, next);",
        "    if (threadIdx.x == 0) store_release(turn, next);",
        r"race: reads scratch\[.*which CTA \d+ thread \d+ wrote",
    ),
    "bulk wait weakened to .read (turns)": Mutation(
        "bulk_turns",
        "bulk_wait_written();",
        "bulk_wait_read();",
        r"race: .* scratch\[.*bulk (add|store) of thread 0.* may not have landed",
    ),
    "bulk wait weakened to .read (free-running)": Mutation(
        "bulk_free",
        "bulk_wait_written();",
        "bulk_wait_read();",
        r"race: reads zeroed\[.*bulk add of thread 0.* may not have landed",
    ),
    "counter not reset (last_cta)": Mutation(
        "last_cta",
        "if (ticket + 1 == count) store_relaxed(counter, 0);",
        "",
        r"counters\[\d+\] is \d+ after the call and not 0 again",
    ),
    "counter not reset (semaphore)": Mutation(
        "semaphore",
        "i < groups() + 2; ++i) store_relaxed",
        "i < groups() + 1; ++i) store_relaxed",
        r"counters\[\d+\] is \d+ after the call and not 0 again",
        {"levels": 2},
    ),
    "waits for a CTA that is not resident (semaphore)": Mutation(
        "semaphore",
        "    return broadcast(smem, ticket);",
        "    return blockIdx.x + 0 * broadcast(smem, ticket);",
        r"deadlock: .*CTA \d+ thread 0 waits for counters\[\d+\].*have not started",
        residency=2,
    ),
    # Others of their kind.
    "barrier before the arrival removed": Mutation(
        "column_slices",
        "    cta_barrier();\n    if (threadIdx.x == 0) {\n      const Ledger before = arrive(",
        "    if (threadIdx.x == 0) {\n      const Ledger before = arrive(",
        r"race: reads scratch\[",
    ),
    "arrival that orders nothing": Mutation(
        "column_slices",
        "return book_in_order(ledger, entry);",
        "return book_and_read(ledger, entry);",
        r"race: reads scratch\[.*which CTA \d+ thread \d+ wrote",
    ),
    "look that does not acquire": Mutation(
        "column_slices",
        "read_acquire(ledger)",
        "read_relaxed(ledger)",
        r"race: reads scratch\[.*which CTA \d+ thread \d+ wrote",
    ),
    # Bugs in who waits for whom.
    "looked at before the own arrival": Mutation(
        "column_slices",
        "      const Ledger before = arrive(ledger(), arrival(participant));\n",
        "      await(1, look);\n"
        "      const Ledger before = arrive(ledger(), arrival(participant));\n",
        r"deadlock: .* waits for the ledger at counters\[0\] to change",
    ),
    "start that is not booked": Mutation(
        "column_slices",
        "book_relaxed(ledger(), kStart);",
        "read_relaxed(ledger());",
        r"deadlock: |race: |is \d+ after the call|out of bounds",
    ),
    "ledger that the plan does not have": Mutation(
        "column_slices",
        "reinterpret_cast<Ledger*>(counters + rank * kLedgerWords)",
        "reinterpret_cast<Ledger*>(counters + (rank + 1) * kLedgerWords)",
        r"out of bounds: adds to 8 bytes at counters",
    ),
    "nobody takes off what all add up to": Mutation(
        "column_slices",
        "return participant == 0 ? kArrival - whole() : kArrival;",
        "return kArrival;",
        r"deadlock: .* waits for the ledger at counters\[0\] to change from 5242885 ",
    ),
    "one arrival too few awaited": Mutation(
        "column_slices",
        "return participants * (kStart + kArrival); }",
        "return participants * (kStart + kArrival) - kArrival; }",
        r"race: reads scratch\[|nobody has written|counters\[\d\] is",
    ),
    "last arrival taken for the first": Mutation(
        "column_slices",
        "const unsigned own = participants - 1 - arrivals(before);",
        "const unsigned own = arrivals(before);",
        r"race: reads scratch\[|nobody has written",
    ),
    "nobody hands over": Mutation(
        "column_slices",
        "++looks < kPatience) continue;",
        "true) continue;",
        r"deadlock: .* waits for the ledger at counters\[0\] .*have not started",
        residency=2,
    ),
    "waits on once anybody has handed over": Mutation(
        "column_slices",
        "if (handed_over(seen) == 0 && ++looks < kPatience) continue;",
        "if (handed_over(seen) != 0 || ++looks < kPatience) continue;",
        r"deadlock: .* waits? for the ledger at counters\[0\] .*have not started",
        residency=2,
    ),
    "what is handed over is not taken over": Mutation(
        "column_slices",
        "places = 1 + handed_over(before);",
        "places = 1;",
        r"counters\[\d\] is \d+ after the call|dw\[\d+\] was never written",
        residency=2,
    ),
    "handed over without a place": Mutation(
        "column_slices",
        "store_relaxed(list() + handed_over(before), place + 1);",
        ";",
        r"deadlock: .* waits for counters\[2\] to change from 0",
        residency=2,
    ),
    "place in the list not set back": Mutation(
        "column_slices",
        "    store_relaxed(list() + index, 0);\n",
        "",
        r"counters\[2\] is \d+ after the call",
        residency=2,
    ),
    "entry not taken back by who takes over": Mutation(
        "column_slices",
        "    book_relaxed(ledger(), 0 - kHandover);\n    return entry - 1;",
        "    return entry - 1;",
        r"counters\[1\] is \d+ after the call",
        residency=2,
    ),
    "handed over and summed as well": Mutation(
        "column_slices",
        "        return false;",
        "        return true;",
        r"writes dw\[\d+\] a second time|race: reads scratch\[|nobody has written",
        residency=2,
    ),
    "handed over after the last arrival": Mutation(
        "column_slices",
        f"{PATIENT}      if (!complete(before)) {{",
        f"{IMPATIENT}      if (true) {{",
        r"dw\[\d+\] was never written|counters\[\d\] is \d+ after the call",
    ),
    "entry taken for void although the last to arrive reads it": Mutation(
        "column_slices",
        f"{PATIENT}      if (!complete(before)) {{",
        f"{IMPATIENT}      if (!complete(before) && starts(before) < participants) {{",
        r"deadlock: .* waits for counters\[\d\] to change from 0",
        deadline=10.0,  # CTAs look again and again for ever in a later schedule
    ),
    "void entry not taken back": Mutation(
        "column_slices",
        f"{PATIENT}{HANDOVER}      book_relaxed(ledger(), 0 - kHandover);\n",
        f"{IMPATIENT}{HANDOVER}",
        r"counters\[1\] is \d+ after the call",
    ),
    # Words that tell by themselves whether they have arrived.
    "padding travels as +0": Mutation(
        "mailbox",
        "return value == 0.0f ? -0.0f : value;",
        "return value;",
        r"CTA \d+ thread \d+: sends 0 to zeroed\[\d+, 1001\], which nobody can receive",
        shape="43x1001:bf16",
    ),
    "words not asked for again": Mutation(
        "mailbox",
        "} while (missing);",
        "} while (false);",
        r"empties zeroed\[\d+, \d+\], which this thread has not received",
    ),
    "last of four words not looked at": Mutation(
        "mailbox",
        " &&\n         __float_as_uint(v.w) != 0;",
        ";",
        r"empties zeroed\[\d+, ((\d*[02468])?[37]|\d*[13579][159])\], which this thread has not",
    ),
    "hint taken for an order": Mutation(
        "mailbox",
        "finish_slices<ArrivingRows>",
        "finish_slices<CompleteRows>",
        r"race: reads zeroed\[.*which CTA \d+ thread \d+ wrote",
    ),
    "first look not meant for words on their way": Mutation(
        "mailbox",
        "{ return receive_words(from); }",
        "{ return load_workspace(from); }",
        r"race: reads zeroed\[.*which CTA \d+ thread \d+ wrote",
    ),
    "words sent by ordinary stores": Mutation(
        "mailbox",
        "send_words(to, make_float4(message(sums.x)",
        "store_workspace(to, make_float4(message(sums.x)",
        r"race: receives zeroed\[.*which CTA \d+ thread \d+ wrote",
    ),
    "places not emptied": Mutation(
        "mailbox",
        "if (place(a)) empty_words(const_cast<float*>(place(a)));",
        ";",
        r"zeroed\[0, 0\] is \S+ after the call and not 0 again",
    ),
    "places emptied before they are received": Mutation(
        "mailbox",
        "    bool missing;\n    do {",
        "    for (int a = 0; a < kCount; ++a)\n"
        "      if (place(a)) empty_words(const_cast<float*>(place(a)));\n"
        "    bool missing;\n    do {",
        r"empties zeroed\[\d+, \d+\], which this thread has not received",
    ),
    "places emptied twice": Mutation(
        "mailbox",
        "if (place(a)) empty_words(const_cast<float*>(place(a)));",
        "if (place(a))\n"
        "        for (int i = 0; i < 2; ++i) empty_words(const_cast<float*>(place(a)));",
        r"empties zeroed\[\d+, \d+\], which is empty",
    ),
    "sent to a neighbour's place": Mutation(
        "mailbox",
        "places + participant * kRowStride",
        "places + participant / 2 * 2 * kRowStride",
        r"sends to zeroed\[\d+, \d+\] a second time in this launch",
    ),
    "sent behind the last place": Mutation(
        "mailbox",
        "places + participant * kRowStride",
        "places + (participant + 1) * kRowStride",
        r"out of bounds: sends 16 bytes at zeroed\[5, \d+\], \d+ bytes past its end",
    ),
    "slice received by two CTAs": Mutation(
        "mailbox",
        "unsigned slice = place; slice",
        "unsigned slice = place / 2; slice",
        r"receives zeroed\[\d+, \d+\], which CTA \d+ thread \d+ has received already",
    ),
    "slice waited for that another CTA has emptied": Mutation(
        "mailbox",
        "unsigned slice = place; slice",
        "unsigned slice = place / 2; slice",
        r"deadlock: .* waits? for zeroed\[\d+, \d+\] to arrive",
    ),
    "slice not received": Mutation(
        "mailbox",
        "slice < slices; slice += participants)",
        "slice + 1 < slices; slice += participants)",
        r"zeroed\[0, 992\] is \S+ after the call and not 0 again",
    ),
    "no barrier before the tail uses shared memory": Mutation(
        "mailbox",
        "    cta_barrier();  // from here on, the tail may use all shared memory\n",
        "",
        r"race: (overwrites|reads) byte \d+ of shared memory",
    ),
    "nobody hands over (mailbox)": Mutation(
        "mailbox",
        "++looks < kPatience) continue;",
        "true) continue;",
        r"deadlock: .* waits for the ledger at counters\[0\] .*have not started",
        residency=2,
    ),
    "waits for words of CTAs that have not started": Mutation(
        "mailbox",
        "const Ledger seen = look(ledger());",
        "const Ledger seen = 0;",
        r"deadlock: .* waits? for zeroed\[\d, \d+\] to arrive.*have not started",
        residency=2,
    ),
    # Bugs in who arrives before the last rows.
    "last batch not noticed": Mutation(
        "mailbox",
        "if (schedule.ahead(1) >= rows.batches) strategy.announce",
        "if (schedule.ahead(1) > rows.batches) strategy.announce",
        r"deadlock: .* waits for the ledger at counters\[0\] to change",
        EARLY,
        shape="44x1024:bf16",
    ),
    "announced before every batch": Mutation(
        "mailbox",
        "if (schedule.ahead(1) >= rows.batches) strategy.announce",
        "strategy.announce",
        r"counters\[0\] is \d+ after the call and not 0 again",
        EARLY,
    ),
    "announced by every team": Mutation(
        "mailbox",
        "if (threadIdx.x == 0 && output.base",
        "if (team_thread() == 0 && output.base",
        r"counters\[0\] is \d+ after the call and not 0 again",
        EARLY,
    ),
    "announced and arrived": Mutation(
        "mailbox",
        "kArrivesEarly ? before_arrival",
        "false ? before_arrival",
        r"counters\[0\] is \d+ after the call and not 0 again",
        EARLY,
    ),
    "early arrival taken for an order": Mutation(
        "mailbox",
        "finish_slices<ArrivingRows>",
        "finish_slices<CompleteRows>",
        r"race: reads zeroed\[.*which CTA \d+ thread \d+ wrote",
        EARLY,
    ),
    "words of who arrived early not asked for again": Mutation(
        "mailbox",
        "} while (missing);",
        "} while (false);",
        r"empties zeroed\[\d+, \d+\], which this thread has not received",
        EARLY,
    ),
    "nobody hands over (early)": Mutation(
        "mailbox",
        "++looks < kPatience) continue;",
        "true) continue;",
        r"deadlock: .* waits for the ledger at counters\[0\] .*have not started",
        EARLY,
        residency=2,
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found_and_named(name: str, target: Target) -> None:
    check_planted(PLANTED[name], target)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", untouched(PLANTED))
def test_unmutated_kernel_passes_the_same_schedules(name: str, target: Target) -> None:
    check_untouched(PLANTED[name], target)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "arrival"), [("43x1024:bf16", "early"), ("43x1001:bf16", "late")]
)
def test_no_word_is_taken_for_arrived_by_the_ledger(
    shape: str, arrival: str, target: Target
) -> None:
    """A CTA that sees that all have started need not wait until all have arrived: words are then
    asked for while they are on their way."""
    mutation = Mutation("mailbox", "", "", "", {"arrival": arrival}, shape)
    variant = make(mutation, target)
    source = render(variant)
    old = "if (complete(seen)) return true;"
    assert old in source
    new = "if (complete(seen) || starts(seen) == participants) return true;"
    check = run(mutation, source.replace(old, new), variant)
    assert check.problems == ()
    assert (check.schedules, check.distinct_results) == (SCHEDULES, 1)


def test_words_behind_a_release_and_an_acquire_have_arrived(target: Target) -> None:
    mutation = Mutation("mailbox", "", "", "")
    variant = make(mutation, target)
    source = render(variant)
    for old, new in (
        ("book_and_read(ledger, entry)", "book_in_order(ledger, entry)"),
        ("read_relaxed(ledger)", "read_acquire(ledger)"),
        ("} while (missing);", "} while (false);"),
    ):
        assert old in source
        source = source.replace(old, new)
    assert run(mutation, source, variant).problems == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("reduction", "shape"),
    [("mailbox", "43x1024:bf16"), ("column_slices", "43x1001:bf16"), ("mailbox", "86x512:bf16")],
)
def test_any_number_of_resident_ctas_is_enough(reduction: str, shape: str, target: Target) -> None:
    """One, two, three, four or all five CTAs at once: with fewer, slices are handed over, with more
    than five slices and with fewer; always with the same bits."""
    for slice_columns in (16, 128):
        mutation = Mutation(
            reduction, "", "", "", {"slice_columns": slice_columns, "threads_per_row": 64}, shape
        )
        variant = make(mutation, target)
        problem = Problem.parse(shape)
        spec, launch = small_launch(variant, problem.M)
        assert launch.grid == 5
        check = check_source(
            render(variant),
            spec,
            launch,
            problem,
            schedules=SCHEDULES,
            residencies=(1, 2, 3, 4, 5),
        )
        assert check.problems == ()
        assert (check.schedules, check.distinct_results) == (SCHEDULES, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("reduction", "knobs"), [("mailbox", {}), ("mailbox", EARLY), ("column_slices", {})]
)
def test_slices_may_be_handed_over_at_any_time(
    reduction: str, knobs: dict[str, int | str], target: Target
) -> None:
    """It may be when all have started, and at the moment of the last arrival."""
    for slice_columns in (16, 128):
        mutation = Mutation(reduction, "", "", "", {"slice_columns": slice_columns, **knobs})
        variant = make(mutation, target)
        source = render(variant)
        assert PATIENT in source
        check = run(mutation, source.replace(PATIENT, IMPATIENT), variant)
        assert check.problems == ()
        assert (check.schedules, check.distinct_results) == (SCHEDULES, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduction", ["mailbox", "column_slices"])
def test_clusters_may_wait_for_others_of_their_rank(reduction: str, target: Target) -> None:
    knobs = {"cluster": 2, "pipeline": "direct", "threads_per_row": 128}
    mutation = Mutation(reduction, "", "", "", knobs, "9x4096:bf16")
    variant = make(mutation, target)
    check = run(mutation, render(variant), variant)
    assert check.problems == ()
    assert check.distinct_results == 1
