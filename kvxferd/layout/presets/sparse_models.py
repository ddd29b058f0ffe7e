"""Models whose attention chooses what it reads: by an index beside the cache, and over compressed caches.

The numbers are those of the published configurations that each comment names; what one item holds, which
layers share it, and names are vLLM 0.33's (vllm/models), so that vLLM's connector derives the same. An
index key's scale is a float32, as on all GPUs but SM100. Draft layers are left out. Rings hold the rows of
the group of tokens that is not complete yet, without speculative tokens.
"""

from __future__ import annotations

from kvxferd.layout.presets.model_facts import (
    LayerKind,
    ModelFacts,
    SideCache,
    StateComponent,
    TokenComponent,
    gdn_states,
    key_and_value,
    ring,
    row,
)

# Layouts are those of each backend's `supported_kv_cache_layouts`. The first is what vLLM chooses where the
# connector asks for what it usually does: LBHNC, or nothing for latents.
_DEEPSEEK_V4_LAYOUTS = ("BLHNC", "BLNHC")  # the indexer's pages lie beside the latents' in a block
_FULL, _SLIDING, _STATE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.STATE
# kv_lora_rank 512 of the compressed latent and qk_rope_head_dim 64 of the rotary key, in bfloat16.
MLA_LATENT = row("latent", (512 + 64) * 2, 1, "bfloat16", 2)


def _index_keys(granule_tokens: int = 1, *, has_mx_scales: bool = False) -> tuple[TokenComponent, ...]:
    """Return index_head_dim 128 of fp8 and a scale for each row; a block has all keys, then all scales.

    A scale is a float32, or on SM100 four powers of two.
    """
    scale = ("uint8", 1, "ue8m0") if has_mx_scales else ("float32", 4, "")
    keys = row("indexer.k", 128, granule_tokens, "float8_e4m3fn")
    return keys, row("indexer.scale", 4, granule_tokens, *scale)


def _deepseek_v4_record(name: str, granule_tokens: int = 1) -> tuple[TokenComponent, ...]:
    """Return fp8_ds_mla: rows of 448 bytes of fp8 and 64 bfloat16, then 8 bytes of scales for each row."""
    return (
        row(name, 448 + 128, granule_tokens, encoding="fp8_ds_mla"),
        row(f"{name}.scale", 8, granule_tokens, encoding="fp8_ds_mla"),
    )


def _deepseek_v41_record(name: str, granule_tokens: int = 1) -> TokenComponent:
    """Return SM100's fp8_ds_mla: rows of 512 bytes of fp8 and 16 of scales."""
    return row(name, 512 + 16, granule_tokens, encoding="fp8_ds_mla")


def _deepseek_v32() -> ModelFacts:
    """Return DeepSeek-V3.2: DeepSeek-V3's latents, and an index key for each (as vLLM and SGLang keep them).

    No backend names a layout; pages of two sizes need each layer's part of a block in one piece.
    """
    layouts = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
    return ModelFacts("deepseek-v3.2", 0, (_FULL,) * 61, ((MLA_LATENT,), _index_keys()), layouts=layouts)


def _deepseek_v4_flash() -> ModelFacts:
    """Return DeepSeek-V4-Flash: num_hidden_layers 43, sliding_window 128, head_dim 512 (its config.json).

    compress_ratios are 0, 0, then 4 and 128 in turn. A token's row before it is compressed has as many
    scores as values. Rows of two groups of 4 tokens overlap, so those of twice 4 tokens are kept, and twice
    as wide; else those of 128.
    """
    by_4, by_128 = tuple(range(2, 43, 2)), tuple(range(3, 43, 2))
    raw_of_4 = (
        row("compressor", 2 * 2 * 512 * 4, 1, "float32", 4),
        row("compressor.indexer.compressor.state_cache", 2 * 2 * 128 * 4, 1, "float32", 4),
    )
    raw_of_128 = (row("compressor", 2 * 512 * 4, 1, "float32", 4),)
    return ModelFacts(
        "deepseek-v4-flash",
        0,
        (_SLIDING,) * 43,
        (_deepseek_v4_record("window"),),
        sliding_window=128,
        side_caches=(
            SideCache("full", by_4, (*_deepseek_v4_record("latent", 4), *_index_keys(4))),
            SideCache("full", by_128, _deepseek_v4_record("latent", 128)),
            SideCache("compressor.4", by_4, raw_of_4, sliding_window=8, block_tokens=4),
            SideCache("compressor.128", by_128, raw_of_128, sliding_window=128, block_tokens=8),
        ),
        layouts=_DEEPSEEK_V4_LAYOUTS,
    )


