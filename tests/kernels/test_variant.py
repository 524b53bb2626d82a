"""The facts that follow from a config: shared memory, columns, launches, identity."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from generator.errors import NormforgeError
from generator.kernels.nvrtc import compile_options
from generator.kernels.render import render
from generator.kernels.strategies import STRATEGIES, Strategy, strategy_of
from generator.kernels.variant import Variant, make_variant
from generator.paths import TEMPLATES
from generator.problem import Problem
from generator.space.expressions import DERIVED
from generator.target import Target, find_target
from normforge.operations import OPERATIONS, RowOperation, Signature
from normforge.operations.tensor import rows, rows_out
from normforge.spec import UNBOUNDED, KernelSpec, Launch, ceil_div, plan_launch
from tests.support.samples import (
    REDUCTION,
    SPACE,
    cases,
    plain_variant,
    sample_variant,
    space_of,
)

Case = tuple[Problem, Target, Variant]


def test_config_of_older_templates_is_one_sentence() -> None:
    problem, target = Problem.parse("4096x1024:bf16"), find_target("h200")
    config = dict(plain_variant(problem, target).config)
    del config["spare_sms"]
    said = "a config for N = 1024 has no 'spare_sms': it was made for other templates; tune"
    with pytest.raises(NormforgeError, match=said):
        make_variant(config, problem).spec(target.sms)


def test_every_strategy_is_searched_and_drawn_by_the_tests() -> None:
    """Studies know a strategy by its template: two rows with one would be drawn once."""
    assert [strategy_of(knobs) for knobs in REDUCTION.values()] == [*STRATEGIES]
    (searched,) = (knob.values for knob in SPACE.knobs if knob.name == "strategy")
    assert list(searched) == list(dict.fromkeys(strategy.name for strategy in STRATEGIES))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.adds == "in_turns"], ids=str)
def test_turns_of_clusters_are_refused_whatever_the_rules_say(strategy: Strategy) -> None:
    problem, target = Problem.parse("520x4096:bf16"), find_target("h200")
    alone = plain_variant(problem, target, strategy=strategy.name, order="turns")
    with pytest.raises(NormforgeError, match=f"'{strategy}' cannot have a cluster of 2: each CTA"):
        replace(alone, config={**alone.config, "cluster": 2})


@pytest.mark.parametrize("change", [{"strategy": "last_cta"}, {"cluster": 2}])
def test_a_second_kernel_alone_adds_two_sums_of_any_number_of_columns(
    change: dict[str, int | str],
) -> None:
    problem = Problem.parse("layernorm_backward:520x1024:bf16")
    config = plain_variant(problem, find_target("h200"), strategy="separate").config
    assert not make_variant(config, problem, exact=False).exact
    with pytest.raises(NormforgeError, match=r"several sums of each column|a cluster"):
        make_variant({**config, **change}, problem, exact=False)


# ---- Shared memory -------------------------------------------------------------------------------


@settings(max_examples=100)
@given(cases())
def test_regions_of_shared_memory_follow_each_other_and_fit(case: Case) -> None:
    _, target, v = case
    check_regions(v, target)


@settings(max_examples=50)
@given(N=st.sampled_from((256, 3072, 8192)), seed=st.integers(0, 10**6))
def test_regions_of_batch_invariant_kernels_as_well(N: int, seed: int) -> None:
    problem = Problem(4096, N, "bf16", "bf16", operation="rmsnorm_invariant_backward")
    target = find_target("h200")
    config = space_of(problem.operation).sample(problem, target, random.Random(seed), {})
    check_regions(make_variant(config, problem), target)


def check_regions(v: Variant, target: Target) -> None:
    stages = v["stages"] if v["pipeline"] == "bulk" else 0
    exchange = 2 if v["cluster"] > 1 else 0
    sums = v.teams * v.sums_per_team * 2 * 4
    regions = [
        ("barriers", 0, 8 * v.teams * (stages + exchange), 8),
        ("row sums", v.sums_offset, sums, 4),
        ("weight", v.weight_offset, v.weight_bytes, min(16, v["vector_bytes"])),
        ("broadcast", v.broadcast_offset, 8, 4),
        ("block sums", v.block_sums_offset, v.block_sums_bytes, 16),
        ("runs written", v.runs_written_offset, 8 if v.run_rows and v.teams > 1 else 0, 8),
        ("tiles", v.tiles_offset, max(v.tile_bytes, v.fold_bytes, v.tail_bytes), 128),
    ]
    end = 0
    for name, offset, size, alignment in regions:
        assert offset >= end, f"{name} begins inside what comes before it"
        assert offset % alignment == 0, f"{name} is not aligned"
        end = offset + size
    assert end == v.smem_bytes <= target.smem_per_cta


@settings(max_examples=100)
@given(cases())
def test_resident_ctas_fit_an_sm_with_the_registers_that_the_rules_count_on(case: Case) -> None:
    """The rules count the registers of an SM. Where warps cannot be shared out evenly, one of its
    four schedulers may have too few: such kernels compile, and the gate of resources refuses
    them."""
    _, target, v = case
    registers = min(v["register_cap"] or 255, v.register_estimate)
    even = v.threads * v["ctas_per_sm"] % 128 == 0
    assert registers * v.threads * v["ctas_per_sm"] <= target.registers_per_sm
    if even:
        assert target.occupancy(v.threads, registers, v.smem_bytes) >= v["ctas_per_sm"]
    else:
        assert target.occupancy(v.threads, 32, v.smem_bytes) >= v["ctas_per_sm"]


# ---- Columns -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(cases())
def test_every_column_is_owned_by_exactly_one_thread_of_a_team(case: Case) -> None:
    """The owner follows the rule of `Rows::column` and `Rows::owns` in the kernel's source."""
    problem, _, v = case
    shifts = {row * problem.N % v.elements if v.shifted else 0 for row in range(v.elements)}
    assert len(shifts) == v.spec(132).row_period
    for shift in shifts:
        owners: Counter[int] = Counter()
        for rank in range(v["cluster"]):
            first = rank * v.columns
            for vector in range(v.vectors):
                for thread in range(v["threads_per_row"]):
                    column = first + (vector * v["threads_per_row"] + thread) * v.elements - shift
                    if column < first + v.columns:
                        owners.update(range(column, column + v.elements))
        if v.shifted:  # the mask
            owners = Counter({c: owners[c] for c in owners if 0 <= c < problem.N})
        assert owners == Counter(range(problem.N))


