"""Phrases of the pages that hold numbers of the code, or of the committed results."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from math import exp
from statistics import geometric_mean, median
from typing import Any

from benchmarks import flushes, repeatability
from benchmarks.goals import ratio as over_floor
from benchmarks.pages import note_facts as notes
from benchmarks.pages.method import percent
from benchmarks.pages.note_facts import span
from benchmarks.pages.performance import goal_table
from benchmarks.pages.text import generated, read
from benchmarks.peers.cudnn_plans import PLAN_SECONDS
from benchmarks.prediction import fit, score
from benchmarks.search_replay import recording, replay
from benchmarks.training.steps import BLOCKS, TOKENS
from benchmarks.training.summary import CONFIDENCE
from generator.evaluate.gpu import l2_flush, noise, rotation, session, supervisor
from generator.evaluate.predict import correction, prior
from generator.evaluate.predict.model import MODEL
from generator.evaluate.verify import determinism
from generator.kernels import compile_pool
from generator.package import fallback_kernels
from generator.paths import REPOSITORY, template_named
from generator.problem import Problem
from generator.search import (
    budget,
    choose_winner,
    experience,
    finals,
    neighbours,
    proposals,
    sampler,
    starts,
    surrogate,
)
from generator.shape_lists import load_problems
from generator.space import expressions
from generator.studies import outage, postgres, work_queue
from generator.tuner import device_pool, lifecycle, task_runner
from normforge.launch import workspace
from normforge.spec import CHUNK_ROWS
from tests.support.accuracy import MARGIN
from tests.support.entry_points import WHOLE_FROM

WORD = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
VECTOR = fallback_kernels.COMMON_VECTOR_BYTES


def oldest(package: str) -> str:
    """The oldest version that pyproject.toml takes."""
    found = re.search(rf'{package}( = ")?>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert found is not None
    return found[2]


def missed() -> str:
    return f"{WORD[goal_table().count('**missed**')].capitalize()} goals are missed"


def search() -> list[str]:
    kept = percent(choose_winner.INCUMBENT_TIE)
    return [
        f"until {sampler.FIRST} configs have been proposed",
        f"the {WORD[len(sampler.STEP)]} best trials and {sampler.DRAWN} new random configs",
        f"a config of each of {WORD[starts.FAMILIES]}",
        f"A family that has {percent(sampler.FAMILY_SHARE)} of the trials",
        f"of at least {WORD[finals.FAMILIES]} families",
        f"up to {WORD[neighbours.CARRIED]} configs that won at neighbours",
        f"(at most {percent(neighbours.CARRIED_SHARE)} of the trials)",
        f"Neighbours are the {WORD[neighbours.NEAREST]} nearest shapes",
        f"from the {experience.STUDIES} nearest studies",
        f"for every {percent(surrogate.SCALE)} that a candidate",
        f"fewer than {experience.FEWEST_TRIALS} trials",
        f"The last {percent(proposals.OVERHEAD_SHARE)} of the trials"
        f" (at most {percent(proposals._MAX_OVERHEAD_SHARE)} of a small budget)",
        f"Up to {finals.SHORTLIST} of the best trials",
        f"The best {WORD[budget.FINALISTS]} of the shortlist",
        f"at most {budget.Budget(1).sweep_limit} legal configs",
        f"within {100 * choose_winner.TIE:g} % of the fastest are tied",
        f"tied at {kept} instead of {100 * choose_winner.TIE:g} %",
        f"takes less than {choose_winner.HOST_US:.0f} µs, the host is the limit",
        f"at most {choose_winner.LAUNCH_US} µs slower; of several such kernels, only those within"
        f" {100 * choose_winner.TIE:g} % of the fastest of them.",
        f"{WORD[finals.ONE_LAUNCH_PLACES].capitalize()} places in the finals",
        f"side by side, in {WORD[noise.BLOCKS]} blocks",
        f"({noise.SHORT_BLOCKS} blocks if the floor is below {noise.SHORT_US:.0f} µs",
        f"takes longer than {finals.SHORTLIST_US / finals.SHORTLIST:.0f} µs)",
        f"configs within {percent(prior.TIE)} are tied",
        f"the same bits in {determinism.RUNS} runs",
        f"share of searches that came within {percent(replay.CLOSE)} of it",
        f"proposes {replay.COMPILERS} trials ahead",
        f"Those within {percent(recording.NEAR - 1)} of the best are measured"
        f" {WORD[recording.REPEATS + 1]} times",
        f"times the best {percent(recording.NEAREST - 1)} of each recording again",
    ]


def tuning() -> list[str]:
    layouts = fallback_kernels.load_layouts().groups
    common = len(layouts["wide"])
    clustered = common + len({layout.columns for layout in layouts["long"]})
    searched = len(read("h100_first_search")["rows"])
    most = re.search(r"--trials (\d+)", read("h100_first_search")["what"])
    assert most is not None
    return [
        f"| {clustered} for each pair of dtypes of the run, {common} on a GPU without clusters",
        f"rows of whole {VECTOR}-byte vectors: a multiple of {VECTOR // 2} bf16",
        f"A measured search has {budget.TRIALS['measured']} trials by default",
        f"A predicted one has {budget.TRIALS['predicted']},",
        f"On one H100, with at most {most[1]} trials per shape",
        f"{searched} of {first_search_shapes()} shapes had a winner after"
        f" [{first_search_seconds()} s",
    ]


def cluster() -> list[str]:
    return [
        f"at most {task_runner.MAX_COMPILERS}.",
        f"{WORD[device_pool._MAX_DEATHS].capitalize()} deaths in one shape",
        f"every {work_queue.LEASE_SECONDS / work_queue._BEATS:.0f} s",
        f"After {work_queue.LEASE_SECONDS:.0f} s without a heartbeat",
        f"its shapes are free after {work_queue.LEASE_SECONDS:.0f} s",
        f"end within {lifecycle.INTERRUPT_SECONDS} s",
        f"waits up to {outage.MAX_OUTAGE_SECONDS:.0f} s",
        f"noticed within {postgres._LIBPQ['tcp_user_timeout'] // 1000} s",
    ]


def prediction() -> list[str]:
    return [
        f"those within {percent(score.NEAR - 1)} of the fastest",
        f"{fit.TREES} small trees",
        f"on each of {WORD[fit.DEPTH]} levels",
        f"every {percent(fit.NEAR)} that it is behind",
        f"by {percent(exp(correction.BOUND) - 1)} at most",
        f"within {percent(prior.TIE)} count as equal",
        f"the {WORD[prior.NEAREST]} nearest measured winners",
        f"starts from {WORD[starts.WARM_STARTS]} of those winners",
        f"^(1/{MODEL.smoothness:.0f})",
        f"{percent(MODEL.smooth_max(1, 1) - 1)} more where they are equal",
        f"{WORD[MODEL.loads_in_flight]} at a time in each thread",
        f"(B + {MODEL.dirty_fraction} · min(B, L2)) / ({MODEL.memory_efficiency} · bandwidth)",
    ]


def faults() -> list[str]:
    asked = inspect.signature(compile_pool.CompilePool.result).parameters["timeout"].default
    drift, spread = (f"{percent(x)} + {noise.JITTER_US} µs" for x in (noise.DRIFT, noise.SPREAD))
    return [
        f"after {WORD[compile_pool.MAX_CRASHES]} processes of its own",
        f"compiled again for up to {compile_pool.MACHINE_SECONDS:.0f} s",
        f"more than {asked} s",
        f"no answer within {supervisor.JOB_SECONDS:.0f} s",
        f"{session.SLOW} times the time of the best",
        f"after {WORD[len(supervisor.RETRY_PAUSES) + 1]} times in a row",
        f"at least {WORD[len(supervisor.RETRY_PAUSES)]} times",
        f"{WORD[supervisor.STARVED]} candidates in a row",
        f"more than {drift} above its best",
        f"more than {spread} apart",
        f"up to {WORD[len(noise.SEARCH_PAUSES)]} times, within {sum(noise.SEARCH_PAUSES):.1f} s",
        f"need {WORD[noise.BLOCKS]} clean blocks, and try for {noise.SHORT_BLOCKS} where the floor"
        f" is below {noise.SHORT_US:.0f} µs",
    ]


def forward_kernels() -> list[str]:
    """Return the phrases on how RMSNorm's forward kernels are made and chosen."""
    wide, busy = (expressions._HELD[threads] for threads in (512, 1024))
    return [
        f"up to {wide} vectors a thread ({busy} in CTAs of 1024)",
        f"The {WORD[budget.FINALISTS]} fastest must repeat their bits in {determinism.RUNS} runs",
        f"The first {WORD[budget.FORWARD_TRIALS['predicted']]} variants",
        f"rows of whole {VECTOR}-byte vectors",
    ]