def _deepseek_v41_flash() -> ModelFacts:
    """Return DeepSeek-V4.1-Flash: num_hidden_layers 40, sliding_window 128 (its config.json).

    kv_source_layer_ids 2, 8 and 14 compress by 2, and 20 by 1; other layers read theirs. Records and scales
    are those of SM100; on other GPUs vLLM has DeepSeek-V4's.
    """
    sources = (2, 8, 14)
    by_2, by_1 = (
        (_deepseek_v41_record("latent", ratio), *_index_keys(ratio, has_mx_scales=True)) for ratio in (2, 1)
    )
    return ModelFacts(
        "deepseek-v4.1-flash",
        0,
        (_SLIDING,) * 40,
        ((_deepseek_v41_record("window"),),),
        sliding_window=128,
        side_caches=(
            SideCache("full", sources, by_2),
            SideCache("full", (20,), by_1),
            SideCache("compressor", sources, states=(ring(4096, 8, "float32", 4),)),
        ),
        layouts=_DEEPSEEK_V4_LAYOUTS,
    )


def _glm_5_next() -> ModelFacts:
    """Return GLM-5.3-Flash (glm5_next): num_hidden_layers 45, kv_lora_rank 512 without a rotary key.

    Three layers of Kimi's delta attention (linear_num_heads 64 of 128), then one of MLA with an index key
    for each index_kpool 16 tokens (transformers' Glm5NextTextConfig). The ring has a slot of raw keys and one
    of gates.
    """
    kinds = tuple(_FULL if layer % 4 == 3 else _STATE for layer in range(45))
    latent = row("latent", 512 * 2, 1, "bfloat16", 2)
    return ModelFacts(
        "glm-5.3-flash",
        0,
        kinds,
        ((latent,), _index_keys(16)),
        gdn_states(num_key_heads=64, key_dim=128, num_value_heads=64, value_dim=128),
        side_caches=(
            SideCache("indexer.tail", _layers_of(kinds, _FULL), states=(ring(128 * 2, 16, num_slots=2),)),
        ),
        layouts=("BLHNC",),  # KpoolTailBackend
    )


def _minimax_m3() -> ModelFacts:
    """Return MiniMax-M3: num_hidden_layers 60, num_key_value_heads 4, head_dim 128, sparse_index_dim 128.

    All layers but the first three have index keys (vLLM's MiniMaxM3TextConfig).
    """
    index_keys = (row("indexer.k", 128 * 2, 1, "bfloat16", 2),)
    return ModelFacts(
        "minimax-m3",
        4,
        (_FULL,) * 60,
        key_and_value(4, 128),
        side_caches=(SideCache("full", tuple(range(3, 60)), index_keys),),
        # No backend names any; pages of two sizes need each layer's part of a block in one piece.
        layouts=("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
    )


def _qwen4_preview() -> ModelFacts:
    """Return Qwen3.8-Flash-Next (qwen4_exp): num_hidden_layers 48, num_key_value_heads 2, head_dim 256.

    Three gated delta nets (16 key heads, 48 value heads of 128), then one attention with an index key of 128
    for each indexer_compress_ratio 4 tokens; its ring has three positions of 8 bytes beside each raw key.
    ple_layer_ids 2, counted from one, keeps a convolution of hc_count 4 times hidden_size 2,560 columns,
    dilated by ngram_size 3 (its config.json, and transformers' Qwen4ExpTextConfig). In vLLM that one is
    x of a short convolution.
    """
    kinds = (_STATE, _STATE, _STATE, _FULL) * 12
    full = _layers_of(kinds, _FULL)
    convolution = StateComponent("conv.x", 4 * 2560, 2, 3 * 3, is_convolution=True, is_replicated=True)
    return ModelFacts(
        "qwen3.8-flash-next",
        2,
        kinds,
        key_and_value(2, 256),
        gdn_states(num_key_heads=16, key_dim=128, num_value_heads=48, value_dim=128),
        side_caches=(
            SideCache("full", full, (row("indexer.k", 128 * 2, 4, "bfloat16", 2),)),
            SideCache("indexer.ring", full, states=(ring(128 * 2 + 3 * 8, 4),)),
            SideCache("ple", (1,), states=(convolution,)),
        ),
        layouts=("BLNHC", "BLHNC"),  # QSAStateBackend
    )


def _layers_of(kinds: tuple[LayerKind, ...], wanted: LayerKind) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind is wanted)


SPARSE_MODELS = (
    _deepseek_v32(),
    _deepseek_v4_flash(),
    _deepseek_v41_flash(),
    _glm_5_next(),
    _minimax_m3(),
    _qwen4_preview(),
)
