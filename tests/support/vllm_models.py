"""Models that have presets, by the caches that vLLM 0.33 makes of them, on stand-ins.

Layers' names, classes of specs and backends are those of vLLM's own layers, and sizes those of the published
configurations. Nothing is taken from the presets. vLLM goes on to divide a group's layers into groups of
equally many, each with block lists of its own; here each kind is one group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from kvxferd.ids import Rank
from kvxferd.integrations.vllm.identity import engine_spec
from kvxferd.integrations.vllm.layout.derivation import derive_layout
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.layout.specs import read_layers, read_worker
from kvxferd.layout import EngineSpec, RankLayout
from tests.support.vllm_specs import Layer, Mixer, QuantMode, mamba_spec, spec, vllm_config

NUM_BLOCKS = 2
Caches = dict[str, tuple[Any, str]]  # spec and backend of each layer, by its name


@dataclasses.dataclass(frozen=True)
class VllmModel:
    """A model, by the caches of one of some tensor-parallel ranks."""

    caches: Callable[[int], Caches]
    num_layers: int
    num_kv_heads: int = 0  # 0: latents
    num_groups: int = 1  # of B and C
    has_mx_scales: bool = False

    def engine(self, name: str, tp: int) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
        """Return spec and layout of every rank, as the connector makes them, with `name` for fingerprint."""
        return {Rank(0, rank): self._rank(name, tp, rank) for rank in range(tp)}

    def _rank(self, name: str, tp: int, rank: int) -> tuple[EngineSpec, RankLayout]:
        made = self.caches(tp)
        config = vllm_config(
            {
                layer: Layer(backend=type(backend, (), {"__module__": "vllm.backends"}))
                for layer, (_, backend) in made.items()
            },
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            num_groups=self.num_groups,
            use_mla=self.num_kv_heads == 0,
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
        )
        caches = kv_cache_config({layer: one for layer, (one, _) in made.items()})
        layers = read_layers(
            caches,
            config,
            is_conv_dim_first=True,
            fp8_dtype="float8_e4m3fn",
            has_mx_scales=self.has_mx_scales,
        )
        place = {"tp_rank": rank, "pp_rank": 0}
        worker = read_worker(config, caches, **place, stage=(0, self.num_layers))
        tensors = {layer: tensor_of(one) for layer, (one, _) in made.items()}
        derived = derive_layout(tensors, layers, CacheGroups.from_vllm(config, caches), worker)
        assert derived.opaque_layers == {}
        declared = engine_spec(
            config, **place, generation="g", home="", fingerprint=name, publish_implies_ready=True
        )
        return declared, derived.layout


def kv_cache_config(specs: dict[str, Any]) -> Any:
    """Return vLLM's KVCacheConfig of layers whose blocks are used alike in one group."""
    by_key: dict[object, dict[str, Any]] = {}
    for layer, one in specs.items():
        by_key.setdefault(_group_key(one), {})[layer] = one
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec("UniformTypeKVCacheSpecs", kv_cache_specs=members), layer_names=list(members)
        )
        for members in by_key.values()
    ]
    return SimpleNamespace(
        num_blocks=NUM_BLOCKS, kv_cache_groups=groups, transfer_group_ids=tuple(range(len(groups)))
    )


def _group_key(one: Any) -> object:
    match type(one).__name__:
        case "MambaSpec":
            return one.shapes
        case "CircularBufferSpec":
            return "ring", one.block_size
        case "SlidingWindowSpec" | "SlidingWindowMLASpec":
            return "window", one.sliding_window, one.block_size
    return "full"


def tensor_of(one: Any) -> torch.Tensor:
    """Return the tensor that vLLM makes for a spec. Nothing is written to it."""
    if type(one).__name__ == "MambaSpec":
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(one.shapes, one.dtypes, strict=True)]
        return torch.empty(NUM_BLOCKS, 1, 1, sum(sizes), dtype=torch.int8)
    content = one.head_size + one.head_size_v
    if one.state_content_bytes is not None:
        content = one.state_content_bytes // one.dtype.itemsize
    states = one.block_size // one.tokens_per_state
    return torch.empty(NUM_BLOCKS, one.num_kv_heads, states, content, dtype=one.dtype)


def attention(
    layers: Iterable[int],
    num_heads: int,
    head_size: int,
    *,
    window: int = 0,
    backend: str = "FlashAttentionBackend",
) -> Caches:
    """Return keys and values of some layers, with the heads of one rank."""
    sizes = {"num_kv_heads": num_heads, "head_size": head_size, "head_size_v": head_size}
    one = spec("FullAttentionSpec", block_size=256, **sizes)
    if window:
        one = spec(
            "SlidingWindowSpec",
            sliding_window=window,
            extra_retained_tokens=0,
            dcp_sharded=False,
            block_size=256,
            **sizes,
        )
    return {f"model.layers.{layer}.self_attn.attn": (one, backend) for layer in layers}