def forward_comparison() -> list[str]:
    first, every = notes.fastest_forwards("h200")
    other_first, others = notes.fastest_forwards("h100")
    usual = notes.usual_stores()
    return [
        f"at {first} of the {every} shapes of the H200's package, and at {other_first} of the"
        f" {others} of the H100's",
        f"took at most {percent(notes.tie_of_forwards())} longer than the fastest",
        f"cuDNN's took {geometric_mean(usual):.3f} times as long as kernels that stored y as usual,"
        f" in the mean of {len(usual)} shapes",
    ]


def glossary() -> list[str]:
    return [
        f"it is more than {percent(choose_winner.INCUMBENT_TIE)} slower",
    ]


def held_again() -> list[str]:
    def pairs(gpu: str, group: str) -> tuple[int, ...]:
        """All pairs of finals, those of one kernel, and ties."""
        found = [row["agreement"][group] for row in read(f"repeatability_{gpu}")["rows"]]
        return tuple(map(sum, zip(*found, strict=True)))

    of, one, tied = pairs("h200", "finals")
    other_of, other_one, other_tied = pairs("h100", "finals")
    assert one + tied == of and other_one + other_tied == other_of
    untied, shapes = {}, set()
    for gpu in ("h200", "h100"):
        rows = read(f"repeatability_{gpu}")["rows"]
        shapes.add(tuple(row["shape"] for row in rows))
        apart = [
            row for row in rows if row["agreement"]["all"][0] > sum(row["agreement"]["all"][1:])
        ]
        assert len(apart) == 1
        assert all(found["floor_us"] < noise.SHORT_US for found in apart[0]["finals"])
        everyone, *agreeing = pairs(gpu, "all")
        untied[gpu] = f"{everyone - sum(agreeing)} of {everyone}"
    (names,) = shapes
    return [
        f"differ by at most {percent(repeatability.TIE)}, or by two standard errors",
        f"At {len(names)} shapes on an H200, {one} of {of} pairs of finals chose the same"
        f" kernel, and the other {tied} chose two that tie",
        f"On an H100, {other_one} of {other_of} pairs chose the same kernel, and the other"
        f" {other_tied} two that tie",
        f"{untied['h200']} pairs do not tie on the H200 and {untied['h100']} on the H100",
        f"whose floor is below {noise.SHORT_US:.0f} µs. Finalists of such shapes are compared in"
        f" {noise.SHORT_BLOCKS} blocks, others in {noise.BLOCKS}.",
    ]


