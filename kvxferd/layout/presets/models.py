"""Models by name, as their published configurations have them."""

from __future__ import annotations

from kvxferd.layout.presets.facts import (
    LayerKind,
    ModelFacts,
    TokenComponent,
    gdn_states,
    key_and_value,
    mamba1_states,
    mamba2_states,
)

_FULL, _SLIDING, _STATE, _NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.STATE, LayerKind.NONE

# Nemotron-H-8B's own string: M is Mamba2, * is attention, - is an MLP.
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_KINDS = {"M": _STATE, "*": _FULL, "-": _NONE}

# 512 of the compressed latent and 64 of the rotary key, in bfloat16: the same on every rank.
_MLA_LATENT = TokenComponent("latent", 1, (512 + 64) * 2, is_replicated=True)
# DeepSeek-V3.2's sparse attention: 128 bytes of fp8 key and one float32 scale per token.
_INDEXER_KEY = TokenComponent("indexer.k", 1, 128, "float8_e4m3fn", 1, is_replicated=True)
_INDEXER_SCALE = TokenComponent("indexer.scale", 1, 4, "float32", 4, is_replicated=True)

_ALL = (
    ModelFacts("llama-3-8b", 8, (_FULL,) * 32, key_and_value(8, 128)),
    ModelFacts("llama-3-70b", 8, (_FULL,) * 80, key_and_value(8, 128)),
    ModelFacts("qwen3-8b", 8, (_FULL,) * 36, key_and_value(8, 128)),
    ModelFacts("deepseek-v3", 0, (_FULL,) * 61, ((_MLA_LATENT,),)),
    ModelFacts("deepseek-v3.2", 0, (_FULL,) * 61, ((_MLA_LATENT,), (_INDEXER_KEY,), (_INDEXER_SCALE,))),
    # Five layers of 1,024 tokens, then one of all.
    ModelFacts(
        "gemma-3-27b",
        16,
        tuple(_FULL if layer % 6 == 5 else _SLIDING for layer in range(62)),
        key_and_value(16, 128),
        sliding_window=1024,
    ),
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
    ModelFacts(
        "nemotron-h-8b",
        8,
        tuple(_NEMOTRON_KINDS[kind] for kind in _NEMOTRON_H_8B),
        key_and_value(8, 128),
        mamba2_states(num_heads=128, head_dim=64, num_groups=8, state_size=128),
    ),
    # Three gated delta nets, then one attention.
    ModelFacts(
        "qwen3-next-80b",
        2,
        (_STATE, _STATE, _STATE, _FULL) * 12,
        key_and_value(2, 256),
        gdn_states(num_key_heads=16, key_dim=128, num_value_heads=32, value_dim=128),
    ),
    ModelFacts("falcon-mamba-7b", 0, (_STATE,) * 64, states=mamba1_states(8192, 16)),
)

MODELS: dict[str, ModelFacts] = {model.name: model for model in _ALL}
