"""Numbers in sentences of the pages are those of the code, or of the committed results.

Tables of what was measured are generated (test_doc_numbers.py).
"""

from __future__ import annotations

import inspect
import json
import re
from math import exp

import pytest
import yaml

from benchmarks.method_pages import percent
from benchmarks.page_text import read
from benchmarks.pages import BLOCK, pages
from benchmarks.prediction import fit, score
from benchmarks.search_replay import recording, replay
from generator.evaluate.gpu import evaluator, forward, noise, session, supervisor
from generator.evaluate.predict import correction, prior
from generator.evaluate.predict.model import MODEL
from generator.evaluate.verify import determinism
from generator.kernels import compile_pool
from generator.package import fallback_kernels
from generator.paths import GENERATED
from generator.search import budget, choose_winner, finals, proposals, search
from generator.space import forward_space
from generator.studies import postgres, work_queue
from generator.tuner import device_pool, lifecycle, plan, task_runner

WORD = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
COMPILE_SECONDS = inspect.signature(compile_pool.CompilePool.result).parameters["timeout"].default
COMMON = len(yaml.safe_load(fallback_kernels.LAYOUTS_FILE.read_text())["layouts"]["wide"])
VECTOR = fallback_kernels.COMMON_VECTOR_BYTES
DRIFT, SPREAD = (f"{percent(x)} + {noise.JITTER_US} µs" for x in (noise.DRIFT, noise.SPREAD))
WIDE, BUSY = (forward_space._most_vectors(threads) for threads in (512, 1024))
LAYERNORM = json.loads((GENERATED / "h200" / "layernorm_backward" / "table.json").read_text())
LAYERNORM_TRIALS = [entry["provenance"]["trials"] for entry in LAYERNORM["tuned"]]
UNTUNED = sum(len(read(name)["rows"]) for name in ("untuned_h200", "untuned_seed1_h200"))