def rows(
    layers: Iterable[int],
    rest: str,
    backend: str,
    size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    per_state: int = 1,
    record: str = "",
    window: int = 0,
    block_size: int = 256,
    kind: str = "MLAAttentionSpec",
) -> Caches:
    """Return a row of `size` elements for each state of some layers; `record`: its packing in vLLM."""
    fields: dict[str, Any] = {"num_kv_heads": 1, "head_size": size, "head_size_v": 0, "dtype": dtype}
    fields |= {"tokens_per_state": per_state, "block_size": block_size}
    if record:
        fields |= {"cache_dtype_str": record, "state_content_bytes": size}
        fields |= {"kv_quant_mode": QuantMode.FP8_PER_TENSOR, "head_size": 512, "dtype": torch.uint8}
    if window:
        kind = "SlidingWindowMLASpec"
        fields |= {"sliding_window": window, "extra_retained_tokens": 0}
    one = spec(kind, **fields)
    return {f"model.layers.{layer}.{rest}": (one, backend) for layer in layers}


def ring(
    layers: Iterable[int],
    rest: str,
    backend: str,
    size: int,
    num_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_slots: int = 1,
) -> Caches:
    """Return rings of rows of `size` elements."""
    fields = {"num_kv_heads": num_slots, "head_size": size, "head_size_v": 0, "dtype": dtype}
    one = spec("CircularBufferSpec", block_size=num_rows, **fields)
    return {f"model.layers.{layer}.{rest}": (one, backend) for layer in layers}


def states(
    layers: Iterable[int],
    rest: str,
    mixer: Mixer,
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    is_replicated: bool = False,
) -> Caches:
    """Return recurrent layers: the convolution's shape, in bfloat16, and the state's, in `dtype`."""
    dtypes = (torch.bfloat16, dtype)[: len(shapes)]
    one = mamba_spec(mixer, shapes, dtypes, tp_replicated=is_replicated)
    return {f"model.layers.{layer}.{rest}": (one, "") for layer in layers}


def _every(num_layers: int, period: int, *, but: bool = False) -> list[int]:
    """Return the last layer of each `period`, or all but those."""
    return [layer for layer in range(num_layers) if (layer % period == period - 1) is not but]


