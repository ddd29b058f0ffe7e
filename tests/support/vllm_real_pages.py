"""Moves a request between caches that vLLM itself makes; prints JSON. It runs in vLLM's own interpreter.

python vllm_real_pages.py FAMILY:TP,BLOCK_TOKENS,LAYOUT:TP,BLOCK_TOKENS,LAYOUT...

Of each pair the first engine reads from the second one. Specs are what vLLM's own layers return, or of its
classes; its planner groups them and places their pages, and its views are where the content is written and
looked for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvxferd.integrations.vllm.layout.facts import AttentionFacts
from kvxferd.integrations.vllm.layout.specs import read_groups, read_layers
from tests.support.vllm_pages import POISON, Cache, Family, How, PagedEngine, PagedRank, PlacedCache, pull

NUM_BLOCKS = 128
LENGTHS = (1, 7, 128, 259)
NUM_HEADS = 4


@dataclasses.dataclass(frozen=True)
class Kept:
    """What one of vLLM's layers keeps."""

    spec: Any
    backend: str
    parts: tuple[int, ...] = ()
    is_divided: bool = False


def config_of(block_tokens: int, cache_dtype: str) -> Any:
    """Return what vLLM's layers read of its configuration."""
    cache = SimpleNamespace(block_size=block_tokens, cache_dtype=cache_dtype)
    return SimpleNamespace(cache_config=cache, num_speculative_tokens=0)