def lab_notes() -> list[str]:
    winners, compared = notes.winners(), notes.compared()
    slower, same, faster = notes.exchange()
    hints = {pipeline: notes.load_hints(pipeline) for pipeline in ("async", "bulk")}
    launches, generic = notes.one_launch(4096), notes.generic_in_blocks()
    blocks = [x for some in (False, True) for x in notes.in_blocks("blocks_h200", some)]
    ends, hidden = (
        span(notes.in_blocks(name, clusters=True), 3)
        for name in ("blocks_end_of_batch_h200", "blocks_in_clusters_h200")
    )
    slow = winners["4096x16384:fp16"]
    near, shapes = notes.near_the_floor(1.1)
    return [
        *held_again(),
        f"ended the run after {first_search_seconds()} s, with"
        f" {len(read('h100_first_search')['rows'])} of its {first_search_shapes()} shapes done",
        f"up to {percent(notes.saved_by_stores())} of the forward",
        f"it would gain up to {notes.gained_by_both():.1f} µs",
        f"{slower} of {slower + same + faster} kernels were more than 1 % slower,"
        f" and {faster} more than 1 % faster",
        f"{span(notes.early_arrival(True), sign='+')} µs up to {notes.SMALL >> 20} M elements,"
        f" {span(notes.early_arrival(False), sign='+')} µs above",
        f"{winners['524288x64:bf16'].result.ratio:.2f} of the floor at 524288x64",
        f"nearly free: times {span(blocks, 3)}",
        f"times {span(generic, 3)}, in the median {median(generic):.3f}",
        f"times {hidden}; at the end of a batch {ends}",
        f"kernels of one launch take {span(launches, 3)} of the time of two,"
        f" in the {len(launches)} finals",
        f"take {geometric_mean(hints['async']):.3f} of the time in the geometric mean of"
        f" {len(hints['async'])} shapes ({span(hints['async'], 3)}). With bulk copies it is"
        f" {geometric_mean(hints['bulk']):.3f}, of {len(hints['bulk'])} shapes",
        f"times {span(notes.sent_early('first pass', clusters=False))},"
        f" in clusters {span(notes.sent_early('first pass', clusters=True))}",
        f"times {span(notes.fewer_partials(0))} with every second,"
        f" {span(notes.fewer_partials(1))} with every fourth",
        f"times {span(notes.sent_early('while row sums are exchanged', clusters=True))}:",
        f"has {over_floor(compared['4096x16384:fp16']):.3f} of the floor,"
        f" after {slow.result.ratio:.3f} in the finals on another GPU. Its study has {slow.trials}",
        f"within 10 % of the floor at {near} of the {shapes} shapes",
        f"are {span(notes.floors_of_two_gpus())} of those in the finals",
        missed(),
    ]


