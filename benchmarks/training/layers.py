"""Print the kernels of one layer of a model of transformers, but for matrix products and attention:
what norms, rotary embedding, additions and activations cost together. A gated delta layer runs
without its recurrence.

    python -m benchmarks.training.layers --models qwen3,olmo2 --ways inductor,backend,fused

Forward and backward of a layer run in turns under every way. Compiled: plain Inductor (`inductor`),
the norms by `inductor_backend()` (`backend`), by `patch` under Inductor (`patched`), norms with
their neighbours by `patch(fuse=True)` under Inductor (`fused`), and this and the backend (`both`);
`autotuned` and `both_autotuned` are Inductor and `both` with max-autotune, which takes minutes. Not
compiled: the model as it is (`eager`), `eager_patched` and `eager_fused`. For each the command
prints milliseconds of all kernels of a step and of those beside products and attention, then the
latter by name, and the milliseconds of a step on the GPU's clock. --fp8 lets linear layers multiply
in FP8, in blocks of 128 columns. --ranks splits the products of a layer over as many GPUs, by
tensor parallelism; --sequence then splits the tokens beside them. Communication does not count as
"beside products". --native launches plain calls from C++. --out keeps all of it in a file. Needs
transformers and a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch

from benchmarks.command import OPTIONS
from benchmarks.gpu import open_session, target_of
from benchmarks.results import machine, module_facts, write_json
from benchmarks.training.fp8_linear import multiply_in_fp8
from benchmarks.training.layer_models import KINDS, MODELS, NAMES
from benchmarks.training.step_kernels import Kernels, Step, kernels_of, milliseconds_of, summary
from benchmarks.training.steps import TOKENS
from benchmarks.training.tensor_parallel import SPLIT, on_ranks, split
from generator.evaluate.gpu.order import balanced_orders
from generator.paths import GENERATED
from normforge.table import TABLE


@dataclass(frozen=True)
class Way:
    """A way to run a layer, with its title in tables. patched: its norms are served; fuse: with
    their neighbours; backend: of torch.compile, "normforge" for `inductor_backend()` and None for
    eager code; mode: of torch.compile."""

    title: str
    patched: bool = False
    fuse: bool = False
    backend: str | None = None
    mode: str | None = None


AUTOTUNED = "max-autotune-no-cudagraphs"
WAYS = {
    "eager": Way("eager"),
    "eager_patched": Way("eager, `patch`", patched=True),
    "eager_fused": Way("eager, `patch(fuse=True)`", patched=True, fuse=True),
    "inductor": Way("Inductor", backend="inductor"),
    "backend": Way("`inductor_backend()`", backend="normforge"),
    "patched": Way("`patch`, Inductor", patched=True, backend="inductor"),
    "fused": Way("`patch(fuse=True)`, Inductor", patched=True, fuse=True, backend="inductor"),
    "both": Way(
        "`patch(fuse=True)`, `inductor_backend()`", patched=True, fuse=True, backend="normforge"
    ),
    "autotuned": Way("Inductor, max-autotune", backend="inductor", mode=AUTOTUNED),
    "both_autotuned": Way(
        "`patch(fuse=True)`, `inductor_backend()`, max-autotune",
        patched=True,
        fuse=True,
        backend="normforge",
        mode=AUTOTUNED,
    ),
}


_RECURRENCES = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")


def _without_recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stand in for the recurrence of a gated delta layer: a product of matrices, which nothing is
    fused with either."""
    return value @ torch.eye(value.shape[-1], dtype=value.dtype, device=value.device), None