def deepseek_v4(block_tokens: int, tp: int) -> dict[str, Kept]:
    """A layer of each ratio of compression, with `fp8_ds_mla`."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    config = config_of(block_tokens, "fp8_ds_mla")
    own = SimpleNamespace(
        cache_config=config.cache_config,
        kv_cache_dtype="fp8_ds_mla",
        kv_cache_torch_dtype=torch.uint8,
        head_dim=512,
        dtype=torch.uint8,
        window_size=128,
        block_size=64,
        bounded_replay=False,
        packed_bytes_per_token=584,
        packed_page_alignment=576,
        packed_block_stride_alignment=None,
    )
    window = Kept(
        DeepseekV4SWACache.get_kv_cache_spec(own, config), "DeepseekSparseSWAFlashMLABackend", (576, 8)
    )

    def main(ratio: int) -> Kept:
        layer = SimpleNamespace(**vars(own) | {"compress_ratio": ratio})
        return Kept(
            DeepseekV4Attention.get_kv_cache_spec(layer, config), "DeepseekV4FlashMLABackend", (576, 8)
        )

    def compressor(block_size: int, window: int, state_dim: int) -> Kept:
        layer = SimpleNamespace(
            block_size=block_size, state_dim=state_dim, dtype=torch.float32, sliding_window=window
        )
        return Kept(CompressorStateCache.get_kv_cache_spec(layer, config), "CompressorBackend")

    indexer = SimpleNamespace(**vars(own) | {"head_dim": 132, "compress_ratio": 4})
    return {
        "model.layers.0.attn": main(4),
        "model.layers.0.attn.indexer.k_cache": Kept(
            DeepseekV4IndexerCache.get_kv_cache_spec(indexer, config), "DeepseekV4IndexerBackend", (128, 4)
        ),
        "model.layers.0.attn.swa_cache": window,
        "model.layers.0.attn.compressor.state_cache": compressor(4, 8, 2048),
        "model.layers.0.attn.indexer.compressor.state_cache": compressor(4, 8, 512),
        "model.layers.1.attn": main(128),
        "model.layers.1.attn.swa_cache": window,
        "model.layers.1.attn.compressor.state_cache": compressor(8, 128, 1024),
    }


def glm(block_tokens: int, tp: int) -> dict[str, Kept]:
    """A latent, its indexer of pooled keys, and the ring of the open pool: the specs of GLM-5-Next.

    Its own file imports torchvision, which is not in every environment.
    """
    from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec, get_kv_quant_mode

    row = MLAAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=get_kv_quant_mode("fp8_ds_mla"),
        state_content_bytes=656,
    )
    pooled = MLAAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=4
    )
    ring = CircularBufferSpec(
        block_size=8, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16, dcp_sharded=False
    )
    return {
        "model.layers.0.self_attn.attn": Kept(row, "FlashMLASparseBackend"),
        "model.layers.0.self_attn.indexer.k_cache": Kept(pooled, "Glm5NextIndexerBackend", (128, 4)),
        "model.layers.0.self_attn.indexer.tail_cache": Kept(ring, "KpoolTailBackend"),
    }


def heads_beside(summary: Callable[[Any], dict[str, Kept]], block_tokens: int, tp: int) -> dict[str, Kept]:
    """Keys and values that tensor parallelism divides, and what `summary` keeps beside them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = config_of(block_tokens, "auto")
    sizes = {"num_kv_heads": max(1, NUM_HEADS // tp), "head_size": 16, "dtype": torch.bfloat16}
    main = Kept(FullAttentionSpec(block_size=block_tokens, **sizes), "FlashAttentionBackend", is_divided=True)
    return {"model.layers.0.attn": main} | summary(config)


def qwen_summary(config: Any) -> dict[str, Kept]:
    """Compressed keys and the ring of raw ones."""
    from vllm.models.qwen4_exp.common.qsa_cache import QSACompressedKeyCache, QSAKeyStateCache

    own = SimpleNamespace(
        cache_config=config.cache_config, head_size=128, dtype=torch.bfloat16, compress_ratio=8
    )
    return {
        "model.layers.0.attn.compressed": Kept(
            QSACompressedKeyCache.get_kv_cache_spec(own, config), "QSAStateBackend"
        ),
        "model.layers.0.attn.raw": Kept(QSAKeyStateCache.get_kv_cache_spec(own, config), "QSAStateBackend"),
    }


def minimax_summary(config: Any) -> dict[str, Kept]:
    """The indexer's keys: MiniMax-M3's spec, whose own file imports torchvision."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    block_tokens = config.cache_config.block_size
    keys = MLAAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    return {"model.layers.0.attn.indexer": Kept(keys, "MiniMaxM3IndexerBackend")}


def token_scales(block_tokens: int, tp: int) -> dict[str, Kept]:
    """Keys and values with a scale for each token."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    sizes = {"num_kv_heads": max(1, NUM_HEADS // tp), "head_size": 16, "dtype": torch.int8}
    mode = get_kv_quant_mode("int8_per_token_head")
    spec = FullAttentionSpec(block_size=block_tokens, kv_quant_mode=mode, **sizes)
    own = TritonAttentionBackend.customize_spec(spec)
    return {"model.layers.0.attn": Kept(own, "TritonAttentionBackend", is_divided=True)}


FAMILIES: dict[str, Callable[[int, int], dict[str, Kept]]] = {
    "deepseek-v4": deepseek_v4,
    "glm": glm,
    "qwen": partial(heads_beside, qwen_summary),
    "minimax": partial(heads_beside, minimax_summary),
    "token-scales": token_scales,
}


class Made:
    """The caches of one of an engine's ranks, as vLLM plans them."""

    def __init__(self, family: str, tp: int, block_tokens: int, layout: str) -> None:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.layout = KVCacheLayout[layout]
        self.kept = FAMILIES[family](block_tokens, tp)
        planning = SimpleNamespace(
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: self.layout,
                num_gpu_blocks_override=NUM_BLOCKS,
                prefix_cache_retention_interval=None,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            speculative_config=None,
        )
        specs = {name: kept.spec for name, kept in self.kept.items()}
        self.caches = get_kv_cache_config_from_groups(
            planning, get_kv_cache_groups(planning, specs), available_memory=1 << 40
        )
        read = SimpleNamespace(
            parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
            compilation_config=SimpleNamespace(
                static_forward_context={name: _layer(kept.backend) for name, kept in self.kept.items()}
            ),
        )
        self.groups = read_groups(self.caches, read)
        layers = read_layers(self.caches, read, is_conv_dim_first=True, fp8_dtype="float8_e4m3fn")
        self.facts = {layer.name: (layer.group, layer.cache) for layer in layers}

    def family(self, num_heads: int) -> Family:
        """Return the model's caches, with all heads."""
        caches = []
        for name, kept in self.kept.items():
            group, facts = self.facts[name]
            assert isinstance(facts, AttentionFacts)
            if kept.is_divided:
                facts = dataclasses.replace(facts, num_heads=num_heads)
            caches.append(Cache(name, group, kept.backend, facts, kept.parts, kept.is_divided))
        return Family("", tuple(caches), self.groups, num_heads)


def _layer(backend: str) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: type(backend, (), {}))


def rank_type_of(made: Made) -> type[PagedRank]:
    """Return ranks whose memory and places are vLLM's."""

    class VllmRank(PagedRank):
        def place(self) -> tuple[torch.Tensor, list[PlacedCache], dict[str, torch.Tensor]]:
            from vllm.v1.worker.utils import allocate_kv_cache

            views = allocate_kv_cache(made.caches, torch.device("cpu"), made.layout)
            (storage,) = {
                view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()
            }.values()
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            memory.fill_(POISON)
            placed = []
            for cache in self.caches:
                view = views[cache.name]
                block, slot, state, _ = (stride * view.element_size() for stride in view.stride())
                facts = made.facts[cache.name][1]
                assert isinstance(facts, AttentionFacts)
                start = view.data_ptr() - storage.data_ptr()
                placed.append(PlacedCache(cache, facts, start, block, (slot, state), view.shape[2], 1))
            return memory, placed, views

    return VllmRank


def engine_of(family: str, how: str) -> PagedEngine:
    """Return an engine of TP,BLOCK_TOKENS,LAYOUT."""
    tp, block_tokens, layout = how.split(",")
    made = Made(family, int(tp), int(block_tokens), layout)
    num_heads = NUM_HEADS if any(kept.is_divided for kept in made.kept.values()) else 0
    return PagedEngine(made.family(num_heads), How(tp=int(tp), num_blocks=NUM_BLOCKS), rank_type_of(made))


def moved_between(family: str, sink: str, source: str) -> dict[str, object]:
    """Return what is wrong after pulls of several lengths, the components that moved, and opaque backends."""
    engines = engine_of(family, sink), engine_of(family, source)
    wrong = {num_tokens: pull(*engines, num_tokens) for num_tokens in LENGTHS}
    derived = [held.derived for held in engines[0].ranks.values()]
    tensors = {f"{tensor.layer}.{tensor.component}" for one in derived for tensor in one.layout.tensors}
    return {
        "wrong": {num_tokens: found for num_tokens, found in wrong.items() if found},
        "moved": sorted(tensors),
        "opaque": sorted({name for one in derived for name in one.opaque_layers}),
    }


if __name__ == "__main__":
    if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is None:
        reply: object = {"missing": "this vLLM plans its pages elsewhere"}
    else:
        reply = {pair: moved_between(*pair.split(":")) for pair in sys.argv[1:]}
    print("ANSWER " + json.dumps(reply))