def accuracy() -> list[str]:
    errors, compared = read("errors_h200")["rows"], len(load_problems("compare"))
    brackets = Counter((spec["least"], spec["N"]) for spec in notes.row_by_row())
    (most, wide), (one, narrow) = ((n, key) for key, n in brackets.most_common())
    assert one == 1 and {spec["weight_dtype"] for spec in notes.row_by_row()} == {"fp32"}
    worst = max(
        (row["ours over"]["aten"]["dw"], row["shape"])
        for row in errors
        if row["shape"].endswith(":fp32") and "aten" in row["ours over"]
    )
    return [
        f"{WORD[most + one].capitalize()} fallback kernels with an fp32 weight",
        f"{WORD[most]} for {wide[0]} to {wide[1]} columns, one for {narrow[0]} to {narrow[1]}",
        f"the largest error is that of dw at {worst[1].removesuffix(':fp32')}",
        f"dx has up to {notes.error_over_fused('dx'):.2f} times the error of the fused operator"
        f" there, and dw up to {notes.error_over_fused('dw'):.2f} times",
        f"at most {MARGIN} times the larger of PyTorch's error and",
        f"The {compared} shapes of the comparison and {len(errors) - compared} random ones",
    ]


def layernorm_entries() -> list[Any]:
    return list(generated("h200", "layernorm_backward", "table.json")["tuned"])


def first_search_seconds() -> str:
    return str(read("h100_first_search")["what"].split(" after ")[1].split(" s ")[0])