class Layer(torch.nn.Module):
    """A layer with cos and sin of its rotary embedding."""

    def __init__(self, model: str, length: int, sizes: dict[str, int], device: str) -> None:
        super().__init__()
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        name = "".join(word.capitalize() for word in model.split("_"))
        name, decoder = NAMES.get(model, (name, name))
        config = getattr(module, f"{name}Config")(
            **sizes, **KINDS.get(model, {}), num_hidden_layers=1, vocab_size=32, pad_token_id=0
        )
        for recurrence in _RECURRENCES:
            if hasattr(module, recurrence):
                setattr(module, recurrence, _without_recurrence)
        config._attn_implementation = "sdpa"
        with torch.device(device):
            self.layer = getattr(module, f"{decoder}DecoderLayer")(config, 0).to(torch.bfloat16)
            angles = torch.arange(length)[:, None] * torch.linspace(
                0.01, 1, self._head(config) // 2
            )
        turns = torch.cat((angles, angles), -1)[None].to(torch.bfloat16)
        self.turns: Any = (turns.cos(), turns.sin())
        if model == "llama4":  # which rotates by complex numbers
            self.turns = torch.polar(torch.ones_like(angles), angles)[None]

    @staticmethod
    def _head(config: Any) -> int:
        found = getattr(config, "head_dim", None)
        return int(found or config.hidden_size // config.num_attention_heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x, position_embeddings=self.turns, attention_mask=None)
        result: torch.Tensor = y[0] if isinstance(y, tuple) else y
        return result


def step_of(
    layer: Layer,
    way: str,
    x: torch.Tensor,
    dy: torch.Tensor,
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> Step:
    """Return forward and backward of a layer under a way. prepare: changes the decoder layer before
    it is compiled."""
    import normforge

    layer, how = deepcopy(layer), WAYS[way]
    if how.patched:
        normforge.patch(layer, fuse=how.fuse)
    if prepare is not None:
        prepare(layer.layer)
    run: Any = layer
    if how.backend is not None:
        ours = how.backend == "normforge"
        backend: Any = normforge.inductor_backend() if ours else how.backend
        run = torch.compile(layer, backend=backend, mode=how.mode, fullgraph=True)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        run(x).backward(dy)

    return step


def report(model: str, way: str, steps: Iterable[Kernels]) -> str:
    """Return what is printed of a way."""
    whole, others, by_name = summary(steps)
    lines = [f"{model}, {way}: {whole:.3f} ms, of them {others:.3f} beside products and attention"]
    lines += [f"  {ms:8.4f} ms  {count:2} x  {name[:100]}" for name, ms, count in by_name]
    return "\n".join(lines)


@dataclass(frozen=True)
class Case:
    """A layer that is measured, and how: see the options of the command."""

    model: str
    ways: list[str]
    length: int
    rounds: int
    fp8: bool = False
    ranks: int = 1
    sequence: bool = False
    native: bool = False


Found = dict[str, tuple[list[Kernels], list[float]]]
"""The kernels of some steps under every way, and the milliseconds of others."""


def measure(case: Case, mesh: Any = None) -> Found:
    """Measure steps of a case, `rounds` or a few more of each kind under each way, which take turns
    in a balanced order. mesh: the ranks, of which this process is one."""
    if case.native:
        import normforge

        normforge.use_native()
    torch.manual_seed(0)
    layer = Layer(case.model, case.length, MODELS[case.model], "cuda")
    if case.fp8:
        multiply_in_fp8(layer)
    length = case.length // (case.ranks if case.sequence else 1)
    shape = (TOKENS // case.length, length, MODELS[case.model]["hidden_size"])
    x, dy = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()
    prepare = None if mesh is None else partial(split, mesh=mesh, sequence=case.sequence)
    steps = {}
    for way in case.ways:
        torch._dynamo.reset()
        steps[way] = step_of(layer, way, x, dy, prepare)
        for _ in range(3):
            steps[way]()
    orders = balanced_orders(len(case.ways), case.rounds, seed=0)
    turns = [case.ways[index] for order in orders for index in order]
    found: Found = {way: ([], []) for way in case.ways}
    for way in turns:
        found[way][0].append(kernels_of(steps[way]))
    for way in turns:
        found[way][1].append(milliseconds_of(steps[way]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="qwen3,olmo2", help=f"of {','.join(MODELS)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=12, help="least steps of each way")
    parser.add_argument("--fp8", action="store_true", help="multiply in FP8")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that a layer is split over")
    parser.add_argument("--sequence", action="store_true", help="split the tokens, too")
    parser.add_argument("--native", action="store_true", help="use_native()")
    parser.add_argument("--out", **OPTIONS["out"])
    args = parser.parse_args(argv)
    models, ways = args.models.split(","), args.ways.split(",")
    if not {*models} <= {*MODELS} or not {*ways} <= {*WAYS}:
        parser.error("unknown model or way")
    if args.ranks > 1 and not {*models} <= {*SPLIT}:
        parser.error(f"--ranks splits {', '.join(SPLIT)} alone")
    if torch.cuda.device_count() < args.ranks:
        parser.error(f"this needs {args.ranks} GPUs" if args.ranks > 1 else "this needs a GPU")
    layers: dict[str, dict[str, Any]] = {}
    how = {name: getattr(args, name) for name in ("fp8", "ranks", "sequence", "native")}
    facts = {**environment(args.length), **how} if args.out else {}
    document = {"environment": facts, "layers": layers} if args.out else None
    for model in models:
        layers[model] = {}
        case = Case(model, ways, args.length, args.rounds, **how)
        run = partial(measure, case)
        found = on_ranks(case.ranks, "cuda", run) if case.ranks > 1 else run()
        for way, (steps, times) in found.items():
            print(report(model, way, steps), flush=True)
            print(f"  a step: {median(times):.3f} ms", flush=True)
            whole, others, by_name = summary(steps)
            layers[model][way] = {"ms": whole, "others_ms": others, "step_ms": median(times)}
            layers[model][way]["kernels"] = by_name
        if document:
            write_json(args.out, document)
    return 0


def environment(length: int) -> dict[str, Any]:
    """Return the facts of a results file: the GPU, the versions, and the package of each
    operation."""
    session = open_session()
    gpu = target_of(session.facts).name
    tables = sorted((GENERATED / gpu).glob(f"*/{TABLE}"))
    modules = {path.parent.name: module_facts(path.parent)["digest"] for path in tables}
    return {**machine(session.facts), "tokens": TOKENS, "length": length, "modules": modules}


if __name__ == "__main__":
    sys.exit(main())
