"""The models of which `benchmarks.training.layers` runs a layer."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "olmo2": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama4": {
        "hidden_size": 5120,
        "intermediate_size_mlp": 16384,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_next": {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
"""The sizes of the models of TITLES."""
KINDS: dict[str, dict[str, Any]] = {
    "llama4": {"moe_layers": []},
    "qwen3_next": {"layer_types": ["linear_attention"], "mlp_only_layers": [0]},
}
"""The kind of layer that is meant, where a model has several."""
NAMES = {"gemma3": ("Gemma3Text", "Gemma3"), "llama4": ("Llama4Text", "Llama4Text")}
"""The beginning of the names of a model's config and of its layer, where they are not the model's
own."""
TITLES = {
    "llama": "Llama 3 8B",
    "qwen3": "Qwen 3 1.7B",
    "gemma3": "Gemma 3 4B",
    "olmo2": "OLMo 2 7B",
    "llama4": "Llama 4 Scout, dense layer",
    "qwen3_next": "Qwen3-Next 80B, gated delta layer",
}
