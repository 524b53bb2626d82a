"""Phrases of the pages that hold numbers of the code, or of the committed results."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from math import exp
from statistics import geometric_mean, median

import yaml

from benchmarks import flushes, repeatability
from benchmarks import note_facts as notes
from benchmarks.goals import ratio as over_floor
from benchmarks.method_pages import percent
from benchmarks.note_facts import span
from benchmarks.page_text import read
from benchmarks.pages import goal_table
from benchmarks.peers.cudnn_plans import PLAN_SECONDS
from benchmarks.prediction import fit, score
from benchmarks.search_replay import recording, replay
from benchmarks.training.steps import BLOCKS, TOKENS
from benchmarks.training.summary import CONFIDENCE
from generator.evaluate.gpu import forward, l2_flush, noise, session, supervisor
from generator.evaluate.predict import correction, prior
from generator.evaluate.predict.model import MODEL
from generator.evaluate.verify import determinism
from generator.kernels import compile_pool
from generator.package import fallback_kernels
from generator.paths import GENERATED, REPOSITORY, TEMPLATES
from generator.problem import load_problems
from generator.runtime.launch import workspace
from generator.runtime.spec import CHUNK_ROWS
from generator.search import budget, choose_winner, finals, proposals, sampler, starts
from generator.space import forward_space
from generator.studies import postgres, work_queue
from generator.tuner import device_pool, lifecycle, task_runner
from generator.tuner import forward as tuner_forward
from tests.support.accuracy import MARGIN
from tests.support.entry_points import WHOLE_FROM

WORD = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COMPILE_SECONDS = inspect.signature(compile_pool.CompilePool.result).parameters["timeout"].default
COMMON = len(yaml.safe_load(fallback_kernels.LAYOUTS_FILE.read_text())["layouts"]["wide"])
VECTOR = fallback_kernels.COMMON_VECTOR_BYTES
DRIFT, SPREAD = (f"{percent(x)} + {noise.JITTER_US} µs" for x in (noise.DRIFT, noise.SPREAD))
WIDE, BUSY = (forward_space._most_vectors(threads) for threads in (512, 1024))
LAYERNORM = json.loads((GENERATED / "h200" / "layernorm_backward" / "table.json").read_text())
LAYERNORM_TRIALS = [entry["provenance"]["trials"] for entry in LAYERNORM["tuned"]]
UNTUNED_WIDTHS = [
    row
    for name in ("untuned_h200", "untuned_seed1_h200")
    for row in read(name)["rows"]
    if row["unknown"] == "N"
]

REPEATED = read("repeatability_h200")
FINALS = [sum(row["agreement"]["finals"][i] for row in REPEATED["rows"]) for i in range(3)]
DIFFERING = [
    r for r in REPEATED["rows"] if r["agreement"]["finals"][0] > sum(r["agreement"]["finals"][1:])
]
assert all(f["floor_us"] < choose_winner.HOST_US for row in DIFFERING for f in row["finals"])

STATED: dict[str, list[str]] = {
    "search.md": [
        f"until {sampler.FIRST} configs are taken",
        f"the {WORD[len(sampler.STEP)]} best trials and {sampler.DRAWN} new random configs",
        f"The last {percent(proposals.OVERHEAD_SHARE)} of the trials",
        f"Up to {finals.SHORTLIST} of the best trials",
        f"The best {WORD[budget.FINALISTS]} of the shortlist",
        f"at most {budget.Budget(1).sweep_limit} legal configs",
        f"within {100 * choose_winner.TIE:g} % of the fastest are tied",
        f"Below {choose_winner.HOST_US:.0f} µs the host",
        f"be {choose_winner.LAUNCH_US} µs slower than the fastest",
        f"{WORD[finals.ONE_LAUNCH_PLACES].capitalize()} places in the finals",
        f"even if it is up to {percent(choose_winner.INCUMBENT_TIE)} slower",
        f"side by side, in {WORD[noise.BLOCKS]} blocks",
        f"or {noise.SHORT_BLOCKS} where the floor is below {noise.SHORT_US:.0f} µs",
        f"differ by at most {percent(repeatability.TIE)}, or by two standard errors",
        f"at {len(REPEATED['rows'])} shapes, {FINALS[1]} of {FINALS[0]} pairs of finals",
        f"{FINALS[2]} of {FINALS[0]} chose two that tie",
        f"The rest, {FINALS[0] - FINALS[1] - FINALS[2]} of {FINALS[0]}, did not",
        f"all at {len(DIFFERING)} shapes whose floor is below {choose_winner.HOST_US:.0f} µs",
        f"configs within {percent(prior.TIE)} are tied",
        f"the same bits in {determinism.RUNS} runs",
        f"{session.SLOW} times the time of the best",
        f"| {COMMON} for each pair of dtypes",
        f"rows of whole {VECTOR}-byte vectors: a multiple of {VECTOR // 2} bf16",
        f"A measured search has {budget.TRIALS['measured']} trials by default",
        f"A predicted one has {budget.TRIALS['predicted']},",
    ],
    "cluster.md": [
        f"at most {task_runner.MAX_COMPILERS}.",
        f"{WORD[device_pool._MAX_DEATHS].capitalize()} deaths in one shape",
        f"every {work_queue.LEASE_SECONDS / work_queue._BEATS:.0f} s",
        f"A lease without one for {work_queue.LEASE_SECONDS:.0f} s",
        f"its shapes are free after {work_queue.LEASE_SECONDS:.0f} s",
        f"end within {lifecycle.INTERRUPT_SECONDS} s",
        f"waits up to {postgres.MAX_OUTAGE_SECONDS:.0f} s",
        f"noticed within {postgres._LIBPQ['tcp_user_timeout'] // 1000} s",
    ],
    "looking.md": [
        f"share of searches within {percent(replay.CLOSE)} of it",
        f"proposes {replay.COMPILERS} trials ahead",
        f"Those within {percent(recording.NEAR - 1)} of the best are measured"
        f" {WORD[recording.REPEATS + 1]} times",
        f"times the best {percent(recording.NEAREST - 1)} of each recording again",
    ],
    "prediction.md": [
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
    ],
    "faults.md": [
        f"after {WORD[compile_pool.MAX_CRASHES]} processes of its own",
        f"more than {COMPILE_SECONDS} s",
        f"no answer within {supervisor.JOB_SECONDS:.0f} s",
        f"{session.SLOW} times the time of the best",
        f"after {WORD[len(supervisor.RETRY_PAUSES) + 1]} times in a row",
        f"at least {WORD[len(supervisor.RETRY_PAUSES)]} times",
        f"{WORD[supervisor.STARVED]} candidates in a row",
        f"more than {DRIFT} above its best",
        f"more than {SPREAD} apart",
        f"up to {WORD[len(noise.SEARCH_PAUSES)]} times, within {sum(noise.SEARCH_PAUSES):.1f} s",
        f"need {WORD[noise.BLOCKS]} clean blocks, or {noise.SHORT_BLOCKS} where the floor is below"
        f" {noise.SHORT_US:.0f} µs",
    ],
    "forward.md": [
        f"up to {WIDE} vectors a thread ({BUSY} in CTAs of 1024)",
        f"The {WORD[forward.FINALISTS]} fastest must repeat their bits in {determinism.RUNS} runs",
        f"within {percent(tuner_forward.TIE)} of the best",
        f"rows of whole {VECTOR}-byte vectors",
    ],
    "glossary.md": [
        f"within {100 * choose_winner.TIE:g} % of the fastest",
        f"beaten by more than {percent(choose_winner.INCUMBENT_TIE)}",
        "Below 1 the winner",
    ],
}


def oldest(package: str) -> str:
    """The oldest version that pyproject.toml takes."""
    found = re.search(rf'{package}( = ")?>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert found is not None
    return found[2]


def lab_notes() -> list[str]:
    """Sentences and cells of docs/lab-notes.md."""
    winners, compared = notes.finals(), notes.compared()
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
        f"{slower} of {slower + same + faster} kernels were more than 1 % slower,"
        f" and {faster} more than 1 % faster",
        f"{span(notes.early_arrival(True), sign='+')} µs up to {notes.SMALL >> 20} M elements,"
        f" {span(notes.early_arrival(False), sign='+')} µs above",
        f"{winners['524288x64:bf16']['ratio']:.2f} of the floor at 524288x64",
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
        f"times {span(notes.sent_early('while row sums are exchanged', clusters=True))}:",
        f"has {over_floor(compared['4096x16384:fp16']):.3f} of the floor,"
        f" after {slow['ratio']:.3f} in the finals on another GPU. Its study has {slow['trials']}",
        f"within 10 % of the floor at {near} of the {shapes} shapes",
        f"are {span(notes.floors_of_two_gpus())} of those in the finals",
        f"{MISSED} goals are missed",
    ]


def accuracy() -> list[str]:
    """Sentences of docs/accuracy.md."""
    brackets = Counter((spec["least"], spec["N"]) for spec in notes.row_by_row())
    (most, wide), (one, narrow) = ((n, key) for key, n in brackets.most_common())
    assert one == 1 and {spec["weight_dtype"] for spec in notes.row_by_row()} == {"fp32"}
    worst = max(
        (row["ours over"]["aten"]["dw"], row["shape"])
        for row in ERRORS
        if row["shape"].endswith(":fp32") and "aten" in row["ours over"]
    )
    return [
        f"{WORD[most + one].capitalize()} fallback kernels with an fp32 weight",
        f"{WORD[most]} for {wide[0]} to {wide[1]} columns, one for {narrow[0]} to {narrow[1]}",
        f"the largest error is that of dw at {worst[1].removesuffix(':fp32')}",
        f"dx has up to {notes.error_over_fused('dx'):.2f} times the error of the fused operator"
        f" there, and dw up to {notes.error_over_fused('dw'):.2f} times",
        f"at most {MARGIN} times the larger of PyTorch's",
    ]


PYTHON, TORCH = oldest("requires-python"), oldest("torch")
MEASURED_BY = read("h200")["environment"]
COMPARED = len(load_problems("compare"))
TUNED_PEERS = len(read("tuned_peers_h200")["rows"])
TRAINING = next(iter(read("training_h200")["cases"].values()))
HOST_TIME = read("host_time_h200")
PASSES = HOST_TIME["ratios of the passes"]
DRIFT = max(
    max(ratio / HOST_TIME["ratios"][name], HOST_TIME["ratios"][name] / ratio)
    for name, ratios in PASSES.items()
    for ratio in ratios
)
FIRST_SEARCH = read("h100_first_search")
FIRST_SEARCH_SECONDS = FIRST_SEARCH["what"].split(" after ")[1].split(" s ")[0]
ERRORS = read("errors_h200")["rows"]
RMSNORM = json.loads((GENERATED / "h200" / "rmsnorm_backward" / "table.json").read_text())
WIDTHS = sorted(entry["N"] for entry in RMSNORM["tuned"])
GENERIC = {
    width: max(
        kernel["spec"]["columns"]
        for kernel in RMSNORM["fallback"]
        if kernel["spec"]["vector_bytes"] == width
    )
    for width in (2, 16)
}
"""Columns of the widest fallback kernels, by the bytes of their vectors."""
MISSED = WORD[goal_table().count("**missed**")].capitalize()
PATIENCE = re.search(r"kPatience = (\d+);", (TEMPLATES / "last_arrived.cuh").read_text())

STATED |= {
    "README.md": [
        f"{COMPARED} shapes in bf16, fp16 and fp32",
        f"ran at {TUNED_PEERS} shapes",
        f"Python {PYTHON} or newer, PyTorch {TORCH} or newer",
        f"tuned lengths from {WIDTHS[0]} to {WIDTHS[-1]:,}; fallback kernels serve any other up to"
        f" {GENERIC[16]:,}, or {GENERIC[2]:,} if it is an odd number",
    ],
    "index.md": [f"PyTorch {TORCH} or newer"],
    "adopting.md": [
        f"PyTorch ({TORCH} or newer)",
        f"need PyTorch {'.'.join(map(str, WHOLE_FROM))} or newer",
        f"PyTorch {TORCH} decomposes the forward",
    ],
    "accuracy.md": [
        *accuracy(),
        f"The {COMPARED} shapes of the comparison and {len(ERRORS) - COMPARED} random ones",
    ],
    "determinism.md": [
        f"a CTA looks {PATIENCE and PATIENCE[1]} times",
        f"A *chunk* is {CHUNK_ROWS} consecutive rows",
        f"a multiple of {CHUNK_ROWS} rows",
        f"Then {determinism.RUNS} runs must give the same bits",
        f"| ordinary inputs | {determinism.RUNS} more runs |",
        f"| busy GPU | {determinism.RUNS} runs while",
    ],
    "lab-notes.md": lab_notes(),
    "performance.md": [
        f"`evict_last` and then writes {l2_flush.FLUSH_BYTES >> 20} MB",
        f"driver {MEASURED_BY['driver']}, NVRTC {LAYERNORM['tuned'][0]['kernel']['nvrtc']},"
        f" PyTorch {MEASURED_BY['torch'].rpartition('.')[0]}",
        f"{len(read('h200')['rows'])} shapes in which all implementations",
        f"Plain reads of {flushes.READ_BYTES >> 20} MB inside",
        f"so they ran at {TUNED_PEERS}, in",
        f"then {len(TRAINING[0]['ms']['pytorch'])} timed ones in each of {WORD[len(TRAINING)]}",
        f"median of {WORD[len(next(iter(PASSES.values())))]} passes",
        f"by a factor of up to {DRIFT:.1f}",
        f"ended by hand after {FIRST_SEARCH_SECONDS} s",
        f"within {PLAN_SECONDS:.0f} seconds",
        f"forward and backward of {WORD[BLOCKS]} transformer blocks",
        f"on {TOKENS:,} tokens",
        f"its {percent(CONFIDENCE)} confidence interval",
        f"tuned for it with {read('untuned_h200')['trials']} trials",
        f"{MISSED} goals are missed",
    ],
    "layernorm.md": [
        f"tuned at {len(LAYERNORM_TRIALS)} shapes",
        f"with {min(LAYERNORM_TRIALS)} to {max(LAYERNORM_TRIALS)} trials for a shape",
    ],
    "faq.md": [
        f"{len(UNTUNED_WIDTHS)} random shapes",
        f"{len(FIRST_SEARCH['rows'])} shapes had a winner after [{FIRST_SEARCH_SECONDS} s",
    ],
    "runtime.md": [f"or per capturing stream from {workspace.SHARED_FROM >> 10} KiB"],
}
"""Numbers in sentences, by page: of the code, and of the committed results."""
