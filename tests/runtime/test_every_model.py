"""Every causal language model of transformers that can be made small: patched, and compiled with
all that passes over graphs fold, it computes what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import normforge
from normforge.frontends.graph_pass import Decompositions, route_before_autograd, route_graph
from normforge.frontends.norm_add import NormAndAdd
from normforge.frontends.row_functions import RowFunctions
from normforge.frontends.sum_backward import SumBackward
from normforge.packages import chosen
from tests.support.entry_points import equal_bits, needs_whole_forward

transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
auto: Any = pytest.importorskip("transformers.models.auto.modeling_auto")

KINDS = sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
COMPILED = ("gemma3_text", "gemma4_unified_text", "glm4", "llama", "olmo2", "qwen3")
ALWAYS = (
    *(*COMPILED, "deepseek_v3", "ernie4_5", "exaone4", "gemma2", "gpt_oss", "granitemoe"),
    *("mistral", "mixtral", "olmoe", "phi3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
)
"""Kinds that are tried in every run, and cannot be skipped."""
MOST_PARAMETERS = 30e6
SIZES = {
    "vocab_size": 128,
    "head_dim": 16,
    "rotary_dim": 16,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "max_position_embeddings"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("sliding_window", "v_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **{"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Sizes of attention with latent keys, whose heads are those of the part that is rotated."""


def kinds(always: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize over all kinds, of which those that are not always tried are slow."""
    slow = pytest.mark.slow
    given = [pytest.param(kind, marks=() if kind in always else slow) for kind in KINDS]
    return pytest.mark.parametrize("kind", given)


def shrunk(kind: str) -> Any:
    config = transformers.AutoConfig.for_model(kind)
    sizes = {**SIZES, **(LATENT if hasattr(config, "qk_rope_head_dim") else {})}
    for name, size in sizes.items():
        try:
            if hasattr(config, name) and not isinstance(getattr(config, name), dict | list):
                setattr(config, name, size)
        except Exception:  # a property, or one of each layer
            continue
    layers = getattr(config, "layer_types", None)
    if isinstance(layers, list):
        with suppress(AttributeError):  # a property
            config.layer_types = [*dict.fromkeys(layers), *layers][:2]  # one of each kind
    return config


def made(kind: str) -> Any:
    """Return a small model with random weights. Skips where there is none."""
    try:
        config = shrunk(kind)
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config)
        parameters = sum(one.numel() for one in shape.parameters())
        if parameters > MOST_PARAMETERS:
            pytest.skip(f"{kind} has {parameters:.0e} parameters with sizes of SIZES")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.float().eval()
        for one in model.parameters():
            if one.dim() == 1:
                one.data += torch.randn_like(one) / 5
        results(model, model)
    except Exception as error:
        if kind in ALWAYS:
            raise
        pytest.skip(f"{kind} cannot be made small: {str(error).splitlines()[0][:80]}")
    return model


def results(model: Any, run: Any) -> dict[str, torch.Tensor]:
    """Return the logits of a model, and its gradients by name. run: the model, or compiled."""
    model.zero_grad()
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    logits = run(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"logits": logits.detach(), **{name: grad.clone() for name, grad in grads.items()}}


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        scale = one.abs().max().item()
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=2e-3 * scale + 1e-6, msg=name)


@kinds(ALWAYS)
def test_patched_models_compute_the_same(kind: str) -> None:
    model = made(kind)
    wanted = results(model, model)
    names = normforge.patch(model, fuse=True)
    assert names or kind not in ALWAYS
    check(results(model, model), wanted)
    assert {*normforge.unpatch(model)} == {*names}
    again = results(model, model)
    assert equal_bits([*again.values()], [*wanted.values()])


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """There are kernels for all that may be folded. Counts the operators of graphs."""
    for kind, name in (
        (RowFunctions, "have_kernels"),
        (NormAndAdd, "serves"),
        (SumBackward, "serves"),
    ):
        monkeypatch.setattr(kind, name, lambda *_, **__: True)
    return Counter()


@needs_whole_forward
@kinds(COMPILED)
def test_compiled_models_compute_the_same(kind: str, folded: Counter[str]) -> None:
    model, operators = made(kind), chosen("rmsnorm_backward").ops
    wanted = results(model, model)

    def compiled(module: Any, _: Any) -> Any:
        route_graph(module.graph, operators, behind_autograd=True)
        module.recompile()
        folded.update(n.target.__name__ for n in module.graph.nodes if "normforge" in str(n.target))
        return make_boxed_func(module.forward)

    def backend(module: Any, inputs: Any) -> Any:
        table = Decompositions(operators)
        route_before_autograd(module, operators)
        return aot_autograd(fw_compiler=compiled, decompositions=table)(module, inputs)

    torch._dynamo.reset()
    check(results(model, torch.compile(model, backend=backend)), wanted)
    patched = normforge.patch(model)
    assert bool(folded) == bool(patched), patched