def first_search_shapes() -> str:
    return str(read("h100_first_search")["what"].split(" of ")[1].split(" ")[0])


def readme() -> list[str]:
    environment = read("h200")["environment"]
    cuda = layernorm_entries()[0]["kernel"]["nvrtc"].partition(".")[0]
    return [
        f"Python {oldest('requires-python')} or newer, PyTorch {oldest('torch')} or newer, and an"
        f" NVIDIA driver for CUDA {cuda}.",
        f"{len(load_problems('compare'))} shapes in bf16, fp16 and fp32",
        f"with PyTorch {environment['torch'].partition('+')[0]} and Triton {environment['triton']};"
        " newer ones were not compared",
    ]


def adopting() -> list[str]:
    override = (REPOSITORY / "normforge" / "torchtitan.py").read_text()
    written_for = re.search(r"Written for torchtitan [\d.]+\d", override)
    assert written_for is not None
    return [f"PyTorch ({oldest('torch')} or newer)", written_for[0]]


def packages() -> list[str]:
    table = generated("h200", "rmsnorm_backward", "table.json")
    widths = [entry["N"] for entry in table["tuned"]]
    specs = [kernel["spec"] for kernel in table["fallback"]]
    generic = {
        width: max(spec["N"] for spec in specs if spec["vector_bytes"] == width)
        for width in (2, 4, 8, 16)
    }
    wide = fallback_kernels.load_layouts().groups["wide"]
    return [
        f"timed with {read('h200')['environment']['driver']}",
        f"Python {oldest('requires-python')} or newer, PyTorch {oldest('torch')} or newer",
        f"tuned lengths from {min(widths)} to {max(widths):,}",
        f"up to {generic[16]:,} if a row consists of whole 16-byte vectors",
        f"beyond {max(layout.columns for layout in wide):,} only on GPUs with",
        f"else at least up to {min(generic[2], generic[4], generic[8]):,}",
    ]


def graphs() -> list[str]:
    return [
        f"From PyTorch {'.'.join(map(str, WHOLE_FROM))} on, `inductor_backend()`",
        f"On PyTorch {oldest('torch')}, they route only the backward",
    ]


def determinism_page() -> list[str]:
    return [
        f"A *chunk*, {CHUNK_ROWS} rows,",
        f"the strips of {CHUNK_ROWS} consecutive rows",
        f"a multiple of {CHUNK_ROWS} rows",
        f"Then {determinism.RUNS} runs must give the same bits; candidates that take more than"
        f" {session.SLOW} times as long as the best so far skip this",
        f"| ordinary inputs | {determinism.RUNS} more runs |",
        f"| busy GPU | {determinism.RUNS} runs while",
    ]


def emulator() -> list[str]:
    patience = re.search(r"kPatience = (\d+);", template_named("last_arrived.cuh").read_text())
    assert patience is not None
    return [f"it polls at most {patience[1]} times"]


def against() -> tuple[list[float], list[float]]:
    """Return by how much host times differ from those before: of operators, and of other calls."""
    runs = [run["us"].items() for run in read("host_against_h200")["runs"]]
    found = [(name, us["difference"]) for run in runs for name, us in run]
    operators = [us for name, us in found if ", operator" in name]
    return operators, [us for name, us in found if ", operator" not in name]


def hint_on_h100() -> list[str]:
    rotating, cold = notes.hint_under("rotating"), notes.hint_under("cold")
    where = max(rotating.longer, key=rotating.longer.__getitem__)
    slower = sum(share > 0 for share in rotating.longer.values())
    with_it, every = notes.hinted("h100")
    rotated, shapes = notes.hinted("h100", "compare")
    return [
        f"the hint slows {slower} of {len(rotating.longer)} winners of an H100, by up to"
        f" {percent(rotating.longer[where], 1)} ({where.partition(':')[0]}), and all by"
        f" {percent(rotating.hinted / rotating.plain - 1, 1)} in the mean: they take"
        f" {rotating.hinted:.3f} times the floor with it, and {rotating.plain:.3f} without",
        f"after the flush {cold.hinted:.3f} and {cold.plain:.3f}",
        f"{with_it} of the H100's {every} kernels for tuned shapes have it",
        f"{rotated} of the {shapes} for the shapes of `compare`, whose finals were held in",
    ]