STATED = {
    "search.md": [
        f"after {proposals.FIRST} trials, for {WORD[proposals.TPE_EVERY - 1]} of every"
        f" {WORD[proposals.TPE_EVERY]} proposals",
        f"the {WORD[len(proposals._STEP)]} best trials and {proposals._DRAWN} random configs",
        f"The last {percent(proposals.OVERHEAD_SHARE)} of the trials",
        f"Up to {finals.SHORTLIST} of the best trials",
        f"The best {WORD[plan.FINALISTS]} of the shortlist",
        f"at most {budget.Budget(1).sweep_limit} legal configs",
        f"within {percent(choose_winner.TIE)} of the fastest are tied",
        f"Below {choose_winner.HOST_US:.0f} µs the GPU",
        f"be {choose_winner.LAUNCH_US} µs slower than the fastest",
        f"{WORD[finals.ONE_LAUNCH_PLACES].capitalize()} places in the finals",
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
        f"{WORD[device_pool._LIVES].capitalize()} deaths in one shape",
        f"every {work_queue.LEASE_SECONDS / work_queue._BEATS:.0f} s",
        f"A lease without one for {work_queue.LEASE_SECONDS:.0f} s",
        f"its shapes are free after {work_queue.LEASE_SECONDS:.0f} s",
        f"end within {lifecycle.INTERRUPT_SECONDS} s",
        f"waits up to {postgres.PATIENCE_SECONDS:.0f} s",
        f"noticed within {postgres._LIBPQ['tcp_user_timeout'] // 1000} s",
    ],
    "looking.md": [
        f"proposes {replay.COMPILERS} trials ahead",
        f"Those within {percent(recording.NEAR - 1)} of the best are measured"
        f" {WORD[recording.REPEATS + 1]} times",
    ],
    "prediction.md": [
        f"those within {percent(score.NEAR - 1)} of the fastest",
        f"{fit.TREES} small trees",
        f"on each of {WORD[fit.DEPTH]} levels",
        f"every {percent(fit.NEAR)} that it is behind",
        f"by {percent(exp(correction.BOUND) - 1)} at most",
        f"within {percent(prior.TIE)} count as equal",
        f"the {WORD[prior.NEAREST]} nearest measured winners",
        f"starts from {WORD[search.WARM_STARTS]} of those winners",
        f"^(1/{MODEL.smoothness:.0f})",
        f"{percent(MODEL.smooth_max(1, 1) - 1)} more where they are equal",
        f"{WORD[MODEL.loads_in_flight]} at a time in each thread",
        f"(B + {MODEL.dirty_fraction} · min(B, L2)) / ({MODEL.memory_efficiency} · bandwidth)",
    ],
    "faults.md": [
        f"after {WORD[compile_pool.LIVES]} processes of its own",
        f"more than {COMPILE_SECONDS} s",
        f"no answer within {supervisor.JOB_SECONDS:.0f} s",
        f"{session.SLOW} times the time of the best",
        f"after {WORD[len(supervisor.RETRY_PAUSES) + 1]} times in a row",
        f"at least {WORD[len(supervisor.RETRY_PAUSES)]} times",
        f"{WORD[supervisor.STARVED]} candidates in a row",
        f"more than {DRIFT} above its best",
        f"more than {SPREAD} apart",
        f"up to {WORD[len(noise.SEARCH_PAUSES)]} times, within {sum(noise.SEARCH_PAUSES):.1f} s",
        f"need {WORD[evaluator.FINAL_BLOCKS]} clean blocks",
    ],
    "forward.md": [
        f"up to {WIDE} vectors a thread ({BUSY} in CTAs of 1024)",
        f"The {WORD[forward.FINALISTS]} fastest must repeat their bits in {determinism.RUNS} runs",
        f"within {percent(choose_winner.TIE)} of the best",
        f"rows of whole {VECTOR}-byte vectors",
    ],
    "emulator.md": [],
    "glossary.md": [
        f"within {percent(choose_winner.TIE)} of the fastest",
        f"beaten by more than {percent(choose_winner.TIE)}",
        "Below 1 the winner",
    ],
}

MEASURED = {
    "layernorm.md": [
        f"tuned at {len(LAYERNORM_TRIALS)} shapes",
        f"with {min(LAYERNORM_TRIALS)} to {max(LAYERNORM_TRIALS)} trials for a shape",
    ],
    "faq.md": [f"{UNTUNED} random shapes", f"{len(read('h100_first_search')['rows'])} shapes had"],
}
"""Numbers in sentences of other pages, of the committed results."""

NO_NUMBER_OF_OURS = re.compile(
    r"exits? (?:with|code) \d+|from version 12|offsets of 64 bits|2√CTAs|a 0 that|^\d\. ", re.M
)
"""Exit codes, other people's software, kinds of numbers, list items."""


def page_text(name: str) -> str:
    """A page without code and generated blocks, but for the marks of code in its lines."""
    text = BLOCK.sub("", next(page for page in pages() if page.name == name).read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"https?://\S+|\]\([^)]*\)|^    .*$", "", text, flags=re.M)
    return NO_NUMBER_OF_OURS.sub("", text)


@pytest.mark.parametrize("name", [name for name, said in (STATED | MEASURED).items() if said])
def test_stated_numbers_are_those_of_the_code_and_the_results(name: str) -> None:
    text = " ".join(page_text(name).split())
    assert [phrase for phrase in (STATED | MEASURED)[name] if phrase not in text] == []


@pytest.mark.parametrize("name", STATED)
def test_no_other_number_is_stated(name: str) -> None:
    text = " ".join(page_text(name).split())
    for phrase in STATED[name]:
        text = text.replace(phrase, "")
    text = re.sub(r"`[^`]*`", "", text)
    assert re.findall(r".{0,30}(?<![\w.])\d[\d.,]*.{0,20}", text) == []
