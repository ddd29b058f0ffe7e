"""Models by name. The numbers are those of their published configurations."""

from __future__ import annotations

from kvxferd.layout.presets.model_facts import (
    LayerKind,
    ModelFacts,
    SideCache,
    gdn_states,
    key_and_value,
    mamba1_states,
    mamba2_states,
    ring,
    row,
)
from kvxferd.layout.presets.sparse_models import MLA_LATENT, SPARSE_MODELS

_FULL, _SLIDING, _STATE, _NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.STATE, LayerKind.NONE

# Nemotron-H-8B's own string: M is Mamba2, * is attention, - is an MLP.
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_KINDS = {"M": _STATE, "*": _FULL, "-": _NONE}

_ALL = (
    # num_key_value_heads, num_hidden_layers and head_dim of each config.json, in bfloat16.
    ModelFacts("llama-3-8b", 8, (_FULL,) * 32, key_and_value(8, 128)),
    ModelFacts("llama-3-70b", 8, (_FULL,) * 80, key_and_value(8, 128)),
    ModelFacts("qwen3-8b", 8, (_FULL,) * 36, key_and_value(8, 128)),
    ModelFacts("deepseek-v3", 0, (_FULL,) * 61, ((MLA_LATENT,),)),
    # sliding_window_pattern 6: five layers with a window of 1,024 tokens, then one without.
    ModelFacts(
        "gemma-3-27b",
        16,
        tuple(_FULL if layer % 6 == 5 else _SLIDING for layer in range(62)),
        key_and_value(16, 128),
        sliding_window=1024,
    ),
    # layer_types alternate, beginning with sliding_attention of a 128-token window.
    ModelFacts(
        "gpt-oss-20b",
        8,
        (_SLIDING, _FULL) * 12,
        key_and_value(8, 64),
        sliding_window=128,
    ),
    ModelFacts(
        "gpt-oss-120b",
        8,
        (_SLIDING, _FULL) * 18,
        key_and_value(8, 64),
        sliding_window=128,
    ),
    # mamba_num_heads 128, mamba_head_dim 64, n_groups 8, ssm_state_size 128, conv_kernel 4: 3 rows.
    ModelFacts(
        "nemotron-h-8b",
        8,
        tuple(_NEMOTRON_KINDS[kind] for kind in _NEMOTRON_H_8B),
        key_and_value(8, 128),
        mamba2_states(num_heads=128, head_dim=64, num_groups=8, state_size=128),
    ),
    # full_attention_interval 4: three gated delta nets, then one attention. linear_num_key_heads 16,
    # linear_num_value_heads 32, heads of 128, linear_conv_kernel_dim 4: 3 rows. The recurrent state is
    # float32, as SGLang keeps it and vLLM is told to (vllm#34489); vLLM's own default is bfloat16.
    ModelFacts(
        "qwen3-next-80b",
        2,
        (_STATE, _STATE, _STATE, _FULL) * 12,
        key_and_value(2, 256),
        gdn_states(num_key_heads=16, key_dim=128, num_value_heads=32, value_dim=128),
    ),
    ModelFacts("falcon-mamba-7b", 0, (_STATE,) * 64, states=mamba1_states(8192, 16)),
)

# For tests and examples: every kind of cache in a few bytes.
_TINY = (
    ModelFacts("tiny-dense", 4, (_FULL,) * 4, key_and_value(4, 8)),
    ModelFacts("tiny-quantised", 4, (_FULL,) * 2, key_and_value(4, 4, "int8", 1, scale_bytes=4)),
    ModelFacts(
        "tiny-mla",
        0,
        (_FULL,) * 3,
        (
            (row("latent", 6, 1, "bfloat16", 2),),
            (row("indexer.k", 3, 1, "float8_e4m3fn"), row("indexer.scale", 4, 1, "float32", 4)),
        ),
    ),
    ModelFacts("tiny-sliding", 2, (_SLIDING, _SLIDING, _FULL) * 2, key_and_value(2, 2), sliding_window=6),
    ModelFacts(
        "tiny-mamba2",
        2,
        (_STATE, _NONE, _FULL, _STATE, _STATE, _NONE, _FULL),
        key_and_value(2, 2),
        mamba2_states(num_heads=6, head_dim=2, num_groups=2, state_size=2),
    ),
    ModelFacts("tiny-mamba1", 0, (_STATE,) * 3, states=mamba1_states(6, 2)),
    # Items of two tokens with a scale each, raw rows in blocks of their own, and a ring.
    ModelFacts(
        "tiny-sparse",
        2,
        (_SLIDING, _FULL, _FULL),
        key_and_value(2, 2),
        sliding_window=6,
        side_caches=(
            SideCache(
                "compressed",
                (1, 2),
                (row("latent", 6, 2, "bfloat16", 2), row("latent.scale", 2, 2, "bfloat16", 2)),
            ),
            SideCache(
                "compressor", (1,), (row("compressor", 8, 1, "float32", 4),), sliding_window=3, block_tokens=8
            ),
            SideCache("ring", (2,), states=(ring(4, 3),)),
        ),
    ),
    ModelFacts("tiny-gdn", 2, (_STATE, _FULL, _STATE), key_and_value(2, 2), gdn_states(2, 2, 4, 1)),
)

MODELS: dict[str, ModelFacts] = {model.name: model for model in (*_ALL, *SPARSE_MODELS, *_TINY)}

# The default member of each family.
MODEL_SYNONYMS: dict[str, str] = {
    "qwen3-next": "qwen3-next-80b",
    "gemma-3": "gemma-3-27b",
    "gpt-oss": "gpt-oss-120b",
    "nemotron-h": "nemotron-h-8b",
    "deepseek-v4": "deepseek-v4-flash",
    "deepseek-v4.1": "deepseek-v4.1-flash",
    "glm-5-next": "glm-5.3-flash",
    "qwen4": "qwen3.8-flash-next",
}


def find_model(name: str) -> ModelFacts:
    """Return a model by its name or its family's, in any case; raises ValueError listing the known names."""
    wanted = name.lower()
    found = MODELS.get(MODEL_SYNONYMS.get(wanted, wanted))
    if found is None:
        raise ValueError(f"cannot find a model called {name!r}: the names are {', '.join(sorted(MODELS))}")
    return found