def performance() -> list[str]:
    measured_by = read("h200")["environment"]
    nvrtc = layernorm_entries()[0]["kernel"]["nvrtc"]
    steps = read("training_h100")["environment"]
    training = next(iter(read("training_h100")["cases"].values()))
    host = read("host_time_h200")
    passes = host["ratios of the passes"]
    operators, others = against()
    long = read("untuned_long_h100")
    widths = [Problem.parse(row["shape"]).N for row in long["rows"]]
    only_dw, added = (
        host["whole calls"][f"rmsnorm_backward, {what}"] for what in ("dw only", "main_grad")
    )
    return [
        f"`evict_last` and then writes {l2_flush.FLUSH_BYTES >> 20} MB",
        f"driver {measured_by['driver']}, NVRTC {nvrtc},"
        f" PyTorch {measured_by['torch'].rpartition('.')[0]}",
        f"interleaved all implementations at {len(read('h200')['rows'])} shapes",
        f"Plain reads of {flushes.READ_BYTES >> 20} MB inside",
        f"Each row comes from {WORD[len(training)]} processes",
        f"every norm has at least {steps['warmups']} warm-up steps, then at least"
        f" {steps['rounds']} timed ones",
        f"median of {WORD[len(next(iter(passes.values())))]} passes",
        f"adds to `main_grad` takes {added:.1f} µs, and one that computes only dw {only_dw:.1f} µs",
        f"operators take up to {max(operators):.1f} µs longer. Other calls took between"
        f" {-min(others):.1f} µs less and {max(others):.1f} µs more",
        f"within {PLAN_SECONDS:.0f} seconds",
        *hint_on_h100(),
        f"forward and backward of {WORD[BLOCKS]} transformer blocks",
        f"on {TOKENS:,} tokens",
        f"its {percent(CONFIDENCE)} confidence interval",
        f"tuned for it with {read('untuned_h200')['trials']} trials",
        f"rows of {min(widths):,} to {max(widths):,} columns",
        f"kernels tuned with {long['trials']} trials",
    ]


def layernorm() -> list[str]:
    trials = [entry["provenance"]["trials"] for entry in layernorm_entries()]
    return [
        f"tuned at {len(trials)} shapes, with {min(trials)} to {max(trials)} trials for a shape",
    ]


PAGES: dict[str, Callable[[], list[str]]] = {
    "README.md": readme,
    "adopting.md": lambda: [*adopting(), *graphs()],
    "cluster.md": lambda: [*cluster(), *faults()],
    "determinism.md": lambda: [*determinism_page(), *accuracy()],
    "emulator.md": emulator,
    "generated-code.md": packages,
    "glossary.md": glossary,
    "lab-notes.md": lab_notes,
    "layernorm.md": layernorm,
    "method.md": lambda: [
        *(f"- **`{name}`**:" for name in rotation.CONDITIONS),
        f"more than {['', 'once', 'twice'][rotation.L2_TIMES]} the bytes of the L2",
    ],
    "performance.md": lambda: [*performance(), *forward_comparison()],
    "prediction.md": prediction,
    "architecture.md": lambda: [
        f"or per capturing stream from {workspace.SHARED_FROM >> 10} KiB",
    ],
    "search.md": lambda: [*search(), *forward_kernels()],
    "tuning.md": tuning,
}


@cache
def stated(page: str) -> list[str]:
    """Phrases of a page with numbers of the code and of the committed results."""
    return PAGES[page]() if page in PAGES else []