def _dense(num_layers: int, num_heads: int, head_size: int) -> VllmModel:
    return VllmModel(
        lambda tp: attention(range(num_layers), num_heads // tp, head_size), num_layers, num_heads
    )


def _windows(num_layers: int, period: int, num_heads: int, head_size: int, window: int) -> VllmModel:
    """Return layers with a window, and each last one of a period without."""
    full, sliding = _every(num_layers, period), _every(num_layers, period, but=True)
    return VllmModel(
        lambda tp: (
            attention(full, num_heads // tp, head_size)
            | attention(sliding, num_heads // tp, head_size, window=window)
        ),
        num_layers,
        num_heads,
    )


_LATENT = ("self_attn.attn", "FlashMLABackend", 576)
_INDEX_KEY = ("self_attn.indexer.k_cache", "DeepseekV32IndexerBackend", 132)
_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _nemotron_h(tp: int) -> Caches:
    full = [layer for layer, kind in enumerate(_NEMOTRON_H_8B) if kind == "*"]
    recurrent = [layer for layer, kind in enumerate(_NEMOTRON_H_8B) if kind == "M"]
    columns = 128 * 64 + 2 * 8 * 128
    return attention(full, 8 // tp, 128) | states(
        recurrent, "mixer", Mixer.MAMBA2, (columns // tp, 3), (128 // tp, 64, 128)
    )


def _delta_net(layers: Iterable[int], rest: str, num_key_heads: int, num_value_heads: int, tp: int) -> Caches:
    """Return gated delta nets with heads of 128."""
    columns = (2 * num_key_heads + num_value_heads) * 128
    state = (num_value_heads // tp, 128, 128)
    return states(layers, rest, Mixer.GDN_ATTN, (columns // tp, 3), state, dtype=torch.float32)


def _qwen3_next(tp: int) -> Caches:
    recurrent = _delta_net(_every(48, 4, but=True), "linear_attn", 16, 32, tp)
    return recurrent | attention(_every(48, 4), 2 // tp, 256)


def _deepseek_v4(tp: int) -> Caches:
    by_4, by_128 = range(2, 43, 2), range(3, 43, 2)
    main, compressor = ("attn", "DeepseekV4FlashMLABackend", 584), "CompressorBackend"
    window = {"record": "fp8_ds_mla", "window": 128, "block_size": 64}
    raw_of_4 = {"dtype": torch.float32, "window": 8, "block_size": 4}
    raw_of_128 = {"dtype": torch.float32, "window": 128, "block_size": 8}
    index_keys = ("attn.indexer.k_cache", "DeepseekV4IndexerBackend", 132)
    return (
        rows(by_4, *main, per_state=4, record="fp8_ds_mla")
        | rows(by_128, *main, per_state=128, record="fp8_ds_mla")
        | rows(by_4, *index_keys, dtype=torch.uint8, per_state=4)
        | rows(range(43), "attn.swa_cache", "DeepseekSparseSWAFlashMLABackend", 584, **window)
        | rows(by_4, "attn.compressor.state_cache", compressor, 2 * 2 * 512, **raw_of_4)
        | rows(by_4, "attn.indexer.compressor.state_cache", compressor, 2 * 2 * 128, **raw_of_4)
        | rows(by_128, "attn.compressor.state_cache", compressor, 2 * 512, **raw_of_128)
    )


def _deepseek_v41(tp: int) -> Caches:
    """Return what SM100 has."""
    by_2, by_1 = (2, 8, 14), (20,)
    index_keys = ("attn.indexer.k_cache", "DeepseekV41IndexerBackend", 132)
    window = {"record": "fp8_ds_mla", "window": 128, "block_size": 32}
    caches = rows(range(40), "attn.swa_cache", "DeepseekSparseSWAFlashMLABackend", 528, **window)
    for layers, ratio in ((by_2, 2), (by_1, 1)):
        caches |= rows(layers, "attn", "FlashMLAMegaAttnBackend", 528, per_state=ratio, record="fp8_ds_mla")
        caches |= rows(layers, *index_keys, dtype=torch.uint8, per_state=ratio)
    compressor = ring(
        by_2, "attn.compressor.state_cache", "CompressorBackend", 2 * 512, 8, dtype=torch.float32
    )
    return caches | compressor


def _glm_5_next(tp: int) -> Caches:
    full = _every(45, 4)
    index_keys = ("self_attn.indexer.k_cache", "Glm5NextIndexerBackend", 132)
    return (
        _delta_net(_every(45, 4, but=True), "self_attn", 64, 64, tp)
        | rows(full, "self_attn.attn", "FlashMLASparseBackend", 512)
        | rows(full, *index_keys, dtype=torch.uint8, per_state=16)
        | ring(full, "self_attn.indexer.tail_cache", "KpoolTailBackend", 128, 16, num_slots=2)
    )


def _minimax_m3(tp: int) -> Caches:
    sparse = range(3, 60)
    return (
        attention(range(3), 4 // tp, 128)
        | attention(sparse, 4 // tp, 128, backend="MiniMaxM3SparseBackend")
        | rows(sparse, "self_attn.attn.index_cache", "MiniMaxM3IndexerBackend", 128)
    )


def _qwen4(tp: int) -> Caches:
    full = _every(48, 4)
    convolution = states((1,), "ple", Mixer.SHORT_CONV, (4 * 2560, (4 - 1) * 3), is_replicated=True)
    return (
        _delta_net(_every(48, 4, but=True), "linear_attn", 16, 48, tp)
        | attention(full, 2 // tp, 256, backend="Qwen4ExpQSAFlashAttentionBackend")
        | rows(full, "self_attn.indexer.compressed_key_cache", "QSAStateBackend", 128, per_state=4)
        | ring(full, "self_attn.indexer.raw_key_cache", "QSAStateBackend", 128 + 3 * 4, 4)
        | convolution
    )


VLLM_MODELS = {
    "llama-3-8b": _dense(32, 8, 128),
    "llama-3-70b": _dense(80, 8, 128),
    "qwen3-8b": _dense(36, 8, 128),
    "deepseek-v3": VllmModel(lambda tp: rows(range(61), *_LATENT), 61),
    "deepseek-v3.2": VllmModel(
        lambda tp: rows(range(61), *_LATENT) | rows(range(61), *_INDEX_KEY, dtype=torch.uint8), 61
    ),
    "gemma-3-27b": _windows(62, 6, 16, 128, 1024),
    "gpt-oss-20b": _windows(24, 2, 8, 64, 128),
    "gpt-oss-120b": _windows(36, 2, 8, 64, 128),
    "nemotron-h-8b": VllmModel(_nemotron_h, 52, 8, num_groups=8),
    "qwen3-next-80b": VllmModel(_qwen3_next, 48, 2),
    "falcon-mamba-7b": VllmModel(
        lambda tp: states(range(64), "mixer", Mixer.MAMBA1, (8192 // tp, 3), (8192 // tp, 16)), 64
    ),
    "deepseek-v4-flash": VllmModel(_deepseek_v4, 43),
    "deepseek-v4.1-flash": VllmModel(_deepseek_v41, 40, has_mx_scales=True),
    "glm-5.3-flash": VllmModel(_glm_5_next, 45),
    "minimax-m3": VllmModel(_minimax_m3, 60, 4),
    "qwen3.8-flash-next": VllmModel(_qwen4, 48, 2),
}