@settings(max_examples=100)
@given(cases())
def test_a_vector_never_crosses_the_end_of_a_row(case: Case) -> None:
    problem, _, v = case
    assert v.row_bytes * v["cluster"] == problem.N * problem.itemsize
    assert v.shifted or v.row_bytes % v["vector_bytes"] == 0
    assert v["vector_bytes"] == v.elements * problem.itemsize
    assert v.partial_stride >= v.columns
    assert v.partial_stride % 4 == 0


# ---- Rows ----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cases())
def test_every_row_of_a_batch_has_one_thread_for_each_place_in_it(case: Case) -> None:
    """The thread follows the rule of `row_of` and `row_thread` in the kernel's source."""
    _, _, v = case
    per_row = v["threads_per_row"]
    owners = Counter(
        (u * v.rows_abreast + thread // per_row, thread % per_row)
        for u in range(v["rows_in_flight"])
        for thread in range(v.team_threads)
    )
    places = {(row, place) for row in range(v.batch_rows) for place in range(per_row)}
    assert owners == Counter(places)


def test_rows_of_less_than_a_warp_lie_side_by_side_in_warps_and_batches() -> None:
    target = find_target("h200")
    knobs = {"threads_per_row": 8, "rows_per_cta": 4, "rows_in_flight": 2, "ctas_per_sm": 2}
    v = plain_variant("65536x64:bf16", target, **knobs)
    assert (v.vectors, v.rows_abreast, v.batch_rows, v.threads) == (1, 4, 8, 128)
    # 4 warps with 8 rows each: 33 rows are work for two CTAs.
    assert plan_launch(v.spec(target.sms), 32).grid == 1
    assert plan_launch(v.spec(target.sms), 33).grid == 2


# ---- Launches ------------------------------------------------------------------------------------


def visits(spec: KernelSpec, launch: Launch, M: int) -> Counter[int]:
    """Count how often each batch is visited, by the loop of the kernel's source."""
    seen: Counter[int] = Counter()
    batches = ceil_div(M, spec.batch_rows)
    step = launch.participants * spec.rows_per_cta
    for participant in range(launch.participants):
        for team in range(spec.rows_per_cta):
            seen.update(range(participant * spec.rows_per_cta + team, batches, step))
    return seen


def check_launch(spec: KernelSpec, launch: Launch, M: int) -> None:
    assert launch.grid == launch.participants * spec.cluster
    assert launch.grid <= spec.sms * spec.ctas_per_sm
    assert launch.participants >= 1
    # Nobody idles: every participant has a batch.
    assert (launch.participants - 1) * spec.rows_per_cta < ceil_div(M, spec.batch_rows)
    assert 1 <= launch.group <= launch.participants
    if spec.levels == 1:
        assert launch.group == launch.participants
    # Counters, then accumulators, then scratch, each from a 128-byte line on.
    assert launch.zeroed_offset % 128 == launch.scratch_offset % 128 == 0
    assert launch.zeroed_offset >= 4 * launch.counters
    assert launch.scratch_offset >= launch.zeroed_offset + 4 * launch.zeroed
    assert launch.workspace_bytes == launch.scratch_offset + 4 * launch.scratch
    assert (launch.sum_grid > 0) == spec.has_second_kernel
    if spec.has_second_kernel:
        slices = ceil_div(spec.partial_columns, spec.slice_columns)
        assert launch.sum_grid == slices * spec.cluster


@settings(max_examples=100)
@given(cases())
def test_launch_is_resident_and_its_workspace_is_aligned(case: Case) -> None:
    problem, target, v = case
    spec = v.spec(target.sms)
    check_launch(spec, plan_launch(spec, problem.M), problem.M)


@settings(max_examples=50)
@given(cases(), st.integers(1, 5000))
def test_every_row_is_visited_once_at_any_number_of_rows(case: Case, M: int) -> None:
    """M is an argument of the kernel: the variant was not tuned for all of these numbers."""
    _, target, v = case
    spec = v.spec(target.sms)
    launch = plan_launch(spec, M)
    check_launch(spec, launch, M)
    assert visits(spec, launch, M) == Counter(range(ceil_div(M, spec.batch_rows)))


@settings(max_examples=50)
@given(cases())
def test_even_grid_needs_no_more_rounds_than_a_full_one(case: Case) -> None:
    problem, target, v = case
    spec = v.spec(target.sms)
    needed = ceil_div(ceil_div(problem.M, spec.batch_rows), spec.rows_per_cta)
    full = plan_launch(replace(spec, even_grid=False), problem.M)
    even = plan_launch(replace(spec, even_grid=True), problem.M)
    assert even.participants <= full.participants
    assert ceil_div(needed, even.participants) == ceil_div(needed, full.participants)
    if even.participants > 1:
        fewer = even.participants - (spec.grid_step if needed > even.participants else 1)
        assert fewer <= 0 or ceil_div(needed, fewer) > ceil_div(needed, full.participants)


@pytest.mark.parametrize(("spare", "clusters"), [(12, 15), (28, 13)])
def test_grid_of_clusters_does_not_count_on_spare_sms(spare: int, clusters: int) -> None:
    target = find_target("h200")
    knobs: dict[str, int | str] = {"cluster": 8, "threads_per_row": 256, "grid": "full"}
    v = plain_variant("65536x16384:bf16", target, **knobs, spare_sms=spare)
    spec = v.spec(target.sms)
    assert (target.sms, spec.sms) == (132, 132 - spare)
    launch = plan_launch(spec, 65536)
    assert (launch.participants, launch.grid) == (clusters, 8 * clusters)
    assert plan_launch(spec, 9).participants == 5, "two rows at once in each"


ANY_ROW: dict[str, int | str] = {
    "strategy": "separate",
    "rows_per_cta": 1,
    "threads_per_row": 256,
    "pipeline": "async",
    "stages": 3,
}
"""Knobs with which a cluster shares rows of any length up to a multiple of its vectors."""


@pytest.mark.parametrize(
    ("N", "exact", "knobs", "said"),
    [
        (4096, True, {"cluster": 2, "threads_per_row": 16}, "rows of less than a warp"),
        (4096, False, {"cluster": 2}, "a cluster and any N"),
        (4100, False, {"cluster": 2, **ANY_ROW}, "a cluster and any N"),
        (4096, False, {"cluster": 2, **ANY_ROW, "pipeline": "bulk"}, "a cluster and any N"),
        (4096, True, {"cluster": 3}, "unequal parts of a row"),
        (100, True, {"cluster": 1}, "rows that are no whole vectors"),
        (4096, True, {"pipeline": "bulk", "stages": 1, "reload": "smem"}, "stages that are all"),
        (4096, True, {"pipeline": "async", "stages": 1, "reload": "smem"}, "stages that are all"),
        (4096, True, {"threads_per_row": 64, "rows_per_cta": 16}, "more teams than named barriers"),
        (96, True, {"threads_per_row": 6}, "6 threads for a row, of which lanes need others'"),
        (4096, True, {"pipeline": "bulk", "groups_ahead": 2}, "numbers of groups that are asked"),
    ],
)
def test_what_no_template_can_serve_is_refused(
    N: int, exact: bool, knobs: dict[str, int | str], said: str
) -> None:
    """It would compile, to wrong sums or to a kernel that hangs."""
    v = plain_variant("4096x4096:bf16", find_target("h200"), pipeline="direct", reload="none")
    with pytest.raises(NormforgeError, match=said):
        replace(v, N=N, exact=exact, config={**v.config, **knobs})
    assert not replace(v, exact=False, config={**v.config, "cluster": 2, **ANY_ROW}).exact


def test_only_what_waits_for_nobody_has_more_ctas_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation has sums over its rows and a strategy for them, or neither."""
    alone = Signature(rows("y"), rows("dy"), rows_out("dx"), row_sums=1)
    monkeypatch.setitem(
        OPERATIONS, "alone", RowOperation("alone", alone, lambda y, dy: {"dx": (y, dy)})
    )
    v = plain_variant("4096x4096:bf16", find_target("h200"), pipeline="direct", reload="none")
    free, grid = {"strategy": "none"}, {"grid": "rows"}
    for knobs, operation, said in (
        (grid, v.operation, "'column_slices' and more CTAs than fit at once"),
        (free, v.operation, "sums over the rows and no strategy"),
        ({}, "alone", "'column_slices' without sums over the rows"),
    ):
        with pytest.raises(NormforgeError, match=said):
            replace(v, operation=operation, config={**v.config, **knobs})
    other = replace(v, operation="alone", config={**v.config, **free})
    assert other.spec(132).sms == 132
    assert (other.determinism, other.block_batches) == ("gpu_to_gpu", 0)
    unbounded = replace(other, config={**other.config, **grid})
    assert unbounded.spec(132) == replace(other.spec(132), sms=UNBOUNDED)
    assert unbounded.id == other.id, "it acts through the launch alone"


@settings(max_examples=50)
@given(
    cases(),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 300),
    st.integers(1, 300),
    st.integers(1, 1 << 18),
)
def test_grid_fits_the_sms_that_it_counts_on(
    case: Case, cluster: int, spare: int, sms: int, M: int
) -> None:
    """It has as many whole clusters as fit there, and one at least."""
    _, _, v = case
    cluster = 1 if v.strategy.adds == "in_turns" else cluster
    parts = v.exact and v.N % (cluster * v["vector_bytes"] // v.itemsize) == 0
    assume(cluster == 1 or (parts and v["threads_per_row"] >= 32))
    v = replace(v, config={**v.config, "cluster": cluster, "spare_sms": spare})
    spec = v.spec(sms)
    ctas = max(cluster, (sms - spare) * v["ctas_per_sm"])
    launch = plan_launch(spec, M)
    assert launch.grid == cluster * launch.participants <= ctas
    assert visits(spec, launch, M) == Counter(range(ceil_div(M, spec.batch_rows)))
    full = plan_launch(replace(spec, even_grid=False), 1 << 30)
    assert full.grid > ctas - cluster


@settings(max_examples=50)
@given(cases(), st.sampled_from([12, 20, 28]))
def test_only_producers_and_clusters_of_more_than_two_spare_sms(case: Case, spare: int) -> None:
    problem, target, v = case
    config = SPACE.normalize({**v.config, "spare_sms": spare}, problem, target)
    may_spare = v["cluster"] > 2 or v["pipeline"] == "producer"
    assert config["spare_sms"] == (spare if may_spare else 0)
    other = make_variant(config, problem)
    assert other.spec(target.sms).sms == target.sms - config["spare_sms"]
    assert (other.id, render(other)) == (v.id, render(v)), "it acts through the launch alone"
    # The rules count on the same clusters.
    full = plan_launch(replace(other.spec(target.sms), even_grid=False), 1 << 30)
    participants = DERIVED["participants"].value
    assert participants(other, problem, target) == full.participants


def test_groups_of_two_levels_are_about_the_root_of_the_participants() -> None:
    v = sample_variant(
        "65536x1024:bf16", find_target("h200"), strategy="semaphore", levels=2, spare_sms=0
    )
    spec = replace(v.spec(132), ctas_per_sm=1, even_grid=False)
    launch = plan_launch(spec, 1 << 20)
    assert launch.participants == 132
    assert launch.group == 12
    assert launch.scratch == 11 * 1024
    assert launch.counters == 1 + 11 + 1


@pytest.mark.parametrize("strategy", ["column_slices", "mailbox"])
@pytest.mark.parametrize(
    ("slice_columns", "cluster", "words"),
    [(16, 1, 96), (32, 1, 64), (64, 1, 32), (16, 2, 64)],
)
def test_every_rank_has_a_ledger_of_two_words_and_one_for_each_slice_in_whole_lines(
    strategy: str, slice_columns: int, cluster: int, words: int
) -> None:
    v = plain_variant("4096x1024:bf16", find_target("h200"), strategy=strategy)
    v = replace(v, config={**v.config, "slice_columns": slice_columns, "cluster": cluster})
    spec = v.spec(132)
    assert spec.ledger_words == words >= 2 + 1024 // cluster // slice_columns
    for M in (1, 4096):
        launch = plan_launch(spec, M)
        assert launch.counters == cluster * words
        assert launch.zeroed + launch.scratch == launch.participants * 1024


def test_the_kernel_and_its_workspace_have_ledgers_of_one_length(target: Target) -> None:
    """The next rank's ledger must not begin in the list. Runs in the emulator seldom hand over the
    slice that would show it."""
    source = (TEMPLATES / "dw" / "last_arrived.cuh").read_text()
    found = re.search(r"kLedgerWords = (.+);", source)
    assert found is not None
    spec = plain_variant("4096x1024:bf16", target, strategy="column_slices").spec(target.sms)
    for slices in range(1, 130):
        words = eval(found[1].replace("/", "//"), {"kSlices": slices})
        columns = slices * spec.slice_columns
        assert words == replace(spec, partial_columns=columns).ledger_words


@pytest.mark.parametrize("name", REDUCTION)
def test_class_of_determinism_is_that_of_the_strategy(name: str) -> None:
    v = plain_variant("4096x1024:bf16", find_target("h200"), **REDUCTION[name])
    assert v.determinism == ("none" if name in ("atomic", "bulk_free") else "gpu_to_gpu")
    # The sums of those that add in any order start from zero, and so do the places of a mailbox.
    launch = plan_launch(v.spec(132), 4096)
    assert (launch.zeroed > 0) == (v.determinism == "none" or name == "mailbox")


# ---- Identity ------------------------------------------------------------------------------------


def compiled_from(v: Variant) -> tuple[str, tuple[str, ...]]:
    """Everything that the compiler gets, but for the variant's name in a comment."""
    text = render(v).replace(v.id, "")
    return text, tuple(compile_options("sm_90a", int(v["register_cap"])))


@settings(max_examples=50)
@given(cases(), st.data())
def test_variants_with_one_identity_are_one_source_and_others_are_not(
    case: Case, data: st.DataObject
) -> None:
    problem, target, v = case
    knob = data.draw(st.sampled_from(SPACE.knobs))
    value = data.draw(st.sampled_from(knob.choices))
    config = SPACE.normalize({**v.config, knob.name: value}, problem, target)
    try:
        other = make_variant(config, problem)
    except NormforgeError:  # such as a producer and 16 teams
        assume(False)
    same_source = compiled_from(v) == compiled_from(other)
    assert (v.source_config == other.source_config) == (v.id == other.id)
    if v.source_config == other.source_config:
        assert render(v) == render(other)
        assert same_source
    elif knob.name != "min_blocks":
        # No knob is part of the identity without a part in the source.
        assert not same_source


@settings(max_examples=30)
@given(cases(), st.integers(1, 1 << 20))
def test_rows_are_no_part_of_the_identity(case: Case, M: int) -> None:
    """One cubin serves every M."""
    problem, target, v = case
    other = make_variant(v.config, replace(problem, M=M))
    assert (other.id, render(other)) == (v.id, render(v))
    assert other.spec(target.sms) == v.spec(target.sms)


def test_identity_covers_the_row_length_the_dtypes_and_exactness() -> None:
    target = find_target("h200")
    v = plain_variant("4096x1024:bf16", target)
    ids = {
        v.id,
        *(make_variant(v.config, Problem.parse(p)).id for p in ("1x2048:bf16", "1x1024:fp16")),
        make_variant(v.config, Problem.parse("1x1024:bf16:fp32")).id,
        make_variant(v.config, Problem.parse("1x1024:bf16"), exact=False).id,
    }
    assert len(ids) == 5
    assert str(v) == v.id
    assert v.id.startswith("column_slices_direct_n1024_bf16_128x2_")


def test_threads_that_do_not_divide_a_warp_have_both_columns_of_a_pair() -> None:
    """Six threads have twelve vectors of a head, two each, and three warps have sixteen heads.
    Twelve threads have one each, whose partner another lane has."""
    target = find_target("h200")
    v = plain_variant(
        Problem.parse("4096x96:bf16", "rope"), target, threads_per_row=6, rows_per_cta=4
    )
    assert (v.team_threads, v.rows_abreast, v.threads, v.vectors) == (96, 16, 384, 2)
    assert v.own_partners and v.spec(132).batch_rows == 16
    for changed in ({"threads_per_row": 12}, {"threads_per_row": 5}):
        with pytest.raises(NormforgeError, match="lanes need others' columns"):
            replace(v, config={**v.config, **changed})
    for operation in ("rmsnorm_rope_forward", "rmsnorm_add_forward"):  # sums along the row
        with pytest.raises(NormforgeError, match="lanes need others' columns"):
            replace(v, operation=operation)
    with pytest.raises(NormforgeError, match="bulk copies for 16 rows abreast"):
        replace(v, config={**v.config, "pipeline": "bulk", "stages": 2})
    crowded = {"threads_per_row": 6, "rows_per_cta": 16}
    with pytest.raises(NormforgeError, match="more teams than named barriers"):
        replace(v, config={**v.config, **crowded})
    of_ahead = {"pipeline": "direct", "groups_ahead": 4}
    with pytest.raises(NormforgeError, match="numbers of groups that are asked for ahead"):
        replace(v, config={**v.config, **of_ahead})


@pytest.mark.parametrize(
    ("shape", "knobs", "may"),
    [
        ("rope:4096x128:bf16", {"pipeline": "async"}, True),
        ("rope:4096x128:bf16", {"pipeline": "direct"}, False),
        ("rope:4096x128:bf16+rotary96", {"pipeline": "bulk"}, True),
        # 36 numbers are 72 bytes.
        ("rope:4096x128:bf16+rotary72+interleaved", {"pipeline": "bulk"}, False),
        ("rope:4096x128:bf16+rotary72+interleaved", {"pipeline": "async"}, True),
        ("rope:4096x128:bf16", {"pipeline": "async", "vector_bytes": 4}, True),
        ("rope:4096x128:bf16", {"pipeline": "async", "vector_bytes": 2}, False),
        ("rope:4096x128:bf16+interleaved", {"pipeline": "async", "vector_bytes": 8}, True),
        ("rope:4096x128:bf16+interleaved", {"pipeline": "async", "vector_bytes": 4}, False),
        ("rmsnorm_rope_forward:4096x4096:bf16+joined128", {"cluster": 2}, False),
        ("rmsnorm_backward:4096x4096:bf16", {"pipeline": "async"}, False),
    ],
)
def test_numbers_of_groups_lie_in_stages_where_copies_of_them_exist(
    shape: str, knobs: dict[str, int | str], may: bool
) -> None:
    problem = Problem.parse(shape)
    strategy = "column_slices" if problem.signature.sums else "none"
    target = find_target("h200")
    plain = {"threads_per_row": 32, "rows_per_cta": 8} if problem.N == 128 else {}
    v = plain_variant(problem, target, strategy=strategy, **plain)
    config = {**v.config, "pipeline": "async", "stages": 2, **knobs}
    assert replace(v, config=config).may_stage is may
    staged = {**config, "groups_in": "smem"}
    if may:
        assert replace(v, config=staged).stages_groups
    else:
        with pytest.raises(NormforgeError, match="numbers of groups in stages without room"):
            replace(v, config=staged)
