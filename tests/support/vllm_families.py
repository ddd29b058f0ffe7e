"""Families of models by their caches in vLLM 0.33, and random ones, for `vllm_pages`."""

from __future__ import annotations

import dataclasses
import random

from kvxferd.integrations.vllm.layout.facts import AttentionFacts, CacheGroup, CacheKind
from tests.support.vllm_pages import FLASH, Cache, Family, How

FULL, RING, WINDOW = 0, 1, 2  # indexes of groups


def latent(size: int, per_state: int = 1, dtype: str = "uint8", encoding: str = "") -> AttentionFacts:
    itemsize = {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
    return AttentionFacts(1, size, 0, dtype, itemsize, encoding, per_state)


def caches_of(layer: str, **caches: tuple[int, str, AttentionFacts, tuple[int, ...]]) -> tuple[Cache, ...]:
    """Return caches of one layer by the rest of their names, in which two underscores are a dot."""
    return tuple(
        Cache(f"{layer}.{name.replace('__', '.')}".removesuffix(".main"), group, backend, facts, parts)
        for name, (group, backend, facts, parts) in caches.items()
    )


V4 = latent(584, 4, encoding="fp8_ds_mla")
V4_PARTS, INDEXER_PARTS = (576, 8), (128, 4)
FLASHMLA, SWA, INDEXER = (
    "DeepseekV4FlashMLABackend",
    "DeepseekSparseSWAFlashMLABackend",
    "DeepseekV4IndexerBackend",
)
V4_WINDOW, OPEN_4, OPEN_128 = 1, 2, 3
DEEPSEEK_V4 = Family(
    "deepseek-v4",
    caches_of(
        "model.layers.0.attn",
        main=(FULL, FLASHMLA, V4, V4_PARTS),
        indexer__k_cache=(FULL, INDEXER, latent(132, 4), INDEXER_PARTS),
        swa_cache=(V4_WINDOW, SWA, dataclasses.replace(V4, tokens_per_state=1), V4_PARTS),
        compressor__state_cache=(OPEN_4, "CompressorBackend", latent(16, 1, "float32"), ()),
        indexer__compressor__state_cache=(OPEN_4, "CompressorBackend", latent(8, 1, "float32"), ()),
    )
    + caches_of(
        "model.layers.1.attn",
        main=(FULL, FLASHMLA, dataclasses.replace(V4, tokens_per_state=128), V4_PARTS),
        swa_cache=(V4_WINDOW, SWA, dataclasses.replace(V4, tokens_per_state=1), V4_PARTS),
        compressor__state_cache=(OPEN_128, "CompressorBackend", latent(32, 1, "float32"), ()),
    ),
    (
        CacheGroup(FULL, CacheKind.FULL, 256),
        CacheGroup(V4_WINDOW, CacheKind.SLIDING, 64, kept_tokens=127),
        CacheGroup(OPEN_4, CacheKind.SLIDING, 4, kept_tokens=7),
        CacheGroup(OPEN_128, CacheKind.SLIDING, 8, kept_tokens=127),
    ),
)
V41_ROW = latent(528, 1, encoding="fp8_ds_mla")
DEEPSEEK_V41 = Family(
    "deepseek-v41",
    caches_of(
        "model.layers.0.attn",
        main=(FULL, "FlashMLAMegaAttnBackend", latent(288, 2, encoding="nvfp4_ds_mla"), ()),
        indexer__k_cache=(FULL, "DeepseekV41IndexerBackend", latent(68, 2), (64, 4)),
        swa_cache=(WINDOW, SWA, V41_ROW, ()),
        compressor__state_cache=(RING, "CompressorBackend", latent(16, 1, "float32"), ()),
    )
    + caches_of("model.layers.1.attn", swa_cache=(WINDOW, SWA, V41_ROW, ())),
    (
        CacheGroup(FULL, CacheKind.FULL, 128),
        CacheGroup(RING, CacheKind.STATE, 8),
        CacheGroup(WINDOW, CacheKind.SLIDING, 32, kept_tokens=127, is_never_cached=True),
    ),
)
GLM = Family(
    "glm",
    caches_of(
        "model.layers.0.self_attn",
        main=(FULL, "FlashMLASparseBackend", latent(656, encoding="fp8_ds_mla"), ()),
        indexer__k_cache=(FULL, "Glm5NextIndexerBackend", latent(132, 4), INDEXER_PARTS),
        indexer__tail=(RING, "KpoolTailBackend", AttentionFacts(2, 128, 0, "bfloat16", 2), ()),
    ),
    (CacheGroup(FULL, CacheKind.FULL, 128), CacheGroup(RING, CacheKind.STATE, 8)),
)
KEY_AND_VALUE = AttentionFacts(4, 16, 16, "bfloat16", 2)
QSA = "Qwen4ExpQSAFlashAttentionBackend"
STEP = Family(
    "step",
    (
        Cache("model.layers.0.attn", FULL, "Step5DSAAttentionBackend", KEY_AND_VALUE, is_divided=True),
        Cache("model.layers.0.attn.summary", FULL, "Step5SparseSummaryBackend", latent(256, 8)),
        Cache("model.layers.0.attn.tail", RING, "Step5CSATailRingBackend", latent(512, 1, "bfloat16")),
    ),
    (CacheGroup(FULL, CacheKind.FULL, 64), CacheGroup(RING, CacheKind.STATE, 16)),
    num_heads=4,
)
QWEN = Family(
    "qwen",
    (
        Cache("model.layers.0.attn", FULL, QSA, KEY_AND_VALUE, is_divided=True),
        Cache("model.layers.0.attn.compressed", FULL, "QSAStateBackend", latent(128, 8, "bfloat16")),
        Cache("model.layers.0.attn.raw", RING, "QSAStateBackend", latent(140, 1, "bfloat16")),
    ),
    (CacheGroup(FULL, CacheKind.FULL, 64), CacheGroup(RING, CacheKind.STATE, 16)),
    num_heads=4,
)
MINIMAX = Family(
    "minimax",
    (
        Cache("model.layers.0.attn", FULL, "MiniMaxM3SparseMSABackend", KEY_AND_VALUE, is_divided=True),
        Cache("model.layers.0.attn.indexer", FULL, "MiniMaxM3IndexerMSABackend", latent(128, 1, "bfloat16")),
    ),
    (CacheGroup(FULL, CacheKind.FULL, 128),),
    num_heads=4,
)
TOKEN_SCALES = Family(
    "token-scales",
    tuple(
        Cache(
            f"model.layers.{layer}.attn",
            FULL,
            "TritonAttentionBackend",
            AttentionFacts(4, 16, 16, dtype, 1, mode, packed_bytes=size),
            is_divided=True,
        )
        for layer, (dtype, mode, size) in enumerate(
            [("int8", "int8_per_token_head", 40), ("uint8", "int4_per_token_head", 24)]
        )
    ),
    (CacheGroup(FULL, CacheKind.FULL, 32),),
    num_heads=4,
)
UNKNOWN = Family(
    "unknown",
    (
        Cache("model.layers.0.attn", FULL, "UnheardOfBackend", KEY_AND_VALUE, is_divided=True),
        Cache("model.layers.0.attn.side", FULL, "UnheardOfBackend", latent(24, 8)),
        Cache("model.layers.0.attn.ring", RING, "UnheardOfBackend", latent(20)),
        Cache("model.layers.1.attn", WINDOW, "UnheardOfBackend", latent(12, 2)),
    ),
    (
        CacheGroup(FULL, CacheKind.FULL, 32),
        CacheGroup(RING, CacheKind.STATE, 8),
        CacheGroup(WINDOW, CacheKind.SLIDING, 16, kept_tokens=31),
    ),
    num_heads=4,
)
# Heads that one pipeline stage, one order of axes or one CPU's packing may hold otherwise than another.
DENSE = Family(
    "dense",
    tuple(
        Cache(f"model.layers.{layer}.self_attn.attn", FULL, FLASH, KEY_AND_VALUE, is_divided=True)
        for layer in range(3)
    ),
    (CacheGroup(FULL, CacheKind.FULL, 32),),
    num_heads=4,
    num_layers=3,
)
FAMILIES = (DEEPSEEK_V4, DEEPSEEK_V41, GLM, STEP, QWEN, MINIMAX, TOKEN_SCALES, UNKNOWN)


RANDOM_BLOCKS = 98  # ids of an engine; one less is a prime


def random_pair(seed: int) -> tuple[Family, How, How, int]:
    """Return a model of several caches in a page, two deployments of it, and a number of tokens."""
    chosen = random.Random(seed)
    tokens = chosen.choice((16, 32, 48))
    full = (
        Cache("", FULL, FLASH, KEY_AND_VALUE, is_divided=True),
        Cache(
            "", FULL, FLASHMLA, dataclasses.replace(V4, tokens_per_state=chosen.choice((1, 4, 16))), V4_PARTS
        ),
        Cache("", FULL, INDEXER, latent(132, chosen.choice((1, 2, 8))), INDEXER_PARTS),
        Cache(
            "", FULL, "FlashMLABackend", latent(4 * chosen.randint(1, 40), chosen.choice((1, 2, 4, 8, 16)))
        ),
        Cache("", FULL, "QSAStateBackend", latent(chosen.randint(1, 70), 2, "bfloat16")),
    )
    caches = chosen.sample(full, chosen.randint(1, 4))
    groups = [CacheGroup(FULL, CacheKind.FULL, tokens)]
    if chosen.random() < 0.6:
        groups.append(CacheGroup(len(groups), CacheKind.STATE, chosen.choice((4, 8, 16))))
        slots = chosen.choice((1, 2))
        raw = AttentionFacts(slots, chosen.randint(1, 30), 0, "float32", 4)
        caches.append(Cache("", len(groups) - 1, "KpoolTailBackend", raw))
    if chosen.random() < 0.6:
        kept = chosen.randint(1, 70)
        groups.append(CacheGroup(len(groups), CacheKind.SLIDING, chosen.choice((8, 16)), kept_tokens=kept))
        caches.append(
            Cache("", len(groups) - 1, "CompressorBackend", latent(8, chosen.choice((1, 2)), "float32"))
        )
    named = (
        dataclasses.replace(cache, name=f"model.layers.{number % 2}.attn.cache{chr(97 + number)}")
        for number, cache in enumerate(caches)
    )
    family = Family(f"random {seed}", tuple(named), tuple(groups), num_heads=4)

    def how() -> How:
        is_packed = chosen.random() < 0.7
        block_tokens = chosen.choice((16, 32, 48, 64, 96))
        splits = not is_packed and block_tokens % 32 == 0 and chosen.random() < 0.5
        return How(
            tp=chosen.choice((1, 2, 4)),
            block_tokens=block_tokens,
            kernel_blocks=2 if splits else 1,
            layout=f"{'BL' if is_packed else 'LB'}{chosen.choice(('HN', 'NH'))}C",
            num_blocks=RANDOM_BLOCKS,
            padding=0 if splits else chosen.choice((0, 8, 64)),
        )

    return family, how(), how(), chosen.randint(1, 260)
