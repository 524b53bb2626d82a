"""Measured numbers about training steps."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pages.text import paragraph, read, table
from benchmarks.training.summary import Measured, cases
from benchmarks.training.ways import BASELINE, WAYS


def training() -> str:
    """Steps with other norms than PyTorch's: how many more a second."""
    document = read("training_h100")
    tokens = document["environment"]["tokens"]
    names = [name for name in WAYS if name != BASELINE]
    lines = [
        (
            each.title,
            f"{each.baseline_ms:.1f} ms ({tokens / each.baseline_ms:,.0f})",
            *(str(each.gains[name]) if name in each.gains else "" for name in names),
        )
        for each in cases(document)
    ]
    titles = [WAYS[name].title for name in names]
    return table(["", "PyTorch (tokens per ms)", *titles], lines)


def training_norms() -> str:
    """Milliseconds of all norms in a step."""
    document = read("training_h100")
    eager = [each for each in cases(document) if each.norm_ms(BASELINE)]
    names = [name for name in WAYS if any(each.norm_ms(name) for each in eager)]
    lines = [
        (each.title, *(f"{ms:.2f}" if (ms := each.norm_ms(name)) else "" for name in names))
        for each in eager
    ]
    return table(["ms per step", *(WAYS[name].title for name in names)], lines)


def measured(case: str) -> Measured:
    """Return the measurements of a case."""
    return next(found for found in cases(read("training_h100")) if str(found.case) == case)


def gain(case: str, name: str = "rms_norm") -> str:
    """Say how much faster steps with a norm are than with PyTorch's, with the interval."""
    found = measured(case).gains[name]
    half = max(found.high - found.median, found.median - found.low)
    noise = ", within the noise" if found.low <= 1 <= found.high else ""
    return f"{100 * (found.median - 1):.1f} % (± {100 * half:.1f}{noise})"


def training_gain() -> str:
    """The gains that a reader of the README wants to know first."""
    llama = measured("llama3_8b,4096,eager")
    norms = llama.norm_ms(BASELINE)
    assert norms is not None
    return paragraph(
        "In training, the gain depends on the share of norms in a step. On an H100, forward and"
        " backward of two transformer blocks of Qwen 3 1.7B, which also normalises queries and"
        f" keys, run {gain('qwen3_2b,4096,eager')} faster than with PyTorch's norm in eager code,"
        f" where QuACK's norm gains {gain('qwen3_2b,4096,eager', 'quack')}. Compiled by blocks,"
        f" the gain is {gain('qwen3_2b,4096,blocks')}, and compiled as a whole"
        f" {gain('qwen3_2b,4096,whole')}. Part of the gain in eager code comes from avoiding a copy"
        " of q and k that PyTorch's norm needs. In Llama 3 8B, norms take"
        f" {100 * norms / llama.baseline_ms:.0f} % of a step: the gain is"
        f" {gain('llama3_8b,4096,eager')} in eager code, {gain('llama3_8b,4096,blocks')} by blocks"
        f" and {gain('llama3_8b,4096,whole')} as a whole. The intervals are over"
        f" {len(llama.processes)} processes."
    )


def training_bits() -> str:
    """Say if the bits of all gradients repeat in training."""
    cases = read("training_h100")["cases"]
    found = {case: processes[0]["repeats_bits"] for case, processes in cases.items()}
    ways = [(case, way) for case, told in found.items() for way in told]
    differ = [f"{way} in {case}" for case, way in ways if not found[case][way]]
    said = f", except {', '.join(differ)}" if differ else ""
    return paragraph(
        "With PyTorch's deterministic algorithms, all gradients had the same bits in three runs of"
        f" a step, in all {len(ways)} combinations of model, mode and norm{said}."
    )


TRAINING_BLOCKS: dict[str, Callable[[], str]] = {
    "training": training,
    "training_norms": training_norms,
    "training_gain": training_gain,
    "training_bits": training_bits,
}
